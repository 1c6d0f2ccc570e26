"""Fills files in parts, in any order, by several threads: in whole blocks, past the page cache, and
hashed on the way.

The kernel spends more on caching what nobody is about to read than on the writing itself, most of
all under a memory limit: `dd` wrote 4 GB in 0.4 CPU seconds directly, and in 3 to 9 through the
cache (2 cores, 24 GiB, 2026-11-22).
"""

import errno
import hashlib
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 2**21  # bytes
WRITERS = 2  # threads that wait for the disk


@dataclass
class _Block:
    bits: np.ndarray  # (BLOCK,) uint8, aligned as direct writes need it
    users: int = 0  # threads that copy into it now
    # names whose bytes are in the block and not yet in the file
    names: set[str] = field(default_factory=set)
    holds: int = 0  # the writer's and the hasher's, once the block is full


@dataclass
class _File:
    name: str
    path: Path
    size: int
    left: np.ndarray  # (blocks,) int64: bytes of each block that are still to come
    missing: int  # blocks whose final content is not yet in the file
    descriptor: int = -1  # for whole blocks, opened with the first
    filling: dict[int, _Block] = field(default_factory=dict)
    # not yet hashed; a block in neither dict is in the file
    full: dict[int, _Block] = field(default_factory=dict)
    hash: Any = None
    front: int = 0  # the block that is hashed next
    hashing: bool = False
    ended: bool = False

    def length(self, number: int) -> int:
        return min(BLOCK, self.size - number * BLOCK)


class DirectFiles:
    """Fills files in `folder` that are there in full size.

    `extents`: file -> ranges of bytes that will be written, once each.

    `stored` is called with each name given to `finish` when all bytes written under that name are
    in the files. After the `with` statement all files are on the disk, and `facts` has the size
    and, with `hashed`, the sha256 of each. After an error the files hold whatever reached the disk.
    `lost` is true if a flush failed: then even names passed to `stored` may be missing. The buffers
    take at most `limit` bytes, but at least four blocks, and one more for each thread where every
    buffer is in some thread's hand.
    """

    def __init__(
        self,
        folder: Path,
        extents: dict[str, set[tuple[int, int]]],
        limit: int,
        hashed: bool,
        stored: Callable[[str], None],
    ):
        self.facts: dict[str, dict[str, Any]] = {}
        self._files = {name: _begin(folder, name, own, hashed) for name, own in extents.items()}
        self._hashed, self._stored, self._most = hashed, stored, max(4, limit // BLOCK)
        self._spare: list[np.ndarray] = []
        self.made = 0  # buffers made so far
        self._writing = self._hashing = 0  # threads at work
        # name -> blocks with bytes under that name that are not yet in the file
        self._waiting: Counter[str] = Counter()
        self._finished: set[str] = set()
        # a flush failed: then the kernel drops the written bytes, and the next fsync reports no
        # error
        self.lost = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._disk = ThreadPoolExecutor(WRITERS)

    def __enter__(self) -> "DirectFiles":
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if error is None:
                for file in self._files.values():
                    self._advance(file)  # files, or ends of files, to which nothing was written
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
        assert error is not None or len(self.facts) == len(self._files), (
            "bytes of an extent were never written"
        )

    def write(self, name: str, offset: int, part: np.ndarray, under: str) -> None:
        """Writes `part`, (bytes,) uint8, at `offset` bytes of the file `name`.

        Raises OSError, also for an earlier part.
        """
        file, done = self._files[name], 0
        while done < len(part):
            number, inside = divmod(offset + done, BLOCK)
            count = min(BLOCK - inside, len(part) - done)
            with self._changed:
                block = self._block(file, number)
                block.users += 1
                if under not in block.names:
                    block.names.add(under)
                    self._waiting[under] += 1
            np.copyto(block.bits[inside : inside + count], part[done : done + count])
            with self._changed:
                block.users -= 1
                file.left[number] -= count
                full = not file.left[number]
                if full:
                    file.full[number] = file.filling.pop(number)
                    block.holds = 1 + self._hashed
                    self._writing += 1
                    self._disk.submit(self._save, file, number, block)
            if full:
                self._advance(file)
            done += count

    def finish(self, name: str) -> None:
        """Notes that everything under `name` has been written."""
        with self._changed:
            self._finished.add(name)
            self._tell([name])

    def _tell(self, names: Any) -> None:
        for name in names:
            if name in self._finished and not self._waiting[name]:
                self._finished.discard(name)
                del self._waiting[name]
                self._stored(name)

    def _block(self, file: _File, number: int) -> _Block:
        """Returns the block as it is filled so far; the caller holds the lock."""
        if self._error:
            raise self._error
        if number not in file.filling:
            bits = self._buffer()
            if number in file.filling:  # another thread has made the block meanwhile
                self._spare.append(bits)
                self._changed.notify_all()
                return file.filling[number]
            # the bytes between the extents, and those that a killed run had written, come from the
            # file
            if file.left[number] < file.length(number):
                _read(file, number, bits)
            _open(file)
            file.filling[number] = _Block(bits)
        return file.filling[number]

    def _buffer(self) -> np.ndarray:
        while not self._spare and self.made >= self._most:
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
        self.made += 1
        return np.frombuffer(mmap.mmap(-1, BLOCK), np.uint8)

    def _drop(self) -> bool:
        """Frees full blocks that are in their files and wait for the hash of a block that is not
        full; they are read again when their turn comes.
        """
        for file in self._files.values():
            if self._hashed and file.full and not file.hashing and file.front not in file.full:
                for number in [number for number, block in file.full.items() if block.holds == 1]:
                    self._spare.append(file.full.pop(number).bits)
        return bool(self._spare)

    def _spill(self) -> bool:
        """Frees a block that is still being filled: writes its bytes to the file."""
        for file in self._files.values():
            for number, block in file.filling.items():
                if block.users == 0:
                    del file.filling[number]
                    if self._put(file, number, block.bits):
                        self._is_stored(block)
                    self._spare.append(block.bits)
                    return True
        return False

    def _is_stored(self, block: _Block) -> None:
        for name in block.names:
            self._waiting[name] -= 1
        try:
            self._tell(block.names)
        except BaseException as error:
            # raised by the caller's `stored`, often on a thread that nobody waits for
            self._error = self._error or error

    def _save(self, file: _File, number: int, block: _Block) -> None:
        stored = self._put(file, number, block.bits)
        with self._changed:
            self._writing -= 1
            file.missing -= 1
            if stored:
                self._is_stored(block)
            if not self._hashed:
                del file.full[number]
            block.holds -= 1
            self._free(block)
            self._changed.notify_all()
        self._end(file)

    def _put(self, file: _File, number: int, bits: np.ndarray) -> bool:
        """Writes a block to its file; an error is kept for the next caller."""
        try:
            part: Any = memoryview(bits)[: file.length(number)]  # pyright: ignore[reportArgumentType]
            done = 0
            if len(part) == BLOCK:
                try:
                    done = os.pwrite(file.descriptor, part, number * BLOCK)
                except OSError as error:
                    # some file systems report only here that they have no direct writes
                    if error.errno != errno.EINVAL:
                        raise
            if done < len(part):  # direct writes need whole blocks, and the end of a file is none
                with file.path.open("r+b", buffering=0) as plain:
                    while done < len(part):
                        done += os.pwrite(plain.fileno(), part[done:], number * BLOCK + done)
        except BaseException as error:
            self._fail(file, error)
            return False
        return True

    def _fail(self, file: _File, error: BaseException) -> None:
        if isinstance(error, OSError):
            error.filename = str(file.path)
        self._error = self._error or error

    def _free(self, block: _Block) -> None:
        if not block.holds:
            self._spare.append(block.bits)

    def _advance(self, file: _File) -> None:
        """Hashes the next blocks in order, unless another thread does."""
        while self._hashed:
            with self._changed:
                if (
                    self._error
                    or file.hashing
                    or file.front == len(file.left)
                    or file.left[file.front]
                ):
                    break
                number, block = file.front, file.full.get(file.front)
                file.hashing = True
                self._hashing += 1
            try:
                file.hash.update(
                    block.bits[: file.length(number)]
                    if block
                    else _read(file, number, np.empty(BLOCK, np.uint8))
                )
            except BaseException as error:
                self._fail(file, error)
            with self._changed:
                file.hashing = False
                self._hashing -= 1
                file.front += 1
                if block:
                    del file.full[number]
                    block.holds -= 1
                    self._free(block)
                self._changed.notify_all()
        self._end(file)

    def _end(self, file: _File) -> None:
        """Flushes a file to the disk and closes it once all its blocks are written and hashed."""
        with self._changed:
            if (
                file.ended
                or self._error
                or file.missing
                or (self._hashed and file.front < len(file.left))
            ):
                return
            file.ended = True
            self._writing += 1
        try:
            _open(file)
            os.fsync(file.descriptor)
        except BaseException as error:
            self.lost = True
            self._fail(file, error)
        with self._changed:
            _close(file)
            self.facts[file.name] = {"bytes": file.size} | (
                {"sha256": file.hash.hexdigest()} if self._hashed else {}
            )
            self._writing -= 1
            self._changed.notify_all()


def _begin(folder: Path, name: str, extents: set[tuple[int, int]], hashed: bool) -> _File:
    size = (folder / name).stat().st_size
    left = np.zeros(-(-size // BLOCK), np.int64)
    for start, stop in (extent for extent in extents if extent[0] < extent[1]):
        first, last = start // BLOCK, (stop - 1) // BLOCK
        left[first : last + 1] += BLOCK
        left[first] -= start - first * BLOCK
        left[last] -= (last + 1) * BLOCK - stop
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
            if error.errno != errno.EINVAL:  # EINVAL: this file system has no direct writes
                raise
            file.descriptor = os.open(file.path, os.O_WRONLY)


def _close(file: _File) -> None:
    if file.descriptor >= 0:
        os.close(file.descriptor)
    file.descriptor = -1


def _read(file: _File, number: int, bits: np.ndarray) -> np.ndarray:
    """Reads a block from the file into `bits`."""
    part: Any = memoryview(bits)[: file.length(number)]  # pyright: ignore[reportArgumentType]
    with file.path.open("rb", buffering=0) as stream:
        stream.seek(number * BLOCK)
        while part:
            if not (count := stream.readinto(part)):
                raise OSError(errno.EIO, "is shorter than it was made", str(file.path))
            part = part[count:]
    return bits[: file.length(number)]
