"""Checks of the master port, where rank 0 accepts the other ranks, and a search for free ports."""

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace

from ..spec.errors import Problem
from .findings import Findings, ReportRow


def check_port(port: int) -> Findings:
    """Check that the master port is free. Under torchrun, the launcher itself occupies the port."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield ReportRow("master port", f"{port}, held by torchrun")
        return
    try:
        with socket.create_server(("", port)):
            yield ReportRow("master port", f"{port} is free")
    except (OSError, OverflowError) as error:
        why = (
            "is in use"
            if getattr(error, "errno", 0) == errno.EADDRINUSE
            else f"cannot be used ({error})"
        )
        yield Problem(
            f"master port {port}",
            f"{why} on {socket.gethostname()}",
            f"choose another with --master_port (`ss -ltnp 'sport = :{port}'` shows who has it)",
        )


def check_master_port(rank: int) -> list[Problem]:
    """Return a problem if a different program uses the port that a launcher chose for rank 0.

    Without a launcher, a run uses a free port. A process that has already joined its group may
    occupy the port itself.
    """
    if rank or "MASTER_PORT" not in os.environ or has_joined():
        return []
    if not (port := os.environ["MASTER_PORT"]).isdigit():
        return [
            Problem(
                f"MASTER_PORT = {port}",
                "is not a valid port",
                "use a port number, or unset it if you start without a launcher",
            )
        ]
    flag = _flag_of_launcher(os.environ).format(_free_port(int(port)))
    fix = f"choose another: {flag} (`ss -ltnp 'sport = :{port}'` shows who has it)"
    return [
        replace(found, fix=fix) for found in check_port(int(port)) if isinstance(found, Problem)
    ]


def _flag_of_launcher(variables: Mapping[str, str]) -> str:
    """Return the flag or variable that sets a different port in the program that started this rank.

    MASTER_PORT alone is not sufficient, because deepspeed and torchrun overwrite it.
    """
    if "LAUNCH_LOGS" in variables:
        return "python -m launch --master_port {}"
    if "CROSS_SIZE" in variables:
        return "deepspeed --master_port {}"
    return "torchrun --master_port {}" if "GROUP_WORLD_SIZE" in variables else "MASTER_PORT={}"


def launcher_port(variables: Mapping[str, str]) -> tuple[int, str]:
    """Return a free port for a launcher, and a line that reports the choice.

    If MASTER_PORT is a free port, it is preferred.
    """
    if not (wanted := variables.get("MASTER_PORT", "").strip()):
        return free_port(), ""
    if wanted.isdecimal() and int(wanted) and _is_free(int(wanted)):
        return int(wanted), f"master port {wanted}, from MASTER_PORT"
    port = free_port()
    return (
        port,
        f"master port {port}, because MASTER_PORT = {wanted} is in use or is not a valid port",
    )


def free_port() -> int:
    """Return a port on which no program listens on this machine."""
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def has_joined() -> bool:
    """Return True if this process has joined a torch.distributed group, without importing torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _free_port(above: int) -> int:
    """Return the first free port after `above`, or `above` if all ports are in use."""
    for port in range(above + 1, min(above + 1000, 1 << 16)):
        if _is_free(port):
            return port
    return above


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError, OverflowError), socket.create_server(("", port)):
        return True
    return False
