"""The manifest of a checkpoint folder: the list of its files, written last.

A folder without it does not count.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..spec.step_names import MANIFEST, step_of
from ..spec.whole_file import fsync

STATE, BLUEPRINT = "state.json", "blueprint.json"
Facts = dict[str, Any]  # {"bytes": size, "sha256": digest}


def facts(path: Path, flush: bool = True) -> Facts:
    """Returns size and sha256 of a file; with `flush` its bytes are on the disk afterwards."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if flush:
            os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest}


def write(folder: Path, step: int, files: dict[str, Facts], tensors: dict[str, Any]) -> None:
    """Completes a folder by its manifest.

    `tensors`: "name|role" -> [shape, dtype, digest], see digest.py.
    """
    path = folder / MANIFEST
    content: dict[str, Any] = {
        "step": step,
        "files": dict(sorted(files.items())),
        "tensors": dict(sorted(tensors.items())),
    }
    path.write_text(json.dumps(content | {"sha256": _digest(content)}, indent=1))
    fsync(path)
    for inner in {folder, *((folder / name).parent for name in files)}:
        fsync(inner)


def _digest(content: dict[str, Any]) -> str:
    """Digests the manifest itself: nothing else would show a flipped bit in it, in a tensor's
    digest say.
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read(folder: Path) -> dict[str, Any]:
    """Reads the manifest of a folder.

    Raises ValueError, saying what is wrong, if the manifest is missing or damaged.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        assert manifest.pop("sha256", None) == _digest(manifest)
        assert manifest.keys() == {"step", "files", "tensors"} and all(
            facts.keys() == {"bytes", "sha256"} for facts in manifest["files"].values()
        )
        return manifest
    except FileNotFoundError:
        raise ValueError(
            f"{MANIFEST} is missing: this is not a step folder, or the save did not finish"
        ) from None
    except (ValueError, AssertionError, AttributeError, TypeError):
        raise ValueError(f"{MANIFEST} differs from what was written") from None


def faults(
    folder: Path, names: Iterable[str] | None = None, seen: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Finds what is wrong with the files of a folder, each named; `names` restricts the slow
    comparison of contents to some files.

    `seen` is called with the number of bytes just read.
    """
    try:
        manifest = read(folder)
    except ValueError as error:
        return [str(error)]
    found = []
    listed: dict[str, Facts] = manifest["files"]
    if step_of(folder.name) not in (None, manifest["step"]):
        found.append(f"{MANIFEST} is of step {manifest['step']}, not of {folder.name}")
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    for name, wanted in listed.items():
        path = folder / name
        if name not in there:
            found.append(f"{name} is missing")
            continue
        try:
            if (size := path.stat().st_size) != wanted["bytes"]:
                found.append(f"{name} has {size} bytes instead of {wanted['bytes']}")
            elif names is None or name in names:
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != wanted["sha256"]:
                        found.append(f"{name} has changed: its sha256 does not match")
                seen(size)
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
    return found


def unlisted(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """List the files and links in a folder that its manifest does not name. No program reads
    them.
    """
    there = {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
    return sorted(there - manifest["files"].keys() - {MANIFEST})


def listed_files(folder: Path, pattern: str) -> list[Path]:
    """List the files of a folder that match a pattern and that its manifest names; without a
    manifest, all that match.
    """
    found = sorted(path for path in folder.glob(pattern) if path.is_file())
    try:
        names = read(folder)["files"]
    except ValueError:
        return found
    return [path for path in found if path.relative_to(folder).as_posix() in names]


def say_unlisted(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the line that names a folder's unlisted files; [] without any."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        [f"{folder}: {names[0]}{more} is not part of the checkpoint, and is ignored"]
        if names
        else []
    )
