"""recipekit/hosts/torch_builds.py and tools/make/torch_build.py: which build of torch a driver can
use, and installing it.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pool import ROOT
from recipekit.hosts import torch_builds
from recipekit.hosts.torch_builds import advice, build_for

OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build "
    " (dvs-builder@U22)\nGCC version:  gcc version 12.3.0\n"
)
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC"
    " version:  gcc version 11.4.0\n"
)


@pytest.mark.parametrize(
    ("driver", "models", "name"),
    [
        ("580.65.06", ["NVIDIA H200"], "cu130"),
        ("590.10", ["NVIDIA B200"], "cu130"),
        ("579.99", ["NVIDIA H200"], "cu126"),
        ("525.60.13", ["NVIDIA A100-SXM4-80GB"], "cu126"),
        ("570.86.10", ["NVIDIA B200"], None),  # Blackwell has no kernels in cu126
        ("570.86.10", ["NVIDIA GeForce RTX 5090"], None),
        ("570.86.10", ["NVIDIA GeForce RTX 4090"], "cu126"),
        ("524.99", ["NVIDIA H100 80GB HBM3"], None),
    ],
)
def test_the_build_for_a_driver(driver: str, models: list[str], name: str | None) -> None:
    found = build_for(driver, models)
    assert (found.name if found else None) == name


def test_the_advice_names_the_way_on() -> None:
    assert (
        advice("550.54.15", ["NVIDIA H200"], None)
        == "install the build for this driver: make setup TORCH=cu126 (cu130 from driver 580 on)"
    )
    assert (
        advice("580.65.06", ["NVIDIA H200"], "12.6")
        == "install the build for this driver: make setup TORCH=cu130"
    )
    assert advice("510.1", [], None) == "update the driver to at least 525 (cu126) or 580 (cu130)"
    assert advice("570.1", ["NVIDIA GB200"], "13.0") == "update the driver to at least 580 (cu130)"
    # it is the right build already
    assert "nvidia-fabricmanager" in advice("580.65.06", ["NVIDIA H200"], "13.0")


def test_what_torch_was_built_with_is_known_without_importing_it() -> None:
    import torch

    assert (torch_builds.installed("cuda"), torch_builds.installed("hip")) == (
        torch.version.cuda,
        torch.version.hip,
    )


def test_of_a_torch_with_cuda(tmp_path: Path) -> None:
    """version.py as PyPI's build of torch 2.13.0 has it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    told = (
        "from typing import Optional\n\n__version__ = '2.13.0+cu130'\ndebug = False\ncuda:"
        " Optional[str] = '13.0'\ngit_version = 'cf'\nhip: Optional[str] = None\n"
    )
    (tmp_path / "torch" / "version.py").write_text(told)
    code = (
        "from recipekit.hosts.torch_builds import installed; print(installed('cuda'),"
        " installed('hip'))"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "recipes")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "13.0 None\n"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cu128", "torch 2.11 was the last with it"),
        ("cu999", "there is no such build"),
        ("cu126;x", "there is no such build"),
    ],
)
def test_a_build_that_is_not_there_is_refused_before_anything_is_made(
    tmp_path: Path, name: str, says: str
) -> None:
    project(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        ["make", "setup", f"TORCH={name}"],
        cwd=tmp_path,
        env=make_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (
        done.returncode
        and f"refused: TORCH={name}: " in done.stderr
        and says in done.stderr
        and "cu126 (driver 525 or newer)" in done.stderr
    )
    assert "Traceback" not in done.stderr and sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_build_is_installed_from_where_torch_index_points(tmp_path: Path) -> None:
    """By a real pip into a real .venv, from a folder with a wheel of that name; the second call has
    nothing to do.
    """
    project(tmp_path)
    wheels = tmp_path / "index" / "torch"
    wheels.mkdir(parents=True)
    with zipfile.ZipFile(wheels / "torch-2.13.0+cu126-py3-none-any.whl", "w") as wheel:
        info = "torch-2.13.0+cu126.dist-info"
        wheel.writestr("torch/version.py", "cuda = '12.6'\n")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cu126\n"
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", "")
    (wheels / "index.html").write_text('<a href="torch-2.13.0%2Bcu126-py3-none-any.whl">torch</a>')
    make = lambda **more: subprocess.run(  # noqa: E731
        ["make", "torch-build", "TORCH=cu126"],
        cwd=tmp_path,
        env=make_environment() | more,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    done = make()
    assert (
        done.returncode
        and "Set TORCH_INDEX to the address of PyTorch's wheels" in done.stderr
        and "Traceback" not in done.stderr
    )
    done = make(TORCH_INDEX=f"file://{tmp_path}/index")
    assert done.returncode == 0 and "installing torch 2.13.0+cu126" in done.stdout, done.stderr
    told = subprocess.run(
        [tmp_path / ".venv/bin/python", "-m", "pip", "show", "torch"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert "Version: 2.13.0+cu126" in told
    done = make()
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def project(folder: Path) -> None:
    """What of the project `make setup` reads."""
    for name in ("Makefile", "requirements.txt", "requirements-dev.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("recipes", "tools/make"):
        (folder / name).mkdir(parents=True)
    (folder / "recipes" / "recipekit").symlink_to(ROOT / "recipes" / "recipekit")
    for name in ("torch_build.py", "make_venv.py"):
        shutil.copy(ROOT / "tools" / "make" / name, folder / "tools" / "make")


def make_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TORCH", "TORCH_INDEX")
    } | {"PYTHONDONTWRITEBYTECODE": "1"}
