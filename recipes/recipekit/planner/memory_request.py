"""Sums that every engine class needs for its memory terms.

The terms of the engine classes are in memory.py, torch_engines.py, zero1_2.py and zero3.py.
"""

from typing import Any

from ..spec.memory_terms import ACCELERATOR, REDUCE, STEP, MemoryRequest, Term
from ..spec.optimizer_specs import optimizer_spec_of, optimizer_states
from .groups import GroupSizes
from .pinned import pinned_bytes

# elements that the engine sums at once without ZeRO-2 or -3 (engine.py, MEMORY_OPT_ALLREDUCE_SIZE)
ALLREDUCE_ELEMENTS = 500_000_000


def gradient_moments(request: MemoryRequest) -> tuple[str, ...]:
    """Return the moments at which autograd's gradients exist.

    With several micro-batches they always exist. With one micro-batch they exist only after its
    backward pass.
    """
    return () if request.accumulation > 1 else (REDUCE, STEP)


def allreduce_copy_bytes(
    groups: list[GroupSizes], width: int, sent: int, flat: bool = False
) -> int:
    """Return the size in bytes of the largest copy that the engine creates to sum gradients.

    See engine.py, allreduce_bucket. `width` is the number of bytes per gradient element. The engine
    copies runs of two or more tensors. If gradients are sent in a different dtype, the engine
    copies every run once more, with `sent` bytes per element (0: same dtype).
    """
    copies = [0]
    # Experts are summed separately, over fewer ranks.
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
            if sum(run) > ALLREDUCE_ELEMENTS:
                run = []
    return max(copies)


def state_bytes(ds_config: dict[str, Any], groups: list[GroupSizes], numels: list[int]) -> int:
    """Return the bytes that the optimizer stores for `numels` elements in each group.

    The four bytes of each flat tensor's step counter are not included.
    """
    return sum(
        4 * len(optimizer_states(ds_config, group.matrix)) * numel
        for group, numel in zip(groups, numels, strict=True)
    )


def optimizer_temporaries(ds_config: dict[str, Any], numels: list[int]) -> Term:
    """Count the temporaries of torch's optimizers in a step (foreach), in addition to their states.

    For AdamW the temporaries are the square roots of one parameter group's second moments. For the
    other optimizers the count is the maximum over all options.
    """
    row, params = optimizer_spec_of(ds_config), (ds_config.get("optimizer") or {}).get("params", {})
    own = row.family == "Adam" and not params.get("torch_adam")  # DeepSpeed's kernel
    size = 0 if own or params.get("fused") else 4 * row.temporary_copies * max(numels, default=0)
    return Term(
        ACCELERATOR, "temporaries of the optimizer, fp32", size, (STEP,), bound=row.family != "Adam"
    )


def pinned_term(
    place: str, what: str, blocks: list[int], pin: bool, request: MemoryRequest
) -> Term:
    """Return a term for several allocations, page-locked if `pin` is True."""
    return Term(
        place,
        what,
        sum(blocks),
        pinned=sum(pinned_bytes(size, request.exact_pins) for size in blocks) if pin else 0,
    )


def param_width(ds_config: dict[str, Any]) -> int:
    """Return the bytes of a training parameter."""
    return 2 if is_enabled(ds_config, "bf16") or is_enabled(ds_config, "fp16") else 4


def communication_width(ds_config: dict[str, Any]) -> int:
    """Return the bytes per element in which gradients are sent.

    This is the parameters' width, unless the JSON sets a different width (engine.py).
    """
    widths = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2}
    return widths.get(ds_config.get("communication_data_type") or "", param_width(ds_config))


def summed_copy_width(ds_config: dict[str, Any]) -> int:
    """Return the bytes per element of the copies that ZeRO-1 and -2 create to sum a bucket.

    Ranks allocate the bucket twice (test_memory.py), and once more if it is sent in another dtype
    (zero/stage_1_and_2.py, allreduce_bucket).
    """
    width, sent = param_width(ds_config), communication_width(ds_config)
    return 2 * width + (sent if sent != width else 0)


def sums_in_fp32(ds_config: dict[str, Any]) -> bool:
    return ds_config.get("data_types", {}).get("grad_accum_dtype") in ("fp32", "float32")


def dtype_name(width: int) -> str:
    return "bf16" if width == 2 else "fp32"


def is_enabled(ds_config: dict[str, Any], block: str) -> bool:
    return bool(ds_config.get(block, {}).get("enabled", False))
