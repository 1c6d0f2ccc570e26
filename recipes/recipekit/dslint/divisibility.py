"""Check of the sizes that a layout's degrees must divide, and of the numbers of ranks that fit."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from ..spec.errors import Problem, sentences
from ..spec.mesh import Mesh, nearest_worlds
from .batch import batch_product_text
from .rules import RuleContext
from .shapes import common_divisors, dense_mask_bytes, read_config_size, sharded_sizes

# Half of an 80 GB device. The rest of such a row's memory exceeds the other half.
MAX_MASK_BYTES = 40_000_000_000


def check_divisibility(
    context: RuleContext, seq_len: int, model_config: dict[str, Any] | None, mesh: Mesh | None
) -> list[Problem]:
    """Report degrees that do not divide the model's sizes, and swap buffers that are too small.

    `seq_len` is 0 if the sequence length is unknown.
    """
    tp, pp, sp, ep = (context.degree(axis) for axis in ("tp", "pp", "sp", "ep"))
    return [
        *check_tp(tp, model_config, (context.world or 0) // (pp * sp)),
        *(_check_combinations(context) if not context.stock else []),
        *_check_experts(ep, model_config, mesh),
        *_check_sequence(sp, seq_len, model_config, mesh),
        *_check_swap_buffer(context, model_config, mesh),
    ]


def _check_combinations(context: RuleContext) -> list[Problem]:
    """Report sequence or expert parallelism combined with parallelism that shards the model."""
    found = []
    for axis, kind, beside in (
        ("sp", "sequence", ("tp", "pp")),
        ("ep", "expert", ("tp", "pp", "sp")),
    ):
        others = {other: context.degree(other) for other in beside if context.degree(other) > 1}
        if context.degree(axis) == 1 or not others:
            continue
        listed = " and ".join(f"{other} = {degree}" for other, degree in others.items())
        ways = " ".join(f"--{other} 1" for other in others)
        found.append(
            Problem(
                f"{axis} = {context.degree(axis)} with {listed}",
                f"{kind} parallelism can be combined only with data parallelism and ZeRO",
                f"use --{axis} 1, or {ways}",
            )
        )
    return found


def _check_experts(
    ep: int, model_config: dict[str, Any] | None, mesh: Mesh | None
) -> list[Problem]:
    """Report an expert-parallel degree that does not divide the model's number of experts."""
    experts = sharded_sizes(model_config, 0)["ep"]["experts"]
    if ep > 1 and model_config is not None and not experts:
        return [Problem(f"ep = {ep}", "this model has no experts", "use --ep 1")]
    if experts % ep == 0:
        return []
    nearest = _nearest_degree(ep, common_divisors(experts, mesh.dp if mesh is not None else 0))
    rule = f"does not divide the model's {experts} experts"
    return [Problem(f"ep = {ep}", rule, f"use --ep {nearest}")]


def _check_sequence(
    sp: int, seq_len: int, model_config: dict[str, Any] | None, mesh: Mesh | None
) -> list[Problem]:
    """Report a sequence-parallel degree that does not divide the heads or the sequence length."""
    numbers = sharded_sizes(model_config, seq_len)["sp"]
    broken = [
        f"the model's {number} {name}" if name != "seq_len" else f"seq_len = {number}"
        for name, number in numbers.items()
        if number % sp
    ]
    if not broken:
        return []
    nearest = _nearest_degree(
        sp, common_divisors(*numbers.values(), mesh.world if mesh is not None else 0)
    )
    rule = f"does not divide {' and '.join(broken)}"
    return [Problem(f"sp = {sp}", rule, f"use --sp {nearest}")]


def _nearest_degree(degree: int, fitting: list[int]) -> int:
    return min(fitting, key=lambda fit: abs(fit - degree))


def _check_swap_buffer(
    context: RuleContext, model_config: dict[str, Any] | None, mesh: Mesh | None
) -> list[Problem]:
    """Report an NVMe buffer that is smaller than a rank's part of the embedding."""
    if context.param_offload != "nvme" or mesh is None:
        return []
    key = "zero_optimization.offload_param.buffer_size"
    size = context.get(key, 100_000_000)
    hidden = read_config_size(model_config, "hidden_size", "n_embd", "d_model")
    largest = read_config_size(model_config, "vocab_size") * hidden
    part = math.ceil(largest / mesh.dp / mesh.sp / mesh.tp)
    if part <= size:
        return []
    rule = f"must be at least the {part} elements of the embedding that a rank holds"
    return [Problem(f"{key} = {size}", rule, f"set it to {part} or more")]


def check_tp(tp: int, model_config: dict[str, Any] | None, ranks: int = 0) -> list[Problem]:
    """Report a tensor-parallel degree that does not divide the model's sizes.

    The fix names degrees that also divide `ranks` (0: unknown).
    """
    shape = sharded_sizes(model_config, 0)["tp"]
    broken = [f"{number} {name}" for name, number in shape.items() if tp > 1 and number % tp]
    if not broken:
        return []
    fits = [str(degree) for degree in common_divisors(*shape.values(), ranks) if degree < tp]
    return [
        Problem(
            f"tp = {tp}",
            f"does not divide the model's {', '.join(broken)}",
            f"use --tp {' or '.join(fits)}",
        )
    ]


def suggest_world_sizes(
    found: list[Problem],
    world: int,
    degree_product: int,
    check_on: Callable[[int | None], list[Problem]],
) -> list[Problem]:
    """Return the problems `found`, and add numbers of ranks that fit to one of them.

    The numbers are added to the last problem that a different number of ranks would fix. They are
    the nearest numbers of ranks that fix all such problems. `check_on(ranks)` returns the problems
    for that number of ranks, and `check_on(None)` returns the problems that no number of ranks
    fixes. `degree_product` is the product of the degrees.
    """
    if not found:
        return []
    rules = lambda problems: {(problem.where, problem.rule) for problem in problems}  # noqa: E731
    anywhere = rules(found) & rules(check_on(None))
    mended = [problem for problem in found if (problem.where, problem.rule) not in anywhere]
    worlds = (
        nearest_worlds(world, degree_product, lambda ranks: rules(check_on(ranks)) <= anywhere)
        if mended
        else []
    )
    if not worlds:
        return found
    ranks = f"{' or '.join(map(str, worlds))} rank{'s' if worlds != [1] else ''}"
    named = dataclasses.replace(
        mended[-1], fix=sentences(mended[-1].fix, f"the recipe fits {ranks} without changes")
    )
    return [named if problem == mended[-1] else problem for problem in found]


def check_pipeline(
    pp: int,
    dualpipev: bool,
    global_batch: int | None,
    micro_batch: int | None,
    num_layers: int,
    mesh: Mesh | None,
) -> list[Problem]:
    """Report more stages than layers, and too few micro-batches for the schedule.

    `num_layers` is 0 if the number of layers is unknown.
    """
    found = []
    if dualpipev and pp == 1:
        found.append(
            Problem(
                "pipeline_schedule = dualpipev",
                "requires a pipeline, but pp = 1",
                "use --pp 2 or more, or leave it out",
            )
        )
    found += _check_stages(pp, dualpipev, num_layers, mesh)
    if dualpipev and pp > 1 and mesh is not None and global_batch and micro_batch:
        found += _check_dualpipev_batch(pp, global_batch, micro_batch, mesh)
    return found


def _check_stages(pp: int, dualpipev: bool, num_layers: int, mesh: Mesh | None) -> list[Problem]:
    """Report more pipeline stages than layers."""
    each = 2 if dualpipev else 1  # number of stages on one rank
    if not (pp > 1 and 0 < num_layers < each * pp):
        return []
    ranks = mesh.world // mesh.tp // mesh.sp if mesh is not None else 0

    def most(each: int) -> int:
        """Return the largest degree that gives every stage at least one layer."""
        degrees = [degree for degree in range(1, num_layers // each + 1) if ranks % degree == 0]
        return max(degrees, default=1)

    if dualpipev:
        ways = [f"--pp {most(2)}"] if most(2) > 1 else []
        ways.append(f"--pp {most(1)} --pipeline_schedule 1f1b")
    else:
        ways = [f"--pp {most(1)}"]
    two = " (two on each rank under dualpipev)" if dualpipev else ""
    rule = f"makes {each * pp} stages{two}, but the model has only {num_layers} layers"
    return [Problem(f"pp = {pp}", rule, f"use {' or '.join(ways)}")]


def _check_dualpipev_batch(
    pp: int, global_batch: int, micro_batch: int, mesh: Mesh
) -> list[Problem]:
    """Report a global batch with fewer micro-batches than dualpipev requires."""
    rows, least = mesh.dp * micro_batch, 2 * pp
    steps, rest = divmod(global_batch, rows)
    if rest or steps >= least:
        return []
    rule = (
        f"{batch_product_text(mesh.dp, micro_batch, None)} leaves {steps} micro-batches in a step,"
        f" but dualpipev requires 2 * pp = {least}"
    )
    ways = [f"global_batch {least * rows}"]
    if global_batch % (least * mesh.dp) == 0:
        ways.append(f"micro_batch {global_batch // (least * mesh.dp)}")
    ways.append("--pipeline_schedule 1f1b")
    where = f"global_batch (train_batch_size) = {global_batch}"
    return [Problem(where, rule, f"use {', or '.join(ways)}")]


def check_dense_mask(attention: str, seq_len: int, rows: int, width: int) -> list[Problem]:
    """Report rows so long that the mask of their packed documents exceeds the memory limit."""
    size = dense_mask_bytes(attention, rows, seq_len, width)
    if size <= MAX_MASK_BYTES:
        return []
    fits = max(
        (
            1 << power
            for power in range(seq_len.bit_length())
            if dense_mask_bytes(attention, rows, 1 << power, width) <= MAX_MASK_BYTES
        ),
        default=1,
    )
    most = f"the limit is {MAX_MASK_BYTES / 1e9:.0f} GB"
    rule = (
        f"the dense mask that separates packed documents takes {size / 1e9:.1f} GB on every rank,"
        f" but {most}"
    )
    fix = f"use --seq_len {fits}, or --attention varlen, which requires no mask"
    where = f"seq_len = {seq_len} with micro_batch = {rows} and attention = {attention}"
    return [Problem(where, rule, fix)]
