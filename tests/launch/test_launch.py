"""The real `deepspeed` launcher: every stop ends all processes in time, and no data is lost.

Config errors are printed once.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from job import NANO, Job, checkpoints, contention, deepspeed, metrics, steps_done
from pool import ROOT
from recipekit.storage.manifest import find_faults
from wandb_file import read_exit_codes, read_history

GONE = 10.0  # seconds after which no process may remain
# Seconds from the command to its end, with a launcher and two ranks. The limit allows for a busy
# machine.
REFUSED = 30.0
HARD = 60.0  # the same limit in seconds on a machine with other load


@pytest.fixture
def launch(
    tmp_path: Path, ops: Callable[[str], None], compiling: subprocess.Popen[bytes]
) -> Iterator[Callable[..., Job]]:
    """Return a function that starts a command in tmp_path; end its processes after the test."""
    compiling.wait()  # the time limits assume an idle machine
    jobs: list[Job] = []

    def launch(
        argv: list[str], terminal: bool = False, folder: Path = tmp_path, **variables: str
    ) -> Job:
        jobs.append(Job(folder, argv, terminal, **variables))
        return jobs[-1]

    yield launch
    for job in jobs:
        job.close()


@pytest.fixture
def start(launch: Callable[..., Job]) -> Callable[..., Job]:
    """Return a function that starts the smallest recipe in tmp_path/run."""
    return lambda *flags, **more: launch(deepspeed(NANO, "--tiny", "--out", "run", *flags), **more)


def wait_until_training(job: Job, run: Path) -> None:
    job.wait_for(
        lambda: (
            (steps_done(run) > 3 and list(run.glob("wandb/*run-*/*.wandb")))
            or job.process.poll() is not None
        ),
        150,
    )
    assert job.process.poll() is None, job.output[-8000:]


slow = pytest.mark.slow
FLAGS = ("--steps", "100000", "--eval_every", "0", "--save_every", "0")  # runs until a signal
WAYS = [
    pytest.param("terminal", signal.SIGINT, 130, id="Ctrl-C in the terminal", marks=slow),
    pytest.param("rank 1", signal.SIGTERM, 143, id="SIGTERM to rank 1", marks=slow),
    pytest.param("deepspeed", signal.SIGKILL, 143, id="SIGKILL of deepspeed", marks=slow),
    pytest.param("rank 0", signal.SIGTERM, 143, id="SIGTERM to rank 0", marks=slow),
    pytest.param("deepspeed", signal.SIGTERM, 143, id="SIGTERM to deepspeed", marks=slow),
    pytest.param("launcher", signal.SIGTERM, 143, id="SIGTERM to the launcher", marks=slow),
    pytest.param("launcher", signal.SIGINT, 143, id="SIGINT to the launcher", marks=slow),
    pytest.param("launcher", signal.SIGKILL, 143, id="SIGKILL of the launcher", marks=slow),
    pytest.param("terminal", signal.SIGHUP, 129, id="the terminal is closed", marks=slow),
]


@pytest.mark.parametrize(("who", "number", "code"), WAYS)
def test_a_stopped_run_leaves_no_process_and_loses_nothing(
    start: Callable[..., Job], tmp_path: Path, who: str, number: int, code: int
) -> None:
    run = tmp_path / "run"
    job = start(*FLAGS, terminal=who == "terminal")
    wait_until_training(job, run)
    assert len({job.rank(0).pid, job.rank(1).pid}) == 2
    if number == signal.SIGHUP:
        job.close_terminal()
    elif who == "terminal":
        job.press_ctrl_c()
    else:
        {
            "deepspeed": job.process,
            "launcher": job.launcher(),
            "rank 0": job.rank(0),
            "rank 1": job.rank(1),
        }[who].send_signal(number)
    seconds, busy = job.wait_gone(HARD), contention()
    print(
        f"gone after {seconds:.1f} s, contention {busy:.1f}, exit code of deepspeed"
        f" {job.process.returncode}"
    )
    assert seconds < GONE * busy, job.output[-8000:]

    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert checkpoints(run) == [len(lines)], "the step that was in progress is saved"
    assert find_faults(run / "checkpoints" / f"step_{len(lines):08d}") == []
    assert read_exit_codes(run) == [code]
    assert read_history(run) == lines
    if who == "rank 1":
        assert job.process.returncode != 0
    if number == signal.SIGINT and who == "terminal":
        go_on(start, run, lines)


def go_on(start: Callable[..., Job], run: Path, done: list[dict[str, Any]]) -> None:
    """Run the same command again, and check that metrics.jsonl and W&B each contain one run."""
    job = start(*FLAGS, "--stop_at", len(done) + 3)
    assert job.wait(120) == 0, job.output[-8000:]
    assert f"resumed from run/checkpoints/step_{len(done):08d}" in job.output
    lines = metrics(run)
    assert lines[: len(done)] == done
    assert [line["step"] for line in lines] == list(range(1, len(done) + 4))
    assert all(before["tokens"] < after["tokens"] for before, after in pairwise(lines))
    assert read_history(run) == lines
    assert read_exit_codes(run) == [130, 0]


@slow
def test_a_clean_run_ends_with_0_twenty_times_of_twenty(
    launch: Callable[..., Job], tmp_path: Path
) -> None:
    """A rank sometimes aborts if it ends too early.

    The rank must first leave its process group and wait for the threads of libraries.
    """
    for number in range(20):
        job = launch(deepspeed(NANO, "--tiny", "--steps", "2", "--out", f"run{number}"))
        assert job.wait(120) == 0, job.output[-8000:]
        assert job.processes() == []
        assert "Traceback" not in job.output
        run = tmp_path / f"run{number}"
        assert read_history(run) == metrics(run) and steps_done(run) == 2
        assert read_exit_codes(run) == [0]
        assert list((run / "hf").glob("*.safetensors"))


@slow
def test_a_loss_that_is_not_finite_stops_the_run_with_1(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    job = start(
        "--steps",
        "100",
        "--lr",
        "1e30",
        "--warmup_steps",
        "0",
        "--save_every",
        "1",
        "--eval_every",
        "0",
    )
    assert job.wait(120) == 1, job.output[-8000:]
    job.wait_gone(HARD)
    lines = metrics(tmp_path / "run")
    step = len(lines) + 1
    assert 1 < step < 20
    assert job.output.count(f"stopped: step {step} has loss ") == 1
    assert f"the last good checkpoint is step {len(lines)}" in job.output
    assert "Traceback" not in job.output
    assert max(checkpoints(tmp_path / "run")) == len(lines)
    assert find_faults(tmp_path / "run" / "checkpoints" / f"step_{len(lines):08d}") == []
    assert read_exit_codes(tmp_path / "run") == [1]


def broken_json(folder: Path) -> list[str]:
    text = (
        (ROOT / "ds_configs" / "zero2.json")
        .read_text()
        .replace('"gradient_clipping"', '"gradient_cliping"')
    )
    (folder / "broken.json").write_text(text)
    return ["--tiny", "--deepspeed_config", "broken.json"]


def a_file_for_out(folder: Path) -> list[str]:
    (folder / "taken").write_text("")
    return ["--tiny", "--out", "taken"]


REFUSALS = [
    pytest.param(broken_json, 1, "Did you mean gradient_clipping", id="unknown JSON key"),
    pytest.param(
        lambda _: ["--tiny", "--stepz", "3"],
        2,
        "Did you mean --steps?",
        id="unknown flag",
        marks=slow,
    ),
    pytest.param(
        a_file_for_out,
        1,
        "out = taken: cannot be written: Not a directory",
        id="out is a file",
        marks=slow,
    ),
    pytest.param(
        lambda _: ["--model", "no-such-org/no-such-model"],
        1,
        "model = no-such-org/no-such-model",
        id="no such model",
        marks=slow,
    ),
    pytest.param(
        lambda _: ["--tiny", "--tp", "3"],
        1,
        "does not divide the 2 ranks",
        id="tp 3 of 2",
        marks=slow,
    ),
    pytest.param(
        lambda _: ["--tiny", "--dataset", "missing.txt"],
        1,
        "missing.txt",
        id="no such data",
        marks=slow,
    ),
    pytest.param(
        lambda _: ["--tiny", "--steps", "three"],
        2,
        "must be a whole number",
        id="no number",
        marks=slow,
    ),
    pytest.param(
        lambda _: ["--tiny", "--resume", "nowhere"],
        1,
        "must be a run folder or one of its step folders",
        id="no such run",
        marks=slow,
    ),
]


@pytest.mark.parametrize(("flags", "code", "told"), REFUSALS)
def test_a_refusal_is_printed_once_and_soon(
    launch: Callable[..., Job],
    tmp_path: Path,
    flags: Callable[[Path], list[str]],
    code: int,
    told: str,
) -> None:
    """Two ranks print only one config error, although the launcher ends all ranks once one has
    ended.
    """
    job = launch(deepspeed(NANO, *flags(tmp_path)))
    ended, seconds, busy = job.wait(90), time.monotonic() - job.began, contention()
    print(f"{seconds:.1f} s, contention {busy:.1f}")
    # The launcher repeats the command in these lines.
    said = "\n".join(
        line for line in job.output.splitlines() if "[INFO]" not in line and "[ERROR]" not in line
    )
    assert ended == code, job.output
    assert said.count(told) == 1 and said.count("refused") == 1, job.output
    assert "Traceback" not in said
    assert seconds < REFUSED * busy
    job.wait_gone(HARD)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/run.json"))


@slow
def test_a_second_job_on_the_same_folder_is_refused(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    first = start("--steps", "100000", "--eval_every", "0", "--no-wandb")
    first.wait_for(
        lambda: steps_done(tmp_path / "run") > 2 or first.process.poll() is not None, 150
    )
    second = start("--steps", "100000", "--eval_every", "0", "--no-wandb")
    assert second.wait(90) == 1, second.output
    assert second.output.count("another job is running in this folder") == 1
    assert "Traceback" not in second.output
    done = steps_done(tmp_path / "run")
    first.wait_for(lambda: steps_done(tmp_path / "run") > done, 30)
    first.launcher().send_signal(signal.SIGTERM)
    first.wait_gone(HARD)
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(
        range(1, steps_done(tmp_path / "run") + 1)
    )


@slow
def test_a_copied_recipe_uses_what_was_changed_in_it(
    launch: Callable[..., Job], tmp_path: Path
) -> None:
    """A copied recipe with two changed numbers and a changed JSON is started from its folder.

    The test reads the values from the state that the engine wrote.
    """
    mine = tmp_path / "mine"
    mine.mkdir()
    recipe, strategy = NANO.read_text(), (ROOT / "ds_configs" / "zero2.json").read_text()
    for old, new in (("seq_len=256", "seq_len=64"), ("lr=2e-3", "lr=7e-4")):
        assert recipe.count(old) == 1
        recipe = recipe.replace(old, new)
    assert strategy.count('"gradient_clipping": "auto"') == 1
    (mine / "first_try.py").write_text(recipe)
    (mine / "zero2.json").write_text(
        strategy.replace('"gradient_clipping": "auto"', '"gradient_clipping": 0.25')
    )
    flags = (
        "--tiny",
        "--steps",
        3,
        "--warmup_steps",
        1,
        "--schedule",
        "constant",
        "--no-wandb",
        "--no-export",
    )
    job = launch(deepspeed(Path("first_try.py"), *flags), folder=mine)
    assert job.wait(120) == 0, job.output[-8000:]
    assert "gradient_clipping: 0.25 of the JSON overrides 1.0 of the recipe" in job.output
    run = mine / "runs" / "first_try_tiny"
    lines = metrics(run)
    assert [line["lr"] for line in lines] == [7e-4] * 3
    assert [round(line["tokens"] / (8 * 64)) for line in lines] == [1, 2, 3]
    assert lines[0]["grad_norm"] > 0.25, "else nothing is clipped"
    optimizer = torch.load(
        next((run / "checkpoints" / "step_00000003").glob("*zero_pp_rank_0*")), weights_only=False
    )["optimizer_state_dict"]
    assert optimizer["clip_grad"] == 0.25
    clipped = [state["exp_avg"] for state in optimizer["base_optimizer_state"]["state"].values()]
    assert 0 < sum(float(moment.double().square().sum()) for moment in clipped) < 0.25**2, (
        "a mean of clipped gradients is no longer than the limit"
    )


@slow
def test_accelerate_launch_starts_a_recipe(launch: Callable[..., Job], tmp_path: Path) -> None:
    """On a CPU it starts one process. The variables for accelerate must not affect a recipe."""
    accelerate = [
        str(Path(sys.executable).with_name("accelerate")),
        "launch",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
    ]
    words = [
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--cpu",
        str(NANO),
        "--tiny",
        "--steps",
        "2",
        "--out",
        "run",
        "--no-wandb",
        "--no-export",
    ]
    job = launch([*accelerate, *words])
    assert job.wait(120) == 0, job.output[-8000:]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]
    assert checkpoints(tmp_path / "run") == [2]
