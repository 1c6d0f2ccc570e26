"""The time before the first step: no files are left behind, and device facts are exact."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import environment


def what_the_shm_op_leaves() -> tuple[list[str], bool]:
    """Return DeepSpeed's names in shared memory, and whether its shared-memory op is loaded.

    This function runs on a rank of a pool, after the rank's start.
    """
    names = [
        path.name
        for path in Path("/dev/shm").glob(
            f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_*"
        )
    ]
    return names, hasattr(torch.ops.deepspeed, "inference_all_reduce_")


def all_reduced_as_for_inference() -> float:
    import deepspeed.comm as dist

    told = torch.full((4,), float(dist.get_rank() + 1))
    dist.inference_all_reduce(told)
    return told.sum().item()


def test_ranks_take_no_shared_memory(pools: Any) -> None:
    """Collectives for which DeepSpeed uses its shared-memory op must also work without this op."""
    assert pools.run(2, what_the_shm_op_leaves) == [([], False)] * 2
    assert pools.run(2, all_reduced_as_for_inference) == [12.0, 12.0]


@pytest.mark.slow
def test_collectives_outwait_the_patience_with_a_server(ops: Callable[[str], None]) -> None:
    """Rank 0 retries a server for up to `retry_s` seconds while the other ranks wait in a
    collective.
    """
    argv = ["--tiny", "--retry_s", "7200"]
    code = (
        "import sys, torch; from pathlib import Path; from recipekit.spec.command import parse;"
        " from recipekit.spec.recipe import Recipe; from recipekit.plan import resolve_run\n"
        "from recipekit.run import _single_process_defaults; _single_process_defaults()\n"
        "from recipekit.runtime.start import initialize_distributed\n"
        "initialize_distributed(resolve_run(parse(Recipe(model='meta-llama/Llama-3.2-1B'),"
        " Path('x.py'),"
        " sys.argv[1:])))\n"
        "print(torch.distributed.group.WORLD._get_backend(torch.device('cpu')).options._timeout.total_seconds())\n"
        "torch.distributed.destroy_process_group()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) >= 7200 + 600


def questions_to_the_cpu() -> int:
    import cpuinfo
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from recipekit.hosts.ops import OPS, load_op

    load_op(OPS["cpu_adam"], print)
    for _ in range(2):
        DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(8))])
    return cpuinfo.get_cpu_info.cache_info().misses


def test_py_cpuinfo_is_asked_once(pools: Any, ops: Callable[[str], None]) -> None:
    """The query takes a second, and a host's ranks load an op one after the other."""
    ops("cpu_adam")
    assert pools.run(2, questions_to_the_cpu) == [1, 1]
