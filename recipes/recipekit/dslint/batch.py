"""Checks the arithmetic of the batch: global_batch = dp * micro_batch * accumulation."""

from dataclasses import dataclass
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
    ramp: Ramp | None = None,
    least: int = 1,
) -> list[Problem]:
    """Refuses numbers of rows that do not divide: rows of a step = data-parallel ranks * rows of a
    forward pass * accumulated micro-batches.

    `total` (rows of a step) and `micro` (rows of a forward pass) are the JSON's numbers or, with
    the `ramp` of a recipe, the recipe's, whose names the messages then use. `least`: micro-batches
    that a step of the ramp has at least.
    """
    of_recipe = ramp is not None
    steps = _accumulated(clean)
    if total is None:
        first = []
    elif mesh is None:
        first = [] if of_recipe else _check_on_any_ranks(total, micro, steps)
    elif min(total, micro or 1) < 1:
        first = []
    elif micro is None:
        first = _check_without_micro(total, mesh.dp, steps)
    else:
        first = _check_product(Batch(total, micro, steps, mesh.dp, of_recipe, _literals(clean)))
    if ramp is None:
        return first
    return first + check_ramp(clean, ramp, micro, mesh.dp if mesh is not None else 0, least)


def _accumulated(clean: dict[str, Any]) -> int | None:
    """Return the JSON's number of accumulated micro-batches; None if it leaves the number open."""
    steps = clean.get("gradient_accumulation_steps", "auto")
    return None if steps == "auto" else steps


def _literals(clean: dict[str, Any]) -> frozenset[str]:
    return frozenset(key for key, value in clean.items() if value != "auto")


@dataclass(frozen=True)
class Batch:
    """The numbers of the first step, which are the numbers of all steps without a ramp."""

    total: int  # rows of a step
    micro: int  # rows of a forward pass
    steps: int | None  # accumulated micro-batches, None if left open
    dp: int
    of_recipe: bool  # the messages name the recipe's fields, not the JSON's keys
    literals: frozenset[str]  # keys that the JSON sets to numbers

    @property
    def total_name(self) -> str:
        return "global_batch" if self.of_recipe else "train_batch_size"

    @property
    def micro_name(self) -> str:
        return "micro_batch" if self.of_recipe else "train_micro_batch_size_per_gpu"


def _check_on_any_ranks(total: int, micro: int | None, steps: int | None) -> list[Problem]:
    """Refuse three numbers of a JSON that no number of ranks makes right."""
    if not micro or not steps or total % (micro * steps) == 0:
        return []
    rule = (
        f"is not divisible by micro_batch {micro} * {steps} micro-batches = {micro * steps} on any"
        " number of ranks"
    )
    near = _near(total, micro * steps)
    fix = f"set train_batch_size to {near}, or delete one of the three keys"
    return [Problem(f"train_batch_size = {total}", rule, fix, FAILS)]


def _check_without_micro(total: int, dp: int, steps: int | None) -> list[Problem]:
    """Refuse a global batch that the ranks and the accumulation do not divide."""
    parts = dp * (steps or 1)
    if total % parts == 0:
        return []
    rule = f"is not divisible by {product_of(dp, None, steps)} = {parts}"
    fix = f"set train_batch_size to {_near(total, parts)}"
    return [Problem(f"train_batch_size = {total}", rule, fix, FAILS)]


def _check_product(batch: Batch) -> list[Problem]:
    """Refuse a global batch that is not ranks * micro-batch * accumulation."""
    total, micro, steps, dp = batch.total, batch.micro, batch.steps, batch.dp
    if total % (dp * micro):
        alias = " (train_batch_size)" if batch.of_recipe else ""
        rule = f"is not divisible by {product_of(dp, micro, None)} = {dp * micro}"
        fix = f"use {', or '.join(_ways_to_divide(batch))}"
        return [Problem(f"{batch.total_name}{alias} = {total}", rule, fix, FAILS)]

    if steps is not None and total != dp * micro * steps:
        product = f"{product_of(dp, micro, steps)} = {dp * micro * steps}"
        rule = f"{product}, but a step must have {total} rows"
        fix = ", or ".join(_ways_to_accumulate(batch, steps))
        return [Problem(f"gradient_accumulation_steps = {steps}", rule, fix, FAILS)]
    return []


def _ways_to_divide(batch: Batch) -> list[str]:
    """Return the flags that make the global batch divisible; the JSON's own number stays."""
    total, micro, dp = batch.total, batch.micro, batch.dp
    ways = [f"{batch.total_name} {_near(total, dp * micro)}"]
    if total % dp == 0:
        # searched from a bound, since a mistyped micro-batch may have any number of digits
        sizes = range(min(micro, 100_000), 0, -1)
        fitting = next(rows for rows in sizes if total % (dp * rows) == 0)
        ways.append(f"{batch.micro_name} {fitting}")
    if (
        "train_batch_size" in batch.literals
        and "train_micro_batch_size_per_gpu" not in batch.literals
    ):
        ways.reverse()
    return ways


def _ways_to_accumulate(batch: Batch, steps: int) -> list[str]:
    """Return the ways to make the product equal the global batch; the JSON's own number stays."""
    total, micro, dp = batch.total, batch.micro, batch.dp
    auto = '"auto" or ' if batch.of_recipe else ""
    ways = [
        f"set gradient_accumulation_steps to {auto}{total // (dp * micro)}",
        f"use {batch.total_name} {dp * micro * steps}",
    ]
    if (
        "train_micro_batch_size_per_gpu" in batch.literals
        and "train_batch_size" not in batch.literals
    ):
        ways.reverse()
    if total % (dp * steps) == 0:
        ways.append(f"{batch.micro_name} {total // (dp * steps)}")
    return ways


def check_ramp(
    clean: dict[str, Any], ramp: Ramp, micro: int | None, dp: int, least: int
) -> list[Problem]:
    """Refuses global batches of a table that do not divide, or whose steps have fewer micro-batches
    than the `least`: all in one problem.

    `dp` is 0 where the ranks are not known.
    """
    changes, steps = ramp.table[1:], _accumulated(clean)
    where = f"batch_ramp = {written(changes)}"
    if changes and steps is not None:
        rule = f"its steps cannot all use the JSON's gradient_accumulation_steps = {steps}"
        fix = 'set gradient_accumulation_steps to "auto" in the JSON'
        return [Problem(where, rule, fix)]
    each = dp * (micro or 0)
    if each < 1:
        return []

    odd = [(first, rows) for first, rows in changes if rows % each]
    few = [(first, rows) for first, rows in changes if rows % each == 0 and rows // each < least]
    rules = []
    if odd:
        rules.append(f"{_listed(odd)} do not divide by {product_of(dp, micro, None)} = {each}")
    if few:
        rules.append(
            f"{_listed(few)} give fewer than the 2 * pp = {least} micro-batches that dualpipev"
            " requires"
        )
    if not rules:
        return []

    # the nearest, of two the larger
    near = {rows: max(least, (rows + each // 2) // each) * each for _, rows in odd + few}
    fitting = [(first, near.get(rows, rows)) for first, rows in changes]
    return [Problem(where, ", and ".join(rules), f'use --batch_ramp "{written(fitting)}"')]


def _listed(changes: list[tuple[int, int]]) -> str:
    return " and ".join(f"{rows} rows from step {first} on" for first, rows in changes)


def no_batch(config: dict[str, Any], filled_by: str) -> list[Problem]:
    """Refuses a JSON without a batch size, which DeepSpeed alone needs; a recipe and accelerate
    bring their own.
    """
    sizes = {"train_batch_size", "train_micro_batch_size_per_gpu"}
    if filled_by == "accelerate" or sizes & config.keys():
        return []
    steps = "gradient_accumulation_steps"
    where = (
        f"{steps} = {shown(config[steps])}" if steps in config else "train_batch_size = (missing)"
    )
    number = '"auto"' if filled_by else "1"
    return [
        Problem(
            where,
            "DeepSpeed requires train_batch_size or train_micro_batch_size_per_gpu",
            f'add "train_micro_batch_size_per_gpu": {number}',
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
