"""What a run asks of a rank beyond its model, and the sums that every engine class needs.

The terms of the engine classes are in memory.py, torch_engines.py, zero1_2.py and zero3.py.
"""

from dataclasses import dataclass
from typing import Any

from ..spec.optimizer_specs import facts_of, states_of
from .groups import Group
from .pinned import pinned_bytes
from .terms import ACCELERATOR, REDUCE, STEP, Term

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


def gradient_moments(load: Load) -> tuple[str, ...]:
    """Returns the moments at which autograd's gradients are there: with several micro-batches all
    the time, with one only after its backward.
    """
    return () if load.accumulation > 1 else (REDUCE, STEP)


def copied_bytes(groups: list[Group], width: int, sent: int, flat: bool = False) -> int:
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


def state_bytes(ds_config: dict[str, Any], groups: list[Group], numels: list[int]) -> int:
    """Returns the bytes that the optimizer keeps for so many elements of each group, without the
    four bytes of each flat tensor's step counter.
    """
    return sum(
        4 * len(states_of(ds_config, group.matrix)) * numel
        for group, numel in zip(groups, numels, strict=True)
    )


def temporaries(ds_config: dict[str, Any], numels: list[int]) -> Term:
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


def pinned_term(place: str, what: str, blocks: list[int], pin: bool, load: Load) -> Term:
    """A term of several allocations, page-locked if `pin`."""
    return Term(
        place,
        what,
        sum(blocks),
        pinned=sum(pinned_bytes(size, load.exact_pins) for size in blocks) if pin else 0,
    )


def width_of(ds_config: dict[str, Any]) -> int:
    """Bytes of a training parameter."""
    return 2 if is_enabled(ds_config, "bf16") or is_enabled(ds_config, "fp16") else 4


def sent_width(ds_config: dict[str, Any]) -> int:
    """Returns the bytes of an element in which gradients travel: the parameters' width, unless the
    JSON says otherwise (engine.py).
    """
    widths = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2}
    return widths.get(ds_config.get("communication_data_type") or "", width_of(ds_config))


def sums_in_fp32(ds_config: dict[str, Any]) -> bool:
    return ds_config.get("data_types", {}).get("grad_accum_dtype") in ("fp32", "float32")


def dtype_name(width: int) -> str:
    return "bf16" if width == 2 else "fp32"


def is_enabled(ds_config: dict[str, Any], block: str) -> bool:
    return bool(ds_config.get(block, {}).get("enabled", False))
