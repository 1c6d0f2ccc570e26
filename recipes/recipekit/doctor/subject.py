"""Resolves the run that the doctor examines, as this host would start it, and examines this host
for that run.
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
from ..hosts.findings import Findings, existing
from ..plan import Plan, make_plan
from ..spec.command import Command, parse, recipe_of
from ..spec.refusal import Problem, Refusal
from . import fabric, folders


class Slot(NamedTuple):
    """Describes this process among all ranks, as its launcher says."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int


class Subject(NamedTuple):
    """Holds the run that is examined.

    `plan` is None without a recipe, or if the recipe was refused for `problems`.
    """

    out: Path
    command: Command | None
    plan: Plan | None
    problems: list[Problem]
    config: dict[str, Any]  # the JSON, resolved where there is a plan


def read_subject(
    recipe: Path | None, flags: list[str], out: Path | None, world: int | None, slot: Slot
) -> Subject:
    """Resolves a run as a start of its recipe would on this host; `world` is the number of its
    ranks, None for the number of examined ranks.

    Raises `Refusal` for a wrong command line only.
    """
    if not recipe:
        return Subject(out or Path("runs"), None, None, [], {})
    try:
        command = parse(recipe_of(recipe), recipe, [*flags, *(["--out", str(out)] if out else [])])
    except Refusal as refusal:
        if refusal.exit_code == 2:
            raise
        return Subject(out or Path("runs"), None, None, refusal.problems, {})
    command = dataclasses.replace(
        command, world=world or slot.world, rank=slot.rank, local_rank=slot.local_rank
    )
    try:
        out = command.out
    except Refusal as refusal:
        return Subject(Path("runs"), command, None, refusal.problems, {})
    config: dict[str, Any] = {}
    with contextlib.suppress(Refusal):  # `make_plan` reports what is wrong with the JSON
        config = (
            json_file.load(command.recipe.ds_config, command.folder)[0]
            if command.recipe.engine == "deepspeed"
            else {}
        )
    try:
        plan = make_plan(command)
        return Subject(out, command, plan, [], plan.ds_config)
    except Refusal as refusal:
        return Subject(out, command, None, refusal.problems, config)
    except PermissionError as error:
        problem = Problem(
            str(error.filename),
            "cannot be read: Permission denied",
            "let this user read it, or choose another",
        )
        return Subject(out, command, None, [problem], config)


def swap_folder(plan: Plan | None) -> Path | None:
    """Returns the folder that a plan swaps to, None if the plan swaps nothing."""
    zero = plan.ds_config["zero_optimization"] if plan else {}
    found = [
        zero[block]["nvme_path"]
        for block in ("offload_optimizer", "offload_param")
        if zero.get(block, {}).get("device") == "nvme"
    ]
    return Path(found[0]) if found else None


def examine_host(
    subject: Subject, slot: Slot, mark: str | None, master_port: int, pins: list[str]
) -> Findings:
    """Looks at everything that can be found out on this host alone.

    `mark` is a file that rank 0 left in the run folder.
    """
    recipe = (
        subject.plan.recipe if subject.plan else subject.command.recipe if subject.command else None
    )
    yield from checks.check_versions(pins)
    yield from gpus.check_devices(slot.local_world)
    yield from checks.check_toolchain(subject.config)
    if local_gpus():
        yield from fabric.check_adapters(slot.world > slot.local_world)
    yield from folders.check_out(subject.out, mark)
    yield from subject.problems
    if folder := swap_folder(subject.plan):
        yield from folders.check_drive(folder)
    if slot.rank == 0:  # rank 0 alone records the run and opens the port
        wanted, typed = (
            recipe is None or recipe.wandb,
            subject.command.typed if subject.command else frozenset[str](),
        )
        yield from accounts.check_wandb_disabled(wanted, typed)
        yield from accounts.check_wandb(wanted)
        yield from ports.check_port(master_port)
    yield from accounts.check_hub(
        None
        if recipe is None
        or recipe.init == "random"
        or is_local(recipe.model, recipe.model_revision)
        else recipe.model
    )


def local_gpus() -> list[int]:
    """Lists the numbers of the GPUs of this host's ranks, in their order."""
    try:
        return [gpu.number for gpu in gpus.gpus()]
    except OSError:
        return []  # `check_devices` reports that


def room(subject: Subject) -> dict[str, int]:
    """Counts the bytes that are free on this host: place -> bytes."""
    folder, memory = swap_folder(subject.plan), checks.free_memory()
    return (
        {"out": _free(subject.out)}
        | ({"host": memory} if memory is not None else {})
        | ({"NVMe": _free(folder)} if folder else {})
    )


def _free(folder: Path) -> int:
    status = os.statvfs(existing(folder))
    return status.f_bavail * status.f_frsize


@contextlib.contextmanager
def left_mark(out: Path, id: str) -> Iterator[str | None]:
    """Leaves a file in the run folder (or the nearest one above it) by which other hosts recognise
    the folder.

    Yields the file's name, None if the file cannot be made.
    """
    path = existing(out) / f".doctor_{id}"
    try:
        path.touch()
    except OSError:
        yield None  # `check_out` reports why
        return
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)
