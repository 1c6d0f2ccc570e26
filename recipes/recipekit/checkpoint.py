"""Saving and loading checkpoints: a step folder is complete and verified, or it does not count."""

import contextlib
import copy
import importlib
import json
import os
import random
import resource
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from . import convert, manifest, torch_files
from .blueprint import Blueprint, Layout
from .digest import add
from .ds_files import MOMENTS, expected_bytes
from .groups import waiting_group
from .manifest import BLUEPRINT, MANIFEST, STATE
from .refusal import Refusal, refuse

LIMIT = "no file may become larger than"


class Files(CheckpointEngine):
    """How DeepSpeed reads and writes files here: reading runs nothing that they contain; what was written, or is to be, is given by `take`."""

    def __init__(self, own_part: str = "") -> None:
        super().__init__()
        self.own_part = own_part  # the file of this rank's optimizer states
        self.pending: list[tuple[Any, Path]] = []
        self.kept: list[torch.UntypedStorage] = []  # memory of the last snapshot, used again for the next
        self.snapshots = False
        self.failure: OSError | RuntimeError | None = None

    def create(self, info: Any) -> None:
        pass

    def commit(self, info: Any) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        if self.snapshots:
            self.pending.append((state_dict, Path(path)))
            return
        try:
            torch.save(state_dict, path)
            self.pending.append((None, Path(path)))
        except (OSError, RuntimeError) as error:  # for `take` to raise: DeepSpeed has collectives ahead that the other ranks wait in
            self.failure = self.failure or error

    def load(self, path: str, map_location: Any = None) -> Any:
        content = read_pickle(Path(path))  # mapped
        if path.endswith("_optim_states.pt") and path != self.own_part:
            return restored(content)  # DeepSpeed opens those of all ranks and takes its own: the others are never read
        return restored(_Memory([]).copied(content))  # training must not depend on a file that may be removed

    def take(self) -> list[tuple[Any, Path]]:
        """What was saved since the last call; with `snapshots` as copies on the CPU that training does not change.

        Raises the first error of a write since then.
        """
        if self.failure:
            raise self.failure
        memory = _Memory(self.kept)
        pending, self.pending = [(memory.copied(content), path) for content, path in self.pending], []
        self.kept = memory.used
        return pending


class _Memory:
    """Copies of nested containers of tensors; tensors that share memory share it in the copy too."""

    def __init__(self, free: list[torch.UntypedStorage]):
        self.free, self.used = {index: storage for index, storage in enumerate(free)}, []
        self.copies: dict[int, torch.UntypedStorage] = {}

    def copied(self, value: Any) -> Any:
        if torch.is_tensor(value):
            value = value.detach()
            storage = value.untyped_storage()
            if storage.data_ptr() not in self.copies or storage.nbytes() == 0:
                size = storage.nbytes()
                index = next((index for index, kept in self.free.items() if kept.nbytes() == size), None)
                fresh = torch.UntypedStorage(size) if index is None else self.free.pop(index)
                fresh.copy_(storage)
                self.used.append(fresh)
                self.copies[storage.data_ptr()] = fresh
            empty = torch.empty(0, dtype=value.dtype)
            return empty.set_(self.copies[storage.data_ptr()], value.storage_offset(), value.size(), value.stride())
        if isinstance(value, dict):
            return type(value)((key, self.copied(item)) for key, item in value.items())
        if isinstance(value, list):
            return [self.copied(item) for item in value]
        if type(value) is tuple:
            return tuple(self.copied(item) for item in value)
        return copy.deepcopy(value)


_SAFE: list[Any] = [*((kind, kind.place) for kind in torch_files.STANDS), (torch_files.member, "builtins.getattr")]
_READING = threading.Lock()  # safe_globals is of the whole process: the first thread to leave it would take it from the others


def read_pickle(path: Path) -> Any:
    """A file of torch.save, mapped and not read.

    Raises `Refusal` for a file that is damaged, or that names a class which no checkpoint needs: nothing of it is run.
    """
    try:
        with _READING, torch.serialization.safe_globals(_SAFE):
            return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # torch raises what it pleases for a damaged or hostile file
        raise torch_files.unsafe(path, error) from None


def restored(value: Any) -> Any:
    """What `read_pickle` gives, with DeepSpeed's own objects in the places of their stand-ins."""
    if isinstance(value, torch_files.Stand):
        module, _, name = type(value).place.rpartition(".")  # not an attribute that a file gave it
        kind = getattr(importlib.import_module(module), name)
        if value.values:
            return kind(*value.values)
        made = kind.__new__(kind)
        made.__dict__.update(vars(value))
        return made
    if isinstance(value, dict):
        return type(value)((key, restored(item)) for key, item in value.items())
    return [restored(item) for item in value] if isinstance(value, list) else value


@dataclass
class Saver:
    """Writes the checkpoints of a run into `folder`. `blueprint` None: of a model that only DeepSpeed can take apart (expert parallelism).

    Every rank writes, hashes and flushes its own files in a staging folder and leaves a note of them; when all notes are
    there the first rank writes the manifest, renames the folder and moves `latest`. So a kill at any moment leaves `latest` on a
    complete checkpoint. With `in_background` only the copy of the states to host memory delays training: a thread of each
    rank does the rest, without collectives. The oldest steps beyond `keep` (0: none) are removed after a save.
    """

    engine: Any
    folder: Path
    blueprint: Blueprint | None
    layout: Layout
    keep: int
    in_background: bool
    write_hf_files: Callable[[Path], None]

    def __post_init__(self) -> None:
        self.files = Files()
        self.files.snapshots = self.in_background
        self.engine.checkpoint_engine = self.files
        self.engine._copy_recovery_script = lambda _: None  # they would go with the staging folder; a full disk must not end rank 0 among collectives
        self.thread: threading.Thread | None = None
        self.written = threading.Event()  # this rank's part of a save in the background, or it failed
        self.error: str = ""
        self.needed = expected_bytes(self.blueprint, self.layout) if self.blueprint else 0  # bytes of a checkpoint, 0: not known

    def save(self, state: dict[str, Any]) -> None:
        """Saves the step state["step"] (a collective); returns when it is complete, or in the background when it is copied.

        `state` (JSON) is the same on every rank. Raises `Refusal` on every rank if a save failed on any: for want of space
        before anything is written, the sizes named.
        """
        self.wait()
        tag = f"step_{state['step']:08d}"
        staging = self.folder / ".staging"
        failures = partial(_failures_as, self, f"checkpoint of step {state['step']}")
        if dist.get_rank() == 0:
            with failures():
                shutil.rmtree(staging, ignore_errors=True)
                (staging / tag).mkdir(parents=True)
                self._check_space(state["step"])
        self._agree()
        content: list[tuple[Any, Path]] = []
        with failures():
            self.engine.save_checkpoint(str(staging), tag=tag, save_latest=False)
            content = self.files.take()
        self._agree()
        generators = _generators()

        def finish() -> None:
            with failures():
                self._write_own(staging / tag, content, generators, state)

        if not self.in_background:
            finish()
            self._agree()  # every rank's note is there
            if dist.get_rank() == 0:
                with failures():
                    self._commit(staging / tag, state)
            self._agree()
            return

        def finish_and_commit() -> None:
            try:
                finish()
            except BaseException as error:  # whatever it is, it belongs to the thread that waits
                self.error = f"checkpoint of step {state['step']}: rank {dist.get_rank()}: {error!r}"
            failed = bool(self.error)
            self.written.set()
            if dist.get_rank() == 0 and not failed:
                with failures():
                    self._commit(staging / tag, state)

        self.written.clear()
        self.thread = threading.Thread(target=finish_and_commit, name="checkpoint", daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Returns when the save in the background, if any, is complete (a collective). Raises `Refusal` if it failed."""
        if self.thread is not None:
            self.written.wait()
            self._agree()  # before the first rank's thread is waited for: it waits in turn for the notes of ranks that may have failed or died
            self.thread.join()
            self.thread = None
            self._agree()

    def check_room(self) -> None:
        """Raises `Refusal` on every rank if the disk has no room for one checkpoint (a collective): better now than hours later."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / ".staging", ignore_errors=True)  # of a save that was killed
            there = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
            if self.needed > (free := shutil.disk_usage(there).free):
                self.error = f"each needs {self.needed:,} bytes, {free:,} are free"
        self._agree("free space or choose another --out")

    def _agree(self, fix: str = "the checkpoints before it are intact; free space or choose another --out, then start again") -> None:
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, self.error, group=waiting_group())
        self.error = ""
        if told := [error for error in errors if error]:
            if dist.get_rank() == 0:
                shutil.rmtree(self.folder / ".staging", ignore_errors=True)
            limited = "the checkpoints before it are intact; raise the limit (ulimit -f unlimited), then start again"
            raise refuse(f"checkpoint in {self.folder}", told[0], limited if LIMIT in told[0] else fix)

    def _check_space(self, step: int) -> None:
        if self.needed > shutil.disk_usage(self.folder).free:
            self.error = f"step {step} {self.space()}"

    def space(self) -> str:
        free, (limit, _) = shutil.disk_usage(self.folder).free, resource.getrlimit(resource.RLIMIT_FSIZE)
        met = limit < self.needed if self.needed else limit != resource.RLIM_INFINITY  # no file is larger than the checkpoint
        if limit != resource.RLIM_INFINITY and met and free > max(self.needed, limit):
            return f"{LIMIT} {limit:,} bytes"  # torch.save does not say which of the two it has met
        return f"needs {self.needed:,} bytes, {free:,} are free" if self.needed else f"{free:,} bytes are free"

    def _write_own(self, step: Path, content: list[tuple[Any, Path]], generators: dict[str, Any], state: dict[str, Any]) -> None:
        rank, names = dist.get_rank(), []
        for value, path in content:
            if value is not None:
                torch.save(value, path)
            names.append(path)
        names.append(step / f"rng_rank_{rank}.pt")
        torch.save(generators, names[-1])
        names += [path for path in (step / "offloaded_tensors" / f"rank{rank:02d}").rglob("*") if path.is_file()]
        if rank == 0:
            (step / STATE).write_text(json.dumps(state | {"layout": self.layout.to_json()}, indent=1))
            (step / BLUEPRINT).write_text(json.dumps(self.blueprint.to_json() if self.blueprint else None))
            (step / "hf_files").mkdir()
            self.write_hf_files(step / "hf_files")
            names += [step / STATE, step / BLUEPRINT, *(path for path in (step / "hf_files").rglob("*") if path.is_file())]
        files = {str(path.relative_to(step)): manifest.facts(path) for path in names}
        tensors = {}
        if self.blueprint is not None:
            opened = convert.open_checkpoint(step, self.blueprint, self.layout)
            tensors = convert.partial_digests(self.blueprint, opened, frozenset(files))
            opened.close()
        note = step.parent / f"rank_{rank}.json"
        note.with_suffix(".tmp").write_text(json.dumps({"files": files, "tensors": tensors}))
        os.rename(note.with_suffix(".tmp"), note)

    def _commit(self, step: Path, state: dict[str, Any]) -> None:
        files: dict[str, Any] = {}
        tensors: dict[str, list[Any]] = {}
        for rank in range(self.layout.mesh.world):
            path = step.parent / f"rank_{rank}.json"
            while not path.exists():  # in the background only: another rank is still writing
                if not step.exists():
                    return  # or it failed, and `_agree` has removed the staging folder
                time.sleep(0.02)
            note = json.loads(path.read_text())
            files |= note["files"]
            for key, (shape, dtype, part) in note["tensors"].items():
                tensors[key] = [shape, dtype, add(part, tensors[key][2] if key in tensors else 0)]
        manifest.write(step, state["step"], files, {key: [shape, dtype, f"{total:016x}"] for key, (shape, dtype, total) in tensors.items()})
        shutil.rmtree(self.folder / step.name, ignore_errors=True)  # a broken one of the same step, if any
        os.rename(step, self.folder / step.name)
        point_latest(self.folder, step.name)
        shutil.rmtree(self.folder / ".staging", ignore_errors=True)
        for old in sorted(self.folder.glob("step_*"))[: -self.keep] if self.keep else []:
            shutil.rmtree(old)


@contextlib.contextmanager
def _failures_as(saver: Saver, what: str) -> Any:
    """Keeps what the disk or a library raises for `_agree`, which tells every rank: a rank that raised alone would leave the others waiting."""
    try:
        yield
    except (OSError, RuntimeError, Refusal) as error:
        saver.error = f"{what}: rank {dist.get_rank()}: {str(error).strip().splitlines()[0]}; {saver.space()}"


def point_latest(folder: Path, name: str) -> None:
    """Lets `latest`, which stock DeepSpeed loads, name a step folder; a crash leaves the old name or the new one."""
    (folder / "latest.tmp").write_text(name)
    manifest.fsync(folder / "latest.tmp")
    manifest.fsync(folder)  # the step folder is on the disk before it is named
    os.rename(folder / "latest.tmp", folder / "latest")
    manifest.fsync(folder)


def newest(path: Path, say: Any) -> Path | None:
    """The newest complete and verified step folder of a run (or `path` itself if it is a step folder); None if none is.

    The ranks share the work (a collective). Calls `say` with one line for each folder that is passed over.
    """
    steps: list[Any] = [[path] if (path / MANIFEST).exists() or path.name.startswith("step_") else sorted(path.glob("checkpoints/step_*"), reverse=True)]
    dist.broadcast_object_list(steps)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in steps[0]:
        try:
            names = sorted(manifest.read(step)["files"])
        except ValueError:
            names = []
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, manifest.faults(step, names[rank::world]), group=waiting_group())
        faults = list(dict.fromkeys(fault for own in everyone for fault in own))
        if not faults:
            return step
        say(f"checkpoint {step} is damaged, passed over: {faults[0]}" + (f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""))
    return None


def put_aside_later(folder: Path, step: int, say: Any) -> None:
    """Renames the step folders after `step`: the run goes another way from here, and no later start may go on from them."""
    here = f"step_{step:08d}"
    if (folder / here).is_dir() and not ((folder / "latest").is_file() and (folder / "latest").read_bytes() == here.encode()):
        point_latest(folder, here)
    for later in sorted(folder.glob("step_*")):
        if later.name > here:
            number = 1
            while (aside := folder / f"aside_{later.name}.{number}").exists():
                number += 1
            os.rename(later, aside)
            say(f"{later} lies after step {step}: it is now {aside.name}, remove it if you do not need it")


def check(step: Path, blueprint: Blueprint | None, layout: Layout) -> tuple[dict[str, Any], bool]:
    """(the state of a step folder, whether it is of this layout). Raises `Refusal` for one of another model, or that cannot be converted."""
    state = json.loads((step / STATE).read_text())
    saved = json.loads((step / BLUEPRINT).read_text())
    was = Layout.from_json(state["layout"])
    if was == layout:
        return state, True
    if saved is None or blueprint is None:
        rule = f"was written by another layout ({was}) than this one ({layout}), and experts that DeepSpeed divided are not converted"
        raise refuse(f"resume from {step}", rule, "start with the same ranks, degrees and strategy, or begin a new run from its Hugging Face files")
    differ = _differences(Blueprint.from_json(saved), blueprint)
    if differ:
        raise refuse(f"resume from {step}", f"is of another model: {differ}", "use the model that it was made with, or --out NEW")
    return state, False


def _differences(saved: Blueprint, now: Blueprint) -> str:
    """The first difference in names, shapes or optimizer groups, in words."""
    before, after = ({tensor.name: (tensor.shape, tensor.group) for tensor in blueprint.tensors} for blueprint in (saved, now))
    for name in [*before, *after]:
        if before.get(name) != after.get(name):
            return f"{name} is {before.get(name, 'not there')} in the checkpoint and {after.get(name, 'not there')} in the model (shape, optimizer group)"
    return ""


def load(engine: Any, step: Path, blueprint: Blueprint | None, layout: Layout, scratch: Path, say: Any) -> dict[str, Any]:
    """Loads a verified step folder into the engine and this rank's random generators; returns its state (a collective).

    One of another layout is converted into the folder `scratch` on the way, which is removed. The optimizer's numbers
    (betas, eps, weight decay, clipping) stay those of this start.
    """
    state, same = check(step, blueprint, layout)
    source = step
    if not same:
        assert blueprint is not None
        source = scratch / step.name
        failed: list[Any] = [""]
        if dist.get_rank() == 0:
            say(f"converting {step} from {Layout.from_json(state['layout'])} to {layout}")
            shutil.rmtree(scratch, ignore_errors=True)
            try:
                convert.reshape(step, source, layout, blueprint, convert.Effort(workers=min(8, os.cpu_count() or 1)))
            except (OSError, Refusal) as error:  # the other ranks wait
                failed = [f"cannot be converted in {scratch}: {error}"]
        dist.broadcast_object_list(failed, group=waiting_group())
        if failed[0]:
            raise refuse(f"resume from {step}", failed[0], "free space there, or start with the layout it was written in")
    optimizer = engine.optimizer
    before = [dict(group) for group in optimizer.param_groups]
    clipping = getattr(optimizer, "clip_grad", None)
    zero = layout.zero_stage > 0
    own = engine._get_zero_ckpt_name(str(source.parent), source.name) if zero else ""
    if layout.swapped:
        _restore_swapped(optimizer, Path(own))
    engine.checkpoint_engine = Files(own)
    with contextlib.redirect_stdout(None):  # DeepSpeed 0.19.8 leaves a print in its bf16 optimizer
        path, _ = engine.load_checkpoint(str(source.parent), tag=source.name)
    assert path is not None, f"DeepSpeed did not load {source}"
    for group, own in zip(optimizer.param_groups, before, strict=True):
        # DeepSpeed puts the saved numbers there, though the user may have changed them (--resume PATH), and only those that the
        # optimizer of the other layout had
        group.update({key: value for key, value in own.items() if key in ("betas", "eps", "weight_decay") or key not in group})
    if clipping is not None:
        optimizer.clip_grad = clipping
    if (generators := source / f"rng_rank_{dist.get_rank()}.pt").exists():
        _restore_generators(read_pickle(generators))
    dist.barrier(waiting_group())
    if not same and dist.get_rank() == 0:
        shutil.rmtree(scratch)
    return state


def _restore_swapped(optimizer: Any, file: Path) -> None:
    """Makes ready what DeepSpeed does not restore with NVMe offload; to be called before its `load_checkpoint`.

    0.19.8 (engine.py) copies the swap files back, makes the 16-bit weights of all masters anew, and reads nothing else: small
    flat tensors, which are not swapped, stay as they began, step counts and learning rates are lost, and moments in swap files are not looked
    for, since a new optimizer has none. Here it gets some, of one element as wide as the file, which are then read from there.
    """
    saved = read_pickle(file)["optimizer_state_dict"]
    for group, numbers in zip(optimizer.param_groups, saved["optimizer_state_dict"]["param_groups"], strict=True):
        group.update({key: value for key, value in numbers.items() if key != "params"})
    states = saved["optimizer_state_dict"]["state"].values()
    for number, (flat, master, state) in enumerate(zip(optimizer.fp32_partitioned_groups_flat, saved["fp32_flat_groups"], states, strict=True)):
        optimizer.optimizer.state[flat]["step"] = state["step"]
        for role in MOMENTS:
            swapped = torch.empty(1).expand(int(optimizer.fp16_partitioned_groups_flat_numel[number]))
            optimizer.optimizer.state[flat][role] = state[role].clone() if master.numel() else swapped
        if master.numel():
            flat.data.copy_(master)


def _generators() -> dict[str, Any]:
    """The states of this rank's random generators, in types that `weights_only` loads."""
    numpy: Any = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    generators = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy}
    return generators | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _restore_generators(generators: dict[str, Any]) -> None:
    torch.set_rng_state(generators["torch"].clone())
    random.setstate(generators["python"])
    np.random.set_state(generators["numpy"])
    if "cuda" in generators:
        torch.cuda.set_rng_state(generators["cuda"])
