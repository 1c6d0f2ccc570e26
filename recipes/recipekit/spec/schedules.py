"""Schedules over a run's steps: learning rate, rows of a global batch, and batches left out."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from .errors import Problem

RAMP_FORMAT_FIX = (
    'write "STEP:ROWS, STEP:ROWS": "501:512, 2001:1024" is 512 rows from step 501 on, and 1024 from'
    " step 2001 on"
)
LEAVE_OUT_FORMAT_FIX = (
    'write "STEP:BATCHES, STEP:BATCHES": "41:25, 300:10" leaves out 25 global batches before step'
    " 41, and 10 before step 300"
)


class ScheduleSettings(Protocol):
    """The settings of a learning-rate schedule. `Recipe` has these attributes."""

    @property
    def steps(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def min_lr(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def decay_steps(self) -> int: ...  # wsd: number of final steps in which the rate decays
    @property
    def schedule(self) -> str: ...  # after the warm-up: "cosine", "linear", "constant" or "wsd"


def lr_at(settings: ScheduleSettings, step: int) -> float:
    """Return the learning rate at optimizer step `step` (1, 2, ...).

    The rate starts with a linear warm-up, followed by a cosine, linear, constant or wsd schedule.

    wsd (warm-up, stable, decay) is from MiniCPM, arXiv 2404.06395, section 4. The rate stays at lr
    and decreases only in the last steps, so earlier steps do not depend on the total number of
    steps. Its decay factor is 1 - sqrt of the completed fraction of the decay. This factor gave
    lower losses than a linear decay (Hägele et al., arXiv 2405.18392). Unlike MiniCPM's exponential
    decay, it ends at min_lr.
    """
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    # The last step before the decay.
    begun = (
        settings.steps - settings.decay_steps
        if settings.schedule == "wsd"
        else settings.warmup_steps
    )
    if settings.schedule == "constant" or step <= begun:
        return settings.lr
    done = (step - begun) / max(1, settings.steps - begun)
    falls = {
        "linear": lambda: 1 - done,
        "cosine": lambda: (1 + math.cos(math.pi * done)) / 2,
        "wsd": lambda: 1 - math.sqrt(done),
    }
    left = falls[settings.schedule]()
    return settings.min_lr + (settings.lr - settings.min_lr) * left


@dataclass(frozen=True)
class Ramp:
    """Number of rows per step: ((first step, rows), ...), where steps ascend from 1."""

    table: tuple[tuple[int, int], ...]

    @property
    def max_rows(self) -> int:
        return max(rows for _, rows in self.table)

    def rows(self, step: int) -> int:
        """Return the global batch at optimizer step `step` (1, 2, ...)."""
        return next(rows for first, rows in reversed(self.table) if first <= step)

    def total(self, steps: int) -> int:
        """Return the total number of rows in steps 1 to `steps`."""
        ends = [first for first, _ in self.table[1:]] + [steps + 1]
        return sum(
            rows * max(0, min(end, steps + 1) - first)
            for (first, rows), end in zip(self.table, ends, strict=True)
        )

    def step_of(self, rows: int) -> int:
        """Return the first step after which the run has trained on `rows` rows (at least 1)."""
        before = 0
        for (first, size), (stop, _) in pairwise((*self.table, (1 << 62, 0))):
            if before + size * (stop - first) >= rows:
                return first - 1 + -(-(rows - before) // size)
            before += size * (stop - first)
        raise AssertionError("the last entry of a table has no end")

    def changes(self, step: int) -> list[list[int]]:
        """Return [first step, rows] for each change up to step `step`, as JSON stores it."""
        return [[first, rows] for first, rows in self.table[1:] if first <= step]


def ramp_of(global_batch: int, batch_ramp: str) -> Ramp:
    """Return a run's ramp: `global_batch` rows from step 1, then the rows in `batch_ramp`.

    A `batch_ramp` that `check_ramp` finds invalid is ignored.
    """
    return Ramp(
        ((1, global_batch), *(() if check_ramp(batch_ramp) else parse_ramp(batch_ramp) or ()))
    )


def parse_ramp(batch_ramp: str) -> tuple[tuple[int, int], ...] | None:
    """Parse "501:512, 2001:1024" into ((501, 512), (2001, 1024)). Return None for invalid text.

    `leave_out` has the same form.
    """
    parts = (
        [re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", part) for part in batch_ramp.split(",")]
        if batch_ramp.strip()
        else []
    )
    found = tuple((int(part[1]), int(part[2])) for part in parts if part)
    return found if len(found) == len(parts) else None


def format_ramp(changes: Iterable[tuple[int, int]]) -> str:
    """Format a table as text that `parse_ramp` accepts."""
    return ", ".join(f"{first}:{rows}" for first, rows in changes)


def truncate_ramp(batch_ramp: str, steps: int) -> str:
    """Return the ramp without any changes after step `steps`."""
    changes = parse_ramp(batch_ramp) or ()
    left = tuple(change for change in changes if change[0] <= steps)
    return format_ramp(left) if left != changes else batch_ramp


def scale_ramp(batch_ramp: str, before: int, after: int) -> str:
    """Scale the ramp by the ratio `after` / `before` of two global batches.

    Each number of rows is rounded up to a multiple of `after`.
    """
    return format_ramp(
        (first, after * -(-rows // max(1, before))) for first, rows in parse_ramp(batch_ramp) or ()
    )


def check_ramp(batch_ramp: str, steps: int = 0) -> list[Problem]:
    """Return problems for an invalid ramp.

    The text must be valid. Its steps must ascend and must not exceed `steps` (0: unknown).
    """
    where, changes = f"batch_ramp = {batch_ramp}", parse_ramp(batch_ramp)
    if changes is None:
        return [Problem(where, "is not a valid table of steps and rows", RAMP_FORMAT_FIX)]
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
            Problem(
                where, f"its steps must ascend, but it has {', '.join(falling)}", RAMP_FORMAT_FIX
            )
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
        fix = f'use --batch_ramp "{truncate_ramp(batch_ramp, steps)}", or a larger --steps'
        problems.append(
            Problem(where, f"step {', '.join(beyond)} is after the last step, {steps}", fix)
        )
    return problems


@dataclass(frozen=True)
class LeaveOut:
    """Global batches that a stream passes over: ((step, batches), ...), in the order of the steps.

    Before `step` takes its own batch, the stream passes over those that `step`, `step` + 1, ...
    would have taken. Several entries of one step apply one after the other.
    """

    table: tuple[tuple[int, int], ...] = ()

    def before(self, step: int) -> list[int]:
        """Return the number of batches of each entry that applies before `step`."""
        return [batches for first, batches in self.table if first == step]

    def entries(self, step: int) -> list[list[int]]:
        """Return [step, batches] for each entry up to `step`, as JSON stores it."""
        return [[first, batches] for first, batches in self.table if first <= step]

    def dealt_rows(self, ramp: Ramp, steps: int) -> int:
        """Return the rows that a stream deals in steps 1 to `steps`, with those passed over."""
        return ramp.total(steps) + sum(
            ramp.total(first + batches - 1) - ramp.total(first - 1)
            for first, batches in self.table
            if first <= steps
        )

    def with_entries(self, added: Iterable[Iterable[int]]) -> "LeaveOut":
        """Return the table with more entries, which apply after the present ones of their step."""
        more = ((first, batches) for first, batches in added)
        return LeaveOut(tuple(sorted((*self.table, *more), key=lambda entry: entry[0])))


def leave_out_of(leave_out: str) -> LeaveOut:
    """Return the table of a text. A text that `check_leave_out` finds invalid is ignored."""
    return LeaveOut(() if check_leave_out(leave_out) else parse_ramp(leave_out) or ())


def check_leave_out(leave_out: str, steps: int = 0) -> list[Problem]:
    """Return problems for an invalid table of batches that are left out.

    The text must be valid. Its steps must not descend or exceed `steps` (0: unknown).
    """
    where, entries = f"leave_out = {leave_out}", parse_ramp(leave_out)
    if entries is None:
        return [Problem(where, "is not a valid table of steps and batches", LEAVE_OUT_FORMAT_FIX)]
    problems, firsts = [], [first for first, _ in entries]
    if falling := [f"{later} after {first}" for first, later in pairwise(firsts) if later < first]:
        rule = f"its steps must not descend, but it has {', '.join(falling)}"
        problems.append(Problem(where, rule, LEAVE_OUT_FORMAT_FIX))
    if firsts and min(firsts) < 1:
        problems.append(Problem(where, "the first step of a run is step 1", "use step 1 or later"))
    if empty := [str(first) for first, batches in entries if batches < 1]:
        rule = f"before step {', '.join(empty)}, at least 1 batch must be left out"
        problems.append(Problem(where, rule, "use a larger number of batches, or omit this entry"))
    if beyond := [str(first) for first in firsts if first > steps > 0]:
        left = truncate_ramp(leave_out, steps)
        fix = f'use --leave_out "{left}", or a larger --steps'
        problems.append(
            Problem(where, f"step {', '.join(beyond)} is after the last step, {steps}", fix)
        )
    return problems


def check_rates(
    schedule: str, steps: int, warmup: int, decay: int, lr: float, min_lr: float
) -> list[Problem]:
    """Return problems for learning-rate settings that contradict each other.

    Negative numbers are reported elsewhere.
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
    """Return problems for epochs over data whose rows cannot be counted before step 1.

    Such data are streamed datasets (`streamed`) and mixtures.
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


def describe_schedule(
    schedule: str, steps: int, lr: float, min_lr: float, warmup: int, decay: int
) -> str:
    """Return a description of the learning-rate schedule."""
    rises, begun = (
        f"rises to {lr} at step {warmup}" if warmup else f"begins at {lr}",
        steps - decay if schedule == "wsd" else warmup,
    )
    stays = {"constant": ", stays there", "wsd": f", stays there until step {begun}"}.get(
        schedule, ""
    )
    shape = {"cosine": "as a cosine", "linear": "linearly", "wsd": "by 1 - sqrt"}.get(schedule)
    return f"{rises}{stays}{f', falls {shape} to {min_lr} at step {steps}' if shape else ''}"


def fit_warmup_and_decay(
    schedule: str, steps: int, warmup: int, decay: int, typed: frozenset[str]
) -> dict[str, int]:
    """Return new values for warm-up and decay fields that do not fit `steps`.

    Fields in `typed` are never changed.
    """
    fitted = {}
    if "warmup_steps" not in typed and warmup >= steps:
        fitted["warmup_steps"] = warmup = steps // 10
    if "decay_steps" not in typed and schedule == "wsd" and warmup + decay > steps > warmup:
        fitted["decay_steps"] = max(1, min(steps // 10, steps - warmup))
    return fitted
