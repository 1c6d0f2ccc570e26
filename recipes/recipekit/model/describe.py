"""A model's blueprint: every tensor with its sharding rule and its place in the pipeline."""

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
from ..parallel.param_groups import ParamGroup, layer_lr_scale, order_groups, param_group_of
from ..parallel.plans import embedding_and_head, hidden_matrices, published_plans, resolve_plans
from ..spec.errors import ConfigError, config_error
from ..spec.task_specs import TASKS, Plans
from .empty import CAUSAL_AUTO_CLASS, empty_model
from .fp32_parameters import NO_FP32_PARAMETERS, Fp32Parameters
from .probes import check_causal
from .untied_head import config_of_files
from .weights import Weights, open_weights


def draft_blueprint(
    model: PreTrainedModel,
    plans: Plans | None = None,
    fp32: Fp32Parameters = NO_FP32_PARAMETERS,
) -> Blueprint:
    """Return a blueprint of a full model's tensors, for checkpoints.

    The model must not be sharded yet. Its parameters are on the meta device or partitioned.
    Pipeline places and sharding rules follow `plans` (`resolve_plans`), or else the plans that the
    model publishes. `fp32` names the parameters that stay in fp32.
    """
    plans = plans or published_plans(model)
    blocks = _pipeline_blocks(model, plans)
    rules = tensor_parallel.sharding_rules(model, plans.tp) if plans.tp else {}
    places = _Places.of(model, blocks, plans)
    experts = expert.moe_blocks(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    shapes = {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in model.named_parameters()
    }
    own = _param_groups(model, shapes, places, plans, fp32)
    groups = order_groups(own.values())

    divisible = {f"{block.name}.{key}" for block in experts for key in expert.FUSED_EXPERT_PARAMS}
    tensors = [
        Tensor(
            name,
            shape,
            groups.index(own[name]) if name in own else None,
            rules.get(name),
            places.of_tensor(name),
            expert=name in divisible,
            dtype="float32" if name in fp32.names else "",
        )
        for name, shape in shapes.items()
    ]
    tensors += [
        _describe_buffer(name, value, places)
        for name, value in model.state_dict().items()
        if name not in named
    ]

    first_names = {id(parameter): name for name, parameter in reversed(named.items())}
    aliases = {
        name: (first, places.of_tensor(name))
        for name, parameter in named.items()
        if (first := first_names[id(parameter)]) != name
    }
    return Blueprint(
        tuple(tensors), aliases, len(blocks), bool(plans.tp), blocks=experts, groups=groups
    )


def _pipeline_blocks(model: PreTrainedModel, plans: Plans) -> tuple[str, ...]:
    """Return the names of a model's pipeline blocks, or () without a usable plan.

    If the plan is missing or does not fit, code that needs the plan raises an error later.
    """
    with contextlib.suppress(ConfigError):
        return pipeline.pipeline_blocks(model, plans.pp)
    return ()


@dataclass(frozen=True)
class _Places:
    """The places of a model's tensors in the pipeline.

    `numbers` maps each block to its number as a string. `shared` contains all names of the
    embedding's weight.
    """

    numbers: dict[str, str]
    plan: Mapping[str, str]
    shared: set[str]

    @classmethod
    def of(cls, model: PreTrainedModel, blocks: tuple[str, ...], plans: Plans) -> "_Places":
        weight = getattr(embedding_and_head(model)[0], "weight", None)
        named = model.named_parameters(remove_duplicate=False)
        shared = {name for name, parameter in named if parameter is weight}
        return cls({block: str(number) for number, block in enumerate(blocks)}, plans.pp, shared)

    def of_tensor(self, name: str) -> str:
        """Return the number of a tensor's block, or the tensor's place in the plan."""
        parts = name.split(".")
        around = (".".join(parts[:end]) for end in range(1, len(parts)))  # modules around it
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
        shared = self.shared  # the first and the last stage use this weight
        return "ends" if len(shared) > 1 and where == "first" and name in shared else where


def _describe_buffer(name: str, value: torch.Tensor, places: _Places) -> Tensor:
    shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    return Tensor(name, shape, None, None, places.of_tensor(name), dtype)


def _param_groups(
    model: PreTrainedModel,
    shapes: dict[str, tuple[int, ...]],
    places: _Places,
    plans: Plans,
    fp32: Fp32Parameters,
) -> dict[str, ParamGroup]:
    """Return the parameter group of each trained parameter.

    Raise `ConfigError` if layer-wise decay is requested but the model's layers are unknown.
    """
    matrices, num_blocks = hidden_matrices(model, plans.matrices), len(places.numbers)
    if plans.layer_decay != 1 and not num_blocks:
        raise config_error(
            f"layer_decay = {plans.layer_decay}",
            f"requires a list of layers, but {type(model).__name__} has no known list",
            "leave out --layer_decay, or add a pp_plan to the recipe",
        )
    found = {
        name: param_group_of(
            name,
            len(shapes[name]),
            plans,
            name in matrices,
            layer_lr_scale(places.of_tensor(name), num_blocks, plans.layer_decay),
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    apart = fp32.names if fp32.grouped else frozenset()
    return {name: dataclasses.replace(group, fp32=name in apart) for name, group in found.items()}


@dataclass(frozen=True)
class PublishedModel:
    """A model in files.

    `config` is the config.json that matches the files. `notes` are lines for the user. `copies`
    maps each blueprint key that the files lack to the key that is read instead.
    """

    blueprint: Blueprint
    config: dict[str, Any]
    copies: dict[str, str]
    notes: tuple[str, ...]


def published_model(folder: Path) -> PublishedModel:
    """Return the description of a model, read from its files.

    Raise `ConfigError` for a model that cannot be trained, or for incomplete files.
    """
    # Every model supports this attention. It is used for computation only in `check_causal`.
    name, attention = str(folder), "eager"
    config = read_config(folder / "config.json", name, task="")
    safetensors_files.tensor_entries(folder)
    facts = TASKS[fitting_task(config)]
    config, separate = config_of_files(config, name, facts.auto_class)
    model = empty_model(config, attention, name, auto_class=facts.auto_class)
    if facts.auto_class == CAUSAL_AUTO_CLASS:
        check_causal(config, attention, name)
    weights = open_weights(name, model)
    blueprint = with_file_locations(
        draft_blueprint(model, resolve_plans(model, Plans(), facts.plans)), weights
    )
    return PublishedModel(
        blueprint, config, weights.copies, tuple(filter(None, (separate, weights.note)))
    )


def published_blueprint(folder: Path) -> Blueprint:
    """Return a model's blueprint, read from its files.

    Raise the same `ConfigError` as `published_model`.
    """
    return published_model(folder).blueprint


def with_file_locations(blueprint: Blueprint, weights: Weights) -> Blueprint:
    """Return the blueprint with the locations of its tensors in the model's files."""
    published = {
        tensor.name: weights.stored[tensor.name]
        for tensor in blueprint.tensors
        if tensor.name in weights.stored
    }
    return dataclasses.replace(blueprint, published=published, files=weights.contents())
