"""Submission of a job to Slurm.

Inside the allocation, `python -m launch` finds its hosts itself.
"""

import argparse
import re
import shlex
import subprocess

from . import allocation, environment
from .connection import REPOSITORY
from .errors import LaunchError

GPU = re.compile(r"(?:^|,)(?:gres[/:])?gpu(?:[:=,]|$)")  # a GPU in a list of resources
WAY = (
    "log in once on the cluster, because all nodes read its login files. Give a proxy or server"
    " without a password"
)
SCRIPT = REPOSITORY / "launch" / "slurm.sbatch"
LOGIN = ("PATH", "HOME", "USER", "LANG", "VIRTUAL_ENV")


def submit(arguments: argparse.Namespace, argv: list[str], variables: dict[str, str]) -> int:
    """Print and run the sbatch command.

    The command contains the names of variables and never secret values, because Slurm stores
    exported variables in files.
    """
    if warning := allocation.warning_of(arguments.sbatch):
        variables = variables | {allocation.GRACE: f"{warning:g}"}
    else:
        warning = allocation.warning_in(SCRIPT.read_text())
    if short := allocation.short_limit(allocation.limit_of(arguments.sbatch), warning):
        print(f"launch: {short}", flush=True)
    passed = environment.needed(variables, arguments.env)
    names = [*(name for name in LOGIN if name in variables), *passed]
    words = [
        "sbatch",
        f"--nodes={arguments.nodes or 1}",
        f"--export={','.join(dict.fromkeys(names))}",
        *arguments.sbatch,
    ]
    if arguments.gpus and not asks_for_gpus(arguments.sbatch):
        words.append(f"--gpus-per-node={arguments.gpus}")
    flags = argv[: len(argv) - len(arguments.words)]
    words += [
        str(SCRIPT),
        *(flag for flag in flags if flag not in ("--dry-run", "--dry_run")),
        *arguments.words,
    ]
    for line in [*environment.left_behind(variables, passed, WAY), shlex.join(words)]:
        print(f"launch: {line}", flush=True)
    if arguments.dry_run:
        return 0
    try:
        return subprocess.run(words, env=variables, check=False).returncode
    except FileNotFoundError:
        raise LaunchError(
            "--where slurm: sbatch is not on PATH. Submit from a login node of the cluster"
        ) from None


def asks_for_gpus(flags: list[str]) -> bool:
    """Return True if sbatch flags request GPUs.

    Only a flag's name counts, because a partition or an account may have any name. A value is part
    of its flag's word (--gres=gpu:8, -G8) or the next word. sbatch also accepts an abbreviated long
    name.
    """
    for flag, following in zip(flags, [*flags[1:], ""], strict=False):
        name, equals, value = flag.partition("=")
        if name.startswith("--gpus") or (name.startswith("-G") and not name.startswith("--")):
            return True
        lists_resources = name == "--gres" or name.startswith("--tres-per-")
        if lists_resources and GPU.search(value if equals else following):
            return True
    return False
