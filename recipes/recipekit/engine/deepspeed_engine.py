"""The DeepSpeed engine for a built model, with our workarounds."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.moe.utils import configure_moe_param_groups
from transformers.modeling_layers import GradientCheckpointingLayer

from ..checkpoints.deepspeed_io import DeepSpeedStates
from ..compat.deepspeed import (
    after_step,
    before_step,
    broadcasting_scalars,
    parameters_kept,
    record_cleared_gradients,
    record_counters,
    undo_hidden_step,
    wrap_step,
)
from ..model.build import BuiltModel
from ..optim import factory
from ..optim.groups import parameter_groups
from ..optim.param_spans import find_param_spans
from ..optim.repairs import (
    accumulate,
    apply_most_norm,
    keep_grad_norm,
    keep_momentum_norm,
    sum_without_copies,
)
from ..parallel import pipeline
from ..parallel.blueprint import Blueprint, Layout, describe_stages, tensors_on_rank
from ..parallel.groups import ProcessGroups
from ..spec.engine import Engine
from ..spec.errors import Say, config_error


def make_deepspeed_engine(
    built: BuiltModel,
    groups: ProcessGroups,
    ds_config: dict[str, Any],
    loss: Callable[..., torch.Tensor],
    pipeline_schedule: str,
    say: Say,
) -> Engine:
    """Return the DeepSpeed engine for the built model (a collective operation).

    Under a pipeline, the engine contains only this rank's stages.
    """
    model: torch.nn.Module = built.model
    if (split := built.model_plan.split) is not None:
        say(f"pipeline, {pipeline_schedule}: {describe_stages(built.blueprint, split.bounds)}")
        model = pipeline.build_pipeline_module(
            built.models, groups, loss, pipeline_schedule, split.num_stages
        )
        pipeline.tie_shared_params(model, groups)
    # DeepSpeed accepts a list of groups, although its type annotation does not include it.
    trained: Any = parameter_groups(model, built.blueprint.trained)
    named: dict[str, Any] = {
        "model": model,
        "model_parameters": trained,
        "optimizer": _deepspeed_optimizer(ds_config, groups),
    }
    config = ds_config | pipeline.partition_settings(built.models[0], groups.mesh)
    with broadcasting_scalars(), parameters_kept(built.fp32_parameters):
        made: Any = deepspeed.initialize(
            **named, config=config, mpu=groups.mpu, dist_init_required=False
        )[0]
    if hasattr(made.basic_optimizer, "ranks"):  # this optimizer communicates by itself
        made.basic_optimizer.ranks = groups.dp_group
    return apply_workarounds(made)


def gather_full_layers(models: Iterable[torch.nn.Module]) -> None:
    """Make ZeRO-3 gather and release the weights of a decoder layer at once, in place.

    DeepSpeed then installs no hooks inside a layer, so a layer can be compiled as a whole. Call
    this function before the engine is made. A recomputed layer must not be gathered in this way.
    """
    for model in models:
        deepspeed.utils.set_z3_leaf_modules(model, [GradientCheckpointingLayer])


def _deepspeed_optimizer(
    ds_config: dict[str, Any], groups: ProcessGroups
) -> Callable[[Any], Any] | None:
    """Return a factory for one of our optimizers, or None if DeepSpeed creates the optimizer.

    Our optimizer replaces the one that DeepSpeed would create from the JSON.
    """
    make = factory.optimizer_factory(ds_config)
    if make is None or groups.mesh.ep == 1:
        return make
    # DeepSpeed separates the experts only for its own optimizers.
    return lambda trained: make(configure_moe_param_groups(trained))


def set_param_spans(
    ds_engine: Any, blueprint: Blueprint, layout: Layout, groups: ProcessGroups
) -> None:
    """Set the parameter spans for an optimizer that computes sums over full tensors.

    The spans describe where these tensors are in the buffers that DeepSpeed updates.
    """
    if hasattr(ds_engine.basic_optimizer, "borders"):
        ds_engine.basic_optimizer.borders = find_param_spans(
            tensors_on_rank(blueprint, layout, groups.coords["pp"]),
            layout,
            groups,
            ds_engine.optimizer,
            ds_engine.device,
        )


def apply_workarounds(ds_engine: Any) -> Engine:
    """Apply our workarounds to a DeepSpeed engine, and add the remaining methods of `Engine`."""
    undo_hidden_step(ds_engine)
    record_cleared_gradients(ds_engine.optimizer)
    keep_grad_norm(ds_engine)
    keep_momentum_norm(ds_engine)
    sum_without_copies(ds_engine)
    ds_engine.most_norm = math.inf
    apply_most_norm(ds_engine)
    if getattr(ds_engine.optimizer, "loss_scaler", None) is not None:
        wrap_step(ds_engine.optimizer, _step_in_fp16)
    states = DeepSpeedStates(ds_engine)
    ds_engine.accumulate = partial(accumulate, ds_engine)
    ds_engine.before_step, ds_engine.after_step = (
        partial(before_step, ds_engine),
        partial(after_step, ds_engine),
    )
    ds_engine.current_loss_scale = partial(_current_loss_scale, ds_engine)
    ds_engine.record_counters = partial(record_counters, ds_engine)
    ds_engine.save_states, ds_engine.load_states = states.save, states.load
    return ds_engine


def _current_loss_scale(ds_engine: deepspeed.DeepSpeedEngine) -> float | None:
    """Return the factor of the loss in fp16, or None in another precision."""
    if not ds_engine.fp16_enabled():
        return None
    # In stage 0, the scaler is a separate object.
    scaler = getattr(ds_engine.optimizer, "loss_scale_config", ds_engine.optimizer)
    return float(getattr(scaler, "cur_scale"))  # noqa: B009 (torch's class has no such attribute)


def _step_in_fp16(step: Callable[..., Any], *given: object, **named: object) -> Any:
    """Take an optimizer step.

    If gradients overflow at the smallest loss scale, raise `ConfigError` on all ranks. In this
    case, DeepSpeed 0.19.8 would raise a bare Exception (runtime/fp16/loss_scaler.py).
    """
    try:
        return step(*given, **named)
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        fix = "train in bf16, lower the learning rate, or set a smaller min_loss_scale"
        raise config_error(
            "fp16.min_loss_scale", "gradients overflow in fp16 at the smallest loss scale", fix
        ) from error
