"""Runs the doctor of recipekit as a script, which is all that launch can start on a host."""

import runpy
import sys
from pathlib import Path

# a clone; an installed recipekit is found without it
RECIPES = Path(__file__).resolve().parents[1] / "recipes"

if __name__ == "__main__":
    sys.path[0] = str(RECIPES)  # instead of this folder, whose names would hide others
    sys.argv.insert(1, "doctor")
    runpy.run_module("recipekit", run_name="__main__", alter_sys=True)
