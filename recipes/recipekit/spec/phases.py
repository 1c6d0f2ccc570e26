"""What changes from step to step of a run: the phases of its learning rate, and the rows of its
global batch.

Here is how they are written and what they refuse; the learning rate itself is in spec/schedules.py.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from .refusal import Problem

FORM = (
    'write "STEP:ROWS, STEP:ROWS": "501:512, 2001:1024" is 512 rows from step 501 on, and 1024 from'
    " step 2001 on"
)


@dataclass(frozen=True)
class Ramp:
    """Lists how many rows the steps of a run have: ((first step, rows), ...), steps ascending from
    1.
    """

    table: tuple[tuple[int, int], ...]

    @property
    def most(self) -> int:
        return max(rows for _, rows in self.table)

    def rows(self, step: int) -> int:
        """Returns the global batch of optimizer step `step` (1, 2, ...)."""
        return next(rows for first, rows in reversed(self.table) if first <= step)

    def total(self, steps: int) -> int:
        """Adds up the rows of the steps from 1 to `steps`."""
        ends = [first for first, _ in self.table[1:]] + [steps + 1]
        return sum(
            rows * max(0, min(end, steps + 1) - first)
            for (first, rows), end in zip(self.table, ends, strict=True)
        )

    def step_of(self, rows: int) -> int:
        """Return the first step with which the run has had `rows` rows (at least 1)."""
        before = 0
        for (first, size), (stop, _) in pairwise((*self.table, (1 << 62, 0))):
            if before + size * (stop - first) >= rows:
                return first - 1 + -(-(rows - before) // size)
            before += size * (stop - first)
        raise AssertionError("the last entry of a table has no end")

    def changes(self, step: int) -> list[list[int]]:
        """Lists [first step, rows] of each change that has come by step `step`, as JSON keeps
        them.
        """
        return [[first, rows] for first, rows in self.table[1:] if first <= step]


def ramp_of(global_batch: int, batch_ramp: str) -> Ramp:
    """Makes the table of a run: `global_batch` rows from step 1 on, then those of `batch_ramp`;
    none of one that `check_ramp` refuses.
    """
    return Ramp(((1, global_batch), *(() if check_ramp(batch_ramp) else read(batch_ramp) or ())))


def read(batch_ramp: str) -> tuple[tuple[int, int], ...] | None:
    """Reads "501:512, 2001:1024" as ((501, 512), (2001, 1024)); None if it is written wrong."""
    parts = (
        [re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", part) for part in batch_ramp.split(",")]
        if batch_ramp.strip()
        else []
    )
    found = tuple((int(part[1]), int(part[2])) for part in parts if part)
    return found if len(found) == len(parts) else None


def written(changes: Iterable[tuple[int, int]]) -> str:
    """Writes a table as `read` reads it."""
    return ", ".join(f"{first}:{rows}" for first, rows in changes)


def cut(batch_ramp: str, steps: int) -> str:
    """Leaves out the changes after step `steps`."""
    changes = read(batch_ramp) or ()
    left = tuple(change for change in changes if change[0] <= steps)
    return written(left) if left != changes else batch_ramp


def scaled(batch_ramp: str, before: int, after: int) -> str:
    """Scales the rows as the global batch was from `before` to `after`: each becomes a multiple of
    it, rounded up.
    """
    return written(
        (first, after * -(-rows // max(1, before))) for first, rows in read(batch_ramp) or ()
    )


def check_ramp(batch_ramp: str, steps: int = 0) -> list[Problem]:
    """Refuses a table that is written wrong, whose steps do not ascend, or that goes beyond the
    last step (0: not known).
    """
    where, changes = f"batch_ramp = {batch_ramp}", read(batch_ramp)
    if changes is None:
        return [Problem(where, "is not a valid table of steps and rows", FORM)]
    problems, firsts = [], [first for first, _ in changes]
    if firsts and firsts[0] < 2:
        problems.append(
            Problem(
                where,
                f"step {firsts[0]} starts the run, and its rows are set by global_batch",
                "omit this entry, and set --global_batch",
            )
        )
    if falling := [f"{later} after {first}" for first, later in pairwise(firsts) if later <= first]:
        problems.append(
            Problem(where, f"its steps must ascend, but it has {', '.join(falling)}", FORM)
        )
    if empty := [str(first) for first, rows in changes if rows < 1]:
        problems.append(
            Problem(
                where,
                f"from step {', '.join(empty)} on, the batch must have at least 1 row",
                "use a larger number of rows",
            )
        )
    if beyond := [str(first) for first in firsts if first > steps > 0]:
        fix = f'use --batch_ramp "{cut(batch_ramp, steps)}", or a larger --steps'
        problems.append(
            Problem(where, f"step {', '.join(beyond)} is after the last step, {steps}", fix)
        )
    return problems


def check_rates(
    schedule: str, steps: int, warmup: int, decay: int, lr: float, min_lr: float
) -> list[Problem]:
    """Refuses numbers of the learning rate that contradict each other; those that are negative are
    told elsewhere.
    """
    problems = []
    if warmup >= steps > 0 and warmup > 0:
        rule = f"the warm-up must be shorter than the schedule of {steps} steps"
        problems.append(
            Problem(
                f"warmup_steps = {warmup}",
                rule,
                f"use --warmup_steps {steps // 10} or a larger --steps",
            )
        )
    if min_lr > lr > 0:
        problems.append(
            Problem(
                f"min_lr = {min_lr}",
                f"must not be larger than lr = {lr}",
                f"use --min_lr {lr / 10} or less",
            )
        )
    if min_lr and schedule == "constant":
        problems.append(
            Problem(
                f"min_lr = {min_lr}",
                "cannot be combined with a constant schedule, which never reaches it",
                "use --schedule cosine, or omit min_lr",
            )
        )
    if schedule != "wsd" and decay > 0:
        rule = (
            f"applies only to schedule = wsd, not to {schedule}, which"
            f" {'never falls' if schedule == 'constant' else 'falls from its warm-up on'}"
        )
        problems.append(
            Problem(f"decay_steps = {decay}", rule, "use --decay_steps 0, or --schedule wsd")
        )
    if schedule == "wsd" and decay == 0:
        rule = "must be at least 1 with a wsd schedule, which ends with a decay"
        problems.append(
            Problem(
                "decay_steps = 0",
                rule,
                f"use --decay_steps {max(1, steps // 10)}, or --schedule constant",
            )
        )
    if schedule == "wsd" and warmup + decay > steps > max(0, warmup):
        rule = (
            f"{f'with warmup_steps = {warmup} it ' if warmup else ''}takes {warmup + decay} of the"
            f" {steps} steps"
        )
        problems.append(
            Problem(
                f"decay_steps = {decay}",
                rule,
                f"use --decay_steps {steps - warmup} or less, or a larger --steps",
            )
        )
    return problems


def check_epochs(epochs: float, num_corpora: int, streamed: list[str]) -> list[Problem]:
    """Refuse epochs of data whose rows cannot be counted before step 1: of `streamed` data sets and
    of mixtures.
    """
    if not epochs:
        return []
    where, fix = f"epochs = {epochs:g}", "use --steps"
    if num_corpora > 1:
        rule = (
            f"cannot be combined with a mixture of {num_corpora} corpora: its weights set how often"
            " each corpus is read"
        )
        return [Problem(where, rule, fix)]
    rule = "only local data can be counted before step 1, and --dataset {} is streamed"
    return [
        Problem(where, rule.format(dataset), f"{fix}, or download the data and give the files")
        for dataset in streamed
    ]


def rates(schedule: str, steps: int, lr: float, min_lr: float, warmup: int, decay: int) -> str:
    """Says in words what the learning rate does."""
    rises, begun = (
        f"rises to {lr} at step {warmup}" if warmup else f"begins at {lr}",
        steps - decay if schedule == "wsd" else warmup,
    )
    stays = {"constant": ", stays there", "wsd": f", stays there until step {begun}"}.get(
        schedule, ""
    )
    shape = {"cosine": "as a cosine", "linear": "linearly", "wsd": "by 1 - sqrt"}.get(schedule)
    return f"{rises}{stays}{f', falls {shape} to {min_lr} at step {steps}' if shape else ''}"


def shorter(
    schedule: str, steps: int, warmup: int, decay: int, typed: frozenset[str]
) -> dict[str, int]:
    """Returns the warm-up and the decay, by field, that have to be other ones to fit `steps`; those
    in `typed` stay.
    """
    fitted = {}
    if "warmup_steps" not in typed and warmup >= steps:
        fitted["warmup_steps"] = warmup = steps // 10
    if "decay_steps" not in typed and schedule == "wsd" and warmup + decay > steps > warmup:
        fitted["decay_steps"] = max(1, min(steps // 10, steps - warmup))
    return fitted
