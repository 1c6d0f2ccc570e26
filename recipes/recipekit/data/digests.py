"""Hashes of data files, with which a run checks that its data have not changed."""

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

from ..spec.hub import check_lfs_pointer
from .folders import folder_stamp, parent_folders

HASHED_END_BYTES = 64 * 1024  # bytes at each end of a file that are hashed
# Maximum number of a folder's images whose bytes are hashed. For all other images, only name and
# size are hashed.
HASHED_IMAGES = 1024


def file_digests(files: list[Path]) -> dict[str, str]:
    """Return each file's digest by its path below the common folder.

    A digest covers the file's size, its first 64 KB and its last 64 KB. Raise `ConfigError` for a
    Git LFS pointer, which a clone contains instead of a file that was not fetched.
    """
    if len({file.is_absolute() for file in files}) > 1:
        named = {file: Path(os.path.abspath(file)) for file in files}
    else:
        named = {file: file for file in files}
    base = os.path.commonpath([file.parent for file in named.values()])
    found = {}
    for file, name in named.items():
        size = file.stat().st_size
        digest = hashlib.blake2b(f"{size}\0".encode(), digest_size=8)
        with file.open("rb") as stream:
            begin = stream.read(HASHED_END_BYTES)
            check_lfs_pointer(file, begin)
            digest.update(begin)
            if size > HASHED_END_BYTES:
                stream.seek(max(HASHED_END_BYTES, size - HASHED_END_BYTES))
                digest.update(stream.read())
        found[name.relative_to(base).as_posix()] = digest.hexdigest()
    return found


def class_digests(files: list[Path]) -> dict[str, str]:
    """Return one digest for the images of each class.

    A digest covers names and sizes, and both ends of up to `HASHED_IMAGES` images in total. A
    process rehashes the images only if files in their folders were added, removed or renamed.
    """
    return dict(_class_digests(tuple(files), tuple(map(folder_stamp, parent_folders(files)))))


@functools.lru_cache(maxsize=32)
def _class_digests(
    files: tuple[Path, ...], stamps: tuple[tuple[int, int, int], ...]
) -> dict[str, str]:
    every = -(-len(files) // HASHED_IMAGES)
    found: dict[str, Any] = {}
    for number, file in enumerate(files):
        digest = found.setdefault(file.parent.name, hashlib.blake2b(digest_size=8))
        ends = file_digests([file])[file.name] if number % every == 0 else ""
        digest.update(
            f"{file.name}\0{file.stat().st_size}\0{ends}\0".encode("utf-8", "surrogateescape")
        )
    return {name: digest.hexdigest() for name, digest in found.items()}


def fingerprint(of_files: dict[str, str], *more: str) -> str:
    """Return one hash of the files' digests and of `more`.

    `more` contains all other values on which the content depends.
    """
    return hashlib.blake2b(
        repr((sorted(of_files.items()), more)).encode(), digest_size=16
    ).hexdigest()
