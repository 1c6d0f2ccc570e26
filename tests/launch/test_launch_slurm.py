"""`sbatch launch/slurm.sbatch` on a real Slurm of two nodes: equal losses, a checkpoint at SIGTERM, and a requeue that goes on exactly there."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job import NANO, Job, metrics, numbers, steps_done
from pool import ROOT
from slurm import Slurm, slurm_or_skip
from words import arbitrary_words

FLAGS = ("--tiny", "--schedule", "constant", "--warmup_steps", "0", "--eval_every", "0", "--no-export", "--no-wandb", "--steps", "100000")
SECRETS = {"HF_TOKEN": "hf_fakeFAKEfake0001", "WANDB_API_KEY": "fake" * 10, "AWS_SECRET_ACCESS_KEY": "aws/fake+0003"}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_or_skip() as made:
        yield made


def submit(slurm: Slurm, output: Path, *words: str, nodes: int = 2) -> str:
    """The number of the job."""
    command = ["sbatch", "--parsable", f"--nodes={nodes}", f"--output={output}", "launch/slurm.sbatch", *words]
    answer = slurm.run(*command, folder=ROOT, **SECRETS)
    assert answer.strip().isdigit(), answer
    return answer.strip()


def wait_for(true: Callable[[], object], seconds: float, tell: Callable[[], object]) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, tell()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["TERM", "USR1", "USR2"])
def test_a_job_trains_stops_and_goes_on_as_one_run(slurm: Slurm, ops: Callable[[str], None], tmp_path: Path, signal: str) -> None:
    """A preemption (SIGTERM, or what a user asks Slurm for), the requeue, and a stop for good (SIGINT); the steps are those of one machine that nobody disturbed."""
    run, output = tmp_path / "run", tmp_path / "job.log"
    job = submit(slurm, output, "--gpus", "2", str(NANO), *FLAGS, "--out", str(run))
    tell = lambda: f"{slurm.job(job)}\n{output.read_text() if output.exists() else ''}"  # noqa: E731
    wait_for(lambda: steps_done(run) > 3, 240, tell)
    slurm.run("scancel", f"--signal={signal}", job)
    wait_for(lambda: slurm.job(job).get("Restarts") == "1", 120, tell)
    first = steps_done(run)
    assert (run / "checkpoints" / "latest").read_text() == f"step_{first:08d}", tell()
    wait_for(lambda: steps_done(run) > first + 3, 240, tell)
    slurm.run("scancel", "--signal=INT", job)
    wait_for(lambda: slurm.job(job)["JobState"] not in ("RUNNING", "COMPLETING", "PENDING"), 120, tell)
    assert slurm.job(job)["ExitCode"] == "130:0" and slurm.job(job)["Restarts"] == "1", tell()
    lines = metrics(run)
    assert (run / "checkpoints" / "latest").read_text() == f"step_{len(lines):08d}"
    assert f"resumed from {run}/checkpoints/step_{first:08d}" in output.read_text(), tell()
    assert json.loads((run / "run.json").read_text())["mesh"]["world"] == 4

    for path in [*tmp_path.rglob("*"), *slurm.folder.rglob("*")]:
        if path.is_file():
            content = path.read_bytes()
            assert not [name for name, value in SECRETS.items() if value.encode() in content], path

    whole = Job(tmp_path, [sys.executable, "-m", "launch", "--gpus", "4", str(NANO), *FLAGS, "--stop_at", str(len(lines))], PYTHONPATH=python_path())
    try:
        assert whole.wait(300) == 0, whole.output[-8000:]
    finally:
        whole.close()
    assert numbers(metrics(tmp_path / "runs" / f"{NANO.stem}_tiny")) == numbers(lines)


def python_path() -> str:
    return os.pathsep.join([str(ROOT), str(ROOT / "recipes")])


DUMP = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(sys.argv[1] + os.environ['RANK'], 'w'))"


def test_words_reach_the_script_on_both_nodes_as_typed(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "dump.py").write_text(DUMP)
    words = [str(tmp_path / "dump_"), *arbitrary_words()]
    job = submit(slurm, tmp_path / "job.log", "--gpus", "2", "--once", str(tmp_path / "dump.py"), *words)
    wait_for(lambda: slurm.job(job)["JobState"] not in ("RUNNING", "COMPLETING", "PENDING", "CONFIGURING"), 60, lambda: slurm.job(job))
    assert slurm.job(job)["JobState"] == "COMPLETED", (tmp_path / "job.log").read_text()
    for rank in (0, 2):
        got, variables = json.loads((tmp_path / f"dump_{rank}").read_text())
        assert got == words
        assert variables["WORLD_SIZE"] == "4" and not variables.keys() & SECRETS.keys()


MEETS = str(ROOT / "tests" / "support" / "meets.py")


def srun(slurm: Slurm, *words: str) -> str:
    return slurm.run("srun", *words, folder=ROOT, PYTHONPATH=python_path(), HF_HUB_OFFLINE="1", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")


def test_tasks_of_srun_are_the_ranks_of_one_run(slurm: Slurm) -> None:
    """On two nodes of two and one tasks, whose names no name server knows; a single task in a job of three is alone."""
    came = json.loads(srun(slurm, "--nodes=2", "--ntasks=3", "--quiet", sys.executable, MEETS))
    assert came == [[0, 3, 0, 2], [1, 3, 1, 2], [2, 3, 0, 1]]
    refused = srun(slurm, "--nodes=2", "--ntasks=4", "--distribution=cyclic", sys.executable, str(NANO), "--tiny")
    assert "the ranks of a host must be neighbours; start it with srun --distribution=block" in refused and "Traceback" not in refused
    alone = "import os; from recipekit.ranks import take_rank; print(take_rank(os.environ), os.environ.get('WORLD_SIZE'))"
    nested = shlex.join(["srun", "--ntasks=1", "--nodes=1", "--overlap", "--quiet", sys.executable, "-c", alone])
    batch = ["salloc", "--quiet", "--ntasks=3", "--nodes=2", "sh", "-c", f"{shlex.join([sys.executable, '-c', alone])}; {nested}"]
    assert slurm.run(*batch, PYTHONPATH=python_path()).splitlines() == ["[] None"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--ntasks=2",), ("--ntasks=2", "--nodes=2")], ids=["one node", "two nodes"])
def test_srun_of_a_recipe_trains_one_run_and_saves_at_a_signal(slurm: Slurm, ops: Callable[[str], None], tmp_path: Path, words: tuple[str, ...]) -> None:
    """SIGUSR1 to the whole step, as of `#SBATCH --signal=USR1@60`; the same command continues there."""
    run, output = tmp_path / "run", tmp_path / "job.log"
    recipe = shlex.join(["srun", *words, sys.executable, str(NANO), *FLAGS, "--out", str(run)])
    given = {"PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

    def start(more: str) -> str:
        return slurm.run("sbatch", "--parsable", *words, f"--output={output}", f"--wrap={recipe} {more}", folder=tmp_path, **given).strip()

    job = start("")
    tell = lambda: f"{slurm.job(job)}\n{output.read_text() if output.exists() else ''}"  # noqa: E731
    wait_for(lambda: steps_done(run) > 3, 240, tell)
    slurm.run("scancel", "--signal=USR1", job)
    wait_for(lambda: slurm.job(job)["JobState"] not in ("RUNNING", "COMPLETING"), 120, tell)
    done = steps_done(run)
    assert (run / "checkpoints" / "latest").read_text() == f"step_{done:08d}", tell()
    assert slurm.job(job)["ExitCode"] == "138:0" and "on 2 ranks (dp2)" in output.read_text(), tell()
    job = start(f"--stop_at {done + 2}")
    wait_for(lambda: slurm.job(job)["JobState"] == "COMPLETED", 240, tell)
    assert f"resumed from {run}/checkpoints/step_{done:08d}" in output.read_text() and steps_done(run) == done + 2, tell()


STOPS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


def test_a_cancelled_job_stays_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm would put it back into the queue: `scontrol requeue` takes a job that is being cancelled."""
    (tmp_path / "stops.py").write_text(STOPS)
    ready, output = tmp_path / "ready", tmp_path / "job.log"
    job = submit(slurm, output, "--gpus", "1", "--spawn", "torchrun", str(tmp_path / "stops.py"), str(ready), nodes=1)
    tell = lambda: f"{slurm.job(job)}\n{output.read_text() if output.exists() else ''}"  # noqa: E731
    wait_for(ready.exists, 120, tell)
    slurm.run("scancel", job)
    wait_for(lambda: slurm.job(job)["JobState"] not in ("RUNNING", "COMPLETING"), 60, tell)
    assert slurm.job(job)["JobState"] == "CANCELLED" and slurm.job(job)["Restarts"] == "0", tell()
    assert "stopped by SIGTERM" in output.read_text() and "not put back into the queue" in output.read_text(), tell()


def test_a_login_node_submits_names_and_no_values(tmp_path: Path) -> None:
    """`--where slurm` outside a job: the command line of sbatch, in which no value stands."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | SECRETS | {"WANDB_PROJECT": "mine"}
    words = ["--where", "slurm", "--nodes", "2", "--gpus", "8", "--sbatch=--partition=gpu", "--dry-run", str(NANO), "--tiny", "$(id)"]
    done = subprocess.run([sys.executable, "-m", "launch", *words], cwd=ROOT, env=variables, capture_output=True, text=True, check=True, timeout=60)
    assert "sbatch --nodes=2" in done.stdout and "--gpus-per-node=8" in done.stdout and "--partition=gpu" in done.stdout and "'$(id)'" in done.stdout
    assert "--dry-run" not in done.stdout, "what is printed would train nothing"
    (exported,) = [word for word in done.stdout.split() if word.startswith("--export=")]
    assert "WANDB_PROJECT" in exported and not any(name in done.stdout or value in done.stdout for name, value in SECRETS.items())
