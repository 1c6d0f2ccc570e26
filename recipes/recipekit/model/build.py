"""From a model's config and weights to a model that DeepSpeed can train: built part by part, never whole on one rank."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from transformers import PreTrainedModel

from ..engine import Engine
from ..parallel import expert, pipeline, sequence
from ..parallel import tensor as tensor_parallel
from ..parallel.blueprint import Blueprint, stages_of
from ..parallel.groups import Groups
from ..parallel.tensor import Cut
from ..recipe import Recipe
from ..refusal import refuse
from ..strategy.numbers import enabled
from ..tasks.facts import TASKS
from .describe import draft, with_files
from .empty import empty_model, leaf_modules
from .initial import fill, replace_parameter
from .weights import Weights, open_weights


@dataclass(frozen=True)
class Built:
    """What `deepspeed.initialize` gets: the model, or this rank's pipeline stages of it.

    `names` holds the Hugging Face name of each parameter by its id, since an adapter renames what it wraps; `cuts` says
    which of them are tensor-parallel shards and how. `weights` are the files they were read from, None after a random init.
    """

    models: list[PreTrainedModel]  # an adapter's wrapper, if the recipe has one
    cuts: dict[str, Cut]
    names: dict[int, str]
    weights: Weights | None
    split: pipeline.Split | None
    blueprint: Blueprint

    @property
    def model(self) -> PreTrainedModel:
        return self.models[0]


def build_model(recipe: Recipe, model_config: dict[str, Any], groups: Groups | None, ds_config: dict[str, Any], device: torch.device) -> Built:
    """Builds the model of a recipe: its weights drawn or read, cut to this rank's stages and tensor shard and, under ZeRO-3, partitioned.

    Without `groups` the whole model is built on one process.

    The weights are filled in one part (a layer, an embedding) after the other, so that no rank ever holds more than one
    whole part besides what it keeps. A collective under ZeRO-3. Raises `Refusal` when the files do not hold every parameter.
    """
    dtype = torch.bfloat16 if enabled(ds_config, "bf16") else torch.float16 if enabled(ds_config, "fp16") else torch.float32
    facts = TASKS[recipe.task]
    empty = partial(empty_model, model_config, recipe.attention, recipe.model, recipe.recompute_every, facts.auto_class)
    whole = empty()
    if groups and groups.mesh.sp > 1:
        sequence.apply(whole, recipe.attention, recipe.seq_len, groups)
    if groups and groups.mesh.ep > 1:
        expert.check(whole, groups.mesh.ep)
    blueprint = draft(whole, recipe.pp_plan)
    tp_mesh = groups.tp_mesh if groups else None
    tp_plan = tensor_parallel.plan_of(whole) if tp_mesh else {}
    pp = groups.mesh.pp if groups else 1
    if pp == 1 or groups is None:
        split, models, absent = None, [whole], [[]]
    else:
        stages = stages_of(groups.coords["pp"], pp, recipe.pipeline_schedule)
        split = pipeline.split(whole, blueprint, pp * len(stages), recipe.pp_plan)
        models = [empty() for _ in stages]
        absent = [pipeline.cut(model, split, stage, dtype, facts) for model, stage in zip(models, stages, strict=True)]
    cuts: dict[str, Cut] = {}
    filled: dict[str, nn.Parameter] = {}
    weights = None
    for model, names in zip(models, absent, strict=True):
        for name, parameter in model.named_parameters():
            if name in filled:  # on both stages of a rank
                replace_parameter(model, parameter, filled[name])
        weights = None if recipe.init == "random" else open_weights(recipe.model, model, weights)
        if tp_mesh:
            cuts |= tensor_parallel.apply(model, tp_mesh, {pattern: style for pattern, style in tp_plan.items() if pattern not in names})
        fill(model, recipe.seed, groups, ds_config, device, dtype, cuts, weights)
        filled |= dict(model.named_parameters())
    by_id = {id(parameter): name for name, parameter in filled.items()}
    if recipe.adapt is not None:
        torch.manual_seed(recipe.seed)
        models = [recipe.adapt(whole)]
        if groups and groups.mesh.ep > 1 and hasattr(models[0], "peft_config"):
            raise refuse("ep > 1", "peft's adapters do not know experts that lie on other ranks", "use --ep 1; ZeRO-3 divides the frozen weights too")
        if tp_mesh and hasattr(models[0], "peft_config"):
            raise refuse("tp > 1", "peft's adapters do not know tensor-parallel shards", "use --tp 1; ZeRO-3 divides the frozen weights too")
    for model in models:
        model.train()
        for module in leaf_modules(model):
            set_z3_leaf_module(module, True)
    if recipe.adapt is not None:
        blueprint = draft(models[0])
    elif weights is not None:
        blueprint = with_files(blueprint, weights)
    return Built(models, cuts, by_id, weights, split, blueprint)


def check_weights(engine: Engine, built: Built, groups: Groups, samples: int = 8) -> int:
    """Compares sampled parameters in the engine with the files, bit for bit; returns how many. A collective.

    Raises `Refusal` naming the first that differs: training from random weights by accident is found here.
    """
    if built.weights is None:
        return 0
    published = [parameter for model in built.models for parameter in model.parameters() if id(parameter) in built.names]
    chosen = published[:: max(1, len(published) // samples)]
    for parameter in chosen:
        name = built.names[id(parameter)]
        expected = built.weights.whole(name).to(parameter.dtype)
        if name in built.cuts:
            assert groups.tp_mesh is not None
            expected = tensor_parallel.shard(expected, built.cuts[name], groups.tp_mesh).cpu()  # DTensor cuts on the device of its mesh
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            same = torch.equal(parameter.detach().cpu(), expected)
        if not same:
            raise refuse(name, "in the engine differs from the model's files", "this is a bug in loading; report it with the model and the versions")
    return len(chosen)
