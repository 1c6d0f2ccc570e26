"""The converter bench: its arithmetic, its table, and a small run.

The run shows that the bench compares the right operations, but not how fast they are.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pool import ROOT, environment

sys.path.insert(0, str(ROOT / "tools" / "bench"))

import bench_convert

COLUMNS = 8


def table(text: str) -> dict[str, list[str]]:
    """Return the other cells of each row, by the row's title."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    assert {len(line) for line in lines} == {COLUMNS}
    return {line[0]: line[1:] for line in lines[2:]}


def report(seconds: dict[str, list[float]], resident: float = 0.5e9) -> dict[str, Any]:
    """Return a report of three rounds with round figures."""
    rows = {
        row: {
            "seconds": own,
            "cpu": own,
            "bytes": 4e9,
            "resident": resident,
            "anonymous": resident / 2,
        }
        for row, own in seconds.items()
    }
    said = {
        "date": "2030-01-02",
        "machine": "2 CPU cores",
        "load_before": 0.5,
        "load_after": 2.5,
        "versions": {"torch": "9"},
        "commit": "abc",
    }
    return said | {"rounds": 3, "checkpoint_bytes": 4e9, "rows": rows}


def test_the_page_tells_which_target_is_missed():
    seconds = {"cp": [4.0, 2.0, 8.0], "reshape": [5.0, 4.0, 8.0], "universal": [30.0, 20.0, 32.0]}
    text = bench_convert.page(report(seconds))
    rows = table(text)
    # Median of 4/5, 2/4 and 8/8.
    assert rows[bench_convert.TITLES["reshape"]][1:5] == [
        "5.00 (4.00 to 8.00)",
        "5.0",
        "800",
        "80%",
    ]
    assert "reached: **ours:** `reshape --zero 1 --dp 4` has 80% of `cp`'s speed" in text
    # Median of 6, 5 and 4.
    assert "reached: **ours:** `reshape --zero 1 --dp 4` is 5.0 times as fast" in text
    assert "A trial" in text, "three rounds are too few"
    slower = {"to_hf": [2.0, 2.0, 2.0], "zero_to_fp32": [1.0, 1.5, 3.0]}
    text = bench_convert.page(report(slower, resident=2e9))
    assert (
        "**missed**: **ours:** `to-hf --dtype fp32` takes 1.33 of the time of `zero_to_fp32.py`"
        in text
    )
    assert "**missed**: ours took at most 2.00 GB resident" in text


def test_memory_is_that_of_a_process_and_its_children():
    code = "import os, time; data = bytearray(64_000_000); print(flush=True); time.sleep(20)"
    shell = subprocess.Popen(
        ["sh", "-c", f"'{sys.executable}' -c '{code}'; true"], stdout=subprocess.PIPE
    )
    try:
        assert shell.stdout and shell.stdout.readline() == b"\n"
        resident, anonymous = bench_convert.memory_of(shell.pid)
        assert 64e6 < anonymous < resident < 128e6
    finally:
        for child in Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split():
            os.kill(int(child), 9)
        shell.communicate()
    assert bench_convert.memory_of(shell.pid) == (0, 0)


@pytest.mark.slow
def test_a_small_run(tmp_path: Path):
    chosen = ["cp", "reshape", "cp_fp32", "to_hf"]
    command = [
        sys.executable,
        str(ROOT / "tools" / "bench" / "bench_convert.py"),
        "--tiny",
        "--rounds",
        "1",
        "--folder",
        str(tmp_path),
    ]
    ended = subprocess.run(
        [*command, "--only", *chosen, "--json", str(tmp_path / "out.json")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert ended.stdout == bench_convert.page(found)
    rows = found["rows"]
    assert (
        list(table(ended.stdout))
        == [bench_convert.TITLES[row] for row in chosen]
        == [bench_convert.TITLES[row] for row in rows]
    )
    assert (
        rows["cp"]["bytes"] == found["checkpoint_bytes"]
        and rows["cp_fp32"]["bytes"] == rows["to_hf"]["bytes"]
    )
    assert 10e6 < rows["reshape"]["anonymous"] < rows["reshape"]["resident"] < 1e9
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "it cleans up"


def test_the_written_page_is_of_this_bench():
    text = (ROOT / "tools" / "bench" / "bench_convert.md").read_text()
    assert set(bench_convert.TITLES.values()) <= {
        line.strip("|").split("|")[0].strip() for line in text.splitlines() if line.startswith("|")
    }
    assert re.search(
        r"^Written by `python tools/bench/bench_convert.py` on 20\d\d-\d\d-\d\d: ",
        text,
        re.MULTILINE,
    )
