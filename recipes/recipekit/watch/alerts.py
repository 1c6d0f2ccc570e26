"""Alerts: OUT/alerts.jsonl, the terminal, W&B, and a command of the user.

Only rank 0 reports alerts. A problem with one of the destinations is printed, and never delays or
ends a step.
"""

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ..spec.errors import Say
from ..spec.run_folder import ALERTS

QUIET = 600.0  # seconds after a warning in which further warnings of its kind are not reported
COMMAND_LIMIT = 30.0  # seconds after which a command of --on_alert is ended

Level = Literal["warning", "error"]
WARNING: Level = "warning"
ERROR: Level = "error"
RESTART = "restart"  # answer of an alert that ended the run, which may be started again


@dataclass(frozen=True)
class Alert:
    """One line of alerts.jsonl. Values that do not apply are absent from the line."""

    time: float  # seconds since 1970
    step: int
    kind: str  # such as "spike"
    level: Level
    text: str
    rank: int | None = None
    host: str | None = None
    device: str | None = None
    module: str | None = None
    value: float | None = None
    limit: float | None = None  # what `value` exceeded
    # "stop" or "restart" if the alert ended the run, "rewind" if the run went back
    answer: str | None = None
    leave_out: str | None = None  # the --leave_out of an equal run

    def to_json(self) -> str:
        """Return the alert as a JSON object on one line. A value that is not finite is a string."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        try:
            return json.dumps(known, allow_nan=False)
        except ValueError:
            words = {
                name: str(value) if isinstance(value, float) and name != "time" else value
                for name, value in known.items()
            }
            return json.dumps(words)


class AlertLog:
    """Sends alerts to their destinations.

    `copy_to_wandb` receives the title, the text and the level of an alert. `command` is the value
    of --on_alert.
    """

    def __init__(
        self,
        out: Path,
        say: Say,
        copy_to_wandb: Callable[[str, str, str], None],
        command: str = "",
    ):
        self._path = out / ALERTS
        self._say = say
        self._copy_to_wandb = copy_to_wandb
        self._command = AlertCommand(command, say) if command else None
        self._last: dict[str, float] = {}  # kind -> time of the last reported warning

    def report(self, alert: Alert) -> None:
        """Report an alert. A warning is dropped if its kind was reported within QUIET seconds."""
        if alert.level == WARNING:
            if alert.time - self._last.get(alert.kind, -QUIET) < QUIET:
                return
            self._last[alert.kind] = alert.time
        line = alert.to_json()
        try:
            append_line(self._path, line)
        except OSError as error:
            self._say(f"{self._path}: cannot be written ({error.strerror})")
        self._say(f"alert ({alert.kind}): {alert.text}")
        self._copy_to_wandb(f"{alert.kind} at step {alert.step}", alert.text, alert.level)
        if self._command:
            self._command.send(line)

    def close(self) -> None:
        """Wait until the command has received every alert, or COMMAND_LIMIT seconds for each."""
        if self._command:
            self._command.close()


class NoAlerts:
    """The destination of alerts of every rank except the first, and of a run with --no-watch."""

    def report(self, alert: Alert) -> None: ...

    def close(self) -> None: ...


def append_line(path: Path, line: str) -> None:
    """Append a line to a file by a single write. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


class AlertCommand:
    """Runs the command of --on_alert once for each alert, in a thread, one after the other.

    The command gets the alert's JSON on its standard input. Its words are passed as they are, and
    no shell reads them.
    """

    def __init__(self, command: str, say: Say):
        self._words = shlex.split(command)
        self._say = say
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="alert command", daemon=True)
        self._thread.start()

    def send(self, line: str) -> None:
        self._lines.put(line)

    def close(self) -> None:
        waiting = self._lines.qsize() + 1  # the command that may be running
        self._lines.put(None)
        self._thread.join(waiting * (COMMAND_LIMIT + 1))

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            if problem := self._run(line):
                self._say(f"--on_alert {shlex.join(self._words)}: {problem}")

    def _run(self, line: str) -> str:
        """Run the command with one alert, and return its problem or ""."""
        try:
            process = subprocess.Popen(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            return f"cannot be started ({error.strerror})"
        try:
            _, printed = process.communicate(line.encode(), timeout=COMMAND_LIMIT)
        except subprocess.TimeoutExpired:
            # The command may have started other processes, so end all of its session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"ended after {COMMAND_LIMIT:g} s"
        if process.returncode == 0:
            return ""
        last = printed.decode(errors="replace").strip().rpartition("\n")[2]
        return f"exit code {process.returncode}{f' ({last})' if last else ''}"
