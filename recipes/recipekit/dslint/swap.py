"""Checks the drive that an NVMe offload swaps to."""

import os
from pathlib import Path
from typing import Any

from ..spec.paths import local_path
from ..spec.refusal import Problem, Refusal
from .outputs import BLOCKS
from .schema import at


def check_swap(config: dict[str, Any], out: Path) -> list[Problem]:
    """Refuses NVMe folders that cannot be used on this host; a relative `nvme_path` lies under
    `out`.
    """
    found = []
    for path in BLOCKS:
        block = at(config, path)
        if (
            not isinstance(block, dict)
            or block.get("device") != "nvme"
            or not isinstance(block.get("nvme_path"), str)
        ):
            continue
        where = f"{path}.nvme_path = {block['nvme_path']}"
        try:
            folder = local_path(where, block["nvme_path"])
        except Refusal:
            continue  # `check_outputs` reports it
        relative = not folder.is_absolute()
        folder = out / folder if relative else folder
        there = folder
        while relative and not there.exists():  # the run makes folders under `out`
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
        elif file_system(there) in ("tmpfs", "ramfs"):
            found.append(
                Problem(
                    where,
                    f"{there} is in memory ({file_system(there)}), so offloading there frees no"
                    " memory",
                    "use a folder on a local drive",
                )
            )
    return found


def file_system(folder: Path) -> str:
    """Reads the kind of file system that `folder` lies on; "" if the system does not say."""
    mounts = Path("/proc/self/mounts")
    best, kind = "", ""
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        _, point, name, *_ = line.split()
        point = point.replace("\\040", " ")
        if len(point) >= len(best) and folder.resolve().is_relative_to(point):
            best, kind = point, name
    return kind
