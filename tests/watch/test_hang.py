"""Hangs: the rank that the others wait for is named, and the job ends."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pool import environment
from recipekit.spec.errors import START_AGAIN

# A rank without torch, whose pace has a margin of 1 s. It takes a step every 0.1 s until the file
# `wait_N` exists.
RANK = """
import os, sys, time
from pathlib import Path
from recipekit.watch.alerts import AlertLog
from recipekit.watch.hang import HangWatch, Ranks
from recipekit.watch.pace import Pace
from recipekit.watch.processes import process_state

rank, out = int(sys.argv[1]), Path("run")
Path(f"pid_{rank}.tmp").write_text(f"{os.getpid()} {process_state(os.getpid())[1]}")
Path(f"pid_{rank}.tmp").rename(f"pid_{rank}")
while len(list(Path(".").glob("pid_?"))) < 2:
    time.sleep(0.01)
pids = [Path(f"pid_{each}").read_text().split() for each in range(2)]
ranks = Ranks(rank, ("host",) * 2, {each: (int(pid), at) for each, (pid, at) in enumerate(pids)})

def say(text):
    print(text, flush=True)

def end(text):
    say(text)
    os._exit(75)

pace = Pace(margin=1.0)
pace.start(0)
log = AlertLog(out, say, lambda *_: None)
watch = HangWatch(ranks, pace, out, log.report, end, float(sys.argv[2]))

def slow_function():
    while Path(f"wait_{rank}").exists():
        time.sleep(0.1)

while True:
    time.sleep(0.1)
    slow_function()
    pace.add(0.1)
    pace.step += 1
    pace.boundary()
    Path(f"steps_{rank}").write_text(str(pace.step))
"""


class PlainRanks:
    """Two ranks of RANK, with their output."""

    def __init__(self, folder: Path, hang_s: float):
        self.folder = folder
        (folder / "run").mkdir()
        self.processes = []
        for rank in range(2):
            with (folder / f"output_{rank}").open("w") as output:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", RANK, str(rank), str(hang_s)],
                        cwd=folder,
                        env=environment(),
                        stdout=output,
                        stderr=output,
                    )
                )
        self.wait_for(lambda: all((folder / f"steps_{rank}").exists() for rank in range(2)))

    @property
    def alerts(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "alerts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, true: Callable[[], Any], seconds: float = 60.0) -> float:
        begun = time.monotonic()
        while not true():
            if time.monotonic() - begun > seconds:
                output = [(self.folder / f"output_{rank}").read_text() for rank in range(2)]
                raise AssertionError("\n".join(output))
            time.sleep(0.05)
        return time.monotonic() - begun

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def plain_ranks(tmp_path: Path) -> Iterator[Callable[[float], PlainRanks]]:
    made: list[PlainRanks] = []

    def start(hang_s: float) -> PlainRanks:
        made.append(PlainRanks(tmp_path, hang_s))
        return made[-1]

    yield start
    for ranks in made:
        ranks.close()


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_by_the_other_and_both_end(plain_ranks, stopped):
    ranks = plain_ranks(3.0)
    ranks.processes[stopped].send_signal(signal.SIGSTOP)
    (ranks.folder / f"wait_{1 - stopped}").touch()
    ranks.wait_for(lambda: ranks.alerts)
    (alert,) = ranks.alerts
    assert (alert["kind"], alert["rank"], alert["host"]) == ("hang", stopped, "host")
    assert f"rank {stopped} on host is stopped (state T)" in alert["text"]
    ranks.wait_for(lambda: all(process.poll() is not None for process in ranks.processes))
    codes = [process.returncode for process in ranks.processes]
    assert codes[1 - stopped] == START_AGAIN and codes[stopped] == -signal.SIGKILL
    assert len(ranks.alerts) == 1
    stacks = (ranks.folder / "run" / "hang" / f"rank_{1 - stopped}.txt").read_text()
    assert "MainThread" in stacks and "in slow_function" in stacks


def test_a_hang_that_ends_costs_nothing_and_the_next_one_is_found(plain_ranks):
    ranks = plain_ranks(0.0)
    for number in (1, 2):
        for rank in range(2):
            (ranks.folder / f"wait_{rank}").touch()
        ranks.wait_for(lambda number=number: len(ranks.alerts) == number)
        assert "in slow_function" in ranks.alerts[-1]["text"]
        for rank in range(2):
            (ranks.folder / f"wait_{rank}").unlink()
        before = (ranks.folder / "steps_0").read_text()
        ranks.wait_for(lambda before=before: (ranks.folder / "steps_0").read_text() != before)
        time.sleep(1.0)
    assert [process.poll() for process in ranks.processes] == [None, None]
    assert [alert["kind"] for alert in ranks.alerts] == ["hang", "hang"]
