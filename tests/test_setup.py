"""What happens before the first step leaves nothing behind."""

import os
from pathlib import Path
from typing import Any


def shared_memory_names() -> list[str]:
    """Runs on every rank of a pool, after its start: the names that DeepSpeed's CPU collectives left, of this job's port."""
    return [path.name for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_*")]


def test_no_shared_memory_outlives_its_processes(pools: Any) -> None:
    assert pools.run(2, shared_memory_names) == [[], []]
