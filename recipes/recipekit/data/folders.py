"""The files below a folder.

A run looks at its data about eight times before its first step, and pictures are many: they are
listed once.
"""

import contextlib
import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path

# nanoseconds after which a change has another time than the one before it, on any file system
SETTLED = 2_000_000_000


@dataclass(frozen=True)
class Listing:
    """The files below a folder, sorted, and a stamp of each folder that was listed.

    `left_out` has a reason for each entry that is not read. `targets` has the paths to which links
    lead: each folder, and one file of each folder.
    """

    files: tuple[Path, ...]
    stamps: dict[Path, tuple[int, int, int]]
    left_out: dict[Path, str]
    targets: tuple[Path, ...]


def is_left_out(name: str, is_folder: bool) -> bool:
    """Return True for a name that `datasets` 5.2.0 leaves out: hidden files and folders, and
    folders such as __pycache__.
    """
    return name.startswith(".") or (is_folder and name.startswith("__"))


def below(folder: Path, hidden: bool = False) -> tuple[Path, ...]:
    """List the files of a folder and of the folders below it, sorted; () if `folder` is not a
    folder.

    Links are followed, except to a folder around the link. `hidden`: also list entries for which
    `is_left_out` is True.
    """
    return listing(folder, hidden).files if folder.is_dir() else ()


def left_out(folder: Path) -> dict[Path, str]:
    """Return the entries below a folder that are not read, each with its reason."""
    return listing(folder).left_out if folder.is_dir() else {}


def targets(folder: Path) -> list[Path]:
    """Return the resolved paths to which links below a folder lead: each folder, and one file of
    each folder.
    """
    return [path.resolve() for path in listing(folder).targets] if folder.is_dir() else []


def listing(folder: Path, hidden: bool = False) -> Listing:
    """List a folder.

    In a process it is listed again only if files came, went or were renamed in it or below it.
    """
    kept, key = _kept(), (folder, hidden)
    if key not in kept or any(stamp(path) != before for path, before in kept[key].stamps.items()):
        kept[key] = _listed(folder, hidden)
    return kept[key]


def folders_of(files: list[Path]) -> list[Path]:
    """Return the folders that hold these files, sorted."""
    # ten times as fast as file.parent
    return sorted(map(Path, {os.path.dirname(file) for file in files}))


def stamp(folder: Path) -> tuple[int, int, int]:
    """Makes what stays the same as long as a folder's entries do: its number and time.

    Of a folder that is gone, or has changed just now, no two are alike.
    """
    now = time.time_ns()
    with contextlib.suppress(OSError):
        stat = folder.stat()
        return stat.st_ino, stat.st_mtime_ns, now if now - stat.st_mtime_ns < SETTLED else 0
    return 0, 0, now


@functools.cache
def _kept() -> dict[tuple[Path, bool], Listing]:
    return {}


def _listed(folder: Path, hidden: bool) -> Listing:
    # `linked`: one target of the links in each folder
    found, linked = list[Path](), dict[str, Path]()
    stamps, reasons = dict[Path, tuple[int, int, int]](), dict[Path, str]()
    # with device and inode of each folder around it
    folders: list[tuple[Path, frozenset[tuple[int, int]]]] = [(folder, frozenset())]

    while folders:
        path, around = folders.pop()
        # before it is listed: what changes meanwhile is seen the next time
        stamps[path] = stamp(path)
        try:
            stat, entries = path.stat(), list(os.scandir(path))  # rglob takes twice as long
        except OSError:
            reasons[path] = "unreadable folder"
            continue
        if (number := (stat.st_dev, stat.st_ino)) in around:
            reasons[path] = "circular link"
            continue

        for entry in entries:
            try:
                is_folder, is_file = entry.is_dir(), entry.is_file()
            except OSError:  # a link to itself
                is_folder = is_file = False
            if not hidden and is_left_out(entry.name, is_folder):
                reasons[Path(entry.path)] = "hidden folder" if is_folder else "hidden file"
                continue
            if entry.is_symlink() and (is_folder or is_file):
                target = os.path.join(path, os.readlink(entry.path))
                linked.setdefault(target if is_folder else os.path.dirname(target), Path(target))
            if is_folder:
                folders.append((Path(entry.path), around | {number}))
            elif is_file:
                found.append(Path(entry.path))
            elif entry.is_symlink():
                reasons[Path(entry.path)] = "broken link"
    return Listing(tuple(sorted(found)), stamps, reasons, tuple(linked.values()))
