"""Trials of a W&B sweep, started by the code of `wandb agent`.

Each trial has a separate folder and W&B run, even after a kill.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from job import NANO, metrics, steps_done
from pool import environment
from recipekit.spec.command import parse, recipe_of
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args
from wandb.wandb_agent import Agent
from wandb_file import read_config, wandb_files

SWEEP = "s1sweep1"
POINTS: dict[str, dict[str, Any]] = {  # run -> its parameters; the last repeats the first
    "run1": {"lr": 1e-3, "deterministic": False, "warmup_steps": 1},
    "run2": {"lr": 2e-05, "deterministic": True, "warmup_steps": 0},
    "run3": {"lr": 1e-3, "deterministic": False, "warmup_steps": 0},
    "run4": {"lr": 1e-3, "deterministic": False, "warmup_steps": 1},
}
FLAGS = ["--tiny", "--steps", "6", "--save_every", "2", "--eval_every", "0", "--no-export"]


def command(run: str) -> dict[str, Any]:
    """Return the command that the W&B server sends to an agent."""
    args = {name: {"value": value} for name, value in POINTS[run].items()}
    return {"type": "run", "run_id": run, "program": str(NANO), "args": args}


@pytest.mark.parametrize("style", ["args", "args_no_boolean_flags"])
def test_a_recipe_reads_the_flags_of_an_agent(monkeypatch: pytest.MonkeyPatch, style: str) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", SWEEP)
    outs = []
    for run, point in POINTS.items():
        monkeypatch.setenv("WANDB_RUN_ID", run)
        words = create_sweep_command_args(command(run))[style]
        parsed = parse(recipe_of(NANO), NANO, [*FLAGS, *words])
        assert {name: getattr(parsed.recipe, name) for name in point} == point
        outs.append(str(parsed.out))
    assert outs == [f"runs/llama_nano_zero2_tiny_sweep_{SWEEP}/{run}" for run in POINTS]


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Agent]:
    """Return an agent without a server; it starts the commands that it receives."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, "")  # the agent sets these variables permanently
    monkeypatch.setenv("WANDB_SWEEP_ID", SWEEP)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    made = Agent.__new__(Agent)
    made._in_jupyter, made._function, made._forward_signals, made._run_processes = (
        False,
        None,
        False,
        {},
    )
    made._sweep_command = ["${env}", sys.executable, "${program}", *FLAGS, "${args}"]
    yield made
    for trial in made._run_processes.values():
        trial._popen.kill()
        trial._popen.wait()


def wait(true: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_four_trials_have_four_folders_and_four_runs(
    agent: Agent, tmp_path: Path, ops: Callable[[str], None]
) -> None:
    """The second trial is killed, and the agent restarts it.

    The fourth trial has the same parameters as the first.
    """
    sweep = tmp_path / "runs" / f"llama_nano_zero2_tiny_sweep_{SWEEP}"
    for run in POINTS:
        agent._command_run(command(run))
        if run == "run2":
            wait(lambda: steps_done(sweep / "run2") >= 3, 240)
            agent._run_processes["run2"]._popen.kill()
            agent._run_processes["run2"]._popen.wait()
            done = steps_done(sweep / "run2")
            assert 3 <= done < 6
            agent._command_run(command("run2") | {"type": "resume"})
        assert agent._run_processes[run]._popen.wait(240) == 0
    assert sorted(path.name for path in sweep.iterdir() if not path.name.startswith(".")) == sorted(
        POINTS
    )
    for run, point in POINTS.items():
        assert [line["step"] for line in metrics(sweep / run)] == [1, 2, 3, 4, 5, 6]
        assert {file.stem for file in wandb_files(sweep / run)} == {f"run-{run}"}
        assert len(wandb_files(sweep / run)) == (2 if run == "run2" else 1)
        recipe = read_config(sweep / run)["recipe"]
        assert {name: recipe[name] for name in point} == point
    losses = {run: [line["loss"] for line in metrics(sweep / run)] for run in POINTS}
    assert (
        losses["run1"] == losses["run4"] and len({tuple(values) for values in losses.values()}) == 3
    )
