"""Metadata of a run: run.json, the parallel layout, and the parameter counts of the model."""

import json
import os
import platform
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..dslint.numbers import is_block_enabled
from ..hosts.build_info import collect_build_info, package_versions
from ..kernels import deterministic
from ..model.adapter import adapter_config_of
from ..model.build import BuiltModel
from ..model.card import BASE_LICENSE, license_of
from ..model.flops import CONVENTION
from ..parallel.blueprint import Blueprint, Layout
from ..plan import RunPlan
from ..spec.atomic_write import write_atomic
from ..spec.devices import DEVICES
from ..spec.engine import Engine
from ..spec.optimizer_specs import (
    has_matrix_rule,
    optimizer_family,
    optimizer_spec_of,
    optimizer_states,
)
from ..spec.run_folder import (
    ADAPTER_KEY,
    COMMITS_KEY,
    DATA_FILES,
    EARLIER_VERSIONS,
    MODEL_PLAN,
    RUN_JSON,
    STRATEGY,
    read_run_json,
    run_identity,
)


def peak_memory(device: torch.device) -> int:
    """Return this rank's peak memory in bytes.

    On a device this is the memory that the allocator has reserved, because reserved memory is what
    runs out. On a CPU it is the resident size.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def checkpoint_layout(plan: RunPlan, engine: Engine, built: BuiltModel) -> Layout:
    """Return the layout in which this job shards the model, for its checkpoints."""
    zero, optimizer = plan.ds_config["zero_optimization"], engine.optimizer
    planned = built.model_plan.layout
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
        mesh=planned.mesh,
        zero_stage=zero["stage"],
        optimizer="torch"
        if isinstance(optimizer, torch.optim.Optimizer)
        else type(optimizer).__name__,
        dtype="bfloat16"
        if is_block_enabled(plan.ds_config, "bf16")
        else "float16"
        if is_block_enabled(plan.ds_config, "fp16")
        else "float32",
        bounds=planned.bounds,
        schedule=planned.schedule if planned.bounds else "1f1b",
        sub_group_size=int(zero.get("sub_group_size", 1_000_000_000)),
        int_step=type(inner).__module__.startswith("deepspeed"),
        swapped=swapper is not None,
        algorithm=optimizer_family(plan.ds_config),
        states=optimizer_states(plan.ds_config),
        of_matrices=optimizer_states(plan.ds_config, matrix=True)
        if has_matrix_rule(plan.ds_config)
        else None,
        scalars=optimizer_spec_of(plan.ds_config).scalars,
        **swap,
    )


def parameter_counts(engine: Engine, blueprint: Blueprint) -> str:
    """Return a text with the number of trainable parameters and the total (a collective).

    For a sharded model, the text also contains both numbers for the rank with the most parameters.
    """
    parameters = [tensor for tensor in blueprint.tensors if not tensor.buffer]
    numel = sum(tensor.numel for tensor in parameters)
    trained = sum(tensor.numel for tensor in parameters if tensor.group is not None)

    own = [
        (_local_numel(parameter), parameter.requires_grad)
        for parameter in engine.module.parameters()
    ]
    held = [sum(count for count, _ in own), sum(count for count, is_trained in own if is_trained)]
    most = torch.tensor(held, dtype=torch.int64, device=engine.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    text = f"trainable {short_count(trained)} of {short_count(numel)} parameters"
    if int(most[0]) >= numel:
        return text
    return (
        f"{text}, on each rank at most {short_count(int(most[1]))} of {short_count(int(most[0]))}"
    )


def _local_numel(parameter: torch.nn.Parameter) -> int:
    """Return how many elements of a parameter this rank stores.

    Under ZeRO-3 and FSDP2 these are the elements of the rank's shard.
    """
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None:
        shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return shard.numel()


def short_count(count: int) -> str:
    """Format a count with two or three digits, for example 1.24 B, 4.2 M or 85.1 k."""
    for unit, name, digits in ((10**9, "B", 2), (10**6, "M", 1), (10**3, "k", 1)):
        if count >= unit:
            return f"{count / unit:.{digits}f} {name}"
    return str(count)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def export_dtype(plan: RunPlan, model_config: dict[str, Any]) -> torch.dtype:
    """Return the source model's dtype, or the training dtype for a model trained from scratch."""
    if plan.recipe.init == "random":
        return torch.bfloat16 if plan.precision == "bf16" else torch.float32
    return getattr(torch, model_config.get("dtype") or model_config.get("torch_dtype") or "float32")


def collect_run_metadata(
    plan: RunPlan, built: BuiltModel, commits: dict[str, Any]
) -> dict[str, Any]:
    """Return everything that defines this run, in the format of run.json."""
    model_plan, asked = built.model_plan, replace(plan.recipe, **plan.command.revisions)
    recipe = {
        name: value
        for name, value in vars(plan.recipe).items()
        if isinstance(value, (str, int, float, bool))
    }
    return {
        "recipe": recipe | {"name": plan.command.name, "tiny": plan.command.tiny},
        "identity": run_identity(asked, plan.model_config, model_plan.has_batch_norm)
        | {ADAPTER_KEY: adapter_config_of(built.model)},
        "mesh": vars(plan.mesh) | {"world": plan.mesh.world, "name": str(plan.mesh)},
        "ds_config": plan.ds_config,
        "model_config": model_plan.model_config,
        MODEL_PLAN: model_plan.as_json(),
        "versions": package_versions(),
        "build": collect_build_info(),
        "git_commit": git_commit(plan.command.folder),
        COMMITS_KEY: commits,
        BASE_LICENSE: license_of(plan.recipe.model, plan.recipe.model_revision)
        if plan.recipe.init == "pretrained"
        else {},
        "host": {
            "name": platform.node(),
            "cpus": os.cpu_count(),
            "devices": torch.cuda.device_count(),
            "device": device_name(),
        },
        "deterministic": deterministic.check_active_settings()
        if plan.recipe.deterministic
        else None,
        "mfu": {"convention": CONVENTION, "peak": DEVICES[device_name()].flops}
        if device_name() in DEVICES
        else None,
        "argv": sys.argv,
    }


def earlier_versions(out: Path, step: int, versions: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the package versions of earlier starts in a run folder, the oldest first.

    Each entry has `versions` and `until_step`, the last step with them. `versions` are the ones of
    this start, which continues after `step`. Only a start with different versions adds an entry.
    """
    if not step:
        return []
    before = read_run_json(out)
    found = before.get(EARLIER_VERSIONS)
    entries = found if isinstance(found, list) else []
    last = before.get("versions", versions)
    return entries if last == versions else [*entries, {"until_step": step, "versions": last}]


def changed_versions(entries: list[dict[str, Any]], versions: dict[str, Any], step: int) -> str:
    """Return a note for a start with other versions than the last one, or ""."""
    if not entries or entries[-1]["until_step"] != step:
        return ""
    before = entries[-1]["versions"]
    changes = [
        f"{name} {before.get(name)} until step {step}, {now} from now on"
        for name, now in versions.items()
        if before.get(name) != now
    ]
    return f"note: {'; '.join(changes)}"


def git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder.

    The result is None if the folder has no repository or the machine has no git.
    """
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False
        )
    except OSError:  # no git on PATH, or it is not executable
        return None
    return done.stdout.strip() or None


def write_run_metadata(
    plan: RunPlan, facts: dict[str, Any], files: dict[str, dict[str, str]]
) -> None:
    """Write run.json, the resolved DeepSpeed JSON and the digests of the data files.

    The resolved JSON is a valid argument for `--deepspeed_config`.
    """
    plan.out.mkdir(parents=True, exist_ok=True)
    written = {
        STRATEGY: json.dumps(plan.ds_config, indent=2),
        DATA_FILES: json.dumps(files, indent=0),
        RUN_JSON: json.dumps(facts, indent=1),
    }
    for name, content in written.items():
        write_atomic(plan.out / name, content)
