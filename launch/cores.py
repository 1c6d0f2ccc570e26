"""Assignment of a host's CPU cores to ranks, so that each rank computes close to its GPU."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path("/")
SYSTEM = Path("/sys")


# The next four functions are also in recipekit/spec/cores.py, because launch does not import
# recipekit.
def usable_cores(root: Path = ROOT) -> int:
    """Return how many cores this process may keep busy, which is at least 1."""
    return min(len(os.sched_getaffinity(0)), whole_cores(cpu_limit(root)))


def whole_cores(limit: float) -> int:
    """Round a limit down to full cores, but to at least 1.

    If one thread more than the limit were running, the kernel would pause all threads for a while.
    """
    return max(1, int(min(limit, 1 << 20)))


def cpu_limit(root: Path = ROOT) -> float:
    """Return the number of cores that this process's cgroups allow, or infinity without a limit.

    A limit is quota / period, in cgroup versions 1 and 2. Kubernetes, Docker and systemd set such
    limits. Every parent group's limit also applies.
    """
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        return min(
            (limit for line in lines for limit in _limits(root / "sys/fs/cgroup", line)),
            default=float("inf"),
        )
    return float("inf")


def _limits(mounts: Path, line: str) -> Iterator[float]:
    """Yield the limits of a cgroup and of its parents.

    `line` is a line of /proc/self/cgroup: ID:CONTROLLERS:PATH. In version 2 there are no
    controllers.
    """
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    for mount in (
        (mounts / controllers, mounts / "cpu") if controllers else (mounts, mounts / "unified")
    ):
        # Inside a container the path may be the host's path, while the mount shows the container's
        # own group.
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
    """Yield a group's path and its parents, without the root. For example, a/b yields a, a/b."""
    names = [name for name in path.split("/") if name]
    for end in range(1, len(names) + 1):
        if ".." not in names:
            yield "/".join(names[:end])


def deal(
    visible: list[str], allowed: Iterable[int], gpus: int, system: Path = SYSTEM
) -> list[list[int]]:
    """Assign the `allowed` cores to ranks.

    Each rank receives its share of the cores in its GPU's NUMA node. `visible` lists each rank's
    GPU as a number in PCI order. If the GPU or its node is unknown (a CPU host, a UUID, one node
    for all GPUs), the rank shares all allowed cores. The same applies if the number of GPUs that
    this process sees differs from `gpus`, the host's number. A container with some of the GPUs
    renumbers them.

    Both threads of a core are assigned to the same rank if possible. If there are fewer cores than
    ranks, ranks share a core.
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
    """Read the NUMA node of each NVIDIA GPU, in the order of their PCI addresses.

    A node is -1 if the host does not report it.
    """
    return [
        int((device / "numa_node").read_text())
        for device in sorted((system / "bus/pci/drivers/nvidia").glob("*:*:*.*"))
    ]


def cores_of_node(node: int, system: Path) -> set[int]:
    """Read the cores in a NUMA node. The result is an empty set for node -1."""
    listed = system / f"devices/system/node/node{node}/cpulist"
    return set(numbers(listed.read_text())) if listed.exists() else set()


def first_thread(core: int, system: Path) -> int:
    """Return the first hardware thread on the physical core of the thread `core`."""
    listed = system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
    return min(numbers(listed.read_text())) if listed.exists() else core


def numbers(text: str) -> list[int]:
    """Parse a Linux list of numbers, such as 0-3,8."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return [
        number for first, _, last in ends for number in range(int(first), int(last or first) + 1)
    ]
