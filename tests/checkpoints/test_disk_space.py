"""Disk space for checkpoints and the export: messages of a start, and the order of deletions."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cases import rows
from disks import small_disk
from recipekit.checkpoints.disk_space import (
    DiskSpace,
    SpaceDemand,
    find_shortage,
    folder_bytes,
    oldest_first_notice,
    remove_oldest,
)
from recipekit.checkpoints.retention import Retention, complete_steps
from recipekit.spec.step_names import step_name, step_of
from recipekit.storage import manifest

PART = 64 << 10  # bytes of a checkpoint


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], DiskSpace]]:
    """Yield a function that returns a disk with space for `free` checkpoints and a few pages."""
    mounts = []

    def made(free: float) -> DiskSpace:
        mounts.append(small_disk(tmp_path / "disk", f"{int(free * PART) + (8 << 10)}"))
        return DiskSpace(mounts[-1].__enter__() / "checkpoints", PART)

    yield made
    for mount in mounts:
        mount.__exit__(None, None, None)


def save(room: DiskSpace, *steps: int) -> None:
    """Write complete step folders with the size of one checkpoint, including one page for the
    folder.
    """
    for number in steps:
        step = room.folder / step_name(number)
        step.mkdir(parents=True)
        (step / "a.pt").write_bytes(bytes(PART - 4096))
        manifest.write_manifest(step, number, {"a.pt": manifest.file_entry(step / "a.pt")}, {})
        assert folder_bytes(step) == PART


def numbers(room: DiskSpace) -> list[int]:
    return [step_of(step.name) or 0 for step in complete_steps(room.folder)]


SAVES = [10, 20, 30, 40]


@dataclass(frozen=True)
class EmptyDisk:
    """Free space in checkpoints, the size of a save, and parts of the error and the notice."""

    free: float
    keep: int
    steps: list[int]
    export: int
    lacks: str
    first: str | None


@pytest.mark.parametrize(
    ("free", "keep", "steps", "export", "lacks", "first"),
    rows(
        EmptyDisk(free=0.5, keep=2, steps=SAVES, export=0, lacks="each needs", first=None),
        EmptyDisk(
            free=1.7,
            keep=2,
            steps=SAVES,
            export=0,
            lacks="stays until the next one is complete",
            first=None,
        ),
        EmptyDisk(free=1.7, keep=2, steps=[10], export=0, lacks="", first=""),
        EmptyDisk(
            free=1.7, keep=0, steps=SAVES, export=0, lacks="", first="--keep 0 needs room for 4 "
        ),
        EmptyDisk(
            free=2.7, keep=2, steps=SAVES, export=0, lacks="", first="--keep 2 needs room for 3 "
        ),
        EmptyDisk(free=2.7, keep=2, steps=SAVES[:2], export=0, lacks="", first=""),
        EmptyDisk(free=2.7, keep=1, steps=SAVES, export=0, lacks="", first=""),
        EmptyDisk(
            free=2.7, keep=1, steps=SAVES, export=PART, lacks="", first="--keep 1 needs room for 2 "
        ),
        EmptyDisk(free=3.1, keep=2, steps=SAVES, export=0, lacks="", first=""),
        EmptyDisk(
            free=3.1,
            keep=2,
            steps=SAVES,
            export=PART // 2,
            lacks="",
            first="and 32,768 bytes of the export",
        ),
        EmptyDisk(free=1.2, keep=2, steps=[10], export=PART, lacks="and the export", first=None),
        EmptyDisk(free=4.1, keep=0, steps=SAVES, export=0, lacks="", first=""),
    ),
)
def test_a_start_on_an_empty_disk(
    disk: Callable[[float], DiskSpace],
    free: float,
    keep: int,
    steps: list[int],
    export: int,
    lacks: str,
    first: str | None,
) -> None:
    """A requirement that can never be met is rejected. A requirement that needs deletions is
    reported.
    """
    room, retention, demand = disk(free), Retention(keep), SpaceDemand(steps, export)
    found = find_shortage(room, retention, demand)
    assert (lacks in found) if lacks else found == ""
    if first is not None:
        said = oldest_first_notice(room, retention, demand)
        assert (first in said) if first else said == ""


def test_a_resume_counts_the_checkpoints_that_are_there(disk: Callable[[float], DiskSpace]) -> None:
    room = disk(2.8)
    save(room, 10, 20)
    assert find_shortage(
        room, Retention(2), SpaceDemand([30])
    ) == "" and "needs room for 3 " in oldest_first_notice(room, Retention(2), SpaceDemand([30]))
    assert "each needs" in find_shortage(room, Retention(0), SpaceDemand([30]))
    assert find_shortage(room, Retention(2), SpaceDemand([])) == ""


def test_steps_that_are_kept_for_ever_need_room_as_well(disk: Callable[[float], DiskSpace]) -> None:
    """With keep 1 and every 20th step kept, three checkpoints of steps 10 to 60 remain.

    The newest and the next checkpoint need space in addition.
    """
    room, demand = disk(4.5), SpaceDemand([*SAVES, 50, 60])
    assert (
        oldest_first_notice(room, Retention(1), demand)
        == oldest_first_notice(room, Retention(3), demand)
        == ""
    )
    assert "needs room for 5 " in oldest_first_notice(room, Retention(1, every=20), demand)
    assert "needs room for 5 " in oldest_first_notice(room, Retention(3, best=True), demand)


@dataclass(frozen=True)
class ShortRoom:
    """The number that --keep requests, and the steps that remain."""

    retention: Retention
    said_first: bool
    one: int
    left: list[int]


@pytest.mark.parametrize(
    ("retention", "said_first", "one", "left"),
    rows(
        ShortRoom(
            retention=Retention(2), said_first=False, one=1, left=[20, 30]
        ),  # no more than necessary
        ShortRoom(retention=Retention(2), said_first=False, one=2, left=[30]),
        ShortRoom(retention=Retention(3), said_first=False, one=1, left=[20, 30]),
        ShortRoom(retention=Retention(4), said_first=False, one=1, left=[10, 20, 30]),
        ShortRoom(retention=Retention(4), said_first=True, one=1, left=[20, 30]),
        ShortRoom(retention=Retention(4), said_first=True, one=2, left=[30]),
        ShortRoom(
            retention=Retention(4), said_first=True, one=3, left=[10, 20, 30]
        ),  # too large in any case
        ShortRoom(retention=Retention(1), said_first=False, one=2, left=[30]),
        ShortRoom(retention=Retention(0), said_first=True, one=1, left=[10, 20, 30]),
        ShortRoom(retention=Retention(1, every=10), said_first=True, one=1, left=[10, 20, 30]),
        ShortRoom(retention=Retention(1, every=20), said_first=True, one=1, left=[20, 30]),
    ),
    ids=str,
)
def test_the_oldest_goes_first_if_the_room_is_short(
    disk: Callable[[float], DiskSpace],
    retention: Retention,
    said_first: bool,
    one: int,
    left: list[int],
) -> None:
    """The newest checkpoint is never removed.

    Checkpoints within --keep are removed only if the start has announced this.
    """
    room = disk(3.4)
    save(room, 10, 20, 30)
    room = dataclasses.replace(room, one=one * PART, oldest_first=said_first)
    assert remove_oldest(room, retention) == []
    assert numbers(room) == left


def test_nothing_goes_from_a_disk_with_room(disk: Callable[[float], DiskSpace]) -> None:
    room = dataclasses.replace(disk(4.4), oldest_first=True)
    save(room, 10, 20, 30)
    assert remove_oldest(room, Retention(1)) == [] and numbers(room) == [10, 20, 30]
