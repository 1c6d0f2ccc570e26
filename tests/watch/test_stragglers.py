"""Slow ranks are named by their own time, and clean steps name nobody."""

import random

import pytest
from recipekit.watch.stragglers import RankTimes, Stragglers, median_without

STAGES = {"dp2": [[0, 1]], "pp2": [[0], [1]], "dp4": [[0, 1, 2, 3]]}


def named(
    layout: str,
    steps: int,
    late: tuple[int, int, float] = (0, 10**9, 1.0),
    noise: float = 0.1,
    data_wait: float = 0.0,
) -> list[tuple[int, int, str]]:
    """Return (step, rank, kind) of all findings.

    `late` is (rank, first step, factor). The ranks of a pipeline need different times.
    """
    source, finder = random.Random(0), Stragglers(STAGES[layout])
    found = []
    for step in range(1, steps + 1):
        busy = source.lognormvariate(0, noise)  # of the machine
        own = [
            (1 + 0.3 * rank) * 0.1 * busy * source.lognormvariate(0, noise)
            if layout == "pp2"
            else 0.1 * busy * source.lognormvariate(0, noise)
            for rank in range(sum(map(len, STAGES[layout])))
        ]
        if step >= late[1]:
            own[late[0]] *= late[2]
        waits = [0.001] * (len(own) - 1) + [data_wait if step >= 100 else 0.001]
        times = RankTimes(max(own) + 0.02, own, waits)
        found += [(step, finding.rank, finding.kind) for finding in finder.look(times)]
    return found


@pytest.mark.parametrize("layout", STAGES)
def test_clean_steps_name_nobody(layout: str) -> None:
    assert named(layout, 10_000) == []


@pytest.mark.parametrize("layout", STAGES)
def test_a_slow_rank_is_named_once_within_twenty_steps(layout: str) -> None:
    ((step, rank, kind),) = named(layout, 200, late=(1, 101, 2.5))
    assert (rank, kind) == (1, "straggler") and 101 + 9 <= step <= 101 + 20


def test_the_median_of_the_other_ranks():
    assert [median_without([1, 2, 5, 9], value) for value in (1, 2, 5, 9)] == [5, 5, 2, 2]
    assert [median_without([1, 2], value) for value in (1, 2)] == [2, 1]
    assert median_without([3, 3, 3], 3) == 3


def test_ranks_that_become_slow_together_are_not_named():
    finder = Stragglers(STAGES["pp2"])
    for step in range(200):
        factor = 3 if step > 100 else 1
        assert not finder.look(RankTimes(1, [0.1 * factor, 0.2 * factor], [0, 0]))


def test_a_rank_that_waits_for_data_is_named():
    ((step, rank, kind),) = named("dp2", 200, data_wait=0.03)
    assert (rank, kind) == (1, "data_wait") and step == 100 + 9


def test_a_single_rank_has_nobody_to_be_compared_with():
    finder = Stragglers([[0]])
    assert not any(finder.look(RankTimes(1, [0.1 + step], [0])) for step in range(100))
