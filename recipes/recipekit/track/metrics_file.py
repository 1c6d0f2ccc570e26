"""Reading and writing of metrics.jsonl.

The file contains one line per step, and each step once. The disk may be full, or damaged by a power
failure.
"""

import contextlib
import os
from pathlib import Path

from ..spec.atomic_write import atomic_path
from ..spec.errors import Say
from ..spec.run_folder import parsed_line


def truncate_metrics(path: Path, last_step: int) -> str:
    """Remove the lines after `last_step` and the lines that a crash has damaged.

    Return a message about lost steps, or "".
    """
    kept: list[int] = []
    with atomic_path(path) as made, made.open("wb") as out:
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
            complete = line.rstrip(b"\r\n") + b"\n"  # the last line may lack its line break
            step = parsed_line(complete).get("step", 0)
            if (kept[-1] if kept else 0) < step <= last_step:
                out.write(complete)
                kept.append(step)
    lost = sorted({*range(kept[0], last_step + 1)} - {*kept}) if kept else []
    if not lost:
        return ""
    steps = (
        f"step {lost[0]}" if len(lost) == 1 else f"{len(lost)} steps (the first is step {lost[0]})"
    )
    return f"{path}: the lines of {steps} are missing or damaged. The run continues without them"


class MetricsFile:
    """Writer of metrics.jsonl.

    If a line cannot be written, it is kept in memory and written later.
    """

    def __init__(self, path: Path, say: Say):
        self._path, self._say = path, say
        self._file: int | None = None  # file descriptor
        self._unwritten = b""
        self._failing = False

    def add(self, line: str) -> None:
        """Write a line, after any lines that could not be written before.

        A failure is reported once. OSError is never raised.
        """
        self._unwritten += line.encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if not self._failing:
                self._say(
                    f"{self._path} cannot be written ({error.strerror}): its lines are kept in"
                    " memory and written later"
                )
            self._failing = True

    def amend(self, more: str) -> None:
        """Add `more`, JSON members such as '"save_stall_s": 1.5', to the last line.

        If writing to the disk fails, the line remains unchanged.
        """
        ending = f", {more}}}\n".encode()
        if self._unwritten:
            self._unwritten = self._unwritten.removesuffix(b"}\n") + ending
            return
        with contextlib.suppress(OSError), self._path.open("rb+") as file:
            file.seek(-2, os.SEEK_END)
            if file.read() == b"}\n":
                file.seek(-2, os.SEEK_END)
                file.write(ending)

    def go_back(self, last_step: int) -> None:
        """Remove the lines after `last_step`. Raises OSError if this fails.

        Lines in memory are later ones, because a checkpoint is written only after a flush.
        """
        self._unwritten = b""
        self._close()  # the file is replaced by another
        if lost := truncate_metrics(self._path, last_step):
            self._say(lost)

    def flush(self) -> None:
        """Flush every line to the disk. Raises OSError if this fails."""
        self._write()
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """Write the remaining lines, if the disk accepts them."""
        try:
            self._write()
        except OSError as error:
            number = self._unwritten.count(b"\n")
            self._say(
                f"{self._path}: {number} lines are lost ({error.strerror}). The steps after the"
                " newest checkpoint are trained again"
            )
        self._close()

    def _write(self) -> None:
        try:
            while self._unwritten:
                if self._file is None:
                    self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                # Each line is one write, so a SIGKILL cannot split it. A full disk may accept only
                # the beginning of a line.
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except OSError:
            self._close()  # a stale NFS handle never becomes valid again
            raise
        if self._failing:
            self._failing = False
            self._say(f"{self._path} is written again, and no line is lost")

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)
