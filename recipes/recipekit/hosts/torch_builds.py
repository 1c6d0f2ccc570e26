"""The torch build that a host can use, since a build's CUDA version requires a minimum driver.

This module imports no heavy package.

The table describes torch 2.13 (RELEASE.md of pytorch): CUDA 12.6 and 13.0, and experimentally 13.2.
torch 2.11 was the last version with a cu128 build. A build with CUDA 12.x requires driver 525 or
newer, and a build with CUDA 13.x requires driver 580 or newer (NVIDIA's table of minor version
compatibility).
"""

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple


class TorchBuild(NamedTuple):
    """A torch build, named by its version suffix, such as cu126 in 2.13.0+cu126."""

    name: str
    min_driver: int  # minimum major version of NVIDIA's driver
    supports_blackwell: bool  # includes kernels for B200, GB200 and RTX 50


TORCH_BUILDS = (TorchBuild("cu130", 580, True), TorchBuild("cu126", 525, False))  # newest first
DISCONTINUED_BUILDS = {
    "cu128": (
        "torch 2.11 was the last with it, cu126 runs on the same drivers, and Blackwell GPUs take"
        " cu130"
    )
}
BLACKWELL_PATTERN = re.compile(r"\b(G?B[123]\d\d|RTX 50\d\d|RTX PRO \d+ Blackwell)\b")


def torch_platform_version(platform: str = "cuda") -> str | None:
    """Return the CUDA version (or "hip") that torch was built with, without importing torch.

    Return None for a build without CUDA or HIP.
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
    """Return True if a run started here would use GPUs.

    torch and DeepSpeed must see the GPUs, and DS_ACCELERATOR must not name a different device.
    torch is imported only if GPUs may be present.
    """
    if (torch_platform_version("cuda") or torch_platform_version("hip")) is None or os.environ.get(
        "DS_ACCELERATOR", "cuda"
    ) != "cuda":
        return False
    import torch

    return torch.cuda.is_available()


def gpu_models(driver_folder: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Read the GPUs' names from the driver, without using any library."""
    texts = [path.read_text() for path in sorted(driver_folder.glob("*/information"))]
    return [
        found[1].strip() for text in texts if (found := re.search(r"^Model:\s*(.*)$", text, re.M))
    ]


def build_for(driver_version: str, models: list[str]) -> TorchBuild | None:
    """Return the newest build that this driver and these GPUs support."""
    major, blackwell = (
        int(driver_version.partition(".")[0]),
        any(map(BLACKWELL_PATTERN.search, models)),
    )
    return next(
        (
            build
            for build in TORCH_BUILDS
            if major >= build.min_driver and (build.supports_blackwell or not blackwell)
        ),
        None,
    )


def torch_build_advice(driver_version: str, models: list[str], cuda_version: str | None) -> str:
    """Return how to make torch see this host's GPUs, given its driver version.

    `cuda_version` is the installed build's CUDA version.
    """
    if (build := build_for(driver_version, models)) is None:
        least = [
            f"{build.min_driver} ({build.name})"
            for build in reversed(TORCH_BUILDS)
            if build.supports_blackwell or not any(map(BLACKWELL_PATTERN.search, models))
        ]
        return f"update the driver to at least {' or '.join(least)}"
    if cuda_version and f"cu{cuda_version.replace('.', '')}" == build.name:
        return (
            "check the output of nvidia-smi. Hosts with NVSwitch need nvidia-fabricmanager running,"
            " containers the GPUs passed on (--gpus all)"
        )
    newer = ", ".join(
        f"{other.name} from driver {other.min_driver} on"
        for other in TORCH_BUILDS
        if other.min_driver > build.min_driver
    )
    return (
        "install the build for this driver: make setup"
        f" TORCH={build.name}{f' ({newer})' if newer else ''}"
    )
