"""From a model's config and weights to a model that an engine can train: built part by part, never
whole on one rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..dslint.numbers import enabled
from ..kernels.attention import VARLEN
from ..parallel import expert, pipeline, sequence
from ..parallel import tensor as tensor_parallel
from ..parallel.blueprint import Blueprint, stages_of
from ..parallel.groups import Groups
from ..parallel.param_groups import check_named
from ..parallel.plans import adapted_plans, plans_of
from ..parallel.tensor import Cut
from ..spec.engine import Engine
from ..spec.hub import commit_of
from ..spec.optimizer_specs import by_matrix
from ..spec.recipe import Recipe
from ..spec.refusal import refuse
from ..spec.task_specs import TASKS, Plans
from .adapter import AdapterRequest, adapted, published_keys
from .attention import choose_attention
from .batch_norm import norms_of
from .describe import draft, with_files
from .empty import empty_model, leaf_modules
from .head import give_losses_where_exact
from .initial import fill, replace_parameter
from .small import summed_gradients
from .weights import Weights, open_weights


@dataclass(frozen=True)
class Built:
    """What an engine gets: the model, or this rank's pipeline stages of it.

    `names` holds the Hugging Face name of each parameter by its id, since an adapter renames what
    it wraps; `cuts` says which of them are tensor-parallel shards and how. `weights` are the files
    they were read from, None after a random init. `architecture` is the name of the model's class
    in transformers; `attention` is what it computes with, and `note` says why that is not varlen,
    if it is not. `why_logits`: None where the model gives the losses of tokens if it gets labels,
    else why not ("": as it was asked for). `has_norms`: the whole model has BatchNorm, which
    model/batch_norm.py computes.
    """

    architecture: str
    attention: str
    note: str
    models: list[PreTrainedModel]  # an adapter's wrapper, if the recipe has one
    cuts: dict[str, Cut]
    names: dict[int, str]
    weights: Weights | None
    split: pipeline.Split | None
    blueprint: Blueprint
    plans: Plans
    why_logits: str | None = ""
    has_norms: bool = False

    @property
    def model(self) -> PreTrainedModel:
        return self.models[0]


def build_model(
    recipe: Recipe,
    model_config: dict[str, Any],
    groups: Groups | None,
    ds_config: dict[str, Any],
    device: torch.device,
    divide: Callable[[nn.Module], Any] | None = None,
) -> Built:
    """Builds the model of a recipe: its weights drawn or read, cut to this rank's stages and tensor
    shard and, under ZeRO-3, partitioned.

    The weights are filled in one part (a layer, an embedding) after the other, so that no rank ever
    holds more than one whole part besides what it keeps; without `groups` all on one process, and
    transformers' model as it is. `divide` is called with each layer that is filled, and with the
    model at the end. A collective under ZeRO-3 and with `divide`. Raises `Refusal` if the files
    lack a parameter.
    """
    dtype, facts, rows = (
        dtype_of(ds_config),
        TASKS[recipe.task],
        (recipe.micro_batch, recipe.seq_len),
    )
    attention, note = choose_attention(
        recipe.attention,
        model_config,
        recipe.model,
        facts,
        computed_in(recipe.engine, recipe.precision, dtype),
        device,
        rows,
    )
    empty = partial(
        empty_model,
        model_config,
        attention,
        recipe.model,
        recipe.recompute,
        facts.auto_class,
        groups is not None,
    )
    whole = empty()
    architecture = type(whole).__name__  # `divide` may give the model another class
    if groups and groups.mesh.sp > 1:
        sequence.apply(whole, attention, recipe.seq_len, groups)
    if groups and groups.mesh.ep > 1:
        expert.check(whole, groups.mesh.ep)
    plans = plans_of(
        whole, recipe.plans, facts.plans, facts.matrices if by_matrix(ds_config) else ()
    )
    blueprint = draft(whole, plans)
    tp_mesh, summed = groups.tp_mesh if groups else None, frozenset[str]()
    if tp_mesh:
        tensor_parallel.check_plan(whole, plans.tp)
        summed = summed_gradients(model_config, facts, plans, recipe.model)
    weights = (
        None
        if recipe.init == "random"
        else open_weights(recipe.model, whole, recipe.labels > 0, recipe.model_revision)
    )
    split, models, absent, why_logits = None, [whole], [[]], ""
    give = partial(
        give_losses_where_exact,
        recipe.loss,
        model_config=model_config,
        task=recipe.task,
        name=recipe.model,
        tp=(plans.tp, tp_mesh),
    )
    if groups and groups.mesh.pp > 1:
        stages = stages_of(groups.coords["pp"], groups.mesh.pp, recipe.pipeline_schedule)
        split = pipeline.split(whole, blueprint, groups.mesh.pp * len(stages), plans.pp)
        models = [empty() for _ in stages]
        why_logits = give(
            whole,
            [
                model
                for model, stage in zip(models, stages, strict=True)
                if stage == split.num_stages - 1
            ],
        )
        absent = [
            pipeline.cut(model, split, stage, dtype, facts)
            for model, stage in zip(models, stages, strict=True)
        ]
    cuts, filled, uncut = (
        dict[str, Cut](),
        dict[str, nn.Parameter](),
        empty() if recipe.init == "random" or recipe.labels else None,
    )
    for model, names in zip(models, absent, strict=True):
        for name, parameter in model.named_parameters():
            if name in filled:  # on both stages of a rank
                replace_parameter(model, parameter, filled[name])
        if tp_mesh:
            here = {pattern: style for pattern, style in plans.tp.items() if pattern not in names}
            cuts |= tensor_parallel.apply(model, tp_mesh, replace(plans, tp=here), summed)
        fill(model, recipe.seed, groups, ds_config, device, dtype, cuts, weights, divide, uncut)
        filled |= dict(model.named_parameters())
    if recipe.adapt is not None:
        models = [_with_adapter(whole, _request_of(recipe), recipe.seed, ds_config)]
    if split is None:  # an adapter may have put another module in the head's place
        why_logits = give(whole, [whole])
    make_trainable(models)
    if recipe.adapt is not None:
        blueprint = _described(models[0], plans)
        # files with another head do not say how this model is written
    elif weights is not None and not recipe.labels:
        blueprint = with_files(blueprint, weights)
    check_named(blueprint.trained, plans, recipe.matrices)
    by_id = {id(parameter): name for name, parameter in filled.items()}
    return Built(
        architecture,
        attention,
        note,
        models,
        cuts,
        by_id,
        weights,
        split,
        blueprint,
        plans,
        why_logits,
        bool(norms_of(whole)),
    )


def dtype_of(ds_config: dict[str, Any]) -> torch.dtype:
    """Returns the dtype of the weights that an engine is given."""
    return (
        torch.bfloat16
        if enabled(ds_config, "bf16")
        else torch.float16
        if enabled(ds_config, "fp16")
        else torch.float32
    )


def computed_in(engine: str, precision: str, dtype: torch.dtype) -> torch.dtype:
    """Returns what the layers of an engine compute in, whose weights are of `dtype`: torch's have a
    `precision` of their own.
    """
    return (
        dtype
        if engine == "deepspeed"
        else {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    )


def make_trainable(models: list[PreTrainedModel]) -> None:
    """Switches dropout and the like on, and marks the experts that ZeRO-3 must gather as one."""
    for model in models:
        model.train()
        for module in leaf_modules(model):
            set_z3_leaf_module(module, True)


def _with_adapter(
    whole: PreTrainedModel, request: AdapterRequest, seed: int, ds_config: dict[str, Any]
) -> PreTrainedModel:
    """Put the recipe's adapter around a model; its weights are drawn from the seed.

    Raises `Refusal` as `adapted` does, and for an `adapt` that changes an attention that reads
    documents.
    """
    torch.manual_seed(seed)
    attention = whole.config._attn_implementation
    made = adapted(whole, request, ds_config)
    if VARLEN in (attention or "") and whole.config._attn_implementation != attention:
        rule = (
            f"sets the attention to {whole.config._attn_implementation}, and varlen computes the"
            " documents of the rows as they are"
        )
        raise refuse("adapt with attention = varlen", rule, "use --attention sdpa")
    return made


def _request_of(recipe: Recipe) -> AdapterRequest:
    assert recipe.adapt is not None
    commit = commit_of(recipe.model, recipe.model_revision) or recipe.model_revision
    base = "" if recipe.init == "random" else recipe.model
    return AdapterRequest(recipe.adapt, base, recipe.merge, recipe.tp, recipe.ep, commit)


def _described(model: PreTrainedModel, plans: Plans) -> Blueprint:
    """Draft the blueprint of a model with an adapter, with the keys of the adapter's file."""
    blueprint = draft(model, adapted_plans(model, plans))
    keys = {
        key: blueprint.aliases.get(name, (name,))[0] for key, name in published_keys(model).items()
    }
    return replace(blueprint, adapter=keys)


def check_weights(engine: Engine, built: Built, groups: Groups, samples: int = 8) -> int:
    """Compares sampled parameters in the engine with the files, bit for bit; returns how many.

    A collective.

    Raises `Refusal` naming the first that differs: training from random weights by accident is
    found here.
    """
    if built.weights is None:
        return 0
    read = {key for key, name in built.names.items() if name not in built.weights.drawn}
    published = [
        parameter
        for model in built.models
        for parameter in model.parameters()
        if id(parameter) in read
    ]
    chosen = published[:: max(1, len(published) // samples)]
    for parameter in chosen:
        name = built.names[id(parameter)]
        expected = built.weights.whole(name).to(parameter.dtype)
        if name in built.cuts:
            assert groups.tp_mesh is not None
            # DTensor cuts on the device of its mesh
            expected = tensor_parallel.shard(expected, built.cuts[name], groups.tp_mesh).cpu()
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            # of FSDP2
            value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            same = torch.equal(value.detach().cpu(), expected)
        if not same:
            raise refuse(
                name,
                "in the engine differs from the model's files",
                "this is a bug in loading. Report it with the model and the versions",
            )
    return len(chosen)
