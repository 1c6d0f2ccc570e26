"""Start a recipe: the same as `python -m launch`, from any folder.

recipekit run mine.py --tiny
recipekit run --hostfile HOSTS mine.py --steps 100
"""

import importlib.util
import os
import sys

from ..spec.errors import config_error

TYPED_AS = "LAUNCH_TYPED_AS"  # first words of the command that launch prints to continue a run


def main(argv: list[str] | None = None) -> int:
    """Replace this process with `python -m launch`.

    launch then receives all signals and sets the exit code.
    """
    words = sys.argv[1:] if argv is None else argv
    if importlib.util.find_spec("launch") is None:
        raise config_error(
            "recipekit run",
            f"{sys.executable} has no package launch",
            "install this one again: make setup, or pip install .",
        )
    sys.stdout.flush()
    # -P prevents a file named launch.py in the current folder from shadowing the package.
    os.execve(
        sys.executable,
        [sys.executable, "-P", "-m", "launch", *words],
        os.environ | {TYPED_AS: "recipekit run"},
    )
