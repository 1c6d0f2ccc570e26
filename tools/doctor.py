"""Examine the hosts of a run: the same as `recipekit doctor`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from recipekit.__main__ import run_subcommand

if __name__ == "__main__":
    sys.exit(run_subcommand("doctor", sys.argv[1:], "doctor.py"))
