import pytest
from recipekit.watch.pace import ANNOUNCED, Pace


def test_the_limit_follows_the_steps_without_the_first_and_without_one_in_twenty():
    pace = Pace()
    assert pace.limit() == 10
    pace.add(100.0)
    assert pace.limit() == 310  # no other step is known
    for _ in range(19):
        pace.add(1.0)
    assert pace.limit() == 13
    pace.add(50.0)
    assert pace.limit() == 13
    pace.add(50.0)
    assert pace.limit() == 160


def test_announced_work_is_not_late():
    pace = Pace()
    pace.start(7)
    assert pace.last_step == 7 and pace.late() == pytest.approx(-ANNOUNCED, abs=1)
    pace.boundary()
    assert 0 <= pace.late() < 1
    pace.boundary(60.0)
    assert -60 <= pace.late() < -59


def test_an_excuse_is_limited():
    pace = Pace()
    pace.boundary(-2000.0)
    assert pace.excuse() and pace.late() < 1
    pace.expected -= 2000.0
    assert not pace.excuse() and pace.late() > 1999
    pace.boundary(-2000.0)
    assert pace.excuse()
