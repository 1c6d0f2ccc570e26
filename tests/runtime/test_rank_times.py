"""A rank that is stopped from outside is named, and clean steps name nobody."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import read_metrics
from short_runs import BASE, train

slow = pytest.mark.slow
QUIET = replace(BASE, eval_every=0, save_every=0, audit_every=0, ds_config="zero1.json")
STOPPED, RUNNING = 0.15, 0.1  # seconds: stopped 60 % of the time


def train_here(recipe: Recipe, argv: list[str]) -> tuple[Any, str]:
    """Train on a rank of a pool, whose process id is written beside the run."""
    Path(f"{recipe.out}.{os.environ['RANK']}").write_text(str(os.getpid()))
    return train(recipe, argv)


@contextlib.contextmanager
def stopping(out: Path, rank: int, after: int) -> Iterator[None]:
    """Stop a rank's process again and again, once metrics.jsonl has `after` lines."""
    done = threading.Event()

    def work() -> None:
        lines = out / "metrics.jsonl"
        while not done.wait(0.02):
            if lines.exists() and len(lines.read_text().splitlines()) >= after:
                break
        pid = int(Path(f"{out}.{rank}").read_text())
        while not done.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED)
            os.kill(pid, signal.SIGCONT)
            done.wait(RUNNING)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def alerts_of(out: Path, kind: str = "straggler") -> list[dict[str, Any]]:
    path = out / "alerts.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize(
    ("world", "argv", "after"),
    [
        (2, [], 4),
        pytest.param(4, [], 4, marks=slow),
        pytest.param(2, ["--tp", "2"], 4, marks=slow),
        pytest.param(2, ["--pp", "2"], 60, marks=slow),  # a stage is compared with its past
    ],
    ids=["dp2", "dp4", "tp2", "pp2"],
)
def test_a_rank_that_is_stopped_again_and_again_is_named(
    pools: Any, tmp_path: Path, world: int, argv: list[str], after: int
) -> None:
    out = tmp_path / "run"
    recipe = replace(QUIET, steps=after + 26, out=str(out))
    with stopping(out, 1, after):
        results = pools.run(world, train_here, recipe=recipe, argv=argv, timeout=240)
    print(f"load {os.getloadavg()[0]:.1f}")
    assert [code for code, _ in results] == [0] * world, results[0][1]
    (alert,) = alerts_of(out)
    assert alert["rank"] == 1 and alert["level"] == "warning"
    assert alert["value"] > alert["limit"]
    # The times of a step are known in the next one, and the stops may begin during a step.
    assert after + 10 <= alert["step"] <= after + 22
    assert "on the other ranks, so its device or host is slow" in alert["text"]


def test_the_metrics_tell_waiting_from_working(pools: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    results = pools.run(2, train_here, recipe=replace(QUIET, out=str(out)), argv=[])
    assert [code for code, _ in results] == [0, 0], results[0][1]
    first, *lines = read_metrics(out)
    assert "comm_s" not in first
    for before, line in zip([first, *lines], lines, strict=False):
        assert 0 < line["own_s_max"] <= before["step_s"] * 1.5
        assert 0 <= line["comm_s"] < before["step_s"] * 1.5


@slow
@pytest.mark.parametrize(("world", "argv"), [(2, []), (4, []), (2, ["--pp", "2"])])
def test_clean_steps_name_nobody(pools: Any, tmp_path: Path, world: int, argv: list[str]) -> None:
    out = tmp_path / "run"
    recipe = replace(QUIET, steps=1000, out=str(out))
    results = pools.run(world, train_here, recipe=recipe, argv=argv, timeout=900)
    print(f"load {os.getloadavg()[0]:.1f}")
    assert [code for code, _ in results] == [0] * world
    assert alerts_of(out) == []
