"""The block size, in columns, for computing a large product.

This module does not import torch, because a dry run counts the bytes.
"""

# Number of logits that exist at a time. On an accelerator they occupy 256 MiB in fp32. Each block
# reads and writes the fp32 sums of the input's gradient, so fewer blocks move fewer bytes. With
# 2^24 logits, four times as many bytes would be moved. The time on a GPU is not measured. On a CPU
# the logits occupy 4 MiB, which fits into its caches. bench_loss.md was measured with this size.
BLOCK_LOGITS, CPU_BLOCK_LOGITS = 1 << 26, 1 << 20
MIN_COLUMNS = 64  # with fewer columns, the product costs more time than the saved memory is worth


def columns_per_block(rows: int, columns: int, block: int = BLOCK_LOGITS) -> int:
    """Return how many `columns` are computed at a time for this number of rows."""
    return min(columns, max(MIN_COLUMNS, block // max(rows, 1)))
