"""Checkpoint loading: finding the newest complete checkpoint, and loading it into an engine."""

import json
import random
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..parallel.blueprint import Blueprint, Layout, Tensor, weight_dtype
from ..parallel.groups import long_wait_group
from ..spec.cores import usable_cores
from ..spec.engine import Engine
from ..spec.errors import ConfigError, Say, config_error
from ..spec.run_folder import CHECKPOINTS
from ..spec.step_names import is_step_folder, step_folders
from ..storage import copying, error_feedback, manifest
from ..storage.manifest import BLUEPRINT_FILE, STATE_FILE
from .deepspeed_io import read_pickle
from .reshape import reshape
from .state import SavedState, TrainState
from .step_folder import EXPERTS_NOT_DESCRIBED


def newest_verified(path: Path, say: Say) -> Path | None:
    """Return a run's newest complete and verified step folder, or None.

    If `path` is a step folder, only that folder is checked. This is a collective operation, because
    the ranks share the work. `say` receives one line for each folder that is skipped.
    """
    is_run = (path / CHECKPOINTS).is_dir() or not is_step_folder(path)
    steps: list[Any] = [step_folders(path / CHECKPOINTS)[::-1] if is_run else [path]]
    dist.broadcast_object_list(steps)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in steps[0]:
        names, extra = list[str](), list[str]()
        with suppress(ValueError):
            listed = manifest.read_manifest(step)
            names, extra = (
                sorted(listed["files"]),
                manifest.unlisted_notice(step, manifest.unlisted_files(step, listed)),
            )
        everyone: list[Any] = [None] * world
        dist.all_gather_object(
            everyone, manifest.find_faults(step, names[rank::world]), group=long_wait_group()
        )
        faults = list(dict.fromkeys(fault for own in everyone for fault in own))
        if not faults:
            for line in extra:
                say(line)
            return step
        say(
            f"checkpoint {step} is damaged, passed over: {faults[0]}"
            + (f" (and {len(faults) - 1} more)" if len(faults) > 1 else "")
        )
    return None


def check_resumable(step: Path, blueprint: Blueprint, layout: Layout) -> tuple[SavedState, bool]:
    """Return (a step folder's state, True if the folder can be loaded without conversion).

    Raise `ConfigError` if the folder belongs to a different model, or if it cannot be converted.
    """
    state: SavedState = json.loads((step / STATE_FILE).read_text())
    saved = json.loads((step / BLUEPRINT_FILE).read_text())
    was = Layout.from_json(state["layout"])
    same = was == layout
    if state["step"] and (was.algorithm, was.states, was.of_matrices) != (
        layout.algorithm,
        layout.states,
        layout.of_matrices,
    ):
        kept, keeps = (f"{each.algorithm} ({each.states_text})" for each in (was, layout))
        fix = (
            "use the JSON that it was saved with, or start a new run from its weights: recipekit"
            " convert to-hf, then --model"
        )
        raise config_error(
            f"resume from {step}",
            f"contains optimizer states of {kept}, but this run's optimizer is {keeps}",
            fix,
        )
    if saved is None:
        if same:
            return state, True
        rule = (
            f"was written in the layout {was}, not in this run's layout {layout}, and"
            f" {EXPERTS_NOT_DESCRIBED}"
        )
        raise config_error(
            f"resume from {step}",
            rule,
            "resume once with the same ranks, degrees and strategy. A checkpoint that this run"
            " saves can change the layout",
        )
    before = Blueprint.from_json(saved)
    differ = _first_difference(
        before, blueprint, compare_splits=same and layout.mesh.tp > 1, has_stepped=state["step"] > 0
    )
    if differ:
        raise config_error(
            f"resume from {step}",
            f"is from another model: {differ}",
            "use the model that it was saved with, or start a new run with --out NEW",
        )
    error_feedback.check_saved_errors(step, layout, before, blueprint)
    return state, same and _storage(before, layout) == _storage(blueprint, layout)


def _storage(blueprint: Blueprint, layout: Layout) -> list[tuple[int | None, str]]:
    """Return the optimizer group and the dtype of each tensor."""
    return [(tensor.group, weight_dtype(tensor, layout)) for tensor in blueprint.tensors]


def _first_difference(
    saved: Blueprint, now: Blueprint, compare_splits: bool, has_stepped: bool
) -> str:
    """Return the first difference in names, shapes or optimizer groups; "" if all are equal.

    With `compare_splits`, also compare how tensor parallelism splits the tensors. The groups'
    learning rates and dtypes may differ. Before the first step, all values of a group may differ.
    """

    def group(blueprint: Blueprint, tensor: Tensor) -> Any:
        if tensor.group is None or not has_stepped:
            return None if tensor.group is None else "trained"
        return (
            replace(blueprint.groups[tensor.group], lr_scale=1.0, fp32=False).name
            if tensor.group < len(blueprint.groups)
            else tensor.group
        )

    before, after = (
        {
            tensor.name: (
                tensor.shape,
                group(each, tensor),
                *([tensor.cut] if compare_splits else []),
            )
            for tensor in each.tensors
        }
        for each in (saved, now)
    )
    for name in [*before, *after]:
        if before.get(name) != after.get(name):
            return (
                f"{name} is {before.get(name, 'not there')} in the checkpoint and"
                f" {after.get(name, 'not there')} in the model (shape, optimizer"
                f" group{', cut' if compare_splits else ''})"
            )
    return ""


def load_checkpoint(
    engine: Engine, step: Path, blueprint: Blueprint, layout: Layout, scratch: Path, say: Say
) -> TrainState:
    """Load a verified step folder into the engine and this rank's random generators.

    This is a collective operation. Return the folder's state. A step folder with a different layout
    is first converted into the folder `scratch`, which is removed afterwards. The optimizer keeps
    the hyperparameters (betas, eps, weight decay, clipping, ...) of this start. A different
    optimizer can load only a checkpoint of step 0, and loads only its weights.
    """
    state, same = check_resumable(step, blueprint, layout)
    if manifest.listed_files(step, error_feedback.ERROR_FILE_PATTERN):
        error_feedback.check_freeze_step(
            engine.optimizer.param_groups[0]["freeze_step"], state["step"]
        )
    source = step
    if not same:
        source = scratch / step.name
        if dist.get_rank() == 0:
            say(f"converting {step} from {Layout.from_json(state['layout'])} to {layout}")
        _convert_layout(step, source, blueprint, layout)

    before = [dict(group) for group in engine.optimizer.param_groups]
    engine.load_states(source, blueprint, layout, state["step"] > 0)
    _reset_hyperparameters(engine.optimizer.param_groups, before)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    place_step_counts(inner)

    own_errors = source / error_feedback.error_file_name(dist.get_rank())
    error_feedback.restore_errors(inner, read_pickle(own_errors) if own_errors.exists() else None)
    if (generators := source / f"rng_rank_{dist.get_rank()}.pt").exists():
        restore_rng_states(read_pickle(generators))
    dist.barrier(long_wait_group())
    if not same and dist.get_rank() == 0:
        shutil.rmtree(scratch)
    return state


def _convert_layout(step: Path, out: Path, blueprint: Blueprint, layout: Layout) -> None:
    """Convert a step folder to this run's layout on rank 0.

    This is a collective operation. First, clear the folder that contains `out`. Raise `ConfigError`
    on every rank if the conversion fails.
    """
    scratch = out.parent
    failed: list[Any] = [""]
    if dist.get_rank() == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            reshape(step, out, layout, blueprint, copying.Effort(workers=min(8, usable_cores())))
        except (OSError, ConfigError) as error:
            # The error is raised later, because the other ranks wait in the next collective
            # operation.
            failed = [f"cannot be converted in {scratch}: {error}"]
    dist.broadcast_object_list(failed, group=long_wait_group())
    if failed[0]:
        raise config_error(
            f"resume from {step}",
            failed[0],
            "free space there, or start with the layout it was written in",
        )


def _reset_hyperparameters(groups: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Restore the hyperparameters that an optimizer's groups had before a checkpoint was loaded.

    An engine may restore the saved values, although the user may have changed them (--resume PATH).
    After a conversion, it restores only the values that the previous layout's optimizer had.
    """
    for group, own in zip(groups, before, strict=True):
        group.update(
            {
                key: value
                for key, value in own.items()
                if key not in ("params", "lr", "initial_lr", "step") or key not in group
            }
        )


def place_step_counts(optimizer: torch.optim.Optimizer) -> None:
    """Move each step count to the device where the optimizer expects it.

    A fused or capturable step expects the count on the weights' device. All other steps expect the
    count on the host. torch (2.13) places the counts according to its optimizer's saved settings.
    If the count is on the host, a fused step on a GPU fails.
    """
    on_device = any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    for weight, state in optimizer.state.items():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].to(weight.device if on_device else "cpu")


def restore_rng_states(generators: dict[str, Any]) -> None:
    torch.set_rng_state(generators["torch"].clone())
    random.setstate(generators["python"])
    np.random.set_state(generators["numpy"])
    if "cuda" in generators:
        torch.cuda.set_rng_state(generators["cuda"])
