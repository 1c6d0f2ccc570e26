"""Deals the cores of a host to its ranks, so that each computes beside its GPU."""

from collections.abc import Iterable
from pathlib import Path

SYSTEM = Path("/sys")


def deal(visible: list[str], allowed: Iterable[int], gpus: int, system: Path = SYSTEM) -> list[list[int]]:
    """Deals `allowed` cores to the ranks of the GPUs `visible` (numbers in PCI order): each gets its part of those of the GPU's NUMA node.

    Where a GPU or its node is not known (a CPU host, a UUID, one node for all), the rank shares all allowed cores. So it does
    where this process finds other than the host's number of `gpus`: a container that has a few of them numbers these anew. The
    two threads of a core go to one rank where they can; with fewer cores than ranks, ranks share a core.
    """
    allowed, nodes = sorted(allowed), numa_nodes(system)
    nodes = nodes if len(nodes) == gpus else []
    near = [frozenset(cores_of_node(nodes[int(name)], system) if name.isdigit() and int(name) < len(nodes) else ()) & set(allowed) for name in visible]
    near = [cores or frozenset(allowed) for cores in near]
    dealt: list[list[int]] = []
    for rank, cores in enumerate(near):
        ordered = sorted(cores, key=lambda core: (first_thread(core, system), core))
        part, parts = near[:rank].count(cores), near.count(cores)
        begin, end = (len(ordered) * number // parts for number in (part, part + 1))
        dealt.append(sorted(ordered[begin:end]) or [ordered[begin]])
    return dealt


def numa_nodes(system: Path) -> list[int]:
    """Reads the NUMA node of each NVIDIA GPU, in the order of their PCI addresses; -1: the host says none."""
    return [int((device / "numa_node").read_text()) for device in sorted((system / "bus/pci/drivers/nvidia").glob("*:*:*.*"))]


def cores_of_node(node: int, system: Path) -> set[int]:
    """Reads the cores of a NUMA node; none of node -1."""
    listed = system / f"devices/system/node/node{node}/cpulist"
    return set(numbers(listed.read_text())) if listed.exists() else set()


def first_thread(core: int, system: Path) -> int:
    """Returns the first of the hardware threads that share a core with this one."""
    listed = system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
    return min(numbers(listed.read_text())) if listed.exists() else core


def numbers(text: str) -> list[int]:
    """Reads Linux's lists of numbers, such as 0-3,8."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]
