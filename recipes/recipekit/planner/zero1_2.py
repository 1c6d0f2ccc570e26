"""Memory terms of DeepSpeedZeroOptimizer: ZeRO-2, and ZeRO-1 without fp32 sums of bf16 gradients.

The names in the comments are attributes and functions in zero/stage_1_and_2.py of DeepSpeed 0.19.8.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..spec.memory_terms import ACCELERATOR, BACKWARD, HOST, LOSS, REDUCE, STEP, MemoryRequest, Term
from .groups import GroupSizes
from .memory_request import (
    communication_width,
    dtype_name,
    gradient_moments,
    optimizer_temporaries,
    param_width,
    pinned_term,
    state_bytes,
    summed_copy_width,
    sums_in_fp32,
)


@dataclass(frozen=True)
class ParamSize:
    """A trained parameter on a rank: its elements, and the bytes of an element of its gradient."""

    numel: int
    width: int

    @property
    def bytes(self) -> int:
        return self.numel * self.width


@dataclass(frozen=True)
class FlatPartition:
    """A rank's part of ZeRO-1 and -2's flat tensors, with the settings that its terms need."""

    zero: dict[str, Any]  # the JSON's zero_optimization
    width: int  # bytes per element of a training parameter
    fp32_sums: bool  # two-byte gradients are summed in fp32
    params: list[ParamSize]  # the trained parameters
    parts: list[int]  # elements of the rank's part of each group
    params_by_rank: list[list[ParamSize]]  # rank -> parameters that overlap its part

    @property
    def stage_1(self) -> bool:
        return self.zero["stage"] == 1

    @property
    def offload(self) -> dict[str, Any]:
        return self.zero.get("offload_optimizer", {})

    @property
    def offloaded(self) -> bool:
        return self.offload.get("device", "none") != "none"

    @property
    def pin(self) -> bool:
        return self.offloaded and self.offload.get("pin_memory", False)

    @property
    def bucket(self) -> int:
        return int(self.zero.get("reduce_bucket_size", 500_000_000))


def _flat_partition(groups: list[GroupSizes], ds_config: dict[str, Any]) -> FlatPartition:
    """Return a rank's part of these groups' flat tensors."""
    width = param_width(ds_config)

    def sized(group: GroupSizes, numels: Iterable[int]) -> list[ParamSize]:
        return [ParamSize(numel, 4 if group.fp32 else width) for numel in numels]

    return FlatPartition(
        zero=ds_config["zero_optimization"],
        width=width,
        fp32_sums=width == 2 and sums_in_fp32(ds_config),
        params=[param for group in groups for param in sized(group, group.numels)],
        parts=[group.padded // group.ranks for group in groups],
        params_by_rank=[
            [param for group in groups for param in sized(group, group.numels_in_partition(rank))]
            for rank in range(max((group.ranks for group in groups), default=1))
        ],
    )


def zero_1_2_terms(
    groups: list[GroupSizes], frozen: list[int], ds_config: dict[str, Any], request: MemoryRequest
) -> list[Term]:
    """Return the memory terms of ZeRO-2, and of ZeRO-1 without fp32 sums of bf16 gradients.

    See zero/stage_1_and_2.py. The optimizer may be on the host.
    """
    own = _flat_partition(groups, ds_config)
    home = HOST if own.offloaded else ACCELERATOR
    flat, wide = (
        sum(group.padded for group in groups if group.fp32 == fp32) for fp32 in (False, True)
    )
    return [
        # bit16_groups_flat
        Term(ACCELERATOR, f"parameters, {dtype_name(own.width)}", own.width * (flat + sum(frozen))),
        Term(ACCELERATOR, "parameters, fp32", 4 * wide),
        # single_partition_of_fp32_groups
        pinned_term(
            home, "master weights, fp32", [4 * part for part in own.parts], own.pin, request
        ),
        Term(home, "optimizer states, fp32", state_bytes(ds_config, groups, own.parts)),
        *_zero_1_2_buckets(own, communication_width(ds_config), summed_copy_width(ds_config)),
        *_zero_1_2_sums(own, request),
        *(
            _zero_1_2_offloaded(own, request)
            if own.offloaded
            else [optimizer_temporaries(ds_config, own.parts)]
        ),
    ]


def _zero_1_2_buckets(partition: FlatPartition, sent: int, copied: int) -> list[Term]:
    """Count the buckets in which ZeRO-1 and -2 sum gradients, and gradients too large for a bucket.

    `sent` is the number of bytes sent per element, and `copied` the bytes of the copies.
    """
    buckets = (
        partition.bucket * (2 if partition.zero.get("overlap_comm") else 1)
        if partition.zero.get("contiguous_gradients", True) or partition.offloaded
        else 0
    )

    exceeding = max(
        (param.bytes for param in partition.params if param.numel > partition.bucket), default=0
    )
    # With fp32 sums, such gradients are kept until backward has ended (copy_grads_in_partition).
    if partition.fp32_sums and not partition.stage_1:
        exceeding = max(
            exceeding,
            *(
                sum(param.bytes for param in touched if param.numel > partition.bucket)
                for touched in partition.params_by_rank
            ),
        )

    return [
        Term(
            ACCELERATOR, f"reduce buckets, {dtype_name(sent)}", sent * buckets, (BACKWARD, REDUCE)
        ),
        # average_tensor
        Term(
            ACCELERATOR,
            "copies while a bucket is summed",
            copied * min(partition.bucket, sum(param.numel for param in partition.params)),
            (BACKWARD, REDUCE),
            bound=True,
        ),
        # extra_large_param_to_reduce
        Term(ACCELERATOR, "gradients that exceed a bucket", exceeding, (BACKWARD,)),
    ]


def _zero_1_2_sums(partition: FlatPartition, request: MemoryRequest) -> list[Term]:
    """Count autograd's gradients under ZeRO-1, and the gradient sums in a rank's part."""
    dtype, several = dtype_name(partition.width), request.accumulation > 1
    gradients = Term(
        ACCELERATOR,
        f"gradients, {dtype}",
        sum(param.bytes for param in partition.params),
        (LOSS, BACKWARD, REDUCE) if several else (REDUCE,),
    )
    terms = [gradients] if partition.stage_1 else []
    # averaged_gradients, as get_flat_partition returns them
    if partition.fp32_sums:
        sums = Term(
            ACCELERATOR,
            "sums of gradients, fp32",
            4 * sum(partition.parts),
            gradient_moments(request),
        )
        return [*terms, sums]

    kept, what = (
        max(([param.bytes for param in touched] for touched in partition.params_by_rank), key=sum),
        "sums of gradients",
    )
    if partition.offloaded:
        # accumulated_grads_in_cpu
        terms.append(
            pinned_term(HOST, f"{what}, {dtype}", kept if several else [], partition.pin, request)
        )
    else:
        flat = 4 * max(partition.parts, default=0)
        terms.append(Term(ACCELERATOR, f"{what}, {dtype}", sum(kept), gradient_moments(request)))
        terms.append(Term(ACCELERATOR, "flat gradients of a group, fp32", flat, (STEP,)))
    again = several and not partition.stage_1 and not partition.offloaded
    added = "gradients of a micro-batch that are added to them"
    return [*terms, Term(ACCELERATOR, added, sum(kept) if again else 0, (BACKWARD,))]


def _zero_1_2_offloaded(partition: FlatPartition, request: MemoryRequest) -> list[Term]:
    """Count the host's copies of a rank's part, and the buffers that move one gradient there."""
    dtype = dtype_name(partition.width)
    largest = max((param.bytes for param in partition.params), default=0)
    masters, back = (
        [4 * part for part in partition.parts],
        [partition.width * part for part in partition.parts],
    )
    return [
        pinned_term(HOST, "gradients of the master weights, fp32", masters, partition.pin, request),
        pinned_term(HOST, f"parameters on their way back, {dtype}", back, partition.pin, request),
        # temp_grad_buffer_for_cpu_offload, temp_grad_buffer_for_gpu_offload
        pinned_term(HOST, "gradient on its way", [largest], partition.pin, request),
        Term(ACCELERATOR, "gradient on its way", largest),
    ]
