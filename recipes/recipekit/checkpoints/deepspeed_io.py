"""Stands between DeepSpeed and its files: keeps what DeepSpeed saves, and reads what it loads."""

import contextlib
import copy
import errno
import importlib
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from ..parallel.blueprint import Layout
from ..storage import errors, manifest, torch_files
from ..storage.places import expert_optimizer_file


class DeepSpeedFiles(CheckpointEngine):
    """Reads and writes DeepSpeed's files.

    Unpickles no code. `take` returns what was written, or in background mode what is still to be
    written.
    """

    def __init__(self, own_part: str = "") -> None:
        super().__init__()
        self.own_part = own_part  # the file of this rank's optimizer states
        self.pending: list[tuple[Any, Path]] = []
        # memory of the last snapshot, used again by the next one
        self.kept: list[torch.UntypedStorage] = []
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
        except (OSError, RuntimeError) as error:
            # `take` raises it: the other ranks wait in the next collectives of DeepSpeed's save
            self.failure = self.failure or error

    def load(self, path: str, map_location: Any = None) -> Any:
        content = read_pickle(Path(path))  # mapped, not read
        if path.endswith("_optim_states.pt") and path != self.own_part:
            # DeepSpeed opens the files of all ranks and takes its own: the other files are never
            # read
            return restored(content)
        # training must not depend on a file that may be removed
        return restored(_Memory([]).copied(content))

    def take(self) -> list[tuple[Any, Path]]:
        """Returns what was saved since the last call; with `snapshots` as copies on the CPU that
        training does not change.

        Raises the first error of a write since then.
        """
        if self.failure:  # the next save begins without it
            failure, self.failure, self.pending = self.failure, None, []
            raise failure
        memory = _Memory(self.kept)
        pending, self.pending = (
            [(memory.copied(content), path) for content, path in self.pending],
            [],
        )
        self.kept = memory.used
        return pending


class _Memory:
    """Copies nested containers of tensors; tensors that share memory share it in the copy too."""

    def __init__(self, free: list[torch.UntypedStorage]):
        self.free, self.used = {index: storage for index, storage in enumerate(free)}, []
        self.copies: dict[int, torch.UntypedStorage] = {}

    def copied(self, value: Any) -> Any:
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
            return type(value)((key, self.copied(item)) for key, item in value.items())
        if isinstance(value, list):
            return [self.copied(item) for item in value]
        if type(value) is tuple:
            return tuple(self.copied(item) for item in value)
        return copy.deepcopy(value)


@contextlib.contextmanager
def _copies_kept(files: DeepSpeedFiles, step: Path) -> Iterator[None]:
    """Keep the error of a copy of swap files into a step folder for `take`.

    DeepSpeed 0.19.8 copies them in the middle of a save (engine.py, save_checkpoint): a rank whose
    disk is full would leave the other ranks waiting in the collectives after the copy.
    """
    copytree = shutil.copytree

    def copy(source: Any, target: Any, *arguments: Any, **more: Any) -> Any:
        try:
            return copytree(source, target, *arguments, **more)
        except OSError as error:
            if not Path(target).is_relative_to(step):
                raise
            # the first of many files
            reason = (
                str(error.args[0][0][-1]) if isinstance(error, shutil.Error) else error.strerror
            )
            files.failure = files.failure or OSError(error.errno or errno.EIO, reason, str(target))
            return target

    shutil.copytree = copy
    try:
        yield
    finally:
        shutil.copytree = copytree


@dataclass
class DeepSpeedStates:
    """The states of an engine of DeepSpeed, saved and loaded as `Engine` asks; a blueprint is not
    needed.
    """

    made: Any  # by deepspeed.initialize
    files: DeepSpeedFiles = field(default_factory=DeepSpeedFiles)

    def save(
        self, step: Path, blueprint: Any, layout: Layout, background: bool
    ) -> list[tuple[Any, Path]]:
        """Lets DeepSpeed write its files into a step folder; in the background they are copies,
        still to be written.
        """
        # it would copy a script into the staging folder, which is removed; and a full disk would
        # end rank 0 amid collectives
        self.made._copy_recovery_script = lambda _: None
        self.files.snapshots, self.made.checkpoint_engine = background, self.files
        with _first_states(self.made.optimizer, layout), _copies_kept(self.files, step):
            self.made.save_checkpoint(str(step.parent), tag=step.name, save_latest=False)
        for value, path in errors.kept(self.made.basic_optimizer, step, dist.get_rank()):
            self.files.save(value, str(path))
        return self.files.take()

    def load(self, step: Path, blueprint: Any, layout: Layout, begun: bool) -> None:
        """Lets DeepSpeed load its files, and mends what DeepSpeed 0.19.8 restores wrongly."""
        optimizer = self.made.optimizer
        clipping, scaler = (
            getattr(optimizer, "clip_grad", None),
            getattr(optimizer, "loss_scaler", None),
        )
        own = str(step / expert_optimizer_file(dist.get_rank() % layout.mesh.ep))
        if layout.zero_stage:
            own = self.made._get_zero_ckpt_name(str(step.parent), step.name)
        if layout.swapped:
            _restore_swapped(optimizer, Path(own), layout)
        self.made.checkpoint_engine = DeepSpeedFiles(own)
        _find_listed_files(self.made, step)
        # DeepSpeed 0.19.8 leaves a print in its bf16 optimizer
        with contextlib.redirect_stdout(None):
            path, _ = self.made.load_checkpoint(str(step.parent), tag=step.name)
        assert path is not None, f"DeepSpeed did not load {step}"
        begun = begun and self.made.skipped_steps < self.made.global_steps
        if not begun and not layout.swapped:
            # zeros: an optimizer's first states may be others
            getattr(optimizer, "optimizer", optimizer).state.clear()
        if clipping is not None:
            # the saved one came back, though the user may have changed it
            optimizer.clip_grad = clipping
        if scaler is not None:
            optimizer.loss_scaler = _with_counts(scaler, optimizer.loss_scaler)
            optimizer.dynamic_loss_scale = scaler.dynamic


def _find_listed_files(made: Any, step: Path) -> None:
    """Let DeepSpeed find only files that the manifest of a step folder names.

    DeepSpeed 0.19.8 looks for files by a pattern: it takes a stray mp_rank_99_model_states.pt for
    another rank's file.
    """
    listed = manifest.read(step)["files"]

    def only_listed(find: Callable[..., list[str]]) -> Callable[..., list[str]]:
        return lambda *place: [path for path in find(*place) if Path(path).name in listed]

    made._get_all_ckpt_names = only_listed(type(made)._get_all_ckpt_names.__get__(made))
    if hasattr(module := made.module, "ckpt_layer_path_list"):  # of a pipeline
        module.ckpt_layer_path_list = only_listed(type(module).ckpt_layer_path_list.__get__(module))


# of DeepSpeed's DynamicLossScaler
COUNTED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _with_counts(scaler: Any, saved: Any) -> Any:
    """Return this start's loss scaler with the scale and the counts of the saved one.

    The window, the hysteresis, the smallest scale and a constant scale keep the values of this
    start's JSON.
    """
    if scaler.dynamic and saved.dynamic:
        vars(scaler).update({name: vars(saved)[name] for name in COUNTED})
        scaler.cur_hysteresis = min(scaler.cur_hysteresis, scaler.delayed_shift)
    return scaler


@contextlib.contextmanager
def _first_states(optimizer: Any, layout: Layout) -> Iterator[None]:
    """Give an optimizer without states the states of a checkpoint of its layout, as zeros, within
    the `with`.

    In fp16 an overflow may have skipped every step so far. After a load of such a checkpoint, the
    optimizer starts again.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if inner.state or layout.swapped:
        yield
        return
    # of ZeRO-3, whose groups are empty between two steps
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
            # some states of our optimizers do not have the weight's shape
            if hasattr(inner, "new_states"):
                states = inner.new_states(parameter)
            counts = {name: 0 if layout.int_step else torch.tensor(0.0) for name in layout.scalars}
            if kept := counts | states:
                inner.state[parameter] = kept
    try:
        yield
    finally:
        inner.state.clear()


def _restore_swapped(optimizer: Any, file: Path, layout: Layout) -> None:
    """Restores what DeepSpeed does not restore with NVMe offload; call it before the engine's
    `load_checkpoint`.

    DeepSpeed 0.19.8 (engine.py) copies the swap files back, makes the 16-bit weights of all masters
    anew, and reads nothing else. Small flat tensors, which are not swapped, keep their first
    values; step counts and learning rates are lost; and moments in swap files are ignored, since a
    new optimizer has no moments. So this function gives the optimizer moments of one element,
    expanded to the width of the file, which DeepSpeed then reads from the file.
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


_SAFE: list[Any] = [
    *((kind, kind.place) for kind in torch_files.STANDS),
    (torch_files.member, "builtins.getattr"),
]
# safe_globals holds for the whole process: the first thread to leave it would end it for the others
_READING = threading.Lock()


def read_pickle(path: Path) -> Any:
    """Maps a file of torch.save, without reading its tensors.

    Raises `Refusal` for a file that is damaged, or that names a class which no checkpoint needs. No
    code in it is run.
    """
    try:
        with _READING, torch.serialization.safe_globals(_SAFE):
            return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # torch raises what it pleases for a damaged or hostile file
        raise torch_files.unsafe(path, error) from None


def restored(value: Any) -> Any:
    """Replaces the stand-ins in what `read_pickle` returned by DeepSpeed's own objects."""
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
