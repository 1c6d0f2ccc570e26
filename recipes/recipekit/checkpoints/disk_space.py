"""Disk space for a run's checkpoints and export."""

import resource
import shutil
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path

from .retention import Retention, complete_steps, remove_steps, steps_to_keep

FILE_SIZE_LIMIT_TEXT = "no file may become larger than"


@dataclass(frozen=True)
class DiskSpace:
    """The disk of a run's checkpoints; `one` is the size of one checkpoint in bytes.

    `oldest_first` is True after the run has reported at its start that the oldest checkpoint is
    removed before the next checkpoint is written.
    """

    folder: Path
    one: int
    oldest_first: bool = False

    @property
    def free_bytes(self) -> int:
        """The free bytes on the disk on which the folder is, or will be, located."""
        there = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        return shutil.disk_usage(there).free

    def shortage(self) -> str:
        """Return why a checkpoint cannot be written: a shell limit or insufficient space."""
        free, (limit, _) = self.free_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)
        # no file is larger than the checkpoint
        if limit != resource.RLIM_INFINITY and limit < self.one and free > max(self.one, limit):
            # checked here because torch.save does not report whether the limit or a full disk
            # stopped it
            return f"{FILE_SIZE_LIMIT_TEXT} {limit:,} bytes"
        return f"needs {self.one:,} bytes, {free:,} are free"


@dataclass(frozen=True)
class SpaceDemand:
    """A run's planned output: the steps to save, and the bytes of its export."""

    steps: list[int]
    export_bytes: int = 0


def find_shortage(room: DiskSpace, retention: Retention, demand: SpaceDemand) -> str:
    """Return the shortage that remains if old checkpoints are always removed first.

    Return "" if everything fits. The newest complete checkpoint stays until the next checkpoint is
    complete, so the disk must have space for both.
    """
    if not demand.steps:
        return ""
    sizes = {step: folder_bytes(step) for step in complete_steps(room.folder)}
    stays = steps_to_keep(
        complete_steps(room.folder), changed(retention, newest=min(1, retention.newest))
    )
    older = sum(size for step, size in sizes.items() if step not in stays)
    # space that can be freed once the next checkpoint is complete
    usable = older + (list(sizes.values())[-1] if sizes and retention.newest else 0)
    free = room.free_bytes
    if room.one > free + older:
        return f"each needs {room.one:,} bytes, {free:,} are free"
    if len(demand.steps) > 1 and retention.newest and 2 * room.one > free + usable:
        return (
            f"each needs {room.one:,} bytes, {free + usable:,} are free, and the newest one stays"
            " until the next one is complete"
        )
    if demand.export_bytes and room.one + demand.export_bytes > free + usable:
        return (
            f"needs {room.one:,} bytes and the export {demand.export_bytes:,} bytes,"
            f" {free + usable:,} are free"
        )
    return ""


def oldest_first_notice(room: DiskSpace, retention: Retention, demand: SpaceDemand) -> str:
    """Return a line if the disk is too small for all of a run's checkpoints; otherwise return "".

    The checkpoints are the `keep` + 1 newest ones and the steps that are kept permanently. The
    export must also fit.
    """
    present = len(complete_steps(room.folder))
    most = present + len(demand.steps)
    if retention.newest:
        for_ever = (
            sum(step % retention.every == 0 for step in demand.steps) if retention.every else 0
        )
        most = min(most, max(present, retention.newest) + 1 + for_ever + retention.best)
    free, wanted = room.free_bytes, (most - present) * room.one + demand.export_bytes
    if wanted <= free:
        return ""
    export = f" and {demand.export_bytes:,} bytes of the export" if demand.export_bytes else ""
    line = (
        f"checkpoints in {room.folder}: --keep {retention.newest} needs room for {most} of"
        f" {room.one:,} bytes{export}. {free:,} bytes are free"
    )
    if not retention.newest:
        return f"{line}. Saves fail once the disk is full: limit the number with --keep"
    return (
        f"{line}. If the room is short, the oldest checkpoint is removed before the next one is"
        " written"
    )


def remove_oldest(room: DiskSpace, retention: Retention) -> list[str]:
    """Remove the oldest checkpoints if the disk has no space for the next checkpoint.

    Return lines for the user. Nothing is removed if removal would not free enough space. The newest
    checkpoint always stays.
    """
    if not retention.newest or (free := room.free_bytes) >= room.one:
        return []
    found = complete_steps(room.folder)
    newest = 1 if room.oldest_first else max(1, retention.newest - 1)
    stays, gone = steps_to_keep(found, changed(retention, newest=newest)), dict[Path, dict]()
    for step, listed in found.items():
        if step not in stays and free < room.one:
            gone[step] = listed
            free += folder_bytes(step)
    return remove_steps(room.folder, gone) if free >= room.one else []


def folder_bytes(folder: Path) -> int:
    """Return the bytes that a folder uses on its disk."""
    return sum(512 * path.lstat().st_blocks for path in folder.rglob("*"))
