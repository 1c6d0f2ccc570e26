"""Recipes started with a real `mpirun`, from Open MPI and from MPICH.

All ranks must form one run. If this is impossible, the error must be one line.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from job import NANO, Job, metrics, reproducible_values, steps_done
from pool import ROOT, environment

FLAGS = (
    "--tiny",
    "--eval_every",
    "0",
    "--no-export",
    "--no-wandb",
    "--schedule",
    "constant",
    "--warmup_steps",
    "0",
)
MEETS = str(ROOT / "tests" / "support" / "meets.py")
OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
MPICH = ("mpirun.mpich",)


@pytest.fixture(params=[OPEN_MPI, MPICH], ids=["Open MPI", "MPICH"])
def mpirun(request: pytest.FixtureRequest) -> list[str]:
    """Return the mpirun command, without the number of ranks."""
    if not shutil.which(request.param[0]):
        pytest.skip("needs Debian's openmpi-bin and mpich (tests/system_packages.sh)")
    return list(request.param)


def run(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=folder,
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_all_ranks_meet_and_two_jobs_do_not(mpirun: list[str], tmp_path: Path) -> None:
    """The first job's ranks are children of shells, so they have different parents."""
    jobs = (
        ["-n", "3", "sh", "-c", f"{sys.executable} {MEETS}; exit $?"],
        ["-n", "2", sys.executable, MEETS],
    )
    started = [
        subprocess.Popen(
            [*mpirun, *job], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
        )
        for job in jobs
    ]
    came = [json.loads(job.communicate(timeout=60)[0]) for job in started]
    assert came == [[[rank, world, rank, world] for rank in range(world)] for world in (3, 2)]


def test_a_refusal_is_printed_once_and_ends_all_ranks(mpirun: list[str], tmp_path: Path) -> None:
    done = run([*mpirun, "-n", "3", sys.executable, str(NANO), "--tiny", "--stpes", "2"], tmp_path)
    assert (
        done.returncode == 2
        and done.stderr.count("refused: 1 problem") == 1
        and "--stpes 2: is not a flag of this command" in done.stderr
    ), done.stderr


@pytest.mark.slow
def test_several_launchers_are_refused(mpirun: list[str], tmp_path: Path) -> None:
    """`mpirun -n 2 torchrun` gives its ranks these variables."""
    given = " ".join(
        ["RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 GROUP_WORLD_SIZE=1", sys.executable, str(NANO), "--tiny"]
    )
    done = run([*mpirun, "-n", "2", "sh", "-c", f"exec env {given}"], tmp_path)
    assert (
        done.returncode == 1
        and "has started 2 launchers, and each would start a separate run" in done.stderr
    ), done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_it_trains_as_with_launch_and_stops_at_a_signal(
    mpirun: list[str], ops: Callable[[str], None], tmp_path: Path
) -> None:
    """SIGUSR1 reaches only one rank.

    All ranks must save the same step, and the same command must continue from it.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "recipes")])
    words = [*mpirun, "-n", "2", sys.executable, str(NANO), *FLAGS, "--out", "run"]
    job = Job(tmp_path, [*words, "--steps", "100000"], PYTHONPATH=path)
    try:
        job.wait_for(
            lambda: steps_done(tmp_path / "run") > 3 or job.process.poll() is not None, 240
        )
        ranks = [
            process
            for process in job.processes()
            if process.name().startswith("python") and "RANK=" not in str(process.cmdline())
        ]
        assert len(ranks) == 2, job.output
        ranks[1].send_signal(signal.SIGUSR1)
        assert job.wait(120) == 138, job.output
    finally:
        job.close()
    done = steps_done(tmp_path / "run")
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step_{done:08d}"
    again = run([*words, "--steps", "100000", "--stop_at", str(done + 2)], tmp_path)
    assert (
        again.returncode == 0 and f"resumed from run/checkpoints/step_{done:08d}" in again.stdout
    ), again.stdout + again.stderr
    launch = [
        sys.executable,
        "-m",
        "launch",
        "--gpus",
        "2",
        str(NANO),
        *FLAGS,
        "--out",
        "whole",
        "--steps",
        "100000",
        "--stop_at",
        str(done + 2),
    ]
    whole = run(launch, tmp_path, PYTHONPATH=path)
    assert whole.returncode == 0 and reproducible_values(
        metrics(tmp_path / "whole")
    ) == reproducible_values(metrics(tmp_path / "run")), whole.stdout
