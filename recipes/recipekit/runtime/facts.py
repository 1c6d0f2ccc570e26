"""Collects the facts of a run: run.json, its layout, the arithmetic of its model."""

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..dslint.numbers import enabled
from ..hosts.build_facts import build_facts, versions
from ..kernels import deterministic
from ..model.adapter import config_of
from ..model.build import Built
from ..model.card import BASE_LICENSE, license_of
from ..model.empty import empty_model
from ..model.flops import CONVENTION, Flops, model_flops
from ..parallel.blueprint import Blueprint, Layout
from ..plan import Plan
from ..planner.show import activations_of, drawn_up, fullest
from ..planner.terms import ACCELERATOR, total
from ..spec.devices import DEVICES
from ..spec.engine import Engine
from ..spec.optimizer_specs import by_matrix, facts_of, family_of, states_of
from ..spec.run_folder import ADAPTER, COMMITS, DATA_FILES, FACTS, STRATEGY, identity
from ..spec.task_specs import PACKED, Facts
from ..spec.whole_file import write_whole


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory of this rank in bytes: on a device what its allocator reserved, which
    a full device runs out of; on a CPU the resident size.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def layout_of(plan: Plan, engine: Engine, built: Built) -> Layout:
    """Describes how this job holds the model, for its checkpoints."""
    zero, optimizer = plan.ds_config["zero_optimization"], engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    model: Any = engine.module
    swapper = getattr(optimizer, "optimizer_swapper", None)
    swap = (
        {
            "swap_bytes": swapper.min_aio_bytes,
            "swap_align": swapper.aligned_bytes,
            "swap_first": min(p.ds_id for p in model.parameters()),
        }
        if swapper
        else {}
    )
    return Layout(
        mesh=plan.mesh,
        zero_stage=zero["stage"],
        optimizer="torch"
        if isinstance(optimizer, torch.optim.Optimizer)
        else type(optimizer).__name__,
        dtype="bfloat16"
        if enabled(plan.ds_config, "bf16")
        else "float16"
        if enabled(plan.ds_config, "fp16")
        else "float32",
        bounds=built.split.bounds if built.split else (),
        schedule=plan.recipe.pipeline_schedule if built.split else "1f1b",
        sub_group_size=int(zero.get("sub_group_size", 1_000_000_000)),
        int_step=type(inner).__module__.startswith("deepspeed"),
        swapped=swapper is not None,
        algorithm=family_of(plan.ds_config),
        states=states_of(plan.ds_config),
        of_matrices=states_of(plan.ds_config, matrix=True) if by_matrix(plan.ds_config) else None,
        scalars=facts_of(plan.ds_config).scalars,
        **swap,
    )


def parameter_counts(engine: Engine, blueprint: Blueprint) -> str:
    """Return how many parameters are trained, and of how many; of a sharded model also for the
    fullest rank (a collective).
    """
    parameters = [tensor for tensor in blueprint.tensors if not tensor.buffer]
    numel = sum(tensor.numel for tensor in parameters)
    trained = sum(tensor.numel for tensor in parameters if tensor.group is not None)

    own = [
        (_held_numel(parameter), parameter.requires_grad)
        for parameter in engine.module.parameters()
    ]
    held = [sum(count for count, _ in own), sum(count for count, is_trained in own if is_trained)]
    most = torch.tensor(held, dtype=torch.int64, device=engine.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    text = f"trainable {short(trained)} of {short(numel)} parameters"
    if int(most[0]) >= numel:
        return text
    return f"{text}, on each rank at most {short(int(most[1]))} of {short(int(most[0]))}"


def _held_numel(parameter: Any) -> int:
    """Return how many elements of a parameter this rank holds, under ZeRO-3 and FSDP2 the elements
    of its shard.
    """
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None:
        shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return shard.numel()


def short(count: int) -> str:
    """Write a count with two or three digits, as 1.24 B, 4.2 M or 85.1 k."""
    for unit, name, digits in ((10**9, "B", 2), (10**6, "M", 1), (10**3, "k", 1)):
        if count >= unit:
            return f"{count / unit:.{digits}f} {name}"
    return str(count)


def step_flops(
    model_config: dict[str, Any],
    attention: str,
    name: str,
    task: Facts,
    adapt: Callable[[Any], Any] | None = None,
) -> Flops | None:
    """Counts the FLOPs of a step; None for a model with layers that cannot be counted."""
    model = empty_model(model_config, attention, name, auto_class=task.auto_class)
    flops = model_flops(
        adapt(model) if adapt is not None else model, PACKED if task.of_tokens else task.rows
    )
    return replace(flops, both_ways=task.masked) if flops else None


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def export_dtype(plan: Plan, model_config: dict[str, Any]) -> torch.dtype:
    """Returns the source model's dtype, or the training dtype for a model trained from scratch."""
    if plan.recipe.init == "random":
        return torch.bfloat16 if plan.precision == "bf16" else torch.float32
    return getattr(torch, model_config.get("dtype") or model_config.get("torch_dtype") or "float32")


def run_facts(
    plan: Plan, model_config: dict[str, Any], built: Built, commits: dict[str, Any]
) -> dict[str, Any]:
    """Collect everything that made this run, as run.json holds it."""
    recipe = {
        name: value
        for name, value in vars(plan.recipe).items()
        if isinstance(value, (str, int, float, bool))
    }
    return {
        "recipe": recipe | {"name": plan.command.name, "tiny": plan.command.tiny},
        "identity": identity(
            replace(plan.recipe, **plan.command.revisions), plan.model_config, built.has_norms
        )
        | {ADAPTER: config_of(built.model)},
        "mesh": vars(plan.mesh) | {"world": plan.mesh.world, "name": str(plan.mesh)},
        "ds_config": plan.ds_config,
        "model_config": model_config,
        "versions": versions(),
        "build": build_facts(),
        "git_commit": git_commit(plan.command.folder),
        COMMITS: commits,
        BASE_LICENSE: license_of(plan.recipe.model, plan.recipe.model_revision)
        if plan.recipe.init == "pretrained"
        else {},
        "host": {
            "name": platform.node(),
            "cpus": os.cpu_count(),
            "devices": torch.cuda.device_count(),
            "device": device_name(),
        },
        "deterministic": deterministic.check_in_force() if plan.recipe.deterministic else None,
        "mfu": {"convention": CONVENTION, "peak": DEVICES[device_name()].flops}
        if device_name() in DEVICES
        else None,
        "argv": sys.argv,
    }


def planned_memory(plan: Plan) -> dict[str, int] | None:
    """Return the bytes that the planner expects on the device of the fullest rank; None for a model
    whose config.json was not known before the start.
    """
    if plan.model_config is None:
        return None
    terms, activations = fullest(plan, *drawn_up(plan)), activations_of(plan)
    found = {"states": total(terms, ACCELERATOR)}
    return found | (
        {"with_activations": total([*terms, *activations], ACCELERATOR, bounds=True)}
        if activations
        else {}
    )


def git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out; None in a folder without a repository, and on a
    machine without git.
    """
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False
        )
    except OSError:  # no git on PATH, or one that may not be run
        return None
    return done.stdout.strip() or None


def write_facts(plan: Plan, facts: dict[str, Any], files: dict[str, dict[str, str]]) -> None:
    """Writes run.json, the resolved JSON (any `--deepspeed_config` accepts it) and the digests of
    the data files.
    """
    plan.out.mkdir(parents=True, exist_ok=True)
    written = {
        STRATEGY: json.dumps(plan.ds_config, indent=2),
        DATA_FILES: json.dumps(files, indent=0),
        FACTS: json.dumps(facts, indent=1),
    }
    for name, content in written.items():
        write_whole(plan.out / name, content)
