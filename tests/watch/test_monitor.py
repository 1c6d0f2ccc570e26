"""The monitor in the loop: a spike ends the run or is reported, and is judged alike on a resume."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import find_resume, read_metrics, run_identity
from recipekit.watch.alerts import Alert, NoAlerts
from recipekit.watch.monitor import Monitor, NoMonitor, Watch
from recipekit.watch.throughput import Goodput
from short_runs import BASE, train

STEPS, SPIKE = 44, 40
SPIKES = (SPIKE, SPIKE + 1, SPIKE + 2)
LONG = replace(BASE, steps=STEPS, eval_every=0, lr=1e-4, save_every=36)


def train_with_spike(recipe: Recipe, first: int, steps: tuple[int, ...]) -> tuple[Any, str]:
    """Train on a rank of a pool, with ten times the loss in some steps.

    `first` is the first step that this start takes.
    """
    from recipekit import train as loop
    from recipekit.tasks.find import load_task

    now = [first - 1]

    def next_step(engine: object, batches: object) -> None:
        now[0] += 1

    def load(name: str) -> Any:
        task = load_task(name)

        def loss(output: Any, batch: Any, by_row: bool) -> Any:
            return (10 if now[0] in steps else 1) * task.loss(output, batch, by_row)

        return replace(task, loss=loss, before_step=next_step)

    loop.load_task = load  # type: ignore[assignment]
    try:
        return train(recipe, [])
    finally:
        loop.load_task = load_task  # type: ignore[assignment]


def alerts_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "alerts.jsonl").read_text().splitlines()]


def test_a_spike_ends_the_run_in_its_second_step_and_the_command_is_not_repeated(pools, tmp_path):
    out = tmp_path / "run"
    stopping = replace(LONG, on_spike="stop", out=str(out))
    results = pools.run(2, train_with_spike, recipe=stopping, first=1, steps=SPIKES)
    assert [code for code, _ in results] == [1, 1]
    assert "stopped by --on_spike stop" in results[0][1]
    assert "the last good checkpoint is step 36" in results[0][1]
    (alert,) = [line for line in alerts_of(out) if line["level"] == "error"]
    assert alert["step"] == SPIKE + 1 and alert["answer"] == "stop"
    assert alert["value"] > alert["limit"]
    lines = read_metrics(out)
    assert lines[-1]["step"] == SPIKE
    assert lines[0]["time"] <= lines[-1]["time"] <= time.time()
    assert all(0 < line["goodput"] <= 1 for line in lines)
    assert all(line["loss_max"] >= line["loss"] for line in lines)

    (again, _), _ = pools.run(2, train_with_spike, recipe=stopping, first=37, steps=SPIKES)
    assert "stopped itself at step 41" in again

    # The window is part of the checkpoint of step 36, so the resumed run judges alike.
    through = replace(stopping, on_spike="alert")
    results = pools.run(2, train_with_spike, recipe=through, first=37, steps=SPIKES)
    assert [code for code, _ in results] == [0, 0]
    (warning,) = [line for line in alerts_of(out) if line["level"] == "warning"]
    assert (warning["step"], warning["value"], warning["limit"]) == (
        SPIKE + 1,
        alert["value"],
        alert["limit"],
    )
    assert "alert (spike)" in results[0][1] and read_metrics(out)[-1]["step"] == STEPS


def reporting(on_spike: str = "alert") -> tuple[Monitor, list[Alert]]:
    reported: list[Alert] = []
    return Monitor(on_spike, reported.append, clock=lambda: 5.0), reported


def test_a_norm_alone_is_a_spike():
    monitor, reported = reporting()
    for step in range(1, 40):
        monitor.look(step, 3.0, 1.0, 100.0)
    assert monitor.look(40, 3.0, 50.0, 100.0) is None
    assert monitor.look(41, 3.0, 50.0, 100.0) is None
    (alert,) = reported
    assert alert.text.startswith("grad_norm 50 at step 41 is the second in a row")


def test_a_spike_that_rewinds_the_run_is_reported_by_the_rewind():
    monitor, reported = reporting("rewind")
    for step in range(1, 40):
        monitor.look(step, 3.0, 1.0, 100.0)
    windows = monitor.to_state()
    assert monitor.look(40, 9.0, 1.0, 100.0) is None
    alert = monitor.look(41, 9.0, 1.0, 100.0)
    assert alert and (alert.answer, alert.level, reported) == ("rewind", "error", [])
    watch = Watch(monitor, NoAlerts(), Goodput(0.0, 0.0))
    watch.go_back(windows, [{"time": time.time() - 8, "step_s": 2.0}])
    assert monitor.to_state() == windows
    assert watch.goodput.add(0.0) == pytest.approx(0.2, abs=0.01)
    watch.go_back(None, [])
    assert monitor.losses.recent == [] and monitor.norms.logarithm


def test_a_drop_in_throughput_and_a_divergence_are_reported():
    monitor, reported = reporting()
    for step in range(1, 100):
        monitor.look(step, 3.0, 1.0, 100.0)
    for step in range(100, 200):
        assert monitor.look(step, 3.4, 1.0, 80.0) is None
    assert [alert.kind for alert in reported] == ["spike", "throughput", "divergence"]
    assert {alert.level for alert in reported} == {"warning"}


def test_a_loss_that_is_not_finite_names_its_rank():
    monitor, reported = reporting()
    monitor.not_finite(9, float("nan"), 1.0, rank=3)
    (alert,) = reported
    assert (alert.kind, alert.level, alert.answer, alert.rank) == ("nonfinite", "error", "stop", 3)
    assert "Rank 3" in alert.text


def test_a_checkpoint_without_windows_is_accepted():
    monitor, _ = reporting()
    monitor.restore(None)
    monitor.restore(NoMonitor().to_state())
    assert monitor.losses.recent == []


@pytest.mark.parametrize(
    ("alert", "steps", "refused"),
    [
        ({"step": 7, "answer": "stop", "kind": "spike"}, 6, True),
        ({"step": 7, "answer": "stop", "kind": "spike"}, 8, False),  # the run went on
        ({"step": 7, "answer": "stop", "kind": "nonfinite"}, 6, False),  # may be a fault of a host
        ({"step": 7, "kind": "spike"}, 6, False),
        (None, 6, False),
    ],
)
def test_a_command_that_would_repeat_a_stop_is_refused(tmp_path, alert, steps, refused):
    out = tmp_path / "run"
    os.makedirs(out)
    recipe = replace(LONG, out=str(out))
    identity = run_identity(recipe, None)
    (out / "run.json").write_text(
        json.dumps({"identity": identity, "recipe": {"on_spike": "alert"}})
    )
    lines = [json.dumps({"step": step}) for step in range(1, steps + 1)]
    (out / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if alert:
        (out / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
    if refused:
        with pytest.raises(ConfigError, match="stopped itself at step 7"):
            find_resume(recipe, out, None, tiny=False)
    else:
        assert find_resume(recipe, out, None, tiny=False) == out
    assert find_resume(replace(recipe, resume="never"), out, None, tiny=False) is None
