"""Submits a job to Slurm; inside the allocation `python -m launch` finds its hosts itself."""

import argparse
import shlex
import subprocess

from . import environment
from .job import REPOSITORY
from .refused import Refused

LOGIN = ("PATH", "HOME", "USER", "LANG", "VIRTUAL_ENV")


def submit(arguments: argparse.Namespace, argv: list[str], variables: dict[str, str]) -> int:
    """Prints and runs sbatch. The command holds names of variables only, and no secret's name: Slurm keeps exported variables in files."""
    names = [*(name for name in LOGIN if name in variables), *environment.needed(variables, arguments.env)]
    words = ["sbatch", f"--nodes={arguments.nodes or 1}", f"--export={','.join(dict.fromkeys(names))}", *arguments.sbatch]
    if arguments.gpus and not any("gpus" in word or "gres" in word for word in arguments.sbatch):
        words.append(f"--gpus-per-node={arguments.gpus}")
    flags = argv[: len(argv) - len(arguments.words)]
    words += [str(REPOSITORY / "launch" / "slurm.sbatch"), *(flag for flag in flags if flag not in ("--dry-run", "--dry_run")), *arguments.words]
    print(f"launch: {shlex.join(words)}", flush=True)
    if arguments.dry_run:
        return 0
    try:
        return subprocess.run(words, check=False).returncode
    except FileNotFoundError:
        raise Refused("--where slurm: sbatch is not on PATH; submit from a login node of the cluster") from None
