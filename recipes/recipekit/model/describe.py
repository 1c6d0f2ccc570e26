"""The blueprint of a model: every tensor, its cut and its place."""

import contextlib
import dataclasses
from pathlib import Path

from transformers import PreTrainedModel

from ..architectures import safetensors_files
from ..architectures.lookup import read_config
from ..parallel import pipeline
from ..parallel import tensor as tensor_parallel
from ..parallel.blueprint import Blueprint, Tensor
from ..refusal import Refusal
from .causal import check_causal
from .empty import empty_model
from .weights import Weights, open_weights


def draft(model: PreTrainedModel, own_plan: dict[str, str] | None = None) -> Blueprint:
    """Describes what checkpoints have to know of a whole model: not yet cut, its parameters on the meta device or partitioned.

    Places and cuts follow the plans that the model publishes, or `own_plan`, the recipe's pipeline plan.
    """
    plan: dict[str, str] = {}
    with contextlib.suppress(Refusal):  # it has none
        plan = pipeline.plan_of(model, own_plan)
    rules: dict[str, tuple[int, int]] = {}
    can_tp = True
    try:
        rules = tensor_parallel.cut_rules(model, tensor_parallel.plan_of(model))
    except Refusal:
        can_tp = False
    embedding = model.get_input_embeddings()
    named = dict(model.named_parameters(remove_duplicate=False))
    first_names = {id(parameter): name for name, parameter in reversed(named.items())}
    tied = {name for name, parameter in named.items() if parameter is embedding.weight}
    layers = next((name for name, place in plan.items() if place == "split"), None)

    def place(name: str) -> str:
        if layers is not None and name.startswith(f"{layers}."):
            return name.removeprefix(f"{layers}.").split(".")[0]
        where = next((place for module, place in plan.items() if place != "split" and name.startswith(f"{module}.")), "every")
        return "ends" if len(tied) > 1 and where == "first" and name in tied else where

    tensors = []
    for name, parameter in model.named_parameters():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        tensors.append(Tensor(name, shape, (0 if len(shape) >= 2 else 1) if parameter.requires_grad else None, rules.get(name), place(name)))
    for name, value in model.state_dict().items():
        if name not in named:
            tensors.append(Tensor(name, tuple(value.shape), None, None, place(name), str(value.dtype).removeprefix("torch.")))
    aliases = {name: (first, place(name)) for name, parameter in named.items() if (first := first_names[id(parameter)]) != name}
    num_layers = len(model.get_submodule(layers)) if layers is not None else 0  # pyright: ignore[reportArgumentType]
    return Blueprint(tuple(tensors), aliases, num_layers, can_tp)


def published_blueprint(folder: Path) -> Blueprint:
    """Makes the blueprint of a model from its files. Raises `Refusal` for a model that cannot be trained, or files that do not hold all of it."""
    name, attention = str(folder), "eager"  # every model has this attention; only `check_causal` computes with it
    config = read_config(folder / "config.json", name)
    safetensors_files.open_folder(folder)
    model = empty_model(config, attention, name)
    check_causal(config, attention, name)
    return with_files(draft(model), open_weights(name, model))


def with_files(blueprint: Blueprint, weights: Weights) -> Blueprint:
    """Returns the blueprint with the places of its tensors in the model's files."""
    published = {tensor.name: weights.stored[tensor.name] for tensor in blueprint.tensors if tensor.name in weights.stored}
    return dataclasses.replace(blueprint, published=published, files=weights.contents())
