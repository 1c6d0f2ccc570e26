"""The rank and world size of a process, from the variables of srun, mpirun and other launchers.

Variables left over from a different launcher are rejected.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from job import NANO, Job
from pool import environment, free_port
from recipekit.spec.errors import ConfigError
from recipekit.spec.ranks import process_rank_of, take_rank
from recipekit.spec.starters import LOCAL_RANKS, RANK_ONLY, STARTERS

SRUN: dict[str, str] = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,3",
    "SLURM_STEP_NODELIST": "localhost,n[2-3]",
}
ONE_HOST: dict[str, str] = SRUN | {
    "SLURM_STEP_TASKS_PER_NODE": "5",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_NODELIST": "n1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
FLUX = {
    "FLUX_TASK_RANK": "1",
    "FLUX_JOB_SIZE": "2",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "1",
    "FLUX_JOB_ID": "123",
}


def taken(given: dict[str, str]) -> list[str]:
    """Return the variables that a process with the given variables sets for itself.

    These are RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_ADDR.
    """
    variables = dict(given)
    lines = take_rank(variables)
    assert len(lines) == (variables != given)
    return [
        variables.get(name, "")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    ]


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (SRUN, ["3", "5", "1", "3", "localhost"]),
        (ONE_HOST, ["3", "5", "3", "5", "127.0.0.1"]),
        (SRUN | {"MASTER_ADDR": "head"}, ["3", "5", "1", "3", "head"]),
        (OPEN_MPI, ["2", "4", "2", "4", "127.0.0.1"]),
        (
            OPEN_MPI
            | {
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "MASTER_ADDR": "a",
            },
            ["2", "4", "0", "2", "a"],
        ),
        # srun starts orted.
        (
            OPEN_MPI | SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
            ["2", "4", "2", "4", "127.0.0.1"],
        ),
        (HYDRA, ["1", "2", "1", "2", "127.0.0.1"]),
        (HYDRA | {"PMI_LOCAL_RANK": "0"}, ["1", "2", "1", "2", "127.0.0.1"]),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "3", "PMI_LOCAL_SIZE": "4"},
            ["3", "4", "3", "4", "127.0.0.1"],
        ),
        # srun --mpi=pmi2
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "5"}, ["3", "5", "1", "3", "localhost"]),
        (FLUX, ["1", "2", "1", "2", "127.0.0.1"]),
        (FLUX | {"PMI_RANK": "1", "PMI_SIZE": "2"}, ["1", "2", "1", "2", "127.0.0.1"]),
        (
            {
                "JSM_NAMESPACE_RANK": "0",
                "JSM_NAMESPACE_SIZE": "2",
                "JSM_NAMESPACE_LOCAL_RANK": "0",
                "JSM_NAMESPACE_LOCAL_SIZE": "2",
                "PMIX_RANK": "0",
            },
            ["0", "2", "0", "2", "127.0.0.1"],
        ),
    ],
)
def test_rank_and_world_of_what_started_the_process(
    variables: dict[str, str], place: list[str]
) -> None:
    assert taken(variables) == place


@pytest.mark.parametrize(
    "variables",
    [
        {},
        # A batch script.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"},  # the shell of salloc
        # The shell of salloc, on a node.
        SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "8"},
        # srun --ntasks=1 in a batch script for eight tasks.
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_a_process_that_is_the_only_one_stays_so(variables: dict[str, str]) -> None:
    assert process_rank_of(variables) is None
    assert taken(variables)[1] == variables.get("WORLD_SIZE", "")


LAUNCHER = {
    "RANK": "0",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "mpirun, rank 2 of 4: its variables do not give the host of rank 0",
        ),
        (
            OPEN_MPI
            | {
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "MASTER_ADDR": "a",
            },
            "--map-by slot",
        ),
        (SRUN | {"SLURM_PROCID": "2"}, "srun --distribution=block"),
        (
            SRUN
            | {
                "SLURM_PROCID": "0",
                "SLURM_NODEID": "0",
                "SLURM_LOCALID": "0",
                "SLURM_GTIDS": "0,2",
            },
            "srun --distribution=block",
        ),
        (SRUN | {"SLURM_PTY_PORT": "9"}, "srun --pty --ntasks=1"),
        (SRUN | {"WORLD_SIZE": "8"}, "srun, rank 3 of 5: contradicts WORLD_SIZE = 8"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "its variables do not give the rank on this host"),
        (
            FLUX | {"FLUX_JOB_NNODES": "2"},
            "flux run, rank 1 of 2: its variables do not give the host of rank 0",
        ),
        *[({name: "0"}, f"{name} = 0: this process is one of several") for name in RANK_ONLY],
        # srun -n 5 deepspeed
        (SRUN | LAUNCHER | {"CROSS_SIZE": "1"}, "srun: has started 5 launchers"),
        # mpirun -n 4 torchrun
        (OPEN_MPI | LAUNCHER | {"GROUP_WORLD_SIZE": "1"}, "mpirun: has started 4 launchers"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE = 2: RANK is not set"),
        ({"RANK": "1"}, "RANK = 1: WORLD_SIZE is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2: must be below WORLD_SIZE = 2"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            "RANK = 0, WORLD_SIZE = 2: MASTER_PORT must be set",
        ),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE = two: must be a number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK = -1: must be a number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = 0: must be a number"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK = x: must be a number"),
        (SRUN | {"LOCAL_RANK": "x"}, "LOCAL_RANK = x: must be a number"),
        ({"WORLD_SIZE": "9" * 5000}, f"WORLD_SIZE = {'9' * 20}...: must be a number"),
        # With leftover variables each process would train alone.
        (SRUN | {"RANK": "0"}, "RANK = 0: srun has started 5 processes, and this RANK is one of 1"),
        (
            OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "1"},
            "Unset RANK WORLD_SIZE. For separate runs unset OMPI_COMM_WORLD_SIZE",
        ),
        (
            FLUX | {"RANK": "0", "WORLD_SIZE": " ", "LOCAL_RANK": "0"},
            "Unset RANK LOCAL_RANK. For separate runs unset FLUX_JOB_SIZE",
        ),
        (
            SRUN | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "this RANK is one of 2",
        ),
    ],
)
def test_what_cannot_be_one_run_is_refused(variables: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        take_rank(dict(variables))
    (line,) = str(refused.value).splitlines()
    assert told in line


@pytest.mark.parametrize("variables", [SRUN, OPEN_MPI, FLUX])
def test_blank_variables_are_as_unset(variables: dict[str, str]) -> None:
    blank = dict.fromkeys(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), " "
    ) | {"RANK": ""}
    assert taken(variables | blank) == taken(variables)


@pytest.mark.parametrize(
    "variables",
    [
        LAUNCHER,
        # One deepspeed launcher on each host; the launchers have found each other.
        SRUN | LAUNCHER | {"CROSS_SIZE": "2"},
        SRUN | LAUNCHER | {"GROUP_WORLD_SIZE": "2"},
        # A launcher in a terminal that srun --pty opened.
        SRUN | {"SLURM_PTY_PORT": "9"} | LAUNCHER | {"CROSS_SIZE": "1"},
        SRUN | LAUNCHER,  # exported by the user's script: RANK=$SLURM_PROCID
        # A process that starts several ranks itself.
        HYDRA | {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
    ],
)
def test_ranks_of_a_launcher_stay(variables: dict[str, str]) -> None:
    before = dict(variables)
    assert take_rank(variables) == [] and variables == before


def test_a_process_that_has_joined_needs_no_address() -> None:
    assert take_rank({"RANK": "0", "WORLD_SIZE": "2"}, joined=True) == []


def test_every_rank_meets_at_the_same_port_and_another_job_elsewhere() -> None:
    def port(more: dict[str, str]) -> str:
        variables = ONE_HOST | more
        take_rank(variables)
        return variables["MASTER_PORT"]

    assert (
        port({})
        == port({"SLURM_PROCID": "4", "SLURM_LOCALID": "4"})
        != port({"SLURM_STEP_ID": "1"})
    )
    assert len({port({"SLURM_JOB_ID": str(job)}) for job in range(100)}) > 95
    assert port({"MASTER_PORT": "777"}) == "777"


def test_the_first_host_of_a_list_of_slurm() -> None:
    """Names that cannot be resolved stay unchanged if scontrol does not know them either."""
    for nodes, first in (
        ("localhost", "localhost"),
        ("no-such-[01-04,7],m1", "no-such-01"),
        ("no-r[0-1]n[3,5]x", "no-r0n3x"),
    ):
        variables = SRUN | {"SLURM_STEP_NODELIST": nodes, "PATH": ""}
        take_rank(variables)
        assert variables["MASTER_ADDR"] == first


def test_rank_0_of_a_host_is_found_by_the_variable_of_any_starter() -> None:
    """`exit_with_error` waits for that rank, because launchers end all ranks when one has ended."""
    assert {starter.local_rank for starter in STARTERS} - {""} | {"LOCAL_RANK"} == set(LOCAL_RANKS)


@pytest.mark.parametrize(
    "variables",
    [{"WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "2"}, {"PMIX_RANK": "1"}],
    ids=" ".join,
)
def test_a_start_refuses_what_is_left_over_in_a_second(
    variables: dict[str, str], tmp_path: Path
) -> None:
    clean = {
        name: value
        for name, value in environment().items()
        if not name.startswith(("SLURM_", "MASTER_", "OMPI_", "PMI", "RANK", "WORLD_"))
    }
    done = subprocess.run(
        [sys.executable, NANO, "--tiny"],
        env=clean | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "") and "Traceback" not in done.stderr
    assert (
        done.stderr.startswith("refused: 1 problem\n")
        and len(done.stderr.splitlines()) == 2
        and os.listdir(tmp_path) == []
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "others"), [("0", "the other ranks"), ("1", "rank 0 and the other ranks")]
)
def test_a_rank_that_nobody_joins_says_so(rank: str, others: str, ops: Any, tmp_path: Path) -> None:
    port = str(free_port())
    place = {
        "RANK": rank,
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    job = Job(tmp_path, [sys.executable, str(NANO), "--tiny"], **place)
    try:
        line = (
            f"rank {rank} of 2 waits for {others}, which meet at 127.0.0.1:{port}. If nobody starts"
            " them, unset RANK and WORLD_SIZE"
        )
        job.wait_for(lambda: line in job.output or job.process.poll() is not None, 120)
        assert job.process.poll() is None, job.output
    finally:
        job.close()
