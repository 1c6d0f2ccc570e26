"""recipekit/hosts/build_info.py: the facts in run.json about torch's build and the driver.

The facts must equal the values that torch and the driver report.
"""

import importlib.metadata
from pathlib import Path

import pytest
from driver_versions import CLOSED, OPEN
from recipekit.hosts.build_info import (
    _format_cudnn_version,
    collect_build_info,
    installed_version,
    nvidia_driver_version,
    package_versions,
)


def test_the_build_of_this_torch(tmp_path: Path) -> None:
    import torch

    facts = collect_build_info(tmp_path / "none")
    assert facts["torch_git"] == torch.version.git_version and len(facts["torch_git"]) == 40
    assert facts["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert facts["cuda"] == torch.version.cuda and facts["driver"] is None
    if torch.version.cuda is None:
        assert [name for name, value in facts.items() if value is None] == [
            "cuda",
            "hip",
            "cudnn",
            "nccl",
            "archs",
            "driver",
            "capabilities",
            "device_memory",
        ]


def test_the_driver(tmp_path: Path) -> None:
    told = tmp_path / "version"
    assert nvidia_driver_version(told) is None
    for text, version in ((CLOSED, "550.54.15"), (OPEN, "580.65.06")):
        told.write_text(text)
        assert nvidia_driver_version(told) == version
    assert collect_build_info(told)["driver"] == "580.65.06"


@pytest.mark.parametrize(
    ("number", "version"), [(92000, "9.20.0"), (91002, "9.10.2"), (8902, "8.9.2")]
)
def test_versions_of_cudnn(number: int, version: str) -> None:
    assert _format_cudnn_version(number) == version


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert installed_version("no-such-package-of-these-recipes") is None
    assert (
        package_versions()["deepspeed"] == importlib.metadata.version("deepspeed")
        and package_versions()["python"].count(".") == 2
    )
