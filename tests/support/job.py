"""A command as a user starts it, with all of its processes and the files that it writes."""

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
from pool import ROOT, environment, free_port, import_path
from recipekit.spec.run_folder import CHECKPOINTS, METRICS
from recipekit.spec.run_folder import (
    reproducible_values as reproducible_values,
)  # tests import it from here
from recipekit.spec.step_names import step_folders, step_of

# an environment variable that every descendant of a job inherits, even in a different session
MARK = "TEST_JOB"
NANO = ROOT / "recipes" / "llama_nano_zero2.py"
BIN = Path(sys.executable).parent


def deepspeed(recipe: Path, *flags: object, ranks: int = 2) -> list[str]:
    """Return the command line of the `deepspeed` launcher with a free port."""
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
    """Return the command line of a process; [] if the process has just ended."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


class Job:
    """A command that runs in a separate session.

    With `terminal` the session has a controlling terminal, on which a test can press Ctrl-C.
    """

    def __init__(self, folder: Path, argv: list[str], terminal: bool = False, **variables: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.mark = f"{folder}:{time.monotonic_ns()}"
        self.log = folder / f"output_{time.monotonic_ns()}.log"
        self._keyboard = None
        if path := variables.get("PYTHONPATH"):
            variables["PYTHONPATH"] = import_path(*path.split(os.pathsep))
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
        # Reading a closed terminal raises an error.
        with self.log.open("wb", buffering=0) as output, contextlib.suppress(OSError):
            while shown := os.read(keyboard, 4096):
                output.write(shown)

    def press_ctrl_c(self) -> None:
        os.write(self._keyboard, b"\x03")

    def close_terminal(self) -> None:
        """Close the terminal, as a closed window or a lost ssh connection does.

        The job receives SIGHUP, and its output is no longer read.
        """
        assert self._keyboard is not None
        os.close(self._keyboard)
        self._keyboard = None

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return every live process of the job, including processes whose parent has ended."""
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
        """Return the process `deepspeed.launcher.launch`."""
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
        """Return the exit code; after `timeout` seconds, raise an error with all ranks' stacks."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.fail(f"it did not end within {timeout} s")

    def wait_for(self, true: Callable[[], Any], timeout: float) -> float:
        """Wait until `true()` is true, and return the seconds."""
        began = time.monotonic()
        while not true():
            if time.monotonic() - began > timeout:
                self.fail(f"it did not come true within {timeout} s")
            time.sleep(0.05)
        return time.monotonic() - began

    def wait_gone(self, timeout: float) -> float:
        """Wait until all processes of the job have ended, and return the seconds."""
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
        """End the remaining processes of the job."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(20)
        if self._keyboard is not None:
            os.close(self._keyboard)


def contention() -> float:
    """Return how many times longer work takes here than on an idle machine, at least 1.

    This is a busy loop's wall time divided by its CPU time. The time limits in tests assume an
    otherwise idle machine.
    """
    wall, cpu = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu < 0.2:
        pass
    return max(1.0, (time.perf_counter() - wall) / (time.thread_time() - cpu))


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, and check that the last line is complete."""
    text = (run / METRICS).read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def steps_done(run: Path) -> int:
    return len((run / METRICS).read_text().splitlines()) if (run / METRICS).exists() else 0


def checkpoints(run: Path) -> list[int]:
    """Return the steps that have a checkpoint folder."""
    return [
        number
        for path in step_folders(run / CHECKPOINTS)
        if (number := step_of(path.name)) is not None
    ]


def copy_run(run: Path, to: Path) -> Path:
    shutil.copytree(run, to, symlinks=True)
    return to


def in_mounts(script: str) -> list[str]:
    """Return the prefix that runs a command in a separate mount namespace after `script` has
    changed the mounts there.
    """
    if (
        os.geteuid() != 0
        or not shutil.which("unshare")
        or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs root and util-linux's unshare to mount")
    # Search here, whatever PATH the command itself receives.
    programs = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    return [
        str(shutil.which("unshare")),
        "-m",
        "/bin/sh",
        "-ec",
        f'own=$PATH PATH={programs}\n{script}\nPATH=$own\nexec "$@"',
        "sh",
    ]
