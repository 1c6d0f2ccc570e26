"""Start a recipe: the same as `python -m launch`, from any folder.

recipekit run mine.py --tiny
recipekit run --hostfile HOSTS mine.py --steps 100
"""

import importlib.util
import os
import sys

from ..spec.refusal import refuse

TYPED_AS = "LAUNCH_TYPED_AS"  # the beginning of the command that launch shows to continue a run


def main(argv: list[str] | None = None) -> int:
    """Turn this process into `python -m launch`, which then gets all signals and gives the exit
    code.
    """
    words = sys.argv[1:] if argv is None else argv
    if importlib.util.find_spec("launch") is None:
        raise refuse(
            "recipekit run",
            f"{sys.executable} has no package launch",
            "install this one again: make setup, or pip install .",
        )
    sys.stdout.flush()
    # -P: a file launch.py of the current folder must not hide the package
    os.execve(
        sys.executable,
        [sys.executable, "-P", "-m", "launch", *words],
        os.environ | {TYPED_AS: "recipekit run"},
    )
