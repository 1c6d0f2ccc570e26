"""Check of the drive to which an NVMe offload swaps."""

import os
from pathlib import Path
from typing import Any

from ..spec.errors import ConfigError, Problem
from ..spec.paths import local_path
from .outputs import OFFLOAD_BLOCKS
from .schema import value_at


def check_swap(config: dict[str, Any], out: Path) -> list[Problem]:
    """Report NVMe folders that this host cannot use.

    A relative `nvme_path` is a folder below `out`.
    """
    found = []
    for path in OFFLOAD_BLOCKS:
        block = value_at(config, path)
        if (
            not isinstance(block, dict)
            or block.get("device") != "nvme"
            or not isinstance(block.get("nvme_path"), str)
        ):
            continue
        where = f"{path}.nvme_path = {block['nvme_path']}"
        try:
            folder = local_path(where, block["nvme_path"])
        except ConfigError:
            continue  # `check_outputs` reports it
        relative = not folder.is_absolute()
        folder = out / folder if relative else folder
        there = folder
        while relative and not there.exists():  # the run creates folders under `out`
            there = there.parent
        if not there.is_dir():
            found.append(
                Problem(
                    where,
                    f"the folder {folder} does not exist on this host",
                    "use a folder on a local drive",
                )
            )
        elif not os.access(there, os.W_OK):
            found.append(
                Problem(where, f"{there} is not writable", "use a folder that you can write to")
            )
        elif file_system_type(there) in ("tmpfs", "ramfs"):
            found.append(
                Problem(
                    where,
                    f"{there} is in memory ({file_system_type(there)}), so offloading there frees"
                    " no memory",
                    "use a folder on a local drive",
                )
            )
    return found


def file_system_type(folder: Path) -> str:
    """Return the type of the file system that contains `folder`, or "" if unknown."""
    mounts = Path("/proc/self/mounts")
    best, kind = "", ""
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        _, point, name, *_ = line.split()
        point = point.replace("\\040", " ")
        if len(point) >= len(best) and folder.resolve().is_relative_to(point):
            best, kind = point, name
    return kind
