"""Finders of faults outside the model: a disk that will be full, and saves that do not succeed.

`DiskWatch` reads the disk in a thread, because a disk that hangs must not delay a step.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .alerts import WARNING, Alert

DISK_PERIOD = 300.0  # seconds between two looks at the disk


@dataclass
class StaleCheckpoint:
    """Finds that no save has succeeded for MISSED intervals of `save_every` steps."""

    save_every: int  # 0: never
    stale: bool = False

    MISSED = 2

    def look(self, step: int, saved: int) -> bool:
        """Return True in the first step in which the newest complete step, `saved`, is too old."""
        # A background save is known to be complete when the next one begins, so a save that is
        # exactly MISSED intervals old may be the newest but one.
        stale = self.save_every > 0 and step - saved > self.MISSED * self.save_every
        begins, self.stale = stale and not self.stale, stale
        return begins


@dataclass
class DiskTrend:
    """Estimates when a disk is full, from the space that this run does not use itself.

    The rate is the mean over the last WINDOW seconds. It is known after LEAST seconds.
    """

    readings: list[tuple[float, int]] = field(default_factory=list)  # (seconds, bytes)

    WINDOW, LEAST = 3600.0, 600.0

    def seconds_until_full(self, now: float, free: int, own: int) -> float | None:
        """Return the seconds until the disk is full at the recent rate, or None.

        `free` are the free bytes, and `own` the bytes of this run's checkpoints, which are removed
        and written in turn and therefore say nothing about the rate.
        """
        self.readings = [
            *(reading for reading in self.readings if now - reading[0] <= self.WINDOW),
            (now, free + own),
        ]
        begun, before = self.readings[0]
        used = before - (free + own)
        if now - begun < self.LEAST or used <= 0:
            return None
        return free * (now - begun) / used


@dataclass(frozen=True)
class DiskReading:
    """The disk of a run's checkpoints at one moment."""

    free: int  # bytes
    own: int  # bytes of the run's checkpoints
    shortage: str  # why the next checkpoints have no room, or ""


class DiskWatch:
    """Looks at the disk after each save and every DISK_PERIOD seconds, in a thread of rank 0.

    `read` returns a reading after a given step, or None while a save is under way. `last_step` is
    the last step of this start. A problem that the thread has found is returned by the next `look`.
    """

    def __init__(
        self,
        read: Callable[[int], DiskReading | None],
        last_step: int,
        clock: Callable[[], float] = time.time,
    ):
        self._read, self._last_step, self._clock = read, last_step, clock
        self._trend = DiskTrend()
        self._first_look: tuple[float, int] | None = None  # (seconds, step)
        self._step = self._saved = 0
        self._problem = ""
        self._wake, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="disk watch", daemon=True)

    def look(self, step: int, saved: int) -> str:
        """Note a finished step and the newest complete one. Return a problem of the disk, or ""."""
        self._step = step
        if self._first_look is None:
            self._first_look = (self._clock(), step)
            self._thread.start()
        elif saved != self._saved:
            self._wake.set()
        self._saved = saved
        problem, self._problem = self._problem, ""
        return problem

    def close(self) -> None:
        """Let the thread end. It is not waited for, because the disk may hang."""
        self._closed = True
        self._wake.set()

    def _work(self) -> None:
        while not self._closed:
            try:
                if reading := self._read(self._step):
                    self._problem = self._judge(reading) or self._problem
            except FileNotFoundError:  # a checkpoint was renamed or removed meanwhile
                pass
            except OSError as error:
                self._problem = f"the disk of the checkpoints cannot be read ({error.strerror})"
            self._wake.wait(DISK_PERIOD)
            self._wake.clear()

    def _judge(self, reading: DiskReading) -> str:
        if reading.shortage:
            return f"the disk has no room for the next checkpoints: {reading.shortage}"
        until_full = self._trend.seconds_until_full(self._clock(), reading.free, reading.own)
        until_end = self._seconds_until_end()
        if until_full is None or until_end is None or until_full >= until_end:
            return ""
        return (
            f"other files fill the disk of the checkpoints: its {reading.free:,} free bytes last"
            f" {until_full / 3600:.1f} h at the present rate, and the run needs"
            f" {until_end / 3600:.1f} h"
        )

    def _seconds_until_end(self) -> float | None:
        assert self._first_look is not None
        begun, first = self._first_look
        steps = self._step - first
        return (self._last_step - self._step) * (self._clock() - begun) / steps if steps else None


@dataclass
class Storage:
    """The finders of rank 0 that judge the run's checkpoints and their disk."""

    stale: StaleCheckpoint
    disk: DiskWatch
    report: Callable[[Alert], None]
    clock: Callable[[], float] = time.time

    def look(self, step: int, saved: int) -> None:
        """Report problems after a step. `saved` is the newest step whose save is complete."""
        if self.stale.look(step, saved):
            text = f"no save has succeeded since step {saved}, {step - saved} steps ago"
            limit = self.stale.MISSED * self.stale.save_every
            now = self.clock()
            value = float(step - saved)
            self.report(
                Alert(now, step, "checkpoint", WARNING, text, value=value, limit=float(limit))
            )
        if problem := self.disk.look(step, saved):
            self.report(Alert(self.clock(), step, "disk", WARNING, problem))

    def close(self) -> None:
        self.disk.close()


class NoStorage:
    """The finders of every rank except the first, and of a run with --no-watch."""

    def look(self, step: int, saved: int) -> None: ...

    def close(self) -> None: ...
