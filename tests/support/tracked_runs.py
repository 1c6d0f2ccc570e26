"""A tracker, the metrics of its steps, and the wandb-core that it started."""

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import psutil
from recipekit.spec.recipe import Recipe
from recipekit.track import tracking
from wandb_file import wandb_files

RECIPE = Recipe(model="some/model", steps=100)
CONFIG = {
    "recipe": {"lr": 3e-4, "model": "some/model"},
    "ds_config": {"zero_optimization": {"stage": 2}},
    "mesh": {"dp": 2},
}


def step_metrics(step: int, job: int = 0) -> dict[str, Any]:
    """Return metrics with long, tiny or huge decimals; each job has different times."""
    return {
        "step": step,
        "loss": 10 / (step + 2 / 3) + job * 1e-15,
        "grad_norm": math.pi * 10.0 ** (step % 40 - 20),
        "lr": 5e-324 * step,
        "tokens": step * 2**40 + 1,
        "step_s": 0.1 + job / 3,
        "tokens_per_s": 1e6 / 7,
        "data_wait_s": 0.0,
        "peak_mem_bytes": 2**36 + step,
    } | ({"eval_loss": 1 / step} if step % 5 == 0 else {})


def open_tracker(run_dir: Path, start_step: int = 0, recipe: Recipe = RECIPE) -> Any:
    return tracking.open_tracker(
        run_dir=run_dir, is_main=True, start_step=start_step, **of_run(recipe)
    )


def of_run(recipe: Recipe = RECIPE, **wandb: Any) -> dict[str, Any]:
    run = tracking.WandbRun(**{"name": "name", "config": CONFIG, "project": recipe.project} | wandb)
    return {"last_step": recipe.steps, "wandb": run if recipe.wandb else None}


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def wandb_core(
    run_dir: Path, process: psutil.Process | None = None, start: int = 1
) -> psutil.Process:
    """Return the wandb-core process of the given process (default: this process) once it records
    the run.

    `start` is the number of times that the run has been recorded.
    """
    # A generous time limit: on two cores with four busy processes, a start took more than 20 s.
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        recording = len(wandb_files(run_dir)) == start
        # An earlier test's process may still be ending. The newest process belongs to this run.
        with contextlib.suppress(psutil.NoSuchProcess):
            children = sorted(
                (process or psutil.Process()).children(),
                key=lambda child: child.create_time(),
                reverse=True,
            )
            cores = [
                child
                for child in children
                if child.name() == "wandb-core" and child.status() != psutil.STATUS_ZOMBIE
            ]
            if recording and cores:
                return cores[0]
        time.sleep(0.05)
    raise AssertionError("wandb-core did not start")
