"""The torch build and the driver version, which no package version shows, for run.json.

This module imports torch only inside functions.
"""

import platform
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")
RECORDED_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "accelerate", "wandb")


def package_versions() -> dict[str, str | None]:
    """Return Python's version and the package versions, with None for missing packages."""
    return {name: installed_version(name) for name in RECORDED_PACKAGES} | {
        "python": platform.python_version()
    }


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def nvidia_driver_version(version_file: Path = DRIVER_VERSION_FILE) -> str | None:
    """Read the version of NVIDIA's kernel driver, or return None if it is not loaded."""
    found = (
        re.search(r"\d{3,}\.\d+(\.\d+)*", version_file.read_text())
        if version_file.exists()
        else None
    )
    return found[0] if found else None


def collect_build_info(version_file: Path = DRIVER_VERSION_FILE) -> dict[str, Any]:
    """Collect the properties of the installed torch build and of this host.

    Values that this build or host does not provide are None.
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
        "cudnn": _format_cudnn_version(cudnn) if cudnn else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "archs": torch.cuda.get_arch_list() or None,
        "driver": nvidia_driver_version(version_file),
        "capabilities": sorted({f"{device.major}.{device.minor}" for device in devices}) or None,
        "device_memory": [device.total_memory for device in devices] or None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _format_cudnn_version(cudnn: int) -> str:
    """Format cuDNN's number as a version: 92000 -> 9.20.0, and before version 9: 8902 -> 8.9.2."""
    factor = 10000 if cudnn >= 90000 else 1000
    return f"{cudnn // factor}.{cudnn % factor // 100}.{cudnn % 100}"
