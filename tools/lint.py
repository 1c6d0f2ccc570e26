"""Check a DeepSpeed JSON: the same as `recipekit lint`.

A script may import `lint` and `verdict` from here.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from recipekit.__main__ import run_subcommand

if __name__ == "__main__":
    sys.exit(run_subcommand("lint", sys.argv[1:], "lint.py"))
else:
    from recipekit.commands.lint import lint as lint
    from recipekit.commands.lint import verdict as verdict
