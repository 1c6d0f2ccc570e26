"""Names of step folders, which decide which entries in a `checkpoints` folder belong to a run.

A checkpoint's name is `step_` plus its step number in eight or more digits. Everything else in the
folder belongs to the user.
"""

import os
import re
from pathlib import Path

# The last file that a save writes. A step folder without this file is incomplete.
MANIFEST = "manifest.json"
_NAME = re.compile(r"step_([0-9]{8,})")


def step_name(step: int) -> str:
    """Return the folder name of a step."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step number of the folder name `name`, or None for any other name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


def step_folders(folder: Path) -> list[Path]:
    """Return the step folders in `folder`, and links with step names, sorted by step number."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_dir() or entry.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbers = {
        entry.name: number for entry in entries if (number := step_of(entry.name)) is not None
    }
    return [folder / name for name in sorted(numbers, key=lambda name: numbers[name])]


def is_step_folder(path: Path) -> bool:
    """Return True for a checkpoint under any name and for a damaged one under its original name.

    Return False for a run folder.
    """
    return (path / MANIFEST).is_file() or step_of(path.name) is not None


def newest_complete(folder: Path) -> Path | None:
    """Return the newest step folder in `folder` that has a manifest. Its files are not verified."""
    return next(
        (step for step in reversed(step_folders(folder)) if (step / MANIFEST).is_file()), None
    )


def free_name(folder: Path, name: str) -> Path:
    """Return the first path of `aside_NAME.1`, `aside_NAME.2`, ... that is unused in `folder`."""
    number = 1
    while os.path.lexists(folder / f"aside_{name}.{number}"):
        number += 1
    return folder / f"aside_{name}.{number}"
