"""The finder of slow ranks, from the times of all ranks in one step.

A rank's own time is the part of a step in which it neither waits in a collective nor for data. Only
own times tell ranks apart, because all ranks take the same time for a whole step.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

FACTOR = 1.3  # a slow rank's own time divided by its peers', or by its own earlier time
OF, LEAST = 20, 10  # a finding is LEAST slow steps among the last OF
BASELINE, LONG_AGO = 50, 500  # steps that a rank's earlier time needs, and uses at most
REFRESH = 10  # steps between two updates of a rank's earlier time
DATA_SHARE = 0.05  # of a step's time


@dataclass(frozen=True)
class RankTimes:
    """The times of all ranks in one step, in seconds. The lists have one value per rank."""

    step: float
    own: Sequence[float]
    data_wait: Sequence[float]


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slow in at least LEAST of the last OF steps."""

    rank: int
    kind: str  # "straggler" or "data_wait"
    text: str
    value: float  # its time in seconds
    limit: float  # the time that it exceeds


@dataclass
class Recent:
    """The last OF steps of a rank, and in which of them it was slow."""

    slow: deque[bool] = field(default_factory=lambda: deque(maxlen=OF))
    reported: bool = False

    def add(self, slow: bool) -> bool:
        """Add a step. Return True if a finding begins with it."""
        self.slow.append(slow)
        count = sum(self.slow)
        begins = count >= LEAST and not self.reported
        self.reported = count >= LEAST or (self.reported and count >= LEAST // 2)
        return begins


class Stragglers:
    """Compares each rank with its peers and with its own past.

    The ranks of one of `groups` do the same work. They belong to the same pipeline stage.
    """

    def __init__(self, groups: Sequence[Sequence[int]]):
        self._groups = groups
        ranks = range(sum(map(len, groups)))
        self._own = [Recent() for _ in ranks]
        self._data = [Recent() for _ in ranks]
        self._past = [deque[float](maxlen=LONG_AGO) for _ in ranks]
        self._usual: list[float | None] = [None for _ in ranks]  # medians of the past
        self._steps = 0

    def look(self, times: RankTimes) -> list[SlowRank]:
        """Judge the next step, and return the findings that begin with it."""
        self._steps += 1
        if self._steps % REFRESH == 0:
            known = (len(past) >= BASELINE for past in self._past)
            pasts = zip(self._past, known, strict=True)
            self._usual = [median(past) if enough else None for past, enough in pasts]

        limits = self._limits(times.own)
        found = []
        for rank, own in enumerate(times.own):
            limit, why = limits[rank]
            if self._own[rank].add(own > limit):
                text = (
                    f"rank {rank} itself needs {own:.3g} s for a step, {why}, in {LEAST} of the"
                    f" last {OF} steps"
                )
                found.append(SlowRank(rank, "straggler", text, own, limit))
            if own <= limit:
                self._past[rank].append(own)

            wait, share = times.data_wait[rank], DATA_SHARE * times.step
            if self._data[rank].add(wait > share):
                text = (
                    f"rank {rank} waits {wait:.3g} s for data, {wait / times.step:.0%} of a step,"
                    f" in {LEAST} of the last {OF} steps"
                )
                found.append(SlowRank(rank, "data_wait", text, wait, share))
        return found

    def _limits(self, own: Sequence[float]) -> dict[int, tuple[float, str]]:
        """Return for each rank the time above which it is slow, and the reason."""
        limits = {}
        growth = {rank: own[rank] / usual for rank, usual in enumerate(self._usual) if usual}
        grown = sorted(growth.values())
        for group in self._groups:
            ordered = sorted(own[rank] for rank in group)
            for rank in group:
                candidates = [(float("inf"), "")]
                if len(group) > 1:
                    usual = median_without(ordered, own[rank])
                    candidates.append((FACTOR * usual, f"where its peers need {usual:.3g} s"))
                if rank in growth and len(grown) > 1:
                    # A step may be slow for all ranks.
                    slower = max(1.0, median_without(grown, growth[rank]))
                    usual = (self._usual[rank] or 0.0) * slower
                    candidates.append((FACTOR * usual, f"where it needed {usual:.3g} s before"))
                limits[rank] = min(candidates)
        return limits


def median_without(ordered: Sequence[float], value: float) -> float:
    """Return the lower median of a sorted list of two values or more without one `value`."""
    middle = (len(ordered) - 2) // 2
    return ordered[middle if middle < bisect_left(ordered, value) else middle + 1]
