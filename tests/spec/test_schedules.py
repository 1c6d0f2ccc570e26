"""The rows of each step and the learning-rate phases, tested at the steps where they change."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from recipekit.spec import schedules
from recipekit.spec.schedules import Ramp, lr_at, ramp_of

RAMP = ramp_of(8, " 11:16 ,31 : 40")


def test_rows_change_with_the_step_that_is_named() -> None:
    assert (
        Ramp(((1, 8), (11, 16), (31, 40))) == RAMP
        and RAMP.max_rows == 40
        and ramp_of(50, "11:16").max_rows == 50
    )
    assert [RAMP.rows(step) for step in (1, 10, 11, 30, 31, 1000)] == [8, 8, 16, 16, 40, 40]
    for steps in (1, 10, 11, 12, 30, 31, 35):
        assert RAMP.total(steps) == sum(RAMP.rows(step) for step in range(1, steps + 1))
    assert [RAMP.changes(step) for step in (10, 11, 30, 31)] == [
        [],
        [[11, 16]],
        [[11, 16]],
        [[11, 16], [31, 40]],
    ]


def test_a_ramp_is_cut_and_scaled() -> None:
    assert [schedules.truncate_ramp("11:16, 31:40", steps) for steps in (10, 11, 30, 31)] == [
        "",
        "11:16",
        "11:16",
        "11:16, 31:40",
    ]
    assert schedules.truncate_ramp("11:16,31:40", 31) == "11:16,31:40", (
        "as it is written, where nothing is cut"
    )
    assert (
        schedules.scale_ramp("11:16, 31:20", 8, 3) == "11:6, 31:9"
        and schedules.scale_ramp("11:16", 0, 3) == "11:48"
    )
    assert (
        schedules.parse_ramp("11:16,") is None
        and schedules.parse_ramp("") == ()
        and schedules.parse_ramp("a:3") is None
    )


@pytest.mark.parametrize(
    ("ramp", "steps", "says"),
    [
        ("2:16", 2, ""),
        ("2:16", 0, ""),
        ("1:16", 0, "step 1 starts the run"),
        ("5:16, 5:20", 0, "it has 5 after 5"),
        ("5:16, 4:20", 0, "it has 4 after 5"),
        ("5:0", 0, "from step 5 on"),
        ("5:1", 0, ""),
        ("5:16, 9:20", 8, "step 9 is after the last step, 8"),
        ("5:16, 8:20", 8, ""),
        ("5;16", 0, "is not a valid table"),
    ],
)
def test_a_ramp_is_refused_from_its_first_wrong_step_on(ramp: str, steps: int, says: str) -> None:
    found = schedules.check_ramp(ramp, steps)
    assert len(found) == bool(says) and all(says in str(problem) for problem in found)


def numbers(**changes: Any) -> Any:
    return SimpleNamespace(
        **{
            "steps": 20,
            "lr": 0.8,
            "min_lr": 0.2,
            "warmup_steps": 4,
            "decay_steps": 5,
            "schedule": "cosine",
        }
        | changes
    )


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            "cosine",
            {
                1: 0.2,
                3: 0.6,
                4: 0.8,
                5: 0.2 + 0.3 * (1 + math.cos(math.pi / 16)),
                12: 0.5,
                16: 0.2 + 0.3 * (1 + math.cos(0.75 * math.pi)),
                20: 0.2,
            },
        ),
        ("linear", {1: 0.2, 4: 0.8, 5: 0.8 - 0.6 / 16, 8: 0.65, 12: 0.5, 20: 0.2}),
        ("constant", {1: 0.2, 4: 0.8, 5: 0.8, 20: 0.8}),
        (
            "wsd",
            {
                1: 0.2,
                4: 0.8,
                15: 0.8,
                16: 0.2 + 0.6 * (1 - math.sqrt(0.2)),
                19: 0.2 + 0.6 * (1 - math.sqrt(0.8)),
                20: 0.2,
            },
        ),
    ],
)
def test_a_rate_has_its_values_at_the_ends_of_each_phase(
    schedule: str, expected: dict[int, float]
) -> None:
    assert {step: lr_at(numbers(schedule=schedule), step) for step in expected} == pytest.approx(
        expected, rel=1e-12
    )
    flat = numbers(schedule=schedule, warmup_steps=0)
    assert lr_at(flat, 1) == pytest.approx(
        {"cosine": 0.2 + 0.3 * (1 + math.cos(math.pi / 20)), "linear": 0.77}.get(schedule, 0.8)
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("cosine", 10, 9, 0, 1.0, 0.0), []),
        (("cosine", 10, 10, 0, 1.0, 0.0), ["warmup_steps = 10"]),
        (("cosine", 10, 0, 0, 1.0, 1.0), []),
        (("cosine", 10, 0, 0, 1.0, 1.1), ["min_lr = 1.1"]),
        (("constant", 10, 0, 0, 1.0, 0.1), ["min_lr = 0.1"]),
        (("constant", 10, 0, 0, 1.0, 0.0), []),
        (("linear", 10, 0, 1, 1.0, 0.0), ["decay_steps = 1"]),
        (("wsd", 10, 0, 0, 1.0, 0.0), ["decay_steps = 0"]),
        (("wsd", 10, 4, 6, 1.0, 0.1), []),
        (("wsd", 10, 4, 7, 1.0, 0.1), ["decay_steps = 7"]),
        (("wsd", 10, 10, 7, 1.0, 0.1), ["warmup_steps = 10"]),
    ],
)
def test_phases_that_do_not_fit_are_refused(given: tuple[Any, ...], says: list[str]) -> None:
    assert [problem.where for problem in schedules.check_rates(*given)] == says


def test_a_shorter_run_has_shorter_phases_unless_they_are_typed() -> None:
    none = frozenset[str]()
    assert (
        schedules.fit_warmup_and_decay("cosine", 10, 10, 0, none) == {"warmup_steps": 1}
        and schedules.fit_warmup_and_decay("cosine", 10, 9, 0, none) == {}
    )
    assert schedules.fit_warmup_and_decay(
        "wsd", 20, 4, 16, none
    ) == {} and schedules.fit_warmup_and_decay("wsd", 20, 4, 17, none) == {"decay_steps": 2}
    assert schedules.fit_warmup_and_decay("wsd", 20, 30, 17, none) == {"warmup_steps": 2}
    assert schedules.fit_warmup_and_decay("wsd", 20, 30, 30, none) == {
        "warmup_steps": 2,
        "decay_steps": 2,
    }
    assert (
        schedules.fit_warmup_and_decay("wsd", 20, 4, 17, frozenset({"decay_steps"}))
        == {}
        == schedules.fit_warmup_and_decay("cosine", 10, 10, 0, frozenset({"warmup_steps"}))
    )
