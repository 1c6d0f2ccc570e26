"""The command that continues a run, as the user would type it."""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from ..spec.paths import SWEEP_ID
from .stopping import command_line, parent_pid

TYPED_COMMAND_VARIABLE = "LAUNCH_COMMAND"  # the words of `python -m launch ...`, as JSON
LAUNCHER_COMMANDS = ("deepspeed", "ds", "torchrun", "accelerate")
LAUNCHER_MODULES = (
    "deepspeed.launcher.runner",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
)
PARENT_LEVELS = 4  # the `deepspeed` command is a rank's grandparent


def continue_command(
    stop_at: int, resume: str, out_flag: str, typed: frozenset[str], out: Path
) -> str:
    """Return the command that continues the run in `out`. `out_flag` is the value of --out.

    The result is "" if the launcher's command line is unknown, for example under srun. It is also
    "" for a trial of a sweep, because the sweep agent chooses the trial's folder.
    """
    if os.environ.get(SWEEP_ID):
        return ""
    changes: dict[str, str | None] = {}
    if stop_at:
        changes["stop_at"] = None if "stop_at" in typed else "0"
    if resume != "auto":
        changes["resume"] = None if "resume" in typed else "auto"
    if "{" in out_flag:  # the next job has a different id
        changes["out"] = str(out)
    words = typed_command()
    return shlex.join(replace_flags(words, changes)) if words else ""


def replace_flags(args: list[str], changes: Mapping[str, str | None]) -> list[str]:
    """Return a command line in which the changed flags are removed and their new values appended.

    A value of None only removes the flag.
    """
    kept, skip = list[str](), False
    for word in args:
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


def typed_command() -> list[str]:
    """Return the words of the command that started this job, or [] if they cannot be found."""
    own = [sys.argv[0], *(word for word in sys.argv[1:] if not word.startswith("--local_rank"))]
    if TYPED_COMMAND_VARIABLE in os.environ:
        return list(json.loads(os.environ[TYPED_COMMAND_VARIABLE]))
    found, pid = list[str](), os.getppid()
    for _ in range(PARENT_LEVELS):
        words = [word for word in command_line(pid) if word] if pid else []
        if words[-len(own) :] == own and (launcher := launcher_command(words)):
            found = launcher
        pid = parent_pid(pid) if pid else None
    if not found and os.environ.get("WORLD_SIZE", "1") == "1" and sys.orig_argv[-len(own) :] == own:
        return list(sys.orig_argv)
    return found


def launcher_command(args: list[str]) -> list[str]:
    """Return a launcher's command line as a user types it, or [] for other programs.

    For example, `python .../bin/deepspeed x.py` becomes deepspeed x.py.
    """
    if Path(args[0]).name in LAUNCHER_COMMANDS:
        return args
    if (
        "-m" in args[1:3]
        and (module := args.index("-m") + 1) < len(args)
        and args[module] in LAUNCHER_MODULES
    ):
        return args
    if len(args) > 1 and Path(args[1]).name in LAUNCHER_COMMANDS:
        return [Path(args[1]).name, *args[2:]]
    return []
