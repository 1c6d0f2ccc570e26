"""Page-locked host memory, counted in the sizes that torch's allocator uses."""

from typing import Any

# Size in bytes. Larger pinned blocks are not rounded up (runtime/environment.py sets this, for
# torch 2.13 and later).
PINNED_ROUNDING_LIMIT = 16 * 2**20


def pinned_bytes(size: int, exact: bool) -> int:
    """Return the number of bytes that torch's pinned allocator uses for a block.

    The number is the next power of two (CachingHostAllocator.h). With `exact`, a block above
    PINNED_ROUNDING_LIMIT is not rounded up.
    """
    if size == 0 or (exact and size > PINNED_ROUNDING_LIMIT):
        return size
    return 1 << (size - 1).bit_length()


def uses_pinned_memory(ds_config: dict[str, Any]) -> bool:
    """Return True if a JSON uses page-locked host memory."""
    zero = ds_config.get("zero_optimization", {})
    return any(
        zero.get(block, {}).get("pin_memory") and zero[block].get("device", "none") != "none"
        for block in ("offload_optimizer", "offload_param")
    )
