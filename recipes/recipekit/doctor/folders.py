"""Checks of a run's folders on this host.

They cover access and locks in the run folder, and the speed of the NVMe folder.
"""

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path

from ..dslint.swap import file_system_type
from ..hosts.findings import Findings, ReportRow, existing_ancestor, format_bytes
from ..hosts.locks import no_file_locks_problem
from ..spec.errors import Problem

# In GB/s. Anything slower is a network folder or a spinning disk, which would delay a step by
# minutes.
MIN_DRIVE_GB_PER_S = 0.1
PROBE_BYTES = 1 << 20  # bytes written to check that a folder is writable


def check_host_out_folder(out: Path, marker: str | None) -> Findings:
    """Check that the run folder can be written and locked.

    If rank 0 created the file `marker` in its run folder, check that this folder contains the file.
    """
    there = existing_ancestor(out)
    where = f"out = {out}"
    if os.path.isfile(out):
        yield Problem(where, "is a file", "set --out to a folder")
        return
    try:
        with tempfile.TemporaryFile(dir=there, prefix=".doctor_") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                yield no_file_locks_problem(
                    where, error, "choose a folder on another disk with --out"
                )
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = format_bytes(shutil.disk_usage(there).free)
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
    yield ReportRow(
        "out",
        f"{out.absolute()} ({file_system_type(there) or 'unknown file system'},"
        f" {format_bytes(shutil.disk_usage(there).free)} free)",
    )
    if marker and not os.path.exists(there / marker):
        yield Problem(
            where,
            f"{there} is not the folder that rank 0 writes to, because rank 0's marker file"
            f" {marker} is missing",
            "set --out to a folder that all hosts share",
        )


def check_nvme_folder(folder: Path) -> Findings:
    """Measure the write and read speed of the NVMe folder.

    The page cache is bypassed if the file system allows it.
    """
    there = existing_ancestor(folder)
    block = mmap.mmap(-1, 16 << 20)  # aligned, as O_DIRECT requires
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
    yield ReportRow(
        "NVMe",
        f"{there} ({file_system_type(there)}): writes {writes:.2f} GB/s, reads {reads:.2f}"
        f" GB/s{cached}, {format_bytes(shutil.disk_usage(there).free)} free",
    )
    if min(writes, reads) < MIN_DRIVE_GB_PER_S:
        rule = (
            f"writes {writes:.2f} GB/s and reads {reads:.2f} GB/s: below {MIN_DRIVE_GB_PER_S} GB/s"
            " every step waits for it"
        )
        yield Problem(
            f"nvme_path = {folder}", rule, "set nvme_path to a folder on a local NVMe drive"
        )
