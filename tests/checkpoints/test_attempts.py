"""Retries after failed saves, and failures that end a run."""

import pytest
from recipekit.checkpoints.attempts import SaveAttempts
from recipekit.spec.errors import START_AGAIN, ConfigError

EVERY = 10


def tries(well: range, last: int = 100, every: int = EVERY) -> tuple[list[int], list[int], int]:
    """Save on a disk that is full except in the steps `well`.

    Return (steps whose save failed, saved steps, the step that ended the run or 0).
    """
    attempts, failed, saved = SaveAttempts(), list[int](), list[int]()
    for step in range(1, last + 1):
        if step % every and not attempts.due(step):
            continue
        attempts.start(step, regular=step % every == 0)
        if step in well:
            attempts.succeed()
            saved.append(step)
            continue
        failed.append(step)
        try:
            attempts.fail(f"checkpoint in runs/x: step {step}: no space")
        except ConfigError as error:
            assert error.exit_code == START_AGAIN == 75
            assert f"the saves of steps {step - every} and {step} have failed" in str(error)
            return failed, saved, step
    return failed, saved, 0


@pytest.mark.parametrize(
    ("well", "failed", "saved", "end"),
    [
        (range(101), [], list(range(10, 101, 10)), 0),
        (range(11, 101), [10], [11, *range(20, 101, 10)], 0),
        (range(14, 101), [10, 11, 13], [17, *range(20, 101, 10)], 0),
        (range(20, 101), [10, 11, 13, 17], list(range(20, 101, 10)), 0),
        (range(21, 101), [10, 11, 13, 17, 20], [], 20),
        (range(31), [40, 41, 43, 47, 50], [10, 20, 30], 50),
    ],
)
def test_a_failed_save_is_tried_again_until_the_next_regular_save_fails(
    well: range, failed: list[int], saved: list[int], end: int
) -> None:
    assert tries(well) == (failed, saved, end)


def test_a_disk_that_is_full_now_and_then_ends_no_run() -> None:
    attempts = SaveAttempts()
    for step in range(10, 100, 10):
        attempts.start(step, regular=True)
        assert "The run continues and tries again" in attempts.fail("full")
        assert attempts.due(step + 1)
        attempts.start(step + 1, regular=False)
        assert attempts.fail("full") == "", "reported once"
        assert not attempts.due(step + 2) and attempts.due(step + 3)
        attempts.start(step + 3, regular=False)
        assert (
            attempts.succeed()
            == f"the checkpoint of step {step + 3} is complete: saving works again"
        )
        assert attempts.saved == step + 3 and not attempts.due(step + 4)


def test_a_save_in_the_background_is_not_begun_twice() -> None:
    """The result of a background save is known only some steps later."""
    attempts = SaveAttempts()
    attempts.start(10, regular=True)
    assert not attempts.due(11)
    attempts.fail("full")
    assert attempts.due(12)
    attempts.start(12, regular=False)
    assert not attempts.due(13) and not attempts.due(19)
    attempts.succeed()
    assert not attempts.due(20)


def test_where_every_step_is_saved_two_failures_end_the_run() -> None:
    assert tries(range(3), every=1) == ([3, 4], [1, 2], 4)
