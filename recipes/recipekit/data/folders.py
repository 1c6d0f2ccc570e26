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


class _Entries:
    """The entries met while a folder is listed."""

    def __init__(self, hidden: bool):
        self.hidden = hidden
        self.files: list[Path] = []
        self.reasons: dict[Path, str] = {}  # of the entries that are not read
        self.targets: dict[str, Path] = {}  # one target of the links in each folder

    def add(self, entry: os.DirEntry) -> bool:
        """Add an entry of a folder. Return True for a folder that is to be listed."""
        path = Path(entry.path)
        try:
            is_folder, is_file = entry.is_dir(), entry.is_file()
        except OSError:  # a link to itself
            is_folder = is_file = False
        if not self.hidden and is_left_out(entry.name, is_folder):
            self.reasons[path] = "hidden folder" if is_folder else "hidden file"
            return False

        if entry.is_symlink() and (is_folder or is_file):
            target = os.path.join(path.parent, os.readlink(entry.path))
            in_folder = target if is_folder else os.path.dirname(target)
            self.targets.setdefault(in_folder, Path(target))
        if is_file:
            self.files.append(path)
        elif entry.is_symlink() and not is_folder:
            self.reasons[path] = "broken link"
        return is_folder


def _listed(folder: Path, hidden: bool) -> Listing:
    found = _Entries(hidden)
    stamps = dict[Path, tuple[int, int, int]]()
    # with device and inode of each folder around it
    folders: list[tuple[Path, frozenset[tuple[int, int]]]] = [(folder, frozenset())]

    while folders:
        path, around = folders.pop()
        # The stamp is older than the list: a change in between shows the next time.
        stamps[path] = stamp(path)
        try:
            stat, entries = path.stat(), list(os.scandir(path))  # rglob takes twice as long
        except OSError:
            found.reasons[path] = "unreadable folder"
            continue
        if (number := (stat.st_dev, stat.st_ino)) in around:
            found.reasons[path] = "circular link"
            continue
        folders += [(Path(entry.path), around | {number}) for entry in entries if found.add(entry)]

    targets_of_links = tuple(found.targets.values())
    return Listing(tuple(sorted(found.files)), stamps, found.reasons, targets_of_links)
