"""Fills a strategy's JSON in: numbers only, nothing "auto", every default that matters written
out.
"""

from typing import Any

from ..spec.mesh import Mesh
from ..spec.optimizer_specs import facts_of
from ..spec.recipe import Recipe
from .numbers import degrees_in, literals
from .rules import Facts
from .schema import optimizer_name, optimizer_params, takes_number, walk
from .shapes import shape_of

FREEZE_PERCENT = 15  # of the steps, which an "auto" of 1-bit Adam's freeze_step stands for


def resolve(
    config: dict[str, Any], recipe: Recipe, mesh: Mesh, model_config: dict[str, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    """Returns the JSON as DeepSpeed gets it, and one line for each recipe default that a literal of
    the JSON beats.

    Every "auto" becomes a number, and the recipe's numbers that the JSON does not mention are
    added. The JSON's degrees are taken out, since the recipes lay out the ranks themselves. From
    `mesh` come back sp, because DeepSpeed's batch arithmetic counts ranks, and ep, which DeepSpeed
    carries out. `config` must have passed `check`.
    """
    found, resolved = walk(config)
    assert not found, found

    said = literals(resolved)
    lines = [
        f"{field}: the JSON's {value} overrides the recipe's {getattr(recipe, field)}"
        for field, value in (said | degrees_in(resolved)).items()
        if value != getattr(recipe, field)
    ]
    batch = {
        field: said.get(field, getattr(recipe, field))
        for field in ("global_batch", "micro_batch", "gradient_clipping")
    }
    lines += _set_batch(resolved, batch, recipe.ramp.most, mesh)
    numbers = {
        "lr": recipe.lr,
        "weight_decay": recipe.weight_decay,
        "betas": [recipe.beta1, recipe.beta2],
        "eps": recipe.eps,
    }
    lines += _fill_in_optimizer(resolved, numbers, recipe.steps)
    _allow_optimizer(resolved)
    _fill_in_zero(resolved, model_config, mesh)
    _set_degrees(resolved, mesh, recipe.pipeline_schedule)
    return resolved, lines


def _set_batch(
    resolved: dict[str, Any], batch: dict[str, Any], most_rows: int, mesh: Mesh
) -> list[str]:
    """Set the numbers of the first step; `most_rows` is the largest global batch of the run.

    Return a line if gradients are summed with less precision than fp32.
    """
    global_batch, micro_batch = batch["global_batch"], batch["micro_batch"]
    resolved["train_batch_size"] = global_batch
    resolved["train_micro_batch_size_per_gpu"] = micro_batch
    resolved["gradient_accumulation_steps"] = global_batch // (micro_batch * mesh.dp)
    resolved["gradient_clipping"] = batch["gradient_clipping"]

    steps = max(global_batch, most_rows) // (micro_batch * mesh.dp)
    facts = Facts(resolved)
    if steps > 1 and facts.stage == 0 and facts.dtype != "fp32":
        return [
            f"gradients: ZeRO-0 sums the {steps} micro-batches of a step in {facts.dtype};"
            " zero1.json sums them in fp32"
        ]
    return []


def _fill_in_optimizer(resolved: dict[str, Any], numbers: dict[str, Any], steps: int) -> list[str]:
    """Fill in the optimizer and its numbers; return a line for each decision.

    `numbers` are the recipe's, by their keys in optimizer.params; `steps` is the run's length.
    """
    lines = []
    if "optimizer" not in resolved:
        offloaded = Facts(resolved).offload != "none"
        resolved["optimizer"] = {
            "type": "AdamW",
            "params": {} if offloaded else {"torch_adam": True, "fused": True},
        }
        lines.append("optimizer: the JSON names no optimizer, so the run uses AdamW")

    params = resolved["optimizer"].setdefault("params", {})
    takes = optimizer_params(resolved, optimizer_name(resolved))
    for key, number in numbers.items():
        if takes_number(takes, key) and params.get(key, "auto") == "auto":
            params[key] = number

    if params.get("freeze_step") == "auto":
        params["freeze_step"] = max(1, steps * FREEZE_PERCENT // 100)
    if params.get("freeze_step", 0) >= steps > 0:
        lines.append(
            f"optimizer.params.freeze_step: {params['freeze_step']} of {steps} steps, so the"
            " run never sends 1-bit signs"
        )
    return lines


def _allow_optimizer(resolved: dict[str, Any]) -> None:
    """Set the switches with which DeepSpeed accepts an optimizer that it has not tested."""
    facts, kept = Facts(resolved), facts_of(resolved)
    if facts.stage > 0 and not kept.tested:
        # the rules let no optimizer pass that ZeRO's flat pieces would change
        resolved["zero_allow_untested_optimizer"] = True
    if kept.ours and facts.offload != "none":
        resolved["zero_force_ds_cpu_optimizer"] = False  # ours is updated on the host by torch


def _fill_in_zero(
    resolved: dict[str, Any], model_config: dict[str, Any] | None, mesh: Mesh
) -> None:
    """Fill in the ZeRO stage, and the sizes (in elements) that an "auto" stands for."""
    zero = resolved.setdefault("zero_optimization", {})
    zero.setdefault("stage", 0)

    hidden = shape_of(model_config, "hidden_size", "n_embd", "d_model")
    bucket = max(hidden, 4096) ** 2  # smaller buckets waste the network on many short messages
    widest = 0
    if zero["stage"] == 2:
        # beside sums in fp32 ZeRO-2 keeps each larger gradient until backward has ended (DeepSpeed
        # 0.19.8: copy_grads_in_partition)
        inner = shape_of(model_config, "intermediate_size", "n_inner", "d_ff", "ffn_dim")
        widest = hidden * (inner or 4 * hidden) // mesh.tp
    sizes = {
        "reduce_bucket_size": max(bucket, widest),
        "stage3_prefetch_bucket_size": int(0.9 * bucket),
        "stage3_param_persistence_threshold": 10 * (hidden or 4096),
    }
    zero |= {key: size for key, size in sizes.items() if zero.get(key) == "auto"}


def _set_degrees(resolved: dict[str, Any], mesh: Mesh, schedule: str) -> None:
    """Replace the JSON's parallel degrees by the blocks that DeepSpeed needs for this mesh."""
    for block in ("tensor_parallel", "expert_parallel", "pipeline", "sequence_parallel_size"):
        resolved.pop(block, None)
    # DeepSpeed divides what stages send by tp unless told, which DualPipeV refuses
    if mesh.pp > 1 and schedule == "dualpipev":
        resolved["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    if mesh.sp > 1:
        resolved["sequence_parallel_size"] = mesh.sp
    if mesh.ep > 1:
        resolved["expert_parallel"] = {"enabled": True, "autoep_size": mesh.ep}
