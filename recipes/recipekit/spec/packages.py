"""Checks that a run's packages are installed. They run before any package is imported.

This module imports nothing heavy.
"""

import importlib.metadata
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import ConfigError, config_error, exit_with_error
from .shipped import IS_WHEEL
from .utf8 import use_utf8

# Import names of the packages in requirements.txt, except wandb, which is optional, and matplotlib,
# which plots after a run.
REQUIRED_PACKAGES = (
    *(
        "torch",
        "deepspeed",
        "transformers",
        "datasets",
        "accelerate",
        "peft",
        "safetensors",
        "huggingface_hub",
        "tokenizers",
    ),
    *("hjson", "pyarrow", "jinja2", "pydantic", "numpy", "rich", "cpuinfo"),
)
REPOSITORY_ROOT = Path(__file__).resolve().parents[3]


def pinned_requirements() -> list[str]:
    """Return the NAME==VERSION lines of requirements.txt or of an installed wheel's metadata.

    A copy of recipes/ alone has no requirements.txt. The result is then empty.
    """
    if IS_WHEEL:
        return importlib.metadata.requires("recipekit") or []
    file = REPOSITORY_ROOT / "requirements.txt"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [line for line in lines if "==" in line]


def check_packages(packages: Sequence[str] = REQUIRED_PACKAGES) -> None:
    """Raise `ConfigError` if a package that a run imports is not installed in this Python."""
    # A folder without files does not count as a package.
    missing = [
        name
        for name in packages
        if (spec := importlib.util.find_spec(name)) is None or spec.origin is None
    ]
    if not missing:
        return
    if IS_WHEEL:
        raise config_error(
            sys.executable,
            f"has no {', '.join(missing)}",
            f"{shlex.quote(sys.executable)} -m pip install {' '.join(pinned_requirements())}",
        )
    activate = REPOSITORY_ROOT / ".venv" / "bin" / "activate"
    found = f". {shlex.quote(str(activate))}" if activate.exists() else ""
    fix = f"activate the environment first: {found or 'make setup, then . .venv/bin/activate'}"
    if sys.prefix == str(REPOSITORY_ROOT / ".venv"):  # a package was removed from this environment
        fix = f"{shlex.quote(sys.executable)} -m pip install -r requirements.txt"
    raise config_error(sys.executable, f"has no {', '.join(missing)}", fix)


def require_packages(packages: Sequence[str] = REQUIRED_PACKAGES) -> None:
    """Exit with code 1 and a message if packages are missing.

    A tool must call this function before it imports the packages.
    """
    try:
        use_utf8()
        check_packages(packages)
    except ConfigError as error:
        exit_with_error(error)
