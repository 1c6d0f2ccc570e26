"""Room on the disk for the checkpoints and the export of a run."""

import resource
import shutil
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path

from .retention import Retention, kept, own_steps, remove

LIMIT = "no file may become larger than"


@dataclass(frozen=True)
class Room:
    """The disk of a run's checkpoints: `one` is what a checkpoint takes, in bytes.

    With `oldest_first` the start has reported that the oldest checkpoint goes before the next one
    is written.
    """

    folder: Path
    one: int
    oldest_first: bool = False

    @property
    def free(self) -> int:
        """Return the free bytes of the disk that has, or will have, the folder."""
        there = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        return shutil.disk_usage(there).free

    def missing(self) -> str:
        """Return why a checkpoint could not be written: a limit of the shell, or the space."""
        free, (limit, _) = self.free, resource.getrlimit(resource.RLIMIT_FSIZE)
        # no file is larger than the checkpoint
        if limit != resource.RLIM_INFINITY and limit < self.one and free > max(self.one, limit):
            # torch.save does not say whether it met the limit or the end of the disk
            return f"{LIMIT} {limit:,} bytes"
        return f"needs {self.one:,} bytes, {free:,} are free"


@dataclass(frozen=True)
class Demand:
    """What a run will write: the steps to save, and the bytes of its export."""

    steps: list[int]
    export: int = 0


def lacking(room: Room, retention: Retention, demand: Demand) -> str:
    """Return what does not fit on the disk even if the oldest checkpoint always goes first; "" if
    everything fits.

    The newest complete checkpoint stays until the next one is complete, so two must fit at a time.
    """
    if not demand.steps:
        return ""
    sizes = {step: bytes_of(step) for step in own_steps(room.folder)}
    stays = kept(own_steps(room.folder), changed(retention, newest=min(1, retention.newest)))
    older = sum(size for step, size in sizes.items() if step not in stays)
    # once the next one is complete
    usable = older + (list(sizes.values())[-1] if sizes and retention.newest else 0)
    free = room.free
    if room.one > free + older:
        return f"each needs {room.one:,} bytes, {free:,} are free"
    if len(demand.steps) > 1 and retention.newest and 2 * room.one > free + usable:
        return (
            f"each needs {room.one:,} bytes, {free + usable:,} are free, and the newest one stays"
            " until the next one is complete"
        )
    if demand.export and room.one + demand.export > free + usable:
        return (
            f"needs {room.one:,} bytes and the export {demand.export:,} bytes, {free + usable:,}"
            " are free"
        )
    return ""


def oldest_first(room: Room, retention: Retention, demand: Demand) -> str:
    """Return a line if the disk is too small for `keep` + 1 checkpoints, the steps kept for ever,
    and the export.
    """
    present = len(own_steps(room.folder))
    most = present + len(demand.steps)
    if retention.newest:
        for_ever = (
            sum(step % retention.every == 0 for step in demand.steps) if retention.every else 0
        )
        most = min(most, max(present, retention.newest) + 1 + for_ever + retention.best)
    free, wanted = room.free, (most - present) * room.one + demand.export
    if wanted <= free:
        return ""
    export = f" and {demand.export:,} bytes of the export" if demand.export else ""
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


def remove_oldest(room: Room, retention: Retention) -> list[str]:
    """Remove the oldest checkpoints if the disk is too small for the next one beside them; return
    lines for the user.

    Nothing is removed if that would not make enough room. The newest checkpoint always stays.
    """
    if not retention.newest or (free := room.free) >= room.one:
        return []
    found = own_steps(room.folder)
    newest = 1 if room.oldest_first else max(1, retention.newest - 1)
    stays, gone = kept(found, changed(retention, newest=newest)), dict[Path, dict]()
    for step, listed in found.items():
        if step not in stays and free < room.one:
            gone[step] = listed
            free += bytes_of(step)
    return remove(room.folder, gone) if free >= room.one else []


def bytes_of(folder: Path) -> int:
    """Return the bytes that a folder takes on its disk."""
    return sum(512 * path.lstat().st_blocks for path in folder.rglob("*"))
