"""The resources that a run needs on a host: memory, and disk space for the files that it writes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ..dslint.numbers import is_block_enabled
from ..parallel.adafactor_state_map import state_numel_by_rank
from ..parallel.blueprint import Blueprint, Layout, tensors_on_rank
from ..plan import RunPlan
from ..planner.resolve import resolve_here
from ..spec.errors import ConfigError
from ..spec.memory_terms import ACCELERATOR, HOST, NVME, Term, memory_problems, total_bytes
from ..spec.optimizer_specs import (
    ADAFACTOR_STATES,
    GRADIENT,
    error_sizes,
    optimizer_spec_of,
    optimizer_states,
)
from ..spec.run_folder import CHECKPOINTS
from ..spec.step_names import step_folders


def count_required_bytes(plan: RunPlan, on_gpu: bool) -> dict[str, int]:
    """Return the sizes in bytes of each rank's states, of a checkpoint and of the export.

    The result also contains the number of checkpoints that the run adds. Raises `ConfigError` if
    the states exceed the memory of a GPU on this host.
    """
    recipe, stage = plan.recipe, plan.ds_config["zero_optimization"]["stage"]
    model_plan, _ = resolve_here(plan)
    blueprint, layout, terms = model_plan.blueprint, model_plan.layout, model_plan.fullest
    parameters = [tensor for tensor in blueprint.tensors if not tensor.buffer]
    size = sum(tensor.numel for tensor in parameters)
    trained = sum(tensor.numel for tensor in parameters if tensor.group is not None)
    states = sum(4 * numel for numel in _state_elements(plan, blueprint, layout))
    if optimizer_spec_of(plan.ds_config).acts_on == GRADIENT:
        states += 4 * layout.mesh.world * sum(error_sizes(trained, layout.mesh.dp))
    mixed = is_block_enabled(plan.ds_config, "bf16") or is_block_enabled(plan.ds_config, "fp16")
    width = 2 if mixed else 4
    there = len(step_folders(plan.out / CHECKPOINTS))
    if on_gpu:
        _check_gpu(terms)
    return {
        "host": total_bytes(terms, HOST) + (0 if on_gpu else total_bytes(terms, ACCELERATOR)),
        "NVMe": total_bytes(terms, NVME),
        "checkpoint": (size if stage < 3 else size - trained) * width
        + (4 * trained if mixed or stage else 0)
        + states,
        "checkpoints": max(1, recipe.max_checkpoints - there),
        "export": size * width if recipe.export else 0,
    }


def _check_gpu(terms: Sequence[Term]) -> None:
    """Raise `ConfigError` if the states exceed the memory of this host's first GPU."""
    memory, name = torch.cuda.get_device_properties().total_memory, torch.cuda.get_device_name()
    if problems := memory_problems(terms, ACCELERATOR, memory, on=name):
        raise ConfigError(problems)


def _state_elements(plan: RunPlan, blueprint: Blueprint, layout: Layout) -> Iterator[int]:
    """Yield numbers whose sum is the number of elements in a checkpoint's optimizer states.

    Adafactor's row and column states are stored once for each rank that keeps them.
    """
    if optimizer_states(plan.ds_config) != ADAFACTOR_STATES:
        trained = [
            (tensor.numel, tensor.group) for tensor in blueprint.tensors if tensor.group is not None
        ]
        yield from (
            numel * len(optimizer_states(plan.ds_config, blueprint.groups[group].matrix))
            for numel, group in trained
        )
        return
    layout = replace(layout, zero_stage=plan.ds_config["zero_optimization"]["stage"])
    for pp_rank in range(layout.mesh.pp):
        tensors = tensors_on_rank(blueprint, layout, pp_rank)
        yield from (
            state_numel_by_rank(tensors, layout, tp_rank).total()
            for tp_rank in range(layout.mesh.tp)
        )
