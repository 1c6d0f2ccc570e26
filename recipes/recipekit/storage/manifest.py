"""The manifest of a checkpoint folder: the list of its files, written last.

A folder without a manifest does not count as a checkpoint.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..spec.atomic_write import fsync
from ..spec.step_names import MANIFEST, step_of

STATE_FILE, BLUEPRINT_FILE = "state.json", "blueprint.json"
FileEntry = dict[str, Any]  # {"bytes": size, "sha256": digest}


def file_entry(path: Path, flush: bool = True) -> FileEntry:
    """Return a file's size and sha256; `flush` also flushes the file to disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if flush:
            os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest}


def write_manifest(
    folder: Path, step: int, files: dict[str, FileEntry], tensors: dict[str, Any]
) -> None:
    """Complete a folder by writing its manifest.

    `tensors` maps "name|role" to [shape, dtype, digest]; see digest.py.
    """
    path = folder / MANIFEST
    content: dict[str, Any] = {
        "step": step,
        "files": dict(sorted(files.items())),
        "tensors": dict(sorted(tensors.items())),
    }
    path.write_text(json.dumps(content | {"sha256": _manifest_sha256(content)}, indent=1))
    fsync(path)
    for inner in {folder, *((folder / name).parent for name in files)}:
        fsync(inner)


def _manifest_sha256(content: dict[str, Any]) -> str:
    """Return the sha256 of the manifest's content.

    Without this hash, a flipped bit in the manifest, such as in a tensor's digest, would not be
    detected.
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder.

    Raise ValueError with the reason if the manifest is missing or damaged.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        assert manifest.pop("sha256", None) == _manifest_sha256(manifest)
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


def find_faults(
    folder: Path,
    names: Iterable[str] | None = None,
    on_read: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """Return the faults of a folder's files, each with the file's name.

    `names` restricts the slow comparison of contents to some files. `on_read` is called with the
    number of bytes just read.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    found = []
    listed: dict[str, FileEntry] = manifest["files"]
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
                on_read(size)
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
    return found


def unlisted_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Return a folder's files and links that the manifest does not name.

    No program reads these files.
    """
    there = {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
    return sorted(there - manifest["files"].keys() - {MANIFEST})


def listed_files(folder: Path, pattern: str) -> list[Path]:
    """Return a folder's files that match a pattern and that the manifest names.

    Without a manifest, return all files that match.
    """
    found = sorted(path for path in folder.glob(pattern) if path.is_file())
    try:
        names = read_manifest(folder)["files"]
    except ValueError:
        return found
    return [path for path in found if path.relative_to(folder).as_posix() in names]


def unlisted_notice(folder: Path, names: Sequence[str]) -> list[str]:
    """Return a line that names a folder's unlisted files; [] if there are no unlisted files."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        [f"{folder}: {names[0]}{more} is not part of the checkpoint, and is ignored"]
        if names
        else []
    )
