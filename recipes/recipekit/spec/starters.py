"""Programs that start one process for each rank, and the variables that they set for it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Starter:
    """Names of the variables in which a program writes rank, world, and both on this host; "" if it
    writes none.
    """

    name: str
    rank: str
    world: str
    local_rank: str
    local_ranks: str = ""
    job: str = ""  # the same for all processes of a job, and another one for the next job
    hosts: str = ""  # number of hosts


SRUN = Starter(
    "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", hosts="SLURM_STEP_NUM_NODES"
)
# The first one that fits counts. mpirun may start its helpers with srun, whose variables then count
# hosts, so srun comes last.
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
# one of several processes, of how many is not said
RANK_ONLY = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "MPIRUN_RANK")
LOCAL_RANKS = ("LOCAL_RANK", *(starter.local_rank for starter in STARTERS if starter.local_rank))
