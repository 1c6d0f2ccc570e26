"""The settings that torch's own engines read from a recipe: no JSON, data parallelism only."""

import copy
from typing import Any

from ..spec.errors import Problem
from ..spec.optimizer_specs import GRADIENT, OPTIMIZERS, canonical_name
from ..spec.recipe import AXES, Recipe
from .schema import optimizer_name

TORCH_ENGINE_NAMES = {"ddp": "torch's DDP", "fsdp2": "torch's FSDP2"}


def torch_engine_config(optimizer: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a torch engine's config in DeepSpeed's format.

    It contains unsharded fp32 weights, as in ZeRO-0, and torch's fused AdamW. `optimizer` is the
    block of the recipe's JSON for one of this project's optimizer classes. This block is the same
    under every engine.
    """
    return {
        "zero_optimization": {"stage": 0},
        "optimizer": optimizer or {"type": "AdamW", "params": {"torch_adam": True, "fused": True}},
    }


def recipe_optimizer_block(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the optimizer block of a recipe's JSON if it uses this project's class, else None."""
    name = optimizer_name(config)
    return (
        copy.deepcopy(config["optimizer"])
        if name is not None and OPTIMIZERS[name].is_own_class
        else None
    )


def check_engine(recipe: Recipe, typed: frozenset[str]) -> list[Problem]:
    """Report settings that the recipe's engine does not read or does not support."""
    if recipe.engine not in TORCH_ENGINE_NAMES:
        stated = "precision" in typed or (
            recipe.precision != Recipe.precision and "engine" not in typed
        )
        rule = (
            "applies only to the engines ddp and fsdp2, because DeepSpeed's JSON sets the precision"
        )
        fix = f"leave it out, or add --engine {' or '.join(TORCH_ENGINE_NAMES)}"
        return [Problem(f"--precision {recipe.precision}", rule, fix)] if stated else []
    found, where = [], f"engine = {recipe.engine}"
    if "ds_config" in typed or (
        recipe.ds_config not in ({}, Recipe.ds_config) and "engine" not in typed
    ):
        name = recipe.ds_config if isinstance(recipe.ds_config, str) else "(in the recipe)"
        rule = (
            f"applies only to DeepSpeed, and {TORCH_ENGINE_NAMES[recipe.engine]} does not read it"
        )
        found.append(
            Problem(
                f"--deepspeed_config {name}",
                rule,
                "leave it out (--precision sets the precision), or use --engine deepspeed",
            )
        )
    for axis in AXES:
        if (degree := getattr(recipe, axis)) > 1:
            found.append(
                Problem(
                    f"{axis} = {degree} with {where}",
                    f"{TORCH_ENGINE_NAMES[recipe.engine]} supports only data parallelism",
                    f"use --{axis} 1, or --engine deepspeed",
                )
            )
    if recipe.save_in_background:
        rule = (
            "requires DeepSpeed, because torch's engines gather the states from every rank while"
            " they write them"
        )
        found.append(
            Problem(
                f"save_in_background with {where}", rule, "leave it out, or use --engine deepspeed"
            )
        )
    if recipe.adapt is not None and recipe.engine == "fsdp2":
        rule = (
            "FSDP2 shards each layer when it reads the weights, but an adapter requires unsharded"
            " layers"
        )
        found.append(
            Problem(
                f"adapt with {where}", rule, "use --engine ddp, or ZeRO-3 with --engine deepspeed"
            )
        )
    return found


def check_optimizer(engine: str, precision: str, optimizer: dict[str, Any] | None) -> list[Problem]:
    """Report a torch engine or a precision that does not fit an optimizer of local gradients.

    Such an optimizer reads each rank's gradients before they are reduced.
    """
    if (
        engine not in TORCH_ENGINE_NAMES
        or optimizer is None
        or OPTIMIZERS[canonical_name(optimizer["type"])].acts_on != GRADIENT
    ):
        return []
    found, where = [], f"optimizer.type = {optimizer['type']} with"
    if engine == "fsdp2":
        rule = (
            "requires each rank's gradients before they are reduced, but FSDP2 reduces gradients"
            " while it shards them"
        )
        found.append(
            Problem(f"{where} engine = fsdp2", rule, "use --engine ddp, or a JSON with AdamW")
        )
    if precision == "fp16":
        rule = (
            "fp16 skips a step after an overflow, but with this optimizer the gradients differ"
            " between ranks"
        )
        found.append(Problem(f"{where} precision = fp16", rule, "use --precision bf16 or fp32"))
    return found


def check_precision(engine: str, precision: str, device: str, has_bf16: bool) -> list[Problem]:
    """Report fp16 on a device that supports bf16, and bf16 on a device that does not.

    bf16 is preferred because it requires no loss scaling.
    """
    if engine not in TORCH_ENGINE_NAMES or precision == "fp32" or (precision == "bf16") == has_bf16:
        return []
    rule, other = (
        (f"{device} supports bf16, which requires no loss scaling", "bf16")
        if has_bf16
        else (f"{device} does not support bf16", "fp16")
    )
    return [Problem(f"precision = {precision}", rule, f"use --precision {other}")]


def engine_notes(
    engine: str,
    precision: str,
    ds_config: object,
    typed: frozenset[str],
    optimizer: dict[str, Any] | None = None,
) -> list[str]:
    """Return lines about recipe settings that an engine chosen on the command line does not use.

    `optimizer` is the optimizer in the recipe's JSON if its class is part of this project. The
    engine does use this optimizer.
    """
    if "engine" not in typed:
        return []
    if engine not in TORCH_ENGINE_NAMES:
        return (
            [f"engine: DeepSpeed. The recipe's precision ({precision}) is not used"]
            if precision != Recipe.precision
            else []
        )
    name = ds_config if isinstance(ds_config, str) else "in the recipe"
    but = f", except its optimizer {optimizer['type']}" if optimizer else ""
    return [
        f"engine: {TORCH_ENGINE_NAMES[engine]} in {precision}. The recipe's JSON ({name}) is not"
        f" used{but}"
    ]
