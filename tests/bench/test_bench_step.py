"""The bench of a step compared with an earlier commit: its arithmetic, its documents, and a small
run.
"""

import json
import subprocess
import sys

import pytest
from pool import ROOT, environment

sys.path.insert(0, str(ROOT / "tools" / "bench"))

import bench_step

TOOL = ROOT / "tools" / "bench" / "bench_step.py"


def test_the_page_has_the_ratio_of_each_round():
    rounds = [
        [{"before": before, "now": now}] * 2 for before, now in ((2.0, 1.0), (1.0, 2.0), (3.0, 2.0))
    ]
    text = bench_step.page(
        "abc", {256: rounds, 4096: [[{"before": 0.3, "now": 0.1}]] * 3}, ["abc", "--tp", "2"]
    )
    assert "| 256 | 2,000 | 2,000 | 1.500 | 0.500 to 2.000 |" in text
    assert "| 4,096 | 300 | 100 | 3.000 | 3.000 to 3.000 |" in text
    assert (
        "bench_step.py abc --tp 2" in text
        and "ran 3 rounds. In each round, both trees had 2 turns" in text
    )


def test_documents_are_short_and_the_same_on_every_call(tmp_path):
    for name in ("one", "two"):
        bench_step.write_documents(tmp_path / name)
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text()
    texts = [json.loads(line)["text"] for line in (tmp_path / "one").read_text().splitlines()]
    assert len(texts) == bench_step.MOST_DOCUMENTS and max(map(len, texts)) <= 1000


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--turns", "0"]], ids=" ".join)
def test_nothing_to_time_is_refused(flags):
    done = subprocess.run(
        [sys.executable, TOOL, "HEAD", *flags],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "at least one of each" in done.stderr


@pytest.mark.slow
def test_a_small_run_compares_a_commit_with_the_tree(ops):
    ops("cpu_adam")
    command = [
        sys.executable,
        TOOL,
        "HEAD",
        "--seq_len",
        "128",
        "--rounds",
        "1",
        "--turns",
        "2",
        "--seconds",
        "0.5",
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("| 128 |"))
    assert all(float(cell.replace(",", "")) > 0 for cell in row.split("|")[2:5])
