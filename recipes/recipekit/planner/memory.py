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
    """Lists every term of a rank of a pipeline stage: of tensor rank 0, which has the largest part
    of each cut tensor, with the padding that all ranks have.
    """
    tensors = held(blueprint, layout, pp_rank)
    groups, frozen = groups_of(blueprint, tensors, layout)
    zero = ds_config.get("zero_optimization", {})
    of_class = {
        "torch": _plain,
        "FP16_UnfusedOptimizer": _unfused,
        "BF16_Optimizer": _bf16,
        "DeepSpeedZeroOptimizer": _zero_1_2,
    }
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
        terms = of_class[optimizer_class(ds_config)](groups, frozen, ds_config, load)
    if by_matrix(ds_config):
        terms.append(whole_matrices(blueprint, tensors))
    if facts_of(ds_config).acts_on == GRADIENT:
        terms += signs([group.numel for group in groups], layout.partitions)
    if states_of(ds_config) == FACTORS:
        terms = with_factors(terms, tensors, layout, zero, load.engine)
    if load.background:
        weights = (
            ("parameters",)
            if zero.get("stage", 0) < 3 or optimizer_class(ds_config) == "torch"
            else ()
        )
        copied = ("master weights", "optimizer states", "errors of signs", *weights)
        size = sum(
            term.size for term in terms if term.what.startswith(copied) and term.place != NVME
        )
        terms.append(Term(HOST, "copy of the states for a save in the background", size))
    logits = (
        load.micro_batch * load.seq_len * load.vocabulary
        if pp_rank == layout.mesh.pp - 1 or layout.schedule == "dualpipev"
        else 0
    )
    if logits and load.chunked:
        block = (
            load.micro_batch
            * load.seq_len
            * columns_at_once(load.micro_batch * load.seq_len, load.vocabulary)
        )
        terms.append(Term(ACCELERATOR, "a block of logits", BLOCK_BYTES * block, (LOSS,)))
    elif logits:
        terms.append(Term(ACCELERATOR, "logits and their gradient", LOGIT_BYTES * logits, (LOSS,)))
    return [term for term in terms if term.taken]


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
    layers: dict[str, int] = {}
    for tensor in kept:
        found = LAYER.match(tensor.name)
        layers[found[0] if found else ""] = layers.get(found[0] if found else "", 0) + tensor.numel
    root, layer, width = layers.pop("", 0), max(layers.values(), default=0), 2 if load.half else 4
    by_group = [
        sum(part[tensor.name] for tensor in trained if tensor.group == group)
        for group in sorted({tensor.group or 0 for tensor in trained})
    ]
    return [
        Term(ACCELERATOR, "parameters, fp32", 4 * sum(part.values())),
        Term(ACCELERATOR, "gradients, fp32", 4 * sum(by_group), _held(load)),
        Term(ACCELERATOR, "optimizer states, fp32", _state_bytes(ds_config, groups, by_group)),
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
        _temporaries(ds_config, by_group),
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


def _zero_1_2(
    groups: list[Group], frozen: list[int], ds_config: dict[str, Any], load: Load
) -> list[Term]:
    """ZeRO-2, and ZeRO-1 without fp32 sums of bf16 gradients (zero/stage_1_and_2.py), with the
    optimizer on the host or not.
    """
    zero = ds_config["zero_optimization"]
    width = _width(ds_config)
    offload = zero.get("offload_optimizer", {})
    offloaded = offload.get("device", "none") != "none"
    home, pin = (HOST if offloaded else ACCELERATOR), offloaded and offload.get("pin_memory", False)
    numels = [numel for group in groups for numel in group.numels]
    parts = [group.padded // group.ranks for group in groups]
    flat, largest, dtype = (
        sum(group.padded for group in groups),
        max(numels, default=0),
        _name(width),
    )
    bucket = int(zero.get("reduce_bucket_size", 500_000_000))
    buckets = (
        bucket * (2 if zero.get("overlap_comm") else 1)
        if zero.get("contiguous_gradients", True) or offloaded
        else 0
    )
    sent = _sent(ds_config)
    stage_1, compact = (
        zero["stage"] == 1,
        width == 2
        and ds_config.get("data_types", {}).get("grad_accum_dtype") in ("fp32", "float32"),
    )
    of_ranks = [
        [numel for group in groups for numel in group.touched(rank)]
        for rank in range(max((group.ranks for group in groups), default=1))
    ]
    exceeding = max(numel if numel > bucket else 0 for numel in (0, *numels))
    # they are kept until backward has ended (DeepSpeed 0.19.8: copy_grads_in_partition)
    if compact and not stage_1:
        exceeding = max(
            exceeding, *(sum(numel for numel in touched if numel > bucket) for touched in of_ranks)
        )
    step = () if load.accumulation > 1 else (REDUCE, STEP)
    terms = [
        Term(ACCELERATOR, f"parameters, {dtype}", width * (flat + sum(frozen))),
        _pinned(home, "master weights, fp32", [4 * part for part in parts], pin, load),
        Term(home, "optimizer states, fp32", _state_bytes(ds_config, groups, parts)),
        Term(ACCELERATOR, f"reduce buckets, {_name(sent)}", sent * buckets, (BACKWARD, REDUCE)),
        Term(
            ACCELERATOR,
            "copies while a bucket is summed",
            (sent + 4) * min(bucket, sum(numels)),
            (BACKWARD, REDUCE),
            bound=True,
        ),
        Term(ACCELERATOR, "gradients that exceed a bucket", width * exceeding, (BACKWARD,)),
    ]
    if stage_1:
        terms.append(
            Term(
                ACCELERATOR,
                f"gradients, {dtype}",
                width * sum(numels),
                (LOSS, BACKWARD, REDUCE) if load.accumulation > 1 else (REDUCE,),
            )
        )
    if compact:
        terms.append(Term(ACCELERATOR, "sums of gradients, fp32", 4 * sum(parts), step))
    else:
        kept = [width * numel for numel in max(of_ranks, key=sum)]
        if offloaded:
            terms.append(
                _pinned(
                    HOST,
                    f"sums of gradients, {dtype}",
                    kept if load.accumulation > 1 else [],
                    pin,
                    load,
                )
            )
        else:
            terms.append(Term(ACCELERATOR, f"sums of gradients, {dtype}", sum(kept), step))
            terms.append(
                Term(
                    ACCELERATOR,
                    "flat gradients of a group, fp32",
                    4 * max(parts, default=0),
                    (STEP,),
                )
            )
        again = load.accumulation > 1 and not stage_1 and not offloaded
        terms.append(
            Term(
                ACCELERATOR,
                "gradients of a micro-batch that are added to them",
                sum(kept) if again else 0,
                (BACKWARD,),
            )
        )
    if offloaded:
        terms += [
            _pinned(
                HOST,
                "gradients of the master weights, fp32",
                [4 * part for part in parts],
                pin,
                load,
            ),
            _pinned(
                HOST,
                f"parameters on their way back, {dtype}",
                [width * part for part in parts],
                pin,
                load,
            ),
            _pinned(HOST, "gradient on its way", [width * largest], pin, load),
            Term(ACCELERATOR, "gradient on its way", width * largest),
        ]
    else:
        terms.append(_temporaries(ds_config, parts))
    return terms


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
    zero = ds_config["zero_optimization"]
    width, sent = _width(ds_config), _sent(ds_config)
    offload = zero.get("offload_optimizer", {})
    home, param_home = (
        HOMES[offload.get("device", "none")],
        HOMES[zero.get("offload_param", {}).get("device", "none")],
    )
    pin = home != ACCELERATOR and offload.get("pin_memory", False)
    ranks = max((group.ranks for group in groups), default=1)
    parts = [part for group in groups for part in group.parts()]
    sub_groups = [
        run
        for group in groups
        for run in group.sub_groups(int(zero.get("sub_group_size", 1_000_000_000)))
    ]
    numels = [numel for group in groups for numel in group.numels] + frozen
    largest = max(numels, default=0)
    sums = (
        4
        if ds_config.get("data_types", {}).get("grad_accum_dtype") in ("fp32", "float32")
        else width
    )
    bucket = int(zero.get("reduce_bucket_size", 500_000_000))
    live = min(sum(numels), int(zero.get("stage3_max_live_parameters", 1_000_000_000)))
    frozen_parts = sum(-(-numel // ranks) for numel in frozen)
    return [
        *_second_partition(
            [numel for group in groups for numel in group.numels], frozen, ranks, ds_config, load
        ),
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
            width * largest if ranks > 1 or param_home != ACCELERATOR else 0,
            (BACKWARD,),
        ),
        Term(
            ACCELERATOR,
            "further weights, gathered",
            width * (live - largest),
            (LOSS, BACKWARD),
            bound=True,
        ),
        Term(
            ACCELERATOR,
            "copies while a bucket is summed",
            (sent + sums) * min(bucket, sum(numels)),
            (BACKWARD,),
            bound=True,
        ),
        _pinned(
            ACCELERATOR if home == ACCELERATOR else HOST,
            f"sums of gradients, {_name(sums)}",
            [sums * sum(parts)],
            pin,
            load,
        ),
        *_zero_3_parameters(
            groups, frozen_parts, max(map(sum, sub_groups), default=0), ds_config, load
        ),
        *_zero_3_optimizer(
            sub_groups,
            _state_bytes(ds_config, groups, [sum(group.parts()) for group in groups]),
            ds_config,
            load,
        ),
    ]


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
    """Where ZeRO-3 keeps its partitions of the parameters.

    `largest`: elements of the largest sub-group.
    """
    offload, width = ds_config["zero_optimization"].get("offload_param", {}), _width(ds_config)
    home, dtype, own = (
        HOMES[offload.get("device", "none")],
        _name(width),
        4 if load.adapted else width,
    )
    parts = [part for group in groups for part in group.parts()]
    size = own * sum(parts) + width * frozen_parts
    if home == ACCELERATOR:
        return [Term(ACCELERATOR, f"parameters, {dtype}", size)]
    left, in_memory = (
        int(offload.get("max_in_cpu", 1_000_000_000)) if home == NVME else sum(parts),
        [],
    )
    for group in groups:
        in_memory.append(min(sum(group.parts()), left))
        left -= in_memory[-1]
    pin = offload.get("pin_memory", False)
    terms = [
        _pinned(
            HOST,
            f"parameters, {dtype}",
            [*(own * numel for numel in in_memory), width * frozen_parts],
            pin,
            load,
        )
    ]
    if home == NVME:
        buffers = (
            width
            * int(offload.get("buffer_count", 5))
            * int(offload.get("buffer_size", 100_000_000))
        )
        terms.append(Term(NVME, f"parameters, {dtype}", size))
        terms.append(Term(HOST, "swap buffers of parameters", buffers, pinned=buffers))
        terms.append(
            Term(
                HOST,
                f"parameters on their way back, {dtype}",
                width * largest,
                pinned=width * largest,
            )
        )
    elif pin:
        blocks = [pinned_bytes(width * part, load.exact_pins) for part in parts]
        kept = sum(block for block in blocks if not load.exact_pins or block <= ROUNDED_UP_TO)
        terms.append(Term(HOST, "freed pinned blocks that torch keeps", 0, pinned=kept, bound=True))
    return terms


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


def _name(width: int) -> str:
    return "bf16" if width == 2 else "fp32"


def _enabled(ds_config: dict[str, Any], block: str) -> bool:
    return bool(ds_config.get(block, {}).get("enabled", False))
