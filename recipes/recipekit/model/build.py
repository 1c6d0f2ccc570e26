"""Builds the model that an engine trains, from its config and weights: part by part, never whole on
one rank.

    outline       the whole model on the meta device; attention, plans, blueprint
    split         this rank's pipeline stages, still on the meta device
    materialise   tensor shards of each stage, filled part by part, partitioned under ZeRO-3
    adapt         an adapter around the model, if the recipe has one
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
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
from .device import Activations
from .empty import empty_model, leaf_modules
from .head import FULL_LOGITS, Kind, LossPath, give_losses_where_exact
from .initial import FirstValues, Target, fill, replace_parameter
from .small import summed_gradients
from .weights import Weights, open_weights


@dataclass(frozen=True)
class Built:
    """The input of an engine: the model, or this rank's pipeline stages of it.

    `names` holds the Hugging Face name of each parameter by its id, since an adapter renames what
    it wraps; `cuts` says which of them are tensor-parallel shards and how. `weights` are the files
    they were read from, None after a random init. `architecture` is the name of the model's class
    in transformers; `attention` is what it computes with, and `note` says why that is not varlen,
    if it is not. `has_norms`: the whole model has BatchNorm, which model/batch_norm.py computes.
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
    loss_path: LossPath = FULL_LOGITS
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
    """Build the model of a recipe with random weights or weights from files: this rank's stages and
    tensor shards, partitioned under ZeRO-3.

    Parts (a layer, an embedding) are filled one after the other, so that no rank ever holds more
    than one full part besides its own shards. Without `groups`, one process holds everything and
    transformers' model stays as it is. `divide` is called with each filled layer, and with the
    model at the end. A collective under ZeRO-3 and with `divide`. Raises `Refusal` if the files
    lack a parameter.
    """
    dtype = dtype_of(ds_config)
    outline = _outline(recipe, model_config, groups, ds_config, device)
    weights = (
        None
        if recipe.init == "random"
        else open_weights(recipe.model, outline.whole, recipe.labels > 0, recipe.model_revision)
    )

    # Split: this rank's stages, on the meta device.
    stages = _stages_of_rank(outline, groups, dtype)

    # Materialise: the stages are sharded and get their values. Random values need the whole model.
    uncut = outline.empty() if recipe.init == "random" or recipe.labels else None
    values = FirstValues(recipe.seed, weights, uncut)
    target = Target(device, dtype, groups, ds_config)
    cuts, filled = _materialised(outline, stages, values, target, divide)

    # Adapt: an adapter may replace the head, so an unsplit model's loss path is decided after it.
    models, whole = stages.models, outline.whole
    if recipe.adapt is not None:
        models = [_with_adapter(whole, outline.adapter_request(), recipe.seed, ds_config)]
    loss_path = stages.loss_path or outline.give_losses([whole])
    make_trainable(models)

    if recipe.adapt is not None:
        blueprint = _described(models[0], adapted_plans(models[0], outline.plans))
    else:
        blueprint = _final_blueprint(outline, weights)
    check_named(blueprint.trained, outline.plans, recipe.matrices)
    return Built(
        outline.architecture,
        outline.attention,
        outline.note,
        models,
        cuts,
        {id(parameter): name for name, parameter in filled.items()},
        weights,
        stages.split,
        blueprint,
        outline.plans,
        loss_path,
        bool(norms_of(whole)),
    )


@dataclass(frozen=True)
class Outline:
    """The whole model on the meta device, and the decisions that follow from its names and shapes.

    `empty` makes another such model from `config`. `tp_mesh` is None without tensor parallelism;
    the tensor-parallel ranks sum the gradients of the parameters in `summed`. `architecture`,
    `attention` and `note` as in `Built`.
    """

    recipe: Recipe
    config: dict[str, Any]
    empty: Callable[[], PreTrainedModel]
    whole: PreTrainedModel
    architecture: str
    attention: str
    note: str
    plans: Plans
    blueprint: Blueprint
    tp_mesh: DeviceMesh | None
    summed: frozenset[str]

    def give_losses(self, models: list[PreTrainedModel]) -> LossPath:
        """Let `models`, parts of the whole model, give losses if the recipe wants them to."""
        recipe = self.recipe
        kind = Kind(self.config, recipe.task, recipe.model)
        tp = (self.plans.tp, self.tp_mesh)
        return give_losses_where_exact(recipe.loss, self.whole, models, kind, tp)

    def adapter_request(self) -> AdapterRequest:
        """Return the request for the recipe's adapter."""
        recipe = self.recipe
        assert recipe.adapt is not None
        commit = commit_of(recipe.model, recipe.model_revision) or recipe.model_revision
        base = "" if recipe.init == "random" else recipe.model
        return AdapterRequest(recipe.adapt, base, recipe.merge, recipe.tp, recipe.ep, commit)

    def shard(self, model: PreTrainedModel, absent: list[str]) -> dict[str, Cut]:
        """Shard a stage for this tensor-parallel rank, in place, and return the cuts.

        The stage has no modules `absent`.
        """
        if not self.tp_mesh:
            return {}
        here = {pattern: style for pattern, style in self.plans.tp.items() if pattern not in absent}
        plans = replace(self.plans, tp=here)
        return tensor_parallel.apply(model, self.tp_mesh, plans, self.summed)


def _outline(
    recipe: Recipe,
    model_config: dict[str, Any],
    groups: Groups | None,
    ds_config: dict[str, Any],
    device: torch.device,
) -> Outline:
    """Choose attention and plans for a recipe's model, and check that the mesh suits it.

    Raises `Refusal` if a layout or a plan does not fit.
    """
    facts, dtype = TASKS[recipe.task], dtype_of(ds_config)
    activations = Activations(
        computed_in(recipe.engine, recipe.precision, dtype),
        device,
        (recipe.micro_batch, recipe.seq_len),
    )
    attention, note = choose_attention(
        recipe.attention, model_config, recipe.model, facts, activations
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
    return Outline(
        recipe,
        model_config,
        empty,
        whole,
        architecture,
        attention,
        note,
        plans,
        blueprint,
        tp_mesh,
        summed,
    )


@dataclass(frozen=True)
class Stages:
    """This rank's pipeline stages of a model, or the whole model without a `split`.

    `absent` lists for each stage the modules besides blocks that it lacks. `loss_path` is None if
    it is not decided yet.
    """

    models: list[PreTrainedModel]
    absent: list[list[str]]
    split: pipeline.Split | None = None
    loss_path: LossPath | None = None


def _stages_of_rank(outline: Outline, groups: Groups | None, dtype: torch.dtype) -> Stages:
    """Split a model into pipeline stages and return this rank's, on the meta device."""
    if not groups or groups.mesh.pp == 1:
        return Stages([outline.whole], [[]])
    numbers = stages_of(groups.coords["pp"], groups.mesh.pp, outline.recipe.pipeline_schedule)
    split = pipeline.split(
        outline.whole, outline.blueprint, groups.mesh.pp * len(numbers), outline.plans.pp
    )
    models = [outline.empty() for _ in numbers]

    # The last stage has the head. It gives losses inside the forward that `pipeline.cut` wraps.
    numbered = list(zip(models, numbers, strict=True))
    last = [model for model, stage in numbered if stage == split.num_stages - 1]
    loss_path = outline.give_losses(last)

    facts = TASKS[outline.recipe.task]
    absent = [pipeline.cut(model, split, stage, dtype, facts) for model, stage in numbered]
    return Stages(models, absent, split, loss_path)


def _materialised(
    outline: Outline,
    stages: Stages,
    values: FirstValues,
    target: Target,
    divide: Callable[[nn.Module], Any] | None,
) -> tuple[dict[str, Cut], dict[str, nn.Parameter]]:
    """Shard and fill one stage after the other; return the cuts and the parameters by name."""
    cuts, filled = dict[str, Cut](), dict[str, nn.Parameter]()
    for model, absent in zip(stages.models, stages.absent, strict=True):
        # A parameter on both stages of a rank is one parameter.
        for name, parameter in model.named_parameters():
            if name in filled:
                replace_parameter(model, parameter, filled[name])

        cuts |= outline.shard(model, absent)
        fill(model, values, target, cuts, divide)
        filled |= dict(model.named_parameters())
    return cuts, filled


def _final_blueprint(outline: Outline, weights: Weights | None) -> Blueprint:
    """Return the blueprint of a model without an adapter, with its places in the files."""
    # Files with another head do not show how this model is written.
    if weights is not None and not outline.recipe.labels:
        return with_files(outline.blueprint, weights)
    return outline.blueprint


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


def _described(model: PreTrainedModel, plans: Plans) -> Blueprint:
    """Draft the blueprint of a model with an adapter, with the keys of the adapter's file."""
    blueprint = draft(model, plans)
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
            # DTensor shards on the device of its mesh.
            expected = tensor_parallel.shard(expected, built.cuts[name], groups.tp_mesh).cpu()
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            # FSDP2's parameters are DTensors.
            value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            same = torch.equal(value.detach().cpu(), expected)
        if not same:
            raise refuse(
                name,
                "in the engine differs from the model's files",
                "this is a bug in loading. Report it with the model and the versions",
            )
    return len(chosen)
