"""Goodput, and the finder of lasting drops in throughput."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .outliers import MAD_TO_SIGMA, median_of_sorted


@dataclass
class Throughput:
    """Compares the median throughput of the last WINDOW steps with the best such median.

    An alarm begins if it is lower by SHARE, and by SIGMAS robust standard deviations of the steps
    in the window. There is no further alarm until it has recovered.
    """

    recent: list[float] = field(default_factory=list)
    best: float = 0.0
    below: bool = False

    WINDOW, SHARE, SIGMAS = 20, 0.05, 4.0

    def look(self, units_per_s: float) -> tuple[float, float] | None:
        """Judge the next step. At the beginning of an alarm, return (median, best median)."""
        self.recent = [*self.recent, units_per_s][-self.WINDOW :]
        if len(self.recent) < self.WINDOW:
            return None
        ordered = sorted(self.recent)
        level = median_of_sorted(ordered)
        self.best = max(self.best, level)
        mad = median_of_sorted(sorted(abs(value - level) for value in ordered))
        drop = self.best - level
        below = drop > max(self.SHARE * self.best, self.SIGMAS * MAD_TO_SIGMA * mad)
        begins, self.below = below and not self.below, below
        return (level, self.best) if begins else None


@dataclass
class Goodput:
    """The fraction of the wall time since the run's first start that kept steps have used."""

    begun: float  # seconds since 1970
    useful: float  # seconds of the kept steps

    def add(self, step_seconds: float) -> float:
        """Add a step that has just ended, and return the goodput, 0 to 1."""
        self.useful += step_seconds
        return min(1.0, self.useful / max(time.time() - self.begun, 1e-9))


def goodput_so_far(lines: Sequence[Mapping[str, Any]], now: float) -> Goodput:
    """Return the goodput of a run with these lines in metrics.jsonl.

    Lines from before November 2026 have no `time`. The count then begins `now`, seconds since 1970.
    """
    if not lines or "time" not in lines[0]:
        return Goodput(now, 0.0)
    seconds = [line["step_s"] for line in lines]
    return Goodput(lines[0]["time"] - seconds[0], sum(seconds))
