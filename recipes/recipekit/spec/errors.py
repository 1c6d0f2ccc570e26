"""Config errors: all problems that prevent a run from starting, printed at once with fixes."""

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

# Exit code after an external fault (a lost rank or host, a failing disk). The same command can then
# resume the run.
START_AGAIN = 75

Say = Callable[[str], None]  # prints a line to the user

# The effect in DeepSpeed of a problem that no check catches, or "" if DeepSpeed never sees it.
FAILS, IGNORES, REPLACES, HANGS, APPLIES = (
    "fails on it",
    "ignores it",
    "replaces it",
    "hangs",
    "applies it",
)
WRONG = "trains with wrong numbers"  # without a message


@dataclass(frozen=True)
class Problem:
    """A single mistake.

    `where` is the key or flag with its value, `rule` is the rule that it breaks, and `fix` is the
    correction.
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
    """Join two sentences of a message as `FIRST. Second`.

    The result does not end with a full stop, so that a command at its end can be copied. If the
    second sentence begins with a flag, a quote, a path or a code name, its first letter is not
    capitalised.
    """
    stop = "" if first.endswith((".", "?", "!")) else "."
    word = re.match(r"[a-z]+(?=[ ,:]|$)", second)
    return f"{first}{stop} {second[0].upper() + second[1:] if word else second}"


class ConfigError(ValueError):
    """An error in the user's input that lists every problem found.

    `exit_code` is 1, or 2 for an invalid command line.
    """

    def __init__(self, problems: list[Problem], exit_code: int = 1):
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems
        self.exit_code = exit_code
        self.afterwards: Callable[[], None] = lambda: None  # called after the error is printed


def config_error(where: str, rule: str, fix: str) -> ConfigError:
    """Return a `ConfigError` with one problem."""
    return ConfigError([Problem(where, rule, fix)])


def exit_with_error(refusal: ConfigError, patience: float = 60) -> NoReturn:
    """Print the config error once per host, on local rank 0, and exit.

    The launcher kills every rank as soon as one exits. The other ranks therefore wait until local
    rank 0 has exited; otherwise its message would be lost.

    If local rank 0 is still alive after `patience` seconds, it does not have this problem, and this
    rank prints the error itself. An example is a bad file in one rank's share of the data.
    """
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    deadline = time.monotonic() + patience
    while rank and time.monotonic() < deadline:
        if not _local_rank_0_alive():
            raise SystemExit(refusal.exit_code)
        time.sleep(0.1)
    count = len(refusal.problems)
    # With this exit code, the launcher restarts the job.
    what = "failed" if refusal.exit_code == START_AGAIN else "refused"
    lines = [
        f"{what}{f' by local rank {rank}' if rank else ''}: {count}"
        f" problem{'s' if count > 1 else ''}"
    ]
    lines += [f"  {number}. {problem}" for number, problem in enumerate(refusal.problems, 1)]
    print("\n".join(lines), file=sys.stderr, flush=True)
    refusal.afterwards()
    raise SystemExit(refusal.exit_code)


def report_config_errors() -> None:
    """Make an uncaught `ConfigError` call `exit_with_error`, without a traceback."""
    otherwise = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ConfigError):
            exit_with_error(error)
        otherwise(kind, error, trace)

    sys.excepthook = hook


def _local_rank_0_alive() -> bool:
    """Return True while local rank 0, a sibling process with the same parent, is alive.

    The environment of local rank 0 contains LOCAL_RANK=0 or a scheduler's equivalent variable, such
    as srun's.
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
            continue  # the process has since ended, or belongs to a different user
    return False
