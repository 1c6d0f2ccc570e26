"""Hashes of data files, by which a run recognises its data."""

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

from ..spec.hub import check_pointer
from .folders import folders_of, stamp

ENDS = 64 * 1024  # bytes of each end of a file that its fingerprint covers
# pictures of a folder whose bytes its fingerprint covers; of the others it covers name and size
SAMPLED = 1024


def digests(files: list[Path]) -> dict[str, str]:
    """Hashes each file: name below the common folder -> a hash of the file's size and its first and
    last 64 KB.

    Raises `Refusal` for a pointer of Git LFS, which a clone has instead of a file that was not
    fetched.
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
            begin = stream.read(ENDS)
            check_pointer(file, begin)
            digest.update(begin)
            if size > ENDS:
                stream.seek(max(ENDS, size - ENDS))
                digest.update(stream.read())
        found[name.relative_to(base).as_posix()] = digest.hexdigest()
    return found


def digests_of_classes(files: list[Path]) -> dict[str, str]:
    """Hashes the pictures of each class: class -> a hash of their names and sizes, and of the ends
    of up to `SAMPLED` in all.

    In a process they are hashed again only if files came, went or were renamed in their folders.
    """
    return dict(_digests_of_classes(tuple(files), tuple(map(stamp, folders_of(files)))))


@functools.lru_cache(maxsize=32)
def _digests_of_classes(
    files: tuple[Path, ...], stamps: tuple[tuple[int, int, int], ...]
) -> dict[str, str]:
    every = -(-len(files) // SAMPLED)
    found: dict[str, Any] = {}
    for number, file in enumerate(files):
        digest = found.setdefault(file.parent.name, hashlib.blake2b(digest_size=8))
        ends = digests([file])[file.name] if number % every == 0 else ""
        digest.update(
            f"{file.name}\0{file.stat().st_size}\0{ends}\0".encode("utf-8", "surrogateescape")
        )
    return {name: digest.hexdigest() for name, digest in found.items()}


def fingerprint(of_files: dict[str, str], *more: str) -> str:
    """Makes one hash of the files' digests and of `more`, what else decides the content."""
    return hashlib.blake2b(
        repr((sorted(of_files.items()), more)).encode(), digest_size=16
    ).hexdigest()
