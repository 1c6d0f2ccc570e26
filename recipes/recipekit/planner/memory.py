"""The memory of a run before it exists: what each rank holds of states, gradients, copies, buffers
and pinned host memory, in bytes.

Arithmetic only: nothing here imports torch, so a cluster that nobody holds yet can be planned for.
The terms are those of DeepSpeed 0.19.8, found in its sources and held against the live storages of
real ranks by tests/planner/test_memory.py, except NVMe's. Activations are not among them.

One function counts the terms of each engine class: the classes without ZeRO partitions of gradients
are here, the others in zero1_2.py, zero3.py and torch_engines.py.
"""

from math import prod
from typing import Any

from ..kernels.blocks import columns_at_once
from ..parallel.blueprint import Blueprint, Layout, Tensor, held, local_shape
from ..spec.optimizer_specs import FACTORS, GRADIENT, by_matrix, facts_of, states_of
from .groups import Group, groups_of
from .load import (
    Load,
    copied_bytes,
    gradient_moments,
    is_enabled,
    sent_width,
    state_bytes,
    temporaries,
)
from .terms import ACCELERATOR, BACKWARD, HOST, LOSS, NVME, REDUCE, STEP, Term
from .torch_engines import ddp_terms, fsdp2_terms
from .whole_tensors import signs, whole_matrices, with_factors
from .zero1_2 import zero_1_2_terms
from .zero3 import zero_3_terms

# fp32 log-softmax, its gradient and that of the logits, alive together when the loss's backward
# begins
LOGIT_BYTES = 12
# of a logit of a block, where the loss is computed in chunks: fp32 logits, and their exponentials
# (kernels/cross_entropy.py)
BLOCK_BYTES = 8


def optimizer_class(ds_config: dict[str, Any]) -> str:
    """Names the class that DeepSpeed 0.19.8 wraps the optimizer in (engine.py,
    _do_optimizer_sanity_check); "torch": it wraps none.
    """
    zero, mixed = (
        ds_config.get("zero_optimization", {}),
        is_enabled(ds_config, "bf16") or is_enabled(ds_config, "fp16"),
    )
    stage, offload = (
        zero.get("stage", 0),
        zero.get("offload_optimizer", {}).get("device", "none") != "none",
    )
    if stage == 0:
        return "FP16_UnfusedOptimizer" if mixed else "torch"
    if stage == 3:
        return "DeepSpeedZeroOptimizer_Stage3"
    sums = ds_config.get("data_types", {}).get("grad_accum_dtype")
    return (
        "BF16_Optimizer"
        if stage == 1
        and is_enabled(ds_config, "bf16")
        and sums in ("fp32", "float32")
        and not offload
        else "DeepSpeedZeroOptimizer"
    )


def rank_terms(
    blueprint: Blueprint, layout: Layout, ds_config: dict[str, Any], load: Load, pp_rank: int = 0
) -> list[Term]:
    """List every term of a rank of a pipeline stage: of tensor rank 0, which has the largest part
    of each cut tensor, with the padding that all ranks have.
    """
    tensors = held(blueprint, layout, pp_rank)
    groups, frozen = groups_of(blueprint, tensors, layout)
    zero = ds_config.get("zero_optimization", {})

    if load.engine == "ddp":
        terms = ddp_terms(groups, frozen, ds_config, load)
    elif load.engine == "fsdp2":
        terms = fsdp2_terms(tensors, groups, layout.mesh.dp, ds_config, load)
    elif zero.get("stage", 0) == 3:
        persistent = [
            numel
            for numel in _numels(tensors, layout.mesh.tp)
            if numel <= zero.get("stage3_param_persistence_threshold", 100_000)
        ]
        terms = zero_3_terms(groups, frozen, persistent, ds_config, load)
    else:
        terms = OF_CLASS[optimizer_class(ds_config)](groups, frozen, ds_config, load)

    if by_matrix(ds_config):
        terms.append(whole_matrices(blueprint, tensors))
    if facts_of(ds_config).acts_on == GRADIENT:
        terms += signs([group.numel for group in groups], layout.partitions)
    if states_of(ds_config) == FACTORS:
        terms = with_factors(terms, tensors, layout, zero, load.engine)

    if load.background:
        terms.append(_background_copy(terms, ds_config))
    terms += _logits(layout, load, pp_rank)
    return [term for term in terms if term.taken]


def _background_copy(terms: list[Term], ds_config: dict[str, Any]) -> Term:
    """Count the copy of the states in host memory from which a save in the background writes."""
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    weights = (
        ("parameters",) if stage < 3 or optimizer_class(ds_config) == "torch" else tuple[str, ...]()
    )
    copied = ("master weights", "optimizer states", "errors of signs", *weights)
    size = sum(term.size for term in terms if term.what.startswith(copied) and term.place != NVME)
    return Term(HOST, "copy of the states for a save in the background", size)


def _logits(layout: Layout, load: Load, pp_rank: int) -> list[Term]:
    """Count the logits and their gradient on the stage that computes the loss."""
    logits = (
        load.micro_batch * load.seq_len * load.vocabulary
        if pp_rank == layout.mesh.pp - 1 or layout.schedule == "dualpipev"
        else 0
    )
    if not logits:
        return []
    if load.chunked:
        rows = load.micro_batch * load.seq_len
        block = rows * columns_at_once(rows, load.vocabulary)
        return [Term(ACCELERATOR, "a block of logits", BLOCK_BYTES * block, (LOSS,))]
    return [Term(ACCELERATOR, "logits and their gradient", LOGIT_BYTES * logits, (LOSS,))]


def _numels(tensors: list[Tensor], tp: int) -> list[int]:
    return [prod(local_shape(tensor, tp, 0)) for tensor in tensors if not tensor.buffer]


def _plain(
    groups: list[Group], frozen: list[int], ds_config: dict[str, Any], load: Load
) -> list[Term]:
    """fp32 without ZeRO: torch's optimizer on the model's own parameters."""
    numels = [numel for group in groups for numel in group.numels]
    return [
        Term(ACCELERATOR, "parameters, fp32", 4 * (sum(numels) + sum(frozen))),
        Term(ACCELERATOR, "gradients, fp32", 4 * sum(numels), gradient_moments(load)),
        Term(
            ACCELERATOR,
            "optimizer states, fp32",
            state_bytes(ds_config, groups, [group.numel for group in groups]),
        ),
        Term(
            ACCELERATOR,
            "copy of the gradients that are summed",
            copied_bytes(groups, 4, 0),
            (REDUCE,),
        ),
        temporaries(ds_config, [group.numel for group in groups]),
    ]


def _unfused(
    groups: list[Group], frozen: list[int], ds_config: dict[str, Any], load: Load
) -> list[Term]:
    """bf16 or fp16 without ZeRO (fp16/unfused_optimizer.py): a master copy of each parameter, whose
    fp32 gradient lives during the step.
    """
    numels = [numel for group in groups for numel in group.numels]
    more = 4 if sent_width(ds_config) == 4 else 0
    return [
        Term(ACCELERATOR, "parameters, bf16", 2 * (sum(numels) + sum(frozen))),
        Term(ACCELERATOR, "gradients, bf16", 2 * sum(numels), gradient_moments(load)),
        Term(ACCELERATOR, "master weights, fp32", 4 * sum(numels)),
        Term(
            ACCELERATOR,
            "optimizer states, fp32",
            state_bytes(ds_config, groups, [group.numel for group in groups]),
        ),
        Term(
            ACCELERATOR,
            "copy of the gradients that are summed",
            copied_bytes(groups, 2, more),
            (REDUCE,),
        ),
        Term(ACCELERATOR, "gradients of the master weights, fp32", 4 * sum(numels), (STEP,)),
        temporaries(ds_config, [group.numel for group in groups]),
    ]


def _bf16(
    groups: list[Group], frozen: list[int], ds_config: dict[str, Any], load: Load
) -> list[Term]:
    """ZeRO-1 with fp32 sums (bf16_optimizer.py): whole fp32 gradients beside the bf16 ones that
    autograd makes, which it keeps until the step is over.
    """
    numels = [numel for group in groups for numel in group.numels]
    parts = [group.padded // group.ranks for group in groups]
    flat = sum(group.padded for group in groups)
    sent = 0 if sent_width(ds_config) == 4 else 2
    # each is added to the sums, and freed, as it comes
    at_once = ds_config["bf16"].get("immediate_grad_update")
    made = (
        (2 * max(numels, default=0), (BACKWARD,))
        if at_once
        else (2 * sum(numels), gradient_moments(load))
    )
    return [
        Term(ACCELERATOR, "parameters, bf16", 2 * (flat + sum(frozen))),
        Term(ACCELERATOR, "gradients of a micro-batch, bf16", *made),
        Term(ACCELERATOR, "sums of gradients, fp32", 4 * flat),
        Term(ACCELERATOR, "master weights, fp32", 4 * sum(parts)),
        Term(ACCELERATOR, "optimizer states, fp32", state_bytes(ds_config, groups, parts)),
        Term(
            ACCELERATOR,
            "copy of the gradients that are summed",
            copied_bytes(groups, 4, sent, flat=True),
            (REDUCE,),
        ),
        temporaries(ds_config, parts),
    ]


# The optimizer classes of DeepSpeed whose terms need nothing beyond the groups.
OF_CLASS = {
    "torch": _plain,
    "FP16_UnfusedOptimizer": _unfused,
    "BF16_Optimizer": _bf16,
    "DeepSpeedZeroOptimizer": zero_1_2_terms,
}
