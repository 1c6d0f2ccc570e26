"""Memory of a GPU that a run uses outside of PyTorch: the driver's context and NCCL's buffers.

torch's counters do not include it, and neither does the metric `peak_mem_bytes`. The sizes are
estimates from reports of other projects. They have not been measured here, so no run is refused
because of them.
"""

from ..spec.memory_terms import ACCELERATOR, Term
from ..spec.mesh import Mesh

# Bytes of a CUDA context with the kernels of PyTorch and its libraries, an estimate. Reports range
# from 0.3 to 0.6 GiB.
CONTEXT_BYTES = 512 << 20
# Bytes of the buffers of a communicator, an estimate. Reports range from 0.1 to 0.4 GiB, depending
# on the number of channels and peers.
COMMUNICATOR_BYTES = 256 << 20


def library_terms(mesh: Mesh, engine: str) -> tuple[Term, ...]:
    """Return the estimated terms of one GPU, each an upper bound for `memory_problems`."""
    context = Term(ACCELERATOR, "context of the GPU, estimated", CONTEXT_BYTES, bound=True)
    if not (count := num_communicators(mesh, engine)):
        return (context,)
    what = f"NCCL buffers of {count} communicators, estimated"
    return (context, Term(ACCELERATOR, what, count * COMMUNICATOR_BYTES, bound=True))


def num_communicators(mesh: Mesh, engine: str) -> int:
    """Return the number of communicators of a rank, without groups of a single rank.

    These are torch's world and our groups of each axis. DeepSpeed adds its own copies of groups,
    but uses our groups for tensor parallelism without a pipeline.
    """
    if mesh.world == 1:
        return 0
    axes = sum(degree > 1 for degree in (mesh.dp, mesh.sp, mesh.tp, mesh.pp))
    copies = engine == "deepspeed" and (mesh.tp == 1 or mesh.pp > 1)
    return 1 + axes + copies
