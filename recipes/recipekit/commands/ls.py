"""List the recipes, one line each: name, layout, GiB of states on each rank, hardware, last checks
and goal.

    recipekit ls

The checks are the date of the last run with --tiny on the CPU, and the speed on a GPU ("-": not
measured). A terminal cuts long lines at its right edge. To copy a recipe: recipekit cp NAME
mine.py.
"""

import argparse
import ast
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from ..spec.command import recipe_of
from ..spec.help_page import CommandFormatter
from ..spec.mesh import make_mesh
from ..spec.shipped import last_check, recipes

RANKS = re.compile(
    r"^ {4}deepspeed (?:--hostfile \S+ --num_nodes (\d+) )?--num_gpus (\d+) ", re.MULTILINE
)
STATES = re.compile(r"([\d.]+) GiB of states")
NEEDS = re.compile(r"^Needs: ([^(.]+)", re.MULTILINE)


@dataclass(frozen=True)
class RecipeListing:
    """One recipe's line in the list."""

    name: str
    layout: str  # strategy, and parallel degrees for the ranks in the docstring's command
    states: str  # GiB per rank; "-" for less than 0.1
    hardware: str
    checked: str  # date of the CPU run with --tiny, and the speed on a GPU
    goal: str

    @property
    def columns(self) -> tuple[str, ...]:
        return self.name, self.layout, self.states, self.hardware, self.checked, self.goal


def read_listing(file: Path) -> RecipeListing:
    """Read a recipe's file.

    The listing combines values from its RECIPE with the command, memory and hardware in its
    docstring.
    """
    recipe = recipe_of(file)
    text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
    ranks, states, needs = RANKS.search(text), STATES.search(text), NEEDS.search(text)
    world = int(ranks[1] or 1) * int(ranks[2]) if ranks else 1
    mesh = make_mesh(world, tp=recipe.tp, pp=recipe.pp, sp=recipe.sp, ep=recipe.ep)
    strategy = (
        str(recipe.ds_config).removesuffix(".json")
        if recipe.engine == "deepspeed"
        else recipe.engine
    )
    return RecipeListing(
        name=file.stem,
        layout=f"{strategy} {mesh}",
        states=f"{states[1]} GiB" if states else "-",
        hardware=" ".join(needs[1].split()) if needs else "-",
        checked="CPU {}, GPU {}".format(*last_check(file.stem)),
        goal=" ".join(text.partition("\n\n")[0].split()),
    )


def truncate_line(line: str, width: int) -> str:
    """Return a line shortened to `width` characters.

    A width of 3 or less means no limit. For example, the width of a file is 0.
    """
    return f"{line[: width - 3]}..." if 3 < width < len(line) else line


def main(argv: list[str] | None = None) -> int:
    """Print the list and return the exit code."""
    parser = argparse.ArgumentParser(
        "recipekit ls", description=__doc__, formatter_class=CommandFormatter, allow_abbrev=False
    )
    parser.parse_args(argv)
    lines = [read_listing(file).columns for file in recipes().values()]
    widths = [min(28, max(map(len, column))) for column in zip(*lines, strict=True)][:-1]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for *cells, goal in lines:
        print(
            truncate_line(
                "  ".join(
                    [*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), goal]
                ),
                room,
            )
        )
    return 0
