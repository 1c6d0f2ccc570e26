"""The block size, in columns, for computing a large product.

This module does not import torch, because a dry run counts the bytes.
"""

# Number of logits that exist at a time. On an accelerator they occupy 64 MiB in fp32, so that the
# operations on a block take longer than their launch (not measured on a GPU). On a CPU they occupy
# 4 MiB, which fits into its caches.
BLOCK_LOGITS, CPU_BLOCK_LOGITS = 1 << 24, 1 << 20
MIN_COLUMNS = 64  # with fewer columns, the product costs more time than the saved memory is worth


def columns_per_block(rows: int, columns: int, block: int = BLOCK_LOGITS) -> int:
    """Return how many `columns` are computed at a time for this number of rows."""
    return min(columns, max(MIN_COLUMNS, block // max(rows, 1)))
