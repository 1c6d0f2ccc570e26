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
    degrees: dict[str, int],
    facts: Facts,
    seq_len: int,
    model_config: dict[str, Any] | None,
    mesh: Mesh | None,
) -> list[Problem]:
    """Refuses parallel degrees that do not divide the model, and parameters larger than their swap
    buffer.

    `seq_len` is 0 if it is not known.
    """
    found = []
    whole = divisible(model_config, seq_len)
    experts = whole["ep"]["experts"]
    tp, sp, ep = degrees["tp"], degrees["sp"], degrees["ep"]
    found += check_tp(tp, model_config, (facts.world or 0) // (degrees["pp"] * sp))
    for axis, kind, beside in (
        (("sp", "sequence", ("tp", "pp")), ("ep", "expert", ("tp", "pp", "sp")))
        if not facts.stock
        else ()
    ):
        others = {other: degrees[other] for other in beside if degrees[other] > 1}
        if degrees[axis] > 1 and others:
            rule = f"{kind} parallelism can be combined only with data parallelism and ZeRO"
            fix = f"use --{axis} 1, or {' '.join(f'--{other} 1' for other in others)}"
            found.append(
                Problem(
                    f"{axis} = {degrees[axis]} with"
                    f" {' and '.join(f'{other} = {degree}' for other, degree in others.items())}",
                    rule,
                    fix,
                )
            )
    if ep > 1 and model_config is not None and not experts:
        found.append(Problem(f"ep = {ep}", "this model has no experts", "use --ep 1"))
    elif experts % ep:
        nearest = min(
            divisors(experts, mesh.dp if mesh is not None else 0),
            key=lambda degree: abs(degree - ep),
        )
        found.append(
            Problem(
                f"ep = {ep}",
                f"does not divide the model's {experts} experts",
                f"use --ep {nearest}",
            )
        )
    broken = [
        f"the model's {number} {name}" if name != "seq_len" else f"seq_len = {number}"
        for name, number in whole["sp"].items()
        if number % sp
    ]
    if broken:
        nearest = min(
            divisors(*whole["sp"].values(), mesh.world if mesh is not None else 0),
            key=lambda degree: abs(degree - sp),
        )
        found.append(
            Problem(f"sp = {sp}", f"does not divide {' and '.join(broken)}", f"use --sp {nearest}")
        )
    if facts.param_offload == "nvme" and mesh is not None:
        key = "zero_optimization.offload_param.buffer_size"
        largest = shape_of(model_config, "vocab_size") * shape_of(
            model_config, "hidden_size", "n_embd", "d_model"
        )
        part = math.ceil(largest / mesh.dp / mesh.sp / mesh.tp)
        if part > (size := facts.get(key, 100_000_000)):
            found.append(
                Problem(
                    f"{key} = {size}",
                    f"must be at least the {part} elements of the embedding that a rank holds",
                    f"set it to {part} or more",
                )
            )
    return found


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
    each = 2 if dualpipev else 1  # stages on one rank
    if dualpipev and pp == 1:
        found.append(
            Problem(
                "pipeline_schedule = dualpipev",
                "requires a pipeline, but pp = 1",
                "use --pp 2 or more, or leave it out",
            )
        )
    if pp > 1 and 0 < layers < each * pp:
        ranks = mesh.world // mesh.tp // mesh.sp if mesh is not None else 0
        fits = {
            each: max(
                (degree for degree in range(1, layers // each + 1) if ranks % degree == 0),
                default=1,
            )
            for each in (1, 2)
        }
        ways = [f"--pp {fits[2]}"] if dualpipev and fits[2] > 1 else []
        ways += [f"--pp {fits[1]} --pipeline_schedule 1f1b" if dualpipev else f"--pp {fits[1]}"]
        rule = (
            f"makes {each * pp} stages{' (two on each rank under dualpipev)' if dualpipev else ''},"
            f" but the model has only {layers} layers"
        )
        found.append(Problem(f"pp = {pp}", rule, f"use {' or '.join(ways)}"))
    if (
        dualpipev
        and pp > 1
        and mesh is not None
        and total
        and micro
        and total % (rows := mesh.dp * micro) == 0
        and total // rows < 2 * pp
    ):
        rule = (
            f"{product_of(mesh.dp, micro, None)} leaves {total // rows} micro-batches in a step,"
            f" but dualpipev requires 2 * pp = {2 * pp}"
        )
        fix = f"use global_batch {2 * pp * rows}"
        fix += (
            f", or micro_batch {total // (2 * pp * mesh.dp)}"
            if total % (2 * pp * mesh.dp) == 0
            else ""
        )
        found.append(
            Problem(
                f"global_batch (train_batch_size) = {total}",
                rule,
                f"{fix}, or --pipeline_schedule 1f1b",
            )
        )
    return found


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
