"""The finders of a disk that will be full and of saves that do not succeed."""

import errno
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipekit.spec.recipe import Recipe
from recipekit.watch.machine import DiskReading, DiskTrend, DiskWatch, StaleCheckpoint
from short_runs import BASE, train

GIB = 2**30


def test_a_checkpoint_is_stale_once_two_intervals_have_passed():
    finder = StaleCheckpoint(10)
    saved = {step: 10 if step < 55 else 55 for step in range(1, 100)}
    assert [step for step in saved if finder.look(step, saved[step])] == [31, 76]


def test_a_run_without_regular_saves_has_no_stale_checkpoint():
    assert not any(StaleCheckpoint(0).look(step, 0) for step in range(1000))


def test_the_time_until_the_disk_is_full_follows_from_what_others_write():
    trend = DiskTrend()
    assert trend.seconds_until_full(0, 100 * GIB, 20 * GIB) is None
    assert trend.seconds_until_full(300, 99 * GIB, 20 * GIB) is None  # too early to know
    # Others have written 2 GiB in 600 s.
    assert trend.seconds_until_full(600, 98 * GIB, 20 * GIB) == 98 * 300
    # The last hour counts, in which others have written nothing.
    assert trend.seconds_until_full(4000, 98 * GIB, 20 * GIB) is None


def test_a_checkpoint_of_the_run_itself_is_not_taken_for_a_rate():
    trend = DiskTrend()
    for minute in range(0, 60, 5):
        own = 20 + minute
        assert trend.seconds_until_full(60 * minute, (100 - own) * GIB, own * GIB) is None


def problem_of(readings: list[DiskReading | OSError]) -> str:
    """Return the first problem that a watch reports in 100 of 1,000 steps of 100 s each."""
    now, last = [0.0], readings[-1]

    def read(step: int) -> DiskReading | None:
        reading = readings.pop(0) if readings else last
        if isinstance(reading, OSError):
            raise reading
        return reading

    watch = DiskWatch(read, last_step=1000, clock=lambda: now[0])
    try:
        for step in range(100):
            now[0] = 100.0 * step
            if problem := watch.look(step, saved=step):
                return problem
            time.sleep(0.002)
    finally:
        watch.close()
    return ""


def test_a_disk_that_others_fill_before_the_end_is_reported():
    filling = [DiskReading((50 - i) * GIB, GIB, "") for i in range(50)]
    problem = problem_of(filling)
    assert problem.startswith("other files fill the disk of the checkpoints: its ")
    assert "h at the present rate, and the run needs" in problem


def test_a_disk_that_lasts_until_the_end_is_not_reported():
    assert problem_of([DiskReading(10_000 * GIB - i, GIB, "") for i in range(50)]) == ""


def test_a_disk_that_cannot_be_read_is_reported_and_a_renamed_folder_is_not():
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    assert problem_of([gone, DiskReading(GIB, 0, "")]) == ""
    stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    assert "cannot be read (Stale file handle)" in problem_of([stale])


def train_on_a_full_disk(recipe: Recipe) -> tuple[Any, str]:
    """Train on a rank of a pool. After the first checkpoint the disk has 1 MB left.

    Saves cannot succeed then, and each step takes 0.1 s at least.
    """
    from recipekit import train as loop
    from recipekit.tasks.find import load_task

    usage, first = shutil.disk_usage, Path(recipe.out) / "checkpoints" / "step_00000002"
    shutil.disk_usage = lambda path: (
        usage(path)._replace(free=2**20) if first.exists() else usage(path)
    )

    def load(name: str) -> Any:
        return replace(load_task(name), before_step=lambda engine, batches: time.sleep(0.1))

    loop.load_task = load  # type: ignore[assignment]
    try:
        return train(recipe, [])
    finally:
        shutil.disk_usage, loop.load_task = usage, load_task  # type: ignore[assignment]


def test_a_run_reports_a_disk_without_room_before_its_next_save(pools: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    recipe = replace(BASE, eval_every=0, steps=10, save_every=2, out=str(out))
    ((ended, printed),) = pools.run(1, train_on_a_full_disk, recipe=recipe)
    assert "the saves of steps 4 and 6 have failed" in ended
    (alert,) = [json.loads(line) for line in (out / "alerts.jsonl").read_text().splitlines()]
    assert (alert["kind"], alert["level"], alert["step"]) == ("disk", "warning", 3)
    assert "the disk has no room for the next checkpoints: each needs" in printed
