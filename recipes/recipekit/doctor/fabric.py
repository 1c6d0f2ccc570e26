"""Examines the links between GPUs (NVLink, PCIe, InfiniBand): the speed they should reach, and what
keeps NCCL from using them.

Imports nothing heavy.
"""

import contextlib
import platform
import re
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from ..hosts.findings import Findings, Row
from ..spec.refusal import Problem

NVLINK = 100.0  # GB/s in one direction: the least between two GPUs joined by NVLink
# GB/s: a third of what one NVLink carries; for bridges and cards with few NVLinks
NVLINK_LANE = 25 / 3
PCIE = 2.0  # GB/s: the least between GPUs of a host that all talk at once and through host memory
MEMLOCK = 1 << 30  # bytes; NCCL registers its buffers with the adapter, which locks them in memory
CAP_IPC_LOCK = 1 << 14  # linux/capability.h: may lock any amount


class Port(NamedTuple):
    """Describes an active port of a network adapter for RDMA."""

    device: str
    gbit: float
    layer: str  # InfiniBand, or Ethernet for RoCE


def ports(root: Path = Path("/sys/class/infiniband")) -> list[Port]:
    """Lists the ports that are up."""
    found = []
    for port in sorted(root.glob("*/ports/*")):
        state, rate, layer = (
            (port / name).read_text() if (port / name).exists() else ""
            for name in ("state", "rate", "link_layer")
        )
        if "ACTIVE" in state and (number := re.match(r"[\d.]+", rate)):
            found.append(Port(port.parents[1].name, float(number[0]), layer.strip()))
    return found


def nvlinks(matrix: str) -> dict[tuple[int, int], int]:
    """Reads what `nvidia-smi topo -m` prints: (GPU, GPU) -> number of NVLinks between them."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).split("\t") for line in matrix.splitlines()]
    cells = [[cell.strip() for cell in line] for line in lines if len(line) > 1]
    columns = next((line for line in cells if "GPU0" in line), [])
    found = {}
    for line in cells:
        if line is not columns and (row := re.fullmatch(r"GPU(\d+)", line[0])):
            for name, cell in zip(columns[1:], line[1:], strict=False):
                if (column := re.fullmatch(r"GPU(\d+)", name)) and (
                    lanes := re.fullmatch(r"NV(\d+)", cell)
                ):
                    found[int(row[1]), int(column[1])] = int(lanes[1])
    return found


def facts(numbers: list[int], root: Path = Path("/sys/class/infiniband")) -> dict[str, Any]:
    """Collects a host's links, as JSON: its ports, and [i, j, NVLinks] for the GPUs of its local
    ranks, whose `numbers` are nvidia-smi's.
    """
    matrix = ""
    if len(numbers) > 1 and (program := shutil.which("nvidia-smi")):
        # `check_devices` reports an nvidia-smi that does not answer
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            matrix = subprocess.run(
                [program, "topo", "-m"], capture_output=True, text=True, timeout=30, check=False
            ).stdout
    lanes = nvlinks(matrix)
    pairs = [
        [i, j, lanes[a, b]]
        for i, a in enumerate(numbers)
        for j, b in enumerate(numbers)
        if (a, b) in lanes
    ]
    return {"ports": [list(port) for port in ports(root)], "nvlinks": pairs}


def check_adapters(
    hosts: bool,
    root: Path = Path("/sys/class/infiniband"),
    proc: Path = Path("/proc"),
    kernel: str = platform.release(),
    limit: int = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
) -> Findings:
    """Finds what keeps this host's adapters from serving NCCL, if the host has GPUs and the run has
    several `hosts`.
    """
    found = ports(root)
    if not found:
        return
    kinds = ", ".join(f"{port.device} {port.gbit:g} Gb/s {port.layer}" for port in found)
    yield Row("adapters", kinds)
    if not hosts:
        return
    status = (proc / "self" / "status").read_text()
    rights = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.M)
    if (
        limit != resource.RLIM_INFINITY
        and limit < MEMLOCK
        and not (rights and int(rights[1], 16) & CAP_IPC_LOCK)
    ):
        fix = (
            "run: ulimit -l unlimited (containers: --ulimit memlock=-1, Slurm:"
            " PropagateResourceLimitsExcept=MEMLOCK, systemd: LimitMEMLOCK=infinity)"
        )
        yield Problem(
            f"RLIMIT_MEMLOCK = {limit >> 10} KiB",
            f"NCCL cannot lock its buffers for {found[0].device} in memory",
            fix,
        )
    modules = (proc / "modules").read_text() if (proc / "modules").exists() else ""
    driver = proc / "driver" / "nvidia" / "version"
    # as NVIDIA's GPUDirect page says
    dma_buf = (
        driver.exists()
        and "Open Kernel Module" in driver.read_text()
        and _release(kernel) >= (5, 12)
    )
    if (
        driver.exists()
        and not dma_buf
        and not re.search(r"^(nvidia_peermem|nv_peer_mem) ", modules, re.M)
    ):
        rule = (
            f"{found[0].device} cannot read GPU memory: neither nvidia_peermem is loaded nor"
            " DMA-BUF there (open kernel modules, Linux 5.12), so all goes through host memory"
        )
        yield Problem(
            "GPUDirect RDMA",
            rule,
            "run: modprobe nvidia-peermem, or install the driver with open kernel modules",
        )


def _release(kernel: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", kernel)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def network_of(log: str) -> str:
    """Reads the network that NCCL chose, IB or Socket for example, from its log with
    NCCL_DEBUG=INFO; "" if the log does not say.
    """
    found = re.findall(r"Using network (\S+)", log) or re.findall(
        r"Assigned NET plugin (\S+) to comm", log
    )
    return found[-1] if found else ""


def over_sockets(networks: dict[int, str], adapters: list[Port]) -> list[Problem]:
    """Refuses NCCL over sockets while the hosts have InfiniBand; `networks`: what each rank's NCCL
    chose, `adapters`: those of all hosts.
    """
    infiniband = [port for port in adapters if port.layer == "InfiniBand"]
    if not infiniband or "Socket" not in networks.values():
        return []
    rule = (
        f"uses sockets between hosts, although {infiniband[0].device} with {infiniband[0].gbit:g}"
        " Gb/s is there"
    )
    fix = (
        "install libibverbs (rdma-core), pass /dev/infiniband to the container, unset"
        " NCCL_IB_DISABLE and NCCL_NET. Set NCCL_DEBUG=INFO to see the reason"
    )
    return [Problem("NCCL", rule, fix)]


class Place(NamedTuple):
    """Says where a rank runs: its host, and its number there."""

    node: int
    number: int


def floors(
    places: dict[int, Place], facts: dict[int, dict[str, Any]], network: str
) -> dict[tuple[int, int], tuple[float, str]]:
    """Returns the least speed of links of GPUs whose kind is known: (from rank, to rank) -> (GB/s,
    kind of link); `facts` by host.

    Measured as speed.py does: in round k every rank sends to the rank k after it, so the ranks of a
    host share its adapters.
    """
    world, found = len(places), {}
    nvlink = {
        node: {(i, j): lanes for i, j, lanes in told["nvlinks"]} for node, told in facts.items()
    }
    rates = {
        node: [
            port.gbit / 8
            for port in (Port(*port) for port in told["ports"])
            if port.layer == "InfiniBand" or network == "IB"
        ]
        for node, told in facts.items()
    }
    for source in places:
        for shift in range(1, world):
            target = (source + shift) % world
            here, there = places[source], places[target]
            if here.node == there.node:
                lanes = nvlink[here.node].get((here.number, there.number), 0)
                found[source, target] = (
                    (min(NVLINK, NVLINK_LANE * lanes), f"{lanes} NVLinks")
                    if lanes
                    else (PCIE, "PCIe")
                )
            elif rates[here.node] and rates[there.node]:
                found[source, target] = (
                    _share(places, shift, rates, (here.node, there.node)) / 2,
                    f"{max(rates[here.node]) * 8:g} Gb/s adapters",
                )
    return found


def _share(
    places: dict[int, Place], shift: int, rates: dict[int, list[float]], nodes: tuple[int, int]
) -> float:
    """Return the GB/s that the adapters of two hosts leave to one message from the first to the
    second, while every rank sends to the rank `shift` after it.
    """
    here, there = nodes
    hops = [(places[rank].node, places[(rank + shift) % len(places)].node) for rank in places]
    leaving = sum(source == here != target for source, target in hops)
    coming = sum(source != there == target for source, target in hops)
    return min(
        min(max(rates[node]), sum(rates[node]) / flows)
        for node, flows in ((here, leaving), (there, coming))
    )


def below(
    links: dict[tuple[int, int], float], least: dict[tuple[int, int], tuple[float, str]]
) -> dict[tuple[int, int], str]:
    """Describes the links that do not reach their floor: (from, to) -> text."""
    return {
        pair: f"{speed:.2f} GB/s over {least[pair][1]}, at least {least[pair][0]:.1f} is expected"
        for pair, speed in links.items()
        if pair in least and speed < least[pair][0]
    }
