"""The files below a folder. A run looks at its data about eight times before its first step, and pictures are many: they are listed once."""

import contextlib
import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path

SETTLED = 2_000_000_000  # nanoseconds after which a change has another time than the one before it, on any file system


@dataclass(frozen=True)
class Listing:
    """The files below a folder, sorted, the stamp of each folder that was listed, and the entries that cannot be followed."""

    files: tuple[Path, ...]
    stamps: dict[Path, tuple[int, int, int]]
    skipped: dict[Path, str]  # entry -> its reason


def below(folder: Path) -> tuple[Path, ...]:
    """Lists the files of a folder and of those below it, sorted, without hidden files and folders; empty if `folder` is none.

    Links are followed. A folder is listed once, however many links lead to it, so a circle of links ends.
    """
    return listing(folder).files if folder.is_dir() else ()


def skipped(folder: Path) -> dict[Path, str]:
    """Return the entries below a folder that cannot be followed, each with its reason."""
    return listing(folder).skipped if folder.is_dir() else {}


def listing(folder: Path) -> Listing:
    """List a folder. In a process it is listed again only if files came, went or were renamed in it or below it."""
    kept = _kept()
    if folder not in kept or any(stamp(path) != before for path, before in kept[folder].stamps.items()):
        kept[folder] = _listed(folder)
    return kept[folder]


def folders_of(files: list[Path]) -> list[Path]:
    """Return the folders that hold these files, sorted."""
    return sorted(map(Path, {os.path.dirname(file) for file in files}))  # ten times as fast as file.parent


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
    found = list[Path]()
    folders, links = [(folder, False)], list[Path]()  # a folder, and whether a link leads to it
    stamps, left_out = dict[Path, tuple[int, int, int]](), dict[Path, str]()
    seen = set[tuple[int, int]]()  # device and inode of each folder that was listed

    while folders or links:
        if not folders:  # links come last, so a link into the same tree leads to a folder that is read already
            links.sort(reverse=True)
            folders = [(links.pop(), True)]
        path, linked = folders.pop()
        stamps[path] = stamp(path)  # before it is listed: what changes meanwhile is seen the next time
        try:
            stat, entries = path.stat(), sorted(os.scandir(path), key=lambda entry: entry.name)  # rglob takes twice as long
        except OSError:
            left_out[path] = "unreadable folder"
            continue
        if (number := (stat.st_dev, stat.st_ino)) in seen and linked:
            left_out[path] = "repeated link"
            continue
        seen.add(number)

        for entry in reversed(entries):
            if entry.name.startswith((".", "_")):
                continue
            try:
                is_folder, is_file = entry.is_dir(), entry.is_file()
            except OSError:  # a link to itself
                is_folder = is_file = False
            if is_folder and entry.is_symlink():
                links.append(Path(entry.path))
            elif is_folder:
                folders.append((Path(entry.path), linked))
            elif is_file:
                found.append(Path(entry.path))
            elif entry.is_symlink():
                left_out[Path(entry.path)] = "broken link"
    return Listing(tuple(sorted(found)), stamps, left_out)
