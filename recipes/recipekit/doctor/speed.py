"""Measures with torch, for a few seconds, how fast each rank works and talks, so that slow ranks
and links show.
"""

import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..hosts.torch_builds import gpus_in_use
from .fabric import network_of

# for joining and the first collective, in which NCCL asks all GPUs and adapters of a large host
JOIN = timedelta(minutes=9)
LIMIT = timedelta(seconds=30)  # for each later collective


def join() -> dict[str, Any]:
    """Joins a process group by RANK, WORLD_SIZE and MASTER_*, over NCCL where there are GPUs, else
    gloo, and warms it up (a collective).

    Returns {"network"}: the network that NCCL uses between hosts, "" if NCCL does not say.
    """
    torch.set_num_threads(1)  # several ranks share the cores
    with tempfile.TemporaryDirectory() as folder:
        if gpus_in_use():
            torch.cuda.set_device(_device())
            if not {"NCCL_DEBUG", "NCCL_DEBUG_FILE"} & os.environ.keys():
                os.environ |= {
                    "NCCL_DEBUG": "INFO",
                    "NCCL_DEBUG_SUBSYS": "INIT,NET",
                    "NCCL_DEBUG_FILE": f"{folder}/nccl",
                }
        dist.init_process_group(
            "nccl" if gpus_in_use() else "gloo", timeout=JOIN if gpus_in_use() else LIMIT
        )
        dist.all_reduce(torch.zeros(1, device=_device()))
        _finish(_device())
        dist.distributed_c10d._set_pg_timeout(LIMIT)
        told = Path(folder) / "nccl"
        return {"network": network_of(told.read_text(errors="replace")) if told.exists() else ""}


def measure(seconds: float = 2.0) -> dict[str, Any]:
    """Measures the seconds of this rank for a piece of work and for an all-reduce, and GB/s from
    each rank (a collective).

    A third of `seconds` goes to work that each rank does alone, one to the all-reduce, one to the
    links.
    """
    device = _device()
    cuda = device.type == "cuda"
    message = torch.ones(1 << 24 if cuda else 1 << 20, device=device)  # 64 MiB; on a CPU 4 MiB
    matrix = torch.rand(4096 if cuda else 384, 4096 if cuda else 384, device=device)
    _ = matrix @ matrix
    dist.all_reduce(message)
    dist.barrier()

    begun, pieces = time.perf_counter(), 0
    while pieces == 0 or time.perf_counter() - begun < seconds / 3:
        _ = matrix @ matrix
        _finish(device)
        pieces += 1
    work = (time.perf_counter() - begun) / pieces

    dist.barrier()
    deadline, over, times = time.perf_counter() + seconds / 3, False, []
    while not over:
        message.fill_(1.0)
        # every rank has to stop at the same round
        message[0] = float(time.perf_counter() > deadline)
        _finish(device)
        begun = time.perf_counter()
        dist.all_reduce(message)
        over = message[0].item() > 0
        times.append(time.perf_counter() - begun)
    world = dist.get_world_size()
    wrong = message[1].item() != world
    links, complete = _links(message, device, seconds / 3)
    # GB/s, as nccl-tests counts them
    bus = message.nbytes * 2 * (world - 1) / world / min(times) / 1e9
    return {
        "cuda": cuda,
        "work": work,
        "all_reduce": statistics.median(times),
        "bus": bus,
        "links": links,
        "complete": complete,
        "wrong": wrong,
    }


def _links(
    message: torch.Tensor, device: torch.device, seconds: float
) -> tuple[dict[int, float], bool]:
    """Measures {rank: GB/s from it}, the best of five, and whether the time was enough for all
    ranks.

    In round k every rank sends k ranks on.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    received, found = torch.empty_like(message), {}
    deadline = time.perf_counter() + seconds
    for shift in range(1, world):
        to, source = (rank + shift) % world, (rank - shift) % world
        times = []
        for _ in range(6):  # the first message opens the connection
            begun = time.perf_counter()
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, message, to), dist.P2POp(dist.irecv, received, source)]
            ):
                work.wait()
            _finish(device)
            times.append(time.perf_counter() - begun)
        found[source] = message.nbytes / min(times[1:]) / 1e9
        over = torch.tensor(float(time.perf_counter() > deadline), device=device)
        dist.all_reduce(over)
        if over.item() > 0:
            return found, shift == world - 1
    return found, True


def _device() -> torch.device:
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if gpus_in_use()
        else torch.device("cpu")
    )


def _finish(device: torch.device) -> None:
    """Waits until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
