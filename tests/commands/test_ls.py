"""recipekit/commands/ls.py: one line for each recipe, with the numbers in its file."""

import os
import pty
import re
import subprocess
import sys

import pytest
from pool import ROOT, environment
from recipekit.commands import ls
from recipekit.spec.shipped import recipes

FILES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.py"))}
# name -> JSON, layout, hardware and last checks, from README.md's table. test_recipes.py compares
# that table with the recipes.
ROWS = {
    name: row
    for name, *row in re.findall(
        r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \| (.+) \|$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
}


def test_there_is_one_line_for_each_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert ls.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(FILES) == list(recipes())


@pytest.mark.parametrize("name", FILES)
def test_a_line_has_the_numbers_of_its_recipe(name: str) -> None:
    strategy, mesh, hardware, checked = ROWS[name]
    text = " ".join(FILES[name].read_text().split('"""')[1].split())
    line = ls.read_listing(FILES[name])
    strategy = strategy.removeprefix("none: ").removesuffix(".json")
    assert (line.name, line.layout, line.hardware, line.checked) == (
        name,
        f"{strategy} {mesh}",
        hardware,
        f"CPU {checked.replace('; ', ', GPU ')}",
    )
    assert (
        f"({line.states} of states" in text if line.states != "-" else "GiB of states" not in text
    )
    assert text.startswith(f"{line.goal} deepspeed --")


def test_known_lines() -> None:
    lines = {
        name: ls.read_listing(FILES[name]).columns[:4]
        for name in ("llama_nano_zero2", "llama3_1_405b_zero1_pp16_tp8", "llama3_2_1b_ddp")
    }
    assert list(lines.values()) == [
        ("llama_nano_zero2", "zero2 dp2", "-", "2 CPU cores, or any GPU"),
        ("llama3_1_405b_zero1_pp16_tp8", "zero1 dp2_tp8_pp16", "35.6 GiB", "256 x 80 GB GPUs"),
        ("llama3_2_1b_ddp", "ddp dp4", "18.4 GiB", "4 x 40 GB GPUs"),
    ]


def test_a_line_is_cut_at_the_edge_of_a_terminal() -> None:
    columns = 100
    parent, terminal = pty.openpty()
    listed = subprocess.Popen(
        [sys.executable, "-m", "recipekit", "ls"],
        env=environment() | {"COLUMNS": str(columns)},
        stdout=terminal,
    )
    os.close(terminal)
    text = b""
    while chunk := _read(parent):
        text += chunk
    assert listed.wait(60) == 0
    lines = text.decode().splitlines()
    assert (
        len(lines) == len(FILES)
        and max(map(len, lines)) == columns
        and any(line.endswith("...") for line in lines)
    )


@pytest.mark.parametrize(
    ("room", "line"),
    [
        (0, "one two three"),
        (13, "one two three"),
        (12, "one two t..."),
        (4, "o..."),
        (3, "one two three"),
    ],
)
def test_a_cut_line_fits_its_room(room: int, line: str) -> None:
    assert ls.truncate_line("one two three", room) == line


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other end is closed
        return b""
