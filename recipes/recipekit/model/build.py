"""Construction of the model that an engine trains, from its model plan and weights.

The model is built part by part, so no rank ever stores the full model.

    split         this rank's pipeline stages, still on the meta device
    materialise   tensor shards of each stage, filled part by part, partitioned under ZeRO-3
    adapt         an adapter around the model, if the recipe has one
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..dslint.numbers import is_block_enabled
from ..kernels.attention import VARLEN
from ..parallel import pipeline, sequence
from ..parallel import tensor as tensor_parallel
from ..parallel.blueprint import Blueprint, stages_of_rank
from ..parallel.groups import ProcessGroups
from ..parallel.tensor import ShardSpec
from ..spec.engine import Engine
from ..spec.errors import config_error
from ..spec.hub import commit_of
from ..spec.recipe import Recipe
from ..spec.task_specs import TASKS, TaskSpec
from .adapter import AdapterRequest, apply_adapter
from .describe import with_file_locations
from .empty import leaf_modules
from .initial_values import InitialValues, Target, fill_parameters, replace_parameter
from .loss_path import apply_loss_path
from .model_plan import ModelPlan
from .weights import Weights, open_weights


@dataclass(frozen=True)
class BuiltModel:
    """An engine's input: the model, or this rank's pipeline stages.

    `names` maps each parameter's id to its Hugging Face name, because an adapter renames the
    modules that it wraps. `cuts` maps the names of tensor-parallel shards to their shard specs.

    `weights` are the files that were read, or None after random initialisation. `blueprint` is the
    model plan's blueprint with the locations of the tensors in these files.
    """

    model_plan: ModelPlan
    models: list[PreTrainedModel]  # wrapped in the recipe's adapter, if there is one
    cuts: dict[str, ShardSpec]
    names: dict[int, str]
    weights: Weights | None
    blueprint: Blueprint

    @property
    def model(self) -> PreTrainedModel:
        return self.models[0]

    @property
    def fp32_parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters that stay in fp32."""
        kept = self.model_plan.fp32.names
        found = {
            id(parameter): parameter for model in self.models for parameter in model.parameters()
        }
        return [parameter for key, parameter in found.items() if self.names.get(key) in kept]


def build_model(
    recipe: Recipe,
    model_plan: ModelPlan,
    whole: PreTrainedModel,
    target: Target,
    shard_fn: Callable[[nn.Module], Any] | None = None,
) -> BuiltModel:
    """Build a recipe's model: this rank's stages and tensor shards, partitioned under ZeRO-3.

    The weights are random or read from files. `resolve_model` returns `model_plan` and `whole`, the
    model on the meta device. The result may reuse parts of `whole`.

    Parts (a layer, an embedding) are filled one after the other, so a rank stores at most one full
    part in addition to its own shards. If `target` has no groups, one process stores everything,
    and transformers' model is not changed. `shard_fn` is called with each filled layer, and finally
    with the model.

    The call is a collective operation under ZeRO-3 and with `shard_fn`. Raise `ConfigError` if the
    files lack a parameter.

    This is a collective under ZeRO-3 and with `shard_fn`. Raise `ConfigError` if the files lack a
    parameter.
    """
    target = replace(target, fp32=model_plan.fp32.names)
    groups, facts = target.groups, TASKS[recipe.task]
    weights = (
        None
        if recipe.init == "random"
        else open_weights(recipe.model, whole, recipe.labels > 0, recipe.model_revision)
    )

    # Random values require a copy of the full model, which stays on the meta device.
    uncut = copy.deepcopy(whole) if recipe.init == "random" or recipe.labels else None
    if groups and groups.mesh.sp > 1:
        sequence.apply_sequence_parallel(whole, model_plan.attention, recipe.seq_len, groups)

    # Split: select this rank's stages on the meta device.
    stages = _stages_of_rank(model_plan, whole, target, facts)

    # Materialise: shard the stages and fill in their values.
    values = InitialValues(recipe.seed, weights, uncut)
    cuts, filled = _materialise_stages(model_plan, stages, values, target, shard_fn)

    # Adapt: an adapter may replace the head, so the loss path of an unsplit model is set after
    # adapting.
    models = stages.models
    if recipe.adapt is not None:
        models = [_wrap_in_adapter(whole, _adapter_request(recipe), recipe.seed, target.ds_config)]
    if stages.models[0] is whole:
        _give_losses(model_plan, [whole], whole, facts, groups)
    make_trainable(models)

    # Files with a different head have a different layout than this model. The same is true for an
    # adapter's base model.
    blueprint = model_plan.blueprint
    if weights is not None and not recipe.labels and recipe.adapt is None:
        blueprint = with_file_locations(blueprint, weights)
    names = {id(parameter): name for name, parameter in filled.items()}
    return BuiltModel(model_plan, models, cuts, names, weights, blueprint)


def weights_target(
    ds_config: dict[str, Any], groups: ProcessGroups | None, device: torch.device
) -> Target:
    """Return the target for a model's values, in the dtype that an engine with `ds_config` uses."""
    return Target(device, dtype_of(ds_config), groups, ds_config)


def _adapter_request(recipe: Recipe) -> AdapterRequest:
    """Return the adapter request that the recipe's fields describe."""
    assert recipe.adapt is not None
    commit = commit_of(recipe.model, recipe.model_revision) or recipe.model_revision
    base = "" if recipe.init == "random" else recipe.model
    return AdapterRequest(recipe.adapt, base, recipe.merge, recipe.tp, recipe.ep, commit)


def _give_losses(
    model_plan: ModelPlan,
    models: list[PreTrainedModel],
    whole: PreTrainedModel,
    facts: TaskSpec,
    groups: ProcessGroups | None,
) -> None:
    """Make `models`, which are parts of the full model, return losses if the model plan says so."""
    tp = (model_plan.plans.tp, groups.tp_mesh if groups else None)
    apply_loss_path(model_plan.loss_path, whole, models, facts.masked, tp, model_plan.fp32.names)


@dataclass(frozen=True)
class Stages:
    """This rank's pipeline stages, or the full model without a pipeline.

    For each stage, `absent` lists the non-block modules that the stage lacks.
    """

    models: list[PreTrainedModel]
    absent: list[list[str]]


def _stages_of_rank(
    model_plan: ModelPlan, whole: PreTrainedModel, target: Target, facts: TaskSpec
) -> Stages:
    """Split a model into pipeline stages and return this rank's stages on the meta device."""
    groups, split = target.groups, model_plan.split
    if groups is None or split is None:
        return Stages([whole], [[]])
    numbers = stages_of_rank(groups.coords["pp"], groups.mesh.pp, model_plan.layout.schedule)
    models = [copy.deepcopy(whole) for _ in numbers]

    # The last stage contains the head, which must compute losses inside the forward that
    # `pipeline.make_stage` wraps.
    # `pipeline.make_stage` wraps.
    numbered = list(zip(models, numbers, strict=True))
    last = [model for model, stage in numbered if stage == split.num_stages - 1]
    _give_losses(model_plan, last, whole, facts, groups)

    absent = [
        pipeline.make_stage(model, split, stage, target.dtype, facts) for model, stage in numbered
    ]
    return Stages(models, absent)


def _materialise_stages(
    model_plan: ModelPlan,
    stages: Stages,
    values: InitialValues,
    target: Target,
    shard_fn: Callable[[nn.Module], Any] | None,
) -> tuple[dict[str, ShardSpec], dict[str, nn.Parameter]]:
    """Shard and fill the stages one by one. Return the cuts and the parameters by name."""
    cuts, filled = dict[str, ShardSpec](), dict[str, nn.Parameter]()
    for model, absent in zip(stages.models, stages.absent, strict=True):
        # If two of this rank's stages contain a parameter, both must use the same object.
        for name, parameter in model.named_parameters():
            if name in filled:
                replace_parameter(model, parameter, filled[name])

        cuts |= _shard(model, absent, model_plan, target.groups)
        fill_parameters(model, values, target, cuts, shard_fn)
        filled |= dict(model.named_parameters())
    return cuts, filled


def _shard(
    model: PreTrainedModel, absent: list[str], model_plan: ModelPlan, groups: ProcessGroups | None
) -> dict[str, ShardSpec]:
    """Shard a stage for this tensor-parallel rank, in place, and return the shard specs.

    The stage lacks the modules in `absent`.
    """
    if groups is None or groups.tp_mesh is None:
        return {}
    plans = model_plan.plans
    here = {pattern: style for pattern, style in plans.tp.items() if pattern not in absent}
    return tensor_parallel.apply_tensor_parallel(
        model, groups.tp_mesh, replace(plans, tp=here), model_plan.summed
    )


def dtype_of(ds_config: dict[str, Any]) -> torch.dtype:
    """Return the dtype of the weights that an engine with this JSON receives."""
    return (
        torch.bfloat16
        if is_block_enabled(ds_config, "bf16")
        else torch.float16
        if is_block_enabled(ds_config, "fp16")
        else torch.float32
    )


def make_trainable(models: list[PreTrainedModel]) -> None:
    """Set the models to training mode, and mark the experts that ZeRO-3 must gather together."""
    for model in models:
        model.train()
        for module in leaf_modules(model):
            set_z3_leaf_module(module, True)


def _wrap_in_adapter(
    model: PreTrainedModel, request: AdapterRequest, seed: int, ds_config: dict[str, Any]
) -> PreTrainedModel:
    """Wrap the model in the recipe's adapter, whose weights are sampled from the seed.

    Raise the same `ConfigError` as `apply_adapter`. Raise it also if `adapt` changes an attention
    implementation that separates packed documents.
    """
    torch.manual_seed(seed)
    attention = model.config._attn_implementation
    made = apply_adapter(model, request, ds_config)
    if VARLEN in (attention or "") and model.config._attn_implementation != attention:
        rule = (
            f"sets the attention to {model.config._attn_implementation}, and varlen computes the"
            " documents of the rows as they are"
        )
        raise config_error("adapt with attention = varlen", rule, "use --attention sdpa")
    return made


def check_weights(
    engine: Engine, built: BuiltModel, groups: ProcessGroups, samples: int = 8
) -> int:
    """Compare sampled parameters in the engine with the weight files, bit for bit.

    Return the number of compared parameters. This is a collective operation. Raise `ConfigError`
    for the first parameter that differs. This check detects runs that train from random weights by
    accident.
    """
    if built.weights is None:
        return 0
    read = {key for key, name in built.names.items() if name not in built.weights.sampled}
    published = [
        parameter
        for model in built.models
        for parameter in model.parameters()
        if id(parameter) in read
    ]
    chosen = published[:: max(1, len(published) // samples)]
    for parameter in chosen:
        name = built.names[id(parameter)]
        expected = built.weights.full_tensor(name).to(parameter.dtype)
        if name in built.cuts:
            assert groups.tp_mesh is not None
            # DTensor creates shards on its mesh's device.
            expected = tensor_parallel.shard_tensor(
                expected, built.cuts[name], groups.tp_mesh
            ).cpu()
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            # FSDP2's parameters are DTensors.
            value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            same = torch.equal(value.detach().cpu(), expected)
        if not same:
            raise config_error(
                name,
                "in the engine differs from the model's files",
                "this is a bug in loading. Report it with the model and the versions",
            )
    return len(chosen)
