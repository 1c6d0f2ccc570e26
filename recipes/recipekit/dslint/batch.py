"""Check of the batch arithmetic: global_batch = dp * micro_batch * accumulation."""

from dataclasses import dataclass
from typing import Any

from ..spec.errors import FAILS, Problem
from ..spec.mesh import Mesh
from ..spec.schedules import Ramp, format_ramp
from .values import format_json_value


def check_batch_sizes(
    clean: dict[str, Any],
    global_batch: int | None,
    micro_batch: int | None,
    mesh: Mesh | None,
    ramp: Ramp | None = None,
    min_micro_batches: int = 1,
) -> list[Problem]:
    """Report batch sizes that do not divide evenly.

    A step's number of rows must be data-parallel ranks * rows per forward pass * accumulated
    micro-batches. `global_batch` (rows per step) and `micro_batch` (rows per forward pass) come
    from the JSON. With a recipe's `ramp`, both numbers come from the recipe, and the messages use
    the recipe's names. `min_micro_batches` is the minimum number of micro-batches in a step of the
    ramp.
    """
    of_recipe = ramp is not None
    steps = _accumulation_steps(clean)
    if global_batch is None:
        first = []
    elif mesh is None:
        first = [] if of_recipe else _check_on_any_ranks(global_batch, micro_batch, steps)
    elif min(global_batch, micro_batch or 1) < 1:
        first = []
    elif micro_batch is None:
        first = _check_without_micro(global_batch, mesh.dp, steps)
    else:
        first = _check_product(
            BatchSizes(global_batch, micro_batch, steps, mesh.dp, of_recipe, _literal_keys(clean))
        )
    if ramp is None:
        return first
    return first + check_ramp_sizes(
        clean, ramp, micro_batch, mesh.dp if mesh is not None else 0, min_micro_batches
    )


def _accumulation_steps(clean: dict[str, Any]) -> int | None:
    """Return the JSON's number of accumulated micro-batches, or None if it is not set."""
    steps = clean.get("gradient_accumulation_steps", "auto")
    return None if steps == "auto" else steps


def _literal_keys(clean: dict[str, Any]) -> frozenset[str]:
    return frozenset(key for key, value in clean.items() if value != "auto")


@dataclass(frozen=True)
class BatchSizes:
    """The numbers of the first step. Without a ramp they apply to all steps."""

    global_batch: int  # rows of a step
    micro_batch: int  # rows of a forward pass
    accumulation_steps: int | None  # accumulated micro-batches, None if not set
    dp: int
    from_recipe: bool  # the messages name the recipe's fields, not the JSON's keys
    literals: frozenset[str]  # keys that the JSON sets to numbers

    @property
    def global_batch_name(self) -> str:
        return "global_batch" if self.from_recipe else "train_batch_size"

    @property
    def micro_batch_name(self) -> str:
        return "micro_batch" if self.from_recipe else "train_micro_batch_size_per_gpu"


def _check_on_any_ranks(
    global_batch: int, micro_batch: int | None, accumulation_steps: int | None
) -> list[Problem]:
    """Report three numbers in a JSON that are inconsistent for any number of ranks."""
    if (
        not micro_batch
        or not accumulation_steps
        or global_batch % (micro_batch * accumulation_steps) == 0
    ):
        return []
    rule = (
        f"is not divisible by micro_batch {micro_batch} * {accumulation_steps} micro-batches ="
        f" {micro_batch * accumulation_steps} on any number of ranks"
    )
    near = _neighbouring_multiples(global_batch, micro_batch * accumulation_steps)
    fix = f"set train_batch_size to {near}, or delete one of the three keys"
    return [Problem(f"train_batch_size = {global_batch}", rule, fix, FAILS)]


def _check_without_micro(
    global_batch: int, dp: int, accumulation_steps: int | None
) -> list[Problem]:
    """Report a global batch that is not divisible by ranks * accumulation."""
    parts = dp * (accumulation_steps or 1)
    if global_batch % parts == 0:
        return []
    rule = f"is not divisible by {batch_product_text(dp, None, accumulation_steps)} = {parts}"
    fix = f"set train_batch_size to {_neighbouring_multiples(global_batch, parts)}"
    return [Problem(f"train_batch_size = {global_batch}", rule, fix, FAILS)]


def _check_product(batch: BatchSizes) -> list[Problem]:
    """Report a global batch that is not equal to ranks * micro-batch * accumulation."""
    total, micro, steps, dp = (
        batch.global_batch,
        batch.micro_batch,
        batch.accumulation_steps,
        batch.dp,
    )
    if total % (dp * micro):
        alias = " (train_batch_size)" if batch.from_recipe else ""
        rule = f"is not divisible by {batch_product_text(dp, micro, None)} = {dp * micro}"
        fix = f"use {', or '.join(_ways_to_divide(batch))}"
        return [Problem(f"{batch.global_batch_name}{alias} = {total}", rule, fix, FAILS)]

    if steps is not None and total != dp * micro * steps:
        product = f"{batch_product_text(dp, micro, steps)} = {dp * micro * steps}"
        rule = f"{product}, but a step must have {total} rows"
        fix = ", or ".join(_ways_to_accumulate(batch, steps))
        return [Problem(f"gradient_accumulation_steps = {steps}", rule, fix, FAILS)]
    return []


def _ways_to_divide(batch: BatchSizes) -> list[str]:
    """Return the flags that make the global batch divisible. Numbers in the JSON do not change."""
    total, micro, dp = batch.global_batch, batch.micro_batch, batch.dp
    ways = [f"{batch.global_batch_name} {_neighbouring_multiples(total, dp * micro)}"]
    if total % dp == 0:
        # The search is bounded, because a mistyped micro-batch may have any number of digits.
        sizes = range(min(micro, 100_000), 0, -1)
        fitting = next(rows for rows in sizes if total % (dp * rows) == 0)
        ways.append(f"{batch.micro_batch_name} {fitting}")
    if (
        "train_batch_size" in batch.literals
        and "train_micro_batch_size_per_gpu" not in batch.literals
    ):
        ways.reverse()
    return ways


def _ways_to_accumulate(batch: BatchSizes, accumulation_steps: int) -> list[str]:
    """Return ways to make the product equal the global batch. Numbers in the JSON do not change."""
    total, micro, dp = batch.global_batch, batch.micro_batch, batch.dp
    auto = '"auto" or ' if batch.from_recipe else ""
    ways = [
        f"set gradient_accumulation_steps to {auto}{total // (dp * micro)}",
        f"use {batch.global_batch_name} {dp * micro * accumulation_steps}",
    ]
    if (
        "train_micro_batch_size_per_gpu" in batch.literals
        and "train_batch_size" not in batch.literals
    ):
        ways.reverse()
    if total % (dp * accumulation_steps) == 0:
        ways.append(f"{batch.micro_batch_name} {total // (dp * accumulation_steps)}")
    return ways


def check_ramp_sizes(
    clean: dict[str, Any], ramp: Ramp, micro_batch: int | None, dp: int, min_micro_batches: int
) -> list[Problem]:
    """Report global batches in the ramp that do not divide or that give too few micro-batches.

    All such global batches are reported as one problem. `min_micro_batches` is the minimum per
    step. `dp` is 0 if the number of ranks is unknown.
    """
    changes, steps = ramp.table[1:], _accumulation_steps(clean)
    where = f"batch_ramp = {format_ramp(changes)}"
    if changes and steps is not None:
        rule = f"its steps cannot all use the JSON's gradient_accumulation_steps = {steps}"
        fix = 'set gradient_accumulation_steps to "auto" in the JSON'
        return [Problem(where, rule, fix)]
    each = dp * (micro_batch or 0)
    if each < 1:
        return []

    odd = [(first, rows) for first, rows in changes if rows % each]
    few = [
        (first, rows)
        for first, rows in changes
        if rows % each == 0 and rows // each < min_micro_batches
    ]
    rules = []
    if odd:
        rules.append(
            f"{_describe_changes(odd)} do not divide by {batch_product_text(dp, micro_batch, None)}"
            f" = {each}"
        )
    if few:
        rules.append(
            f"{_describe_changes(few)} give fewer than the 2 * pp = {min_micro_batches}"
            " micro-batches that dualpipev requires"
        )
    if not rules:
        return []

    # The nearest multiple. If two multiples are equally near, the larger one.
    near = {
        rows: max(min_micro_batches, (rows + each // 2) // each) * each for _, rows in odd + few
    }
    fitting = [(first, near.get(rows, rows)) for first, rows in changes]
    return [Problem(where, ", and ".join(rules), f'use --batch_ramp "{format_ramp(fitting)}"')]


def _describe_changes(changes: list[tuple[int, int]]) -> str:
    return " and ".join(f"{rows} rows from step {first} on" for first, rows in changes)


def check_has_batch_size(config: dict[str, Any], filled_by: str) -> list[Problem]:
    """Report a JSON without a batch size, which DeepSpeed requires if no program sets it.

    A recipe and accelerate set the batch size themselves.
    """
    sizes = {"train_batch_size", "train_micro_batch_size_per_gpu"}
    if filled_by == "accelerate" or sizes & config.keys():
        return []
    steps = "gradient_accumulation_steps"
    where = (
        f"{steps} = {format_json_value(config[steps])}"
        if steps in config
        else "train_batch_size = (missing)"
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


def batch_product_text(dp: int, micro_batch: int | None, accumulation_steps: int | None) -> str:
    parts = [f"{dp} data-parallel rank{'s' if dp > 1 else ''}"]
    parts += [f"micro_batch {micro_batch}"] if micro_batch is not None else []
    parts += [f"{accumulation_steps} micro-batches"] if accumulation_steps is not None else []
    return " * ".join(parts)


def _neighbouring_multiples(number: int, divisor: int) -> str:
    """Return a text with the nearest multiples of `divisor` below and above `number`."""
    low = number // divisor * divisor
    return f"{low} or {low + divisor}" if low else str(divisor)
