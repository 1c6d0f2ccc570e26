"""A copy of what `make setup` reads, and its environment."""

import os
import shutil
from pathlib import Path

from pool import ROOT


def project(folder: Path) -> None:
    """Copy the files of the project that `make setup` reads."""
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
