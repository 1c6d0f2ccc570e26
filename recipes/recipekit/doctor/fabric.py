"""The links between GPUs (NVLink, PCIe, InfiniBand).

The module contains the speeds that the links should reach, and checks for problems that keep NCCL
from using them. It imports no heavy package.
"""

import contextlib
import platform
import re
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from ..hosts.findings import Findings, ReportRow
from ..spec.errors import Problem

MIN_NVLINK_GB_PER_S = 100.0  # GB/s in one direction: minimum between two GPUs with NVLink
# GB/s: a third of the bandwidth of one NVLink, for bridges and cards with few NVLinks
MIN_GB_PER_S_PER_NVLINK = 25 / 3
MIN_PCIE_GB_PER_S = (
    2.0  # GB/s: minimum between a host's GPUs that all send at once through host memory
)
MIN_MEMLOCK_BYTES = (
    1 << 30
)  # bytes; NCCL registers its buffers with the adapter, which locks them in memory
CAP_IPC_LOCK = 1 << 14  # linux/capability.h: may lock any amount of memory


class RdmaPort(NamedTuple):
    """An active RDMA port of a network adapter."""

    device: str
    gbit: float
    link_layer: str  # InfiniBand, or Ethernet for RoCE


def active_rdma_ports(root: Path = Path("/sys/class/infiniband")) -> list[RdmaPort]:
    """List the active ports."""
    found = []
    for port in sorted(root.glob("*/ports/*")):
        state, rate, layer = (
            (port / name).read_text() if (port / name).exists() else ""
            for name in ("state", "rate", "link_layer")
        )
        if "ACTIVE" in state and (number := re.match(r"[\d.]+", rate)):
            found.append(RdmaPort(port.parents[1].name, float(number[0]), layer.strip()))
    return found


def parse_nvlink_matrix(matrix: str) -> dict[tuple[int, int], int]:
    """Parse the output of `nvidia-smi topo -m`: (GPU, GPU) -> number of NVLinks between them."""
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


def collect_links(
    gpu_numbers: list[int], root: Path = Path("/sys/class/infiniband")
) -> dict[str, Any]:
    """Collect a host's links as JSON: its ports, and [i, j, NVLinks] for its local ranks' GPUs.

    `gpu_numbers` contains the indices that nvidia-smi uses.
    """
    matrix = ""
    if len(gpu_numbers) > 1 and (program := shutil.which("nvidia-smi")):
        # `check_devices` reports an nvidia-smi that does not answer.
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            matrix = subprocess.run(
                [program, "topo", "-m"], capture_output=True, text=True, timeout=30, check=False
            ).stdout
    lanes = parse_nvlink_matrix(matrix)
    pairs = [
        [i, j, lanes[a, b]]
        for i, a in enumerate(gpu_numbers)
        for j, b in enumerate(gpu_numbers)
        if (a, b) in lanes
    ]
    return {"ports": [list(port) for port in active_rdma_ports(root)], "nvlinks": pairs}


def check_adapters(
    multi_host: bool,
    root: Path = Path("/sys/class/infiniband"),
    proc: Path = Path("/proc"),
    kernel: str = platform.release(),
    memlock_limit: int = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
) -> Findings:
    """Find problems that would prevent NCCL from using this host's adapters.

    Call this function only on a host with GPUs. Without `multi_host`, the adapters are only listed.
    """
    found = active_rdma_ports(root)
    if not found:
        return
    kinds = ", ".join(f"{port.device} {port.gbit:g} Gb/s {port.link_layer}" for port in found)
    yield ReportRow("adapters", kinds)
    if not multi_host:
        return
    status = (proc / "self" / "status").read_text()
    rights = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.M)
    if (
        memlock_limit != resource.RLIM_INFINITY
        and memlock_limit < MIN_MEMLOCK_BYTES
        and not (rights and int(rights[1], 16) & CAP_IPC_LOCK)
    ):
        fix = (
            "run: ulimit -l unlimited (containers: --ulimit memlock=-1, Slurm:"
            " PropagateResourceLimitsExcept=MEMLOCK, systemd: LimitMEMLOCK=infinity)"
        )
        yield Problem(
            f"RLIMIT_MEMLOCK = {memlock_limit >> 10} KiB",
            f"NCCL cannot lock its buffers for {found[0].device} in memory",
            fix,
        )
    modules = (proc / "modules").read_text() if (proc / "modules").exists() else ""
    driver = proc / "driver" / "nvidia" / "version"
    # according to NVIDIA's GPUDirect page
    dma_buf = (
        driver.exists()
        and "Open Kernel Module" in driver.read_text()
        and _kernel_version(kernel) >= (5, 12)
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


def _kernel_version(kernel: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", kernel)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def nccl_network(log: str) -> str:
    """Return the network that NCCL chose, such as IB or Socket, from its log with NCCL_DEBUG=INFO.

    The result is "" if the log does not contain it.
    """
    found = re.findall(r"Using network (\S+)", log) or re.findall(
        r"Assigned NET plugin (\S+) to comm", log
    )
    return found[-1] if found else ""


def check_nccl_network(networks: dict[int, str], adapters: list[RdmaPort]) -> list[Problem]:
    """Return an error if NCCL uses sockets although the hosts have InfiniBand.

    `networks` maps each rank to the network that NCCL chose on it. `adapters` lists the ports of
    all hosts.
    """
    infiniband = [port for port in adapters if port.link_layer == "InfiniBand"]
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


class RankLocation(NamedTuple):
    """The location of a rank: its host, and its number on that host."""

    node: int
    local_rank: int


def expected_speeds(
    locations: dict[int, RankLocation], links_by_node: dict[int, dict[str, Any]], network: str
) -> dict[tuple[int, int], tuple[float, str]]:
    """Return the minimum speed of GPU links whose kind is known.

    The result maps (from rank, to rank) to (GB/s, kind of link). `links_by_node` maps each host to
    its links. The speeds are measured as in speed.py: in round k, every rank sends to the rank k
    after it. The ranks on a host therefore share its adapters.
    """
    world, found = len(locations), {}
    nvlink = {
        node: {(i, j): lanes for i, j, lanes in told["nvlinks"]}
        for node, told in links_by_node.items()
    }
    rates = {
        node: [
            port.gbit / 8
            for port in (RdmaPort(*port) for port in told["ports"])
            if port.link_layer == "InfiniBand" or network == "IB"
        ]
        for node, told in links_by_node.items()
    }
    for source in locations:
        for shift in range(1, world):
            target = (source + shift) % world
            here, there = locations[source], locations[target]
            if here.node == there.node:
                lanes = nvlink[here.node].get((here.local_rank, there.local_rank), 0)
                found[source, target] = (
                    (min(MIN_NVLINK_GB_PER_S, MIN_GB_PER_S_PER_NVLINK * lanes), f"{lanes} NVLinks")
                    if lanes
                    else (MIN_PCIE_GB_PER_S, "PCIe")
                )
            elif rates[here.node] and rates[there.node]:
                found[source, target] = (
                    _bandwidth_share(locations, shift, rates, (here.node, there.node)) / 2,
                    f"{max(rates[here.node]) * 8:g} Gb/s adapters",
                )
    return found


def _bandwidth_share(
    locations: dict[int, RankLocation],
    shift: int,
    rates: dict[int, list[float]],
    nodes: tuple[int, int],
) -> float:
    """Return the GB/s that two hosts' adapters can provide for a message between these hosts.

    The message is sent from the first to the second host. At the same time, every rank sends to
    the rank `shift` after it.
    """
    here, there = nodes
    hops = [
        (locations[rank].node, locations[(rank + shift) % len(locations)].node)
        for rank in locations
    ]
    leaving = sum(source == here != target for source, target in hops)
    coming = sum(source != there == target for source, target in hops)
    return min(
        min(max(rates[node]), sum(rates[node]) / flows)
        for node, flows in ((here, leaving), (there, coming))
    )


def links_below_expected(
    links: dict[tuple[int, int], float], expected: dict[tuple[int, int], tuple[float, str]]
) -> dict[tuple[int, int], str]:
    """Return a description of each link that is slower than its minimum: (from, to) -> text."""
    return {
        pair: (
            f"{speed:.2f} GB/s over {expected[pair][1]}, at least {expected[pair][0]:.1f} is"
            " expected"
        )
        for pair, speed in links.items()
        if pair in expected and speed < expected[pair][0]
    }
