"""Checks the port on which rank 0 lets the other ranks join, and finds free ports."""

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace

from ..spec.refusal import Problem
from .findings import Findings, Row


def check_port(port: int) -> Findings:
    """Checks that the master port, on which rank 0 lets the others join, is free; under torchrun
    the launcher itself holds it.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield Row("master port", f"{port}, held by torchrun")
        return
    try:
        with socket.create_server(("", port)):
            yield Row("master port", f"{port} is free")
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
    """Refuse the port that a launcher named for rank 0 if another program has it.

    Without a launcher, a run takes a free port. A process that has joined its group already may
    hold the port itself.
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
    """Return how the program that started this rank is given another port; deepspeed and torchrun
    overwrite MASTER_PORT.
    """
    if "LAUNCH_LOGS" in variables:
        return "python -m launch --master_port {}"
    if "CROSS_SIZE" in variables:
        return "deepspeed --master_port {}"
    return "torchrun --master_port {}" if "GROUP_WORLD_SIZE" in variables else "MASTER_PORT={}"


def launcher_port(variables: Mapping[str, str]) -> tuple[int, str]:
    """Return a free port for a launcher, and a line about it.

    MASTER_PORT comes first, if it is a free port.
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
    """Finds a port of this machine that no program listens on."""
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def has_joined() -> bool:
    """Return True if this process has a group of torch.distributed, without importing torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _free_port(above: int) -> int:
    """Returns the first free port after `above`."""
    for port in range(above + 1, min(above + 1000, 1 << 16)):
        if _is_free(port):
            return port
    return above


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError, OverflowError), socket.create_server(("", port)):
        return True
    return False
