"""Orderly early stop of a run, after a signal or after its launcher has exited.

Python does not run a signal handler while the main thread is blocked inside a collective, so a
thread listens for signals.

    SIGTERM, SIGINT, SIGHUP   a request: the run takes at most one more step after the current one,
                              in which the ranks agree, and then saves; repeats change nothing
                              (launchers send several)
    SIGUSR1, SIGUSR2, SIGXCPU the same: schedulers send these signals to announce the time limit
    third Ctrl-C              if the presses are at least a second apart, the rank ends at once,
                              without a checkpoint
    launcher gone             before a `Stopper` is active the rank ends at once; after that it is a
                              request, like a signal
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
from types import FrameType
from typing import Any, NoReturn, Self

from ..watch.pace import Pace

# If the program already handles one of these signals, its handler stays.
NOTICE_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, *NOTICE_SIGNALS)
# reason for a stop -> exit code
STOP_REASONS = {number.name: 128 + number for number in STOP_SIGNALS} | {
    "launcher gone": 143,
    "bad data": 1,
}
STOP_POLL_SECONDS = 0.5  # seconds between two checks of the launcher and the clock
# Environment variable, set by `python -m launch`: the seconds between the scheduler's signal and
# the moment when the scheduler kills the job.
GRACE_VARIABLE = "LAUNCH_GRACE"
EXIT_RESERVE = (
    5.0  # seconds of grace reserved for a stuck rank's stack dump and the launcher's exit
)


@dataclass(frozen=True)
class Grace:
    """The time within which a rank must reach a step boundary after a stop was requested.

    `seconds` is a fixed time. If it is None, the grace time is three times the slowest step so far.
    This time is at least `min_seconds`, and at most the time that the scheduler grants. A stop
    waits for up to two steps: the current step and the next one, in which the ranks agree on the
    stop. The first step of a start may compile kernels, and no step time is known yet, so it gets
    `first_step_seconds`.
    """

    seconds: float | None = None
    scheduler_grace: float | None = None  # None: the limit is unknown
    min_seconds: float = 25.0
    first_step_seconds: float = 300.0

    def after(self, slowest: float) -> float:
        """Return the grace time in seconds.

        `slowest` is the time of the slowest step so far, or 0 before the first step.
        """
        if self.seconds is not None:
            return self.seconds

        wanted = (
            max(self.min_seconds, 3 * slowest)
            if slowest
            else max(self.min_seconds, self.first_step_seconds)
        )
        return (
            wanted
            if self.scheduler_grace is None
            else min(wanted, max(self.scheduler_grace / 2, self.scheduler_grace - EXIT_RESERVE))
        )


def grace_of(seconds: float | None, variables: Mapping[str, str]) -> Grace:
    """Return the grace time of a run.

    `seconds` is the value of `--grace` (None: auto). `variables` contains the launcher's
    environment variable.
    """
    try:
        granted = float(variables.get(GRACE_VARIABLE, ""))
    except ValueError:
        return Grace(seconds)
    return Grace(seconds, granted if 0 < granted < math.inf else None)


class Stopper:
    """A request to stop, from a signal or a lost launcher, which the loop reads at step boundaries.

    After a request, a rank must reach the next boundary or leave the `with` block within `grace`.
    Otherwise the rank prints its threads' stacks and ends with `exit_code`. Only the main thread
    may enter. Save, finish tracking and destroy the process group inside the `with` block, because
    the next signal kills the process outside of the block.
    """

    def __init__(self, grace: Grace):
        self.pace = Pace()  # for the finder of hangs
        self.requested: str | None = None  # a key of STOP_REASONS
        self._grace = grace
        self._slowest = 0.0  # seconds of the slowest step in this start
        # time.monotonic() after which a rank with a stop request counts as stuck
        self._boundary_due = self._request_due = 0.0
        self._pressed = 0.0
        self._presses = 0

    @property
    def exit_code(self) -> int:
        """Return 0, or the exit code that shows a shell why the run stopped."""
        return STOP_REASONS[self.requested] if self.requested else 0

    def request(self, reason: str) -> None:
        """Request a stop, from any thread. The first reason stays, even if a later one follows.

        The loop also passes the other ranks' reasons to this method.
        """
        if self.requested is None:
            self._request_due = time.monotonic() + self._grace.after(self._slowest)
            self.requested = reason

    def record_step_time(self, seconds: float) -> None:
        """Record the time of a step. Later steps should take at most three times as long."""
        self._slowest = max(self._slowest, seconds)
        self.pace.add(seconds)

    def boundary(self, next_within: float | None = None) -> None:
        """Record a step boundary.

        Call this method after each optimizer step. Also call it with `next_within` (seconds) before
        work that may exceed `grace`, such as a save.
        """
        self._boundary_due = time.monotonic() + (
            self._grace.after(self._slowest) if next_within is None else next_within
        )
        self.pace.boundary(next_within or 0.0)

    def __enter__(self) -> Self:
        # nohup ignores SIGHUP, so we ignore it as well
        numbers = {
            signal.SIGTERM,
            signal.SIGINT,
            *(number for number in NOTICE_SIGNALS if _has_default_action(number)),
        }
        self._stop_listening = _listen(numbers, self._python_handler, self._react)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_listening()

    def _python_handler(self, number: int, frame: FrameType | None) -> None:
        """Do nothing, because the thread reacts to the signal.

        This bound method is the handler of SIGTERM, so the launcher watch can reach its `Stopper`.
        """

    def _react(self, number: int | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._pressed >= 1:
            self._pressed = now
            self._presses += 1
            if self._presses == 3:
                exit_process(
                    STOP_REASONS["SIGINT"], "third Ctrl-C: ended at once, without a checkpoint"
                )
        if number is not None:
            self.request(signal.Signals(number).name)
        if self.requested and now > max(self._boundary_due, self._request_due):
            write_stderr(
                f"stuck: no step boundary within {self._grace.after(self._slowest):g} s after"
                f" {self.requested}. Stacks of all threads:"
            )
            faulthandler.dump_traceback(2)
            os._exit(self.exit_code)


def ignore_stops() -> None:
    """Ignore further requests to stop in a process that is already ending."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _has_default_action(number: signal.Signals) -> bool:
    """Return True if nothing catches or ignores the signal.

    Handlers in C, such as the handlers of faulthandler, also catch a signal.
    """
    status = Path("/proc/self/status").read_text()
    masks = [
        int(line.split()[1], 16)
        for line in status.splitlines()
        if line.startswith(("SigCgt", "SigIgn"))
    ]
    return not any(mask >> (number - 1) & 1 for mask in masks)


def quiet_interrupts() -> None:
    """Make Ctrl-C end the process at once, with one line instead of a traceback.

    This lasts until a `Stopper` is active.
    """

    def react(number: int | None) -> None:
        if number is not None:
            exit_process(STOP_REASONS["SIGINT"], "interrupted before training began")

    _listen({signal.SIGINT}, lambda number, frame: None, react)


def start_launcher_watch() -> None:
    """Watch this rank's launcher, so that no rank continues to train as an orphan.

    A missing launcher is noticed within a second. The watch covers the parent process and the
    `deepspeed` command above it, because a signal may end only that command. Call this function
    before slow imports. Without a launcher (no RANK, or a shell where a user set RANK) nothing is
    watched.
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
    above = parent_pid(launcher)
    runner = above if above and _runs_deepspeed(above) else None

    def gone() -> int | None:
        if os.getppid() != launcher:
            return launcher
        return runner if runner and parent_pid(launcher) != runner else None

    def watch() -> None:
        while (pid := gone()) is None:
            time.sleep(STOP_POLL_SECONDS)
        stopper = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if not isinstance(stopper, Stopper):
            exit_process(STOP_REASONS["launcher gone"], f"the launcher (pid {pid}) has gone: ended")
        else:
            stopper.request("launcher gone")

    threading.Thread(target=watch, name="launcher watch", daemon=True).start()


def _listen(
    numbers: set[signal.Signals],
    handler: Callable[[int, Any], None],
    react: Callable[[int | None], None],
) -> Callable[[], None]:
    """Call `react(number)` in a thread for each signal, and `react(None)` every STOP_POLL_SECONDS.

    Return the function that ends the thread.
    """
    reader, writer = socket.socketpair()
    reader.settimeout(STOP_POLL_SECONDS)
    writer.setblocking(False)
    fd = writer.detach()  # a plain number, so garbage collection never closes it
    before = {number: signal.signal(number, handler) for number in numbers}
    for number in numbers:
        # A signal that we only record must not interrupt a library's system call.
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
        # A forked worker must die from SIGTERM, because multiprocessing ends workers this way. The
        # worker must not wake its parent's thread.
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


def exit_process(exit_code: int, text: str) -> NoReturn:
    """End this process from any thread, regardless of its other threads."""
    write_stderr(text)
    os._exit(exit_code)


def write_stderr(text: str) -> None:
    """Print without Python's locks, because the main thread may hold them.

    The reader of stderr may have exited together with the launcher.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"rank {os.environ.get('RANK', '0')}: {text}\n".encode())


def parent_pid(pid: int) -> int | None:
    """Return a process's parent, or None if the process is gone."""
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
    """Return the words of a process's command line, or [] if the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def _runs_deepspeed(pid: int) -> bool:
    """Return True if the process is the `deepspeed` command.

    This command is `python .../bin/deepspeed` or `python -m deepspeed.launcher.runner`.
    """
    if not (words := command_line(pid)):
        return False
    program = next((word for word in words[1:] if word and not word.startswith("-")), words[0])
    return Path(program).name in {
        "deepspeed",
        "ds",
        "deepspeed.launcher.runner",
    } or program.endswith("deepspeed/launcher/runner.py")
