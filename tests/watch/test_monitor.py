"""The monitor in the loop: a spike ends the run or is reported, and is judged alike on a resume."""

import json
import math
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
from recipekit.watch.blame import BadValue
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


BAD = BadValue(3, "node1", "cuda:0", "model.layers.1", "output", False, 2, 0, 17)


def test_a_value_that_is_not_finite_is_named():
    monitor, reported = reporting()
    monitor.not_finite(9, math.nan, 1.0, BAD)
    (alert,) = reported
    assert (alert.kind, alert.level, alert.answer) == ("nonfinite", "error", "stop")
    assert (alert.rank, alert.host, alert.device) == (3, "node1", "cuda:0")
    assert alert.text == (
        "step 9 has loss nan and grad_norm 1.0. The first value that is not finite is the output of"
        " model.layers.1 (micro-batch 2, forward pass) on rank 3 (node1, cuda:0)"
    )


def test_twenty_skipped_steps_in_a_row_end_the_run_also_after_a_resume():
    reported: list[Alert] = []
    answers = []
    for step in range(1, 41):
        monitor = Monitor("alert", reported.append, "skip")
        monitor.restore(answers[-1][1] if answers else None)
        if step == 10:  # a good step
            monitor.look(step, 3.0, 1.0, 100.0)
        elif alert := monitor.not_finite(step, math.nan, math.nan, None):
            answers.append((alert.answer, monitor.to_state()))
            continue
        answers.append(("", monitor.to_state()))
    assert [answer for answer, _ in answers[:29]] == ["skip"] * 9 + [""] + ["skip"] * 19
    assert answers[29][0] == "stop" and "20 steps in a row" in reported[28].text


def test_a_norm_above_the_limit_is_skipped_and_twenty_in_a_row_end_the_run():
    monitor, reported = reporting("skip")
    for step in range(1, 40):
        assert monitor.limit_norm() == math.inf or step > 32
        assert monitor.look(step, 3.0, 1.0, 100.0) is None
    assert monitor.limit_norm() == pytest.approx(2, rel=0.01)  # e ** 0.7
    answers = []
    for step in range(40, 60):
        monitor.limit_norm()
        answers.append(monitor.look(step, 3.0, 50.0, 100.0))
    assert answers[:19] == [None] * 19 and answers[19] is not None
    assert answers[19].answer == "stop" and answers[19].limit == monitor.most_norm
    assert {alert.answer for alert in reported[:-1]} == {"skip"}
    assert reported[0].text.endswith(": the step is passed over")


def test_a_fault_that_is_gone_names_a_rank_only_if_there_is_one():
    monitor, reported = reporting()
    monitor.recovered(9, math.nan, math.inf, {1: ("node1", "cuda:1")})
    monitor.recovered(9, 3.0, math.inf, {})
    monitor.recovered(9, math.nan, math.inf, {2: ("node2", "a"), 3: ("node2", "b")})
    assert [(alert.rank, alert.host) for alert in reported] == [
        (1, "node1"),
        (None, None),
        (None, None),
    ]
    assert {alert.answer for alert in reported} == {"retry"}
    assert reported[0].text.endswith("Not finite: only the loss of rank 1 (node1, cuda:1)")
    assert reported[2].text.endswith("Not finite: the losses of 2 (node2, a), 3 (node2, b)")


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
        ({"step": 7, "answer": "stop", "kind": "nonfinite"}, 6, True),
        ({"step": 7, "answer": "stop", "kind": "hang"}, 6, False),  # may be a fault of a host
        ({"step": 7, "answer": "retry", "kind": "nonfinite"}, 6, False),
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
        json.dumps({"identity": identity, "recipe": {"on_spike": "alert", "on_nonfinite": "stop"}})
    )
    lines = [json.dumps({"step": step}) for step in range(1, steps + 1)]
    (out / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if alert:
        (out / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
    if refused:
        with pytest.raises(ConfigError, match="stopped itself at step 7"):
            find_resume(recipe, out, None, tiny=False)
        other = replace(recipe, on_spike="skip", on_nonfinite="skip")
        assert find_resume(other, out, None, tiny=False) == out
    else:
        assert find_resume(recipe, out, None, tiny=False) == out
    assert find_resume(replace(recipe, resume="never"), out, None, tiny=False) is None
