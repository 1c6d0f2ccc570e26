"""What lies below a folder. A run looks at its data about eight times before its first step, and pictures are many: they are listed once."""

import contextlib
import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path

SETTLED = 2_000_000_000  # nanoseconds after which a change has another time than the one before it, on any file system


@dataclass(frozen=True)
class Listing:
    """Holds the files below a folder, sorted, and the stamp of each folder that they were found in."""

    files: tuple[Path, ...]
    stamps: dict[Path, tuple[int, int, int]]


def below(folder: Path) -> tuple[Path, ...]:
    """Lists the files of a folder and of those below it, sorted, without hidden files and folders; empty if `folder` is none.

    In a process a folder is listed again only if files came, went or were renamed in it or below it.
    """
    if not folder.is_dir():
        return ()
    kept = _kept()
    if folder not in kept or any(stamp(path) != before for path, before in kept[folder].stamps.items()):
        kept[folder] = _listed(folder)
    return kept[folder].files


def stamp(folder: Path) -> tuple[int, int, int]:
    """Makes what stays the same as long as a folder's entries do: its number and time. Of a folder that is gone, or has changed just now, no two are alike."""
    now = time.time_ns()
    with contextlib.suppress(OSError):
        stat = folder.stat()
        return stat.st_ino, stat.st_mtime_ns, now if now - stat.st_mtime_ns < SETTLED else 0
    return 0, 0, now


@functools.cache
def _kept() -> dict[Path, Listing]:
    return {}


def _listed(folder: Path) -> Listing:
    found, folders, stamps = list[Path](), [folder], {}
    while folders:
        stamps[folders[-1]] = stamp(folders[-1])  # before it is listed: what changes meanwhile is seen the next time
        with contextlib.suppress(PermissionError), os.scandir(folders.pop()) as entries:  # rglob takes twice as long
            for entry in entries:
                if entry.name.startswith((".", "_")):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif entry.is_file():
                    found.append(Path(entry.path))
    return Listing(tuple(sorted(found)), stamps)
