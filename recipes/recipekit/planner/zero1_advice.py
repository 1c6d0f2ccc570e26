"""Advice to use ZeRO-1 instead of ZeRO-2, where ZeRO-1 moves fewer bytes and also fits the device.

Under ZeRO-2, DeepSpeed 0.19.8 moves a gradient through a bucket, divides it and flattens it before
it adds it to the fp32 sums, in every micro-batch. With `sum_without_copies` of optim/repairs.py,
this reads and writes 26 bytes per parameter. ZeRO-1 adds the gradient to unsharded sums (10 bytes),
and reduces the sums once a step.
"""

from typing import Any

from ..dslint.rules import RuleContext
from ..dslint.schema import optimizer_name
from ..model.model_plan import ModelPlan
from ..plan import RunPlan
from ..spec.devices import gib
from ..spec.memory_terms import ACCELERATOR, fullest, total_bytes
from .resolve import terms_of_stages

USABLE_MEMORY = 0.93  # fraction of a device's nominal memory that programs can use at least
# With fewer micro-batches, ZeRO-1's reduction in fp32 sends more bytes than ZeRO-2's in bf16.
MIN_ACCUMULATION = 4
ZERO2_BYTES, ZERO1_BYTES = 26, 10  # per parameter and micro-batch


def zero1_advice(plan: RunPlan, model_plan: ModelPlan, memory: int) -> str:
    """Return a line that recommends ZeRO-1 for a plan with ZeRO-2, or "".

    `memory` is the device's memory in bytes. ZeRO-1 must fit with the predicted activations.
    Without a prediction, nothing is recommended.
    """
    alone = plan.mesh.dp * plan.mesh.sp == 1
    if not _could_use_zero1(plan) or not (
        alone or model_plan.load.accumulation >= MIN_ACCUMULATION
    ):
        return ""
    terms = fullest(
        terms_of_stages(
            model_plan.blueprint, model_plan.layout, _with_zero1(plan.ds_config), model_plan.load
        )
    )
    most = total_bytes([*terms, *model_plan.activations], ACCELERATOR, bounds=True)
    if not model_plan.activations or most > USABLE_MEMORY * memory:
        return ""
    return (
        f"ZeRO-1 also fits, at most {gib(most)}, and moves {ZERO1_BYTES} bytes per parameter and"
        f" micro-batch instead of {ZERO2_BYTES}: --deepspeed_config zero1.json"
    )


def _could_use_zero1(plan: RunPlan) -> bool:
    """Return True for a new run with ZeRO-2, bf16 and AdamW, whose JSON zero1.json can replace."""
    facts = RuleContext(plan.ds_config)
    return (
        plan.recipe.engine == "deepspeed"
        and facts.stage == 2
        and facts.dtype == "bf16"
        and facts.optimizer_offload == "none"
        and optimizer_name(plan.ds_config) == "AdamW"
        and plan.resume_from is None
    )


def _with_zero1(ds_config: dict[str, Any]) -> dict[str, Any]:
    """Return a ZeRO-2 JSON with the settings of ds_configs/zero1.json."""
    zero = ds_config["zero_optimization"]
    return ds_config | {
        "communication_data_type": "fp32",
        "bf16": ds_config["bf16"] | {"immediate_grad_update": True},
        "data_types": ds_config.get("data_types", {}) | {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero | {"stage": 1},
    }
