"""One command for the recipes, from any folder.

recipekit lint zero3.json --recipe mine.py --world 16
recipekit doctor --recipe mine.py
recipekit convert to-hf RUN_OR_STEP_DIR OUT_DIR
"""

import importlib
import sys

from .packages import NEEDED, require_packages

# Subcommand -> packages that it imports. Its module is recipekit/commands/NAME.py, imported when it is called.
COMMANDS = {
    "lint": ("hjson",),
    "doctor": (),
    "convert": NEEDED,
}


def call(name: str, *arguments: object) -> int:
    """Run a subcommand; return its exit code."""
    if COMMANDS[name]:
        require_packages(COMMANDS[name])
    return importlib.import_module(f".commands.{name}", __package__).main(*arguments)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return call(words[0], words[1:])


if __name__ == "__main__":
    sys.exit(main())
