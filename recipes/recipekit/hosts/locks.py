"""Locks files. The kernel drops a lock with the process that holds it, however that process
ends.
"""

import fcntl
from typing import IO, Any

from ..spec.refusal import Problem, Refusal


def lock(file: IO[Any], where: str, fix: str, wait: bool = False) -> None:
    """Takes the lock of an open file for this process.

    Raises BlockingIOError where another process has the lock and `wait` is not set, `Refusal` where
    the file system has no locks: Lustre without -o flock (ENOSYS), NFS without lockd (ENOLCK), and
    others.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        raise Refusal([no_locks(where, error, fix)]) from None


def no_locks(where: str, error: OSError, fix: str) -> Problem:
    """Returns the problem of a file system without locks; `fix` names another way."""
    return Problem(
        where,
        f"its file system has no file locks ({error.strerror})",
        f"mount it with file locks (Lustre: -o flock, NFS: with lockd), or {fix}",
    )
