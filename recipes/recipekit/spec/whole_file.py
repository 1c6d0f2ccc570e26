"""Files that are replaced: each is written whole beside its name, flushed, and renamed.

A crash of the program, a loss of power or a full disk leaves the old file or the new one, never a
part of one. `latest`, run.json and every other file that a later start reads and an earlier one has
written are replaced here.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

# errors of a disk that may be well again later
FAILING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` to write to.

    Afterwards that file is on the disk under the name `path`.

    If the `with` raises, `path` is as it was and nothing is left beside it. One process at a time
    may replace a file.
    """
    # a start that was killed leaves it, and the next one writes over it
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


def write_whole(path: Path, content: str) -> None:
    """Replace `path` by a file with this content."""
    with replacing(path) as made:
        made.write_text(content)


def fsync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
