"""recipekit/hosts/torch_builds.py and tools/make/torch_build.py: the torch build for a driver.

One test also installs a build.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from make_setup import make_environment, project
from pool import ROOT
from recipekit.hosts import torch_builds
from recipekit.hosts.torch_builds import build_for, torch_build_advice


@pytest.mark.parametrize(
    ("driver", "models", "name"),
    [
        ("580.65.06", ["NVIDIA H200"], "cu130"),
        ("590.10", ["NVIDIA B200"], "cu130"),
        ("579.99", ["NVIDIA H200"], "cu126"),
        ("525.60.13", ["NVIDIA A100-SXM4-80GB"], "cu126"),
        ("570.86.10", ["NVIDIA B200"], None),  # cu126 has no kernels for Blackwell
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
        torch_build_advice("550.54.15", ["NVIDIA H200"], None)
        == "install the build for this driver: make setup TORCH=cu126 (cu130 from driver 580 on)"
    )
    assert (
        torch_build_advice("580.65.06", ["NVIDIA H200"], "12.6")
        == "install the build for this driver: make setup TORCH=cu130"
    )
    assert (
        torch_build_advice("510.1", [], None)
        == "update the driver to at least 525 (cu126) or 580 (cu130)"
    )
    assert (
        torch_build_advice("570.1", ["NVIDIA GB200"], "13.0")
        == "update the driver to at least 580 (cu130)"
    )
    # This is already the right build.
    assert "nvidia-fabricmanager" in torch_build_advice("580.65.06", ["NVIDIA H200"], "13.0")


def test_what_torch_was_built_with_is_known_without_importing_it() -> None:
    import torch

    assert (
        torch_builds.torch_platform_version("cuda"),
        torch_builds.torch_platform_version("hip"),
    ) == (
        torch.version.cuda,
        torch.version.hip,
    )


def test_of_a_torch_with_cuda(tmp_path: Path) -> None:
    """The contents of version.py come from PyPI's build of torch 2.13.0."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    told = (
        "from typing import Optional\n\n__version__ = '2.13.0+cu130'\ndebug = False\ncuda:"
        " Optional[str] = '13.0'\ngit_version = 'cf'\nhip: Optional[str] = None\n"
    )
    (tmp_path / "torch" / "version.py").write_text(told)
    code = (
        "from recipekit.hosts.torch_builds import torch_platform_version;"
        " print(torch_platform_version('cuda'), torch_platform_version('hip'))"
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
    """A real pip installs into a real .venv, from a folder that contains a wheel of that name.

    The second call finds nothing left to install.
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
