"""Old checkpoints are removed, other files in their folder stay, and failures never end a run."""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recipekit.checkpoints.retention import Retention, remove_old
from recipekit.checkpoints.save import set_aside_later_steps
from recipekit.storage import manifest


def save(folder: Path, step: int, eval_loss: object = None, name: str = "") -> Path:
    """Write a complete step folder."""
    path = folder / (name or f"step_{step:08d}")
    (path / "hf_files").mkdir(parents=True)
    (path / "hf_files" / "config.json").write_text("{}")
    (path / "state.json").write_text(
        json.dumps({"step": step} | ({} if eval_loss is None else {"eval_loss": eval_loss}))
    )
    manifest.write_manifest(
        path,
        step,
        {name: manifest.file_entry(path / name) for name in ("state.json", "hf_files/config.json")},
        {},
    )
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def numbers(folder: Path) -> list[int]:
    return [int(name.removeprefix("step_")) for name in names(folder)]


@pytest.mark.parametrize(
    ("retention", "left"),
    [
        (Retention(0), [2, 4, 6, 8, 10, 100000000]),
        (Retention(1), [100000000]),  # sorted by number; sorted as text it would come first
        (Retention(2), [10, 100000000]),
        (Retention(9), [2, 4, 6, 8, 10, 100000000]),
    ],
    ids=repr,
)
def test_the_newest_are_kept_by_number(
    tmp_path: Path, retention: Retention, left: list[int]
) -> None:
    for step in (2, 4, 6, 8, 10, 100000000):
        save(tmp_path, step)
    assert remove_old(tmp_path, retention) == []
    assert sorted(numbers(tmp_path)) == left


@pytest.mark.parametrize(
    ("retention", "left"),
    [
        (Retention(1, every=4), [4, 8, 10]),
        (Retention(2, every=8), [8, 9, 10]),
        (Retention(1, every=100), [10]),
        (Retention(1, best=True), [3, 10]),
        (Retention(3, every=4, best=True), [3, 4, 8, 9, 10]),
        (Retention(0, every=4, best=True), [1, 2, 3, 4, 5, 6, 8, 9, 10]),
    ],
    ids=repr,
)
def test_every_kth_and_the_best_are_kept_in_addition(
    tmp_path: Path, retention: Retention, left: list[int]
) -> None:
    """Only a finite eval_loss counts. If several values are equal, the first one is the best."""
    losses = {
        1: 2.5,
        2: "0.1",
        3: 2.25,
        4: None,
        5: math.nan,
        6: -math.inf,
        8: 2.25,
        9: 3,
        10: True,
    }
    for step, loss in losses.items():
        save(tmp_path, step, loss)
    # This folder is not a checkpoint of the run, so another one is the best.
    save(tmp_path, 7, 0.5, name="step_00000007_copy")
    assert remove_old(tmp_path, retention) == []
    shutil.rmtree(tmp_path / "step_00000007_copy")
    assert numbers(tmp_path) == left


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '"eval_loss"'])
def test_a_damaged_state_has_no_loss_and_ends_nothing(tmp_path: Path, text: str) -> None:
    (save(tmp_path, 1, 1.0) / "state.json").write_text(text)
    save(tmp_path, 2, 2.0)
    save(tmp_path, 3, 3.0)
    assert remove_old(tmp_path, Retention(1, best=True)) == []
    assert numbers(tmp_path) == [2, 3]


def linked(folder: Path) -> Path:
    """Move a checkpoint to an archive and create a link in its place."""
    archive = folder.parent / "archive"
    os.rename(save(folder, 1), archive)
    (folder / "step_00000001").symlink_to(archive)
    return folder / "step_00000001"


OWN: dict[str, Callable[[Path], Path]] = {
    "a copy with a word": lambda folder: save(folder, 1, name="step_00000001_best"),
    "a name": lambda folder: save(folder, 1, name="step_before_change"),
    "seven digits": lambda folder: save(folder, 1, name="step_0000001"),
    "a copy under another number": lambda folder: save(folder, 2, name="step_00000001"),
    "another program's": lambda folder: save(folder, 1, name="checkpoint-1"),
    "a link to an archive": linked,
    "no manifest": lambda folder: written(made(folder / "step_00000001") / "mine.txt").parent,
    "a file": lambda folder: written(folder / "step_00000001"),
    "an archive file": lambda folder: written(folder / "step_00000001.tar"),
    "a link to nothing": lambda folder: dangling(folder / "step_00000001"),
    "a link with the name of what is being removed": lambda folder: dangling(
        folder / ".removed_step_00000001", save(folder.parent / "else", 1)
    ),
}


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def written(path: Path) -> Path:
    path.write_text("mine")
    return path


def dangling(path: Path, target: Path = Path("away")) -> Path:
    path.symlink_to(target)
    return path


@pytest.mark.parametrize("kind", OWN)
def test_what_is_not_a_checkpoint_of_the_run_is_neither_counted_nor_removed(
    tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    own = OWN[kind](folder)
    before, archive = contents(tmp_path), os.readlink(own) if own.is_symlink() else ""
    for step in (3, 4, 5):
        save(folder, step)
    assert remove_old(folder, Retention(2)) == []
    assert names(folder) == sorted([own.name, "step_00000004", "step_00000005"])
    assert contents(tmp_path).items() >= before.items()
    assert (os.readlink(own) if own.is_symlink() else "") == archive


STRAYS = [".nfs00000001", ".state.json.AbCdEf", "hf_files/.DS_Store", "notes/results.txt"]


@pytest.mark.parametrize("stray", STRAYS)
def test_a_stray_file_outlives_its_checkpoint(tmp_path: Path, stray: str) -> None:
    old = save(tmp_path, 1)
    save(tmp_path, 2)
    (old / stray).parent.mkdir(exist_ok=True)
    written(old / stray)
    (line,) = remove_old(tmp_path, Retention(1))
    assert (
        line == f"{old} is removed. {stray}, not part of the checkpoint, is kept in"
        f" {tmp_path}/aside_step_00000001.1"
    )
    assert contents(tmp_path / "aside_step_00000001.1") == {stray: b"mine"}
    assert names(tmp_path) == ["aside_step_00000001.1", "step_00000002"]
    assert remove_old(tmp_path, Retention(1)) == []


def test_a_link_in_a_step_folder_is_kept_and_not_followed(tmp_path: Path) -> None:
    """One link is a stray link to a folder; the other is a listed file that was moved to a
    different disk.
    """
    (tmp_path / "away").mkdir()
    written(tmp_path / "away" / "thing")
    folder = tmp_path / "checkpoints"
    old = save(folder, 1)
    (old / "more").symlink_to(tmp_path / "away")
    shutil.move(old / "state.json", tmp_path / "away" / "state.json")
    (old / "state.json").symlink_to(tmp_path / "away" / "state.json")
    save(folder, 2)
    assert manifest.find_faults(old) == []
    (line,) = remove_old(folder, Retention(1))
    assert f". more, not part of the checkpoint, is kept in {folder}/aside_step_00000001.1" in line
    assert names(tmp_path / "away") == ["state.json", "thing"]
    assert names(folder / "aside_step_00000001.1") == ["more"]


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("call", ["rename", "rmtree"])
@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO, errno.EBUSY, errno.ENOTEMPTY])
def test_a_checkpoint_that_cannot_be_removed_is_only_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """This occurs under `chattr +i`, which tmpfs lacks, and with a file in use on NFS."""
    old, kept = save(tmp_path, 1), save(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os if call == "rename" else shutil, call, failing(number))
        (line,) = remove_old(tmp_path, Retention(1))
    assert line.endswith(
        f" cannot be removed: {os.strerror(number)}. The run continues, remove it by hand"
    )
    assert manifest.find_faults(kept) == [] and (
        call == "rmtree" or manifest.find_faults(old) == []
    )
    assert remove_old(tmp_path, Retention(1)) == []
    assert names(tmp_path) == ["step_00000002"]


def test_what_a_killed_removal_has_left_goes_at_the_next(tmp_path: Path) -> None:
    os.rename(save(tmp_path, 1), tmp_path / ".removed_step_00000001")
    (tmp_path / ".removed_step_00000001" / "manifest.json").unlink()
    (tmp_path / ".removed_things").mkdir()
    save(tmp_path, 2)
    assert remove_old(tmp_path, Retention(1)) == []
    assert names(tmp_path) == [".removed_things", "step_00000002"]


def test_only_later_checkpoints_are_put_aside(tmp_path: Path) -> None:
    """Steps are compared as numbers. Other names stay, and a link itself is renamed."""
    for step in (2, 4, 100000000):
        save(tmp_path, step)
    (tmp_path / "step_00000005").symlink_to(tmp_path / "step_00000004")
    own = [
        save(tmp_path, 4, name=name).name
        for name in ("step_00000004_best", "step_before_change", "step_9")
    ]
    said: list[str] = []
    set_aside_later_steps(tmp_path, 2, said.append)
    aside = [f"aside_step_{number}.1" for number in ("00000004", "00000005", "100000000")]
    assert names(tmp_path) == sorted([*own, *aside, "latest", "step_00000002"])
    assert [
        line.partition(" is after step 2: it is now ")[2].partition(",")[0] for line in said
    ] == aside
    assert os.readlink(tmp_path / "aside_step_00000005.1").endswith("step_00000004")
