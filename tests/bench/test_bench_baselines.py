"""The bench that compares engines: its arithmetic, its table, and a short run."""

import subprocess
import sys
from typing import Any

import pytest
from pool import ROOT, environment

sys.path.insert(0, str(ROOT / "tools" / "bench"))

import bench_baselines


def start(seconds: float, **changes: Any) -> dict[str, Any]:
    return {
        "start_s": 9.0,
        "step_s": seconds,
        "tokens": 400,
        "peak": 600 * 2**20,
        "sent": 2.5 * 2**20,
        "loss": 3.25,
    } | changes


def report(**changes: Any) -> dict[str, Any]:
    found = {way: [start(seconds) for seconds in (1.0, 2.0, 4.0)] for way in bench_baselines.WAYS}
    found["ddp"] = [start(seconds) for seconds in (0.5, 1.0, 1.0)]
    said = {
        "date": "2030-01-02",
        "command": "tools/bench/bench_baselines.py",
        "machine": "2 CPU cores",
        "load_before": 0.5,
        "load_after": 1.5,
        "versions": {"torch": "9"},
    }
    return said | {"ranks": 2, "on_gpu": False, "rounds": 3, "steps": 8, "found": found} | changes


def test_the_table_says_what_was_measured():
    text = bench_baselines.page(report())
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    }
    # 1/0.5, 2/1 and 4/1 times as fast.
    assert rows["torch's DDP"] == ["3.2500", "400", "2.000 (2.000 to 4.000)", "600", "2.5", "9.0"]
    assert rows["DeepSpeed, ZeRO-2"][1:3] == ["200", "1"]
    assert "a trial, not a measurement" in text and "2030-01-02" in text
    assert (
        "not measured"
        in bench_baselines.page(report(on_gpu=True)).split("## Which")[0].split("start-up s")[1]
    )


def test_the_page_is_written_by_the_bench():
    """The page also contains the bench's explanations."""
    assert bench_baselines.WORDS in (ROOT / "tools" / "bench" / "bench_baselines.md").read_text()


@pytest.mark.slow
def test_a_short_run_measures_every_way():
    command = [
        sys.executable,
        str(ROOT / "tools" / "bench" / "bench_baselines.py"),
        "--rounds",
        "1",
        "--steps",
        "6",
        "--tiny",
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for title, _ in bench_baselines.WAYS.values():
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"| {title} |")]
        loss, speed, _, peak, sent, seconds = (cell.strip() for cell in line.split("|")[2:-1])
        assert (
            4 < float(loss) < 6
            and float(speed.replace(",", "")) > 0
            and float(peak.replace(",", "")) > 100
            and float(seconds) > 0
        )
        assert float(sent) > 1, "0.6 M parameters of 2 bytes at least"
