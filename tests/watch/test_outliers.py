"""The finders of spikes and divergence: their detections and their false alarms."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from curves import recorded_curves
from recipekit.watch.outliers import Divergence, Outliers

STEPS = 20_000


@dataclass(frozen=True)
class Noise:
    """A kind of noise of the loss, with the number of alarms that it may cause in STEPS steps."""

    name: str
    values: Callable[[random.Random], Iterator[float]]  # without end, around 0


def normal(sigma: float) -> Callable[[random.Random], Iterator[float]]:
    def values(source: random.Random) -> Iterator[float]:
        while True:
            yield source.gauss(0, sigma)

    return values


def heavy_tailed(source: random.Random) -> Iterator[float]:
    """Student's t with 3 degrees of freedom."""
    while True:
        chi_square = sum(source.gauss(0, 1) ** 2 for _ in range(3))
        yield 0.05 * source.gauss(0, 1) / math.sqrt(chi_square / 3)


def skewed(source: random.Random) -> Iterator[float]:
    """Logarithmically normal: some batches are much harder than most."""
    while True:
        yield 0.05 * (source.lognormvariate(0, 1) - math.exp(0.5))


def correlated(source: random.Random) -> Iterator[float]:
    value = 0.0
    while True:
        value = 0.9 * value + source.gauss(0, 0.03)
        yield value


def three_corpora(source: random.Random) -> Iterator[float]:
    """Yield the mean of 8 rows, each of one of three corpora."""
    while True:
        yield sum(source.choice((-0.4, 0.0, 0.4)) for _ in range(8)) / 8 + source.gauss(0, 0.03)


def hard_batches(source: random.Random) -> Iterator[float]:
    """One batch in a hundred is harder."""
    while True:
        yield source.gauss(0, 0.03) + (0.5 if source.random() < 0.01 else 0.0)


NOISES = (
    Noise("normal 0.005", normal(0.005)),
    Noise("normal 0.15", normal(0.15)),
    Noise("heavy tails", heavy_tailed),
    Noise("skewed", skewed),
    Noise("correlated", correlated),
    Noise("three corpora", three_corpora),
    Noise("hard batches", hard_batches),
)
by_name = pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)


def decaying_losses(noise: Noise, steps: int, seed: int = 0) -> list[float]:
    """Return the losses of a run that learns: from 7.5 down to 3.0, with noise."""
    values = noise.values(random.Random(seed))
    return [3.0 + 4.5 * (1 + step / 30) ** -0.5 + next(values) for step in range(steps)]


def alarms(losses: list[float]) -> int:
    spikes, divergence = Outliers(), Divergence()
    return sum(spikes.look(loss).alarm + divergence.look(loss)[0] for loss in losses)


def five_mad(losses: list[float]) -> int:
    """Count the alarms of a common rule: two losses in a row above the median plus 5 MAD."""
    recent: list[float] = []
    found = in_a_row = 0
    for loss in losses:
        if len(recent) >= 32:
            middle = sorted(recent)[len(recent) // 2]
            mad = sorted(abs(value - middle) for value in recent)[len(recent) // 2]
            in_a_row = in_a_row + 1 if loss > middle + 5 * 1.4826 * mad else 0
            found += in_a_row == 2
        recent = [*recent, loss][-128:]
    return found


@by_name
def test_clean_steps_raise_at_most_one_alarm_in_10_000(noise):
    assert alarms(decaying_losses(noise, STEPS)) <= STEPS // 10_000


def test_recorded_runs_raise_at_most_one_alarm_in_10_000_steps():
    curves = recorded_curves()
    steps = sum(map(len, curves.values()))
    assert steps > 400
    assert sum(map(alarms, curves.values())) <= max(1, steps // 10_000)


def test_a_common_rule_fails_the_same_test():
    """The clean curves are not harmless: the rule of 5 MAD raises many more alarms on them."""
    found = sum(five_mad(decaying_losses(noise, STEPS)) for noise in NOISES)
    assert found > len(NOISES) * STEPS // 10_000


@by_name
@pytest.mark.parametrize("seed", range(3))
def test_ten_times_the_loss_is_found_in_its_second_step(noise, seed):
    losses = decaying_losses(noise, 800, seed)
    finder = Outliers()
    found = [
        step
        for step, loss in enumerate(losses)
        if finder.look(10 * loss if 600 <= step < 603 else loss).alarm
    ]
    assert found == [601]


@by_name
def test_a_lasting_rise_of_15_percent_is_found_within_100_steps(noise):
    losses = decaying_losses(noise, 1_400)
    spikes, divergence = Outliers(), Divergence()
    found = []
    for step, loss in enumerate(losses):
        loss *= 1.15 if step >= 1_200 else 1.0
        if spikes.look(loss).alarm | divergence.look(loss)[0]:
            found.append(step)
    assert found and 1_200 <= found[0] < 1_300


def test_a_norm_that_doubles_is_no_outlier_and_one_of_ten_times_is():
    source = random.Random(1)
    norms = [math.exp(source.gauss(0, 0.01)) for _ in range(200)]
    finder = Outliers(logarithm=True, margin=0.7)
    assert not any(finder.look(norm).alarm for norm in norms)
    assert not any(finder.look(1.9).alarm for _ in range(2))
    assert [finder.look(10.0).alarm for _ in range(3)] == [False, True, False]


def test_a_new_level_becomes_the_window():
    finder = Outliers()
    for _ in range(40):
        finder.look(1.0)
    found = [finder.look(5.0).alarm for _ in range(100)]
    assert found.count(True) == 1
    assert finder.look(5.0).score == 0


@pytest.mark.parametrize("finder", [Outliers(), Outliers(logarithm=True, margin=0.7)])
def test_the_limit_is_known_before_the_value(finder):
    source = random.Random(2)
    for _ in range(Outliers.LEAST):
        assert finder.limit() == math.inf
        finder.look(3.0 + 0.1 * source.random())
    limit = finder.limit()
    assert limit == finder.look(1.001 * limit).limit == finder.limit()
    assert len(finder.outliers) == 1
    finder.look(0.999 * limit)
    assert finder.outliers == []


def test_values_that_are_not_finite_are_not_remembered():
    finder, divergence = Outliers(), Divergence()
    for value in (math.nan, math.inf):
        assert not finder.look(value).alarm and not divergence.look(value)[0]
    assert finder.recent == [] and divergence.recent == []


def test_a_restored_finder_judges_like_the_one_that_went_on():
    losses = decaying_losses(NOISES[2], 300)
    whole, first = (Outliers(), Divergence()), (Outliers(), Divergence())
    for loss in losses[:150]:
        for finder in (*whole, *first):
            finder.look(loss)
    second = (Outliers(), Divergence())
    for old, new in zip(first, second, strict=True):
        new.restore(old.to_state())
    rest = [10 * loss if step == 20 else loss for step, loss in enumerate(losses[150:])]
    for finder, other in zip(whole, second, strict=True):
        assert [finder.look(loss) for loss in rest[:30]] == [other.look(loss) for loss in rest[:30]]
