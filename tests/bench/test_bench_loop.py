"""The loop bench: its arithmetic, its table, and a small run.

The run shows that the bench compares the right operations, but not how fast they are.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from pool import ROOT, environment

sys.path.insert(0, str(ROOT / "tools" / "bench"))

import bench_loop
import harness

TOOL = ROOT / "tools" / "bench" / "bench_loop.py"


def bench(*flags: object, limit: int = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, flags)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=limit)


def table(text: str) -> dict[str, list[str]]:
    """Return the other cells of each row, by the loop's title."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    assert [len(line) for line in lines] == [5] * (2 + len(bench_loop.LOOPS))
    return {line[0]: line[1:] for line in lines[2:]}


def report(**changes: Any) -> dict[str, Any]:
    """Return a report of 3 pairs of 2-step blocks with round figures."""
    seconds = {
        "ours": [2.0, 4.0, 8.0],
        "bare": [2.0, 4.2, 7.2],
        "trainer": [4.0, 8.0, 16.0],
        "accelerate": [2.0, 4.0, 8.0],
    }
    said = {
        "date": "2030-01-02",
        "command": "tools/bench/bench_loop.py",
        "machine": "2 CPU cores",
        "load_before": 0.5,
        "load_after": 2.5,
        "versions": {"torch": "9"},
        "commit": "abc",
    }
    setting = {
        "model": "m",
        "ranks": 2,
        "ds_config": "zero2.json",
        "seq_len": 100,
        "micro_batch": 1,
        "global_batch": 4,
        "tokens_per_step": 400,
        "wandb": "off",
    }
    blocks = {
        "pairs": 3,
        "steps_per_block": 2,
        "seconds": seconds,
        "step_s": 2.0,
        "data_wait_s": 0.01,
        "losses": {loop: 3.0 for loop in bench_loop.LOOPS},
    }
    return (
        said
        | setting
        | blocks
        | {
            "outside": {
                loop: {"outside_s": 0.005, "collectives_s": 0.002} for loop in bench_loop.LOOPS
            }
        }
        | changes
    )


def test_the_table_says_what_was_measured():
    text = bench_loop.page(report())
    rows = table(text)
    # 400 tokens divided by the median of 1, 2 and 4 s.
    assert rows["`recipekit.train.loop`"] == ["200", "2000.0", "1", "3.00 + 2.00"]
    assert rows["bare DeepSpeed loop"][:2] == ["190", "2100.0"]
    assert rows["bare DeepSpeed loop"][2] == "1.0000 (0.9000 to 1.0500)"  # of 2/2, 4.2/4, 7.2/8
    assert rows["`transformers.Trainer`"][2] == "2.0000 (2.0000 to 2.0000)"
    assert "reaches 0.98" in text and "is above 1" in text
    assert "10.00 ms of a step for data, 0.50%" in text
    assert "2030-01-02" in text and "a trial, not a measurement" in text
    assert "a trial" not in bench_loop.page(report(pairs=30))


def test_a_missed_target_is_said():
    slower = {
        "ours": [2.0] * 3,
        "bare": [1.9] * 3,
        "trainer": [1.9, 2.0, 2.1],
        "accelerate": [2.0] * 3,
    }
    text = bench_loop.page(report(seconds=slower))
    assert "does NOT reach 0.98" in text and "is NOT above 1" in text


def test_a_page_of_some_loops_judges_those_only():
    text = bench_loop.page(report(seconds={"ours": [2.0] * 3, "trainer": [3.0] * 3}))
    titles = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")][2:]
    assert titles == ["`recipekit.train.loop`", "`transformers.Trainer`"]
    assert "is above 1" in text and "against the bare loop" not in text


def test_the_interval_is_of_the_median_and_repeatable():
    values = [1 + (number - 50) / 1000 for number in range(101)]
    middle, low, high = harness.bootstrap_interval(values)
    assert middle == 1 and harness.bootstrap_interval(values) == (middle, low, high)
    # For 101 values the order statistics 41 and 61 bound the median with 95 % confidence.
    assert low == pytest.approx(0.990, abs=0.003) and high == pytest.approx(1.010, abs=0.003)
    assert harness.bootstrap_interval([0.9] * 40) == (0.9, 0.9, 0.9)


def test_a_loop_takes_as_many_steps_as_it_is_told():
    from torch import device

    steps = []

    def train(pause: Callable[[], None]) -> None:
        for step in range(1, 7):
            steps.append(step)
            pause()
        raise ZeroDivisionError("in the loop")

    loop = bench_loop.Paused(device("cpu"), train)
    assert steps == [1]
    loop.run(3)
    assert steps == [1, 2, 3, 4]
    loop.run(2)
    with pytest.raises(ZeroDivisionError, match="in the loop"):
        loop.run(1)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            [
                "--pairs",
                0,
                "--steps-per-block",
                -1,
                "--stop_at",
                3,
                "--json",
                "no/such/folder/out.json",
            ],
            [
                "--pairs 0: must be at least 1",
                "--steps-per-block -1",
                "--stop_at: is set by the bench",
                "its folder does not exist",
            ],
        ),
        (
            ["--micro_batch", 0, "--deepspeed_config", "absent.json"],
            ["micro_batch = 0", "absent.json"],
        ),
    ],
)
def test_bad_input_is_refused(flags: list[object], says: list[str]):
    ended = bench(*flags)
    assert ended.returncode == 1 and not ended.stdout and "Traceback" not in ended.stderr
    assert ended.stderr.count("refused: ") == 1
    for words in says:
        assert words in ended.stderr


@pytest.mark.slow
def test_a_small_run(tmp_path: Path, ops: Callable[[str], None]):
    out = tmp_path / "report.json"
    ended = bench(
        "--pairs", 2, "--steps-per-block", 2, "--tiny", "--no-wandb", "--json", out, limit=300
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    found = json.loads(out.read_text())
    assert ended.stdout == bench_loop.page(found)
    assert found["tokens_per_step"] == found["global_batch"] * found["seq_len"] == 8 * 128
    assert found["ranks"] == 2 and found["wandb"] == "off"

    assert (
        found["seconds"].keys()
        == found["outside"].keys()
        == found["losses"].keys()
        == bench_loop.LOOPS.keys()
    )
    rows = table(ended.stdout)
    for loop, title in bench_loop.LOOPS.items():
        seconds = found["seconds"][loop]
        assert len(seconds) == 2 and all(0 < took < 60 for took in seconds)
        assert rows[title][1] == f"{1000 * median(seconds) / 2:.1f}"
        outside = found["outside"][loop]
        assert 0 <= outside["collectives_s"] <= outside["outside_s"] < median(seconds)
        if loop != "ours":
            ratio = median(
                theirs / ours
                for ours, theirs in zip(found["seconds"]["ours"], seconds, strict=True)
            )
            assert rows[title][2].startswith(f"{ratio:.4f} (")
    # The bare loop's collectives are all inside the engine. Our loop also sums the loss and the
    # tokens itself.
    assert (
        found["outside"]["bare"]["collectives_s"] == 0 < found["outside"]["ours"]["collectives_s"]
    )
    losses = found["losses"].values()
    assert 3 < min(losses) <= max(losses) < min(losses) * 1.01, "the four loops train the same"
    assert 0 < found["data_wait_s"] < found["step_s"]


def test_the_written_page_is_of_this_bench():
    text = (ROOT / "tools" / "bench" / "bench_loop.md").read_text()
    assert list(table(text)) == list(bench_loop.LOOPS.values())
    pairs = re.search(r"ran (\d+) pairs", text)
    assert pairs and int(pairs[1]) >= bench_loop.ENOUGH_PAIRS
    assert re.search(r"on 20\d\d-\d\d-\d\d:", text), "dated"
