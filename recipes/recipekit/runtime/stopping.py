"""Ends a run early and in order: after a signal, or when its launcher has gone.

A Python signal handler does not run while the main thread is blocked inside a collective, so a
thread listens.

    SIGTERM, SIGINT, SIGHUP   a request, honoured at the next step boundary; repeats change nothing
                              (launchers send several)
    SIGUSR1, SIGUSR2, SIGXCPU the same: schedulers announce with them that the time is over
    third Ctrl-C              presses at least a second apart: the rank ends at once, without a
                              checkpoint
    launcher gone             before a `Stopper` is active the rank ends at once; after that it is a
                              request, as a signal is
"""

import contextlib
import faulthandler
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

# a handler that a program has for one of these stays
ANNOUNCED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
STOPS = (signal.SIGTERM, signal.SIGINT, *ANNOUNCED)
# Why a run stops -> its exit code
REASONS = {number.name: 128 + number for number in STOPS} | {"launcher gone": 143, "bad data": 1}
POLL = 0.5  # seconds between two looks at the launcher and at the clock
# an environment variable: seconds between the scheduler's signal and its kill, set by `python -m
# launch`
GRANTED = "LAUNCH_GRACE"
ENDING = 5.0  # of these seconds: for the stacks of a stuck rank, and for the end of its launcher


@dataclass(frozen=True)
class Grace:
    """The time in which a rank must reach a step boundary, after a stop was requested.

    `seconds` is fixed, or None: three times the slowest step so far, at least `least`, at most what
    the scheduler grants. A stop waits for up to two steps: the one in progress and the next one,
    with which the ranks agree on it. The first step of a start may compile kernels and has no step
    before it, so it gets `first`.
    """

    seconds: float | None = None
    granted: float | None = None  # None: no limit is known
    least: float = 25.0
    first: float = 300.0

    def after(self, slowest: float) -> float:
        """Return the seconds if the slowest step so far took `slowest` seconds, 0 before the first
        step.
        """
        if self.seconds is not None:
            return self.seconds

        wanted = max(self.least, 3 * slowest) if slowest else max(self.least, self.first)
        return (
            wanted
            if self.granted is None
            else min(wanted, max(self.granted / 2, self.granted - ENDING))
        )


def grace_of(seconds: float | None, variables: Mapping[str, str]) -> Grace:
    """Return the grace of a run from its `--grace` (None: auto) and from the environment variable
    of its launcher.
    """
    try:
        granted = float(variables.get(GRANTED, ""))
    except ValueError:
        return Grace(seconds)
    return Grace(seconds, granted if 0 < granted < math.inf else None)


class Stopper:
    """Turns signals and a gone launcher into `requested`, which the loop reads at each step
    boundary.

    Once a stop is requested, a rank that reaches no further boundary and does not leave the `with`
    within `grace` prints the stacks of its threads and ends with `exit_code`. Only the main thread
    may enter. Save, finish tracking and destroy the process group inside the `with`: outside it the
    next signal kills.
    """

    def __init__(self, grace: Grace):
        self.requested: str | None = None  # a key of REASONS
        self._grace = grace
        self._slowest = 0.0  # seconds of the slowest step of this start
        # time.monotonic() after which a requested stop counts as stuck
        self._boundary_due = self._request_due = 0.0
        self._pressed = 0.0
        self._presses = 0

    @property
    def exit_code(self) -> int:
        """Returns 0, or the code that shows a shell why the run stopped."""
        return REASONS[self.requested] if self.requested else 0

    def request(self, reason: str) -> None:
        """Asks for a stop, from any thread; the first reason stays.

        The loop passes on the reasons of other ranks.
        """
        if self.requested is None:
            self._request_due = time.monotonic() + self._grace.after(self._slowest)
            self.requested = reason

    def step_took(self, seconds: float) -> None:
        """Note how long a step took: later steps are expected to take no more than three times as
        long.
        """
        self._slowest = max(self._slowest, seconds)

    def boundary(self, next_within: float | None = None) -> None:
        """Notes a step boundary: called after each optimizer step, and with `next_within` (seconds)
        before work that may outlast `grace`, such as a save.
        """
        self._boundary_due = time.monotonic() + (
            self._grace.after(self._slowest) if next_within is None else next_within
        )

    def __enter__(self) -> Self:
        # under nohup, which ignores SIGHUP, we ignore it too
        numbers = {
            signal.SIGTERM,
            signal.SIGINT,
            *(number for number in ANNOUNCED if _kills(number)),
        }
        self._stop_listening = _listen(numbers, self._python_handler, self._react)
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop_listening()

    def _python_handler(self, number: int, frame: Any) -> None:
        """Does nothing: the thread reacts to the signal.

        As SIGTERM's handler this method leads the launcher watch to its object.
        """

    def _react(self, number: int | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._pressed >= 1:
            self._pressed = now
            self._presses += 1
            if self._presses == 3:
                leave(REASONS["SIGINT"], "third Ctrl-C: ended at once, without a checkpoint")
        if number is not None:
            self.request(signal.Signals(number).name)
        if self.requested and now > max(self._boundary_due, self._request_due):
            tell(
                f"stuck: no step boundary within {self._grace.after(self._slowest):g} s after"
                f" {self.requested}. Stacks of all threads:"
            )
            faulthandler.dump_traceback(2)
            os._exit(self.exit_code)


def ignore_stops() -> None:
    """Ignore further requests to stop; for a process that is ending."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def _kills(number: signal.Signals) -> bool:
    """Return True if nothing catches or ignores the signal, a handler in C such as faulthandler's
    included.
    """
    status = Path("/proc/self/status").read_text()
    masks = [
        int(line.split()[1], 16)
        for line in status.splitlines()
        if line.startswith(("SigCgt", "SigIgn"))
    ]
    return not any(mask >> (number - 1) & 1 for mask in masks)


def quiet_interrupts() -> None:
    """Makes Ctrl-C end the process at once, with one line instead of a traceback, until a `Stopper`
    is active.
    """

    def react(number: int | None) -> None:
        if number is not None:
            leave(REASONS["SIGINT"], "interrupted before training began")

    _listen({signal.SIGINT}, lambda number, frame: None, react)


def start_launcher_watch() -> None:
    """Notices, within a second, that the launcher of this rank has gone, so that no rank trains on
    as an orphan.

    Watched are the parent process and the `deepspeed` command above it, which a signal ends alone.
    Call this function before slow imports. Without a launcher (no RANK, or a shell that set RANK by
    hand) nothing is watched.
    """
    launcher = os.getppid()
    if "RANK" not in os.environ or _command_name(launcher) in {
        "sh",
        "bash",
        "dash",
        "zsh",
        "ksh",
        "fish",
        "csh",
        "tcsh",
        "ash",
    }:
        return
    above = parent(launcher)
    runner = above if above and _runs_deepspeed(above) else None

    def gone() -> int | None:
        if os.getppid() != launcher:
            return launcher
        return runner if runner and parent(launcher) != runner else None

    def watch() -> None:
        while (pid := gone()) is None:
            time.sleep(POLL)
        stopper = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if not isinstance(stopper, Stopper):
            leave(REASONS["launcher gone"], f"the launcher (pid {pid}) has gone: ended")
        else:
            stopper.request("launcher gone")

    threading.Thread(target=watch, name="launcher watch", daemon=True).start()


def _listen(
    numbers: set[signal.Signals],
    handler: Callable[[int, Any], None],
    react: Callable[[int | None], None],
) -> Callable[[], None]:
    """Calls `react(number)` in a thread for each signal, and `react(None)` every POLL seconds;
    returns the call that ends the thread.
    """
    reader, writer = socket.socketpair()
    reader.settimeout(POLL)
    writer.setblocking(False)
    fd = writer.detach()  # a plain number: no garbage collection closes it
    before = {number: signal.signal(number, handler) for number in numbers}
    for number in numbers:
        # a signal that we only note cuts no system call of a library short
        signal.siginterrupt(number, False)
    fd_before = signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    listening = True

    def listen() -> None:
        while True:
            try:
                heard = reader.recv(64)
            except TimeoutError:
                react(None)
                continue
            if not heard:
                return reader.close()
            for number in set(heard) & numbers:
                react(number)

    def forget_in_child() -> None:
        # A forked worker must die of SIGTERM (multiprocessing ends workers so), and must not wake
        # its parent's thread.
        if listening:
            signal.set_wakeup_fd(-1)
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)

    def stop() -> None:
        nonlocal listening
        listening = False
        signal.set_wakeup_fd(fd_before)
        for number, old in before.items():
            signal.signal(number, old or signal.SIG_DFL)
        os.close(fd)

    os.register_at_fork(after_in_child=forget_in_child)
    threading.Thread(target=listen, name="stopping", daemon=True).start()
    return stop


def leave(exit_code: int, text: str) -> NoReturn:
    """Ends this process from any thread, whatever the other threads do."""
    tell(text)
    os._exit(exit_code)


def tell(text: str) -> None:
    """Prints without Python's locks, which the main thread may hold; the reader of stderr may be
    gone with the launcher.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"rank {os.environ.get('RANK', '0')}: {text}\n".encode())


def parent(pid: int) -> int | None:
    """Return the parent of a process; None if the process has gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _command_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def command_line(pid: int) -> list[str]:
    """Return the words of a process's command line; [] if the process has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def _runs_deepspeed(pid: int) -> bool:
    """Returns True if the process is the `deepspeed` command: `python .../bin/deepspeed` or `python
    -m deepspeed.launcher.runner`.
    """
    if not (words := command_line(pid)):
        return False
    program = next((word for word in words[1:] if word and not word.startswith("-")), words[0])
    return Path(program).name in {
        "deepspeed",
        "ds",
        "deepspeed.launcher.runner",
    } or program.endswith("deepspeed/launcher/runner.py")
