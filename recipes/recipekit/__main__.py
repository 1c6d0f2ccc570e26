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

from .spec.errors import ConfigError, Problem
from .spec.packages import REQUIRED_PACKAGES, require_packages


@dataclass(frozen=True)
class Subcommand:
    """A subcommand: recipekit/commands/NAME.py, which is imported only when it is called."""

    about: str
    packages: tuple[str, ...] = ()  # packages that the subcommand's module imports


COMMANDS = {
    "ls": Subcommand("list the recipes with layout, memory, hardware, last checks and goal"),
    "cp": Subcommand("copy a recipe or a JSON to a new file"),
    "run": Subcommand("start a recipe on one or several machines"),
    "lint": Subcommand("check a DeepSpeed JSON and write a fixed copy", ("hjson",)),
    "doctor": Subcommand("check this machine or all hosts of a run before you start it"),
    "convert": Subcommand(
        "convert checkpoints between layouts and Hugging Face files", REQUIRED_PACKAGES
    ),
    "sample": Subcommand("generate text with a trained model", REQUIRED_PACKAGES),
}
SHELLS = ("bash", "zsh")


def run_subcommand(name: str, *arguments: object) -> int:
    """Run a subcommand and return its exit code."""
    if COMMANDS[name].packages:
        require_packages(COMMANDS[name].packages)
    return importlib.import_module(f".commands.{name}", __package__).main(*arguments)


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand that a command line names, and return its exit code."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["ls"]
    try:
        if name in ("-h", "--help"):
            print(help_text())
            return 0
        if name == "--completion":
            return print_completion(words)
        if name not in COMMANDS:
            return print_usage_error(
                f"recipekit {name}", "is not a subcommand", suggest_subcommand(name)
            )
        code = run_subcommand(name, words)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # for example, recipekit ls | head -3
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def help_text() -> str:
    lines = [f"  {name:<9} {command.about}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: recipekit [COMMAND ...]", "", (__doc__ or "").strip(), "", "commands:", *lines]
    )


def print_usage_error(where: str, rule: str, fix: str) -> int:
    print(Problem(where, rule, fix), file=sys.stderr)
    return 2


def suggest_subcommand(name: str) -> str:
    """Return the fix for a word that is not a subcommand."""
    if name.endswith(".py"):
        return f"did you mean recipekit run {name}?"
    near = difflib.get_close_matches(name, COMMANDS, 2)
    return f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(COMMANDS)}"


def print_completion(argv: list[str]) -> int:
    """Print a shell's completion script."""
    if len(argv) != 1 or argv[0] not in SHELLS:
        return print_usage_error(
            " ".join(["--completion", *argv]),
            "requires the name of a shell",
            f"use one of {', '.join(SHELLS)}",
        )
    from .spec.completion import script

    print(script(argv[0], tuple(COMMANDS)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
