"""Terms of DeepSpeedZeroOptimizer: ZeRO-2, and ZeRO-1 without fp32 sums of bf16 gradients.

The names in the comments are attributes and functions of zero/stage_1_and_2.py in DeepSpeed 0.19.8.
"""

from dataclasses import dataclass
from typing import Any

from .groups import Group
from .load import (
    Load,
    dtype_name,
    gradient_moments,
    pinned_term,
    sent_width,
    state_bytes,
    sums_in_fp32,
    temporaries,
    width_of,
)
from .terms import ACCELERATOR, BACKWARD, HOST, LOSS, REDUCE, STEP, Term


@dataclass(frozen=True)
class FlatPart:
    """A rank's part of the flat tensors of ZeRO-1 and -2, and the settings that place its terms."""

    zero: dict[str, Any]  # the JSON's zero_optimization
    width: int  # bytes of a training parameter
    fp32_sums: bool  # gradients of two bytes are summed in fp32
    numels: list[int]  # elements of each trained parameter
    parts: list[int]  # elements of the rank's part of each group
    touched: list[list[int]]  # rank -> elements of each parameter that its part has a piece of

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


def _flat_part(groups: list[Group], ds_config: dict[str, Any]) -> FlatPart:
    """Return the part of a rank in the flat tensors of these groups."""
    width = width_of(ds_config)
    return FlatPart(
        zero=ds_config["zero_optimization"],
        width=width,
        fp32_sums=width == 2 and sums_in_fp32(ds_config),
        numels=[numel for group in groups for numel in group.numels],
        parts=[group.padded // group.ranks for group in groups],
        touched=[
            [numel for group in groups for numel in group.touched(rank)]
            for rank in range(max((group.ranks for group in groups), default=1))
        ],
    )


def zero_1_2_terms(
    groups: list[Group], frozen: list[int], ds_config: dict[str, Any], load: Load
) -> list[Term]:
    """ZeRO-2, and ZeRO-1 without fp32 sums of bf16 gradients (zero/stage_1_and_2.py), with the
    optimizer on the host or not.
    """
    own = _flat_part(groups, ds_config)
    home = HOST if own.offloaded else ACCELERATOR
    flat = sum(group.padded for group in groups)
    return [
        # bit16_groups_flat
        Term(ACCELERATOR, f"parameters, {dtype_name(own.width)}", own.width * (flat + sum(frozen))),
        # single_partition_of_fp32_groups
        pinned_term(home, "master weights, fp32", [4 * part for part in own.parts], own.pin, load),
        Term(home, "optimizer states, fp32", state_bytes(ds_config, groups, own.parts)),
        *_zero_1_2_buckets(own, sent_width(ds_config)),
        *_zero_1_2_sums(own, load),
        *(_zero_1_2_offloaded(own, load) if own.offloaded else [temporaries(ds_config, own.parts)]),
    ]


def _zero_1_2_buckets(own: FlatPart, sent: int) -> list[Term]:
    """Count the buckets in which ZeRO-1 and -2 sum gradients, `sent` bytes an element, and the
    gradients that are too large for them.
    """
    buckets = (
        own.bucket * (2 if own.zero.get("overlap_comm") else 1)
        if own.zero.get("contiguous_gradients", True) or own.offloaded
        else 0
    )

    exceeding = max(numel if numel > own.bucket else 0 for numel in (0, *own.numels))
    # With fp32 sums they are kept until backward has ended (copy_grads_in_partition).
    if own.fp32_sums and not own.stage_1:
        exceeding = max(
            exceeding,
            *(sum(numel for numel in touched if numel > own.bucket) for touched in own.touched),
        )

    return [
        Term(
            ACCELERATOR, f"reduce buckets, {dtype_name(sent)}", sent * buckets, (BACKWARD, REDUCE)
        ),
        # average_tensor
        Term(
            ACCELERATOR,
            "copies while a bucket is summed",
            (sent + 4) * min(own.bucket, sum(own.numels)),
            (BACKWARD, REDUCE),
            bound=True,
        ),
        # extra_large_param_to_reduce
        Term(ACCELERATOR, "gradients that exceed a bucket", own.width * exceeding, (BACKWARD,)),
    ]


def _zero_1_2_sums(own: FlatPart, load: Load) -> list[Term]:
    """Count autograd's gradients of ZeRO-1, and the sums of gradients in a rank's part."""
    dtype, several = dtype_name(own.width), load.accumulation > 1
    gradients = Term(
        ACCELERATOR,
        f"gradients, {dtype}",
        own.width * sum(own.numels),
        (LOSS, BACKWARD, REDUCE) if several else (REDUCE,),
    )
    terms = [gradients] if own.stage_1 else []
    # averaged_gradients, as get_flat_partition returns them
    if own.fp32_sums:
        sums = Term(
            ACCELERATOR, "sums of gradients, fp32", 4 * sum(own.parts), gradient_moments(load)
        )
        return [*terms, sums]

    kept, what = [own.width * numel for numel in max(own.touched, key=sum)], "sums of gradients"
    if own.offloaded:
        # accumulated_grads_in_cpu
        terms.append(pinned_term(HOST, f"{what}, {dtype}", kept if several else [], own.pin, load))
    else:
        flat = 4 * max(own.parts, default=0)
        terms.append(Term(ACCELERATOR, f"{what}, {dtype}", sum(kept), gradient_moments(load)))
        terms.append(Term(ACCELERATOR, "flat gradients of a group, fp32", flat, (STEP,)))
    again = several and not own.stage_1 and not own.offloaded
    added = "gradients of a micro-batch that are added to them"
    return [*terms, Term(ACCELERATOR, added, sum(kept) if again else 0, (BACKWARD,))]


def _zero_1_2_offloaded(own: FlatPart, load: Load) -> list[Term]:
    """Count the host's copies of a part, and the buffers for one gradient on its way there."""
    dtype, largest = dtype_name(own.width), own.width * max(own.numels, default=0)
    masters, back = [4 * part for part in own.parts], [own.width * part for part in own.parts]
    return [
        pinned_term(HOST, "gradients of the master weights, fp32", masters, own.pin, load),
        pinned_term(HOST, f"parameters on their way back, {dtype}", back, own.pin, load),
        # temp_grad_buffer_for_cpu_offload, temp_grad_buffer_for_gpu_offload
        pinned_term(HOST, "gradient on its way", [largest], own.pin, load),
        Term(ACCELERATOR, "gradient on its way", largest),
    ]
