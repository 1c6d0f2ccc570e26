"""Restarts by a scheduler: Slurm's grace period, and chains of starts without a new step."""

import os
import sys
from pathlib import Path

import pytest
from pool import ROOT

sys.path.insert(0, str(ROOT))

from launch import allocation, run_folder
from launch.requeue import Chain, JobEnd, hand_back

SCRIPT = """#!/bin/bash
# comments may stand between
#SBATCH --nodes=2

#SBATCH {signal}
exec python -m launch "$@"
#SBATCH --signal=B:TERM@1
"""


@pytest.mark.parametrize(
    ("signal", "seconds"),
    [
        ("--signal=B:TERM@300", 300),
        ("--signal USR1@120", 120),
        ("--requeue --signal=R:15@90", 90),
        ("--signal=BR:USR2@30", 30),
        ("--signal=B:TERM", 60),
        ("--time=4", None),
    ],
)
def test_the_warning_time_is_read_from_the_batch_script(signal: str, seconds: float | None) -> None:
    assert allocation.warning_in(SCRIPT.format(signal=signal)) == seconds


def test_the_warning_time_of_our_own_batch_script() -> None:
    assert allocation.warning_in((ROOT / "launch" / "slurm.sbatch").read_text()) == 300


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4", 240),
        ("4:30", 270),
        ("01:02:03", 3723),
        ("00:04:00", 240),
        ("1-0", 86400),
        ("2-12:30", 217800),
        ("1-02:03:04", 93784),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
        ("", None),
        ("1-", None),
    ],
)
def test_a_time_limit_is_read_as_slurm_writes_it(text: str, seconds: float | None) -> None:
    assert allocation.seconds(text) == seconds


@pytest.mark.parametrize(
    "flags",
    [
        ["--time=4"],
        ["--partition=gpu", "--time", "4"],
        ["-t4"],
        ["-t", "4"],
        ["--time=9", "--time=0:4:0"],
    ],
)
def test_a_time_limit_is_found_among_the_flags_of_sbatch(flags: list[str]) -> None:
    assert allocation.limit_of(flags) == 240
    assert allocation.limit_of(["--test-only", "--timer=3"]) is None


@pytest.mark.parametrize(
    ("limit", "warning", "left"),
    [
        (240, 300, "no time"),
        (300, 300, "no time"),
        (360, 300, "60 s"),
        (599, 300, "299 s"),
        (600, 300, ""),
        (None, 300, ""),
        (60, None, ""),
    ],
)
def test_a_limit_below_twice_the_warning_is_reported(
    limit: float | None, warning: float | None, left: str
) -> None:
    line = allocation.short_limit(limit, warning)
    assert (f"which leaves {left} for" in line) if left else not line


CHAINS = [
    # The newest checkpoint at the end of each start -> number of consecutive starts without a new
    # one.
    (["", "", "", ""], [0, 1, 2, 3]),
    (["step_00000004"] * 4, [0, 1, 2, 3]),
    (["", "step_00000002", "step_00000002", "step_00000003"], [0, 0, 1, 0]),
    (["step_00000002", "step_00000004", "step_00000002", "step_00000002"], [0, 0, 0, 1]),
]


@pytest.mark.parametrize(("checkpoints", "counts"), CHAINS)
def test_a_chain_counts_starts_without_a_new_checkpoint(
    tmp_path: Path, checkpoints: list[str], counts: list[int]
) -> None:
    (tmp_path / "note").write_text("step_00000004\n" * 9)  # an earlier job with this number
    assert [
        Chain(tmp_path / "note", first=index == 0).without_step(name)
        for index, name in enumerate(checkpoints)
    ] == counts


@pytest.mark.parametrize(
    ("ends", "codes"),
    [
        ([(75, "step_00000004")] * 5, [75, 75, 75, 1, 75]),  # the fifth belongs to another Job
        ([(75, None)] * 4, [75, 75, 75, 1]),  # a script whose steps are unknown
        ([(75, f"step_{step:08d}") for step in range(5)], [75] * 5),
        ([(143, "step_00000004")] * 5, [143] * 5),  # evicted
        ([(1, "")] * 5, [1] * 5),
        ([(0, "")] * 5, [0] * 5),
    ],
)
def test_a_pod_is_started_again_until_three_starts_bring_no_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: list[tuple[int, str | None]],
    codes: list[int],
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert [
        hand_back(JobEnd(code, "SIGTERM" if code == 143 else "", checkpoint), tmp_path, print)
        for code, checkpoint in ends
    ] == codes


def test_without_a_scheduler_the_exit_code_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    assert [hand_back(JobEnd(75, "", ""), tmp_path, print) for _ in range(6)] == [75] * 6
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [(0, "SIGTERM"), (130, "SIGINT"), (129, "SIGHUP"), (75, "SIGINT"), (1, ""), (2, "")],
)
def test_a_slurm_job_that_is_over_is_not_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    """A signal in the last step arrives when the run is already finished.

    This machine has no scontrol, so a query to Slurm would be reported.
    """
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    assert (hand_back(JobEnd(code, reason, ""), tmp_path, said.append), said) == (code, [])
    assert (
        hand_back(JobEnd(143, "SIGTERM", ""), tmp_path, said.append) == 143
        and "scontrol cannot be started" in said[0]
    )


@pytest.mark.parametrize(
    ("text", "recipe"),
    [("from recipekit import run", True), ("import recipekit.spec.hub", True), ("print(1)", False)],
)
def test_a_recipe_is_known_by_its_import(tmp_path: Path, text: str, recipe: bool) -> None:
    (tmp_path / "x.py").write_text(text)
    assert run_folder.is_recipe((str(tmp_path / "x.py"), "--tiny")) is recipe
    assert not run_folder.is_recipe((str(tmp_path / "none.py"),))
