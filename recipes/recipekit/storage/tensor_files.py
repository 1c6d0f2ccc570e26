"""Reads and writes tensors at the places where a checkpoint or a model holds them."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from ..architectures import safetensors_files
from ..parallel.blueprint import Blueprint, Layout, Tensor
from ..spec.refusal import refuse
from . import places, torch_files
from .direct_files import DirectFiles
from .places import Piece, Shard, originals
from .torch_files import Keys

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# safetensors' name of a dtype -> torch's name
TORCH = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
}
TORCH |= {"U8": "uint8", "BOOL": "bool"}


class OpenedFile:
    """Finds the places of the tensors in a file of torch.save; reads no tensor."""

    def __init__(self, path: Path):
        self.path = path
        self.tensors = torch_files.tensors(torch_files.read(path))

    def offset(self, keys: Keys) -> int:
        """Returns where a tensor begins, in bytes from the beginning of the file.

        Raises `Refusal` if the file has no such tensor.
        """
        if keys not in self.tensors:
            raise refuse(
                str(self.path),
                f"has no tensor {'/'.join(map(str, keys))}, but its layout names it",
                "use another copy of the checkpoint",
            )
        if (start := self.tensors[keys].start) < 0:
            raise refuse(
                f"{self.path}: {'/'.join(map(str, keys))}",
                "is not stored in row-major order",
                "save it once more after .contiguous()",
            )
        return start


@dataclass
class TensorFiles:
    """Reads and writes elements of tensors in the files of one checkpoint or model.

    `shards`: (tensor, role) -> its shards, copies included. `dtype_of(tensor, role)`: the dtype in
    the files. `offset_of(piece)`: where the tensor that holds a piece begins in its file, in bytes.
    """

    folder: Path
    shards: dict[tuple[str, str], list[Shard]]
    dtype_of: Callable[[Tensor, str], str]
    offset_of: Callable[[Piece], int]
    writable: bool = False
    direct: DirectFiles | None = None  # receives the writes while a conversion runs
    most_open: int = 256  # files that are only read
    _handles: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._roles: dict[str, list[str]] = {}
        for name, role in sorted(
            self.shards, key=lambda key: (key[1] != "master", key[1] == "weight")
        ):
            self._roles.setdefault(name, []).append(role)

    def roles(self, tensor: Tensor) -> list[str]:
        """Lists what the files hold of a tensor: "master", the optimizer's states, "weight"."""
        return self._roles.get(tensor.name, [])

    @contextmanager
    def handle(self, file: str) -> Iterator[int]:
        """Gives the descriptor of a file.

        The first `most_open` files stay open; a model can have thousands of files of experts.
        """
        with self._lock:
            handle, kept = (
                self._handles.get(file),
                self.writable or len(self._handles) < self.most_open,
            )
            if handle is None:
                try:
                    handle = os.open(
                        self.folder / file, os.O_RDWR if self.writable else os.O_RDONLY
                    )
                except FileNotFoundError:
                    raise refuse(
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

    def place(self, tensor: Tensor, role: str) -> tuple[str, int]:
        """Returns the file and the byte where a tensor begins."""
        for piece in (piece for shard in self.shards[tensor.name, role] for piece in shard.pieces):
            return piece.file, self.offset_of(piece) + piece.offset * torch_files.SIZES[
                self.dtype_of(tensor, role)
            ]
        return "", 0

    def extents(self, tensor: Tensor, role: str) -> dict[str, set[tuple[int, int]]]:
        """Returns file -> the ranges of bytes that hold something of a tensor."""
        size, found = torch_files.SIZES[self.dtype_of(tensor, role)], {}
        for shard in self.shards[tensor.name, role]:
            for piece in shard.pieces:
                begin = self.offset_of(piece) + piece.offset * size
                found.setdefault(piece.file, set()).add(
                    (begin, begin + (piece.stop - piece.start) * size)
                )
        return found

    def read(
        self, tensor: Tensor, role: str, start: int, stop: int, only: frozenset[str] | None = None
    ) -> np.ndarray:
        """Reads elements start..stop of a tensor as unsigned integers; elements in other files than
        `only` are zero.
        """
        size = torch_files.SIZES[self.dtype_of(tensor, role)]
        out = (
            np.zeros(stop - start, BITS[size])
            if only is not None
            else np.empty(stop - start, BITS[size])
        )
        for shard in originals(self.shards[tensor.name, role]):
            self._move(shard, start, stop, out, None, only)
        return out

    def write(self, tensor: Tensor, role: str, start: int, values: np.ndarray) -> None:
        """Writes `values` as the elements of a tensor from `start` on, into every copy."""
        done = set()
        for shard in self.shards[tensor.name, role]:
            place = [
                (piece.file, self.offset_of(piece), piece.offset) for piece in shard.pieces[:1]
            ]
            # else the bytes are written already: ZeRO-2 gives frozen tensors a second name
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
        """Read the overlap of a shard with elements start..stop of the whole into `buffer`; with
        the tensor's `name`, write it from there.
        """
        begin, end = max(start, shard.base), min(stop, shard.base + prod(shard.shape))
        if begin >= end:
            return
        view = buffer[begin - start : end - start]
        begin, end = begin - shard.base, end - shard.base

        if shard.dim is None:
            self._transfer(shard, begin, view, name, only)
        elif begin % (row := shard.row) == 0 and end % row == 0 and end - begin > row:
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
        """Read (with `name`: write) full rows of a cut tensor in one transfer."""
        rows = view.reshape(-1, shard.row)
        local = np.zeros((len(rows), shard.width), view.dtype)
        columns = _columns(shard)
        start = first_row * shard.width

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
        """Read (with `name`: write) elements of a cut tensor, a transfer for each run of a row."""
        end = begin + len(view)
        row, width, columns = shard.row, shard.width, _columns(shard)
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
        """Reads (with `name`: writes) the elements of a shard from its own element `start` on, as
        many as `view` has.
        """
        stop, size = start + len(view), view.itemsize
        for piece in shard.pieces:
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
                        raise refuse(
                            str(self.folder / piece.file),
                            f"ends before byte {offset + len(part)}",
                            "use another copy of the checkpoint",
                        )
                    part, offset = part[done:], offset + done


def _columns(shard: Shard) -> list[tuple[slice, slice]]:
    """Return the elements of each run of a cut tensor: (in a row of the whole, in the shard's)."""
    inner = shard.inner
    columns, at = [], 0
    for first, last in shard.runs:
        length = (last - first) * inner
        columns.append((slice(first * inner, last * inner), slice(at, at + length)))
        at += length
    return columns


def open_checkpoint(
    step: Path, blueprint: Blueprint, layout: Layout, writable: bool = False
) -> TensorFiles:
    """Opens the files of a step folder."""
    opened: dict[str, OpenedFile] = {}
    lock = threading.Lock()

    def offset_of(piece: Piece) -> int:
        if not piece.keys:  # the file holds elements only
            return 0
        with lock:
            if piece.file not in opened:
                opened[piece.file] = OpenedFile(step / piece.file)
            return opened[piece.file].offset(piece.keys)

    def dtype_of(tensor: Tensor, role: str) -> str:
        return tensor.buffer or ("float32" if role != "weight" else layout.dtype)

    return TensorFiles(step, places.shards(blueprint, layout), dtype_of, offset_of, writable)


def open_published(
    folder: Path,
    blueprint: Blueprint,
    entries: dict[str, safetensors_files.Entry],
    writable: bool = False,
) -> TensorFiles:
    """Open a model's safetensors files. Every tensor has the one role "weight"."""
    found: dict[tuple[str, str], list[Shard]] = {}
    for tensor in blueprint.tensors:
        if blueprint.published[tensor.name].stacked:
            found[tensor.name, "weight"] = _stacked_shards(tensor, blueprint, entries)
        else:
            found[tensor.name, "weight"] = _copies(tensor, blueprint, entries, writable)

    def dtype_of(tensor: Tensor, role: str) -> str:
        return TORCH[entries[blueprint.published[tensor.name].parts[0][0]].dtype]

    return TensorFiles(
        folder, found, dtype_of, lambda piece: entries[piece.keys[0]].offset, writable
    )


def _copies(
    tensor: Tensor,
    blueprint: Blueprint,
    entries: dict[str, safetensors_files.Entry],
    writable: bool,
) -> list[Shard]:
    """List the places of a tensor that has a key of its own.

    A reader needs one. A writer fills the aliases as well, where the files have them.
    """
    names = [blueprint.published[tensor.name].parts[0][0]]
    if writable:
        names += [alias for alias, (name, _) in blueprint.aliases.items() if name == tensor.name]
    return [
        Shard(tensor.shape, (Piece(entries[key].file, (key,), 0, 0, tensor.numel),))
        for key in dict.fromkeys(names)
        if key in entries
    ]


def _stacked_shards(
    tensor: Tensor, blueprint: Blueprint, entries: dict[str, safetensors_files.Entry]
) -> list[Shard]:
    """List the shards of a tensor that the files hold as one tensor for each first index.

    If several keys share an index, they are cut along the dimension `Stored.dim` of the tensor.
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
            piece = Piece(entries[key].file, (key,), 0, 0, prod(entries[key].shape))
            shards.append(Shard(shape, (piece,), dim, runs, number * prod(shape), begin))
        begin += width
    return shards
