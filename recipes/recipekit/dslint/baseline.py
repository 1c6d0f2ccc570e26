"""Says what torch's own engines take of a recipe: no JSON, data parallelism only."""

import copy
from typing import Any

from ..spec.optimizer_specs import FACTS, GRADIENT, spelled
from ..spec.recipe import AXES, Recipe
from ..spec.refusal import Problem
from .schema import optimizer_name

NAMES = {"ddp": "torch's DDP", "fsdp2": "torch's FSDP2"}


def own_config(optimizer: dict[str, Any] | None = None) -> dict[str, Any]:
    """Makes the JSON of an engine of torch, with the words of DeepSpeed's: whole fp32 weights, as
    ZeRO-0 has them, and torch's AdamW, fused.

    `optimizer`: the block of the recipe's JSON that names one of ours, which is the same under
    every engine.
    """
    return {
        "zero_optimization": {"stage": 0},
        "optimizer": optimizer or {"type": "AdamW", "params": {"torch_adam": True, "fused": True}},
    }


def own_optimizer(config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the optimizer block of a recipe's JSON if what it names is ours without offload; else
    None.
    """
    name = optimizer_name(config)
    return copy.deepcopy(config["optimizer"]) if name is not None and FACTS[name].ours else None


def check_engine(recipe: Recipe, typed: frozenset[str]) -> list[Problem]:
    """Refuses what the recipe's engine does not read, or does not have."""
    if recipe.engine not in NAMES:
        stated = "precision" in typed or (
            recipe.precision != Recipe.precision and "engine" not in typed
        )
        rule = (
            "applies only to the engines ddp and fsdp2, because DeepSpeed's JSON sets the precision"
        )
        fix = f"leave it out, or add --engine {' or '.join(NAMES)}"
        return [Problem(f"--precision {recipe.precision}", rule, fix)] if stated else []
    found, where = [], f"engine = {recipe.engine}"
    if "ds_config" in typed or (
        recipe.ds_config not in ({}, Recipe.ds_config) and "engine" not in typed
    ):
        name = recipe.ds_config if isinstance(recipe.ds_config, str) else "(in the recipe)"
        rule = f"applies only to DeepSpeed, and {NAMES[recipe.engine]} does not read it"
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
                    f"{NAMES[recipe.engine]} supports only data parallelism",
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
    """Refuses an engine of torch, or its precision, for an optimizer of ours that takes the
    gradients of each rank.
    """
    if (
        engine not in NAMES
        or optimizer is None
        or FACTS[spelled(optimizer["type"])].acts_on != GRADIENT
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
    """Refuses fp16 on a device that supports bf16, which requires no loss scaling, and bf16 on one
    that lacks it.
    """
    if engine not in NAMES or precision == "fp32" or (precision == "bf16") == has_bf16:
        return []
    rule, other = (
        (f"{device} supports bf16, which requires no loss scaling", "bf16")
        if has_bf16
        else (f"{device} does not support bf16", "fp16")
    )
    return [Problem(f"precision = {precision}", rule, f"use --precision {other}")]


def say_engine(
    engine: str,
    precision: str,
    ds_config: Any,
    typed: frozenset[str],
    optimizer: dict[str, Any] | None = None,
) -> list[str]:
    """Says in a line what of the recipe is not used, if the engine was typed over it; its JSON's
    `optimizer` is, if it is ours.
    """
    if "engine" not in typed:
        return []
    if engine not in NAMES:
        return (
            [f"engine: DeepSpeed. The recipe's precision ({precision}) is not used"]
            if precision != Recipe.precision
            else []
        )
    name = ds_config if isinstance(ds_config, str) else "in the recipe"
    but = f", except its optimizer {optimizer['type']}" if optimizer else ""
    return [f"engine: {NAMES[engine]} in {precision}. The recipe's JSON ({name}) is not used{but}"]
