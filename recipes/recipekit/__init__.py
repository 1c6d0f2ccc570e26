"""The shared code of the recipes: `Recipe` says what to train, `run` trains it."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (told before a line that an older Python cannot run)
    found = f"{sys.executable} is Python {'.'.join(map(str, sys.version_info[:3]))}"
    sys.exit(f"refused: {found}: the recipes need 3.11 or newer; activate the environment: . .venv/bin/activate (make setup makes it)")

from .recipe import Recipe
from .run import run

__all__ = ["Recipe", "run"]
