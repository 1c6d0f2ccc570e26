"""Completion of a strategy's JSON: only numbers, no "auto", every relevant default written out."""

from typing import Any

from ..spec.mesh import Mesh
from ..spec.optimizer_specs import optimizer_spec_of
from ..spec.recipe import Recipe
from .compiling import layer_numel
from .numbers import read_literals, valid_degrees
from .rules import RuleContext
from .schema import check_keys, optimizer_name, optimizer_params, takes_number
from .shapes import read_config_size

# Largest automatic reduce bucket of a full layer, in elements. A larger one would save few
# messages, but hold more memory during the whole run.
MAX_LAYER_BUCKET = 200_000_000


def resolve_ds_config(
    config: dict[str, Any], recipe: Recipe, mesh: Mesh, model_config: dict[str, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON for DeepSpeed, and one line for each recipe default that the JSON overrides.

    Every "auto" becomes a number, and the recipe's numbers that the JSON does not contain are
    added. The JSON's degrees are removed, because the recipes assign the ranks themselves. The
    degrees sp and ep are then added from `mesh`, because DeepSpeed's batch arithmetic counts ranks
    and DeepSpeed implements ep. `config` must have passed `lint_config`.
    """
    found, resolved = check_keys(config)
    assert not found, found

    said = read_literals(resolved)
    lines = [
        f"{field}: the JSON's {value} overrides the recipe's {getattr(recipe, field)}"
        for field, value in (said | valid_degrees(resolved)).items()
        if value != getattr(recipe, field)
    ]
    batch = {
        field: said.get(field, getattr(recipe, field))
        for field in ("global_batch", "micro_batch", "gradient_clipping")
    }
    lines += _set_batch(resolved, batch, recipe.ramp.max_rows, mesh)
    numbers = {
        "lr": recipe.lr,
        "weight_decay": recipe.weight_decay,
        "betas": [recipe.beta1, recipe.beta2],
        "eps": recipe.eps,
    }
    lines += _fill_in_optimizer(resolved, numbers, recipe.steps)
    _set_optimizer_switches(resolved)
    _fill_in_zero(resolved, model_config, mesh, adapted=recipe.adapt is not None)
    _set_degrees(resolved, mesh, recipe.pipeline_schedule)
    return resolved, lines


def _set_batch(
    resolved: dict[str, Any], batch: dict[str, Any], most_rows: int, mesh: Mesh
) -> list[str]:
    """Set the numbers of the first step. `most_rows` is the largest global batch of the run.

    Return a line if gradients are summed with less precision than fp32.
    """
    global_batch, micro_batch = batch["global_batch"], batch["micro_batch"]
    resolved["train_batch_size"] = global_batch
    resolved["train_micro_batch_size_per_gpu"] = micro_batch
    resolved["gradient_accumulation_steps"] = global_batch // (micro_batch * mesh.dp)
    resolved["gradient_clipping"] = batch["gradient_clipping"]

    steps = max(global_batch, most_rows) // (micro_batch * mesh.dp)
    facts = RuleContext(resolved)
    if steps > 1 and facts.stage == 0 and facts.dtype != "fp32":
        return [
            f"gradients: ZeRO-0 sums the {steps} micro-batches of a step in {facts.dtype};"
            " zero1.json sums them in fp32"
        ]
    return []


def _fill_in_optimizer(resolved: dict[str, Any], numbers: dict[str, Any], steps: int) -> list[str]:
    """Fill in the optimizer and its numbers, and return a line for each decision.

    `numbers` contains the recipe's numbers, by their keys in optimizer.params. `steps` is the
    length of the run.
    """
    lines = []
    if "optimizer" not in resolved:
        offloaded = RuleContext(resolved).optimizer_offload != "none"
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

    for key, percent in optimizer_spec_of(resolved).step_percents.items():
        if params.get(key) == "auto":
            params[key] = max(1, steps * percent // 100)
    if params.get("freeze_step", 0) >= steps > 0:
        lines.append(
            f"optimizer.params.freeze_step: {params['freeze_step']} of {steps} steps, so the"
            " run never sends 1-bit signs"
        )
    return lines


def _set_optimizer_switches(resolved: dict[str, Any]) -> None:
    """Set the switches that make DeepSpeed accept an optimizer that it has not tested."""
    facts, kept = RuleContext(resolved), optimizer_spec_of(resolved)
    if facts.stage > 0 and not kept.tested:
        # The rules reject optimizers whose results ZeRO's flat partitions would change.
        resolved["zero_allow_untested_optimizer"] = True
    if kept.is_own_class and facts.optimizer_offload != "none":
        resolved["zero_force_ds_cpu_optimizer"] = False  # torch updates our class on the host


def _fill_in_zero(
    resolved: dict[str, Any], model_config: dict[str, Any] | None, mesh: Mesh, adapted: bool
) -> None:
    """Fill in the ZeRO stage and the sizes (in elements) that replace an "auto".

    If the model is `adapted`, only the weights of the adapter have gradients.
    """
    zero = resolved.setdefault("zero_optimization", {})
    zero.setdefault("stage", 0)

    hidden = read_config_size(model_config, "hidden_size", "n_embd", "d_model")
    bucket = max(hidden, 4096) ** 2  # smaller buckets waste the network on many short messages
    widest = 0
    if zero["stage"] == 2:
        # If gradients are summed in fp32, ZeRO-2 stores each gradient that exceeds the bucket until
        # backward has ended (DeepSpeed 0.19.8: copy_grads_in_partition).
        inner = read_config_size(model_config, "intermediate_size", "n_inner", "d_ff", "ffn_dim")
        widest = hidden * (inner or 4 * hidden) // mesh.tp
    layer = layer_numel(model_config, mesh.tp) if _gathers_weights(zero) else 0
    if layer:
        # Room for two layers, because DeepSpeed prefetches only within this limit.
        zero.setdefault("stage3_max_live_parameters", max(1_000_000_000, 2 * layer))
    sizes = {
        "reduce_bucket_size": max(bucket, widest, 0 if adapted else min(layer, MAX_LAYER_BUCKET)),
        "stage3_prefetch_bucket_size": layer or int(0.9 * bucket),
        "stage3_param_persistence_threshold": 10 * (hidden or 4096),
    }
    zero |= {key: size for key, size in sizes.items() if zero.get(key) == "auto"}


def fit_overlap(resolved: dict[str, Any], mesh: Mesh, shipped: bool) -> list[str]:
    """Switch `overlap_comm` off in a resolved ZeRO-2 JSON if no other rank sums its gradients.

    With `overlap_comm`, ZeRO-2 (DeepSpeed 0.19.8) waits for the device after each backward pass and
    allocates a second bucket. Only a `shipped` file is changed. For any other JSON, the value stays
    as its author wrote it, and a line is returned.
    """
    facts, zero = RuleContext(resolved), resolved["zero_optimization"]
    overlaps = facts.stage == 2 and zero.get("overlap_comm") is True
    if not overlaps or facts.optimizer_offload != "none" or mesh.dp * mesh.sp > 1:
        return []
    if shipped:
        zero["overlap_comm"] = False
        return []
    return [
        "zero_optimization.overlap_comm: true costs time and a second bucket, because no other"
        " rank sums these gradients; false has the same results"
    ]


def _gathers_weights(zero: dict[str, Any]) -> bool:
    """Return True for ZeRO-3 without weights that are offloaded to save the device's memory."""
    offload = zero.get("offload_param") or {}
    return zero["stage"] == 3 and offload.get("device", "none") == "none"


def _set_degrees(resolved: dict[str, Any], mesh: Mesh, schedule: str) -> None:
    """Replace the JSON's parallel degrees with the blocks that DeepSpeed needs for this mesh."""
    for block in ("tensor_parallel", "expert_parallel", "pipeline", "sequence_parallel_size"):
        resolved.pop(block, None)
    # By default, DeepSpeed uses tp to partition the tensors sent between stages, which DualPipeV
    # rejects.
    if mesh.pp > 1 and schedule == "dualpipev":
        resolved["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    if mesh.sp > 1:
        resolved["sequence_parallel_size"] = mesh.sp
    if mesh.ep > 1:
        resolved["expert_parallel"] = {"enabled": True, "autoep_size": mesh.ep}
