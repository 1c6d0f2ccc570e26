"""Multi-threaded copies of tensors between two sets of files, with bounded memory."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..parallel.adafactor_state_map import state_tensor
from ..parallel.blueprint import Blueprint, Tensor
from . import manifest, torch_files
from .digest import digest
from .direct_files import DirectFiles
from .file_map import FileSegment, Shard, distinct_shards
from .journal import Journal
from .tensor_files import UINT_BY_BYTES, TensorFiles

# maximum elements moved at a time, which are still in the CPU cache when they are hashed and
# written
CHUNK = 256 * 1024
BUFFERS = 256 * 2**20  # maximum bytes that may wait to be written or hashed


@dataclass(frozen=True)
class Effort:
    """The machine resources that a conversion may use.

    `progress` is called with (bytes just copied, total bytes) from several threads.
    """

    workers: int = 2
    mem_limit: int = 512 * 1024**2  # bytes, for buffers
    progress: Callable[[int, int], None] = lambda done, total: None

    @property
    def chunk(self) -> int:
        """The number of elements that one worker moves at a time.

        A worker stores three copies of these elements: as read, sliced, and written.
        """
        return max(65536, min(CHUNK, self.mem_limit // (self.workers * 16)))

    @property
    def buffers(self) -> int:
        """The number of bytes that may wait to be written to disk."""
        return min(BUFFERS, self.mem_limit - self.workers * self.chunk * 16)


@dataclass(frozen=True)
class Copy:
    """A tensor in one role of the source, and the roles of its copies in the target.

    A role is "master", "weight" or an optimizer state. Without target roles, the tensor is only
    read.
    """

    tensor: Tensor
    role: str
    target_roles: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.tensor.name}|{self.role}"

    @property
    def nbytes(self) -> int:
        return self.tensor.numel * (4 if self.role != "weight" else 2)


def plan_copies(
    blueprint: Blueprint, source: TensorFiles, target: TensorFiles | None
) -> list[Copy]:
    """Return the copies to make.

    A master is also copied to the 16-bit weight if the target layout stores that weight. Without a
    target, return all tensors of the source, so that their digests can be computed.
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
                found.append(Copy(state_tensor(tensor, role), role, to))
    return found


@dataclass
class _CopyJob:
    """Copies in progress: several threads move parts of tensors and collect the digests.

    `rest` contains the remaining copies in the order of their bytes. `digests` contains the
    finished copies.
    """

    source: TensorFiles
    target: TensorFiles | None
    effort: Effort
    journal: Journal | None
    rest: list[Copy]
    total_bytes: int  # of all copies, including finished ones
    digests: dict[str, Any]

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.remaining = {copy.key: copy.tensor.numel for copy in self.rest}  # elements
        self.sums: Counter[str] = Counter()
        self.unjournaled: dict[str, list[str]] = {}  # tensor -> keys of its finished copies

    def parts(self) -> Iterator[tuple[Copy, int, int]]:
        """Yield (copy, start, stop), ranges of elements that one thread moves at a time."""
        for copy in self.rest:
            unit = largest_split_row(copy, self.source, *([self.target] if self.target else []))
            numel = copy.tensor.numel
            spans = chunk_ranges(numel, unit, self.effort.chunk) if numel else [(0, 0)]
            yield from ((copy, start, stop) for start, stop in spans)

    def move(self, part: tuple[Copy, int, int]) -> None:
        """Read a part, add it to its tensor's digest, and write it."""
        copy, start, stop = part
        values = self.source.read(copy.tensor, copy.role, start, stop)
        dtype = self.source.dtype_of(copy.tensor, copy.role)
        added = digest(values, start)

        for role in copy.target_roles:
            assert self.target
            rounded = cast(values, dtype, self.target.dtype_of(copy.tensor, role))
            self.target.write(copy.tensor, role, start, rounded)
        self.effort.progress((stop - start) * values.itemsize, self.total_bytes)

        finished = self._count(copy, stop - start, added, dtype)
        if finished and self.target and self.target.direct:
            self.target.direct.finish(copy.tensor.name)

    def _count(self, copy: Copy, moved: int, added: int, dtype: str) -> bool:
        """Count moved elements; return True if they are the last and so complete the digest."""
        with self.lock:
            self.sums[copy.key] += added
            self.remaining[copy.key] -= moved
            if self.remaining[copy.key]:
                return False
            total = f"{self.sums[copy.key] % 2**64:016x}"
            self.digests[copy.key] = [list(copy.tensor.shape), dtype, total]
            self.unjournaled.setdefault(copy.tensor.name, []).append(copy.key)
        return True

    def note_stored(self, name: str) -> None:
        """Record a tensor's finished copies in the journal, after their bytes are on disk."""
        with self.lock:
            keys = self.unjournaled.pop(name, [])
        for key in keys:
            if self.journal:
                self.journal.note(key, self.digests[key])


def run_copies(
    todo: list[Copy],
    source: TensorFiles,
    effort: Effort,
    target: TensorFiles | None = None,
    journal: Journal | None = None,
    hashed: bool = False,
) -> tuple[dict[str, Any], dict[str, manifest.FileEntry]]:
    """Copy tensors from `source` to `target`.

    Return {"tensor|role": [shape, dtype, digest]} and an entry for each written file. The digests
    include digests from the `journal` of an interrupted conversion. All files are flushed to disk
    before the function returns. Without `hashed`, the file entries have no sha256. Without a
    `target`, the source is only read.
    """
    digests: dict[str, Any] = dict(journal.done) if journal else {}
    total_bytes = sum(copy.nbytes for copy in todo)
    for copy in todo:
        if copy.key in digests:
            effort.progress(copy.nbytes, total_bytes)

    rest = _sort_by_file_offset([copy for copy in todo if copy.key not in digests], source, target)
    job = _CopyJob(source, target, effort, journal, rest, total_bytes, digests)
    if target is None:
        threaded_map(job.move, job.parts(), effort.workers)
        return digests, {}

    try:
        with DirectFiles(
            target.folder, _extents(rest, target), effort.buffers, hashed, job.note_stored
        ) as target.direct:
            threaded_map(job.move, job.parts(), effort.workers)
        return digests, target.direct.file_entries
    finally:
        # Some of the bytes that were not flushed to disk may belong to copies that are already in
        # the journal.
        if journal and target.direct and target.direct.flush_failed:
            journal.forget()
        target.direct = None


def _sort_by_file_offset(
    rest: list[Copy], source: TensorFiles, target: TensorFiles | None
) -> list[Copy]:
    """Sort copies by their location in the target or, without a target, in the source.

    As a result, the files are processed one after the other, each from its beginning.
    """
    places = {
        copy.key: (target or source).location(
            copy.tensor, copy.target_roles[0] if target else copy.role
        )
        for copy in rest
    }
    order = {
        file: number
        for number, file in enumerate(dict.fromkeys(file for file, _ in places.values()))
    }
    return sorted(rest, key=lambda copy: (order[places[copy.key][0]], places[copy.key][1]))


def _extents(todo: list[Copy], target: TensorFiles) -> dict[str, set[tuple[int, int]]]:
    """Return the byte ranges in each file that the copies will fill."""
    extents: dict[str, set[tuple[int, int]]] = {}
    for copy in todo:
        for role in copy.target_roles:
            for file, own in target.extents(copy.tensor, role).items():
                extents.setdefault(file, set()).update(own)
    return extents


def threaded_map(work: Callable[[Any], Any], items: Iterable[Any], workers: int) -> list[Any]:
    """Call `work` for each item on several threads; return the results in item order.

    After an error, no further item is started.
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
    """Return {"tensor|role": [shape, dtype, contribution of `files` to the digest]}.

    No other file is read, because bytes of other files are treated as zeros and zeros contribute
    nothing.
    """
    digests = {}
    for copy in plan_copies(blueprint, source, None):
        spans = [
            _enclosing_range(shard, piece)
            for shard in distinct_shards(source.shards[copy.tensor.name, copy.role])
            for piece in shard.segments
            if piece.file in files
        ]
        if not spans:
            continue
        total, unit = 0, largest_split_row(copy, source)
        for start, stop in chunk_ranges(copy.tensor.numel, unit, chunk):
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


def _enclosing_range(shard: Shard, piece: FileSegment) -> tuple[int, int]:
    """Return a range of the full tensor that encloses the segment."""
    if shard.dim is None:
        return shard.base + piece.start, shard.base + piece.stop
    first_row, end_row = (
        piece.start // shard.stored_row_numel,
        -(-piece.stop // shard.stored_row_numel),
    )
    return shard.base + first_row * shard.row_numel, shard.base + end_row * shard.row_numel


def largest_split_row(copy: Copy, *files: TensorFiles) -> int:
    """Return the number of elements in the largest row that is split in any of the files."""
    unit = 1
    for opened in files:
        for role in {copy.role, *copy.target_roles}:
            shards = opened.shards.get((copy.tensor.name, role), [])
            unit = max(
                [
                    unit,
                    *(prod(shard.shape[shard.dim :]) for shard in shards if shard.dim is not None),
                ]
            )
    return unit


def chunk_ranges(numel: int, unit: int, max_elements: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `max_elements` elements.

    A range consists of several full units, or of a part of one unit.
    """
    if unit <= max_elements:
        step = max_elements // unit * unit
        yield from ((start, min(numel, start + step)) for start in range(0, numel, step))
        return
    for row in range(0, numel, unit):
        yield from (
            (start, min(row + unit, start + max_elements))
            for start in range(row, row + unit, max_elements)
        )


def cast(bits: np.ndarray, dtype: str, to: str) -> np.ndarray:
    """Round values to a different dtype, to nearest even; the same dtype keeps the bits."""
    if dtype == to:
        return bits
    if dtype == "bfloat16":
        values = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = bits.view(dtype)
    if to != "bfloat16":
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(to).view(UINT_BY_BYTES[torch_files.ELEMENT_BYTES[to]])
    with np.errstate(over="ignore", invalid="ignore"):
        word = values.astype(np.float32, copy=False).view(np.uint32)
    rounded = word >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += word  # only numbers (not NaN) are counted, so nothing overflows
    rounded >>= np.uint32(16)
    short = rounded.astype(np.uint16)
    numbers = word.view(np.float32)
    if len(numbers) and np.isnan(numbers.max()):  # one pass; the maximum is NaN if any value is NaN
        short[np.isnan(numbers)] = 0x7FC0
    return short
