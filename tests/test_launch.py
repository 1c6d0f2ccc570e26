"""The real `deepspeed` launcher: every way to stop a run ends all of its processes in time, with nothing lost."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job import NANO, Job, checkpoints, deepspeed, metrics, numbers, steps_done
from recipekit.checkpoint import verify
from wandb_file import read_exit_codes, read_history

GONE = 10.0  # seconds in which no process may be left


@pytest.fixture
def start(tmp_path: Path, ops: Callable[[str], None]) -> Iterator[Callable[..., Job]]:
    ops("comm")
    jobs: list[Job] = []

    def start(*flags: object, terminal: bool = False, **variables: str) -> Job:
        jobs.append(Job(tmp_path, deepspeed(NANO, "--tiny", "--out", "run", *flags), terminal, **variables))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def wait_until_training(job: Job, run: Path) -> None:
    job.wait_for(lambda: (steps_done(run) > 3 and list(run.glob("wandb/*run-*/*.wandb"))) or job.process.poll() is not None, 90)
    assert job.process.poll() is None, job.output[-8000:]


slow = pytest.mark.slow
WAYS = [
    pytest.param("terminal", signal.SIGINT, 130, id="Ctrl-C in the terminal"),
    pytest.param("rank 1", signal.SIGTERM, 143, id="SIGTERM to rank 1"),
    pytest.param("deepspeed", signal.SIGKILL, 143, id="SIGKILL of deepspeed"),
    pytest.param("rank 0", signal.SIGTERM, 143, id="SIGTERM to rank 0", marks=slow),
    pytest.param("deepspeed", signal.SIGTERM, 143, id="SIGTERM to deepspeed", marks=slow),
    pytest.param("launcher", signal.SIGTERM, 143, id="SIGTERM to the launcher", marks=slow),
    pytest.param("launcher", signal.SIGINT, 143, id="SIGINT to the launcher", marks=slow),
    pytest.param("launcher", signal.SIGKILL, 143, id="SIGKILL of the launcher", marks=slow),
    pytest.param("terminal", signal.SIGHUP, 129, id="the terminal is closed", marks=slow),
]


@pytest.mark.parametrize(("who", "number", "code"), WAYS)
def test_a_stopped_run_leaves_no_process_and_loses_nothing(start: Callable[..., Job], tmp_path: Path, who: str, number: int, code: int) -> None:
    run = tmp_path / "run"
    job = start("--steps", "100000", "--eval_every", "0", "--save_every", "0", terminal=who == "terminal")
    wait_until_training(job, run)
    assert len({job.rank(0).pid, job.rank(1).pid}) == 2
    if number == signal.SIGHUP:
        job.close_terminal()
    elif who == "terminal":
        job.press_ctrl_c()
    else:
        {"deepspeed": job.process, "launcher": job.launcher(), "rank 0": job.rank(0), "rank 1": job.rank(1)}[who].send_signal(number)
    seconds = job.wait_gone(GONE)
    print(f"gone after {seconds:.1f} s, exit code of deepspeed {job.process.returncode}")

    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert checkpoints(run) == [len(lines)], "the step that was in progress is saved"
    assert verify(run / "checkpoints" / f"step_{len(lines):08d}") is None
    assert read_exit_codes(run) == [code]
    assert read_history(run) == lines
    if (who, number) in {("terminal", signal.SIGINT), ("rank 1", signal.SIGTERM)}:
        assert job.process.returncode != 0


def test_the_same_command_goes_on_after_ctrl_c(start: Callable[..., Job], tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = start("--steps", "100000", "--eval_every", "0", "--save_every", "0", terminal=True)
    wait_until_training(job, run)
    job.press_ctrl_c()
    job.wait_gone(GONE)
    done = metrics(run)
    again = start("--steps", "100000", "--eval_every", "0", "--save_every", "0", "--stop_at", len(done) + 3)
    assert again.wait(90) == 0, again.output[-8000:]
    lines = metrics(run)
    assert lines[: len(done)] == done
    assert [line["step"] for line in lines] == list(range(1, len(done) + 4))
    assert f"resumed from run/checkpoints/step_{len(done):08d}" in again.output
    assert read_history(run) == lines
    assert read_exit_codes(run) == [130, 0]
    assert numbers(lines)[-1]["tokens"] == len(lines) * numbers(lines)[0]["tokens"]
