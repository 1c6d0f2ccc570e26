"""Listings of the files below a folder.

A run needs these listings about eight times before its first step, and image folders are large.
Therefore, the files are listed only once.
"""

import contextlib
import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path

# nanoseconds after which a further change gets a new time stamp on any file system
SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class Listing:
    """The sorted files below a folder, and a stamp of each listed folder.

    `excluded` maps each entry that is not read to the reason. `targets` contains the resolved
    targets of links: every linked folder, and one linked file per folder.
    """

    files: tuple[Path, ...]
    stamps: dict[Path, tuple[int, int, int]]
    excluded: dict[Path, str]
    targets: tuple[Path, ...]


def is_excluded(name: str, is_folder: bool) -> bool:
    """Return True for a name that `datasets` 5.2.0 ignores.

    Ignored are hidden files and folders, and folders such as __pycache__.
    """
    return name.startswith(".") or (is_folder and name.startswith("__"))


def files_below(folder: Path, include_hidden: bool = False) -> tuple[Path, ...]:
    """Return the files in a folder and its subfolders, sorted.

    Return () if `folder` is not a folder. Links are followed, except a link to a folder that
    contains the link. With `include_hidden`, entries for which `is_excluded` is True are also
    listed.
    """
    return cached_listing(folder, include_hidden).files if folder.is_dir() else ()


def excluded_entries(folder: Path) -> dict[Path, str]:
    """Return the entries below a folder that are not read, each with the reason."""
    return cached_listing(folder).excluded if folder.is_dir() else {}


def link_targets(folder: Path) -> list[Path]:
    """Return the resolved targets of the links below a folder.

    They are every linked folder, and one linked file per folder.
    """
    return [path.resolve() for path in cached_listing(folder).targets] if folder.is_dir() else []


def cached_listing(folder: Path, include_hidden: bool = False) -> Listing:
    """Return a folder's listing, from a cache if nothing changed.

    A process lists the folder again only if files in the folder or its subfolders were added,
    removed or renamed.
    """
    kept, key = _listing_cache(), (folder, include_hidden)
    if key not in kept or any(
        folder_stamp(path) != before for path, before in kept[key].stamps.items()
    ):
        kept[key] = _scan_folder(folder, include_hidden)
    return kept[key]


def parent_folders(files: list[Path]) -> list[Path]:
    """Return the folders that contain these files, sorted."""
    # ten times as fast as file.parent
    return sorted(map(Path, {os.path.dirname(file) for file in files}))


def folder_stamp(folder: Path) -> tuple[int, int, int]:
    """Return a folder's inode and time, which change only if the folder's entries change.

    For a folder that is missing or has just changed, every call returns a different stamp.
    """
    now = time.time_ns()
    with contextlib.suppress(OSError):
        stat = folder.stat()
        return stat.st_ino, stat.st_mtime_ns, now if now - stat.st_mtime_ns < SETTLED_NS else 0
    return 0, 0, now


@functools.cache
def _listing_cache() -> dict[tuple[Path, bool], Listing]:
    return {}


class _FolderScan:
    """The entries that have been found so far while a folder is listed."""

    def __init__(self, hidden: bool):
        self.hidden = hidden
        self.files: list[Path] = []
        self.reasons: dict[Path, str] = {}  # why entries are not read
        self.targets: dict[str, Path] = {}  # one resolved link target per folder

    def add(self, entry: os.DirEntry) -> bool:
        """Add an entry of a folder; return True if the entry is a folder that should be listed."""
        path = Path(entry.path)
        try:
            is_folder, is_file = entry.is_dir(), entry.is_file()
        except OSError:  # a link to itself
            is_folder = is_file = False
        if not self.hidden and is_excluded(entry.name, is_folder):
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


def _scan_folder(folder: Path, include_hidden: bool) -> Listing:
    found = _FolderScan(include_hidden)
    stamps = dict[Path, tuple[int, int, int]]()
    # each folder with (device, inode) of all folders that contain it
    folders: list[tuple[Path, frozenset[tuple[int, int]]]] = [(folder, frozenset())]

    while folders:
        path, around = folders.pop()
        # The stamp is taken before the listing, so a change in between is detected next time.
        stamps[path] = folder_stamp(path)
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
