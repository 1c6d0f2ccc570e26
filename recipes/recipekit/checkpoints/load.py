"""Finds the newest complete checkpoint, and loads it into an engine."""

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

from ..parallel.blueprint import Blueprint, Layout, Tensor
from ..parallel.groups import waiting_group
from ..spec.cores import usable_cores
from ..spec.engine import Engine
from ..spec.refusal import Refusal, Say, refuse
from ..spec.run_folder import CHECKPOINTS
from ..spec.step_names import is_step_folder, step_folders
from ..storage import copying, errors, manifest
from ..storage.manifest import BLUEPRINT, STATE
from .deepspeed_io import read_pickle
from .reshape import reshape
from .state import SavedState, State
from .step_folder import UNDESCRIBED


def newest(path: Path, say: Say) -> Path | None:
    """Finds the newest complete and verified step folder of a run (`path` itself if it is a step
    folder); None if there is none.

    The ranks share the work (a collective). Calls `say` with one line for each folder that is
    passed over.
    """
    is_run = (path / CHECKPOINTS).is_dir() or not is_step_folder(path)
    steps: list[Any] = [step_folders(path / CHECKPOINTS)[::-1] if is_run else [path]]
    dist.broadcast_object_list(steps)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in steps[0]:
        names, extra = list[str](), list[str]()
        with suppress(ValueError):
            listed = manifest.read(step)
            names, extra = (
                sorted(listed["files"]),
                manifest.say_unlisted(step, manifest.unlisted(step, listed)),
            )
        everyone: list[Any] = [None] * world
        dist.all_gather_object(
            everyone, manifest.faults(step, names[rank::world]), group=waiting_group()
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


def check(step: Path, blueprint: Blueprint, layout: Layout) -> tuple[SavedState, bool]:
    """Returns (state of a step folder, whether the layout is this one).

    Raises `Refusal` if the model is another, or the folder cannot be converted.
    """
    state: SavedState = json.loads((step / STATE).read_text())
    saved = json.loads((step / BLUEPRINT).read_text())
    was = Layout.from_json(state["layout"])
    same = was == layout
    if state["step"] and (was.algorithm, was.states, was.of_matrices) != (
        layout.algorithm,
        layout.states,
        layout.of_matrices,
    ):
        kept, keeps = (f"{each.algorithm} ({each.kept})" for each in (was, layout))
        fix = (
            "use the JSON that it was saved with, or start a new run from its weights: recipekit"
            " convert to-hf, then --model"
        )
        raise refuse(
            f"resume from {step}",
            f"contains optimizer states of {kept}, but this run's optimizer is {keeps}",
            fix,
        )
    if saved is None:
        if same:
            return state, True
        rule = (
            f"was written in the layout {was}, not in this run's layout {layout}, and {UNDESCRIBED}"
        )
        raise refuse(
            f"resume from {step}",
            rule,
            "resume once with the same ranks, degrees and strategy. A checkpoint that this run"
            " saves can change the layout",
        )
    before = Blueprint.from_json(saved)
    differ = _differences(
        before, blueprint, cuts=same and layout.mesh.tp > 1, begun=state["step"] > 0
    )
    if differ:
        raise refuse(
            f"resume from {step}",
            f"is from another model: {differ}",
            "use the model that it was saved with, or start a new run with --out NEW",
        )
    errors.check(step, layout, before, blueprint)
    return state, same and [tensor.group for tensor in before.tensors] == [
        tensor.group for tensor in blueprint.tensors
    ]


def _differences(saved: Blueprint, now: Blueprint, cuts: bool, begun: bool) -> str:
    """Says the first difference in names, shapes or optimizer groups, and with `cuts` in what
    tensor parallelism divides.

    Learning rates of groups may change; before the first step all of a group may.
    """

    def group(blueprint: Blueprint, tensor: Tensor) -> Any:
        if tensor.group is None or not begun:
            return None if tensor.group is None else "trained"
        return (
            replace(blueprint.groups[tensor.group], lr_scale=1.0).name
            if tensor.group < len(blueprint.groups)
            else tensor.group
        )

    before, after = (
        {
            tensor.name: (tensor.shape, group(each, tensor), *([tensor.cut] if cuts else []))
            for tensor in each.tensors
        }
        for each in (saved, now)
    )
    for name in [*before, *after]:
        if before.get(name) != after.get(name):
            return (
                f"{name} is {before.get(name, 'not there')} in the checkpoint and"
                f" {after.get(name, 'not there')} in the model (shape, optimizer"
                f" group{', cut' if cuts else ''})"
            )
    return ""


def load(
    engine: Engine, step: Path, blueprint: Blueprint, layout: Layout, scratch: Path, say: Say
) -> State:
    """Load a verified step folder into the engine and this rank's random generators; return its
    state (a collective).

    A step folder of another layout is first converted into the folder `scratch`, which is removed
    afterwards. The optimizer's numbers (betas, eps, weight decay, clipping, ...) stay those of this
    start. Another optimizer takes the weights of step 0 only.
    """
    state, same = check(step, blueprint, layout)
    if manifest.listed_files(step, errors.FILES):
        errors.check_frozen(engine.optimizer.param_groups[0]["freeze_step"], state["step"])
    source = step
    if not same:
        source = scratch / step.name
        if dist.get_rank() == 0:
            say(f"converting {step} from {Layout.from_json(state['layout'])} to {layout}")
        _convert(step, source, blueprint, layout)

    before = [dict(group) for group in engine.optimizer.param_groups]
    engine.load_states(source, blueprint, layout, state["step"] > 0)
    _put_back_numbers(engine.optimizer.param_groups, before)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    place_counts(inner)

    own_errors = source / errors.file_of(dist.get_rank())
    errors.restore(inner, read_pickle(own_errors) if own_errors.exists() else None)
    if (generators := source / f"rng_rank_{dist.get_rank()}.pt").exists():
        restore_generator_states(read_pickle(generators))
    dist.barrier(waiting_group())
    if not same and dist.get_rank() == 0:
        shutil.rmtree(scratch)
    return state


def _convert(step: Path, out: Path, blueprint: Blueprint, layout: Layout) -> None:
    """Convert a step folder to this run's layout on rank 0 (a collective).

    Clears the folder around `out` first. Raises `Refusal` on every rank if the conversion fails.
    """
    scratch = out.parent
    failed: list[Any] = [""]
    if dist.get_rank() == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            reshape(step, out, layout, blueprint, copying.Effort(workers=min(8, usable_cores())))
        except (OSError, Refusal) as error:
            # The error is kept for later: the other ranks wait in the next collective.
            failed = [f"cannot be converted in {scratch}: {error}"]
    dist.broadcast_object_list(failed, group=waiting_group())
    if failed[0]:
        raise refuse(
            f"resume from {step}",
            failed[0],
            "free space there, or start with the layout it was written in",
        )


def _put_back_numbers(groups: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Give an optimizer's groups the numbers that they had before a checkpoint was loaded.

    An engine may restore the saved numbers, although the user may have changed them (--resume
    PATH). After a conversion it restores only those that the other layout's optimizer had.
    """
    for group, own in zip(groups, before, strict=True):
        group.update(
            {
                key: value
                for key, value in own.items()
                if key not in ("params", "lr", "initial_lr", "step") or key not in group
            }
        )


def place_counts(optimizer: Any) -> None:
    """Puts each count of steps where the optimizer looks for it: beside the weights for a fused or
    capturable step, else on the host.

    torch (2.13) puts them by what the file says of its own optimizer, and a fused step on a GPU
    ends with an error at a count on the host.
    """
    on_device = any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    for weight, state in optimizer.state.items():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].to(weight.device if on_device else "cpu")


def restore_generator_states(generators: dict[str, Any]) -> None:
    torch.set_rng_state(generators["torch"].clone())
    random.setstate(generators["python"])
    np.random.set_state(generators["numpy"])
    if "cuda" in generators:
        torch.cuda.set_rng_state(generators["cuda"])
