"""Looks for the packages that a run needs, before one of them is imported. Imports nothing
heavy.
"""

import importlib.metadata
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from .refusal import Refusal, exit_refused, refuse
from .shipped import IS_WHEEL
from .utf8 import use_utf8

# Import names of what requirements.txt installs, without wandb (a run can do without it) and
# matplotlib (draws after a run).
NEEDED = (
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
ROOT = Path(__file__).resolve().parents[3]


def pins() -> list[str]:
    """Return the lines NAME==VERSION of requirements.txt; an installed wheel has them in its
    metadata.
    """
    if IS_WHEEL:
        return importlib.metadata.requires("recipekit") or []
    return [line for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line]


def check_packages(needed: Sequence[str] = NEEDED) -> None:
    """Raises `Refusal` if this Python lacks a package that a run imports."""
    # a folder alone is no package
    missing = [
        name
        for name in needed
        if (spec := importlib.util.find_spec(name)) is None or spec.origin is None
    ]
    if not missing:
        return
    if IS_WHEEL:
        raise refuse(
            sys.executable,
            f"has no {', '.join(missing)}",
            f"{shlex.quote(sys.executable)} -m pip install {' '.join(pins())}",
        )
    activate = ROOT / ".venv" / "bin" / "activate"
    found = f". {shlex.quote(str(activate))}" if activate.exists() else ""
    fix = f"activate the environment first: {found or 'make setup, then . .venv/bin/activate'}"
    if sys.prefix == str(ROOT / ".venv"):  # something has gone from the environment
        fix = f"{shlex.quote(sys.executable)} -m pip install -r requirements.txt"
    raise refuse(sys.executable, f"has no {', '.join(missing)}", fix)


def require_packages(needed: Sequence[str] = NEEDED) -> None:
    """End a tool with exit code 1 and a message if packages are missing; called before the tool
    imports them.
    """
    try:
        use_utf8()
        check_packages(needed)
    except Refusal as refusal:
        exit_refused(refusal)
