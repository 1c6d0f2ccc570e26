"""Reads what torch was built with and the driver's version: facts of run.json that no version
number shows.

Imports torch only inside functions.
"""

import platform
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DRIVER = Path("/proc/driver/nvidia/version")
PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "accelerate", "wandb")


def versions() -> dict[str, str | None]:
    """Reads the versions of packages and of Python: name -> version, None if a package is not
    installed.
    """
    return {name: version_of(name) for name in PACKAGES} | {"python": platform.python_version()}


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver(told: Path = DRIVER) -> str | None:
    """Reads the version of NVIDIA's kernel driver; None if none is loaded."""
    found = re.search(r"\d{3,}\.\d+(\.\d+)*", told.read_text()) if told.exists() else None
    return found[0] if found else None


def build_facts(told: Path = DRIVER) -> dict[str, Any]:
    """Collects how this torch was built and what it runs on; None for what this build or host does
    not have.
    """
    import torch

    cuda = torch.version.cuda is not None
    cudnn, nccl = (
        torch.backends.cudnn.version() if cuda else None,
        import_module("torch.cuda.nccl").version()
        if torch.distributed.is_nccl_available()
        else None,
    )
    devices = [
        torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
    ]
    return {
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": _dotted(cudnn) if cudnn else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "archs": torch.cuda.get_arch_list() or None,
        "driver": driver(told),
        "capabilities": sorted({f"{device.major}.{device.minor}" for device in devices}) or None,
        "device_memory": [device.total_memory for device in devices] or None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _dotted(cudnn: int) -> str:
    """Writes cuDNN's number as a version: 92000 -> 9.20.0, and before version 9: 8902 -> 8.9.2."""
    factor = 10000 if cudnn >= 90000 else 1000
    return f"{cudnn // factor}.{cudnn % factor // 100}.{cudnn % 100}"
