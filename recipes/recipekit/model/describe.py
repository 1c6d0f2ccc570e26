"""The blueprint of a model: every tensor, its cut and its place."""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..architectures import safetensors_files
from ..architectures.lookup import fitting_task, read_config
from ..parallel import expert, pipeline
from ..parallel import tensor as tensor_parallel
from ..parallel.blueprint import Blueprint, Tensor
from ..parallel.param_groups import group_of, layer_scale, numbered
from ..parallel.plans import ends_of, hidden_matrices, plans_of, published_plans
from ..spec.refusal import Refusal, refuse
from ..spec.task_specs import TASKS, Plans
from .causal import check_causal
from .empty import CAUSAL, empty_model
from .own_head import config_of_files
from .weights import Weights, open_weights


def draft(model: PreTrainedModel, plans: Plans | None = None) -> Blueprint:
    """Describes what checkpoints have to know of a whole model: not yet cut, its parameters on the
    meta device or partitioned.

    Places and cuts follow `plans` (`plans_of`), or else the plans that the model publishes.
    """
    plans = plans or published_plans(model)
    blocks: tuple[str, ...] = ()
    # it has no plan, or one that does not fit, which is told where it is used
    with contextlib.suppress(Refusal):
        blocks = pipeline.chain(model, plans.pp)
    rules = tensor_parallel.cut_rules(model, plans.tp) if plans.tp else {}
    embedding = ends_of(model)[0]
    named = dict(model.named_parameters(remove_duplicate=False))
    first_names = {id(parameter): name for name, parameter in reversed(named.items())}
    shared = {
        name for name, parameter in named.items() if parameter is getattr(embedding, "weight", None)
    }
    numbers = {block: str(number) for number, block in enumerate(blocks)}

    def place(name: str) -> str:
        parts = name.split(".")
        # names of the modules that hold it
        around = (".".join(parts[:end]) for end in range(1, len(parts)))
        if (
            blocks
            and (number := next((numbers[module] for module in around if module in numbers), None))
            is not None
        ):
            return number
        where = next(
            (
                place
                for module, place in plans.pp.items()
                if blocks and place != "split" and name.startswith(f"{module}.")
            ),
            "every",
        )
        return "ends" if len(shared) > 1 and where == "first" and name in shared else where

    experts = expert.blocks_of(model)
    divisible = {f"{block.name}.{own}" for block in experts for own in expert.FUSED}
    tensors, shapes = (
        [],
        {
            name: tuple(getattr(parameter, "ds_shape", parameter.shape))
            for name, parameter in model.named_parameters()
        },
    )
    matrices = hidden_matrices(model, plans.matrices)
    if plans.layer_decay != 1 and not blocks:
        raise refuse(
            f"layer_decay = {plans.layer_decay}",
            f"requires a list of layers, but {type(model).__name__} has no known list",
            "leave out --layer_decay, or add a pp_plan to the recipe",
        )
    own = {
        name: group_of(
            name,
            len(shapes[name]),
            plans,
            name in matrices,
            layer_scale(place(name), len(blocks), plans.layer_decay),
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    groups = numbered(own.values())
    for name, shape in shapes.items():
        group = groups.index(own[name]) if name in own else None
        tensors.append(
            Tensor(name, shape, group, rules.get(name), place(name), expert=name in divisible)
        )
    for name, value in model.state_dict().items():
        if name not in named:
            tensors.append(
                Tensor(
                    name,
                    tuple(value.shape),
                    None,
                    None,
                    place(name),
                    str(value.dtype).removeprefix("torch."),
                )
            )
    aliases = {
        name: (first, place(name))
        for name, parameter in named.items()
        if (first := first_names[id(parameter)]) != name
    }
    return Blueprint(
        tuple(tensors), aliases, len(blocks), bool(plans.tp), blocks=experts, groups=groups
    )


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
