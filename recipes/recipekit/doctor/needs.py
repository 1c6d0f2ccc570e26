"""Counts what a run needs of a host: memory, and room for the files that the run writes."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..dslint.numbers import enabled
from ..parallel.blueprint import Blueprint, Layout, held
from ..parallel.factors import elements_of
from ..plan import Plan
from ..planner.show import drawn_up, empty_of, fullest
from ..planner.terms import ACCELERATOR, HOST, NVME, Term, too_much, total
from ..spec.optimizer_specs import FACTORS, GRADIENT, error_sizes, facts_of, states_of
from ..spec.refusal import Refusal
from ..spec.run_folder import CHECKPOINTS
from ..spec.step_names import step_folders


def count_needs(plan: Plan, on_gpu: bool) -> dict[str, int]:
    """Counts the bytes of the states on each rank, of a checkpoint and of the export, and how many
    checkpoints there will be at a time.

    Raises `Refusal` where the states exceed a GPU of this host.
    """
    recipe, stage = plan.recipe, plan.ds_config["zero_optimization"]["stage"]
    model, plans = empty_of(plan)
    blueprint, layout, load = drawn_up(plan, (model, plans))
    terms = fullest(plan, blueprint, layout, load)
    model = recipe.adapt(model) if recipe.adapt else model
    size = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    states = sum(4 * numel for numel in _state_elements(plan, blueprint, layout))
    if facts_of(plan.ds_config).acts_on == GRADIENT:
        states += 4 * layout.mesh.world * sum(error_sizes(trained, layout.mesh.dp))
    mixed = enabled(plan.ds_config, "bf16") or enabled(plan.ds_config, "fp16")
    width = 2 if mixed else 4
    there = len(step_folders(plan.out / CHECKPOINTS))
    if on_gpu:
        _check_gpu(terms)
    return {
        "host": total(terms, HOST) + (0 if on_gpu else total(terms, ACCELERATOR)),
        "NVMe": total(terms, NVME),
        "checkpoint": (size if stage < 3 else size - trained) * width
        + (4 * trained if mixed or stage else 0)
        + states,
        "checkpoints": max(1, recipe.most_checkpoints - there),
        "export": size * width if recipe.export else 0,
    }


def _check_gpu(terms: list[Term]) -> None:
    """Raise `Refusal` if the states exceed the first GPU of this host."""
    memory, name = torch.cuda.get_device_properties().total_memory, torch.cuda.get_device_name()
    if problems := too_much(terms, ACCELERATOR, memory, on=name):
        raise Refusal(problems)


def _state_elements(plan: Plan, blueprint: Blueprint, layout: Layout) -> Iterator[int]:
    """Yields numbers that add up to the elements of the optimizer's states in a checkpoint.

    Adafactor's rows and columns are there once for every holder.
    """
    if states_of(plan.ds_config) != FACTORS:
        trained = [
            (tensor.numel, tensor.group) for tensor in blueprint.tensors if tensor.group is not None
        ]
        yield from (
            numel * len(states_of(plan.ds_config, blueprint.groups[group].matrix))
            for numel, group in trained
        )
        return
    layout = replace(layout, zero_stage=plan.ds_config["zero_optimization"]["stage"])
    for pp_rank in range(layout.mesh.pp):
        tensors = held(blueprint, layout, pp_rank)
        yield from (
            elements_of(tensors, layout, tp_rank).total() for tp_rank in range(layout.mesh.tp)
        )
