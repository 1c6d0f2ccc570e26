"""The process table of a Linux host.

It provides exit codes, descendants, and processes that an earlier start did not end.
"""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

MARK = "LAUNCH_JOB"  # an environment variable that every process of a job has on one host


def stat(pid: int) -> list[str]:
    """Read the fields of /proc/PID/stat from the third on (state, parent, ...).

    The result is [] if the process is gone.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def exit_code(pid: int) -> int | None:
    """Read the exit code of a process that has ended but was not waited for.

    The code is 0 to 255, or minus the signal number. It is None if a process has already waited for
    it.
    """
    fields = stat(pid)
    return os.waitstatus_to_exitcode(int(fields[49])) if fields and fields[0] == "Z" else None


def code_from(log: Path, pid: int) -> int | None:
    """Read a rank's exit code from the log of torchrun or deepspeed.

    This is needed for a rank for which the launcher waited first.
    """
    time.sleep(1.5)  # deepspeed checks its ranks once a second
    text = log.read_text(errors="replace")
    found = re.findall(rf"exitcode\s*:\s*(-?\d+)\s*\(pid: {pid}\)", text) or re.findall(
        r"exits with return code = (-?\d+)", text
    )
    return int(found[-1]) if found else (0 if f"Process {pid} exits successfully" in text else None)


def descendants(of: int) -> list[int]:
    """List the living descendants of a process, without zombies."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat(int(entry))) and fields[0] != "Z":
            parents[int(entry)] = int(fields[1])
    found = {of}
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return sorted(found - {of})


def end_leftovers(mark: str) -> None:
    """End processes that an earlier start of this job left on this host.

    They remain if the earlier start lost its connection. Without this function they would still
    write to the next start's run folder.
    """
    wanted = f"{MARK}={mark}".encode()
    while True:
        left = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    left.append(int(entry.name))
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
