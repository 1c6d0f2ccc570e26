"""Puts a built model into DeepSpeed's engine, with our repairs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.moe.utils import configure_moe_param_groups

from ..checkpoints.deepspeed_io import DeepSpeedStates
from ..model.build import Built
from ..optim import ours
from ..optim.borders import borders_of
from ..optim.groups import parameter_groups
from ..optim.repairs import (
    accumulate,
    after_step,
    before_step,
    keep_grad_norm,
    keep_momentum_norm,
    undo_hidden_step,
)
from ..parallel import pipeline
from ..parallel.blueprint import Blueprint, Layout, describe, held
from ..parallel.groups import Groups
from ..parallel.scalars import broadcasting_scalars
from ..spec.engine import Engine
from ..spec.refusal import Say, refuse


def make(
    built: Built,
    groups: Groups,
    ds_config: dict[str, Any],
    loss: Callable[..., torch.Tensor],
    pipeline_schedule: str,
    say: Say,
) -> Engine:
    """Makes DeepSpeed's engine around the built model, under a pipeline around this rank's stages
    (a collective).
    """
    model: Any = built.model
    if built.split is not None:
        say(f"pipeline, {pipeline_schedule}: {describe(built.blueprint, built.split.bounds)}")
        model = pipeline.assemble(
            built.models, groups, loss, pipeline_schedule, built.split.num_stages
        )
        pipeline.share(model, groups)
    # a list of groups, which DeepSpeed takes but does not annotate
    trained: Any = parameter_groups(model, built.blueprint.trained)
    named: Any = {
        "model": model,
        "model_parameters": trained,
        "optimizer": _optimizer(ds_config, groups),
    }
    with broadcasting_scalars():
        made: Any = deepspeed.initialize(
            **named, config=ds_config, mpu=groups.mpu, dist_init_required=False
        )[0]
    if hasattr(made.basic_optimizer, "ranks"):  # it sends to them itself
        made.basic_optimizer.ranks = groups.dp_group
    return repaired(made)


def _optimizer(ds_config: dict[str, Any], groups: Groups) -> Callable[[Any], Any] | None:
    """Returns what makes an optimizer of ours in place of the one that DeepSpeed would make by the
    JSON; None where DeepSpeed makes it.
    """
    make = ours.maker(ds_config)
    if make is None or groups.mesh.ep == 1:
        return make
    # DeepSpeed splits the experts off for its own only
    return lambda trained: make(configure_moe_param_groups(trained))


def give_borders(made: Any, blueprint: Blueprint, layout: Layout, groups: Groups) -> None:
    """Tells an optimizer of ours that takes sums over whole tensors where those lie in what
    DeepSpeed gives it to update.
    """
    if hasattr(made.basic_optimizer, "borders"):
        made.basic_optimizer.borders = borders_of(
            held(blueprint, layout, groups.coords["pp"]),
            layout,
            groups,
            made.optimizer,
            made.device,
        )


def repaired(made: Any) -> Engine:
    """Mends what `deepspeed.initialize` made, and gives it what an `Engine` has besides."""
    undo_hidden_step(made)
    keep_grad_norm(made)
    keep_momentum_norm(made)
    if getattr(made.optimizer, "loss_scaler", None) is not None:
        made.optimizer.step = partial(_step_in_fp16, made.optimizer.step)
    states = DeepSpeedStates(made)
    made.accumulate = partial(accumulate, made)
    made.before_step, made.after_step = partial(before_step, made), partial(after_step, made)
    made.save_states, made.load_states = states.save, states.load
    return made


def _step_in_fp16(step: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Take an optimizer step.

    Raises `Refusal`, on all ranks, if gradients overflow at the smallest loss scale.

    DeepSpeed 0.19.8 raises a bare Exception there (runtime/fp16/loss_scaler.py).
    """
    try:
        return step(*given, **named)
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        fix = "train in bf16, lower the learning rate, or set a smaller min_loss_scale"
        raise refuse(
            "fp16.min_loss_scale", "gradients overflow in fp16 at the smallest loss scale", fix
        ) from error
