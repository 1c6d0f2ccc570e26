"""Finds the cores of a host that the ranks may use, and deals them, so that each rank computes
beside its GPU.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path("/")
SYSTEM = Path("/sys")


# The next four functions are also in recipekit/spec/cores.py: launch imports nothing of recipekit.
def usable_cores(root: Path = ROOT) -> int:
    """Return how many cores this process may keep busy, at least 1."""
    return min(len(os.sched_getaffinity(0)), whole_cores(cpu_limit(root)))


def whole_cores(limit: float) -> int:
    """Return a limit as whole cores, at least 1: with one thread more than the limit, the kernel
    stops all threads for a while.
    """
    return max(1, int(min(limit, 1 << 20)))


def cpu_limit(root: Path = ROOT) -> float:
    """Return the cores that the cgroups of this process allow (quota / period, versions 1 and 2);
    infinity without a limit.

    Kubernetes, Docker and systemd set such limits. A limit of any parent group also holds.
    """
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        return min(
            (limit for line in lines for limit in _limits(root / "sys/fs/cgroup", line)),
            default=float("inf"),
        )
    return float("inf")


def _limits(mounts: Path, line: str) -> Iterator[float]:
    """Yield the limits of a group and of its parents.

    `line` is of /proc/self/cgroup: ID:CONTROLLERS:PATH, without controllers in version 2.
    """
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    for mount in (
        (mounts / controllers, mounts / "cpu") if controllers else (mounts, mounts / "unified")
    ):
        # inside a container the path may be the host's, while the mount shows the container's own
        # group
        for group in [mount, *(mount / part for part in _parts(path))]:
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                quota, period = map(int, (group / "cpu.max").read_text().split())
                yield quota / period
            with contextlib.suppress(OSError, ValueError):
                quota, period = (
                    int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
                )
                if quota > 0:
                    yield quota / period


def _parts(path: str) -> Iterator[str]:
    """Yield a group's path and its parents, without the root: a/b yields a, a/b."""
    names = [name for name in path.split("/") if name]
    for end in range(1, len(names) + 1):
        if ".." not in names:
            yield "/".join(names[:end])


def deal(
    visible: list[str], allowed: Iterable[int], gpus: int, system: Path = SYSTEM
) -> list[list[int]]:
    """Deals `allowed` cores to the ranks of the GPUs `visible` (numbers in PCI order): each gets
    its part of those of the GPU's NUMA node.

    Where a GPU or its node is not known (a CPU host, a UUID, one node for all), the rank shares all
    allowed cores. So it does where this process finds other than the host's number of `gpus`: a
    container that has a few of them numbers these anew. The two threads of a core go to one rank
    where they can; with fewer cores than ranks, ranks share a core.
    """
    allowed, nodes = sorted(allowed), numa_nodes(system)
    nodes = nodes if len(nodes) == gpus else []
    near = [
        frozenset(
            cores_of_node(nodes[int(name)], system)
            if name.isdigit() and int(name) < len(nodes)
            else ()
        )
        & set(allowed)
        for name in visible
    ]
    near = [cores or frozenset(allowed) for cores in near]
    dealt: list[list[int]] = []
    for rank, cores in enumerate(near):
        ordered = sorted(cores, key=lambda core: (first_thread(core, system), core))
        part, parts = near[:rank].count(cores), near.count(cores)
        begin, end = (len(ordered) * number // parts for number in (part, part + 1))
        dealt.append(sorted(ordered[begin:end]) or [ordered[begin]])
    return dealt


def numa_nodes(system: Path) -> list[int]:
    """Reads the NUMA node of each NVIDIA GPU, in the order of their PCI addresses; -1: the host
    says none.
    """
    return [
        int((device / "numa_node").read_text())
        for device in sorted((system / "bus/pci/drivers/nvidia").glob("*:*:*.*"))
    ]


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
    return [
        number for first, _, last in ends for number in range(int(first), int(last or first) + 1)
    ]
