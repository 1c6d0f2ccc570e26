"""Checks of a host before a run starts: versions, compilers and memory.

The module also contains the checks that every rank makes at its start. It imports no heavy package.
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

from ..plan import RunPlan
from ..spec.errors import Problem
from . import op_cache
from .accounts import check_wandb_disabled, check_wandb_installed
from .findings import Findings, ReportRow
from .flash_attention import check_flash_attention
from .gpus import check_gpu_of_rank, check_torch_sees_gpus
from .ops import check_ops, check_torch_compile
from .ports import check_master_port
from .torch_builds import gpus_in_use
from .transformers_release import check_transformers_release


def check_package_versions(pins: list[str]) -> Findings:
    """Compare the installed packages with `pins`, the NAME==VERSION lines of requirements.txt."""
    yield ReportRow("python", platform.python_version())
    matching = 0
    for name, pinned in (pin.split("==") for pin in pins):
        try:
            found = version(name).split("+")[0]  # remove torch's suffix, as in 2.13.0+cpu
        except PackageNotFoundError:
            found = "not installed"
        matching += found == pinned
        if name == "transformers" and found not in (pinned, "not installed"):
            yield from _check_other_transformers(found)
        elif found != pinned:
            yield Problem(
                f"{name} {found}",
                f"requirements.txt pins {pinned}",
                f"run: pip install {name}=={pinned}",
            )
        elif lost := [
            module for module in _import_names_of(name) if importlib.util.find_spec(module) is None
        ]:
            matching -= 1
            yield Problem(
                f"{name} {found}",
                f"is recorded as installed, but its file {lost[0]} is missing",
                f"run: pip install --force-reinstall --no-deps {name}=={pinned}",
            )
    compared = f"{matching} of {len(pins)} as requirements.txt pins them"
    yield ReportRow("packages", compared if pins else "not compared: no requirements.txt")


def _check_other_transformers(found: str) -> Findings:
    """Report a release of transformers that is not the pinned one: several releases are tested."""
    problems, lines = check_transformers_release()
    yield from problems
    if not problems:
        said = "; ".join(lines) or f"{found}, a supported release"
        yield ReportRow("transformers", said)


def _import_names_of(name: str) -> list[str]:
    """Return the names under which an installed package can be imported."""
    return (distribution(name).read_text("top_level.txt") or name.replace("-", "_")).split()


def check_start(plan: RunPlan) -> list[Problem]:
    """Find problems that would prevent a rank from starting on this host.

    The check takes seconds. It detects GPUs that are missing or invisible to torch, a port that is
    in use, ops that cannot be compiled, and problems with W&B.
    """
    return [
        *check_torch_sees_gpus(),
        *check_gpu_of_rank(plan.command.local_rank),
        *check_master_port(plan.command.rank),
        *check_ops(plan.ds_config),
        *check_flash_attention(plan.recipe.attention, gpus_in_use()),
        *(check_torch_compile(gpus_in_use()) if plan.recipe.compile == "on" else []),
        *check_wandb_disabled(plan.recipe.wandb, plan.command.typed),
        *check_wandb_installed(plan.recipe.wandb, plan.command.typed),
    ]


def check_compile_readiness(config: dict[str, Any] | None) -> Findings:
    """Check the requirements for compiling a JSON's ops.

    Also find locks that a killed compile left behind.
    """
    yield from check_ops(config) if config else []
    for left, who in op_cache.leftover_locks(op_cache.find_op_folder()):
        if who or not _is_open_in_any_process(left):
            why = (
                f"on {who} that was killed (nothing has changed beside it since)"
                if who
                else "that was killed (no process of this host has it open)"
            )
            yield Problem(
                f"{left}, {_format_age(left)} old",
                f"is left over from a compile {why}, and every later compile waits for it",
                f"run: rm -f {left}",
            )


def _is_open_in_any_process(path: Path) -> bool:
    """Return True if a process on this host has the file open.

    This detects a live compile, since torch 2.13 keeps its lock file open while compiling
    (FileBaton).
    """
    wanted = path.stat()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.samestat(link.stat(), wanted):
                return True
    return False


def _format_age(path: Path) -> str:
    minutes = max(0.0, time.time() - path.stat().st_mtime) / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the free memory in bytes on this host, or in this process's container.

    Return None if it is unknown.
    """
    found = re.search(r"MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text())
    free = [int(found[1]) * 1024] if found else []
    groups = root / "sys/fs/cgroup"
    for limit, used, files in (
        (groups / "memory.max", groups / "memory.current", groups / "memory.stat"),
        # Paths for cgroup version 1.
        (
            groups / "memory/memory.limit_in_bytes",
            groups / "memory/memory.usage_in_bytes",
            groups / "memory/memory.stat",
        ),
    ):
        with contextlib.suppress(OSError, ValueError):  # the limit is "max", or the file is missing
            # This is cache that the kernel frees when memory is needed.
            kept = re.search(r"^(?:total_)?inactive_file (\d+)$", files.read_text(), re.M)
            free.append(
                int(limit.read_text()) - int(used.read_text()) + (int(kept[1]) if kept else 0)
            )
    return min(free, default=None)
