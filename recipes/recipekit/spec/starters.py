"""Programs that start one process per rank, and the variables that they set."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Starter:
    """Names of the variables that contain rank, world size, local rank and local world size.

    A name is "" if the program sets no such variable.
    """

    name: str
    rank: str
    world: str
    local_rank: str
    local_ranks: str = ""
    job: str = ""  # unique to a job and equal in all its processes
    hosts: str = ""  # number of hosts


SRUN = Starter(
    "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", hosts="SLURM_STEP_NUM_NODES"
)
# The first matching entry is used. mpirun may start its helper processes with srun, in which case
# srun's variables count hosts, so the entry for srun must come later.
STARTERS = (
    Starter(
        "mpirun",  # Open MPI
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    Starter(
        "mpirun",  # MVAPICH2
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Starter(
        "jsrun",  # IBM's, under LSF
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    # MPICH, Intel MPI
    Starter("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # HPE Cray
    Starter("mpiexec", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "PALS_APID"),
    Starter(
        "flux run",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        "FLUX_TASK_LOCAL_ID",
        job="FLUX_JOB_ID",
        hosts="FLUX_JOB_NNODES",
    ),
    SRUN,
    Starter("PMI", "PMI_RANK", "PMI_SIZE", ""),
)
# Variables that show that a process is one of several but do not contain their number.
RANK_ONLY = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "MPIRUN_RANK")
LOCAL_RANKS = ("LOCAL_RANK", *(starter.local_rank for starter in STARTERS if starter.local_rank))
