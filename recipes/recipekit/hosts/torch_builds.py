"""Finds the build of torch that a host can use: the CUDA of a build decides which driver the build
needs.

Imports nothing heavy.

The table is for torch 2.13 (RELEASE.md of pytorch): 12.6 and 13.0, and 13.2 on trial. torch 2.11
was the last with a cu128. A build of CUDA 12.x runs on any driver from 525 on, one of 13.x from 580
on (NVIDIA's table of minor version compatibility).
"""

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple


class Build(NamedTuple):
    """Describes a build of torch, named by the suffix of its version: 2.13.0+cu126."""

    name: str
    driver: int  # the least major version of NVIDIA's driver
    blackwell: bool  # has kernels for B200, GB200 and RTX 50


BUILDS = (Build("cu130", 580, True), Build("cu126", 525, False))  # the newest first
GONE = {
    "cu128": (
        "torch 2.11 was the last with it, cu126 runs on the same drivers, and Blackwell GPUs take"
        " cu130"
    )
}
BLACKWELL = re.compile(r"\b(G?B[123]\d\d|RTX 50\d\d|RTX PRO \d+ Blackwell)\b")


def installed(platform: str = "cuda") -> str | None:
    """Reads, without importing torch, the version of CUDA (or "hip") that torch was built with;
    None for a build without.
    """
    spec = importlib.util.find_spec("torch")
    told = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    found = (
        re.search(rf"^{platform}\b[^=]*=\s*'([\w.-]+)'", told.read_text(), re.M)
        if told and told.exists()
        else None
    )
    return found[1] if found else None


def gpus_in_use() -> bool:
    """Returns True if a run started here uses GPUs: torch and DeepSpeed see them, and
    DS_ACCELERATOR names no other device.

    Imports torch only if GPUs are possible.
    """
    if (installed("cuda") or installed("hip")) is None or os.environ.get(
        "DS_ACCELERATOR", "cuda"
    ) != "cuda":
        return False
    import torch

    return torch.cuda.is_available()


def gpu_models(told: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Reads the names of the GPUs from the driver, without any library."""
    texts = [path.read_text() for path in sorted(told.glob("*/information"))]
    return [
        found[1].strip() for text in texts if (found := re.search(r"^Model:\s*(.*)$", text, re.M))
    ]


def build_for(driver: str, models: list[str]) -> Build | None:
    """Returns the newest build that this driver and these GPUs can use."""
    major, blackwell = int(driver.partition(".")[0]), any(map(BLACKWELL.search, models))
    return next(
        (build for build in BUILDS if major >= build.driver and (build.blackwell or not blackwell)),
        None,
    )


def advice(driver: str, models: list[str], cuda: str | None) -> str:
    """Says what makes torch see the GPUs of a host with this driver; `cuda` is the version of the
    installed build.
    """
    if (build := build_for(driver, models)) is None:
        least = [
            f"{build.driver} ({build.name})"
            for build in reversed(BUILDS)
            if build.blackwell or not any(map(BLACKWELL.search, models))
        ]
        return f"update the driver to at least {' or '.join(least)}"
    if cuda and f"cu{cuda.replace('.', '')}" == build.name:
        return (
            "check the output of nvidia-smi. Hosts with NVSwitch need nvidia-fabricmanager running,"
            " containers the GPUs passed on (--gpus all)"
        )
    newer = ", ".join(
        f"{other.name} from driver {other.driver} on"
        for other in BUILDS
        if other.driver > build.driver
    )
    return (
        "install the build for this driver: make setup"
        f" TORCH={build.name}{f' ({newer})' if newer else ''}"
    )
