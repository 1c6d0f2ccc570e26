"""Checks the arithmetic of the batch: global_batch = dp * micro_batch * accumulation."""

from typing import Any

from ..spec.mesh import Mesh
from ..spec.phases import Ramp, written
from ..spec.refusal import FAILS, Problem
from .values import shown


def check_batch(
    clean: dict[str, Any],
    total: int | None,
    micro: int | None,
    mesh: Mesh | None,
    ramp: Ramp | None,
    least: int,
) -> list[Problem]:
    """Refuses numbers of rows that do not divide: rows of a step = data-parallel ranks * rows of a
    forward pass * accumulated micro-batches.

    `total` (rows of a step) and `micro` (rows of a forward pass) are the JSON's numbers or, with
    the `ramp` of a recipe, the recipe's, whose names the messages then use. `least`: micro-batches
    that a step of the ramp has at least.
    """
    changed = (
        check_ramp(clean, ramp, micro, mesh.dp if mesh is not None else 0, least)
        if ramp is not None
        else []
    )
    return _check_first(clean, total, micro, mesh, ramp is not None) + changed


def _check_first(
    clean: dict[str, Any], total: int | None, micro: int | None, mesh: Mesh | None, of_recipe: bool
) -> list[Problem]:
    """Checks the global batch of the first step, which is that of all without a ramp."""
    steps = clean.get("gradient_accumulation_steps", "auto")
    steps = None if steps == "auto" else steps
    if (
        total is not None
        and mesh is None
        and not of_recipe
        and micro
        and steps
        and total % (micro * steps)
    ):
        rule = (
            f"is not divisible by micro_batch {micro} * {steps} micro-batches = {micro * steps} on"
            " any number of ranks"
        )
        return [
            Problem(
                f"train_batch_size = {total}",
                rule,
                f"set train_batch_size to {_near(total, micro * steps)}, or delete one of the three"
                " keys",
                FAILS,
            )
        ]
    if total is None or mesh is None or min(total, micro or 1) < 1:
        return []
    dp, literal = mesh.dp, {key for key, value in clean.items() if value != "auto"}
    all_rows, one = (
        ("train_batch_size", "train_micro_batch_size_per_gpu")
        if not of_recipe
        else ("global_batch", "micro_batch")
    )
    where = f"{all_rows} = {total}" if not of_recipe else f"{all_rows} (train_batch_size) = {total}"
    if micro is None:
        parts = dp * (steps or 1)
        if total % parts:
            return [
                Problem(
                    f"train_batch_size = {total}",
                    f"is not divisible by {product_of(dp, None, steps)} = {parts}",
                    f"set train_batch_size to {_near(total, parts)}",
                    FAILS,
                )
            ]
        return []
    if total % (dp * micro):
        ways = [f"{all_rows} {_near(total, dp * micro)}"]
        # searched from a bound, since a mistyped micro-batch may have any number of digits
        if total % dp == 0:
            fitting = next(
                rows for rows in range(min(micro, 100_000), 0, -1) if total % (dp * rows) == 0
            )
            ways.append(f"{one} {fitting}")
        if "train_batch_size" in literal and "train_micro_batch_size_per_gpu" not in literal:
            ways.reverse()  # the JSON's own number stays
        return [
            Problem(
                where,
                f"is not divisible by {product_of(dp, micro, None)} = {dp * micro}",
                f"use {', or '.join(ways)}",
                FAILS,
            )
        ]
    if steps is not None and total != dp * micro * steps:
        rule = (
            f"{product_of(dp, micro, steps)} = {dp * micro * steps}, but a step must have {total}"
            " rows"
        )
        auto = (
            f'set gradient_accumulation_steps to "auto" or {total // (dp * micro)}'
            if of_recipe
            else f"set gradient_accumulation_steps to {total // (dp * micro)}"
        )
        rows = f"use {all_rows} {dp * micro * steps}"
        ways = (
            [rows, auto]
            if "train_micro_batch_size_per_gpu" in literal and "train_batch_size" not in literal
            else [auto, rows]
        )  # the JSON's own number stays
        fix = ", or ".join(ways) + (
            f", or {one} {total // (dp * steps)}" if total % (dp * steps) == 0 else ""
        )
        return [Problem(f"gradient_accumulation_steps = {steps}", rule, fix, FAILS)]
    return []


def check_ramp(
    clean: dict[str, Any], ramp: Ramp, micro: int | None, dp: int, least: int
) -> list[Problem]:
    """Refuses global batches of a table that do not divide, or whose steps have fewer micro-batches
    than the `least`: all in one problem.

    `dp` is 0 where the ranks are not known.
    """
    changes, steps = ramp.table[1:], clean.get("gradient_accumulation_steps", "auto")
    where = f"batch_ramp = {written(changes)}"
    if changes and steps != "auto":
        return [
            Problem(
                where,
                f"its steps cannot all use the JSON's gradient_accumulation_steps = {steps}",
                'set gradient_accumulation_steps to "auto" in the JSON',
            )
        ]
    each = dp * (micro or 0)
    if each < 1:
        return []
    # the nearest, of two the larger
    fitting = {rows: max(least, (rows + each // 2) // each) * each for _, rows in changes}
    rules = []
    if odd := [(first, rows) for first, rows in changes if rows % each]:
        rules.append(f"{_listed(odd)} do not divide by {product_of(dp, micro, None)} = {each}")
    if few := [
        (first, rows) for first, rows in changes if rows % each == 0 and rows // each < least
    ]:
        rules.append(
            f"{_listed(few)} give fewer than the 2 * pp = {least} micro-batches that dualpipev"
            " requires"
        )
    fix = (
        "use --batch_ramp"
        f' "{written((first, fitting[rows] if rows % each or rows // each < least else rows) for first, rows in changes)}"'
    )
    return [Problem(where, ", and ".join(rules), fix)] if rules else []


def _listed(changes: list[tuple[int, int]]) -> str:
    return " and ".join(f"{rows} rows from step {first} on" for first, rows in changes)


def no_batch(config: dict[str, Any], filled_by: str) -> list[Problem]:
    """Refuses a JSON without a batch size, which DeepSpeed alone needs; a recipe and accelerate
    bring their own.
    """
    if (
        filled_by == "accelerate"
        or {"train_batch_size", "train_micro_batch_size_per_gpu"} & config.keys()
    ):
        return []
    value = (
        shown(config["gradient_accumulation_steps"])
        if "gradient_accumulation_steps" in config
        else "(missing)"
    )
    where = (
        f"{'gradient_accumulation_steps' if 'gradient_accumulation_steps' in config else 'train_batch_size'}"
        f" = {value}"
    )
    rule = "DeepSpeed requires train_batch_size or train_micro_batch_size_per_gpu"
    return [
        Problem(
            where,
            rule,
            (
                'add "train_micro_batch_size_per_gpu": 1'
                if not filled_by
                else 'add "train_micro_batch_size_per_gpu": "auto"'
            ),
            FAILS,
        )
    ]


def product_of(dp: int, micro: int | None, steps: int | None) -> str:
    parts = [f"{dp} data-parallel rank{'s' if dp > 1 else ''}"]
    parts += [f"micro_batch {micro}"] if micro is not None else []
    parts += [f"{steps} micro-batches"] if steps is not None else []
    return " * ".join(parts)


def _near(number: int, divisor: int) -> str:
    """Names the multiples of `divisor` on both sides of `number`."""
    low = number // divisor * divisor
    return f"{low} or {low + divisor}" if low else str(divisor)
