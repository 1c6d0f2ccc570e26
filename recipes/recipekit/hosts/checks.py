"""Checks a host before a run starts: versions, compilers, memory, and what every rank checks at its
start.

Imports nothing heavy.
"""

import contextlib
import importlib.util
import os
import platform
import re
import time
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from ..plan import Plan
from ..spec.refusal import Problem
from . import op_cache
from .accounts import check_wandb_disabled, check_wandb_installed
from .findings import Findings, Row
from .gpus import check_gpus_seen, check_ordinal
from .ops import check_ops, check_torch_compile
from .ports import check_master_port
from .torch_builds import gpus_in_use


def check_versions(pins: list[str]) -> Findings:
    """Compare the installed packages with `pins`, lines NAME==VERSION of requirements.txt."""
    yield Row("python", platform.python_version())
    matching = 0
    for name, pinned in (pin.split("==") for pin in pins):
        try:
            found = version(name).split("+")[0]  # without torch's suffix: 2.13.0+cpu
        except PackageNotFoundError:
            found = "not installed"
        matching += found == pinned
        if found != pinned:
            yield Problem(
                f"{name} {found}",
                f"requirements.txt pins {pinned}",
                f"run: pip install {name}=={pinned}",
            )
        elif lost := [
            module for module in _modules(name) if importlib.util.find_spec(module) is None
        ]:
            matching -= 1
            yield Problem(
                f"{name} {found}",
                f"is recorded as installed, but its file {lost[0]} is missing",
                f"run: pip install --force-reinstall --no-deps {name}=={pinned}",
            )
    yield Row("packages", f"{matching} of {len(pins)} as requirements.txt pins them")


def _modules(name: str) -> list[str]:
    """Returns the names under which an installed package is imported."""
    return (distribution(name).read_text("top_level.txt") or name.replace("-", "_")).split()


def check_start(plan: Plan) -> list[Problem]:
    """Finds in seconds what keeps a rank from starting on this host: unseen or missing GPUs, a
    taken port, ops that cannot be compiled, W&B.
    """
    return [
        *check_gpus_seen(),
        *check_ordinal(plan.command.local_rank),
        *check_master_port(plan.command.rank),
        *check_ops(plan.ds_config),
        *(check_torch_compile(gpus_in_use()) if plan.recipe.compile == "on" else []),
        *check_wandb_disabled(plan.recipe.wandb, plan.command.typed),
        *check_wandb_installed(plan.recipe.wandb, plan.command.typed),
    ]


def check_toolchain(config: dict[str, Any] | None) -> Findings:
    """Checks what compiling the ops of a JSON takes, and finds locks that a killed compile has
    left.
    """
    yield from check_ops(config) if config else []
    for left, who in op_cache.left_over(op_cache.folder()):
        if who or not _open_somewhere(left):
            why = (
                f"on {who} that was killed (nothing has changed beside it since)"
                if who
                else "that was killed (no process of this host has it open)"
            )
            yield Problem(
                f"{left}, {_age(left)} old",
                f"is left over from a compile {why}, and every later compile waits for it",
                f"run: rm -f {left}",
            )


def _open_somewhere(path: Path) -> bool:
    """Returns True if a process of this host has the file open: torch 2.13 holds its lock open
    while it compiles (FileBaton).
    """
    wanted = path.stat()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.samestat(link.stat(), wanted):
                return True
    return False


def _age(path: Path) -> str:
    minutes = max(0.0, time.time() - path.stat().st_mtime) / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def free_memory(root: Path = Path("/")) -> int | None:
    """Reads how many bytes this host, or this process's container, can still give to processes;
    None: not known.
    """
    found = re.search(r"MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text())
    free = [int(found[1]) * 1024] if found else []
    groups = root / "sys/fs/cgroup"
    for limit, used, files in (
        (groups / "memory.max", groups / "memory.current", groups / "memory.stat"),
        # version 1
        (
            groups / "memory/memory.limit_in_bytes",
            groups / "memory/memory.usage_in_bytes",
            groups / "memory/memory.stat",
        ),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such limit: "max", or no file
            # cache that the kernel gives back when memory is needed
            kept = re.search(r"^(?:total_)?inactive_file (\d+)$", files.read_text(), re.M)
            free.append(
                int(limit.read_text()) - int(used.read_text()) + (int(kept[1]) if kept else 0)
            )
    return min(free, default=None)
