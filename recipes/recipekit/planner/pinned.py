"""Counts page-locked host memory as torch's allocator takes it."""

from importlib.metadata import version
from typing import Any

# bytes: larger pinned blocks are not rounded (runtime/environment.py sets this, for torch 2.13 and
# later)
ROUNDED_UP_TO = 16 * 2**20


def pinned_bytes(size: int, exact: bool) -> int:
    """Returns the bytes that torch's pinned allocator takes for a block: the next power of two
    (CachingHostAllocator.h); with `exact` a block above ROUNDED_UP_TO is not rounded.
    """
    if size == 0 or (exact and size > ROUNDED_UP_TO):
        return size
    return 1 << (size - 1).bit_length()


def pins_exactly() -> bool:
    """Returns True if this torch's pinned allocator can be set to be exact: 2.13 has the settings,
    and 2.11 ends with an error at an unknown one.
    """
    return tuple(map(int, version("torch").split("+")[0].split(".")[:2])) >= (2, 13)


def pins(ds_config: dict[str, Any]) -> bool:
    """Returns True if a JSON asks for page-locked host memory."""
    zero = ds_config.get("zero_optimization", {})
    return any(
        zero.get(block, {}).get("pin_memory") and zero[block].get("device", "none") != "none"
        for block in ("offload_optimizer", "offload_param")
    )
