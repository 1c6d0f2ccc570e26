"""Names of step folders: the one rule that decides which entries of a `checkpoints` folder belong
to a run.

A checkpoint is called `step_` and its number, in eight digits or more. Everything else in the
folder is the user's.
"""

import os
import re
from pathlib import Path

# the last file that a save writes: a step folder without one is not complete
MANIFEST = "manifest.json"
_NAME = re.compile(r"step_([0-9]{8,})")


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the number of the step folder `name`; None if no save gives a folder this name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


def step_folders(folder: Path) -> list[Path]:
    """List the step folders in `folder`, and links with such a name, by the number of the step."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_dir() or entry.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbers = {
        entry.name: number for entry in entries if (number := step_of(entry.name)) is not None
    }
    return [folder / name for name in sorted(numbers, key=lambda name: numbers[name])]


def is_step_folder(path: Path) -> bool:
    """Return True for a checkpoint under any name, and for a damaged one under its own; False for a
    run folder.
    """
    return (path / MANIFEST).is_file() or step_of(path.name) is not None


def newest_complete(folder: Path) -> Path | None:
    """Return the newest step folder in `folder` that has a manifest; its files are not verified."""
    return next(
        (step for step in reversed(step_folders(folder)) if (step / MANIFEST).is_file()), None
    )


def free_name(folder: Path, name: str) -> Path:
    """Return the first of `aside_NAME.1`, `aside_NAME.2`, ... that is free in `folder`."""
    number = 1
    while os.path.lexists(folder / f"aside_{name}.{number}"):
        number += 1
    return folder / f"aside_{name}.{number}"
