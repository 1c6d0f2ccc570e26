"""Reading and writing of tensors at their locations in a checkpoint or a model."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from ..architectures import safetensors_files
from ..parallel.blueprint import Blueprint, Layout, Tensor, weight_dtype
from ..spec.errors import config_error
from . import file_map, torch_files
from .direct_files import DirectFiles
from .file_map import FileSegment, Shard, distinct_shards
from .torch_files import KeyPath

UINT_BY_BYTES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# dtype name in safetensors -> dtype name in torch
TORCH_DTYPE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
}
TORCH_DTYPE_NAMES |= {"U8": "uint8", "BOOL": "bool"}


class TorchFileIndex:
    """The locations of the tensors in a torch.save file, found without reading any tensor."""

    def __init__(self, path: Path):
        self.path = path
        self.tensors = torch_files.find_tensors(torch_files.read_torch_file(path))

    def offset(self, keys: KeyPath) -> int:
        """Return a tensor's byte offset from the beginning of the file.

        Raise `ConfigError` if the file has no such tensor.
        """
        if keys not in self.tensors:
            raise config_error(
                str(self.path),
                f"has no tensor {'/'.join(map(str, keys))}, but its layout names it",
                "use another copy of the checkpoint",
            )
        if (start := self.tensors[keys].start) < 0:
            raise config_error(
                f"{self.path}: {'/'.join(map(str, keys))}",
                "is not stored in row-major order",
                "save it once more after .contiguous()",
            )
        return start


@dataclass
class TensorFiles:
    """Element-wise access to the tensors in one checkpoint's or model's files.

    `shards` maps (tensor, role) to the tensor's shards, including copies. `dtype_of(tensor, role)`
    returns the dtype in the files. A segment is part of a stored tensor; `offset_of(segment)`
    returns the byte in the file at which that stored tensor begins.
    """

    folder: Path
    shards: dict[tuple[str, str], list[Shard]]
    dtype_of: Callable[[Tensor, str], str]
    offset_of: Callable[[FileSegment], int]
    writable: bool = False
    direct: DirectFiles | None = None  # gets the writes of a running conversion
    max_open_files: int = 256  # limit for files that are only read
    _handles: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._roles: dict[str, list[str]] = {}
        for name, role in sorted(
            self.shards, key=lambda key: (key[1] != "master", key[1] == "weight")
        ):
            self._roles.setdefault(name, []).append(role)

    def roles(self, tensor: Tensor) -> list[str]:
        """Return a tensor's roles in the files: "master", optimizer states, "weight"."""
        return self._roles.get(tensor.name, [])

    @contextmanager
    def handle(self, file: str) -> Iterator[int]:
        """Open a file and yield its descriptor.

        The first `max_open_files` files stay open, but not all files, because a model can have
        thousands of expert files.
        """
        with self._lock:
            handle, kept = (
                self._handles.get(file),
                self.writable or len(self._handles) < self.max_open_files,
            )
            if handle is None:
                try:
                    handle = os.open(
                        self.folder / file, os.O_RDWR if self.writable else os.O_RDONLY
                    )
                except FileNotFoundError:
                    raise config_error(
                        str(self.folder / file),
                        "is missing, but its layout names it",
                        "use another copy of the checkpoint",
                    ) from None
                if kept:
                    self._handles[file] = handle
        try:
            yield handle
        finally:
            if file not in self._handles:
                os.close(handle)

    def close(self) -> None:
        for handle in self._handles.values():
            if self.writable:
                os.fsync(handle)
            os.close(handle)
        self._handles.clear()

    def location(self, tensor: Tensor, role: str) -> tuple[str, int]:
        """Return (file, byte) where a tensor begins."""
        for piece in (
            piece for shard in self.shards[tensor.name, role] for piece in shard.segments
        ):
            return piece.file, self.offset_of(piece) + piece.offset * torch_files.ELEMENT_BYTES[
                self.dtype_of(tensor, role)
            ]
        return "", 0

    def extents(self, tensor: Tensor, role: str) -> dict[str, set[tuple[int, int]]]:
        """Return file -> byte ranges that contain elements of a tensor."""
        size, found = torch_files.ELEMENT_BYTES[self.dtype_of(tensor, role)], {}
        for shard in self.shards[tensor.name, role]:
            for piece in shard.segments:
                begin = self.offset_of(piece) + piece.offset * size
                found.setdefault(piece.file, set()).add(
                    (begin, begin + (piece.stop - piece.start) * size)
                )
        return found

    def read(
        self, tensor: Tensor, role: str, start: int, stop: int, only: frozenset[str] | None = None
    ) -> np.ndarray:
        """Read a tensor's elements start..stop as unsigned integers.

        With `only`, elements in all other files are returned as zeros.
        """
        size = torch_files.ELEMENT_BYTES[self.dtype_of(tensor, role)]
        out = (
            np.zeros(stop - start, UINT_BY_BYTES[size])
            if only is not None
            else np.empty(stop - start, UINT_BY_BYTES[size])
        )
        for shard in distinct_shards(self.shards[tensor.name, role]):
            self._move(shard, start, stop, out, None, only)
        return out

    def write(self, tensor: Tensor, role: str, start: int, values: np.ndarray) -> None:
        """Write `values` as a tensor's elements from `start` on, into every copy."""
        done = set()
        for shard in self.shards[tensor.name, role]:
            place = [
                (piece.file, self.offset_of(piece), piece.offset) for piece in shard.segments[:1]
            ]
            # otherwise the bytes are already written, because ZeRO-2 stores frozen tensors under a
            # second name
            if not done.issuperset(place):
                self._move(shard, start, start + len(values), values, tensor.name, None)
            done.update(place)

    def _move(
        self,
        shard: Shard,
        start: int,
        stop: int,
        buffer: np.ndarray,
        name: str | None,
        only: frozenset[str] | None,
    ) -> None:
        """Read the overlap of a shard with the full tensor's elements start..stop into `buffer`.

        If the tensor's `name` is given, write the overlap from `buffer` instead.
        """
        begin, end = max(start, shard.base), min(stop, shard.base + prod(shard.shape))
        if begin >= end:
            return
        view = buffer[begin - start : end - start]
        begin, end = begin - shard.base, end - shard.base

        if shard.dim is None:
            self._transfer(shard, begin, view, name, only)
        elif begin % (row := shard.row_numel) == 0 and end % row == 0 and end - begin > row:
            self._move_rows(shard, begin // row, view, name, only)
        else:
            self._move_runs(shard, begin, view, name, only)

    def _move_rows(
        self,
        shard: Shard,
        first_row: int,
        view: np.ndarray,
        name: str | None,
        only: frozenset[str] | None,
    ) -> None:
        """Read full rows of a split tensor in one transfer; with `name`, write them instead."""
        rows = view.reshape(-1, shard.row_numel)
        local = np.zeros((len(rows), shard.stored_row_numel), view.dtype)
        columns = _run_slices(shard)
        start = first_row * shard.stored_row_numel

        if name is not None:
            for whole, mine in columns:
                local[:, mine] = rows[:, whole]
            self._transfer(shard, start, local.reshape(-1), name, only)
        else:
            self._transfer(shard, start, local.reshape(-1), None, only)
            for whole, mine in columns:
                rows[:, whole] = local[:, mine]

    def _move_runs(
        self,
        shard: Shard,
        begin: int,
        view: np.ndarray,
        name: str | None,
        only: frozenset[str] | None,
    ) -> None:
        """Read elements of a split tensor in one transfer per run of a row.

        With `name`, write these elements instead.
        """
        end = begin + len(view)
        row, width, columns = shard.row_numel, shard.stored_row_numel, _run_slices(shard)
        for number in range(begin // row, -(-end // row)):
            for whole, mine in columns:
                first, last = number * row + whole.start, number * row + whole.stop
                low, high = max(begin, first), min(end, last)
                if low < high:
                    start = number * width + mine.start + low - first
                    self._transfer(shard, start, view[low - begin : high - begin], name, only)

    def _transfer(
        self,
        shard: Shard,
        start: int,
        view: np.ndarray,
        name: str | None,
        only: frozenset[str] | None,
    ) -> None:
        """Read a shard's elements from its element `start` on; with `name`, write them instead.

        The number of elements is the length of `view`.
        """
        stop, size = start + len(view), view.itemsize
        for piece in shard.segments:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low >= high or (only is not None and piece.file not in only):
                continue
            mine = view[low - start : high - start]
            offset = self.offset_of(piece) + (piece.offset + low - piece.start) * size
            if self.direct and name is not None:
                self.direct.write(piece.file, offset, mine.view(np.uint8), name)
                continue
            part = memoryview(mine).cast("B")  # pyright: ignore[reportArgumentType]
            with self.handle(piece.file) as handle:
                while part:
                    done = (
                        os.pwrite(handle, part, offset)
                        if name is not None
                        else os.preadv(handle, [part], offset)
                    )
                    if done == 0:
                        raise config_error(
                            str(self.folder / piece.file),
                            f"ends before byte {offset + len(part)}",
                            "use another copy of the checkpoint",
                        )
                    part, offset = part[done:], offset + done


def _run_slices(shard: Shard) -> list[tuple[slice, slice]]:
    """Return (slice of a full row, slice of the shard's row) for each run of a split tensor."""
    inner = shard.inner_numel
    columns, at = [], 0
    for first, last in shard.runs:
        length = (last - first) * inner
        columns.append((slice(first * inner, last * inner), slice(at, at + length)))
        at += length
    return columns


def open_checkpoint(
    step: Path, blueprint: Blueprint, layout: Layout, writable: bool = False
) -> TensorFiles:
    """Open the files of a step folder."""
    opened: dict[str, TorchFileIndex] = {}
    lock = threading.Lock()

    def offset_of(piece: FileSegment) -> int:
        if not piece.keys:  # the file holds only elements
            return 0
        with lock:
            if piece.file not in opened:
                opened[piece.file] = TorchFileIndex(step / piece.file)
            return opened[piece.file].offset(piece.keys)

    # The tensor may be one of another blueprint, which has its own dtype.
    dtypes = {tensor.name: weight_dtype(tensor, layout) for tensor in blueprint.tensors}

    def dtype_of(tensor: Tensor, role: str) -> str:
        return tensor.buffer or ("float32" if role != "weight" else dtypes[tensor.name])

    return TensorFiles(step, file_map.map_shards(blueprint, layout), dtype_of, offset_of, writable)


def open_model_files(
    folder: Path,
    blueprint: Blueprint,
    entries: dict[str, safetensors_files.Entry],
    writable: bool = False,
) -> TensorFiles:
    """Open a model's safetensors files, in which every tensor has the single role "weight"."""
    found: dict[tuple[str, str], list[Shard]] = {}
    for tensor in blueprint.tensors:
        if blueprint.published[tensor.name].stacked:
            found[tensor.name, "weight"] = _stacked_shards(tensor, blueprint, entries)
        else:
            found[tensor.name, "weight"] = _unstacked_shards(tensor, blueprint, entries, writable)

    def dtype_of(tensor: Tensor, role: str) -> str:
        return TORCH_DTYPE_NAMES[entries[blueprint.published[tensor.name].parts[0][0]].dtype]

    return TensorFiles(
        folder, found, dtype_of, lambda piece: entries[piece.keys[0]].offset, writable
    )


def _unstacked_shards(
    tensor: Tensor,
    blueprint: Blueprint,
    entries: dict[str, safetensors_files.Entry],
    writable: bool,
) -> list[Shard]:
    """Return the locations of a tensor that has a separate key.

    A reader needs only one location. A writer also fills the aliases in the files.
    """
    names = [blueprint.published[tensor.name].parts[0][0]]
    if writable:
        names += [alias for alias, (name, _) in blueprint.aliases.items() if name == tensor.name]
    return [
        Shard(tensor.shape, (FileSegment(entries[key].file, (key,), 0, 0, tensor.numel),))
        for key in dict.fromkeys(names)
        if key in entries
    ]


def _stacked_shards(
    tensor: Tensor, blueprint: Blueprint, entries: dict[str, safetensors_files.Entry]
) -> list[Shard]:
    """Return the shards of a tensor that is stored as a separate tensor for each first index.

    If several keys share an index, they are parts of the tensor along dimension
    `PublishedTensor.dim`.
    """
    stored = blueprint.published[tensor.name]
    shape = tensor.shape[1:]
    shards: list[Shard] = []
    begin = 0
    for keys in stored.parts:
        width = entries[keys[0]].shape[stored.dim - 1] if stored.dim else 0
        dim, runs = None, ()
        if len(stored.parts) > 1:
            dim, runs = stored.dim - 1, ((begin, begin + width),)

        for number, key in enumerate(keys):
            piece = FileSegment(entries[key].file, (key,), 0, 0, prod(entries[key].shape))
            shards.append(Shard(shape, (piece,), dim, runs, number * prod(shape), begin))
        begin += width
    return shards
