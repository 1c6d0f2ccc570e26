"""The loss bench: its table, and a small run.

The run shows that the three losses are equal, but not how fast they are.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from pool import ROOT, environment

sys.path.insert(0, str(ROOT / "tools" / "bench"))

import bench_loss


def test_the_three_ways_compute_the_same_loss_and_whole_logits_keep_most():
    found = {way: bench_loss.measure(way, 512, 3000, 16, 1) for way in bench_loss.WAYS}
    assert found["chunked"]["loss"] == pytest.approx(found["whole"]["loss"], rel=1e-6)
    assert found["torch"]["loss"] == pytest.approx(found["whole"]["loss"], rel=1e-6)
    assert found["whole"]["kept"] >= 4 * 512 * 3000 > 100 * found["chunked"]["kept"]


@pytest.mark.slow
def test_a_small_run_writes_a_page(tmp_path: Path):
    argv = [
        sys.executable,
        ROOT / "tools/bench/bench_loss.py",
        "--tokens",
        "64",
        "--vocabulary",
        "500",
        "--rounds",
        "1",
        "--page",
        tmp_path / "page.md",
    ]
    subprocess.run(argv, env=environment(), check=True, timeout=120)
    rows = [
        line
        for line in (tmp_path / "page.md").read_text().splitlines()
        if line.startswith("| 64 | 500 |")
    ]
    assert [row.split(" | ")[2] for row in rows] == list(
        bench_loss.WAYS.values()
    ) and " | 1.00 | " in rows[0]
