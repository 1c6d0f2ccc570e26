"""Puts a built model into DeepSpeed's engine, with our repairs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch

from ..checkpoints.deepspeed_io import DeepSpeedStates
from ..engine import Engine
from ..model.build import Built
from ..optim.groups import parameter_groups
from ..optim.repairs import after_step, before_step, keep_grad_norm, undo_hidden_step
from ..parallel import pipeline
from ..parallel.blueprint import describe
from ..parallel.groups import Groups
from ..refusal import Say


def make(built: Built, groups: Groups, ds_config: dict[str, Any], loss: Callable[..., torch.Tensor], pipeline_schedule: str, say: Say) -> Engine:
    """Makes DeepSpeed's engine around the built model, under a pipeline around this rank's stages (a collective)."""
    model: Any = built.model
    if built.split is not None:
        say(f"pipeline, {pipeline_schedule}: {describe(built.blueprint, built.split.bounds)}")
        model = pipeline.assemble(built.models, groups, loss, pipeline_schedule, built.split.num_stages)
        pipeline.share(model, groups)
    trained: Any = parameter_groups(model, built.plans.no_decay)  # a list of groups, which DeepSpeed takes but does not annotate
    made: Any = deepspeed.initialize(model=model, model_parameters=trained, config=ds_config, mpu=groups.mpu, dist_init_required=False)[0]
    return repaired(made)


def repaired(made: Any) -> Engine:
    """Mends what `deepspeed.initialize` made, and gives it what an `Engine` has besides."""
    undo_hidden_step(made)
    keep_grad_norm(made)
    states = DeepSpeedStates(made)
    made.before_step, made.after_step = partial(before_step, made), partial(after_step, made)
    made.save_states, made.load_states = states.save, states.load
    return made
