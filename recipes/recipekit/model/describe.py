"""The blueprint of a model: every tensor, its cut and its place."""

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..architectures import safetensors_files
from ..architectures.lookup import fitting_task, read_config
from ..parallel import expert, pipeline
from ..parallel import tensor as tensor_parallel
from ..parallel.blueprint import Blueprint, Tensor
from ..parallel.param_groups import Group, group_of, layer_scale, numbered
from ..parallel.plans import ends_of, hidden_matrices, plans_of, published_plans
from ..spec.refusal import Refusal, refuse
from ..spec.task_specs import TASKS, Plans
from .causal import check_causal
from .empty import CAUSAL, empty_model
from .own_head import config_of_files
from .weights import Weights, open_weights


def draft(model: PreTrainedModel, plans: Plans | None = None) -> Blueprint:
    """Describe the tensors of a whole model for checkpoints. The model is not yet sharded; its
    parameters are on the meta device or partitioned.

    Places and cuts follow `plans` (`plans_of`), or else the plans that the model publishes.
    """
    plans = plans or published_plans(model)
    blocks = _blocks_of(model, plans)
    rules = tensor_parallel.cut_rules(model, plans.tp) if plans.tp else {}
    places = _Places.of(model, blocks, plans)
    experts = expert.blocks_of(model)
    divisible = {f"{block.name}.{key}" for block in experts for key in expert.FUSED}
    named = dict(model.named_parameters(remove_duplicate=False))
    shapes = {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in model.named_parameters()
    }
    own = _groups_of_trained(model, shapes, places, plans)
    groups = numbered(own.values())

    tensors = []
    for name, shape in shapes.items():
        group = groups.index(own[name]) if name in own else None
        expert_of = name in divisible
        tensors.append(
            Tensor(name, shape, group, rules.get(name), places.of_tensor(name), expert=expert_of)
        )
    for name, value in model.state_dict().items():
        if name not in named:
            tensors.append(_described_buffer(name, value, places))

    first_names = {id(parameter): name for name, parameter in reversed(named.items())}
    aliases = {
        name: (first, places.of_tensor(name))
        for name, parameter in named.items()
        if (first := first_names[id(parameter)]) != name
    }
    return Blueprint(
        tuple(tensors), aliases, len(blocks), bool(plans.tp), blocks=experts, groups=groups
    )


def _blocks_of(model: PreTrainedModel, plans: Plans) -> tuple[str, ...]:
    """Return the names of a model's pipeline blocks.

    A model without a plan, or with one that does not fit, has no blocks here, and is refused where
    the plan is used.
    """
    with contextlib.suppress(Refusal):
        return pipeline.chain(model, plans.pp)
    return ()


@dataclass(frozen=True)
class _Places:
    """The pipeline places of a model's tensors.

    `numbers` has the number of each block as a string; `shared` the names of the embedding's
    weight.
    """

    numbers: dict[str, str]
    plan: Mapping[str, str]
    shared: set[str]

    @classmethod
    def of(cls, model: PreTrainedModel, blocks: tuple[str, ...], plans: Plans) -> "_Places":
        weight = getattr(ends_of(model)[0], "weight", None)
        named = model.named_parameters(remove_duplicate=False)
        shared = {name for name, parameter in named if parameter is weight}
        return cls({block: str(number) for number, block in enumerate(blocks)}, plans.pp, shared)

    def of_tensor(self, name: str) -> str:
        """Return the number of the block that holds a tensor, or its place in the plan."""
        parts = name.split(".")
        around = (".".join(parts[:end]) for end in range(1, len(parts)))  # modules that hold it
        number = next((self.numbers[module] for module in around if module in self.numbers), None)
        if number is not None:
            return number
        where = next(
            (
                place
                for module, place in self.plan.items()
                if self.numbers and place != "split" and name.startswith(f"{module}.")
            ),
            "every",
        )
        shared = self.shared  # by the first stage and the last one
        return "ends" if len(shared) > 1 and where == "first" and name in shared else where


def _described_buffer(name: str, value: torch.Tensor, places: _Places) -> Tensor:
    shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    return Tensor(name, shape, None, None, places.of_tensor(name), dtype)


def _groups_of_trained(
    model: PreTrainedModel, shapes: dict[str, tuple[int, ...]], places: _Places, plans: Plans
) -> dict[str, Group]:
    """Return the parameter group of each trained parameter.

    Raises `Refusal` if layer-wise decay is asked for and the layers are not known.
    """
    matrices, num_blocks = hidden_matrices(model, plans.matrices), len(places.numbers)
    if plans.layer_decay != 1 and not num_blocks:
        raise refuse(
            f"layer_decay = {plans.layer_decay}",
            f"requires a list of layers, but {type(model).__name__} has no known list",
            "leave out --layer_decay, or add a pp_plan to the recipe",
        )
    return {
        name: group_of(
            name,
            len(shapes[name]),
            plans,
            name in matrices,
            layer_scale(places.of_tensor(name), num_blocks, plans.layer_decay),
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


@dataclass(frozen=True)
class PublishedModel:
    """A model in files.

    `config` is the config.json that matches the files; `notes` are lines for the user.

    `copies` maps keys of the blueprint that the files lack to the keys to read instead.
    """

    blueprint: Blueprint
    config: dict[str, Any]
    copies: dict[str, str]
    notes: tuple[str, ...]


def published_model(folder: Path) -> PublishedModel:
    """Describe a model from its files.

    Raises `Refusal` for a model that cannot be trained, or for incomplete files.
    """
    # every model has this attention; only `check_causal` computes with it
    name, attention = str(folder), "eager"
    config = read_config(folder / "config.json", name, task="")
    safetensors_files.open_folder(folder)
    facts = TASKS[fitting_task(config)]
    config, separate = config_of_files(config, name, facts.auto_class)
    model = empty_model(config, attention, name, auto_class=facts.auto_class)
    if facts.auto_class == CAUSAL:
        check_causal(config, attention, name)
    weights = open_weights(name, model)
    blueprint = with_files(draft(model, plans_of(model, Plans(), facts.plans)), weights)
    return PublishedModel(
        blueprint, config, weights.copies, tuple(filter(None, (separate, weights.note)))
    )


def published_blueprint(folder: Path) -> Blueprint:
    """Makes the blueprint of a model from its files. Raises `Refusal` as `published_model` does."""
    return published_model(folder).blueprint


def with_files(blueprint: Blueprint, weights: Weights) -> Blueprint:
    """Returns the blueprint with the places of its tensors in the model's files."""
    published = {
        tensor.name: weights.stored[tensor.name]
        for tensor in blueprint.tensors
        if tensor.name in weights.stored
    }
    return dataclasses.replace(blueprint, published=published, files=weights.contents())
