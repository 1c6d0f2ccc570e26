"""Memory terms of DeepSpeedZeroOptimizer_Stage3: ZeRO-3, with offload to the host or NVMe.

The names in the comments are attributes and functions in zero/stage3.py of DeepSpeed 0.19.8.
"""

from typing import Any

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
from .groups import GroupSizes
from .memory_request import (
    communication_width,
    dtype_name,
    optimizer_temporaries,
    param_width,
    pinned_term,
    state_bytes,
    sums_in_fp32,
)
from .pinned import PINNED_ROUNDING_LIMIT, pinned_bytes

DEVICE_PLACES = {
    "none": ACCELERATOR,
    "cpu": HOST,
    "nvme": NVME,
}  # device of an offload block -> place


def zero_3_terms(
    groups: list[GroupSizes],
    frozen: list[int],
    gathered: tuple[list[int], list[int]],
    ds_config: dict[str, Any],
    request: MemoryRequest,
) -> list[Term]:
    """Return the memory terms of ZeRO-3 (zero/stage3.py, runtime/swap_tensor).

    Parameters and optimizer are on the accelerator, the host or NVMe. `gathered` lists the elements
    of each parameter that is never partitioned, and of each layer that is gathered at once.
    """
    trained = [numel for group in groups for numel in group.numels]
    ranks = _num_ranks(groups)
    frozen_parts = sum(-(-numel // ranks) for numel in frozen)
    most = int(ds_config["zero_optimization"].get("sub_group_size", 1_000_000_000))
    sub_groups = [run for group in groups for run in group.sub_groups(most)]
    largest = max(map(sum, sub_groups), default=0)
    states = state_bytes(ds_config, groups, [sum(group.partition_numels()) for group in groups])
    return [
        *_second_partition(trained, frozen, ranks, ds_config, request),
        *_zero_3_passes(groups, frozen, gathered, ds_config),
        _zero_3_sums(groups, ds_config, request),
        *_zero_3_parameters(groups, frozen_parts, largest, ds_config, request),
        *_zero_3_optimizer(sub_groups, states, ds_config, request),
    ]


def _num_ranks(groups: list[GroupSizes]) -> int:
    return max((group.ranks for group in groups), default=1)


def _zero_3_passes(
    groups: list[GroupSizes],
    frozen: list[int],
    gathered: tuple[list[int], list[int]],
    ds_config: dict[str, Any],
) -> list[Term]:
    """Count the accelerator memory that the forward and backward passes need.

    This is the memory for gathered weights and for gradients in transit. `gathered` lists the sizes
    of persistent parameters and of layers that are gathered at once. The gradients of such a layer
    exist together, until its backward pass has ended.
    """
    persistent, layers = gathered
    zero = ds_config["zero_optimization"]
    width, sent, sums = (
        param_width(ds_config),
        communication_width(ds_config),
        _sums_width(ds_config),
    )
    ranks, bucket = _num_ranks(groups), int(zero.get("reduce_bucket_size", 500_000_000))
    numels = [numel for group in groups for numel in group.numels] + frozen
    weight, layer = max(numels, default=0), max(layers, default=0)
    largest = max(weight, layer)
    live = min(
        sum(numels), max(largest, int(zero.get("stage3_max_live_parameters", 1_000_000_000)))
    )
    # Parameters that are stored elsewhere are copied to the accelerator even with only one rank.
    moved = (
        ranks > 1
        or DEVICE_PLACES[zero.get("offload_param", {}).get("device", "none")] != ACCELERATOR
    )
    return [
        # persistent_parameters
        Term(
            ACCELERATOR,
            "small parameters, gathered",
            width * sum(persistent) if ranks > 1 else 0,
            (LOSS, BACKWARD, REDUCE),
        ),
        Term(
            ACCELERATOR,
            f"reduce bucket, {dtype_name(sent)}",
            sent * bucket if zero.get("contiguous_gradients", True) else 0,
        ),
        Term(
            ACCELERATOR,
            "the largest weight, gathered, or a layer's weights with their gradients"
            if layers
            else "the largest weight, gathered",
            width * max(weight if moved else 0, 2 * layer if moved else layer),
            (BACKWARD,),
        ),
        Term(
            ACCELERATOR,
            "further weights, gathered",
            width * (live - largest),
            (LOSS, BACKWARD),
            bound=True,
        ),
        # __avg_scatter_contiguous_grads
        Term(
            ACCELERATOR,
            "copies while a bucket is summed",
            (sent + sums) * min(bucket, sum(numels)),
            (BACKWARD,),
            bound=True,
        ),
    ]


def _zero_3_sums(
    groups: list[GroupSizes], ds_config: dict[str, Any], request: MemoryRequest
) -> Term:
    """Count the gradient sums in ZeRO-3's partitions (grad_partitions_flat_buffer)."""
    offload = ds_config["zero_optimization"].get("offload_optimizer", {})
    on_device = DEVICE_PLACES[offload.get("device", "none")] == ACCELERATOR
    width = _sums_width(ds_config)
    return pinned_term(
        ACCELERATOR if on_device else HOST,
        f"sums of gradients, {dtype_name(width)}",
        [width * sum(part for group in groups for part in group.partition_numels())],
        not on_device and offload.get("pin_memory", False),
        request,
    )


def _second_partition(
    trained: list[int],
    frozen: list[int],
    ranks: int,
    ds_config: dict[str, Any],
    request: MemoryRequest,
) -> list[Term]:
    """Count hpZ's secondary partition: each weight is partitioned among a host's ranks.
    The secondary partition exists from the weight's first gather in a step to the end of the step
    (partition_parameters.py, _partition_param_sec).
    """
    zero, width = ds_config["zero_optimization"], param_width(ds_config)
    if (among := min(int(zero.get("zero_hpz_partition_size", 1)), ranks)) < 2:
        return []
    parts = [
        sum(-(-numel // ranks) * ranks // among for numel in numels) for numels in (trained, frozen)
    ]
    return [
        Term(
            ACCELERATOR,
            "parts of the weights among the ranks of a host",
            (4 if request.adapted else width) * parts[0] + width * parts[1],
        )
    ]


def _zero_3_parameters(
    groups: list[GroupSizes],
    frozen_parts: int,
    largest: int,
    ds_config: dict[str, Any],
    request: MemoryRequest,
) -> list[Term]:
    """Count ZeRO-3's parameter partitions, in the place that `offload_param` selects.

    `largest` is the number of elements in the largest sub-group.
    """
    offload, width = ds_config["zero_optimization"].get("offload_param", {}), param_width(ds_config)
    home, dtype = DEVICE_PLACES[offload.get("device", "none")], dtype_name(width)
    own = 4 if request.adapted else width
    parts = [part for group in groups for part in group.partition_numels()]
    size, pin = own * sum(parts) + width * frozen_parts, offload.get("pin_memory", False)
    if home == ACCELERATOR:
        return [Term(ACCELERATOR, f"parameters, {dtype}", size)]

    blocks = [*(own * numel for numel in _in_host_memory(groups, offload)), width * frozen_parts]
    in_memory = pinned_term(HOST, f"parameters, {dtype}", blocks, pin, request)
    if home == NVME:
        swapped = Term(NVME, f"parameters, {dtype}", size)
        return [in_memory, swapped, *_parameter_swaps(offload, width, largest)]
    return [in_memory, *([_freed_pins([width * part for part in parts], request)] if pin else [])]


def _in_host_memory(groups: list[GroupSizes], offload: dict[str, Any]) -> list[int]:
    """Count the elements of each group's partitions that stay in host memory.

    These are all elements or, with NVMe, the first `max_in_cpu` elements.
    """
    sizes = [sum(group.partition_numels()) for group in groups]
    on_nvme = DEVICE_PLACES[offload.get("device", "none")] == NVME
    left, kept = int(offload.get("max_in_cpu", 1_000_000_000)) if on_nvme else sum(sizes), []
    for size in sizes:
        kept.append(min(size, left))
        left -= kept[-1]
    return kept


def _parameter_swaps(offload: dict[str, Any], width: int, largest: int) -> list[Term]:
    """Count the pinned buffers between NVMe and the accelerator (partitioned_param_swapper.py).

    The count includes the updated parameters of a sub-group with `largest` elements.
    """
    buffers = (
        width * int(offload.get("buffer_count", 5)) * int(offload.get("buffer_size", 100_000_000))
    )
    back, size = f"parameters on their way back, {dtype_name(width)}", width * largest
    return [
        Term(HOST, "swap buffers of parameters", buffers, pinned=buffers),
        Term(HOST, back, size, pinned=size),
    ]


def _freed_pins(sizes: list[int], request: MemoryRequest) -> Term:
    """Count single partitions' pinned blocks that torch keeps after they are freed."""
    blocks = [pinned_bytes(size, request.exact_pins) for size in sizes]
    kept = sum(
        block for block in blocks if not request.exact_pins or block <= PINNED_ROUNDING_LIMIT
    )
    return Term(HOST, "freed pinned blocks that torch keeps", 0, pinned=kept, bound=True)


def _zero_3_optimizer(
    sub_groups: list[list[int]], states: int, ds_config: dict[str, Any], request: MemoryRequest
) -> list[Term]:
    """Return the terms of ZeRO-3's optimizer: its states, and the memory that a step needs.

    `states` is the number of bytes in addition to the master weights. `sub_groups` lists the number
    of elements in each partition of a sub-group.
    """
    offload = ds_config["zero_optimization"].get("offload_optimizer", {})
    home, sizes = DEVICE_PLACES[offload.get("device", "none")], [sum(run) for run in sub_groups]
    masters = 4 * sum(sizes)
    terms = [
        Term(home, "master weights, fp32", masters),
        Term(home, "optimizer states, fp32", states),
    ]
    if home == ACCELERATOR:
        copied = [sum(run) for run in sub_groups if len(run) > 1]
        terms.append(
            Term(
                ACCELERATOR,
                "flat gradients of a sub-group, fp32",
                4 * max(copied, default=0),
                (STEP,),
            )
        )
        terms.append(optimizer_temporaries(ds_config, sizes))
    elif home == HOST:
        terms.append(
            pinned_term(
                HOST,
                "gradients of the master weights, fp32",
                [4 * size for size in sizes],
                offload.get("pin_memory", False),
                request,
            )
        )
    else:
        buffers = 4 * int(offload.get("buffer_count", 4)) * max(sizes, default=0)
        terms.append(Term(NVME, "gradients of the master weights, fp32", masters))
        terms.append(Term(HOST, "swap buffers of the optimizer", buffers, pinned=buffers))
    return terms


def _sums_width(ds_config: dict[str, Any]) -> int:
    """Return the bytes per element in which ZeRO-3 sums gradients."""
    return 4 if sums_in_fp32(ds_config) else param_width(ds_config)
