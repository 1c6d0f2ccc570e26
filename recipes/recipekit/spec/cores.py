"""CPU cores that this process may use: its affinity and the CPU limits of its cgroups.

Imports nothing heavy.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


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
