"""The pace of a rank's steps, from which the finder of hangs decides that a step is overdue."""

import math
import time
from collections import deque
from dataclasses import dataclass, field

ANNOUNCED = 3600.0  # seconds granted to the first step of a start, and to work such as a compile


@dataclass
class Pace:
    """The step boundaries of this rank.

    The training thread records boundaries and step times, and other threads read them. Work that
    takes longer than a step is announced with its limit.
    """

    last_step: int = 0  # the last finished step
    margin: float = 10.0  # seconds in addition to FACTOR times the recent step time
    # seconds of the last steps; the first step of a start is dropped once the second is known
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=Pace.WINDOW))
    expected: float = math.inf  # time.monotonic() at the last boundary, or at the announced end
    _first: bool = True
    _excused: float = 0.0  # seconds of this step that were spent on announced work

    WINDOW, FACTOR, SHARE = 128, 3.0, 0.95

    def start(self, step: int) -> None:
        """Begin to count, after `step`. The first step of a start may compile kernels."""
        self.last_step = step
        self.boundary(ANNOUNCED)

    def add(self, seconds: float) -> None:
        """Record a finished step that took `seconds`."""
        if self._first and self.recent:
            self.recent.clear()
            self._first = False
        self.recent.append(seconds)

    def boundary(self, next_within: float = 0.0) -> None:
        """Record a boundary. The work up to the next one may take `next_within` seconds more."""
        self._excused = 0.0
        self.expected = time.monotonic() + next_within

    def excuse(self) -> bool:
        """Count the time so far as announced work. Return False if that were over ANNOUNCED."""
        late = max(0.0, self.late())
        if self._excused + late > ANNOUNCED:
            return False
        self._excused += late
        self.expected += late
        return True

    def late(self) -> float:
        """Return the seconds since the last boundary or the end of announced work."""
        return time.monotonic() - self.expected

    def limit(self) -> float:
        """Return the seconds after which a step is overdue."""
        ordered = sorted(self.recent)
        usual = ordered[math.ceil(self.SHARE * len(ordered)) - 1] if ordered else 0.0
        return self.FACTOR * usual + self.margin
