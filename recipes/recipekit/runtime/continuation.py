"""The command that continues a run, as its user would type it."""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from ..spec.paths import SWEEP_ID
from .stopping import command_line, parent

TYPED = "LAUNCH_COMMAND"  # the words of `python -m launch ...`, as JSON
LAUNCHERS = ("deepspeed", "ds", "torchrun", "accelerate")
MODULES = (
    "deepspeed.launcher.runner",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
)
LEVELS = 4  # of parents: the `deepspeed` command is the parent of the parent of a rank


def continue_command(
    stop_at: int, resume: str, said_out: str, typed: frozenset[str], out: Path
) -> str:
    """Return the command that continues the run in `out`, which `said_out`, the value of --out,
    became.

    Return "" if the command line of its launcher is not known, as under srun, and for a trial of a
    sweep, whose folder its agent decides.
    """
    if os.environ.get(SWEEP_ID):
        return ""
    changes: dict[str, str | None] = {}
    if stop_at:
        changes["stop_at"] = None if "stop_at" in typed else "0"
    if resume != "auto":
        changes["resume"] = None if "resume" in typed else "auto"
    if "{" in said_out:  # the next job has another id
        changes["out"] = str(out)
    words = typed_words()
    return shlex.join(retyped(words, changes)) if words else ""


def retyped(words: list[str], changes: Mapping[str, str | None]) -> list[str]:
    """Return a command line without the flags that change, and with their new values at the end
    (None: no value).
    """
    kept, skip = list[str](), False
    for word in words:
        flag, is_whole, _ = word.removeprefix("--").replace("-", "_").partition("=")
        changed = word.startswith("--") and flag in changes
        if not skip and not changed:
            kept.append(word)
        skip = changed and not is_whole
    return kept + [
        word
        for flag, value in changes.items()
        if value is not None
        for word in (f"--{flag}", value)
    ]


def typed_words() -> list[str]:
    """Return the words with which this job was started, [] if they cannot be found."""
    own = [sys.argv[0], *(word for word in sys.argv[1:] if not word.startswith("--local_rank"))]
    if TYPED in os.environ:
        return list(json.loads(os.environ[TYPED]))
    found, pid = list[str](), os.getppid()
    for _ in range(LEVELS):
        words = [word for word in command_line(pid) if word] if pid else []
        if words[-len(own) :] == own and (launcher := launched(words)):
            found = launcher
        pid = parent(pid) if pid else None
    if not found and os.environ.get("WORLD_SIZE", "1") == "1" and sys.orig_argv[-len(own) :] == own:
        return list(sys.orig_argv)
    return found


def launched(words: list[str]) -> list[str]:
    """Return the command line of a launcher as it is typed, [] for other programs: `python
    .../bin/deepspeed x.py` is deepspeed x.py.
    """
    if Path(words[0]).name in LAUNCHERS:
        return words
    if (
        "-m" in words[1:3]
        and (module := words.index("-m") + 1) < len(words)
        and words[module] in MODULES
    ):
        return words
    if len(words) > 1 and Path(words[1]).name in LAUNCHERS:
        return [Path(words[1]).name, *words[2:]]
    return []
