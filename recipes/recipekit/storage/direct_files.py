"""Files that several threads fill in any order, written in full blocks without the page cache.

Each file is hashed while it is written. Caching costs the kernel more than the writing itself,
especially under a memory limit. To write 4 GB, `dd` used 0.4 CPU seconds directly, and 3 to 9 CPU
seconds through the cache (2 cores, 24 GiB, 2026-11-22).

A plain writer (pwrite, then one hash and one fsync of each file) is too slow, because the goal is
80% of the speed of `cp`. For `reshape --zero 1 --dp 4` of 2.2 GB, it reached 63%, and this writer
reached 97%. These figures are medians of 5 rounds of `tools/bench/bench_convert.py --layers 6`, run
side by side (2 busy cores, 2026-11-28).
"""

import errno
import hashlib
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

WRITE_BLOCK_BYTES = 2**21  # bytes
WRITER_THREADS = 2  # threads that write


@dataclass
class _Block:
    bits: np.ndarray  # (BLOCK,) uint8, aligned for direct writes
    users: int = 0  # threads that are copying into it
    # names (`under` in `write`) whose bytes are in the block but not yet in the file
    names: set[str] = field(default_factory=set)
    ref_count: int = 0  # one reference by the writer and one by the hasher, once the block is full


@dataclass
class _File:
    name: str
    path: Path
    size: int
    unfilled_bytes: np.ndarray  # (blocks,) int64: missing bytes of each block
    unwritten_blocks: int  # number of blocks whose final content is not yet in the file
    descriptor: int = -1  # for full blocks; opened when the first block is full
    filling: dict[int, _Block] = field(default_factory=dict)
    # Blocks that are not hashed yet. A block that is in neither dictionary is already in the file.
    full: dict[int, _Block] = field(default_factory=dict)
    hash: Any = None
    next_to_hash: int = 0  # the next block to hash
    hashing: bool = False
    ended: bool = False

    def length(self, number: int) -> int:
        return min(WRITE_BLOCK_BYTES, self.size - number * WRITE_BLOCK_BYTES)


class DirectFiles:
    """A writer of the files in `folder`, which must already have their full sizes.

    `extents` maps each file to the byte ranges that will be written, each exactly once.

    `stored` is called with each name passed to `finish` when all bytes written under that name are
    in the files. After the `with` statement, all files are on disk. `file_entries` then contains
    each file's size and, with `hashed`, its sha256. After an error, the files contain only the
    bytes that reached the disk. If a flush failed, `flush_failed` is True. In that case, even bytes
    of names passed to `stored` may be missing.

    The buffers use at most `limit` bytes, but at least four blocks. If threads use all buffers,
    each waiting thread receives one additional buffer.
    """

    def __init__(
        self,
        folder: Path,
        extents: dict[str, set[tuple[int, int]]],
        limit: int,
        hashed: bool,
        stored: Callable[[str], None],
    ):
        self.file_entries: dict[str, dict[str, Any]] = {}
        self._files = {name: _plan_file(folder, name, own, hashed) for name, own in extents.items()}
        self._hashed, self._stored, self._max_buffers = (
            hashed,
            stored,
            max(4, limit // WRITE_BLOCK_BYTES),
        )
        self._spare: list[np.ndarray] = []
        self.num_buffers = 0  # buffers made so far
        self._writing = self._hashing = 0  # running threads
        # name -> number of blocks with bytes of that name that are not yet in the file
        self._waiting: Counter[str] = Counter()
        self._finished: set[str] = set()
        # True after a failed flush: the kernel then drops the bytes, and the next fsync reports no
        # error
        self.flush_failed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._disk = ThreadPoolExecutor(WRITER_THREADS)

    def __enter__(self) -> "DirectFiles":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                for file in self._files.values():
                    self._advance(file)  # files, or ends of files, in which nothing will be written
        finally:
            with self._changed:
                while self._writing or self._hashing:
                    self._changed.wait()
                if error is not None or self._error:
                    while self._spill():
                        pass
            self._disk.shutdown()
            for file in self._files.values():
                _close(file)
        if error is None and self._error:
            raise self._error
        assert error is not None or len(self.file_entries) == len(self._files), (
            "bytes of an extent were never written"
        )

    def write(self, name: str, offset: int, part: np.ndarray, under: str) -> None:
        """Write `part`, (bytes,) uint8, at byte `offset` of the file `name`.

        Raise OSError, even if the error occurred in an earlier part.
        """
        file, done = self._files[name], 0
        while done < len(part):
            number, inside = divmod(offset + done, WRITE_BLOCK_BYTES)
            count = min(WRITE_BLOCK_BYTES - inside, len(part) - done)
            with self._changed:
                block = self._block(file, number)
                block.users += 1
                if under not in block.names:
                    block.names.add(under)
                    self._waiting[under] += 1
            np.copyto(block.bits[inside : inside + count], part[done : done + count])
            with self._changed:
                block.users -= 1
                file.unfilled_bytes[number] -= count
                full = not file.unfilled_bytes[number]
                if full:
                    file.full[number] = file.filling.pop(number)
                    block.ref_count = 1 + self._hashed
                    self._writing += 1
                    self._disk.submit(self._save, file, number, block)
            if full:
                self._advance(file)
            done += count

    def finish(self, name: str) -> None:
        """Record that all bytes of `name` have been written."""
        with self._changed:
            self._finished.add(name)
            self._report_stored([name])

    def _report_stored(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._finished and not self._waiting[name]:
                self._finished.discard(name)
                del self._waiting[name]
                self._stored(name)

    def _block(self, file: _File, number: int) -> _Block:
        """Return a partly filled block; the caller must hold the lock."""
        if self._error:
            raise self._error
        if number not in file.filling:
            bits = self._buffer()
            if number in file.filling:  # a different thread has created the block in the meantime
                self._spare.append(bits)
                self._changed.notify_all()
                return file.filling[number]
            # Bytes between the extents, and bytes that a killed run wrote, are read from the file.
            if file.unfilled_bytes[number] < file.length(number):
                _read_block(file, number, bits)
            _open(file)
            file.filling[number] = _Block(bits)
        return file.filling[number]

    def _buffer(self) -> np.ndarray:
        while not self._spare and self.num_buffers >= self._max_buffers:
            if self._error:
                raise self._error
            if self._drop():
                continue
            if self._writing or self._hashing:
                self._changed.wait()
            elif not self._spill():
                break
        if self._spare:
            return self._spare.pop()
        self.num_buffers += 1
        return np.frombuffer(mmap.mmap(-1, WRITE_BLOCK_BYTES), np.uint8)

    def _drop(self) -> bool:
        """Free full blocks that are in their files but wait for the hash of an incomplete block.

        These blocks are read again when it is their turn to be hashed.
        """
        for file in self._files.values():
            if (
                self._hashed
                and file.full
                and not file.hashing
                and file.next_to_hash not in file.full
            ):
                for number in [
                    number for number, block in file.full.items() if block.ref_count == 1
                ]:
                    self._spare.append(file.full.pop(number).bits)
        return bool(self._spare)

    def _spill(self) -> bool:
        """Free an incomplete block by writing its bytes to the file."""
        for file in self._files.values():
            for number, block in file.filling.items():
                if block.users == 0:
                    del file.filling[number]
                    if self._write_block(file, number, block.bits):
                        self._mark_stored(block)
                    self._spare.append(block.bits)
                    return True
        return False

    def _mark_stored(self, block: _Block) -> None:
        for name in block.names:
            self._waiting[name] -= 1
        try:
            self._report_stored(block.names)
        except BaseException as error:
            # The caller's `stored` raises this error, often on a thread for which nobody waits.
            self._error = self._error or error

    def _save(self, file: _File, number: int, block: _Block) -> None:
        stored = self._write_block(file, number, block.bits)
        with self._changed:
            self._writing -= 1
            file.unwritten_blocks -= 1
            if stored:
                self._mark_stored(block)
            if not self._hashed:
                del file.full[number]
            block.ref_count -= 1
            self._free(block)
            self._changed.notify_all()
        self._flush_and_close(file)

    def _write_block(self, file: _File, number: int, bits: np.ndarray) -> bool:
        """Write a block to its file; store an error for the next caller."""
        try:
            part = memoryview(bits)[: file.length(number)]  # pyright: ignore[reportArgumentType]
            done = 0
            if len(part) == WRITE_BLOCK_BYTES:
                try:
                    done = os.pwrite(file.descriptor, part, number * WRITE_BLOCK_BYTES)
                except OSError as error:
                    # Some file systems report only at this point that they do not support direct
                    # writes.
                    if error.errno != errno.EINVAL:
                        raise
            if done < len(part):  # direct writes need full blocks, but the file's end is shorter
                with file.path.open("r+b", buffering=0) as plain:
                    while done < len(part):
                        done += os.pwrite(
                            plain.fileno(), part[done:], number * WRITE_BLOCK_BYTES + done
                        )
        except BaseException as error:
            self._fail(file, error)
            return False
        return True

    def _fail(self, file: _File, error: BaseException) -> None:
        if isinstance(error, OSError):
            error.filename = str(file.path)
        self._error = self._error or error

    def _free(self, block: _Block) -> None:
        if not block.ref_count:
            self._spare.append(block.bits)

    def _advance(self, file: _File) -> None:
        """Hash the next blocks in order, unless a different thread is already hashing them."""
        while self._hashed:
            with self._changed:
                if (
                    self._error
                    or file.hashing
                    or file.next_to_hash == len(file.unfilled_bytes)
                    or file.unfilled_bytes[file.next_to_hash]
                ):
                    break
                number, block = file.next_to_hash, file.full.get(file.next_to_hash)
                file.hashing = True
                self._hashing += 1
            try:
                file.hash.update(
                    block.bits[: file.length(number)]
                    if block
                    else _read_block(file, number, np.empty(WRITE_BLOCK_BYTES, np.uint8))
                )
            except BaseException as error:
                self._fail(file, error)
            with self._changed:
                file.hashing = False
                self._hashing -= 1
                file.next_to_hash += 1
                if block:
                    del file.full[number]
                    block.ref_count -= 1
                    self._free(block)
                self._changed.notify_all()
        self._flush_and_close(file)

    def _flush_and_close(self, file: _File) -> None:
        """Flush and close a file once all of its blocks are written and hashed."""
        with self._changed:
            if (
                file.ended
                or self._error
                or file.unwritten_blocks
                or (self._hashed and file.next_to_hash < len(file.unfilled_bytes))
            ):
                return
            file.ended = True
            self._writing += 1
        try:
            _open(file)
            os.fsync(file.descriptor)
        except BaseException as error:
            self.flush_failed = True
            self._fail(file, error)
        with self._changed:
            _close(file)
            self.file_entries[file.name] = {"bytes": file.size} | (
                {"sha256": file.hash.hexdigest()} if self._hashed else {}
            )
            self._writing -= 1
            self._changed.notify_all()


def _plan_file(folder: Path, name: str, extents: set[tuple[int, int]], hashed: bool) -> _File:
    size = (folder / name).stat().st_size
    left = np.zeros(-(-size // WRITE_BLOCK_BYTES), np.int64)
    for start, stop in (extent for extent in extents if extent[0] < extent[1]):
        first, last = start // WRITE_BLOCK_BYTES, (stop - 1) // WRITE_BLOCK_BYTES
        left[first : last + 1] += WRITE_BLOCK_BYTES
        left[first] -= start - first * WRITE_BLOCK_BYTES
        left[last] -= (last + 1) * WRITE_BLOCK_BYTES - stop
    return _File(
        name,
        folder / name,
        size,
        left,
        int(np.count_nonzero(left)),
        hash=hashlib.sha256() if hashed else None,
    )


def _open(file: _File) -> None:
    if file.descriptor < 0:
        try:
            file.descriptor = os.open(file.path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the file system lacks direct writes
                raise
            file.descriptor = os.open(file.path, os.O_WRONLY)


def _close(file: _File) -> None:
    if file.descriptor >= 0:
        os.close(file.descriptor)
    file.descriptor = -1


def _read_block(file: _File, number: int, bits: np.ndarray) -> np.ndarray:
    """Read a block of the file into `bits`."""
    part = memoryview(bits)[: file.length(number)]  # pyright: ignore[reportArgumentType]
    with file.path.open("rb", buffering=0) as stream:
        stream.seek(number * WRITE_BLOCK_BYTES)
        while part:
            if not (count := stream.readinto(part)):
                raise OSError(errno.EIO, "is shorter than it was made", str(file.path))
            part = part[count:]
    return bits[: file.length(number)]
