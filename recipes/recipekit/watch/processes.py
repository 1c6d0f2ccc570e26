"""Processes of this host, from the process table."""

import contextlib
import os
import signal
from pathlib import Path

STOPPED = "Tt"  # states of a process that a signal or a debugger has stopped


def process_state(pid: int) -> tuple[str, str]:
    """Return (state, start time) of a process, or ("", "") if it has ended.

    The state is a letter of /proc/PID/stat. The start time distinguishes the process from a later
    process with the same pid.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # the process has ended, or belongs to another user
        return "", ""
    return ("", "") if fields[0] in "ZX" else (fields[0], fields[19])


def kill_process(pid: int, start_time: str) -> None:
    """Kill a process, unless it has ended and its pid belongs to another process."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if process_state(pid)[1] == start_time:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
