"""The run that the doctor examines, resolved as a start on this host would resolve it.

The module also contains this host's checks for that run.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..architectures.lookup import is_local
from ..dslint import json_file
from ..hosts import accounts, checks, gpus, ports
from ..hosts.findings import Findings, existing_ancestor
from ..plan import RunPlan, resolve_run
from ..spec.command import RunCommand, parse, recipe_of
from ..spec.errors import ConfigError, Problem
from . import fabric, folders


class RankInfo(NamedTuple):
    """The position of this process among all ranks, as reported by its launcher."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int


class DoctorTarget(NamedTuple):
    """The run that is examined.

    `plan` is None without a recipe, or if the recipe was rejected because of `problems`.
    """

    out: Path
    command: RunCommand | None
    plan: RunPlan | None
    problems: list[Problem]
    config: dict[str, Any]  # the JSON, resolved if there is a plan


def resolve_target(
    recipe: Path | None, flags: list[str], out: Path | None, world: int | None, rank_info: RankInfo
) -> DoctorTarget:
    """Resolve a run in the same way as a start of its recipe on this host.

    `world` is the run's number of ranks, or None for the number of examined ranks. Raises
    `ConfigError` only for a wrong command line.
    """
    if not recipe:
        return DoctorTarget(out or Path("runs"), None, None, [], {})
    try:
        command = parse(recipe_of(recipe), recipe, [*flags, *(["--out", str(out)] if out else [])])
    except ConfigError as refusal:
        if refusal.exit_code == 2:
            raise
        return DoctorTarget(out or Path("runs"), None, None, refusal.problems, {})
    command = dataclasses.replace(
        command,
        world=world or rank_info.world,
        rank=rank_info.rank,
        local_rank=rank_info.local_rank,
    )
    try:
        out = command.out
    except ConfigError as refusal:
        return DoctorTarget(Path("runs"), command, None, refusal.problems, {})
    config: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):  # `resolve_run` reports the errors in the JSON
        config = (
            json_file.load_ds_config(command.recipe.ds_config, command.folder)[0]
            if command.recipe.engine == "deepspeed"
            else {}
        )
    try:
        plan = resolve_run(command)
        return DoctorTarget(out, command, plan, [], plan.ds_config)
    except ConfigError as refusal:
        return DoctorTarget(out, command, None, refusal.problems, config)
    except PermissionError as error:
        problem = Problem(
            str(error.filename),
            "cannot be read: Permission denied",
            "let this user read it, or choose another",
        )
        return DoctorTarget(out, command, None, [problem], config)


def planned_swap_folder(plan: RunPlan | None) -> Path | None:
    """Return the folder to which a plan swaps, or None if the plan swaps nothing."""
    zero = plan.ds_config["zero_optimization"] if plan else {}
    found = [
        zero[block]["nvme_path"]
        for block in ("offload_optimizer", "offload_param")
        if zero.get(block, {}).get("device") == "nvme"
    ]
    return Path(found[0]) if found else None


def examine_host(
    target: DoctorTarget, rank_info: RankInfo, marker: str | None, master_port: int, pins: list[str]
) -> Findings:
    """Run all checks that need only this host.

    `marker` is a file that rank 0 created in the run folder.
    """
    recipe = (
        target.plan.recipe if target.plan else target.command.recipe if target.command else None
    )
    yield from checks.check_package_versions(pins)
    yield from gpus.check_devices(rank_info.local_world)
    yield from checks.check_compile_readiness(target.config)
    if local_gpu_numbers():
        yield from fabric.check_adapters(rank_info.world > rank_info.local_world)
    yield from folders.check_host_out_folder(target.out, marker)
    yield from target.problems
    if folder := planned_swap_folder(target.plan):
        yield from folders.check_nvme_folder(folder)
    if rank_info.rank == 0:  # only rank 0 records the run and opens the port
        wanted, typed = (
            recipe is None or recipe.wandb,
            target.command.typed if target.command else frozenset[str](),
        )
        yield from accounts.check_wandb_disabled(wanted, typed)
        yield from accounts.check_wandb_login(wanted)
        yield from ports.check_port(master_port)
    yield from accounts.check_hub_access(
        None
        if recipe is None
        or recipe.init == "random"
        or is_local(recipe.model, recipe.model_revision)
        else recipe.model
    )


def local_gpu_numbers() -> list[int]:
    """List the GPU indices of this host's ranks, in the order of the ranks."""
    try:
        return [gpu.device_index for gpu in gpus.visible_gpus()]
    except OSError:
        return []  # `check_devices` reports the error


def free_space(target: DoctorTarget) -> dict[str, int]:
    """Return the free bytes on this host: place -> bytes."""
    folder, memory = planned_swap_folder(target.plan), checks.free_memory()
    return (
        {"out": _free_disk_bytes(target.out)}
        | ({"host": memory} if memory is not None else {})
        | ({"NVMe": _free_disk_bytes(folder)} if folder else {})
    )


def _free_disk_bytes(folder: Path) -> int:
    status = os.statvfs(existing_ancestor(folder))
    return status.f_bavail * status.f_frsize


@contextlib.contextmanager
def shared_marker(out: Path, id: str) -> Iterator[str | None]:
    """Create a file by which other hosts can recognize the run folder.
    The file is created in the run folder or in its nearest existing parent. Yields the file's name,
    or None if the file cannot be created.
    """
    path = existing_ancestor(out) / f".doctor_{id}"
    try:
        path.touch()
    except OSError:
        yield None  # `check_host_out_folder` reports the reason
        return
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)
