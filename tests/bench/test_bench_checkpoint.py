"""The checkpoint bench: its table, and a small run.

The run shows that the bench compares the right operations, but not how fast they are.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pool import ROOT, environment

sys.path.insert(0, str(ROOT / "tools" / "bench"))

import bench_checkpoint


def tables(text: str) -> list[list[str]]:
    """Return the first cells of the rows in each stage's table."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("## "):
            found.append([])
        elif line.startswith("|"):
            assert line.count("|") == 8
            found[-1].append(line.strip("|").split("|")[0].strip())
    return [rows[2:] for rows in found]


def test_the_page_says_what_was_measured():
    kinds = {
        "none": {
            "stall": [0.0] * 3,
            "first": 0.0,
            "steps": [2.0, 3.0, 4.0],
            "left": [0.0] * 3,
            "bytes": 0,
        },
        "plain": {
            "stall": [1.0, 2.0, 9.0],
            "first": 3.0,
            "steps": [3.0] * 3,
            "left": [0.0] * 3,
            "bytes": 1400,
        },
        "at_once": {
            "stall": [4.0] * 3,
            "first": 5.0,
            "steps": [3.0] * 3,
            "left": [0.0] * 3,
            "bytes": 1410,
        },
        "background": {
            "stall": [0.5, 1.0, 1.5],
            "first": 2.0,
            "steps": [3.5, 4.0, 5.0],
            "left": [0.25] * 3,
            "bytes": 1410,
        },
    }
    said = {
        "date": "2030-01-02",
        "machine": "2 CPU cores",
        "load_before": 0.5,
        "load_after": 2.5,
        "versions": {"torch": "9"},
        "commit": "abc",
    }
    found = said | {
        "ranks": 2,
        "rounds": 3,
        "steps_after": 3,
        "stages": {"ZeRO-2": {"model": "m", "parameters": 100, "kinds": kinds}},
    }
    text = bench_checkpoint.page(found)
    assert tables(text) == [list(bench_checkpoint.TITLES.values())]
    assert (
        "| **ours**, in the background | 1.00 (0.50 to 1.50) | 2.00 | 4.00 | +1.00 | 0.25 | 14.10 |"
        in text
    )
    assert (
        "25% as long as a blocking save, **not** a small fraction" in text
        and "50% as long as DeepSpeed's plain save" in text
    )
    assert "A trial" in text


@pytest.mark.slow
def test_a_small_run(tmp_path: Path, ops: Callable[[str], None]):
    out = tmp_path / "out.json"
    tool = [
        sys.executable,
        str(ROOT / "tools" / "bench" / "bench_checkpoint.py"),
        "--tiny",
        "--rounds",
        "1",
        "--steps-after",
        "1",
    ]
    ended = subprocess.run(
        [*tool, "--folder", str(tmp_path), "--json", str(out)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(out.read_text())
    assert ended.stdout == bench_checkpoint.page(found)
    assert tables(ended.stdout) == [list(bench_checkpoint.TITLES.values())] * 2
    for report, least in ((found["stages"]["ZeRO-2"], 14), (found["stages"]["ZeRO-3"], 12)):
        sizes = {kind: own["bytes"] / report["parameters"] for kind, own in report["kinds"].items()}
        assert sizes.pop("none") == 0
        assert all(least < size < least + 1 for size in sizes.values()), "the same tensors"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "it cleans up"


def test_the_written_page_is_of_this_bench():
    text = (ROOT / "tools" / "bench" / "bench_checkpoint.md").read_text()
    assert tables(text) == [list(bench_checkpoint.TITLES.values())] * 2
    assert "on 2026-11-21:" in text
