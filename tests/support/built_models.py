"""A recipe's model without a command line: resolved and built in one call, or only resolved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from recipekit.model import build
from recipekit.model.build import BuiltModel, weights_target
from recipekit.parallel.groups import ProcessGroups
from recipekit.plan import RunPlan
from recipekit.planner.resolve import TargetDevice, resolve_model
from recipekit.spec.command import RunCommand
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe
from torch import nn


def plan_of(recipe: Recipe, model_config: Any, ds_config: dict[str, Any], mesh: Mesh) -> RunPlan:
    """Return a recipe's plan without a command line."""
    command = RunCommand(recipe, "built_models", Path(), frozenset())
    return RunPlan(
        command, recipe, mesh, ds_config, None, model_config, Path("built_models"), None, ()
    )


def build_model(
    recipe: Recipe,
    model_config: Any,
    groups: ProcessGroups | None,
    ds_config: dict[str, Any],
    device: torch.device,
    divide: Callable[[nn.Module], Any] | None = None,
) -> BuiltModel:
    """Build a recipe's model on this group of ranks, or on one process without groups.

    This is a collective operation under ZeRO-3 and with `divide`. Without groups, the model keeps
    torch's BatchNorm.
    """
    plan = plan_of(recipe, model_config, ds_config, groups.mesh if groups else Mesh())
    model_plan, whole = resolve_model(
        plan, model_config, TargetDevice(device, "", compiles=False), own_norms=groups is not None
    )
    target = weights_target(ds_config, groups, device)
    return build.build_model(recipe, model_plan, whole, target, divide)
