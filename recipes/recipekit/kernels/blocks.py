"""Says how many columns of a large product are made at a time; without torch, since a dry run
counts their bytes.
"""

# Logits that are there at a time: on an accelerator 64 MiB in fp32, so that the operations on a
# block take longer than launching them (not measured on a GPU); on a CPU 4 MiB, which its caches
# hold.
BLOCK, CPU_BLOCK = 1 << 24, 1 << 20
NARROWEST = 64  # columns: with fewer the product costs more time than its memory is worth


def columns_at_once(rows: int, columns: int, block: int = BLOCK) -> int:
    """Returns how many of `columns` are made at a time for so many rows."""
    return min(columns, max(NARROWEST, block // max(rows, 1)))
