"""A machine crash must not leave a partly written file under its final name.

All data must be on the disk before the rename. The calls are real, and each call is recorded.
"""

import contextlib
import dataclasses
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from recipekit.checkpoints import step_folder
from recipekit.checkpoints.reshape import reshape
from recipekit.checkpoints.save import point_latest, set_aside_later_steps
from recipekit.convert.hugging_face import to_hf
from recipekit.spec.atomic_write import atomic_path, write_atomic
from recipekit.spec.mesh import Mesh
from recipekit.spec.run_folder import DATA_FILES, RUN_JSON, STRATEGY
from recipekit.storage import manifest
from recipekit.storage.journal import Journal
from recipekit.track.metrics_file import truncate_metrics
from short_runs import BASE, train


class Call(NamedTuple):
    """A call of fsync on `path`, or a rename of `path` to `target`."""

    begun: int  # ns since the epoch, like file times
    ended: int
    name: str
    path: str
    target: str = ""


@contextlib.contextmanager
def noted() -> Iterator[list[Call]]:
    """Record each fsync and each rename in this process."""
    calls: list[Call] = []
    fsync, renames = os.fsync, {"rename": os.rename, "replace": os.replace}

    def noting_fsync(file: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")
        begun = time.time_ns()
        fsync(file)
        calls.append(Call(begun, time.time_ns(), "fsync", path))

    def noting_rename(name: str) -> Any:
        def rename(source: Any, target: Any, **rest: Any) -> None:
            begun = time.time_ns()
            renames[name](source, target, **rest)
            calls.append(
                Call(
                    begun,
                    time.time_ns(),
                    "rename",
                    os.path.abspath(source),
                    os.path.abspath(target),
                )
            )

        return rename

    os.fsync, os.rename, os.replace = (
        noting_fsync,
        noting_rename("rename"),
        noting_rename("replace"),
    )
    try:
        yield calls
    finally:
        os.fsync, os.rename, os.replace = fsync, renames["rename"], renames["replace"]


def train_noted(recipe: Any, argv: list[str]) -> tuple[Any, list[tuple[Any, ...]]]:
    """Run `train` on a rank of a pool; return its result and this rank's calls."""
    with noted() as calls:
        result, _ = train(recipe, argv)
    return result, [tuple(call) for call in calls]


def check(calls: list[Call], final: Path) -> Call:
    """Check that a file or folder was on the disk before it received its final name.

    `final` may be a folder with files below it. Return the rename call.
    """
    named = next(
        call for call in reversed(calls) if call.name == "rename" and call.target == str(final)
    )
    for path in [final, *final.rglob("*")]:
        staged = os.path.normpath(Path(named.path, path.relative_to(final)))
        changed = path.stat().st_mtime_ns
        flushed = [
            call
            for call in calls
            if call.name == "fsync"
            and call.path == staged
            and call.begun >= changed
            and call.ended <= named.begun
        ]
        assert flushed, f"{path.relative_to(final.parent)} was named before it was flushed"
    return named


def check_flushed_between(
    calls: list[Call], folder: Path, after: Call, before: Call | None = None
) -> None:
    """Check that a folder was flushed after one rename and before another.

    The flush makes the first rename durable.
    """
    flushed = [
        call
        for call in calls
        if call.name == "fsync" and call.path == str(folder) and call.begun >= after.ended
    ]
    assert any(before is None or call.ended <= before.begun for call in flushed), (
        f"{folder.name} was not flushed after {Path(after.target).name} was named in it"
    )


@pytest.fixture(scope="module")
def saved(
    pools: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[Call]]]:
    """Return, for each flag, a run of two ranks with checkpoints of steps 1 and 2.

    The calls of both ranks are returned in order.
    """
    made = {}
    for flag in ("--no-save_in_background", "--save_in_background"):
        out = tmp_path_factory.mktemp("flushed") / "run"
        recipe = dataclasses.replace(BASE, eval_every=0)
        results = pools.run(
            2,
            train_noted,
            recipe=recipe,
            argv=["--out", str(out), "--stop_at", "2", "--save_every", "1", flag],
        )
        assert [result for result, _ in results] == [0, 0], results
        made[flag] = out, sorted(Call(*call) for _, calls in results for call in calls)
    return made


def check_named_by_latest(calls: list[Call], folder: Path, step: str) -> None:
    """Check that `latest` is durable, and that its step folder was durable first."""
    named = check(calls, folder / step)
    pointed = next(
        call for call in calls if call.target == str(folder / "latest") and call.begun > named.begun
    )
    assert any(
        call.name == "fsync"
        and call.path == pointed.path
        and call.begun > named.ended
        and call.ended <= pointed.begun
        for call in calls
    )
    check_flushed_between(calls, folder, named, pointed)
    check_flushed_between(calls, folder, pointed)


@pytest.mark.parametrize("name", [RUN_JSON, STRATEGY, DATA_FILES])
def test_a_file_of_the_run_is_on_the_disk_before_it_is_named(
    saved: dict[str, Any], name: str
) -> None:
    """If a power loss left an empty run.json, every checkpoint would be unusable."""
    out, calls = saved["--no-save_in_background"]
    check_flushed_between(calls, out, check(calls, out / name))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    for content in ("first", "second"):
        with noted() as calls:
            write_atomic(file, content)
        check_flushed_between(calls, tmp_path, check(calls, file))
        assert file.read_text() == content
    with pytest.raises(OSError, match="No space left"), atomic_path(file) as made:
        made.write_text("a part of the thi")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(FileNotFoundError), atomic_path(file):
        pass
    assert file.read_text() == "second" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("flag", ["--no-save_in_background", "--save_in_background"])
def test_a_checkpoint_is_on_the_disk_before_it_is_named_and_named_before_latest_names_it(
    saved: dict[str, Any], flag: str
) -> None:
    out, calls = saved[flag]
    check_named_by_latest(calls, out / "checkpoints", "step_00000002")


def test_what_a_save_is_made_of_flushes_files_folders_and_names(tmp_path: Path) -> None:
    """Without ranks, the same calls are made as in a save."""
    step = tmp_path / ".staging" / "step_00000001"
    (step / "hf_files").mkdir(parents=True)
    (step / "one.pt").write_bytes(b"one")
    (step / "hf_files" / "config.json").write_text("{}")
    with noted() as calls:
        files = {
            str(path.relative_to(step)): manifest.file_entry(path)
            for path in step.rglob("*")
            if path.is_file()
        }
        manifest.write_manifest(step, 1, files, {})
        os.rename(step, tmp_path / step.name)
        point_latest(tmp_path, step.name, print)
    check_named_by_latest(calls, tmp_path, step.name)
    assert (tmp_path / "latest").read_text() == step.name and manifest.find_faults(
        tmp_path / step.name
    ) == []


def test_a_converted_checkpoint_is_on_the_disk_before_it_is_named(
    saved: dict[str, Any], tmp_path: Path
) -> None:
    step = saved["--no-save_in_background"][0] / "checkpoints" / "step_00000002"
    layout = dataclasses.replace(step_folder.open_step(step).layout, mesh=Mesh(dp=1))
    with noted() as calls:
        reshape(step, tmp_path / "reshaped", layout)
    check_flushed_between(calls, tmp_path, check(calls, tmp_path / "reshaped"))
    with noted() as calls:
        to_hf(step, tmp_path / "hf")
    check_flushed_between(calls, tmp_path, check(calls, tmp_path / "hf"))


def test_the_metrics_that_stay_are_on_the_disk_before_they_take_the_place_of_all(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}}}\n' for step in range(1, 6))
    )
    with noted() as calls:
        truncate_metrics(tmp_path / "metrics.jsonl", 3)
    check(calls, tmp_path / "metrics.jsonl")
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


def test_the_notes_of_another_conversion_are_not_gone_on_with(tmp_path: Path) -> None:
    for plan, resumed, done in (
        ({"to": 1}, False, {}),
        ({"to": 1}, True, {"weight": 5}),
        ({"to": 2}, False, {}),
    ):
        journal = Journal(tmp_path / "out", plan)
        assert (journal.resumed, journal.done) == (resumed, done)
        journal.note("weight", 5)


def test_the_step_gone_back_to_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        (tmp_path / f"step_{step:08d}").mkdir()
    set_aside_later_steps(tmp_path, 2, lambda _: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "aside_step_00000003.1",
        "aside_step_00000004.1",
        "latest",
        "step_00000001",
        "step_00000002",
    ]
    assert (tmp_path / "latest").read_text() == "step_00000002"
