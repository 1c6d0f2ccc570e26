"""Finders of loss spikes and of divergence, which compare a run with its own recent past.

The finders see the same numbers on every rank, so all ranks come to the same result without a
collective. Their windows are part of a checkpoint, so a resumed run comes to the same result too.

The limits were chosen on the losses and gradient norms of real runs (334,317 values) and on 1.1
million synthetic ones: tests/watch/test_outliers.py has both kinds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAD_TO_SIGMA = 1.4826  # for normally distributed values: standard deviation / MAD
Q95_TO_SIGMA = 1 / 1.645  # for normally distributed values: standard deviation / (q95 - median)


def median_of_sorted(values: list[float]) -> float:
    """Return the median of a sorted list that is not empty."""
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


@dataclass(frozen=True)
class OutlierScore:
    """A value's distance from the recent median, in units of the recent spread.

    `alarm` is True if the value completes an alarm. `limit` is the smallest value that would have
    been an outlier.
    """

    alarm: bool
    score: float
    limit: float


@dataclass
class Outliers:
    """Compares values with the median of the last WINDOW values that were no outliers.

    The spread is the larger of two estimates of a standard deviation: MAD, and the distance from
    the median to the 95th percentile. The second covers skewed curves, in which some batches are
    harder than most. An alarm is RUN outliers in a row. After NEW_LEVEL outliers in a row, they
    become the window.
    """

    logarithm: bool = False  # compare the logarithms of the values
    margin: float = 0.05  # an outlier is at least this share of the median above it
    spreads: float = 8.0  # and more than this number of spreads
    recent: list[float] = field(default_factory=list)
    outliers: list[float] = field(default_factory=list)  # the latest values, if all are outliers

    WINDOW, LEAST, RUN, NEW_LEVEL = 128, 32, 2, 64

    def look(self, value: float) -> OutlierScore:
        """Judge the next value. A value that is not finite is neither judged nor remembered."""
        if not math.isfinite(value):
            return OutlierScore(False, math.inf, math.inf)
        value = math.log(max(value, 1e-12)) if self.logarithm else value
        if len(self.recent) < self.LEAST:
            self.recent.append(value)
            return OutlierScore(False, 0.0, math.inf)

        median, spread, threshold = self._threshold()
        limit = math.exp(threshold) if self.logarithm else threshold
        score = max(0.0, (value - median) / spread)

        if value <= threshold:
            self.outliers = []
            self.recent = [*self.recent, value][-self.WINDOW :]
            return OutlierScore(False, score, limit)

        self.outliers.append(value)
        alarm = len(self.outliers) == self.RUN
        if len(self.outliers) >= self.NEW_LEVEL:
            self.recent, self.outliers = self.outliers, []
        return OutlierScore(alarm, score, limit)

    def limit(self) -> float:
        """Return the largest value that would not be an outlier, or infinity at the beginning."""
        if len(self.recent) < self.LEAST:
            return math.inf
        threshold = self._threshold()[2]
        return math.exp(threshold) if self.logarithm else threshold

    def _threshold(self) -> tuple[float, float, float]:
        """Return the window's (median, spread, threshold), which may be logarithms."""
        ordered = sorted(self.recent)
        median = median_of_sorted(ordered)
        spread = max(spread_above(ordered, median), 1e-9)
        margin = self.margin if self.logarithm else self.margin * abs(median)
        return median, spread, median + max(self.spreads * spread, margin)

    def to_state(self) -> dict[str, list[float]]:
        """Return the values to store in a checkpoint."""
        return {"recent": list(self.recent), "outliers": list(self.outliers)}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        """Continue from what `to_state` returned."""
        self.recent, self.outliers = list(state["recent"]), list(state["outliers"])


def spread_above(ordered: list[float], median: float) -> float:
    """Return the spread of sorted values towards larger ones, in standard deviations."""
    deviations = sorted(abs(value - median) for value in ordered)
    q95 = ordered[int(0.95 * (len(ordered) - 1))]
    return max(MAD_TO_SIGMA * median_of_sorted(deviations), Q95_TO_SIGMA * (q95 - median))


@dataclass
class Divergence:
    """Compares the median of the last WINDOW losses with the lowest such median so far.

    An alarm begins if the median is higher by SHARE of the lowest and by SIGMAS robust standard
    deviations of the losses in the window. There is no further alarm until the median is lower
    again.
    """

    recent: list[float] = field(default_factory=list)
    lowest: float | None = None
    above: bool = False

    WINDOW, SHARE, SIGMAS = 64, 0.10, 4.0

    def look(self, loss: float) -> tuple[bool, float, float]:
        """Return (whether an alarm begins, the median, the lowest median so far)."""
        if not math.isfinite(loss):
            return False, math.nan, math.nan
        self.recent = [*self.recent, loss][-self.WINDOW :]
        if len(self.recent) < self.WINDOW:
            return False, math.nan, math.nan
        ordered = sorted(self.recent)
        level = median_of_sorted(ordered)
        lowest = level if self.lowest is None else min(self.lowest, level)
        mad = median_of_sorted(sorted(abs(value - level) for value in ordered))
        above = level > lowest + max(self.SHARE * abs(lowest), self.SIGMAS * MAD_TO_SIGMA * mad)
        begins, self.above, self.lowest = above and not self.above, above, lowest
        return begins, level, lowest

    def to_state(self) -> dict[str, Any]:
        """Return the values to store in a checkpoint."""
        return {"recent": list(self.recent), "lowest": self.lowest, "above": self.above}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `to_state` returned."""
        self.recent = list(state["recent"])
        self.lowest, self.above = state["lowest"], state["above"]
