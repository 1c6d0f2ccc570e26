"""Room for checkpoints and the export: what the start says of a disk, and what goes first where it
is short.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disks import small_disk
from recipekit.checkpoints.retention import Retention, own_steps
from recipekit.checkpoints.room import Demand, Room, bytes_of, lacking, oldest_first, remove_oldest
from recipekit.spec.step_names import step_name, step_of
from recipekit.storage import manifest

PART = 64 << 10  # bytes of a checkpoint's file


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Room]]:
    """`disk(free)` gives a disk with room for so many checkpoints, and a few pages."""
    mounts = []

    def made(free: float) -> Room:
        mounts.append(small_disk(tmp_path / "disk", f"{int(free * PART) + (8 << 10)}"))
        return Room(mounts[-1].__enter__() / "checkpoints", PART)

    yield made
    for mount in mounts:
        mount.__exit__(None, None, None)


def save(room: Room, *steps: int) -> None:
    """Write complete step folders of one page and the rest of a checkpoint."""
    for number in steps:
        step = room.folder / step_name(number)
        step.mkdir(parents=True)
        (step / "a.pt").write_bytes(bytes(PART - 4096))
        manifest.write(step, number, {"a.pt": manifest.facts(step / "a.pt")}, {})
        assert bytes_of(step) == PART


def numbers(room: Room) -> list[int]:
    return [step_of(step.name) or 0 for step in own_steps(room.folder)]


SAVES = [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("free", "keep", "steps", "export", "lacks", "first"),
    [
        (0.5, 2, SAVES, 0, "each needs", None),
        (1.7, 2, SAVES, 0, "stays until the next one is complete", None),
        (1.7, 2, [10], 0, "", ""),
        (1.7, 0, SAVES, 0, "", "--keep 0 needs room for 4 "),
        (2.7, 2, SAVES, 0, "", "--keep 2 needs room for 3 "),
        (2.7, 2, SAVES[:2], 0, "", ""),
        (2.7, 1, SAVES, 0, "", ""),
        (2.7, 1, SAVES, PART, "", "--keep 1 needs room for 2 "),
        (3.1, 2, SAVES, 0, "", ""),
        (3.1, 2, SAVES, PART // 2, "", "and 32,768 bytes of the export"),
        (1.2, 2, [10], PART, "and the export", None),
        (4.1, 0, SAVES, 0, "", ""),
    ],
)
def test_a_start_on_an_empty_disk(
    disk: Callable[[float], Room],
    free: float,
    keep: int,
    steps: list[int],
    export: int,
    lacks: str,
    first: str | None,
) -> None:
    """Refused is what can never fit; what fits only without older checkpoints is said."""
    room, retention, demand = disk(free), Retention(keep), Demand(steps, export)
    found = lacking(room, retention, demand)
    assert (lacks in found) if lacks else found == ""
    if first is not None:
        said = oldest_first(room, retention, demand)
        assert (first in said) if first else said == ""


def test_a_resume_counts_the_checkpoints_that_are_there(disk: Callable[[float], Room]) -> None:
    room = disk(2.8)
    save(room, 10, 20)
    assert lacking(room, Retention(2), Demand([30])) == "" and "needs room for 3 " in oldest_first(
        room, Retention(2), Demand([30])
    )
    assert "each needs" in lacking(room, Retention(0), Demand([30]))
    assert lacking(room, Retention(2), Demand([])) == ""


def test_steps_that_are_kept_for_ever_need_room_as_well(disk: Callable[[float], Room]) -> None:
    """Keep 1 and every 20th: of steps 10 to 60, three stay beside the newest and the next one."""
    room, demand = disk(4.5), Demand([*SAVES, 50, 60])
    assert (
        oldest_first(room, Retention(1), demand) == oldest_first(room, Retention(3), demand) == ""
    )
    assert "needs room for 5 " in oldest_first(room, Retention(1, every=20), demand)
    assert "needs room for 5 " in oldest_first(room, Retention(3, best=True), demand)


@pytest.mark.parametrize(
    ("retention", "said_first", "one", "left"),
    [
        (Retention(2), False, 1, [20, 30]),  # no more than necessary
        (Retention(2), False, 2, [30]),
        (Retention(3), False, 1, [20, 30]),
        (Retention(4), False, 1, [10, 20, 30]),
        (Retention(4), True, 1, [20, 30]),
        (Retention(4), True, 2, [30]),
        (Retention(4), True, 3, [10, 20, 30]),  # too large even then
        (Retention(1), False, 2, [30]),
        (Retention(0), True, 1, [10, 20, 30]),
        (Retention(1, every=10), True, 1, [10, 20, 30]),
        (Retention(1, every=20), True, 1, [20, 30]),
    ],
    ids=str,
)
def test_the_oldest_goes_first_if_the_room_is_short(
    disk: Callable[[float], Room], retention: Retention, said_first: bool, one: int, left: list[int]
) -> None:
    """The newest one never goes. What --keep asks for goes only if the start has said so."""
    room = disk(3.4)
    save(room, 10, 20, 30)
    room = dataclasses.replace(room, one=one * PART, oldest_first=said_first)
    assert remove_oldest(room, retention) == []
    assert numbers(room) == left


def test_nothing_goes_from_a_disk_with_room(disk: Callable[[float], Room]) -> None:
    room = dataclasses.replace(disk(4.4), oldest_first=True)
    save(room, 10, 20, 30)
    assert remove_oldest(room, Retention(1)) == [] and numbers(room) == [10, 20, 30]
