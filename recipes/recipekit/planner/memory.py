"""The memory of a run before it exists: what each rank holds of states, gradients, copies, buffers
and pinned host memory, in bytes.

Arithmetic only: nothing here imports torch, so a cluster that nobody holds yet can be planned for.
The terms are those of DeepSpeed 0.19.8, found in its sources and held against the live storages of
real ranks by tests/planner/test_memory.py, but for NVMe's. Activations are not among them.
"""

import re
from dataclasses import dataclass
from math import prod
from typing import Any

from ..kernels.blocks import columns_at_once
from ..parallel.blueprint import Blueprint, Layout, Tensor, held, local_shape
from ..spec.optimizer_specs import FACTORS, GRADIENT, by_matrix, facts_of, states_of
from .groups import Group, groups_of
from .pinned import ROUNDED_UP_TO, pinned_bytes
from .terms import ACCELERATOR, BACKWARD, HOST, LOSS, NVME, REDUCE, STEP, Term
from .whole_tensors import signs, whole_matrices, with_factors

# fp32 log-softmax, its gradient and that of the logits, alive together when the loss's backward
# begins
LOGIT_BYTES = 12
# of a logit of a block, where the loss is computed in chunks: fp32 logits, and their exponentials
# (kernels/cross_entropy.py)
BLOCK_BYTES = 8
# the beginning of a parameter's name, up to the number of the outermost list's element
LAYER = re.compile(r"(?:[a-z_]\w*\.)*?\d+\.")
# elements that the engine sums in one go without ZeRO-2 or -3 (engine.py,
# MEMORY_OPT_ALLREDUCE_SIZE)
REDUCE_AT_ONCE = 500_000_000


@dataclass(frozen=True)
class Load:
    """Lists what a run asks of a layout beyond its model.

    `vocabulary`, the classes of each logit, 0: the model has no head.
    """

    micro_batch: int
    seq_len: int  # of one rank: of a row, its part; 1 where a row has logits in one place only
    accumulation: int
    vocabulary: int
    chunked: bool = False  # the loss is computed in blocks of logits
    background: bool = False  # a save in the background keeps a copy of the states
    # what is trained is an adapter, whose weights peft makes in fp32: ZeRO-3 leaves them so
    adapted: bool = False
    engine: str = "deepspeed"  # or one of torch's: ddp, fsdp2
    half: bool = False  # one of torch's computes in two bytes
    # torch's pinned allocator rounds up to ROUNDED_UP_TO only, and keeps no larger block that was
    # freed
    exact_pins: bool = True


def optimizer_class(ds_config: dict[str, Any]) -> str:
    """Names the class that DeepSpeed 0.19.8 wraps the optimizer in (engine.py,
    _do_optimizer_sanity_check); "torch": it wraps none.
    """
    zero, mixed = (
        ds_config.get("zero_optimization", {}),
        _enabled(ds_config, "bf16") or _enabled(ds_config, "fp16"),
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
        and _enabled(ds_config, "bf16")
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
        terms = _ddp(groups, frozen, ds_config, load)
    elif load.engine == "fsdp2":
        terms = _fsdp2(tensors, groups, layout.mesh.dp, ds_config, load)
    elif zero.get("stage", 0) == 3:
        persistent = [
            numel
            for numel in _numels(tensors, layout.mesh.tp)
            if numel <= zero.get("stage3_param_persistence_threshold", 100_000)
        ]
        terms = _zero_3(groups, frozen, persistent, ds_config, load)
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
        Term(ACCELERATOR, "gradients, fp32", 4 * sum(numels), _held(load)),
        Term(
            ACCELERATOR,
            "optimizer states, fp32",
            _state_bytes(ds_config, groups, [group.numel for group in groups]),
        ),
        Term(
            ACCELERATOR, "copy of the gradients that are summed", _copied(groups, 4, 0), (REDUCE,)
        ),
        _temporaries(ds_config, [group.numel for group in groups]),
    ]


def _ddp(
    groups: list[Group], frozen: list[int], ds_config: dict[str, Any], load: Load
) -> list[Term]:
    """DDP of torch: whole fp32 weights, and gradients that are views of its buckets from the end of
    the first step on.

    In the first step autograd's own gradients lie beside the buckets. Autocast makes 2-byte copies
    of the matrices, which autograd keeps until their backward.
    """
    numels = [numel for group in groups for numel in group.numels]
    own = sum(numels) if load.accumulation > 1 else max(numels, default=0)
    return [
        Term(ACCELERATOR, "parameters, fp32", 4 * (sum(numels) + sum(frozen))),
        Term(ACCELERATOR, "gradients, fp32, in the buckets", 4 * sum(numels)),
        Term(
            ACCELERATOR,
            "optimizer states, fp32",
            _state_bytes(ds_config, groups, [group.numel for group in groups]),
        ),
        Term(
            ACCELERATOR,
            "gradients of the first step, beside the buckets, fp32",
            4 * own,
            (BACKWARD, REDUCE),
        ),
        Term(
            ACCELERATOR,
            "copies of the matrices, bf16",
            2 * (sum(numels) + sum(frozen)) if load.half else 0,
            (LOSS, BACKWARD),
            bound=True,
        ),
        _temporaries(ds_config, [group.numel for group in groups]),
    ]


def _fsdp2(
    tensors: list[Tensor], groups: list[Group], ranks: int, ds_config: dict[str, Any], load: Load
) -> list[Term]:
    """FSDP2 of torch (fsdp/_fully_shard): each parameter's rows divided over the ranks, of which
    the first has the most.

    A layer is gathered whole while it computes; what lies outside of the layers stays so from the
    forward pass to the end of the backward pass, and its gradients with it. Gradients are summed in
    fp32, from a copy in a row of all of a layer.
    """
    kept = [tensor for tensor in tensors if not tensor.buffer]
    part = {
        tensor.name: -(-tensor.shape[0] // ranks) * prod(tensor.shape[1:]) if tensor.shape else 1
        for tensor in kept
    }
    trained = [tensor for tensor in kept if tensor.group is not None]
    by_group = [
        sum(part[tensor.name] for tensor in trained if tensor.group == group)
        for group in sorted({tensor.group or 0 for tensor in trained})
    ]
    return [
        Term(ACCELERATOR, "parameters, fp32", 4 * sum(part.values())),
        Term(ACCELERATOR, "gradients, fp32", 4 * sum(by_group), _held(load)),
        Term(ACCELERATOR, "optimizer states, fp32", _state_bytes(ds_config, groups, by_group)),
        *_fsdp2_gathered(kept, 2 if load.half else 4),
        _temporaries(ds_config, by_group),
    ]


def _fsdp2_gathered(kept: list[Tensor], width: int) -> list[Term]:
    """Count what FSDP2 gathers, `width` bytes an element, with the gradients that belong to it."""
    layers: dict[str, int] = {}
    for tensor in kept:
        found = LAYER.match(tensor.name)
        layers[found[0] if found else ""] = layers.get(found[0] if found else "", 0) + tensor.numel
    root, layer = layers.pop("", 0), max(layers.values(), default=0)

    return [
        Term(
            ACCELERATOR,
            "weights outside of the layers, gathered",
            width * root,
            (LOSS, BACKWARD, REDUCE),
        ),
        Term(ACCELERATOR, "their gradients", width * root, (BACKWARD, REDUCE)),
        Term(ACCELERATOR, "copy of these that is summed, fp32", 4 * root, (REDUCE,)),
        Term(
            ACCELERATOR,
            "the largest layer, gathered, its gradients, and their copy in fp32",
            (2 * width + 4) * layer,
            (BACKWARD,),
        ),
        Term(
            ACCELERATOR, "a further layer, gathered ahead", width * layer, (BACKWARD,), bound=True
        ),
    ]


def _unfused(
    groups: list[Group], frozen: list[int], ds_config: dict[str, Any], load: Load
) -> list[Term]:
    """bf16 or fp16 without ZeRO (fp16/unfused_optimizer.py): a master copy of each parameter, whose
    fp32 gradient lives during the step.
    """
    numels = [numel for group in groups for numel in group.numels]
    more = 4 if _sent(ds_config) == 4 else 0
    return [
        Term(ACCELERATOR, "parameters, bf16", 2 * (sum(numels) + sum(frozen))),
        Term(ACCELERATOR, "gradients, bf16", 2 * sum(numels), _held(load)),
        Term(ACCELERATOR, "master weights, fp32", 4 * sum(numels)),
        Term(
            ACCELERATOR,
            "optimizer states, fp32",
            _state_bytes(ds_config, groups, [group.numel for group in groups]),
        ),
        Term(
            ACCELERATOR,
            "copy of the gradients that are summed",
            _copied(groups, 2, more),
            (REDUCE,),
        ),
        Term(ACCELERATOR, "gradients of the master weights, fp32", 4 * sum(numels), (STEP,)),
        _temporaries(ds_config, [group.numel for group in groups]),
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
    sent = 0 if _sent(ds_config) == 4 else 2
    # each is added to the sums, and freed, as it comes
    at_once = ds_config["bf16"].get("immediate_grad_update")
    made = (2 * max(numels, default=0), (BACKWARD,)) if at_once else (2 * sum(numels), _held(load))
    return [
        Term(ACCELERATOR, "parameters, bf16", 2 * (flat + sum(frozen))),
        Term(ACCELERATOR, "gradients of a micro-batch, bf16", *made),
        Term(ACCELERATOR, "sums of gradients, fp32", 4 * flat),
        Term(ACCELERATOR, "master weights, fp32", 4 * sum(parts)),
        Term(ACCELERATOR, "optimizer states, fp32", _state_bytes(ds_config, groups, parts)),
        Term(
            ACCELERATOR,
            "copy of the gradients that are summed",
            _copied(groups, 4, sent, flat=True),
            (REDUCE,),
        ),
        _temporaries(ds_config, parts),
    ]


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
    width = _width(ds_config)
    return FlatPart(
        zero=ds_config["zero_optimization"],
        width=width,
        fp32_sums=width == 2 and _sums_in_fp32(ds_config),
        numels=[numel for group in groups for numel in group.numels],
        parts=[group.padded // group.ranks for group in groups],
        touched=[
            [numel for group in groups for numel in group.touched(rank)]
            for rank in range(max((group.ranks for group in groups), default=1))
        ],
    )


def _zero_1_2(
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
        Term(ACCELERATOR, f"parameters, {_name(own.width)}", own.width * (flat + sum(frozen))),
        # single_partition_of_fp32_groups
        _pinned(home, "master weights, fp32", [4 * part for part in own.parts], own.pin, load),
        Term(home, "optimizer states, fp32", _state_bytes(ds_config, groups, own.parts)),
        *_zero_1_2_buckets(own, _sent(ds_config)),
        *_zero_1_2_sums(own, load),
        *(
            _zero_1_2_offloaded(own, load)
            if own.offloaded
            else [_temporaries(ds_config, own.parts)]
        ),
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
        Term(ACCELERATOR, f"reduce buckets, {_name(sent)}", sent * buckets, (BACKWARD, REDUCE)),
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
    dtype, several = _name(own.width), load.accumulation > 1
    gradients = Term(
        ACCELERATOR,
        f"gradients, {dtype}",
        own.width * sum(own.numels),
        (LOSS, BACKWARD, REDUCE) if several else (REDUCE,),
    )
    terms = [gradients] if own.stage_1 else []
    # averaged_gradients, as get_flat_partition returns them
    if own.fp32_sums:
        sums = Term(ACCELERATOR, "sums of gradients, fp32", 4 * sum(own.parts), _held(load))
        return [*terms, sums]

    kept, what = [own.width * numel for numel in max(own.touched, key=sum)], "sums of gradients"
    if own.offloaded:
        # accumulated_grads_in_cpu
        terms.append(_pinned(HOST, f"{what}, {dtype}", kept if several else [], own.pin, load))
    else:
        flat = 4 * max(own.parts, default=0)
        terms.append(Term(ACCELERATOR, f"{what}, {dtype}", sum(kept), _held(load)))
        terms.append(Term(ACCELERATOR, "flat gradients of a group, fp32", flat, (STEP,)))
    again = several and not own.stage_1 and not own.offloaded
    added = "gradients of a micro-batch that are added to them"
    return [*terms, Term(ACCELERATOR, added, sum(kept) if again else 0, (BACKWARD,))]


def _zero_1_2_offloaded(own: FlatPart, load: Load) -> list[Term]:
    """Count the host's copies of a part, and the buffers for one gradient on its way there."""
    dtype, largest = _name(own.width), own.width * max(own.numels, default=0)
    masters, back = [4 * part for part in own.parts], [own.width * part for part in own.parts]
    return [
        _pinned(HOST, "gradients of the master weights, fp32", masters, own.pin, load),
        _pinned(HOST, f"parameters on their way back, {dtype}", back, own.pin, load),
        # temp_grad_buffer_for_cpu_offload, temp_grad_buffer_for_gpu_offload
        _pinned(HOST, "gradient on its way", [largest], own.pin, load),
        Term(ACCELERATOR, "gradient on its way", largest),
    ]


# The optimizer classes of DeepSpeed whose terms need nothing beyond the groups.
OF_CLASS = {
    "torch": _plain,
    "FP16_UnfusedOptimizer": _unfused,
    "BF16_Optimizer": _bf16,
    "DeepSpeedZeroOptimizer": _zero_1_2,
}
HOMES = {"none": ACCELERATOR, "cpu": HOST, "nvme": NVME}  # of a block that offloads, by its device


def _zero_3(
    groups: list[Group],
    frozen: list[int],
    persistent: list[int],
    ds_config: dict[str, Any],
    load: Load,
) -> list[Term]:
    """ZeRO-3 (zero/stage3.py, runtime/swap_tensor), with parameters and optimizer on the
    accelerator, the host or NVMe.
    """
    trained = [numel for group in groups for numel in group.numels]
    ranks = _ranks_of(groups)
    frozen_parts = sum(-(-numel // ranks) for numel in frozen)
    most = int(ds_config["zero_optimization"].get("sub_group_size", 1_000_000_000))
    sub_groups = [run for group in groups for run in group.sub_groups(most)]
    largest = max(map(sum, sub_groups), default=0)
    states = _state_bytes(ds_config, groups, [sum(group.parts()) for group in groups])
    return [
        *_second_partition(trained, frozen, ranks, ds_config, load),
        *_zero_3_passes(groups, frozen, persistent, ds_config),
        _zero_3_sums(groups, ds_config, load),
        *_zero_3_parameters(groups, frozen_parts, largest, ds_config, load),
        *_zero_3_optimizer(sub_groups, states, ds_config, load),
    ]


def _ranks_of(groups: list[Group]) -> int:
    return max((group.ranks for group in groups), default=1)


def _zero_3_passes(
    groups: list[Group], frozen: list[int], persistent: list[int], ds_config: dict[str, Any]
) -> list[Term]:
    """Count what the forward and backward passes hold on the accelerator: gathered weights, and
    gradients on their way.
    """
    zero = ds_config["zero_optimization"]
    width, sent, sums = _width(ds_config), _sent(ds_config), _sums_width(ds_config)
    ranks, bucket = _ranks_of(groups), int(zero.get("reduce_bucket_size", 500_000_000))
    numels = [numel for group in groups for numel in group.numels] + frozen
    largest = max(numels, default=0)
    live = min(sum(numels), int(zero.get("stage3_max_live_parameters", 1_000_000_000)))
    # Parameters that live elsewhere come to the accelerator even on one rank.
    moved = ranks > 1 or HOMES[zero.get("offload_param", {}).get("device", "none")] != ACCELERATOR
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
            f"reduce bucket, {_name(sent)}",
            sent * bucket if zero.get("contiguous_gradients", True) else 0,
        ),
        Term(
            ACCELERATOR,
            "the largest weight, gathered",
            width * largest if moved else 0,
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


def _zero_3_sums(groups: list[Group], ds_config: dict[str, Any], load: Load) -> Term:
    """Count the sums of gradients in ZeRO-3's partitions (grad_partitions_flat_buffer)."""
    offload = ds_config["zero_optimization"].get("offload_optimizer", {})
    on_device = HOMES[offload.get("device", "none")] == ACCELERATOR
    width = _sums_width(ds_config)
    return _pinned(
        ACCELERATOR if on_device else HOST,
        f"sums of gradients, {_name(width)}",
        [width * sum(part for group in groups for part in group.parts())],
        not on_device and offload.get("pin_memory", False),
        load,
    )


def _second_partition(
    trained: list[int], frozen: list[int], ranks: int, ds_config: dict[str, Any], load: Load
) -> list[Term]:
    """Counts what hpZ keeps besides: of each weight the part among the ranks of a host
    (partition_parameters.py, _partition_param_sec), from its first gather in a step to the end of
    the step.
    """
    zero, width = ds_config["zero_optimization"], _width(ds_config)
    if (among := min(int(zero.get("zero_hpz_partition_size", 1)), ranks)) < 2:
        return []
    parts = [
        sum(-(-numel // ranks) * ranks // among for numel in numels) for numels in (trained, frozen)
    ]
    return [
        Term(
            ACCELERATOR,
            "parts of the weights among the ranks of a host",
            (4 if load.adapted else width) * parts[0] + width * parts[1],
        )
    ]


def _zero_3_parameters(
    groups: list[Group], frozen_parts: int, largest: int, ds_config: dict[str, Any], load: Load
) -> list[Term]:
    """Count ZeRO-3's partitions of the parameters where `offload_param` keeps them.

    `largest`: elements of the largest sub-group.
    """
    offload, width = ds_config["zero_optimization"].get("offload_param", {}), _width(ds_config)
    home, dtype = HOMES[offload.get("device", "none")], _name(width)
    own = 4 if load.adapted else width
    parts = [part for group in groups for part in group.parts()]
    size, pin = own * sum(parts) + width * frozen_parts, offload.get("pin_memory", False)
    if home == ACCELERATOR:
        return [Term(ACCELERATOR, f"parameters, {dtype}", size)]

    blocks = [*(own * numel for numel in _in_host_memory(groups, offload)), width * frozen_parts]
    in_memory = _pinned(HOST, f"parameters, {dtype}", blocks, pin, load)
    if home == NVME:
        swapped = Term(NVME, f"parameters, {dtype}", size)
        return [in_memory, swapped, *_parameter_swaps(offload, width, largest)]
    return [in_memory, *([_freed_pins([width * part for part in parts], load)] if pin else [])]


def _in_host_memory(groups: list[Group], offload: dict[str, Any]) -> list[int]:
    """Count the elements of each group's partitions that stay in host memory: all, or with NVMe the
    first `max_in_cpu`.
    """
    sizes = [sum(group.parts()) for group in groups]
    on_nvme = HOMES[offload.get("device", "none")] == NVME
    left, kept = int(offload.get("max_in_cpu", 1_000_000_000)) if on_nvme else sum(sizes), []
    for size in sizes:
        kept.append(min(size, left))
        left -= kept[-1]
    return kept


def _parameter_swaps(offload: dict[str, Any], width: int, largest: int) -> list[Term]:
    """Count the pinned buffers between NVMe and the accelerator (partitioned_param_swapper.py), and
    the updated parameters of a sub-group of `largest` elements.
    """
    buffers = (
        width * int(offload.get("buffer_count", 5)) * int(offload.get("buffer_size", 100_000_000))
    )
    back, size = f"parameters on their way back, {_name(width)}", width * largest
    return [
        Term(HOST, "swap buffers of parameters", buffers, pinned=buffers),
        Term(HOST, back, size, pinned=size),
    ]


def _freed_pins(sizes: list[int], load: Load) -> Term:
    """Count the pinned blocks of the single partitions that torch keeps once they are freed."""
    blocks = [pinned_bytes(size, load.exact_pins) for size in sizes]
    kept = sum(block for block in blocks if not load.exact_pins or block <= ROUNDED_UP_TO)
    return Term(HOST, "freed pinned blocks that torch keeps", 0, pinned=kept, bound=True)


def _zero_3_optimizer(
    sub_groups: list[list[int]], states: int, ds_config: dict[str, Any], load: Load
) -> list[Term]:
    """What ZeRO-3's optimizer keeps, `states` bytes besides the masters, and needs in a step.

    `sub_groups`: elements of each partition in it.
    """
    offload = ds_config["zero_optimization"].get("offload_optimizer", {})
    home, sizes = HOMES[offload.get("device", "none")], [sum(run) for run in sub_groups]
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
        terms.append(_temporaries(ds_config, sizes))
    elif home == HOST:
        terms.append(
            _pinned(
                HOST,
                "gradients of the master weights, fp32",
                [4 * size for size in sizes],
                offload.get("pin_memory", False),
                load,
            )
        )
    else:
        buffers = 4 * int(offload.get("buffer_count", 4)) * max(sizes, default=0)
        terms.append(Term(NVME, "gradients of the master weights, fp32", masters))
        terms.append(Term(HOST, "swap buffers of the optimizer", buffers, pinned=buffers))
    return terms


def _held(load: Load) -> tuple[str, ...]:
    """Returns the moments at which autograd's gradients are there: with several micro-batches all
    the time, with one only after its backward.
    """
    return () if load.accumulation > 1 else (REDUCE, STEP)


def _copied(groups: list[Group], width: int, sent: int, flat: bool = False) -> int:
    """Returns the bytes of the largest copy that the engine makes to sum gradients of `width` bytes
    an element (engine.py, allreduce_bucket).

    It copies runs of two or more tensors, and every run once more, `sent` bytes an element, where
    gradients travel in another dtype (0: they do not).
    """
    copies = [0]
    # experts are summed over fewer ranks, and by themselves
    for ranks in {group.ranks for group in groups}:
        run: list[int] = []
        for numel in [
            numel
            for group in groups
            if group.ranks == ranks
            for numel in ([group.padded] if flat else group.numels)
        ]:
            run.append(numel)
            copies.append(((width if len(run) > 1 else 0) + sent) * sum(run))
            if sum(run) > REDUCE_AT_ONCE:
                run = []
    return max(copies)


def _state_bytes(ds_config: dict[str, Any], groups: list[Group], numels: list[int]) -> int:
    """Returns the bytes that the optimizer keeps for so many elements of each group, without the
    four bytes of each flat tensor's step counter.
    """
    return sum(
        4 * len(states_of(ds_config, group.matrix)) * numel
        for group, numel in zip(groups, numels, strict=True)
    )


def _temporaries(ds_config: dict[str, Any], numels: list[int]) -> Term:
    """Counts what torch's optimizers need in a step beside their states (foreach), such as the root
    of the second moments of one parameter group for AdamW; for the others the most that any option
    takes.
    """
    row, params = facts_of(ds_config), (ds_config.get("optimizer") or {}).get("params", {})
    own = row.family == "Adam" and not params.get("torch_adam")  # DeepSpeed's kernel
    size = 0 if own or params.get("fused") else 4 * row.copies * max(numels, default=0)
    return Term(
        ACCELERATOR, "temporaries of the optimizer, fp32", size, (STEP,), bound=row.family != "Adam"
    )


def _pinned(place: str, what: str, blocks: list[int], pin: bool, load: Load) -> Term:
    """A term of several allocations, page-locked if `pin`."""
    return Term(
        place,
        what,
        sum(blocks),
        pinned=sum(pinned_bytes(size, load.exact_pins) for size in blocks) if pin else 0,
    )


def _width(ds_config: dict[str, Any]) -> int:
    """Bytes of a training parameter."""
    return 2 if _enabled(ds_config, "bf16") or _enabled(ds_config, "fp16") else 4


def _sent(ds_config: dict[str, Any]) -> int:
    """Returns the bytes of an element in which gradients travel: the parameters' width, unless the
    JSON says otherwise (engine.py).
    """
    widths = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2}
    return widths.get(ds_config.get("communication_data_type") or "", _width(ds_config))


def _sums_in_fp32(ds_config: dict[str, Any]) -> bool:
    return ds_config.get("data_types", {}).get("grad_accum_dtype") in ("fp32", "float32")


def _sums_width(ds_config: dict[str, Any]) -> int:
    """Return the bytes of an element in which ZeRO-3 sums gradients."""
    return 4 if _sums_in_fp32(ds_config) else _width(ds_config)


def _name(width: int) -> str:
    return "bf16" if width == 2 else "fp32"


def _enabled(ds_config: dict[str, Any], block: str) -> bool:
    return bool(ds_config.get(block, {}).get("enabled", False))
