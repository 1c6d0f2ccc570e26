"""A step's line in metrics.jsonl, for tasks that count tokens or samples.

Lines from older versions must also be readable.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from metrics_page import page
from recipekit.runtime.metrics import PEAK_MEMORY, StepTimes, metrics_of
from recipekit.runtime.rank_times import NoRankClock
from recipekit.spec.mesh import Mesh
from recipekit.spec.run_folder import read_metrics, reproducible_values, unit_of_metrics
from recipekit.spec.task_specs import TASKS
from recipekit.track.loss_plot import curve_of
from recipekit.track.metrics_file import truncate_metrics
from recipekit.track.progress import Progress, progress_fields
from recipekit.track.summary import mean_throughput, summary_block
from recipekit.watch.throughput import Goodput
from run_metadata import FACTS

STATE: Any = {"domains": {"a": {"tokens": 30, "bad": 0}, "b": {"tokens": 10, "bad": 0}}}
RESULT = {
    "loss": 1.0,
    "grad_norm": 2.0,
    "tokens": 6,
    "stop": 0,
    "means": {},
    "extra": {PEAK_MEMORY: [5]},
    "losses_of_ranks": [1.0],
}
UNITS = [(name, facts.unit) for name, facts in TASKS.items()]


def line_of(task: str, ramp: str = "2:16") -> dict[str, Any]:
    """Return the line of step 3, with data from two corpora.

    The step has 6 tokens or samples in 2 seconds, and the run has 7 in total.
    """
    recipe = SimpleNamespace(
        batch_ramp=ramp, bad_rows="stop", ramp=SimpleNamespace(rows=lambda step: 16)
    )
    engine = SimpleNamespace(
        device=torch.device("cpu"), optimizer=SimpleNamespace(param_groups=[{"lr": 0.5}])
    )
    plan = SimpleNamespace(recipe=recipe, mesh=Mesh(), last_step=9, command=SimpleNamespace(rank=0))
    ready: Any = SimpleNamespace(
        plan=plan, engine=engine, state={"tokens": 7}, flops=None, peak_flops=None
    )
    ready.engine.current_loss_scale = lambda: None
    ready.watch = SimpleNamespace(goodput=Goodput(0.0, 0.0))
    ready.rank_clock = NoRankClock()
    ready.epochs, ready.tracker = (
        SimpleNamespace(completed_epochs=lambda state: {}, report=lambda state, say: None),
        SimpleNamespace(say=print),
    )
    ready.task = SimpleNamespace(spec=TASKS[task])
    ready.step_metrics = SimpleNamespace(
        by_domain=torch.tensor([[8.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
    )
    return metrics_of(ready, 3, RESULT, STATE, StepTimes(2.0, 0.1), None)


@pytest.mark.parametrize(("task", "unit"), UNITS, ids=[name for name, _ in UNITS])
def test_a_step_has_the_keys_of_its_unit_alone(task: str, unit: str) -> None:
    """W&B copies the line, so W&B has no panel for an absent key."""
    line = line_of(task)
    expected = {unit: 7, f"{unit}_per_s": 3.0, f"step_{unit}": 6, f"{unit}/a": 30, f"{unit}/b": 10}
    assert {
        key: value for key, value in line.items() if "tokens" in key or "samples" in key
    } == expected
    assert line["loss/a"] == 2.0 and "loss/b" not in line and line["global_batch"] == 16
    assert {key.replace("/a", "/NAME").replace("/b", "/NAME") for key in line} <= page().keys()
    assert not {"step_tokens", "step_samples", "global_batch"} & line_of(task, ramp="").keys()


def test_only_images_and_pairs_count_samples() -> None:
    assert {name for name, unit in UNITS if unit == "samples"} == {
        "preference",
        "reward",
        "image_classification",
    }


SAME = {"grad_norm": 1.0, "lr": 0.1, "step_s": 2.0, "data_wait_s": 0.5, "peak_mem_bytes": 2**30}
TEXT = [
    {"step": step, "loss": 3.0 / step, "tokens": 10 * step, "tokens_per_s": 5.0, **SAME}
    for step in (1, 2, 3, 4)
]
NEW = [
    {"step": step, "loss": 3.0 / step, "samples": 10 * step, "samples_per_s": 5.0, **SAME}
    for step in (1, 2, 3, 4)
]
# Lines of image tasks until November 2026.
OLD = [line | {"tokens": line["samples"], "tokens_per_s": line["samples_per_s"]} for line in NEW]


@pytest.mark.parametrize(
    ("lines", "unit"),
    [(TEXT, "tokens"), (NEW, "samples"), (OLD, "samples"), (OLD[:2] + NEW[2:], "samples")],
)
def test_readers_take_old_lines_and_new_ones(
    lines: list[dict[str, Any]], unit: str, tmp_path: Path
) -> None:
    """The readers are the summary, its block, the progress line, the plot and a comparison of runs.

    A resumed run has lines of both kinds.
    """
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert truncate_metrics(tmp_path / "metrics.jsonl", 4) == "" and read_metrics(tmp_path) == lines
    assert [unit_of_metrics(line) for line in lines] == [unit] * 4
    assert reproducible_values(lines) == reproducible_values(
        TEXT if unit == "tokens" else NEW
    ) and all(line[unit] for line in reproducible_values(lines))

    assert mean_throughput(lines) == (5.0, unit)
    block = summary_block(lines, FACTS, tmp_path, "the end").splitlines()
    assert f"steps      4 of 9, 40 {unit}" in block and f"speed      5 {unit}/s" in block

    for line in lines:
        progress = Progress(9)
        progress.step(line, 0.0)
        assert f"5 {unit}/s" in [part.text for part in progress_fields(progress, 0.0)]
    assert curve_of(lines, "loss")[0].tolist() == [1, 2, 3, 4]
