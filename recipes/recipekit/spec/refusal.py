"""Refuses a run that cannot start: prints every problem at once, each with its fix."""

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from .starters import LOCAL_RANKS

# exit code after a fault from outside (a lost rank or host, a failing disk): the same command can
# continue
START_AGAIN = 75

Say = Callable[[str], None]  # prints a line to the user

# What DeepSpeed does with a problem when nobody refuses it first; "" if DeepSpeed never sees the
# problem.
FAILS, IGNORES, REPLACES, HANGS, APPLIES = (
    "fails on it",
    "ignores it",
    "replaces it",
    "hangs",
    "applies it",
)
WRONG = "trains with wrong numbers"  # without a word


@dataclass(frozen=True)
class Problem:
    """Describes one mistake: `where` is the key or flag with its value, `rule` what that breaks,
    `fix` what to write instead.
    """

    where: str
    rule: str
    fix: str
    outcome: str = ""

    @property
    def fault(self) -> str:
        """Return the problem without its fix."""
        return f"{self.where}: {self.rule}"

    def __str__(self) -> str:
        return sentences(self.fault, self.fix)


def sentences(first: str, second: str) -> str:
    """Join two sentences of a message: `FIRST. Second`, without a full stop at the end, so that a
    command there can be copied.

    A second sentence that begins with a flag, a quote, a path or a name of code keeps its first
    letter.
    """
    stop = "" if first.endswith((".", "?", "!")) else "."
    word = re.match(r"[a-z]+(?=[ ,:]|$)", second)
    return f"{first}{stop} {second[0].upper() + second[1:] if word else second}"


class Refusal(ValueError):
    """Says that the input is at fault, with every problem found; `exit_code` is 1, or 2 for a wrong
    command line.
    """

    def __init__(self, problems: list[Problem], exit_code: int = 1):
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems
        self.exit_code = exit_code
        self.afterwards: Callable[[], None] = lambda: None  # called once the refusal is printed


def refuse(where: str, rule: str, fix: str) -> Refusal:
    """Returns a refusal of one problem, to be raised."""
    return Refusal([Problem(where, rule, fix)])


def exit_refused(refusal: Refusal, patience: float = 60) -> NoReturn:
    """Prints the refusal once per host, on local rank 0, and exits.

    The launcher kills every rank as soon as one ends, so the other ranks wait until local rank 0
    has ended; otherwise its message would be lost. If local rank 0 is still there after `patience`
    seconds, it has not met this problem (a bad file in one rank's part of the data, say), and this
    rank prints the refusal.
    """
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    deadline = time.monotonic() + patience
    while rank and time.monotonic() < deadline:
        if not _local_rank_0_alive():
            raise SystemExit(refusal.exit_code)
        time.sleep(0.1)
    count = len(refusal.problems)
    # the launcher starts a failed job again
    what = "failed" if refusal.exit_code == START_AGAIN else "refused"
    lines = [
        f"{what}{f' by local rank {rank}' if rank else ''}: {count}"
        f" problem{'s' if count > 1 else ''}"
    ]
    lines += [f"  {number}. {problem}" for number, problem in enumerate(refusal.problems, 1)]
    print("\n".join(lines), file=sys.stderr, flush=True)
    refusal.afterwards()
    raise SystemExit(refusal.exit_code)


def report_refusals() -> None:
    """Make a `Refusal` that nobody catches end the program as `exit_refused` does, without a
    traceback.
    """
    otherwise = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Refusal):
            exit_refused(error)
        otherwise(kind, error, trace)

    sys.excepthook = hook


def _local_rank_0_alive() -> bool:
    """Return True while a sibling process (same parent) carries LOCAL_RANK=0, or the like of srun,
    in its environment.
    """
    first = {f"{name}=0".encode() for name in LOCAL_RANKS}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            sibling = int(status[1]) == os.getppid() and status[0] != "Z"
            if sibling and first & {*(entry / "environ").read_bytes().split(b"\0")}:
                return True
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # the process ended while we looked, or belongs to another user
    return False
