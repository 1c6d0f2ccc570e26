"""One command for the recipes, from any folder.

    recipekit                                       # list the recipes, as recipekit ls does
    recipekit cp qwen3_0_6b_sft_zero2 mine.py       # copy a recipe, or a JSON such as zero2.json
    recipekit run mine.py --tiny                    # start it, as python -m launch does
    recipekit COMMAND --help                        # show the flags of a command

For tab completion, run: eval "$(recipekit --completion bash)". For zsh, write zsh instead of bash.
"""

import difflib
import importlib
import os
import sys
from dataclasses import dataclass

from .spec.packages import NEEDED, require_packages
from .spec.refusal import Problem, Refusal


@dataclass(frozen=True)
class Command:
    """A subcommand: recipekit/commands/NAME.py, imported only when it is called."""

    about: str
    packages: tuple[str, ...] = ()  # that its module imports


COMMANDS = {
    "ls": Command("list the recipes with layout, memory, hardware, last checks and goal"),
    "cp": Command("copy a recipe or a JSON to a new file"),
    "run": Command("start a recipe on one or several machines"),
    "lint": Command("check a DeepSpeed JSON and write a fixed copy", ("hjson",)),
    "doctor": Command("check this machine or all hosts of a run before you start it"),
    "convert": Command("convert checkpoints between layouts and Hugging Face files", NEEDED),
    "sample": Command("generate text with a trained model", NEEDED),
}
SHELLS = ("bash", "zsh")


def call(name: str, *arguments: object) -> int:
    """Run a subcommand; return its exit code."""
    if COMMANDS[name].packages:
        require_packages(COMMANDS[name].packages)
    return importlib.import_module(f".commands.{name}", __package__).main(*arguments)


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand of a command line; return the exit code."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["ls"]
    try:
        if name in ("-h", "--help"):
            print(help_text())
            return 0
        if name == "--completion":
            return complete(words)
        if name not in COMMANDS:
            return wrong(f"recipekit {name}", "is not a subcommand", nearest(name))
        code = call(name, words)
        sys.stdout.flush()
        return code
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return refusal.exit_code
    except BrokenPipeError:  # recipekit ls | head -3
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def help_text() -> str:
    lines = [f"  {name:<9} {command.about}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: recipekit [COMMAND ...]", "", (__doc__ or "").strip(), "", "commands:", *lines]
    )


def wrong(where: str, rule: str, fix: str) -> int:
    print(Problem(where, rule, fix), file=sys.stderr)
    return 2


def nearest(name: str) -> str:
    """Return the fix for a word that is not a subcommand."""
    if name.endswith(".py"):
        return f"did you mean recipekit run {name}?"
    near = difflib.get_close_matches(name, COMMANDS, 2)
    return f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(COMMANDS)}"


def complete(words: list[str]) -> int:
    """Print the completion script of a shell."""
    if len(words) != 1 or words[0] not in SHELLS:
        return wrong(
            " ".join(["--completion", *words]),
            "requires the name of a shell",
            f"use one of {', '.join(SHELLS)}",
        )
    from .spec.completion import script

    print(script(words[0], tuple(COMMANDS)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
