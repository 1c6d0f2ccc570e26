"""CPU cores that this process may use, given its affinity and its cgroups' CPU limits.

This module imports nothing heavy.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

FILESYSTEM_ROOT = Path("/")


def usable_cores(root: Path = FILESYSTEM_ROOT) -> int:
    """Return the number of cores that this process can keep busy, at least 1."""
    return min(len(os.sched_getaffinity(0)), integer_cores(cpu_limit(root)))


def integer_cores(limit: float) -> int:
    """Return a CPU limit rounded down to whole cores, at least 1.

    If the process used even one thread more than the limit, the kernel would periodically pause all
    its threads.
    """
    return max(1, int(min(limit, 1 << 20)))


def cpu_limit(root: Path = FILESYSTEM_ROOT) -> float:
    """Return the cores that this process's cgroups allow (quota / period), or infinity.

    Both cgroup versions, 1 and 2, are supported. Kubernetes, Docker and systemd set such limits. A
    parent group's limit also applies.
    """
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        return min(
            (limit for line in lines for limit in _limits(root / "sys/fs/cgroup", line)),
            default=float("inf"),
        )
    return float("inf")


def _limits(mounts: Path, line: str) -> Iterator[float]:
    """Yield the CPU limits of a group and its parents.

    `line` is a line of /proc/self/cgroup: ID:CONTROLLERS:PATH. Version 2 lists no controllers.
    """
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    for mount in (
        (mounts / controllers, mounts / "cpu") if controllers else (mounts, mounts / "unified")
    ):
        # Inside a container, the path may be the host's path although the mount shows the
        # container's group.
        for group in [mount, *(mount / part for part in _cgroup_paths(path))]:
            with contextlib.suppress(OSError, ValueError):  # the file is missing or contains "max"
                quota, period = map(int, (group / "cpu.max").read_text().split())
                yield quota / period
            with contextlib.suppress(OSError, ValueError):
                quota, period = (
                    int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
                )
                if quota > 0:
                    yield quota / period


def _cgroup_paths(path: str) -> Iterator[str]:
    """Yield a group's path and its parents, without the root: a/b yields a, then a/b."""
    names = [name for name in path.split("/") if name]
    for end in range(1, len(names) + 1):
        if ".." not in names:
            yield "/".join(names[:end])
