"""Memory of a run before it exists: states, gradients, copies, buffers and pinned memory per rank.

All sizes are in bytes. This module is arithmetic only. Nothing here imports torch, so a plan can be
made for a cluster that is not available yet. The terms are taken from the sources of DeepSpeed
0.19.8. Except for NVMe, tests/planner/test_memory.py compares them with the live storages of real
ranks. Activations are not included.

One function counts the terms of each engine class. The classes that do not partition gradients by
ZeRO are in this module. The other classes are in zero1_2.py, zero3.py and torch_engines.py.
"""

from collections import Counter
from math import prod
from typing import Any

from ..kernels.blocks import columns_per_block
from ..parallel.blueprint import Blueprint, Layout, Tensor, local_shape, tensors_on_rank
from ..spec.memory_terms import (
    ACCELERATOR,
    BACKWARD,
    HOST,
    LOSS,
    NVME,
    REDUCE,
    STEP,
    MemoryRequest,
    Term,
)
from ..spec.optimizer_specs import (
    ADAFACTOR_STATES,
    GRADIENT,
    has_matrix_rule,
    optimizer_spec_of,
    optimizer_states,
)
from .full_tensors import full_matrices, one_bit_terms, with_adafactor_states
from .groups import GroupSizes, group_sizes
from .memory_request import (
    allreduce_copy_bytes,
    communication_width,
    gradient_moments,
    is_enabled,
    optimizer_temporaries,
    state_bytes,
)
from .torch_engines import ddp_terms, fsdp2_terms
from .zero1_2 import zero_1_2_terms
from .zero3 import zero_3_terms

# The fp32 log-softmax, its gradient and the gradient of the logits, which coexist when the loss's
# backward begins.
LOGIT_BYTES = 12
# Bytes per logit in a block if the loss is computed in chunks: fp32 logits and their exponentials
# (kernels/cross_entropy.py).
CHUNKED_LOGIT_BYTES = 8


def optimizer_class(ds_config: dict[str, Any]) -> str:
    """Return the class in which DeepSpeed 0.19.8 wraps the optimizer, or "torch" without a wrapper.

    See engine.py, _do_optimizer_sanity_check.
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
    blueprint: Blueprint,
    layout: Layout,
    ds_config: dict[str, Any],
    request: MemoryRequest,
    pp_rank: int = 0,
) -> list[Term]:
    """Return every memory term for one rank of a pipeline stage.

    The terms describe tensor-parallel rank 0, which has the largest part of each sharded tensor.
    They include the padding that all ranks have.
    """
    tensors = tensors_on_rank(blueprint, layout, pp_rank)
    groups, frozen = group_sizes(blueprint, tensors, layout)
    zero = ds_config.get("zero_optimization", {})

    if request.engine == "ddp":
        terms = ddp_terms(groups, frozen, ds_config, request)
    elif request.engine == "fsdp2":
        terms = fsdp2_terms(tensors, groups, layout.mesh.dp, ds_config, request)
    elif zero.get("stage", 0) == 3:
        persistent = [
            numel
            for numel in _numels(tensors, layout.mesh.tp)
            if numel <= zero.get("stage3_param_persistence_threshold", 100_000)
        ]
        layers = _layer_numels(tensors, layout.mesh.tp) if request.full_layers else []
        terms = zero_3_terms(groups, frozen, (persistent, layers), ds_config, request)
    else:
        terms = TERMS_BY_CLASS[optimizer_class(ds_config)](groups, frozen, ds_config, request)

    if has_matrix_rule(ds_config):
        terms.append(full_matrices(blueprint, tensors))
    if optimizer_spec_of(ds_config).acts_on == GRADIENT:
        terms += one_bit_terms([group.numel for group in groups], layout.partitions)
    if optimizer_states(ds_config) == ADAFACTOR_STATES:
        terms = with_adafactor_states(terms, tensors, layout, zero, request.engine)

    if request.background:
        terms.append(_background_copy(terms, ds_config))
    terms += _logit_terms(layout, request, pp_rank)
    return [term for term in terms if term.reserved_bytes]


def _background_copy(terms: list[Term], ds_config: dict[str, Any]) -> Term:
    """Count the copy of the states in host memory from which a background save writes."""
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    weights = (
        ("parameters",) if stage < 3 or optimizer_class(ds_config) == "torch" else tuple[str, ...]()
    )
    copied = ("master weights", "optimizer states", "errors of signs", *weights)
    size = sum(term.size for term in terms if term.what.startswith(copied) and term.place != NVME)
    return Term(HOST, "copy of the states for a save in the background", size)


def _logit_terms(layout: Layout, request: MemoryRequest, pp_rank: int) -> list[Term]:
    """Count the logits and their gradient on the stage that computes the loss."""
    logits = (
        request.micro_batch * request.seq_len * request.vocabulary
        if pp_rank == layout.mesh.pp - 1 or layout.schedule == "dualpipev"
        else 0
    )
    if not logits:
        return []
    rows = request.micro_batch * request.seq_len
    block = rows * columns_per_block(rows, request.vocabulary)
    # If one block contains all logits, the loss stores them, unless tensor parallelism shards them.
    if request.chunked and (block < logits or layout.mesh.tp > 1):
        return [Term(ACCELERATOR, "a block of logits", CHUNKED_LOGIT_BYTES * block, (LOSS,))]
    return [Term(ACCELERATOR, "logits and their gradient", LOGIT_BYTES * logits, (LOSS,))]


def _numels(tensors: list[Tensor], tp: int) -> list[int]:
    return [prod(local_shape(tensor, tp, 0)) for tensor in tensors if not tensor.buffer]


def _layer_numels(tensors: list[Tensor], tp: int) -> list[int]:
    """Return the number of elements in the parameters of each decoder layer."""
    found = Counter[str]()
    for tensor in tensors:
        if tensor.place.isdigit() and not tensor.buffer:
            found[tensor.place] += prod(local_shape(tensor, tp, 0))
    return list(found.values())


def _fp32_terms(
    groups: list[GroupSizes], frozen: list[int], ds_config: dict[str, Any], request: MemoryRequest
) -> list[Term]:
    """Return the terms for fp32 without ZeRO: torch's optimizer on the model's own parameters."""
    numels = [numel for group in groups for numel in group.numels]
    return [
        Term(ACCELERATOR, "parameters, fp32", 4 * (sum(numels) + sum(frozen))),
        Term(ACCELERATOR, "gradients, fp32", 4 * sum(numels), gradient_moments(request)),
        Term(
            ACCELERATOR,
            "optimizer states, fp32",
            state_bytes(ds_config, groups, [group.numel for group in groups]),
        ),
        Term(
            ACCELERATOR,
            "copy of the gradients that are summed",
            allreduce_copy_bytes(groups, 4, 0),
            (REDUCE,),
        ),
        optimizer_temporaries(ds_config, [group.numel for group in groups]),
    ]


def _unfused_terms(
    groups: list[GroupSizes], frozen: list[int], ds_config: dict[str, Any], request: MemoryRequest
) -> list[Term]:
    """Return the terms for bf16 or fp16 without ZeRO (fp16/unfused_optimizer.py).

    Each parameter has a master copy. The fp32 gradient of the master copy exists during the step.
    """
    numels = [numel for group in groups for numel in group.numels]
    narrow, wide = ([group for group in groups if group.fp32 == fp32] for fp32 in (False, True))
    few, many = (sum(group.numel for group in own) for own in (wide, narrow))
    sent = communication_width(ds_config)
    # DeepSpeed sums the gradients of each dtype separately.
    copied = max(
        allreduce_copy_bytes(narrow, 2, 4 if sent == 4 else 0),
        allreduce_copy_bytes(wide, 4, 0 if sent == 4 else sent),
    )
    return [
        Term(ACCELERATOR, "parameters, bf16", 2 * (many + sum(frozen))),
        Term(ACCELERATOR, "parameters, fp32", 4 * few),
        Term(ACCELERATOR, "gradients, bf16", 2 * many, gradient_moments(request)),
        Term(ACCELERATOR, "gradients, fp32", 4 * few, gradient_moments(request)),
        Term(ACCELERATOR, "master weights, fp32", 4 * sum(numels)),
        Term(
            ACCELERATOR,
            "optimizer states, fp32",
            state_bytes(ds_config, groups, [group.numel for group in groups]),
        ),
        Term(
            ACCELERATOR,
            "copy of the gradients that are summed",
            copied,
            (REDUCE,),
        ),
        # For a parameter in fp32, this is the parameter's own gradient.
        Term(ACCELERATOR, "gradients of the master weights, fp32", 4 * many, (STEP,)),
        optimizer_temporaries(ds_config, [group.numel for group in groups]),
    ]


def _bf16_terms(
    groups: list[GroupSizes], frozen: list[int], ds_config: dict[str, Any], request: MemoryRequest
) -> list[Term]:
    """Return the terms for ZeRO-1 with fp32 sums (bf16_optimizer.py).

    The sums are unsharded. Autograd's bf16 gradients exist in addition, until the step is over.
    """
    gradients = [
        (4 if group.fp32 else 2) * numel for group in groups for numel in group.numels
    ]  # bytes
    parts = [group.padded // group.ranks for group in groups]
    flat = sum(group.padded for group in groups)
    wide = sum(group.padded for group in groups if group.fp32)
    sent = 0 if communication_width(ds_config) == 4 else 2
    # Each gradient is added to the sums and freed as soon as it is computed.
    at_once = ds_config["bf16"].get("immediate_grad_update")
    made = (
        (max(gradients, default=0), (BACKWARD,))
        if at_once
        else (sum(gradients), gradient_moments(request))
    )
    return [
        Term(ACCELERATOR, "parameters, bf16", 2 * (flat - wide + sum(frozen))),
        Term(ACCELERATOR, "parameters, fp32", 4 * wide),
        Term(ACCELERATOR, "gradients of a micro-batch, bf16", *made),
        Term(ACCELERATOR, "sums of gradients, fp32", 4 * flat),
        Term(ACCELERATOR, "master weights, fp32", 4 * sum(parts)),
        Term(ACCELERATOR, "optimizer states, fp32", state_bytes(ds_config, groups, parts)),
        Term(
            ACCELERATOR,
            "copy of the gradients that are summed",
            allreduce_copy_bytes(groups, 4, sent, flat=True),
            (REDUCE,),
        ),
        optimizer_temporaries(ds_config, parts),
    ]


# DeepSpeed's optimizer classes whose terms depend only on the groups
TERMS_BY_CLASS = {
    "torch": _fp32_terms,
    "FP16_UnfusedOptimizer": _unfused_terms,
    "BF16_Optimizer": _bf16_terms,
    "DeepSpeedZeroOptimizer": zero_1_2_terms,
}
