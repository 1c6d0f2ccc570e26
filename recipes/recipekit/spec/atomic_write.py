"""Atomic file replacement: write a temporary file next to the old one, flush it and rename it.

After a program crash, a power failure or a full disk, either the old or the new file exists, never
a partial one. Files that a later start reads and replaces, such as `latest` and run.json, are
written through this module.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

# Disk errors that may be temporary.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it to `path` after the `with` block.

    The temporary file is flushed to disk before the rename. If the block raises, `path` is
    unchanged and the temporary file is removed. Only one process at a time may replace a file.
    """
    # A killed process leaves this temporary file behind. The next process overwrites it.
    made = path.with_name(f"{path.name}.tmp")
    try:
        yield made
        fsync(made)
        os.replace(made, path)
    except BaseException:
        with contextlib.suppress(OSError):
            made.unlink()
        raise
    fsync(path.parent)


def write_atomic(path: Path, content: str) -> None:
    """Replace `path` with a file that contains `content`."""
    with atomic_path(path) as made:
        made.write_text(content)


def fsync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
