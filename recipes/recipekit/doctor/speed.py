"""A torch measurement of a few seconds that shows slow ranks and slow links.

It measures how fast each rank computes and communicates.
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
from .fabric import nccl_network

# Limit for joining and the first collective, in which NCCL queries all GPUs and adapters of a large
# host.
JOIN_TIMEOUT = timedelta(minutes=9)
COLLECTIVE_TIMEOUT = timedelta(seconds=30)  # for each later collective


def join_process_group() -> dict[str, Any]:
    """Join the process group given by RANK, WORLD_SIZE and MASTER_*, and warm it up (a collective).

    The backend is NCCL with GPUs and gloo without GPUs. Return {"network"}, the network that NCCL
    uses between hosts, or "" if NCCL does not report it.
    """
    torch.set_num_threads(1)  # several ranks share the cores
    with tempfile.TemporaryDirectory() as folder:
        if gpus_in_use():
            torch.cuda.set_device(_rank_device())
            if not {"NCCL_DEBUG", "NCCL_DEBUG_FILE"} & os.environ.keys():
                os.environ |= {
                    "NCCL_DEBUG": "INFO",
                    "NCCL_DEBUG_SUBSYS": "INIT,NET",
                    "NCCL_DEBUG_FILE": f"{folder}/nccl",
                }
        dist.init_process_group(
            "nccl" if gpus_in_use() else "gloo",
            timeout=JOIN_TIMEOUT if gpus_in_use() else COLLECTIVE_TIMEOUT,
        )
        dist.all_reduce(torch.zeros(1, device=_rank_device()))
        _synchronize(_rank_device())
        dist.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT)
        told = Path(folder) / "nccl"
        return {"network": nccl_network(told.read_text(errors="replace")) if told.exists() else ""}


def measure_speed(seconds: float = 2.0) -> dict[str, Any]:
    """Measure the speed of this rank and of its links (a collective).

    The results are this rank's seconds for a piece of work and for an all-reduce, and the GB/s from
    each rank. A third of `seconds` is spent on work that each rank does alone, a third on the
    all-reduce, and a third on the links.
    """
    device = _rank_device()
    cuda = device.type == "cuda"
    message = torch.ones(1 << 24 if cuda else 1 << 20, device=device)  # 64 MiB; on a CPU 4 MiB
    matrix = torch.rand(4096 if cuda else 384, 4096 if cuda else 384, device=device)
    _ = matrix @ matrix
    dist.all_reduce(message)
    dist.barrier()

    begun, pieces = time.perf_counter(), 0
    while pieces == 0 or time.perf_counter() - begun < seconds / 3:
        _ = matrix @ matrix
        _synchronize(device)
        pieces += 1
    work = (time.perf_counter() - begun) / pieces

    dist.barrier()
    deadline, over, times = time.perf_counter() + seconds / 3, False, []
    while not over:
        message.fill_(1.0)
        # Every rank must stop in the same round.
        message[0] = float(time.perf_counter() > deadline)
        _synchronize(device)
        begun = time.perf_counter()
        dist.all_reduce(message)
        over = message[0].item() > 0
        times.append(time.perf_counter() - begun)
    world = dist.get_world_size()
    wrong = message[1].item() != world
    links, complete = _measure_links(message, device, seconds / 3)
    # GB/s, computed as in nccl-tests
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


def _measure_links(
    message: torch.Tensor, device: torch.device, seconds: float
) -> tuple[dict[int, float], bool]:
    """Measure {rank: GB/s from that rank}, the best of five measurements.

    Also return True if the time was sufficient for all ranks. In round k, every rank sends to the
    rank k after it.
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
            _synchronize(device)
            times.append(time.perf_counter() - begun)
        found[source] = message.nbytes / min(times[1:]) / 1e9
        over = torch.tensor(float(time.perf_counter() > deadline), device=device)
        dist.all_reduce(over)
        if over.item() > 0:
            return found, shift == world - 1
    return found, True


def _rank_device() -> torch.device:
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if gpus_in_use()
        else torch.device("cpu")
    )


def _synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
