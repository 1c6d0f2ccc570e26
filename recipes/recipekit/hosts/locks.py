"""File locks. The kernel releases a lock when the process that owns it ends for any reason."""

import fcntl
from typing import IO, Any

from ..spec.errors import ConfigError, Problem


def lock_file(file: IO[Any], where: str, fix: str, wait: bool = False) -> None:
    """Lock an open file for this process.

    Raise BlockingIOError if a different process has locked the file and `wait` is False. Raise
    `ConfigError` if the file system does not support locks, for example Lustre without -o flock
    (ENOSYS) and NFS without lockd (ENOLCK).
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        raise ConfigError([no_file_locks_problem(where, error, fix)]) from None


def no_file_locks_problem(where: str, error: OSError, fix: str) -> Problem:
    """Return the problem for a file system without locks. `fix` suggests an alternative."""
    return Problem(
        where,
        f"its file system has no file locks ({error.strerror})",
        f"mount it with file locks (Lustre: -o flock, NFS: with lockd), or {fix}",
    )
