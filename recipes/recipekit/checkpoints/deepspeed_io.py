"""Interception of DeepSpeed's file access: writes are collected and reads are checked."""

import contextlib
import copy
import importlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from ..compat.deepspeed import (
    DeepSpeedEngine,
    ZeroOptimizer,
    copies_kept,
    find_listed_files,
    rebuilt,
    set_checkpoint_engine,
    set_clipping,
    set_scaler,
    skip_recovery_script,
    with_counts,
)
from ..parallel.blueprint import Layout
from ..storage import error_feedback, manifest, torch_files
from ..storage.file_map import expert_optimizer_file


class DeepSpeedFiles(CheckpointEngine):
    """DeepSpeed's checkpoint engine for this project's files.

    It does not run code from pickles. `take` returns the saved objects, which are not yet written
    in background mode.
    """

    def __init__(self, own_part: str = "") -> None:
        super().__init__()
        self.local_file = own_part  # the file with this rank's optimizer states
        self.pending: list[tuple[Any, Path]] = []
        # memory of the last snapshot, which is reused for the next snapshot
        self.snapshot_buffers: list[torch.UntypedStorage] = []
        self.snapshots = False
        self.failure: OSError | RuntimeError | None = None

    def create(self, info: object) -> None:
        pass

    def commit(self, info: object) -> None:
        pass

    def save(self, state_dict: object, path: str) -> None:
        if self.snapshots:
            self.pending.append((state_dict, Path(path)))
            return
        try:
            torch.save(state_dict, path)
            self.pending.append((None, Path(path)))
        except (OSError, RuntimeError) as error:
            self.keep_error(error)

    def keep_error(self, error: OSError | RuntimeError) -> None:
        """Store the first error for `take`.

        The error must not be raised here, because the other ranks wait in the next collective
        operations of DeepSpeed's save.
        """
        self.failure = self.failure or error

    def load(self, path: str, map_location: object = None) -> Any:
        content = read_pickle(Path(path))  # memory-mapped, not read
        if path.endswith("_optim_states.pt") and path != self.local_file:
            # DeepSpeed opens all ranks' files, but uses only this rank's file. So the tensors in
            # the other files are never read.
            return replace_stand_ins(content)
        # copied because training must not depend on a file that may be removed later
        return replace_stand_ins(_SnapshotMemory([]).snapshot(content))

    def take(self) -> list[tuple[Any, Path]]:
        """Return the objects saved since the last call.

        With `snapshots`, the objects are CPU copies, which training does not change. Raise the
        first write error since the last call.
        """
        if self.failure:  # the next save starts without this error
            failure, self.failure, self.pending = self.failure, None, []
            raise failure
        memory = _SnapshotMemory(self.snapshot_buffers)
        pending, self.pending = (
            [(memory.snapshot(content), path) for content, path in self.pending],
            [],
        )
        self.snapshot_buffers = memory.used
        return pending


class _SnapshotMemory:
    """Copies of nested containers of tensors, whose memory is reused.

    Tensors that share memory also share memory in the copy.
    """

    def __init__(self, free: list[torch.UntypedStorage]):
        self.free, self.used = {index: storage for index, storage in enumerate(free)}, []
        self.copies: dict[int, torch.UntypedStorage] = {}

    def snapshot(self, value: object) -> Any:
        if torch.is_tensor(value):
            value = value.detach()
            storage = value.untyped_storage()
            if storage.data_ptr() not in self.copies or storage.nbytes() == 0:
                size = storage.nbytes()
                index = next(
                    (index for index, kept in self.free.items() if kept.nbytes() == size), None
                )
                fresh = torch.UntypedStorage(size) if index is None else self.free.pop(index)
                fresh.copy_(storage)
                self.used.append(fresh)
                self.copies[storage.data_ptr()] = fresh
            empty = torch.empty(0, dtype=value.dtype)
            return empty.set_(
                self.copies[storage.data_ptr()],
                value.storage_offset(),
                value.size(),
                value.stride(),
            )
        if isinstance(value, dict):
            return type(value)((key, self.snapshot(item)) for key, item in value.items())
        if isinstance(value, list):
            return [self.snapshot(item) for item in value]
        if type(value) is tuple:
            return tuple(self.snapshot(item) for item in value)
        return copy.deepcopy(value)


@dataclass
class DeepSpeedStates:
    """A DeepSpeed engine's states, saved and loaded as `Engine` requires.

    The blueprint arguments are not used.
    """

    ds_engine: DeepSpeedEngine  # from deepspeed.initialize
    files: DeepSpeedFiles = field(default_factory=DeepSpeedFiles)

    def save(
        self, step: Path, blueprint: object, layout: Layout, background: bool
    ) -> list[tuple[Any, Path]]:
        """Let DeepSpeed save its files into a step folder; return (content, path) of each file.

        With `background`, the contents are copies that are not yet written.
        """
        skip_recovery_script(self.ds_engine)
        self.files.snapshots = background
        set_checkpoint_engine(self.ds_engine, self.files)
        with (
            _temporary_zero_states(self.ds_engine.optimizer, layout),
            copies_kept(step, self.files.keep_error),
        ):
            self.ds_engine.save_checkpoint(str(step.parent), tag=step.name, save_latest=False)
        for value, path in error_feedback.errors_to_save(
            self.ds_engine.basic_optimizer, step, dist.get_rank()
        ):
            self.files.save(value, str(path))
        return self.files.take()

    def load(self, step: Path, blueprint: object, layout: Layout, has_stepped: bool) -> None:
        """Let DeepSpeed load its files, and correct the values that DeepSpeed 0.19.8 restores
        wrongly.
        """
        optimizer = self.ds_engine.optimizer
        clipping, scaler = (
            getattr(optimizer, "clip_grad", None),
            getattr(optimizer, "loss_scaler", None),
        )
        own = str(step / expert_optimizer_file(dist.get_rank() % layout.mesh.ep))
        if layout.zero_stage:
            own = self.ds_engine._get_zero_ckpt_name(str(step.parent), step.name)
        if layout.swapped:
            _restore_nvme_states(optimizer, Path(own), layout)
        set_checkpoint_engine(self.ds_engine, DeepSpeedFiles(own))
        find_listed_files(self.ds_engine, manifest.read_manifest(step)["files"])
        # DeepSpeed 0.19.8 has a leftover print call in its bf16 optimizer
        with contextlib.redirect_stdout(None):
            path, _ = self.ds_engine.load_checkpoint(str(step.parent), tag=step.name)
        assert path is not None, f"DeepSpeed did not load {step}"
        has_stepped = has_stepped and self.ds_engine.skipped_steps < self.ds_engine.global_steps
        if not has_stepped and not layout.swapped:
            # drop the loaded zeros, because an optimizer's initial states may differ from zero
            getattr(optimizer, "optimizer", optimizer).state.clear()
        if clipping is not None:
            set_clipping(optimizer, clipping)
        if scaler is not None:
            set_scaler(optimizer, with_counts(scaler, optimizer.loss_scaler))


@contextlib.contextmanager
def _temporary_zero_states(optimizer: Any, layout: Layout) -> Iterator[None]:
    """While the `with` block runs, provide zero states for an optimizer that has no states.

    The states are the ones that a checkpoint in its layout contains. In fp16, an overflow may have
    skipped every step so far. After such a checkpoint is loaded, the optimizer starts with its
    initial states.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if inner.state or layout.swapped:
        yield
        return
    # ZeRO-3's groups are empty between two steps
    flats = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    numbers = getattr(optimizer, "sub_group_to_group_id", {})
    if flats:
        groups = [(numbers[index], [flat]) for index, flat in enumerate(flats)]
    else:
        groups = [(number, group["params"]) for number, group in enumerate(inner.param_groups)]
    for number, parameters in groups:
        matrix = layout.of_matrices is not None and inner.param_groups[number].get("matrix")
        for parameter in parameters:
            roles = (layout.of_matrices if matrix else layout.states) or ()
            states = {role: torch.zeros_like(parameter) for role in roles}
            # some states of this project's optimizers do not have the weight's shape
            if hasattr(inner, "new_states"):
                states = inner.new_states(parameter)
            counts = {name: 0 if layout.int_step else torch.tensor(0.0) for name in layout.scalars}
            if kept := counts | states:
                inner.state[parameter] = kept
    try:
        yield
    finally:
        inner.state.clear()


def _restore_nvme_states(optimizer: ZeroOptimizer, file: Path, layout: Layout) -> None:
    """Restore the values that DeepSpeed does not restore with NVMe offload.

    Call this function before the engine's `load_checkpoint`. DeepSpeed 0.19.8 (engine.py) copies
    the swap files back and recomputes the 16-bit weights from all masters. It restores nothing
    else. Small flat tensors, which are not swapped, keep their initial values, and step counts and
    learning rates are lost. Moments in swap files are ignored, because a new optimizer has no
    moments. So this function creates moments of one element in the optimizer, expanded to the size
    in the file. DeepSpeed then reads the moments' values from the file.
    """
    saved = read_pickle(file)["optimizer_state_dict"]
    for group, numbers in zip(
        optimizer.param_groups, saved["optimizer_state_dict"]["param_groups"], strict=True
    ):
        group.update({key: value for key, value in numbers.items() if key != "params"})
    states = saved["optimizer_state_dict"]["state"].values()
    for number, (flat, master, state) in enumerate(
        zip(optimizer.fp32_partitioned_groups_flat, saved["fp32_flat_groups"], states, strict=True)
    ):
        optimizer.optimizer.state[flat]["step"] = state["step"]
        for role in layout.states:
            swapped = torch.empty(1).expand(
                int(optimizer.fp16_partitioned_groups_flat_numel[number])
            )
            optimizer.optimizer.state[flat][role] = (
                state[role].clone() if master.numel() else swapped
            )
        if master.numel():
            flat.data.copy_(master)


_SAFE_GLOBALS: list[Any] = [
    *((kind, kind.place) for kind in torch_files.STAND_INS),
    (torch_files.zero_stage_member, "builtins.getattr"),
]
# safe_globals applies to the entire process, so the first thread to leave it would end it for all
# other threads
_READ_LOCK = threading.Lock()


def read_pickle(path: Path) -> Any:
    """Map a torch.save file without reading its tensors.

    No code in the file is run. Raise `ConfigError` for a damaged file, or for a file with a class
    that no checkpoint needs.
    """
    try:
        with _READ_LOCK, torch.serialization.safe_globals(_SAFE_GLOBALS):
            return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # torch may raise any error for a damaged or hostile file
        raise torch_files.unsafe_file_error(path, error) from None


def replace_stand_ins(value: object) -> Any:
    """Replace the stand-ins in a `read_pickle` result by DeepSpeed's objects."""
    if isinstance(value, torch_files.StandIn):
        module, _, name = type(value).place.rpartition(".")  # no attribute from a file
        kind = getattr(importlib.import_module(module), name)
        if value.values:
            return kind(*value.values)
        return rebuilt(kind, vars(value))
    if isinstance(value, dict):
        return type(value)((key, replace_stand_ins(item)) for key, item in value.items())
    return [replace_stand_ins(item) for item in value] if isinstance(value, list) else value
