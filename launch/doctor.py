"""Script that runs recipekit's doctor, because launch can start only scripts on a host."""

import runpy
import sys
from pathlib import Path

# In a clone, recipekit is in this folder. An installed recipekit is found without this path.
RECIPES = Path(__file__).resolve().parents[1] / "recipes"

if __name__ == "__main__":
    sys.path[0] = str(RECIPES)  # instead of this folder, whose modules would shadow others
    sys.argv.insert(1, "doctor")
    runpy.run_module("recipekit", run_name="__main__", alter_sys=True)
