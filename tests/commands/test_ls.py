"""recipekit/commands/ls.py: a line for each recipe, with the numbers of its file."""

import os
import pty
import subprocess
import sys

import pytest
from pool import environment
from recipekit.commands import ls
from recipekit.mesh import make_mesh
from recipekit.shipped import recipes
from test_recipes import FILES, docstring, load, needs, num_gpus


def test_there_is_one_line_for_each_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert ls.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(FILES) == list(recipes())


@pytest.mark.parametrize("name", FILES)
def test_a_line_has_the_numbers_of_its_recipe(name: str) -> None:
    """Against what the tests of the recipes read from the file; `test_recipes.py` holds that to the plan."""
    line, recipe = ls.read_line(FILES[name]), load(name).RECIPE
    mesh = make_mesh(num_gpus(name), tp=recipe.tp, pp=recipe.pp, sp=recipe.sp, ep=recipe.ep)
    strategy = recipe.ds_config.removesuffix(".json") if recipe.engine == "deepspeed" else recipe.engine
    assert (line.name, line.layout, line.hardware) == (name, f"{strategy} {mesh}", needs(name))
    assert line.states == "-" or f"({line.states} of states" in " ".join(docstring(name).split())
    assert line.states != "-" or "GiB of states" not in docstring(name)
    assert line.goal == " ".join(docstring(name).split("\n\n")[0].split())


def test_known_lines() -> None:
    lines = {name: ls.read_line(FILES[name]).columns[:4] for name in ("llama_nano_zero2", "llama3_1_405b_zero1_pp16_tp8", "llama3_2_1b_ddp")}
    assert list(lines.values()) == [
        ("llama_nano_zero2", "zero2 dp2", "-", "2 CPU cores, or any GPU"),
        ("llama3_1_405b_zero1_pp16_tp8", "zero1 dp2_tp8_pp16", "35.6 GiB", "256 x 80 GB GPUs"),
        ("llama3_2_1b_ddp", "ddp dp4", "18.4 GiB", "4 x 40 GB GPUs"),
    ]


def test_a_line_is_cut_at_the_edge_of_a_terminal() -> None:
    columns = 100
    parent, terminal = pty.openpty()
    listed = subprocess.Popen([sys.executable, "-m", "recipekit", "ls"], env=environment() | {"COLUMNS": str(columns)}, stdout=terminal)
    os.close(terminal)
    text = b""
    while chunk := _read(parent):
        text += chunk
    assert listed.wait(60) == 0
    lines = text.decode().splitlines()
    assert len(lines) == len(FILES) and max(map(len, lines)) == columns and any(line.endswith("...") for line in lines)


@pytest.mark.parametrize(("room", "line"), [(0, "one two three"), (13, "one two three"), (12, "one two t..."), (4, "o..."), (3, "one two three")])
def test_a_cut_line_fits_its_room(room: int, line: str) -> None:
    assert ls.cut("one two three", room) == line


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other end is closed
        return b""
