"""The progress line of rank 0: a live line on a terminal, a line every PLAIN_EVERY seconds
elsewhere.
"""

import contextlib
import datetime
import errno
import json
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..spec.run_folder import unit_of

WIDEST = 100  # columns
PLAIN_EVERY = 10.0  # seconds between two lines where there is no terminal
LIVE_EVERY = 0.25  # seconds between two refreshes on a terminal
FIRST_STEPS = 2  # steps of a start that the ETA ignores: they compile kernels and fill caches
# columns of the terminal of `python -m launch`, which draws the line of rank 0
TERMINAL = "LAUNCH_TERMINAL"
GIB = 2**30


@dataclass
class Progress:
    """What the line shows: the newest step, the pace, and what runs now if it is no step."""

    last_step: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    at: float = 0.0  # time.time() of the newest step
    num_steps: int = 0  # of this start
    # seconds of the latest steps, without FIRST_STEPS
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    paused: float = 0.0  # seconds of evaluations and saves in this start
    doing: str = "first step"
    since: float = field(default_factory=time.time)  # time.time() when `doing` began

    def step(self, metrics: Mapping[str, Any], now: float) -> None:
        """Note a finished step."""
        if self.num_steps == 0:
            self.doing = ""
        self.metrics, self.at = metrics, now
        self.num_steps += 1
        if self.num_steps > FIRST_STEPS:
            self.recent.append(metrics["step_s"])

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the last step, evaluations and saves included; None while only
        first steps are done.
        """
        if not self.recent:
            return None
        pace = statistics.median(self.recent) + self.paused / self.num_steps
        return max(0.0, (self.last_step - self.metrics["step"]) * pace - (now - self.at))


@dataclass(frozen=True)
class Part:
    """A field of the line, in words and in short; the one with the largest `spare` goes first if
    the line is too long.
    """

    words: str
    short: str
    spare: int


def parts_of(progress: Progress, now: float) -> list[Part]:
    """Return the fields of the line in their order."""
    metrics, last = progress.metrics, progress.last_step
    doing = f"{progress.doing} {duration(now - progress.since)}" if progress.doing else ""
    parts = [Part(doing, doing, 1)] if doing else []
    if not metrics:
        return parts

    step, unit = metrics["step"], unit_of(metrics)
    rate = metrics[f"{unit}_per_s"]
    memory = metrics["peak_mem_bytes"] / GIB
    parts.insert(0, Part(f"step {step}/{last}", f"{step}/{last}", 0))
    parts.insert(1, Part(f"{percent(step, last)}%", f"{percent(step, last)}%", 6))
    if (epoch := metrics.get("epoch")) is not None:
        parts.append(Part(f"epoch {epoch:.2f}", f"ep {epoch:.2f}", 7))
    parts.append(Part(f"loss {number(metrics['loss'])}", f"loss {metrics['loss']:.3g}", 1))
    parts.append(Part(f"lr {metrics['lr']:.2e}", f"lr {metrics['lr']:.1e}".replace("e-0", "e-"), 5))
    parts.append(Part(f"{rate:,.0f} {unit}/s", f"{abbreviated(rate)} {unit[:3]}/s", 3))
    parts.append(Part(f"{memory:.1f} GiB", f"{memory:.3g}G", 4))
    return parts + _end_of(progress, now)


def _end_of(progress: Progress, now: float) -> list[Part]:
    """Return the fields of the expected end; none while only first steps are done."""
    if (left := progress.seconds_left(now)) is None:
        return []
    return [
        Part(f"ETA {duration(left)}", f"ETA {short_duration(left)}", 2),
        Part(f"at {clock(now, left)}", clock(now, left), 8),
    ]


def fitted(parts: list[Part], columns: int) -> str:
    """Return the line in at most `columns` columns: in words, then in short, then without the
    fields that matter least.
    """
    for gap, short in (("  ", False), (" ", False), ("  ", True), (" ", True)):
        line = gap.join(part.short if short else part.words for part in parts)
        if len(line) <= columns:
            return line
    if len(parts) == 1:
        return parts[0].short[:columns]
    spare = max(parts, key=lambda part: part.spare)
    return fitted([part for part in parts if part is not spare], columns)


def percent(step: int, last: int) -> int:
    """Return how much is done, 100 only at the last step."""
    return 100 * step // max(1, last)


def number(value: float) -> str:
    """Return a loss in four decimals, or with an exponent if it is large."""
    return f"{value:.4f}" if not math.isfinite(value) or abs(value) < 1000 else f"{value:.3e}"


def abbreviated(value: float) -> str:
    """Return a rate in at most five characters, such as 940, 12.3k or 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Return 0:01:05 for 65 seconds; from a day on, days and hours."""
    whole = round(seconds)
    if whole >= 86400:
        return f"{whole // 86400}d {whole % 86400 // 3600}h"
    return str(datetime.timedelta(seconds=max(0, whole)))


def short_duration(seconds: float) -> str:
    """Return 1:05 for 65 seconds and 2h05 for two hours and five minutes; from a day on, days and
    hours.
    """
    whole = round(seconds)
    if whole >= 86400:
        return f"{whole // 86400}d{whole % 86400 // 3600}h"
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02}"
    return f"{whole // 60}:{whole % 60:02}"


def clock(now: float, left: float) -> str:
    """Return the local time at the end: 14:05 today, Tue 14:05 within a week, else the date."""
    end, today = (
        datetime.datetime.fromtimestamp(now + min(left, 1e9)),
        datetime.datetime.fromtimestamp(now),
    )
    days = (end.date() - today.date()).days
    return f"{end:%H:%M}" if days == 0 else f"{end:%a %H:%M}" if days < 7 else f"{end:%Y-%m-%d}"


class Screen(Protocol):
    """Where the line goes. `every` are the seconds between two looks at it."""

    every: float

    def columns(self) -> int | None: ...

    def draw(self, line: str, key: object) -> None:
        """Show the line; `key` changes when it says something new, not only a later time."""

    def say(self, text: str) -> None: ...

    def close(self, line: str, key: object) -> None: ...


class OwnTerminal:
    """The terminal that stderr is: plain `python`, `deepspeed` and `torchrun` pass it on to their
    ranks.
    """

    every = LIVE_EVERY

    def __init__(self) -> None:
        # rich would otherwise take the lines of a redirected stdout to the terminal
        self._live = Live(
            console=Console(stderr=True), auto_refresh=False, redirect_stdout=sys.stdout.isatty()
        )
        self._live.start()

    def columns(self) -> int:
        return columns_of(sys.__stderr__)

    def draw(self, line: str, key: object) -> None:
        with reader_may_go():
            self._live.update(Text(line, no_wrap=True, overflow="crop"), refresh=True)

    def say(self, text: str) -> None:
        with reader_may_go():  # soft_wrap: a command in the text can be copied in one piece
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self, line: str, key: object) -> None:
        self.draw(line, key)
        with reader_may_go():
            self._live.stop()


class LauncherTerminal:
    """The terminal of `python -m launch`, which draws what comes through its pipe.

    Text goes into the file of this rank.
    """

    every = 0.5

    def columns(self) -> int:
        return int(os.environ[TERMINAL])

    def draw(self, line: str, key: object) -> None:
        report = json.dumps({"line": line, "pid": os.getpid()})
        with contextlib.suppress(OSError):  # the pipe is full, or its job has ended
            pipe = os.open(os.environ["LAUNCH_PIPE"], os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, f"{report}\n".encode())
            finally:
                os.close(pipe)

    def say(self, text: str) -> None:
        print_plain(text)

    def close(self, line: str, key: object) -> None:
        self.draw("", None)
        if line:
            print_plain(line)


class Plain:
    """A file or a pipe: the first step, a line every PLAIN_EVERY seconds if there is something new,
    and the last step.
    """

    every = 1.0

    def __init__(self) -> None:
        self._printed: object = None  # the key of the newest line
        self._due = time.monotonic() + PLAIN_EVERY
        self._began = False

    def columns(self) -> None:
        return None

    def draw(self, line: str, key: object) -> None:
        first = line.startswith("step ") and not self._began
        if first or (key != self._printed and time.monotonic() >= self._due):
            print_plain(line)
            self._printed, self._began, self._due = (
                key,
                self._began or first,
                time.monotonic() + PLAIN_EVERY,
            )

    def say(self, text: str) -> None:
        print_plain(text)

    def close(self, line: str, key: object) -> None:
        if line and key != self._printed:
            print_plain(line)


def print_plain(text: str) -> None:
    """Print a line to stderr, whose reader may go."""
    with reader_may_go():
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def reader_may_go() -> Iterator[None]:
    """Go on where stderr cannot be written.

    If its reader has gone, what is written from then on is dropped.

    The reader goes with a closed terminal, or with `| tee` after Ctrl-C. Python flushes stderr once
    more at its end, and would end with code 120 if that failed.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


def find_screen() -> Screen:
    """Return the terminal of this process or of its launcher, or `Plain` if there is none that can
    redraw a line.
    """
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        return OwnTerminal()
    if os.environ.get(TERMINAL, "").isdigit() and "LAUNCH_PIPE" in os.environ:
        return LauncherTerminal()
    return Plain()


def columns_of(stream: Any) -> int:
    """Return the width of the terminal that a stream is, else of COLUMNS, else 80."""
    # the terminal has gone, or is no terminal
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if columns := os.get_terminal_size(stream.fileno()).columns:
            return columns
    said = os.environ.get("COLUMNS", "").strip()
    return int(said) if said.isdigit() and int(said) else 80


class ProgressLine:
    """The line of a run, drawn by a thread, so that a step only notes its numbers."""

    def __init__(self, last_step: int):
        self._progress = Progress(last_step)
        self._screen = find_screen()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="progress", daemon=True)
        self._thread.start()

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Note a finished step. An evaluation gets a line of its own, which stays.

        Without the lock: a terminal that was halted with Ctrl-S must not halt the training.
        """
        self._progress.step(metrics, time.time())
        if self._progress.num_steps == 1:
            self._draw()
        if evaluated := [
            f"{name} {number(value)}"
            for name, value in metrics.items()
            if name.startswith("eval_") and name != "eval_s"
        ]:
            self.say(f"step {metrics['step']}/{self._progress.last_step}  {'  '.join(evaluated)}")

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Name what runs between two steps, such as an evaluation, while it runs."""
        progress, before = self._progress, self._progress.doing
        began = progress.since = time.time()
        progress.doing = what
        try:
            yield
        finally:
            progress.doing = before
            progress.paused += time.time() - began

    def say(self, text: str) -> None:
        """Print a line above the progress line."""
        with self._lock:
            self._screen.say(text)

    def close(self) -> None:
        """Leave the newest step as the last line; what is said later comes below it."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(2)
        with self._lock:
            self._screen.close(
                self._line(self._screen.columns()) if self._progress.metrics else "", self._key()
            )
            self._screen = Plain()

    def _refresh(self) -> None:
        while not self._closed.wait(self._screen.every):
            self._draw()

    def _draw(self) -> None:
        with self._lock:
            self._screen.draw(self._line(self._screen.columns()), self._key())

    def _key(self) -> object:
        return self._progress.metrics.get("step"), self._progress.doing

    def _line(self, columns: int | None) -> str:
        parts = parts_of(self._progress, time.time())
        if columns is None:  # a file takes every field
            return "  ".join(part.words for part in parts)
        return fitted(parts, min(WIDEST, columns - 1))
