"""recipekit/hosts/build_facts.py: what run.json says of torch's build and the driver is what torch
and the driver say.
"""

import importlib.metadata
from pathlib import Path

import pytest
from recipekit.hosts.build_facts import _dotted, build_facts, driver, version_of, versions
from test_torch_builds import CLOSED, OPEN


def test_the_build_of_this_torch(tmp_path: Path) -> None:
    import torch

    facts = build_facts(tmp_path / "none")
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
    assert driver(told) is None
    for text, version in ((CLOSED, "550.54.15"), (OPEN, "580.65.06")):
        told.write_text(text)
        assert driver(told) == version
    assert build_facts(told)["driver"] == "580.65.06"


@pytest.mark.parametrize(
    ("number", "version"), [(92000, "9.20.0"), (91002, "9.10.2"), (8902, "8.9.2")]
)
def test_versions_of_cudnn(number: int, version: str) -> None:
    assert _dotted(number) == version


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert version_of("no-such-package-of-these-recipes") is None
    assert (
        versions()["deepspeed"] == importlib.metadata.version("deepspeed")
        and versions()["python"].count(".") == 2
    )
