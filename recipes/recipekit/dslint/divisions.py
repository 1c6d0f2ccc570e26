"""Checks what the degrees of a layout have to divide, and names the numbers of ranks that fit."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from ..spec.mesh import Mesh, nearest_worlds
from ..spec.refusal import Problem, sentences
from .batch import product_of
from .rules import Facts
from .shapes import divisible, divisors, mask_bytes, shape_of

# half of an 80 GB device; everything else that such a row needs exceeds the other half
MOST_MASK_BYTES = 40_000_000_000


def check_divisions(
    facts: Facts, seq_len: int, model_config: dict[str, Any] | None, mesh: Mesh | None
) -> list[Problem]:
    """Refuses parallel degrees that do not divide the model, and parameters larger than their swap
    buffer.

    `seq_len` is 0 if it is not known.
    """
    tp, pp, sp, ep = (facts.degree(axis) for axis in ("tp", "pp", "sp", "ep"))
    return [
        *check_tp(tp, model_config, (facts.world or 0) // (pp * sp)),
        *(_check_combinations(facts) if not facts.stock else []),
        *_check_experts(ep, model_config, mesh),
        *_check_sequence(sp, seq_len, model_config, mesh),
        *_check_swap_buffer(facts, model_config, mesh),
    ]


def _check_combinations(facts: Facts) -> list[Problem]:
    """Refuse sequence and expert parallelism together with parallelisms that divide the model."""
    found = []
    for axis, kind, beside in (
        ("sp", "sequence", ("tp", "pp")),
        ("ep", "expert", ("tp", "pp", "sp")),
    ):
        others = {other: facts.degree(other) for other in beside if facts.degree(other) > 1}
        if facts.degree(axis) == 1 or not others:
            continue
        listed = " and ".join(f"{other} = {degree}" for other, degree in others.items())
        ways = " ".join(f"--{other} 1" for other in others)
        found.append(
            Problem(
                f"{axis} = {facts.degree(axis)} with {listed}",
                f"{kind} parallelism can be combined only with data parallelism and ZeRO",
                f"use --{axis} 1, or {ways}",
            )
        )
    return found


def _check_experts(
    ep: int, model_config: dict[str, Any] | None, mesh: Mesh | None
) -> list[Problem]:
    """Refuse an expert-parallel degree that does not divide the model's experts."""
    experts = divisible(model_config, 0)["ep"]["experts"]
    if ep > 1 and model_config is not None and not experts:
        return [Problem(f"ep = {ep}", "this model has no experts", "use --ep 1")]
    if experts % ep == 0:
        return []
    nearest = _nearest(ep, divisors(experts, mesh.dp if mesh is not None else 0))
    rule = f"does not divide the model's {experts} experts"
    return [Problem(f"ep = {ep}", rule, f"use --ep {nearest}")]


def _check_sequence(
    sp: int, seq_len: int, model_config: dict[str, Any] | None, mesh: Mesh | None
) -> list[Problem]:
    """Refuse a sequence-parallel degree that does not divide the heads or the sequence."""
    numbers = divisible(model_config, seq_len)["sp"]
    broken = [
        f"the model's {number} {name}" if name != "seq_len" else f"seq_len = {number}"
        for name, number in numbers.items()
        if number % sp
    ]
    if not broken:
        return []
    nearest = _nearest(sp, divisors(*numbers.values(), mesh.world if mesh is not None else 0))
    rule = f"does not divide {' and '.join(broken)}"
    return [Problem(f"sp = {sp}", rule, f"use --sp {nearest}")]


def _nearest(degree: int, fitting: list[int]) -> int:
    return min(fitting, key=lambda fit: abs(fit - degree))


def _check_swap_buffer(
    facts: Facts, model_config: dict[str, Any] | None, mesh: Mesh | None
) -> list[Problem]:
    """Refuse an NVMe buffer that is smaller than a rank's part of the embedding."""
    if facts.param_offload != "nvme" or mesh is None:
        return []
    key = "zero_optimization.offload_param.buffer_size"
    size = facts.get(key, 100_000_000)
    hidden = shape_of(model_config, "hidden_size", "n_embd", "d_model")
    largest = shape_of(model_config, "vocab_size") * hidden
    part = math.ceil(largest / mesh.dp / mesh.sp / mesh.tp)
    if part <= size:
        return []
    rule = f"must be at least the {part} elements of the embedding that a rank holds"
    return [Problem(f"{key} = {size}", rule, f"set it to {part} or more")]


def check_tp(tp: int, model_config: dict[str, Any] | None, ranks: int = 0) -> list[Problem]:
    """Refuses a tensor-parallel degree that does not divide the model; the fix names degrees that
    also divide `ranks` (0: not known).
    """
    shape = divisible(model_config, 0)["tp"]
    broken = [f"{number} {name}" for name, number in shape.items() if tp > 1 and number % tp]
    if not broken:
        return []
    fits = [str(degree) for degree in divisors(*shape.values(), ranks) if degree < tp]
    return [
        Problem(
            f"tp = {tp}",
            f"does not divide the model's {', '.join(broken)}",
            f"use --tp {' or '.join(fits)}",
        )
    ]


def name_worlds(
    found: list[Problem], world: int, step: int, check_on: Callable[[int | None], list[Problem]]
) -> list[Problem]:
    """Returns the problems `found`; the last one that another number of ranks would mend names the
    nearest numbers that mend all.

    `check_on(ranks)` returns the problems on that number of ranks, `check_on(None)` those that no
    number mends; `step` is the product of the degrees.
    """
    if not found:
        return []
    rules = lambda problems: {(problem.where, problem.rule) for problem in problems}  # noqa: E731
    anywhere = rules(found) & rules(check_on(None))
    mended = [problem for problem in found if (problem.where, problem.rule) not in anywhere]
    worlds = (
        nearest_worlds(world, step, lambda ranks: rules(check_on(ranks)) <= anywhere)
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
    pp: int, dualpipev: bool, total: int | None, micro: int | None, layers: int, mesh: Mesh | None
) -> list[Problem]:
    """Refuses more stages than layers (0: not known), and too few micro-batches for the schedule;
    `total` is the global batch.
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
    found += _check_stages(pp, dualpipev, layers, mesh)
    if dualpipev and pp > 1 and mesh is not None and total and micro:
        found += _check_dualpipev_batch(pp, total, micro, mesh)
    return found


def _check_stages(pp: int, dualpipev: bool, layers: int, mesh: Mesh | None) -> list[Problem]:
    """Refuse more pipeline stages than layers."""
    each = 2 if dualpipev else 1  # stages on one rank
    if not (pp > 1 and 0 < layers < each * pp):
        return []
    ranks = mesh.world // mesh.tp // mesh.sp if mesh is not None else 0

    def most(each: int) -> int:
        """Return the largest degree whose stages have a layer each."""
        degrees = [degree for degree in range(1, layers // each + 1) if ranks % degree == 0]
        return max(degrees, default=1)

    if dualpipev:
        ways = [f"--pp {most(2)}"] if most(2) > 1 else []
        ways.append(f"--pp {most(1)} --pipeline_schedule 1f1b")
    else:
        ways = [f"--pp {most(1)}"]
    two = " (two on each rank under dualpipev)" if dualpipev else ""
    rule = f"makes {each * pp} stages{two}, but the model has only {layers} layers"
    return [Problem(f"pp = {pp}", rule, f"use {' or '.join(ways)}")]


def _check_dualpipev_batch(pp: int, total: int, micro: int, mesh: Mesh) -> list[Problem]:
    """Refuse a global batch with fewer micro-batches than dualpipev requires."""
    rows, least = mesh.dp * micro, 2 * pp
    steps, rest = divmod(total, rows)
    if rest or steps >= least:
        return []
    rule = (
        f"{product_of(mesh.dp, micro, None)} leaves {steps} micro-batches in a step, but dualpipev"
        f" requires 2 * pp = {least}"
    )
    ways = [f"global_batch {least * rows}"]
    if total % (least * mesh.dp) == 0:
        ways.append(f"micro_batch {total // (least * mesh.dp)}")
    ways.append("--pipeline_schedule 1f1b")
    where = f"global_batch (train_batch_size) = {total}"
    return [Problem(where, rule, f"use {', or '.join(ways)}")]


def check_dense_mask(attention: str, seq_len: int, rows: int, width: int) -> list[Problem]:
    """Refuses a row so long that the mask of its packed documents leaves no room on a device."""
    size = mask_bytes(attention, rows, seq_len, width)
    if size <= MOST_MASK_BYTES:
        return []
    fits = max(
        (
            1 << power
            for power in range(seq_len.bit_length())
            if mask_bytes(attention, rows, 1 << power, width) <= MOST_MASK_BYTES
        ),
        default=1,
    )
    most = f"the limit is {MOST_MASK_BYTES / 1e9:.0f} GB"
    rule = (
        f"the dense mask that separates packed documents takes {size / 1e9:.1f} GB on every rank,"
        f" but {most}"
    )
    fix = f"use --seq_len {fits}, or --attention varlen, which requires no mask"
    where = f"seq_len = {seq_len} with micro_batch = {rows} and attention = {attention}"
    return [Problem(where, rule, fix)]
