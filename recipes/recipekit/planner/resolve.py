"""Resolution of a run's model. Every decision is made once, before anything large is allocated."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..compat.torch import pins_exactly
from ..dslint.compiling import compiles_full_layers, leaf_obstacle
from ..model.adapter import AdapterRequest, apply_adapter, published_keys
from ..model.attention import choose_attention
from ..model.batch_norm import norms_of
from ..model.describe import draft_blueprint
from ..model.device import Activations
from ..model.empty import empty_model
from ..model.flops import Flops, model_flops
from ..model.fp32_parameters import (
    Fp32Parameters,
    Fp32Request,
    choose_fp32_parameters,
    fp32_not_kept,
)
from ..model.loss_path import LossPath, ModelRef, choose_loss_path
from ..model.model_plan import LAYERS, PARTS, UNCOMPILED, CompileChoice, ModelPlan
from ..model.probes import partial_gradient_names
from ..model.untied_head import config_of_files
from ..parallel import expert, pipeline, sequence, tensor
from ..parallel.blueprint import Blueprint, Layout, stage_bounds, stages_of_rank
from ..parallel.param_groups import check_group_names
from ..parallel.plans import adapted_plans, resolve_plans
from ..plan import RunPlan
from ..spec.command import RunCommand
from ..spec.devices import DEVICES, find_device
from ..spec.errors import ConfigError, Problem
from ..spec.memory_terms import MemoryRequest, Term
from ..spec.mesh import Mesh
from ..spec.optimizer_specs import has_matrix_rule
from ..spec.task_specs import PACKED, Plans, TaskSpec
from .activations import activation_terms, layer_shape
from .memory import rank_terms

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TargetDevice:
    """The device for which a model is resolved.

    `name` is torch's name for the device, or "" if unknown. `compiles` is True if `--compile auto`
    compiles on this device.
    """

    device: torch.device
    name: str
    compiles: bool


def resolve_model(
    plan: RunPlan, model_config: dict[str, Any], target: TargetDevice, own_norms: bool = True
) -> tuple[ModelPlan, PreTrainedModel]:
    """Make every decision about a plan's model.

    Return the decisions and the full model on the meta device, which `build_model` fills. A dry
    run, the doctor and every start call this function. `model_config` is the final config.json.
    `own_norms` is True if the run computes BatchNorm itself (model/batch_norm.py). No weights and
    no process group are needed. Raises `ConfigError` for a choice or a layout that the model does
    not support.
    """
    recipe, mesh, facts = plan.recipe, plan.mesh, plan.recipe.task_spec
    attention, note = choose_attention(
        recipe.attention, model_config, recipe.model, facts, _attended(plan, target)
    )
    whole = empty_model(
        model_config, attention, recipe.model, recipe.recompute, facts.auto_class, own_norms
    )
    plans = _plans(plan, whole)
    refuse_degrees(plan, whole, plans)
    fp32, drafted = _draft(plan, whole, plans)
    split = _split(plan, whole, plans, drafted)
    base, model, blueprint = _trained_model(plan, whole, plans, drafted)
    check_group_names(blueprint.trained, plans, recipe.matrices)
    loss_path = _loss_path(plan, ModelRef(model_config, recipe.task, recipe.model), base, plans)
    layout = planned_layout(mesh, blueprint, recipe.pipeline_schedule)
    pipeline.check_stages(blueprint, layout.bounds)

    compiled = compile_choice(plan, model_config["model_type"], target)
    load = _load(plan, model, loss_path, compiled)
    model_plan = ModelPlan(
        model_config=model_config,
        architecture=type(whole).__name__,
        attention=attention,
        attention_note=note,
        loss_path=loss_path,
        compile=compiled,
        plans=plans,
        blueprint=blueprint,
        layout=layout,
        split=split,
        summed=_summed(plan, model_config, plans),
        has_batch_norm=bool(norms_of(whole)),
        load=load,
        terms=terms_of_stages(blueprint, layout, plan.ds_config, load),
        activations=tuple(_activations(plan, model_config, attention, compiled.scope)),
        flops=_flops(model, facts, target),
        fp32=fp32,
    )
    return model_plan, whole


def resolve_here(plan: RunPlan) -> tuple[ModelPlan, PreTrainedModel]:
    """Resolve a plan's model without a start.

    The config.json is the one that matches the local files. The device is the one that the command
    names, or this machine's device.
    """
    seen = target_device(plan.command)
    name = seen[0] if seen else ""
    target = TargetDevice(
        torch.device("cuda" if seen else "cpu"), name, compiles=name.startswith("NVIDIA")
    )
    return resolve_model(plan, config_in_files(plan)[0], target)


def config_in_files(plan: RunPlan) -> tuple[dict[str, Any], str]:
    """Return (the config.json that matches the model's local files, a line about a difference).

    The line is "" if there is no difference. No other files are read.
    """
    assert plan.model_config is not None
    if plan.recipe.init != "pretrained" or not Path(plan.recipe.model).is_dir():
        return plan.model_config, ""
    return config_of_files(plan.model_config, plan.recipe.model, plan.recipe.task_spec.auto_class)


def target_device(command: RunCommand) -> tuple[str, int] | None:
    """Return (name, bytes) of the device that the command names, or of torch's first device."""
    if command.device:
        name, device = find_device(command.device)
        return name, device.memory
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), torch.cuda.get_device_properties().total_memory
    return None


def _attended(plan: RunPlan, target: TargetDevice) -> Activations:
    """Return the properties of the tensors on which a plan's attention computes."""
    dtype = PRECISIONS.get(plan.precision, torch.float32)
    return Activations(dtype, target.device, (plan.recipe.micro_batch, plan.recipe.seq_len))


def _plans(plan: RunPlan, whole: PreTrainedModel) -> Plans:
    """Return a full model's resolved plans."""
    facts = plan.recipe.task_spec
    matrices = facts.matrices if has_matrix_rule(plan.ds_config) else ()
    return resolve_plans(whole, plan.recipe.plans, facts.plans, matrices)


def refuse_degrees(plan: RunPlan, model: PreTrainedModel, plans: Plans) -> None:
    """Raise `ConfigError` for an sp, ep or tp degree that the model does not support."""
    if plan.mesh.sp > 1:
        sequence.check_sequence_parallel(model, plan.recipe.seq_len)
    if plan.mesh.ep > 1:
        expert.check_expert_parallel(model, plan.mesh.ep)
    if plan.mesh.tp > 1:
        tensor.check_tp_plan(model, plans.tp)


def _summed(plan: RunPlan, model_config: dict[str, Any], plans: Plans) -> frozenset[str]:
    """Return the parameters whose gradients the tensor-parallel ranks sum."""
    if plan.mesh.tp == 1:
        return frozenset()
    recipe = plan.recipe
    return partial_gradient_names(model_config, recipe.task_spec, plans, recipe.model)


def _draft(plan: RunPlan, whole: PreTrainedModel, plans: Plans) -> tuple[Fp32Parameters, Blueprint]:
    """Return the parameters that stay in fp32, and the blueprint without an adapter.

    DeepSpeed needs the same optimizer groups on all stages of a pipeline. If a stage would lack one
    with fp32 parameters, none stay in fp32.
    """
    fp32 = _fp32_parameters(plan, whole)
    drafted = draft_blueprint(whole, plans, fp32)
    stages = num_stages(plan.mesh, plan.recipe.pipeline_schedule)
    if fp32.grouped and 1 < stages <= drafted.num_layers:
        missing = pipeline.missing_groups(drafted, stage_bounds(drafted, stages))
        if lacking := [stage for stage, group in missing if group.fp32]:
            reason = f"pipeline stage {lacking[0]} has no such parameter of an optimizer group"
            fp32 = fp32_not_kept(len(fp32.names), plan.precision, reason)
            drafted = draft_blueprint(whole, plans, fp32)
    return fp32, drafted


def _fp32_parameters(plan: RunPlan, whole: PreTrainedModel) -> Fp32Parameters:
    """Return the parameters of the full model that the run keeps in fp32."""
    recipe = plan.recipe
    request = Fp32Request(
        recipe.engine, plan.precision, plan.mesh.ep, recipe.adapt is not None, plan.ds_config
    )
    return choose_fp32_parameters(whole, request)


def _split(
    plan: RunPlan, whole: PreTrainedModel, plans: Plans, blueprint: Blueprint
) -> pipeline.StageSplit | None:
    """Return the split into pipeline stages, or None without a pipeline."""
    if plan.mesh.pp == 1:
        return None
    stages = num_stages(plan.mesh, plan.recipe.pipeline_schedule)
    return pipeline.split_stages(whole, blueprint, stages, plans.pp)


def _trained_model(
    plan: RunPlan, whole: PreTrainedModel, plans: Plans, drafted: Blueprint
) -> tuple[PreTrainedModel, PreTrainedModel, Blueprint]:
    """Return (the model without a wrapper, the model that is trained, its blueprint).

    The recipe's adapter wraps a copy, because the builder fills `whole` before adapting it, and the
    adapter may replace modules of the model that it wraps. `drafted` is the blueprint without an
    adapter.
    """
    recipe = plan.recipe
    if recipe.adapt is None:
        return whole, whole, drafted
    base = copy.deepcopy(whole)
    request = AdapterRequest(recipe.adapt, recipe.model, recipe.merge, recipe.tp, recipe.ep)
    model = apply_adapter(base, request, plan.ds_config)
    blueprint = draft_blueprint(model, adapted_plans(model, plans))
    keys = {
        key: blueprint.aliases.get(name, (name,))[0] for key, name in published_keys(model).items()
    }
    return base, model, replace(blueprint, adapter=keys)


def _loss_path(plan: RunPlan, kind: ModelRef, base: PreTrainedModel, plans: Plans) -> LossPath:
    """Return the loss computation for a model, given without an adapter's wrapper."""
    tp_plan = plans.tp if plan.mesh.tp > 1 else {}
    return choose_loss_path(plan.recipe.loss, base, [], kind, (tp_plan, None))


def _load(
    plan: RunPlan, model: PreTrainedModel, loss_path: LossPath, compiled: CompileChoice
) -> MemoryRequest:
    """Return the run's settings that affect a rank's memory in addition to the model."""
    recipe, mesh = plan.recipe, plan.mesh
    places, classes = count_logits(model, recipe.task_spec, recipe.seq_len // mesh.sp)
    return MemoryRequest(
        micro_batch=recipe.micro_batch * recipe.task_spec.rows_per_sample,
        seq_len=places,
        accumulation=recipe.ramp.max_rows // (mesh.dp * recipe.micro_batch),
        vocabulary=classes,
        chunked=loss_path.chunked,
        background=recipe.save_in_background,
        adapted=recipe.adapt is not None,
        engine=recipe.engine,
        half=recipe.engine != "deepspeed" and plan.precision != "fp32",
        exact_pins=pins_exactly(),
        full_layers=compiled.scope == LAYERS,
    )


def count_logits(model: PreTrainedModel, facts: TaskSpec, seq_len: int) -> tuple[int, int]:
    """Count the logits that the loss needs: (positions in a row, outputs at each position).

    The outputs are the vocabulary, or the classes of each token or of the row.
    """
    if (head := model.get_output_embeddings()) is not None:
        return seq_len, head.weight.shape[0]
    if not facts.has_classes:
        return 1, 0
    return seq_len if facts.labels_in_place else 1, model.config.num_labels or 0


def planned_layout(mesh: Mesh, blueprint: Blueprint, pipeline_schedule: str) -> Layout:
    """Return a recipe's layout, with the fields that are needed for counting."""
    bounds = stage_bounds(blueprint, num_stages(mesh, pipeline_schedule)) if mesh.pp > 1 else ()
    return Layout(mesh, 0, "torch", "float32", bounds, pipeline_schedule)


def terms_of_stages(
    blueprint: Blueprint, layout: Layout, ds_config: dict[str, Any], load: MemoryRequest
) -> tuple[tuple[Term, ...], ...]:
    """Return the memory terms of one rank for each pipeline stage."""
    return tuple(
        tuple(rank_terms(blueprint, layout, ds_config, load, pp_rank))
        for pp_rank in range(layout.mesh.pp)
    )


def num_stages(mesh: Mesh, pipeline_schedule: str) -> int:
    """Return the number of stages in a pipeline."""
    return mesh.pp * len(stages_of_rank(0, mesh.pp, pipeline_schedule))


def compile_choice(plan: RunPlan, model_type: str, target: TargetDevice) -> CompileChoice:
    """Return the parts that torch.compile compiles, which depend on the model, layout and device.

    A start also needs a working compiler on every rank. Raises `ConfigError` for an activation
    budget without full layers.
    """
    choice = _compile_choice(plan, model_type, target)
    refuse_budget(plan.recipe.activation_budget, choice)
    return choice


def _compile_choice(plan: RunPlan, model_type: str, target: TargetDevice) -> CompileChoice:
    recipe = plan.recipe
    if recipe.compile == "off":
        return CompileChoice(UNCOMPILED, "--compile off")
    if recipe.compile == "auto" and not target.compiles:
        return CompileChoice(UNCOMPILED, "--compile auto compiles on NVIDIA GPUs only")
    if not compiles_full_layers(model_type, recipe.tp, recipe.sp, recipe.ep):
        return CompileChoice(PARTS, "this model or layout does not allow whole layers")
    if why := leaf_obstacle(plan.ds_config, recipe.recompute, recipe.adapt is not None):
        return CompileChoice(PARTS, why)
    return CompileChoice(LAYERS, "no hooks or collectives run inside a layer")


def refuse_budget(budget: float, choice: CompileChoice) -> None:
    """Raise `ConfigError` if an activation budget below 1 has no compiled layers to apply to."""
    if budget < 1 and choice.scope != LAYERS:
        fix = (
            "use --compile on"
            if choice.scope == UNCOMPILED
            else "leave it out, and use --recompute_every N to save memory"
        )
        rule = f"requires layers that are compiled as a whole, but {choice.why}"
        raise ConfigError([Problem(f"activation_budget = {budget}", rule, fix)], exit_code=2)


def _activations(
    plan: RunPlan, model_config: dict[str, Any], attention: str, scope: str
) -> list[Term]:
    """Predict a rank's activations, or return [] if no formula is known.

    There is no formula for other kinds of layers, adapters, pipelines, other engines or a dense
    mask.
    """
    recipe, mesh = plan.recipe, plan.mesh
    compiled = "" if scope == UNCOMPILED else scope
    shape = (
        layer_shape(model_config, mesh.tp, mesh.sp, compiled)
        if recipe.task_spec.rows == PACKED
        else None
    )
    if (
        shape is None
        or recipe.adapt is not None
        or mesh.pp > 1
        or recipe.engine != "deepspeed"
        or attention not in ("varlen", "flash_attention_2")
    ):
        return []
    tokens = recipe.micro_batch * recipe.seq_len // mesh.sp
    width = 4 if plan.precision == "fp32" else 2
    layers = model_config["num_hidden_layers"]
    return activation_terms(
        shape, tokens, width, layers, recipe.recompute, recipe.activation_budget
    )


def _flops(model: PreTrainedModel, facts: TaskSpec, target: TargetDevice) -> Flops | None:
    """Count a step's FLOPs, or return None if they are unknown.

    They are unknown for a device without a known peak, and for a model with layers that cannot be
    counted.
    """
    if target.name not in DEVICES:
        return None
    flops = model_flops(model, PACKED if facts.reads_tokens else facts.rows)
    return replace(flops, bidirectional=facts.bidirectional) if flops else None
