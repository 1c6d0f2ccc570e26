"""Checkpoints from one layout to another, and from and to Hugging Face files: a plan of byte ranges, then copies.

No model is built and no process group made; memory is a few chunks, whatever the model's size.
"""

import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from . import ds_files, foreign, manifest, safetensors_files, torch_files
from .blocks import Blocks
from .blueprint import Blueprint, Layout, Stored, Tensor, default_optimizer, stage_bounds
from .digest import digest
from .ds_files import OpenedFile, Piece, Shard, originals
from .mesh import Mesh
from .refusal import Problem, Refusal, refuse

CHUNK = 256 * 1024  # elements that are moved at a time, at most: what was read is still in the cache when it is digested and written
BUFFERS = 256 * 2**20  # bytes, at most, that wait for the disk or to be hashed
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
TORCH = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"}
TORCH |= {"U8": "uint8", "BOOL": "bool"}
NAMES = {value: key for key, value in TORCH.items()}


@dataclass
class Files:
    """The files of one checkpoint or model, opened: reads and writes elements of tensors at the places that `shards` gives.

    `shards`: (tensor, role) -> copies; `dtypes`: what each role is stored in.
    """

    folder: Path
    shards: dict[tuple[str, str], list[Shard]]
    dtype_of: Callable[[Tensor, str], str]
    offset_of: Callable[[Piece], int]  # bytes
    writable: bool = False
    blocks: Blocks | None = None  # what is written goes there, while a conversion runs
    _handles: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def handle(self, file: str) -> int:
        with self._lock:
            if file not in self._handles:
                try:
                    self._handles[file] = os.open(self.folder / file, os.O_RDWR if self.writable else os.O_RDONLY)
                except FileNotFoundError:
                    raise refuse(str(self.folder / file), "is missing, which its layout says is there", "use another copy of the checkpoint") from None
            return self._handles[file]

    def close(self) -> None:
        for handle in self._handles.values():
            if self.writable:
                os.fsync(handle)
            os.close(handle)
        self._handles.clear()

    def place(self, tensor: Tensor, role: str) -> tuple[str, int]:
        """The file and the byte where a tensor begins."""
        for piece in (piece for shard in self.shards[tensor.name, role] for piece in shard.pieces):
            return piece.file, self.offset_of(piece) + piece.offset * torch_files.SIZES[self.dtype_of(tensor, role)]
        return "", 0

    def extents(self, tensor: Tensor, role: str) -> dict[str, set[tuple[int, int]]]:
        """File -> the bytes, from where to where, that hold something of a tensor."""
        size, found = torch_files.SIZES[self.dtype_of(tensor, role)], {}
        for shard in self.shards[tensor.name, role]:
            for piece in shard.pieces:
                begin = self.offset_of(piece) + piece.offset * size
                found.setdefault(piece.file, set()).add((begin, begin + (piece.stop - piece.start) * size))
        return found

    def read(self, tensor: Tensor, role: str, start: int, stop: int, only: frozenset[str] | None = None) -> np.ndarray:
        """Elements start..stop of a tensor as unsigned integers; what lies in other files than `only` is zero."""
        size = torch_files.SIZES[self.dtype_of(tensor, role)]
        out = np.zeros(stop - start, BITS[size]) if only is not None else np.empty(stop - start, BITS[size])
        for shard in originals(self.shards[tensor.name, role]):
            self._move(shard, start, stop, out, None, only)
        return out

    def write(self, tensor: Tensor, role: str, start: int, values: np.ndarray) -> None:
        done = set()
        for shard in self.shards[tensor.name, role]:
            place = [(piece.file, self.offset_of(piece), piece.offset) for piece in shard.pieces[:1]]
            if not done.issuperset(place):  # a second name of the same bytes, as ZeRO-2 gives to what is frozen
                self._move(shard, start, start + len(values), values, tensor.name, None)
            done.update(place)

    def _move(self, shard: Shard, start: int, stop: int, buffer: np.ndarray, name: str | None, only: frozenset[str] | None) -> None:
        """Copies what lies in a shard of the elements start..stop of the whole to `buffer`; or from it, if the `name` of the tensor is given."""
        begin, end = max(start, shard.base), min(stop, shard.base + prod(shard.shape))
        if begin >= end:
            return
        view = buffer[begin - start : end - start]
        begin, end = begin - shard.base, end - shard.base
        if shard.dim is None:
            self._transfer(shard, begin, view, name, only)
            return
        inner = prod(shard.shape[shard.dim + 1 :])
        row, width = shard.shape[shard.dim] * inner, sum(last - first for first, last in shard.runs) * inner
        if begin % row == 0 and end % row == 0 and end - begin > row:  # whole rows
            rows = view.reshape(-1, row)
            local = np.zeros((len(rows), width), view.dtype)
            pairs, at = [], 0
            for first, last in shard.runs:
                pairs.append((slice(first * inner, last * inner), slice(at, at + (last - first) * inner)))
                at += (last - first) * inner
            if name is not None:
                for whole, mine in pairs:
                    local[:, mine] = rows[:, whole]
                self._transfer(shard, begin // row * width, local.reshape(-1), name, only)
            else:
                self._transfer(shard, begin // row * width, local.reshape(-1), None, only)
                for whole, mine in pairs:
                    rows[:, whole] = local[:, mine]
            return
        for number in range(begin // row, -(-end // row)):
            at = number * width
            for first, last in shard.runs:
                low, high = max(begin, number * row + first * inner), min(end, number * row + last * inner)
                if low < high:
                    self._transfer(shard, at + low - (number * row + first * inner), view[low - begin : high - begin], name, only)
                at += (last - first) * inner

    def _transfer(self, shard: Shard, start: int, view: np.ndarray, name: str | None, only: frozenset[str] | None) -> None:
        """Copies elements start.. of a shard, as they follow each other in it, from or to `view`."""
        stop, size = start + len(view), view.itemsize
        for piece in shard.pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low >= high or (only is not None and piece.file not in only):
                continue
            mine = view[low - start : high - start]
            offset = self.offset_of(piece) + (piece.offset + low - piece.start) * size
            if self.blocks and name is not None:
                self.blocks.write(piece.file, offset, mine.view(np.uint8), name)
                continue
            part = memoryview(mine).cast("B")  # pyright: ignore[reportArgumentType]
            handle = self.handle(piece.file)
            while part:
                done = os.pwrite(handle, part, offset) if name is not None else os.preadv(handle, [part], offset)
                if done == 0:
                    raise refuse(str(self.folder / piece.file), f"ends before byte {offset + len(part)}", "use another copy of the checkpoint")
                part, offset = part[done:], offset + done


def open_checkpoint(step: Path, blueprint: Blueprint, layout: Layout, writable: bool = False) -> Files:
    """The files of a step folder of DeepSpeed's."""
    opened: dict[str, OpenedFile] = {}
    lock = threading.Lock()

    def offset_of(piece: Piece) -> int:
        if not piece.keys:  # a file of nothing but elements
            return 0
        with lock:
            if piece.file not in opened:
                opened[piece.file] = OpenedFile(step / piece.file)
            return opened[piece.file].offset(piece.keys)

    def dtype_of(tensor: Tensor, role: str) -> str:
        return tensor.buffer or ("float32" if role != "weight" else layout.dtype)

    return Files(step, ds_files.shards(blueprint, layout), dtype_of, offset_of, writable)


def open_published(folder: Path, blueprint: Blueprint, entries: dict[str, safetensors_files.Entry], writable: bool = False) -> Files:
    """A model's safetensors files. Every tensor has the one role "weight"."""
    found: dict[tuple[str, str], list[Shard]] = {}
    for tensor in blueprint.tensors:
        stored = blueprint.published[tensor.name]
        parts, begin = [], 0
        if not stored.stacked:
            names = [stored.parts[0][0], *(alias for alias, (name, _) in blueprint.aliases.items() if name == tensor.name and writable)]
            for key in dict.fromkeys(names):
                if key in entries:
                    parts.append(Shard(tensor.shape, (Piece(entries[key].file, (key,), 0, 0, tensor.numel),)))
            found[tensor.name, "weight"] = parts
            continue
        shape, each = tensor.shape[1:], prod(tensor.shape[1:])
        for keys in stored.parts:
            width = entries[keys[0]].shape[stored.dim - 1] if stored.dim else 0
            for number, key in enumerate(keys):
                numel = prod(entries[key].shape)
                dim, own = (stored.dim - 1, ((begin, begin + width),)) if len(stored.parts) > 1 else (None, ())
                parts.append(Shard(shape, (Piece(entries[key].file, (key,), 0, 0, numel),), dim, own, number * each, begin))
            begin += width
        found[tensor.name, "weight"] = parts

    def dtype_of(tensor: Tensor, role: str) -> str:
        return TORCH[entries[blueprint.published[tensor.name].parts[0][0]].dtype]

    return Files(folder, found, dtype_of, lambda piece: entries[piece.keys[0]].offset, writable)


# Copying ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """How much of the machine a conversion may use. `progress` is called with (bytes just done, bytes in all), from several threads."""

    workers: int = 2
    mem_limit: int = 512 * 1024**2  # bytes of buffers
    progress: Callable[[int, int], None] = lambda done, total: None

    @property
    def chunk(self) -> int:
        """Elements that one worker moves at a time: as read, as cut and as written."""
        return max(65536, min(CHUNK, self.mem_limit // (self.workers * 16)))

    @property
    def buffers(self) -> int:
        """Bytes of what is on its way to the disk."""
        return min(BUFFERS, self.mem_limit - self.workers * self.chunk * 16)


@dataclass(frozen=True)
class Copy:
    """One tensor in one role, and the roles that it has where it belongs: none if it is only read."""

    tensor: Tensor
    role: str
    to: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.tensor.name}|{self.role}"

    @property
    def nbytes(self) -> int:
        return self.tensor.numel * (4 if self.role != "weight" else 2)


def copies(blueprint: Blueprint, source: Files, target: Files | None) -> list[Copy]:
    """What has to be copied. A master also makes the 16-bit weight that a layout keeps beside it.

    Without a target: what the source holds, to be digested.
    """
    found = []
    for tensor in blueprint.tensors:
        roles = [role for role in ("master", *ds_files.MOMENTS, "weight") if (tensor.name, role) in source.shards]
        trained = tensor.group is not None
        for role in roles:
            if trained and role == "weight" and "master" in roles:
                continue  # a rounded copy of the master
            wanted = (role, *(["weight"] if role == "master" else []), *(["master"] if role == "weight" and trained else []))
            to = tuple(own for own in wanted if target is not None and (tensor.name, own) in target.shards)
            if target is None or to:
                found.append(Copy(tensor, role, to))
    return found


def run(
    todo: list[Copy], source: Files, effort: Effort, target: Files | None = None, journal: "Journal | None" = None, hashed: bool = False
) -> tuple[dict[str, Any], dict[str, manifest.Facts]]:
    """Copies; returns {"tensor|role": [shape, dtype, digest]} of what was read, also of what an interrupted run had read, and {file: facts} of what was written.

    The files that were written are on the disk then. Without `hashed` their facts have no sha256.
    """
    digests: dict[str, Any] = dict(journal.done) if journal else {}
    total_bytes, rest = sum(copy.nbytes for copy in todo), []
    for copy in todo:
        if copy.key in digests:
            effort.progress(copy.nbytes, total_bytes)
        else:
            rest.append(copy)
    places = {copy.key: (target or source).place(copy.tensor, copy.to[0] if target else copy.role) for copy in rest}
    order = {file: number for number, file in enumerate(dict.fromkeys(file for file, _ in places.values()))}
    rest.sort(key=lambda copy: (order[places[copy.key][0]], places[copy.key][1]))  # one file after the other, each from its beginning
    left, sums, lock = {copy.key: copy.tensor.numel for copy in rest}, Counter(), threading.Lock()
    unnoted: dict[str, list[str]] = {}  # tensor -> keys

    def parts() -> Iterator[tuple[Copy, int, int]]:
        for copy in rest:
            unit = _unit(copy.tensor, source, *([target] if target else []))
            spans = chunks(copy.tensor.numel, unit, effort.chunk) if copy.tensor.numel else [(0, 0)]
            yield from ((copy, start, stop) for start, stop in spans)

    def move(part: tuple[Copy, int, int]) -> None:
        copy, start, stop = part
        values, dtype = source.read(copy.tensor, copy.role, start, stop), source.dtype_of(copy.tensor, copy.role)
        added = digest(values, start)
        for role in copy.to:
            assert target
            target.write(copy.tensor, role, start, cast(values, dtype, target.dtype_of(copy.tensor, role)))
        effort.progress((stop - start) * values.itemsize, total_bytes)
        with lock:
            sums[copy.key] += added
            left[copy.key] -= stop - start
            if left[copy.key]:
                return
            digests[copy.key] = [list(copy.tensor.shape), dtype, f"{sums[copy.key] % 2**64:016x}"]
            unnoted.setdefault(copy.tensor.name, []).append(copy.key)
        if target and target.blocks:
            target.blocks.finish(copy.tensor.name)

    def stored(name: str) -> None:
        with lock:
            keys = unnoted.pop(name, [])
        for key in keys:
            if journal:
                journal.note(key, digests[key])

    if target is None:
        _share(move, parts(), effort.workers)
        return digests, {}
    extents: dict[str, set[tuple[int, int]]] = {}
    for copy in rest:
        for role in copy.to:
            for file, own in target.extents(copy.tensor, role).items():
                extents.setdefault(file, set()).update(own)
    try:
        with Blocks(target.folder, extents, effort.buffers, hashed, stored) as target.blocks:
            _share(move, parts(), effort.workers)
        return digests, target.blocks.facts
    finally:
        if journal and target.blocks and target.blocks.lost:
            journal.forget()
        target.blocks = None


def _share(work: Callable[[Any], Any], items: Iterable[Any], workers: int) -> list[Any]:
    """What `work` gives for the items, in their order; after an error nothing new is begun."""
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


def partial_digests(blueprint: Blueprint, source: Files, files: frozenset[str], chunk: int = CHUNK) -> dict[str, Any]:
    """{"tensor|role": [shape, dtype, what these files add to its digest]}; zero bits add nothing, so only what lies in them is read."""
    digests = {}
    for copy in copies(blueprint, source, None):
        spans = [_span(shard, piece) for shard in originals(source.shards[copy.tensor.name, copy.role]) for piece in shard.pieces if piece.file in files]
        if not spans:
            continue
        total, unit = 0, _unit(copy.tensor, source)
        for start, stop in chunks(copy.tensor.numel, unit, chunk):
            inside = [(max(start, low), min(stop, high)) for low, high in spans if low < stop and high > start]
            if inside:
                low, high = min(low for low, _ in inside), max(high for _, high in inside)
                low, high = low // unit * unit if unit <= chunk else low, min(stop, -(-high // unit) * unit) if unit <= chunk else high
                total += digest(source.read(copy.tensor, copy.role, low, high, files), low)
        digests[f"{copy.tensor.name}|{copy.role}"] = [list(copy.tensor.shape), source.dtype_of(copy.tensor, copy.role), total % 2**64]
    return digests


def _span(shard: Shard, piece: Piece) -> tuple[int, int]:
    """A range of the whole tensor outside of which nothing of the piece lies."""
    if shard.dim is None:
        return shard.base + piece.start, shard.base + piece.stop
    inner = prod(shard.shape[shard.dim + 1 :])
    row, width = shard.shape[shard.dim] * inner, sum(last - first for first, last in shard.runs) * inner
    return shard.base + piece.start // width * row, shard.base + -(-piece.stop // width) * row


def _unit(tensor: Tensor, *files: Files) -> int:
    """Elements of the largest row that any of the files' cuts takes apart."""
    unit = 1
    for opened in files:
        for role in ("master", *ds_files.MOMENTS, "weight"):
            shards = opened.shards.get((tensor.name, role), [])
            unit = max([unit, *(prod(shard.shape[shard.dim :]) for shard in shards if shard.dim is not None)])
    return unit


def chunks(numel: int, unit: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `most` elements: runs of whole units, or parts of one."""
    if unit <= most:
        step = most // unit * unit
        yield from ((start, min(numel, start + step)) for start in range(0, numel, step))
        return
    for row in range(0, numel, unit):
        yield from ((start, min(row + unit, start + most)) for start in range(row, row + unit, most))


def cast(bits: np.ndarray, dtype: str, to: str) -> np.ndarray:
    """The values as another dtype, rounded to nearest even; the same bits where it is the same dtype."""
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
    rounded += word  # of a number: no overflow
    rounded >>= np.uint32(16)
    short = rounded.astype(np.uint16)
    numbers = word.view(np.float32)
    if len(numbers) and np.isnan(numbers.max()):  # one pass; the largest is NaN if any is
        short[np.isnan(numbers)] = 0x7FC0
    return short


# Whole conversions ------------------------------------------------------------------------------------------------


def journal_file(out: Path) -> Path:
    """Where an unfinished conversion to `out` notes what is done."""
    return out.with_name(f".{out.name}.part") / "journal.jsonl"


class Journal:
    """The unfinished output of a conversion: a hidden folder beside `out`, which takes its place when it is complete.

    What is done is noted there, so that the same conversion, started again, goes on where it was killed. After a crash of
    the machine, or a disk's error, it begins anew, since what was written may not have reached the disk.
    """

    def __init__(self, out: Path, plan: dict[str, Any]):
        if out.exists():
            raise refuse(str(out), "already exists, and nothing is overwritten", "choose another folder, or remove it")
        self.out, self._file, self._lock = out, journal_file(out), threading.Lock()
        self.folder = self._file.parent
        boot = Path("/proc/sys/kernel/random/boot_id")
        head = json.dumps(plan | {"boot": boot.read_text() if boot.exists() else ""}, sort_keys=True)
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self.done: dict[str, Any] = {}
        self.resumed = len(lines) > 1 and lines[0] == head
        if self.resumed:
            with suppress(ValueError):  # the last line may be torn
                for line in lines[1:]:
                    self.done |= json.loads(line)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            self._file.write_text(head + "\n")

    def note(self, key: str, value: Any) -> None:
        with self._lock, self._file.open("a") as file:
            file.write(json.dumps({key: value}) + "\n")

    def forget(self) -> None:
        """The same conversion begins anew when it is started again."""
        self._file.unlink()

    def finish(self) -> None:
        self._file.unlink()
        manifest.fsync(self.folder)
        os.rename(self.folder, self.out)
        manifest.fsync(self.out.parent)


@dataclass(frozen=True)
class Step:
    """A complete step folder, as its own files describe it."""

    folder: Path
    state: dict[str, Any]
    blueprint: Blueprint
    layout: Layout
    tensors: dict[str, Any]  # of its manifest

    @property
    def fingerprint(self) -> list[Any]:
        """Another one for other content, as far as names, sizes and times tell."""
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(self.folder.iterdir())]
        return [str(self.folder.resolve()), stats]

    @property
    def small_files(self) -> list[Path]:
        """Config and tokenizer: our own copies of them, or those that HF Trainer leaves beside its checkpoint."""
        own = self.folder / "hf_files"
        return sorted(own.iterdir()) if own.is_dir() else [path for path in sorted(self.folder.parent.iterdir()) if path.is_file() and is_small(path)]

    def check(self, digests: dict[str, Any]) -> None:
        """Raises `Refusal` if what was read is not what was saved."""
        for key, (_, _, read) in digests.items():
            if key in self.tensors and self.tensors[key][2] != read:
                name, role = key.split("|")
                raise refuse(f"{self.folder}: {name} ({role})", "is not what was saved, its digest is another", "use another checkpoint; nothing was written")


def open_step(path: Path) -> Step:
    """The step folder `path`, or the newest complete one of a run. Raises `Refusal` with the first fault; contents are checked while they are read."""
    if not path.is_dir():
        raise refuse(str(path), "there is no such folder", "give a run folder, such as runs/NAME, or a step folder of one")
    steps = sorted(path.glob("checkpoints/step_*"), reverse=True) or [path]
    found: list[str] = []
    if not (steps[0] / manifest.MANIFEST).exists() and not (steps[0] / manifest.STATE).exists() and (folder := foreign.tag_folder(steps[0])):
        blueprint, layout, state = foreign.describe(folder)
        return Step(folder, state, blueprint, layout, {})
    for step in steps:
        if faults := manifest.faults(step, ()):
            found.append(f"{step}: {faults[0]}")
            continue
        state = json.loads((step / manifest.STATE).read_text())
        saved = json.loads((step / manifest.BLUEPRINT).read_text())
        layout = Layout.from_json(state["layout"])
        if saved is None:
            raise refuse(
                str(step),
                "was trained with expert parallelism, whose files only DeepSpeed takes apart",
                "go on in the same layout: a run writes OUT/hf at its end",
            )
        return Step(step, state, Blueprint.from_json(saved), layout, manifest.read(step)["tensors"])
    raise refuse(str(path), f"holds no complete checkpoint ({'; '.join(found)})", "give a run folder, or a step folder of one")


def target_layout(blueprint: Blueprint, was: Layout, *, dp: int | None, tp: int | None, pp: int | None, zero: int | None) -> Layout:
    """The layout asked for; what is None stays. Raises `Refusal` for one that the model cannot have."""
    dp, tp, pp, zero = (now if now is not None else before for now, before in ((dp, was.mesh.dp), (tp, was.mesh.tp), (pp, was.mesh.pp), (zero, was.zero_stage)))
    problems = [Problem(f"{name} = {value}", "a degree is at least 1", f"use --{name} 1") for name, value in (("dp", dp), ("tp", tp), ("pp", pp)) if value < 1]
    if zero not in range(4):
        problems.append(Problem(f"zero = {zero}", "ZeRO has the stages 0 to 3", "use --zero 1"))
    if pp > 1 and zero > 1:
        problems.append(Problem(f"pp = {pp} with zero = {zero}", "a pipeline keeps its gradients, which ZeRO-2 and -3 divide", "use --zero 1, or --pp 1"))
    if tp > 1 and not blueprint.can_tp:
        problems.append(Problem(f"tp = {tp}", "this model publishes no tensor-parallel plan", "use --tp 1"))
    if pp > max(1, blueprint.num_layers):
        rule = f"the model has {blueprint.num_layers} layers" if blueprint.num_layers else "this model publishes no pipeline plan"
        problems.append(Problem(f"pp = {pp}", rule, f"use --pp {max(1, blueprint.num_layers)}"))
    if was.dtype == "float16" and (zero, was.mesh.pp) != (was.zero_stage, pp):
        problems.append(Problem("fp16", "its loss scaler is not carried from one ZeRO stage to another", "use the same --zero"))
    if problems:
        raise Refusal(problems)
    bounds = stage_bounds(blueprint, pp) if pp > 1 else ()
    same = zero == was.zero_stage
    return replace(
        was,
        mesh=Mesh(dp=dp, tp=tp, pp=pp),
        zero_stage=zero,
        optimizer=was.optimizer if same else default_optimizer(zero, was.dtype),
        bounds=bounds,
        schedule="1f1b",
        swapped=was.swapped and zero == 3,
    )


def reshape(source: Path, out: Path, layout: Layout, blueprint: Blueprint | None = None, effort: Effort | None = None) -> None:
    """Writes the step folder `out`: `source` (a step or run folder) in another layout, bit for bit, complete or not at all.

    `blueprint` is that of the model that will load it, where it may differ in its plans.
    """
    effort = effort or Effort()
    step = open_step(source)
    if not any(tensor.group is not None for tensor in step.blueprint.tensors):
        rule = "is of ZeRO-0 and another program: its optimizer states have no names"
        raise refuse(str(step.folder), rule, "take its weights: to-hf, then from-hf")
    journal = Journal(out, {"source": step.fingerprint, "layout": layout.to_json()})
    now = blueprint or step.blueprint
    with ExitStack() as stack:
        read = open_checkpoint(step.folder, step.blueprint, step.layout)
        stack.callback(read.close)
        if not journal.resumed:
            ds_files.create(journal.folder, now, layout, ds_files.read_carried(step.folder, step.blueprint, step.layout))
            journal.note("", None)
        written = open_checkpoint(journal.folder, now, layout, writable=True)
        stack.callback(written.close)
        digests, facts = run(copies(step.blueprint, read, written), read, effort, written, journal, hashed=True)
    digests.pop("", None)
    step.check(digests)
    ranks = len(list(step.folder.glob("rng_rank_*.pt")))
    for rank in range(layout.mesh.world):
        if ranks:
            shutil.copyfile(step.folder / f"rng_rank_{rank % ranks}.pt", journal.folder / f"rng_rank_{rank}.pt")
    (journal.folder / "hf_files").mkdir(exist_ok=True)
    for path in step.small_files:
        shutil.copyfile(path, journal.folder / "hf_files" / path.name)
    kept = replace(now, published=step.blueprint.published, files=step.blueprint.files)
    _complete(journal, step.state | {"layout": layout.to_json()}, kept, digests, facts)


def _complete(journal: Journal, state: dict[str, Any], blueprint: Blueprint, tensors: dict[str, Any], facts: dict[str, manifest.Facts]) -> None:
    (journal.folder / manifest.STATE).write_text(json.dumps(state, indent=1))
    (journal.folder / manifest.BLUEPRINT).write_text(json.dumps(blueprint.to_json()))
    for path in journal.folder.rglob("*"):
        if path.is_file() and path.name != "journal.jsonl" and (name := str(path.relative_to(journal.folder))) not in facts:
            facts[name] = manifest.facts(path)
    manifest.write(journal.folder, state["step"], facts, tensors)
    journal.finish()


def to_hf(source: Path, out: Path, dtype: str | None = None, effort: Effort | None = None, check: bool = False) -> None:
    """Writes Hugging Face files: safetensors, config, tokenizer. `dtype` None: what the model's files had.

    The files of a model that was read from some have their names, keys and order; of a LoRA run the adapter is written.
    With `check` the output is read again and compared with what was meant to be written.
    """
    effort = effort or Effort()
    step = open_step(source)
    blueprint, contents = published_as(step, dtype)
    plan = {"source": step.fingerprint, "files": contents}
    journal = Journal(out, plan)
    shapes = _shapes(blueprint)
    entries: dict[str, dict[str, safetensors_files.Entry]] = {}
    for file, keys in contents.items():
        if not journal.resumed:
            safetensors_files.create(journal.folder, file, {key: (own, shapes[key]) for key, own in keys.items()})
        entries[file] = safetensors_files.read_header(journal.folder, file)
    if len(entries) > 1 or safetensors_files.INDEX in step.blueprint.files:
        safetensors_files.write_index(journal.folder, entries)
    journal.note("", None)
    found = {key: entry for own in entries.values() for key, entry in own.items()}
    with ExitStack() as stack:
        read = open_checkpoint(step.folder, step.blueprint, step.layout)
        written = open_published(journal.folder, blueprint, found, writable=True)
        stack.callback(read.close)
        stack.callback(written.close)
        todo = copies(blueprint, read, written)
        digests, _ = run(todo, read, effort, written, journal)
        digests.pop("", None)
        step.check(digests)
        if check:
            _share(lambda copy: _compare(copy, read, written, effort), todo, effort.workers)
    adapter = any(file.startswith("adapter_model") for file in contents)
    for file in step.small_files:
        if adapter and file.name in ("config.json", "generation_config.json"):
            continue  # those of the base model
        shutil.copyfile(file, journal.folder / file.name)
    if dtype is not None and (config := journal.folder / "config.json").exists():
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": dtype}, indent=2) + "\n")
    for path in journal.folder.iterdir():
        manifest.fsync(path)
    journal.finish()


def _compare(copy: Copy, read: Files, written: Files, effort: Effort) -> None:
    """Raises `Refusal` if a tensor in the output is not the source's, cast."""
    for start, stop in chunks(copy.tensor.numel, _unit(copy.tensor, read, written), effort.chunk):
        wanted = cast(read.read(copy.tensor, copy.role, start, stop), read.dtype_of(copy.tensor, copy.role), written.dtype_of(copy.tensor, "weight"))
        if not np.array_equal(wanted, written.read(copy.tensor, "weight", start, stop)):
            raise refuse(f"{written.folder}: {copy.tensor.name}", "is not what was written there", "check the disk, and convert again")


def is_small(path: Path) -> bool:
    """Whether a file of a model's folder is config or tokenizer, neither weights nor code nor a record of training."""
    known = path.suffix in (".json", ".txt", ".model", ".jinja") and path.name not in (safetensors_files.INDEX, "trainer_state.json", "run.json")
    return known and not path.name.startswith("all_results")


SHARD_BYTES = 4 * 1024**3  # of a file, where the model's own files do not say


def published_as(step: Step, dtype: str | None) -> tuple[Blueprint, dict[str, dict[str, str]]]:
    """(the blueprint with the keys to write, file -> {key: dtype}) of a checkpoint's Hugging Face files."""
    blueprint = step.blueprint
    wanted = NAMES.get(dtype or step.state["export_dtype"], "")
    if not wanted:
        raise refuse(f"dtype = {dtype}", "is no dtype of weights", "use --dtype bfloat16, float16 or float32")
    if blueprint.files:
        contents = {
            file: {key: wanted if dtype and own in ("F64", "F32", "BF16", "F16") else own for key, own in keys.items()}
            for file, keys in blueprint.files.items()
        }
        return blueprint, contents
    adapter = [tensor for tensor in blueprint.tensors if "lora_" in tensor.name]
    chosen = adapter or [tensor for tensor in blueprint.tensors]
    keys = {tensor.name: tensor.name.replace(".default", "") if adapter else tensor.name for tensor in chosen}
    named = {tensor.name: NAMES[tensor.buffer] if tensor.buffer else wanted for tensor in chosen}
    files: list[dict[str, str]] = [{}]
    size = 0
    for tensor in chosen:
        nbytes = tensor.numel * safetensors_files.SIZES[named[tensor.name]]
        if size and size + nbytes > SHARD_BYTES:
            files.append({})
            size = 0
        files[-1][keys[tensor.name]] = named[tensor.name]
        size += nbytes
    single = "adapter_model.safetensors" if adapter else "model.safetensors"
    names = [single] if len(files) == 1 else [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    published = {name: Stored(((key,),)) for name, key in keys.items()}
    return replace(blueprint, tensors=tuple(chosen), published=published), dict(zip(names, files, strict=True))


def published_bytes(blueprint: Blueprint, contents: dict[str, dict[str, str]]) -> int:
    shapes = _shapes(blueprint)
    return sum(prod(shapes[key]) * safetensors_files.SIZES[own] for keys in contents.values() for key, own in keys.items())


def _shapes(blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    """The shape of each key in the model's files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in blueprint.tensors:
        if tensor.name not in blueprint.published:
            continue
        stored = blueprint.published[tensor.name]
        for keys in stored.parts:
            for key in keys:
                shape = tensor.shape[1:] if stored.stacked else tensor.shape
                if stored.stacked and len(stored.parts) > 1:
                    shape = tuple(size // len(stored.parts) if dim == stored.dim - 1 else size for dim, size in enumerate(shape))
                shapes[key] = shape
    for alias, (name, _) in blueprint.aliases.items():
        shapes.setdefault(alias, next(tensor.shape for tensor in blueprint.tensors if tensor.name == name))
    return shapes


def from_hf(folder: Path, out: Path, blueprint: Blueprint, layout: Layout, effort: Effort | None = None) -> None:
    """Writes a step folder of step 0 from a model's files: the weights as masters, the moments zero."""
    effort = effort or Effort()
    entries = safetensors_files.open_folder(folder)
    journal = Journal(
        out, {"source": str(folder.resolve()), "layout": layout.to_json(), "files": {file: (folder / file).stat().st_mtime_ns for file in blueprint.files}}
    )
    groups = {group: {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "name": name} for group, name in ((0, "matrices"), (1, "vectors"))}
    carried = ds_files.Carried(groups, 0.0, {"global_steps": 0, "skipped_steps": 0, "global_samples": 0, "lr_scheduler": None, "ds_config": {}})
    with ExitStack() as stack:
        read = open_published(folder, blueprint, entries)
        stack.callback(read.close)
        if not journal.resumed:
            ds_files.create(journal.folder, blueprint, layout, carried)
            journal.note("", None)
        written = open_checkpoint(journal.folder, blueprint, layout, writable=True)
        stack.callback(written.close)
        _, facts = run(copies(blueprint, read, written), read, effort, written, journal, hashed=True)
        everything = frozenset(str(path.relative_to(journal.folder)) for path in journal.folder.rglob("*") if path.suffix in (".pt", ".swp"))
        digests = partial_digests(blueprint, written, everything, effort.chunk)
    (journal.folder / "hf_files").mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and is_small(path):
            shutil.copyfile(path, journal.folder / "hf_files" / path.name)
    dtype = TORCH[
        max((own for keys in blueprint.files.values() for own in keys.values()), key=[own for keys in blueprint.files.values() for own in keys.values()].count)
    ]
    state = {"step": 0, "tokens": 0, "data": None, "layout": layout.to_json(), "export_dtype": dtype}
    _complete(journal, state, blueprint, {key: [shape, own, f"{total:016x}"] for key, (shape, own, total) in digests.items()}, facts)


def verify(folder: Path, effort: Effort | None = None) -> list[str]:
    """Every fault of a step folder: of its files, and of each tensor's digest. Empty: it is what was saved."""
    effort = effort or Effort()
    names = []
    with suppress(ValueError):
        names = sorted(manifest.read(folder)["files"])
    found = list(dict.fromkeys(fault for own in _share(lambda name: manifest.faults(folder, [name]), names, effort.workers) for fault in own))
    if found or not names:
        return found or manifest.faults(folder)
    if json.loads((folder / manifest.BLUEPRINT).read_text()) is None:
        return []
    step = open_step(folder)
    read = open_checkpoint(step.folder, step.blueprint, step.layout)
    digests, _ = run(copies(step.blueprint, read, None), read, effort)
    read.close()
    return [
        f"{key.replace('|', ' (')}) has another digest than when it was saved"
        for key in step.tensors
        if digests.get(key, [0, 0, ""])[2] != step.tensors[key][2]
    ]
