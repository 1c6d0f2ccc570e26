"""Goodput, and the finder of lasting drops in throughput."""

import random

import pytest
from recipekit.watch.throughput import Goodput, Throughput, goodput_so_far


def found(rates: list[float]) -> list[int]:
    finder = Throughput()
    return [step for step, rate in enumerate(rates) if finder.look(rate)]


def steady(steps: int, spread: float = 0.02) -> list[float]:
    source = random.Random(0)
    return [1000 * (1 + source.gauss(0, spread)) for _ in range(steps)]


def test_a_steady_run_has_no_alarm():
    assert found(steady(5_000)) == []


def test_a_run_on_a_busy_machine_has_no_alarm():
    assert found(steady(5_000, spread=0.2)) == []


def test_a_lasting_drop_is_found_once_within_its_window():
    rates = steady(200)
    slow = rates[:100] + [0.85 * rate for rate in rates[100:]]
    (step,) = found(slow)
    assert 100 < step < 100 + Throughput.WINDOW


def test_a_drop_that_recovers_is_found_again():
    rates = steady(400)
    slow = [0.8 * rate if step // 100 in (1, 3) else rate for step, rate in enumerate(rates)]
    assert len(found(slow)) == 2


def test_one_slow_step_is_no_alarm():
    rates = steady(100)
    rates[50] = 10.0
    assert found(rates) == []


def test_goodput_continues_over_starts():
    lines = [{"time": 110.0, "step_s": 10.0}, {"time": 130.0, "step_s": 10.0}]
    assert goodput_so_far(lines, now=200.0) == Goodput(begun=100.0, useful=20.0)


@pytest.mark.parametrize("lines", [[], [{"step_s": 10.0}]])
def test_goodput_begins_now_without_times(lines):
    assert goodput_so_far(lines, now=200.0) == Goodput(begun=200.0, useful=0.0)


def test_goodput_is_the_share_of_kept_steps(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 140.0)
    assert Goodput(begun=100.0, useful=20.0).add(10.0) == 0.75
