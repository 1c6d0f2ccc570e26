"""Copies tensors between two sets of files, in bounded memory and with several threads."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..parallel.blueprint import Blueprint, Tensor
from ..parallel.factors import state_of
from . import manifest, torch_files
from .digest import digest
from .direct_files import DirectFiles
from .journal import Journal
from .places import Piece, Shard, originals
from .tensor_files import BITS, TensorFiles

# most elements moved at a time: they are still in the cache when they are digested and written
CHUNK = 256 * 1024
BUFFERS = 256 * 2**20  # most bytes that wait for the disk or for their hash


@dataclass(frozen=True)
class Effort:
    """Says how much of the machine a conversion may use.

    `progress` is called with (bytes just done, bytes in all), from several threads.
    """

    workers: int = 2
    mem_limit: int = 512 * 1024**2  # bytes, for buffers
    progress: Callable[[int, int], None] = lambda done, total: None

    @property
    def chunk(self) -> int:
        """Counts the elements that one worker moves at a time, in three copies: read, cut and
        written.
        """
        return max(65536, min(CHUNK, self.mem_limit // (self.workers * 16)))

    @property
    def buffers(self) -> int:
        """Counts the bytes that may be on their way to the disk."""
        return min(BUFFERS, self.mem_limit - self.workers * self.chunk * 16)


@dataclass(frozen=True)
class Copy:
    """Names a tensor (of an optimizer's state that tensor) in one role of the source, and the roles
    of its copy in the target (none: the tensor is only read).
    """

    tensor: Tensor
    role: str
    to: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.tensor.name}|{self.role}"

    @property
    def nbytes(self) -> int:
        return self.tensor.numel * (4 if self.role != "weight" else 2)


def copies(blueprint: Blueprint, source: TensorFiles, target: TensorFiles | None) -> list[Copy]:
    """Lists what has to be copied.

    A master also makes the 16-bit weight that a layout keeps beside it.

    Without a target: everything that the source holds, to be digested.
    """
    found = []
    for tensor in blueprint.tensors:
        roles = source.roles(tensor)
        trained = tensor.group is not None
        for role in roles:
            if trained and role == "weight" and "master" in roles:
                continue  # a rounded copy of the master
            wanted = (
                role,
                *(["weight"] if role == "master" else []),
                *(["master"] if role == "weight" and trained else []),
            )
            to = tuple(
                own for own in wanted if target is not None and (tensor.name, own) in target.shards
            )
            if target is None or to:
                found.append(Copy(state_of(tensor, role), role, to))
    return found


@dataclass
class _CopyJob:
    """Copies in progress: several threads move the parts, and the digests are collected.

    `rest`: the copies to make, in the order of their bytes. `digests` holds the finished ones.
    """

    source: TensorFiles
    target: TensorFiles | None
    effort: Effort
    journal: Journal | None
    rest: list[Copy]
    total_bytes: int  # of all copies, finished ones included
    digests: dict[str, Any]

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.left = {copy.key: copy.tensor.numel for copy in self.rest}  # elements
        self.sums: Counter[str] = Counter()
        self.unnoted: dict[str, list[str]] = {}  # tensor -> keys of its finished copies

    def parts(self) -> Iterator[tuple[Copy, int, int]]:
        """Yield (copy, start, stop): ranges of elements that one thread moves at a time."""
        for copy in self.rest:
            unit = unit_of(copy, self.source, *([self.target] if self.target else []))
            numel = copy.tensor.numel
            spans = chunks(numel, unit, self.effort.chunk) if numel else [(0, 0)]
            yield from ((copy, start, stop) for start, stop in spans)

    def move(self, part: tuple[Copy, int, int]) -> None:
        """Read a part, add it to the digest of its tensor, and write it."""
        copy, start, stop = part
        values = self.source.read(copy.tensor, copy.role, start, stop)
        dtype = self.source.dtype_of(copy.tensor, copy.role)
        added = digest(values, start)

        for role in copy.to:
            assert self.target
            rounded = cast(values, dtype, self.target.dtype_of(copy.tensor, role))
            self.target.write(copy.tensor, role, start, rounded)
        self.effort.progress((stop - start) * values.itemsize, self.total_bytes)

        finished = self._count(copy, stop - start, added, dtype)
        if finished and self.target and self.target.direct:
            self.target.direct.finish(copy.tensor.name)

    def _count(self, copy: Copy, moved: int, added: int, dtype: str) -> bool:
        """Count moved elements; return True after the last ones, which complete the digest."""
        with self.lock:
            self.sums[copy.key] += added
            self.left[copy.key] -= moved
            if self.left[copy.key]:
                return False
            total = f"{self.sums[copy.key] % 2**64:016x}"
            self.digests[copy.key] = [list(copy.tensor.shape), dtype, total]
            self.unnoted.setdefault(copy.tensor.name, []).append(copy.key)
        return True

    def note_stored(self, name: str) -> None:
        """Note the finished copies of a tensor in the journal: its bytes are on the disk."""
        with self.lock:
            keys = self.unnoted.pop(name, [])
        for key in keys:
            if self.journal:
                self.journal.note(key, self.digests[key])


def run(
    todo: list[Copy],
    source: TensorFiles,
    effort: Effort,
    target: TensorFiles | None = None,
    journal: Journal | None = None,
    hashed: bool = False,
) -> tuple[dict[str, Any], dict[str, manifest.Facts]]:
    """Copy tensors, and return {"tensor|role": [shape, dtype, digest]} and the facts of each file
    that was written.

    The digests include those that an interrupted conversion had noted in the `journal`. The files
    are on the disk when `run` returns; without `hashed` their facts have no sha256. Without a
    `target` the source is only read.
    """
    digests: dict[str, Any] = dict(journal.done) if journal else {}
    total_bytes = sum(copy.nbytes for copy in todo)
    for copy in todo:
        if copy.key in digests:
            effort.progress(copy.nbytes, total_bytes)

    rest = _in_order_of_bytes([copy for copy in todo if copy.key not in digests], source, target)
    job = _CopyJob(source, target, effort, journal, rest, total_bytes, digests)
    if target is None:
        share_work(job.move, job.parts(), effort.workers)
        return digests, {}

    try:
        with DirectFiles(
            target.folder, _extents(rest, target), effort.buffers, hashed, job.note_stored
        ) as target.direct:
            share_work(job.move, job.parts(), effort.workers)
        return digests, target.direct.facts
    finally:
        # Bytes that did not reach the disk may belong to copies that were already noted.
        if journal and target.direct and target.direct.lost:
            journal.forget()
        target.direct = None


def _in_order_of_bytes(
    rest: list[Copy], source: TensorFiles, target: TensorFiles | None
) -> list[Copy]:
    """Sorts copies by their place in the target (without a target: in the source): one file after
    the other, each from its beginning.
    """
    places = {
        copy.key: (target or source).place(copy.tensor, copy.to[0] if target else copy.role)
        for copy in rest
    }
    order = {
        file: number
        for number, file in enumerate(dict.fromkeys(file for file, _ in places.values()))
    }
    return sorted(rest, key=lambda copy: (order[places[copy.key][0]], places[copy.key][1]))


def _extents(todo: list[Copy], target: TensorFiles) -> dict[str, set[tuple[int, int]]]:
    """Maps each file to the ranges of bytes that the copies will fill."""
    extents: dict[str, set[tuple[int, int]]] = {}
    for copy in todo:
        for role in copy.to:
            for file, own in target.extents(copy.tensor, role).items():
                extents.setdefault(file, set()).update(own)
    return extents


def share_work(work: Callable[[Any], Any], items: Iterable[Any], workers: int) -> list[Any]:
    """Calls `work` for each item on several threads; returns the results in the order of the items.

    After an error no further item is begun.
    """
    numbered, found, lock, failed = enumerate(items), {}, threading.Lock(), threading.Event()

    def turn() -> None:
        while not failed.is_set():
            with lock:
                number, item = next(numbered, (-1, None))
            if number < 0:
                return
            try:
                result = work(item)
            except BaseException:
                failed.set()
                raise
            if result is not None:
                found[number] = result

    with ThreadPoolExecutor(workers) as pool:
        turns = [pool.submit(turn) for _ in range(workers)]
        try:
            for one in turns:
                one.result()
        except BaseException:
            failed.set()
            raise
    return [found[number] for number in sorted(found)]


def partial_digests(
    blueprint: Blueprint, source: TensorFiles, files: frozenset[str], chunk: int = CHUNK
) -> dict[str, Any]:
    """Returns {"tensor|role": [shape, dtype, what `files` add to its digest]}. Zero bits add
    nothing, so no other file is read.
    """
    digests = {}
    for copy in copies(blueprint, source, None):
        spans = [
            _span(shard, piece)
            for shard in originals(source.shards[copy.tensor.name, copy.role])
            for piece in shard.pieces
            if piece.file in files
        ]
        if not spans:
            continue
        total, unit = 0, unit_of(copy, source)
        for start, stop in chunks(copy.tensor.numel, unit, chunk):
            inside = [
                (max(start, low), min(stop, high))
                for low, high in spans
                if low < stop and high > start
            ]
            if inside:
                low, high = min(low for low, _ in inside), max(high for _, high in inside)
                if unit <= chunk:
                    low, high = low // unit * unit, min(stop, -(-high // unit) * unit)
                total += digest(source.read(copy.tensor, copy.role, low, high, files), low)
        digests[f"{copy.tensor.name}|{copy.role}"] = [
            list(copy.tensor.shape),
            source.dtype_of(copy.tensor, copy.role),
            total % 2**64,
        ]
    return digests


def _span(shard: Shard, piece: Piece) -> tuple[int, int]:
    """Return a range of the whole tensor that encloses the piece."""
    if shard.dim is None:
        return shard.base + piece.start, shard.base + piece.stop
    first_row, end_row = piece.start // shard.width, -(-piece.stop // shard.width)
    return shard.base + first_row * shard.row, shard.base + end_row * shard.row


def unit_of(copy: Copy, *files: TensorFiles) -> int:
    """Returns the elements of the largest row that a cut of any of the files takes apart."""
    unit = 1
    for opened in files:
        for role in {copy.role, *copy.to}:
            shards = opened.shards.get((copy.tensor.name, role), [])
            unit = max(
                [
                    unit,
                    *(prod(shard.shape[shard.dim :]) for shard in shards if shard.dim is not None),
                ]
            )
    return unit


def chunks(numel: int, unit: int, most: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of at most `most` elements: runs of whole units, or parts of one."""
    if unit <= most:
        step = most // unit * unit
        yield from ((start, min(numel, start + step)) for start in range(0, numel, step))
        return
    for row in range(0, numel, unit):
        yield from (
            (start, min(row + unit, start + most)) for start in range(row, row + unit, most)
        )


def cast(bits: np.ndarray, dtype: str, to: str) -> np.ndarray:
    """Rounds values to another dtype, to nearest even; returns the same bits where the dtype is the
    same.
    """
    if dtype == to:
        return bits
    if dtype == "bfloat16":
        values = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = bits.view(dtype)
    if to != "bfloat16":
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(to).view(BITS[torch_files.SIZES[to]])
    with np.errstate(over="ignore", invalid="ignore"):
        word = values.astype(np.float32, copy=False).view(np.uint32)
    rounded = word >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += word  # for numbers only (not NaN), so nothing overflows
    rounded >>= np.uint32(16)
    short = rounded.astype(np.uint16)
    numbers = word.view(np.float32)
    if len(numbers) and np.isnan(numbers.max()):  # one pass; the largest is NaN if any is
        short[np.isnan(numbers)] = 0x7FC0
    return short
