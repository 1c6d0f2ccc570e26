"""Checks the folders of a run on this host: whether the run folder can be written and locked, and
how fast the NVMe folder is.
"""

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path

from ..dslint.swap import file_system
from ..hosts.findings import Findings, Row, amount, existing
from ..hosts.locks import no_locks
from ..spec.refusal import Problem

# GB/s; slower is a network folder or a spinning disk, for which a step waits minutes
SLOWEST_DRIVE = 0.1
PROBE = 1 << 20  # bytes written to find out whether a folder can be written


def check_out(out: Path, mark: str | None) -> Findings:
    """Checks that the run folder can be written and locked, and is the folder in which rank 0 left
    the file `mark`.
    """
    there = existing(out)
    where = f"out = {out}"
    if os.path.isfile(out):
        yield Problem(where, "is a file", "set --out to a folder")
        return
    try:
        with tempfile.TemporaryFile(dir=there, prefix=".doctor_") as file:
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(file.fileno())
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                yield no_locks(where, error, "choose a folder on another disk with --out")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = amount(shutil.disk_usage(there).free)
            yield Problem(
                where,
                f"{there} is full ({error.strerror}, {free} free)",
                "free space, or set --out to a folder on another disk",
            )
        else:
            yield Problem(
                where,
                f"{there} cannot be written: {error.strerror}",
                "set --out to a folder that you can write to",
            )
    yield Row(
        "out",
        f"{out.absolute()} ({file_system(there) or 'unknown file system'},"
        f" {amount(shutil.disk_usage(there).free)} free)",
    )
    if mark and not os.path.exists(there / mark):
        yield Problem(
            where,
            f"{there} is not the folder that rank 0 writes to, because rank 0's marker file {mark}"
            " is missing",
            "set --out to a folder that all hosts share",
        )


def check_drive(folder: Path) -> Findings:
    """Measures how fast the NVMe folder writes and reads, past the page cache where the file system
    allows it.
    """
    there = existing(folder)
    block = mmap.mmap(-1, 16 << 20)  # aligned, as O_DIRECT wants it
    block.write(os.urandom(1 << 20) * 16)
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".doctor_") as file:
            try:
                descriptor, past_cache = os.open(file.name, os.O_RDWR | os.O_DIRECT), True
            except OSError:
                descriptor, past_cache = os.open(file.name, os.O_RDWR), False
            begun = time.perf_counter()
            for _ in range(16):
                os.write(descriptor, block)
            os.fsync(descriptor)
            written = time.perf_counter()
            os.lseek(descriptor, 0, os.SEEK_SET)
            while os.readv(descriptor, [block]):
                pass
            read = time.perf_counter()
            os.close(descriptor)
    except OSError as error:
        yield Problem(
            f"nvme_path = {folder}",
            f"{there} cannot be written: {error.strerror}",
            "set nvme_path to a folder on a local drive with free space",
        )
        return
    writes, reads = (
        16 * len(block) / seconds / 1e9 for seconds in (written - begun, read - written)
    )
    cached = "" if past_cache else ", through the page cache"
    yield Row(
        "NVMe",
        f"{there} ({file_system(there)}): writes {writes:.2f} GB/s, reads {reads:.2f} GB/s{cached},"
        f" {amount(shutil.disk_usage(there).free)} free",
    )
    if min(writes, reads) < SLOWEST_DRIVE:
        rule = (
            f"writes {writes:.2f} GB/s and reads {reads:.2f} GB/s: below {SLOWEST_DRIVE} GB/s every"
            " step waits for it"
        )
        yield Problem(
            f"nvme_path = {folder}", rule, "set nvme_path to a folder on a local NVMe drive"
        )
