"""The progress line of rank 0.

On a terminal this is a live line. Elsewhere a new line is printed every PLAIN_EVERY seconds.
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
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..spec.run_folder import unit_of_metrics

WIDEST = 100  # columns
PLAIN_EVERY = 10.0  # seconds between two lines without a terminal
LIVE_EVERY = 0.25  # seconds between two refreshes on a terminal
FIRST_STEPS = 2  # steps of a start that the ETA ignores: they compile kernels and fill caches
# width of the terminal of `python -m launch`, which draws rank 0's line
TERMINAL = "LAUNCH_TERMINAL"
GIB = 2**30


@dataclass
class Progress:
    """The content of the progress line: newest step, pace, and current activity between steps."""

    last_step: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    at: float = 0.0  # time.time() of the newest step
    num_steps: int = 0  # steps of this start
    # durations of the latest steps in seconds, without FIRST_STEPS
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    paused: float = 0.0  # seconds spent on evaluations and saves in this start
    doing: str = "first step"
    since: float = field(default_factory=time.time)  # time.time() when `doing` began

    def step(self, metrics: Mapping[str, Any], now: float) -> None:
        """Record a finished step."""
        if self.num_steps == 0:
            self.doing = ""
        self.metrics, self.at = metrics, now
        self.num_steps += 1
        if self.num_steps > FIRST_STEPS:
            self.recent.append(metrics["step_s"])

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the last step, including evaluations and saves.

        The result is None until a step after FIRST_STEPS is done.
        """
        if not self.recent:
            return None
        pace = statistics.median(self.recent) + self.paused / self.num_steps
        return max(0.0, (self.last_step - self.metrics["step"]) * pace - (now - self.at))


@dataclass(frozen=True)
class ProgressField:
    """A field of the progress line, in a long and a short form.

    If the line is too long, the field with the largest `drop_order` is dropped first.
    """

    text: str
    short_text: str
    drop_order: int


def progress_fields(progress: Progress, now: float) -> list[ProgressField]:
    """Return the fields of the progress line in their order."""
    metrics, last = progress.metrics, progress.last_step
    doing = f"{progress.doing} {format_duration(now - progress.since)}" if progress.doing else ""
    parts = [ProgressField(doing, doing, 1)] if doing else []
    if not metrics:
        return parts

    step, unit = metrics["step"], unit_of_metrics(metrics)
    rate = metrics[f"{unit}_per_s"]
    memory = metrics["peak_mem_bytes"] / GIB
    parts.insert(0, ProgressField(f"step {step}/{last}", f"{step}/{last}", 0))
    parts.insert(1, ProgressField(f"{percent(step, last)}%", f"{percent(step, last)}%", 6))
    if (epoch := metrics.get("epoch")) is not None:
        parts.append(ProgressField(f"epoch {epoch:.2f}", f"ep {epoch:.2f}", 7))
    parts.append(
        ProgressField(f"loss {format_loss(metrics['loss'])}", f"loss {metrics['loss']:.3g}", 1)
    )
    parts.append(
        ProgressField(f"lr {metrics['lr']:.2e}", f"lr {metrics['lr']:.1e}".replace("e-0", "e-"), 5)
    )
    parts.append(ProgressField(f"{rate:,.0f} {unit}/s", f"{abbreviate_rate(rate)} {unit[:3]}/s", 3))
    parts.append(ProgressField(f"{memory:.1f} GiB", f"{memory:.3g}G", 4))
    return parts + _eta_fields(progress, now)


def _eta_fields(progress: Progress, now: float) -> list[ProgressField]:
    """Return the fields for the expected end, or [] until a step after FIRST_STEPS is done."""
    if (left := progress.seconds_left(now)) is None:
        return []
    return [
        ProgressField(f"ETA {format_duration(left)}", f"ETA {format_short_duration(left)}", 2),
        ProgressField(f"at {format_end_time(now, left)}", format_end_time(now, left), 8),
    ]


def fit_line(fields: list[ProgressField], columns: int) -> str:
    """Return the progress line in at most `columns` columns.

    The long form is tried first, then the short form, then the short form without the least
    important fields.
    """
    for gap, short in (("  ", False), (" ", False), ("  ", True), (" ", True)):
        line = gap.join(part.short_text if short else part.text for part in fields)
        if len(line) <= columns:
            return line
    if len(fields) == 1:
        return fields[0].short_text[:columns]
    spare = max(fields, key=lambda part: part.drop_order)
    return fit_line([part for part in fields if part is not spare], columns)


def percent(step: int, last: int) -> int:
    """Return the finished percentage. It is 100 only at the last step."""
    return 100 * step // max(1, last)


def format_loss(value: float) -> str:
    """Return a loss with four decimals, or with an exponent if it is large."""
    return f"{value:.4f}" if not math.isfinite(value) or abs(value) < 1000 else f"{value:.3e}"


def abbreviate_rate(value: float) -> str:
    """Return a rate in at most five characters, such as 940, 12.3k or 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def format_duration(seconds: float) -> str:
    """Return a duration such as 0:01:05 for 65 seconds. From one day on, return days and hours."""
    whole = round(seconds)
    if whole >= 86400:
        return f"{whole // 86400}d {whole % 86400 // 3600}h"
    return str(datetime.timedelta(seconds=max(0, whole)))


def format_short_duration(seconds: float) -> str:
    """Return a duration such as 1:05 for 65 seconds, or 2h05 for two hours and five minutes.

    From one day on, the result contains days and hours.
    """
    whole = round(seconds)
    if whole >= 86400:
        return f"{whole // 86400}d{whole % 86400 // 3600}h"
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02}"
    return f"{whole // 60}:{whole % 60:02}"


def format_end_time(now: float, left: float) -> str:
    """Return the local end time: 14:05 for today, Tue 14:05 within a week, otherwise the date."""
    end, today = (
        datetime.datetime.fromtimestamp(now + min(left, 1e9)),
        datetime.datetime.fromtimestamp(now),
    )
    days = (end.date() - today.date()).days
    return f"{end:%H:%M}" if days == 0 else f"{end:%a %H:%M}" if days < 7 else f"{end:%Y-%m-%d}"


class Screen(Protocol):
    """The output target of the progress line. `every` is the refresh interval in seconds."""

    every: float

    def columns(self) -> int | None: ...

    def draw(self, line: str, key: object) -> None:
        """Show the line. If only the elapsed time is new, `key` is the same as before."""

    def say(self, text: str) -> None: ...

    def close(self, line: str, key: object) -> None: ...


class OwnTerminal:
    """The terminal on stderr, which `python`, `deepspeed` and `torchrun` pass on to their ranks."""

    every = LIVE_EVERY

    def __init__(self) -> None:
        # Otherwise rich would send the lines of a redirected stdout to the terminal.
        self._live = Live(
            console=Console(stderr=True), auto_refresh=False, redirect_stdout=sys.stdout.isatty()
        )
        self._live.start()

    def columns(self) -> int:
        return terminal_columns(sys.__stderr__)

    def draw(self, line: str, key: object) -> None:
        with ignore_closed_stderr():
            self._live.update(Text(line, no_wrap=True, overflow="crop"), refresh=True)

    def say(self, text: str) -> None:
        with ignore_closed_stderr():  # soft_wrap: a command in the text can be copied as one line
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self, line: str, key: object) -> None:
        self.draw(line, key)
        with ignore_closed_stderr():
            self._live.stop()


class LauncherTerminal:
    """The terminal of `python -m launch`, which draws the lines that it receives through a pipe.

    Text is written to this rank's log file.
    """

    every = 0.5

    def columns(self) -> int:
        return int(os.environ[TERMINAL])

    def draw(self, line: str, key: object) -> None:
        report = json.dumps({"line": line, "pid": os.getpid()})
        with contextlib.suppress(OSError):  # the pipe is full, or the job has ended
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


class PlainScreen:
    """A file or a pipe instead of a terminal.

    It receives the first step, a line every PLAIN_EVERY seconds if there is news, and the last
    step.
    """

    every = 1.0

    def __init__(self) -> None:
        self._printed: object = None  # key of the newest line
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
    """Print a line to stderr. The reader of stderr may already be gone."""
    with ignore_closed_stderr():
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def ignore_closed_stderr() -> Iterator[None]:
    """Continue if stderr cannot be written.

    If the reader of stderr is gone, later output is dropped. This happens after a terminal is
    closed, or with `| tee` after Ctrl-C. Python flushes stderr once more at exit, and a failure
    there would end the process with code 120.
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
    """Return the terminal of this process or of its launcher.

    If neither can redraw a line, return `PlainScreen`.
    """
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        return OwnTerminal()
    if os.environ.get(TERMINAL, "").isdigit() and "LAUNCH_PIPE" in os.environ:
        return LauncherTerminal()
    return PlainScreen()


def terminal_columns(stream: TextIO | None) -> int:
    """Return the width of the stream's terminal, else the value of COLUMNS, else 80."""
    # The terminal is gone, or the stream is not a terminal.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if stream and (columns := os.get_terminal_size(stream.fileno()).columns):
            return columns
    said = os.environ.get("COLUMNS", "").strip()
    return int(said) if said.isdigit() and int(said) else 80


class ProgressLine:
    """The progress line of a run, drawn by a thread, so that a step only records its numbers."""

    def __init__(self, last_step: int):
        self._progress = Progress(last_step)
        self._screen = find_screen()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="progress", daemon=True)
        self._thread.start()

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Record a finished step, and print an evaluation as a separate line that stays.

        The step is recorded without the lock, because a terminal halted with Ctrl-S must not halt
        the training.
        """
        self._progress.step(metrics, time.time())
        if self._progress.num_steps == 1:
            self._draw()
        if evaluated := [
            f"{name} {format_loss(value)}"
            for name, value in metrics.items()
            if name.startswith("eval_") and name != "eval_s"
        ]:
            self.say(f"step {metrics['step']}/{self._progress.last_step}  {'  '.join(evaluated)}")

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show the name of an activity between two steps, such as an evaluation, while it runs."""
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
        """Show the newest step as the last line. Later messages appear below this line."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(2)
        with self._lock:
            self._screen.close(
                self._line(self._screen.columns()) if self._progress.metrics else "", self._key()
            )
            self._screen = PlainScreen()

    def _refresh(self) -> None:
        while not self._closed.wait(self._screen.every):
            self._draw()

    def _draw(self) -> None:
        with self._lock:
            self._screen.draw(self._line(self._screen.columns()), self._key())

    def _key(self) -> object:
        return self._progress.metrics.get("step"), self._progress.doing

    def _line(self, columns: int | None) -> str:
        parts = progress_fields(self._progress, time.time())
        if columns is None:  # a file gets every field
            return "  ".join(part.text for part in parts)
        return fit_line(parts, min(WIDEST, columns - 1))
