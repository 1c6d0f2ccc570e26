"""A command as a user starts it, every process that comes of it, and what they leave behind."""

import contextlib
import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pool import ROOT, environment, free_port
from recipekit.spec.run_folder import CHECKPOINTS, METRICS
from recipekit.spec.run_folder import numbers as numbers  # tests take it from here
from recipekit.spec.step_names import step_folders, step_of

# an environment variable that every descendant of a job inherits, wherever it moves to
MARK = "TEST_JOB"
NANO = ROOT / "recipes" / "llama_nano_zero2.py"
BIN = Path(sys.executable).parent


def deepspeed(recipe: Path, *flags: object, ranks: int = 2) -> list[str]:
    """The command line of the `deepspeed` launcher on a port of its own."""
    return [
        str(BIN / "deepspeed"),
        "--num_gpus",
        str(ranks),
        "--master_port",
        str(free_port()),
        str(recipe),
        *map(str, flags),
    ]


def command_line(process: psutil.Process) -> list[str]:
    """Its command line; none of one that has just ended."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


class Job:
    """A started command in a session of its own; with `terminal` it has a controlling terminal, on
    which Ctrl-C can be pressed.
    """

    def __init__(self, folder: Path, argv: list[str], terminal: bool = False, **variables: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.mark = f"{folder}:{time.monotonic_ns()}"
        self.log = folder / f"output_{time.monotonic_ns()}.log"
        self._keyboard = None
        env = environment() | {MARK: self.mark, "PYTHONFAULTHANDLER": "1"} | variables
        self.began = time.monotonic()
        if not terminal:
            with self.log.open("wb") as output:
                self.process = subprocess.Popen(
                    argv,
                    cwd=folder,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            return
        self._keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            argv,
            cwd=folder,
            env=env | {"TERM": "xterm"},
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(screen)
        self.log.touch()
        threading.Thread(target=self._copy_screen, args=(self._keyboard,), daemon=True).start()

    def _copy_screen(self, keyboard: int) -> None:
        # a terminal ends with an error
        with self.log.open("wb", buffering=0) as output, contextlib.suppress(OSError):
            while shown := os.read(keyboard, 4096):
                output.write(shown)

    def press_ctrl_c(self) -> None:
        os.write(self._keyboard, b"\x03")

    def close_terminal(self) -> None:
        """What closing the window or losing the ssh connection does: SIGHUP, and nobody reads what
        is printed.
        """
        assert self._keyboard is not None
        os.close(self._keyboard)
        self._keyboard = None

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Every living process of the job, whoever its parent is now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get(MARK) == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def launcher(self) -> psutil.Process:
        """The process `deepspeed.launcher.launch`."""
        (found,) = [
            process
            for process in psutil.Process(self.process.pid).children()
            if "deepspeed.launcher.launch" in command_line(process)
        ]
        return found

    def rank(self, number: int) -> psutil.Process:
        (found,) = [
            process
            for process in self.launcher().children()
            if process.environ()["LOCAL_RANK"] == str(number)
        ]
        return found

    def wait(self, timeout: float) -> int:
        """The exit code; after `timeout` seconds the stacks of all ranks are in the error."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.fail(f"it did not end within {timeout} s")

    def wait_for(self, true: Callable[[], Any], timeout: float) -> float:
        """Seconds until it was true."""
        began = time.monotonic()
        while not true():
            if time.monotonic() - began > timeout:
                self.fail(f"it did not come true within {timeout} s")
            time.sleep(0.05)
        return time.monotonic() - began

    def wait_gone(self, timeout: float) -> float:
        """Seconds until no process of the job was left."""
        return self.wait_for(
            lambda: self.process.poll() is not None and not self.processes(), timeout
        )

    def fail(self, what: str) -> Any:
        left = self.processes()
        for process in left:
            with contextlib.suppress(psutil.Error):
                if "python" in process.name() and "LOCAL_RANK" in process.environ():
                    process.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER prints the stacks
        time.sleep(1)
        raise AssertionError(f"{what}; processes: {left}; output:\n{self.output[-8000:]}")

    def close(self) -> None:
        """Ends what is left of the job."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(20)
        if self._keyboard is not None:
            os.close(self._keyboard)


def contention() -> float:
    """How many times longer work takes here than on an idle machine: the wall time of a busy loop
    over its CPU time, at least 1.

    What a test promises in seconds is promised for a machine that does nothing else.
    """
    wall, cpu = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu < 0.2:
        pass
    return max(1.0, (time.perf_counter() - wall) / (time.thread_time() - cpu))


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, the last of which may not be torn."""
    text = (run / METRICS).read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def steps_done(run: Path) -> int:
    return len((run / METRICS).read_text().splitlines()) if (run / METRICS).exists() else 0


def checkpoints(run: Path) -> list[int]:
    """The steps whose folders are there."""
    return [
        number
        for path in step_folders(run / CHECKPOINTS)
        if (number := step_of(path.name)) is not None
    ]


def copy_run(run: Path, to: Path) -> Path:
    shutil.copytree(run, to, symlinks=True)
    return to


def in_mounts(script: str) -> list[str]:
    """Runs a command in a mount namespace of its own, in which `script` has changed what is mounted
    where.
    """
    if (
        os.geteuid() != 0
        or not shutil.which("unshare")
        or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs root and util-linux's unshare to mount")
    # whatever PATH the command itself is given
    programs = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    return [
        str(shutil.which("unshare")),
        "-m",
        "/bin/sh",
        "-ec",
        f'own=$PATH PATH={programs}\n{script}\nPATH=$own\nexec "$@"',
        "sh",
    ]
