"""The trained model as Hugging Face files, written from a live engine in any layout."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..architectures import safetensors_files
from ..architectures.small_files import ADAPTER, CARD, with_dtype
from ..parallel import expert, tensor
from ..parallel.groups import Groups, waiting_group
from ..spec.engine import Engine
from ..spec.paths import write_with_umask
from ..spec.refusal import START_AGAIN, Problem, Refusal
from ..spec.whole_file import fsync
from .adapter import merged, published_keys, unties
from .build import Built
from .card import is_unchanged
from .small_files import SmallFiles


def whole_parameters(
    model: nn.Module, built: Built, groups: Groups, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, whole tensor on the CPU) of every parameter of this rank's stages, one at a
    time, on every rank (a collective).

    Names and tensors are the Hugging Face model's, whatever a layout made of them. Where the
    training dtype is smaller than `dtype`, the optimizer's fp32 master weights are given.
    """
    return expert.published(
        model, _joined(model.named_parameters(), dtype, built=built, groups=groups)
    )


def _joined(
    parameters: Iterable[tuple[str, nn.Parameter]], dtype: torch.dtype, built: Built, groups: Groups
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parameters:
        if getattr(parameter, "ds_pipe_replicated", False):
            continue  # an earlier stage has it too
        master = None
        # the marks of ZeRO-3, and of ZeRO-1 and -2
        kept = hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")
        if kept and parameter.requires_grad and dtype == torch.float32 and parameter.dtype != dtype:
            master = safe_get_full_fp32_param(parameter)
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            value = (parameter if master is None else master).detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value  # of FSDP2
            cut = built.cuts.get(built.names.get(id(parameter), ""))
            if cut is not None:
                assert groups.tp_mesh is not None
                value = tensor.join(
                    value.to(parameter.device).view_as(parameter), cut, groups.tp_mesh
                )
            value = expert.whole(parameter, value.to(parameter.device)).to("cpu", dtype, copy=True)
        yield name, value


@dataclass(frozen=True)
class Format:
    """The format of exported weights: their dtype, and whether an adapter is merged into them."""

    dtype: torch.dtype
    merge: bool = False


def export(
    engine: Engine,
    built: Built,
    groups: Groups,
    small: SmallFiles,
    folder: Path,
    weights: Format,
) -> None:
    """Write safetensors and the small files into `folder`, complete or not at all (a collective).

    The first rank of each pipeline stage writes its files.

    A LoRA model writes its adapter, or the merged weights if `weights` merges it. Tensors that
    transformers ties are written once.
    """
    model: Any = engine.module  # maybe wrapped by an adapter
    adapter = hasattr(model, "peft_config")
    dtype = weights.dtype
    if adapter and not weights.merge:
        _export_adapter(model, built, groups, small, folder, dtype)
        return
    writes = groups.coords["dp"] == groups.coords["tp"] == groups.coords["sp"] == 0
    gather = partial(_joined, built=built, groups=groups)
    tensors = (
        merged(model, gather, dtype, writes)
        if adapter
        else whole_parameters(model, built, groups, dtype)
    )
    staging = folder.with_name(f".{folder.name}.tmp")
    rank0, disk = dist.get_rank() == 0, Disk(staging)
    if rank0:
        disk.do(make_empty, staging)
    dist.barrier()

    # Every rank takes part in gathering each tensor; only some write.
    parts = _Parts(f"part-{groups.coords['pp']}", disk)
    for name, value in tensors:
        if writes:
            parts.add(name, value)
    if writes:
        # The tensors of a merged model hold its buffers.
        parts.finish({} if adapter else _buffers_of(built.models))
    disk.check()
    everyone: list[Any] = [None] * groups.mesh.world
    dist.all_gather_object(everyone, (parts.files, parts.total))

    def complete() -> None:
        name_files(
            [file for written, _ in everyone for file in written],
            sum(size for _, size in everyone),
            staging,
        )
        small.write(staging)
        if adapter:
            name_as_merged(model, staging)
        publish(staging, folder)

    if rank0:
        disk.do(complete)
    disk.check()


class _Parts:
    """The safetensors files of one rank, with at most SHARD_BYTES of parameters each.

    `files` lists (file, its tensors); `total` counts the bytes of the parameters.
    """

    def __init__(self, prefix: str, disk: "Disk"):
        self.prefix, self.disk = prefix, disk
        self.files: list[tuple[str, list[str]]] = []
        self.total = 0
        self._shard: dict[str, torch.Tensor] = {}
        self._size = 0

    def add(self, name: str, value: torch.Tensor) -> None:
        """Add a parameter; write the file before it if both together would be too large."""
        if self._size and self._size + value.nbytes > safetensors_files.SHARD_BYTES:
            self._write()
            self._shard, self._size = {}, 0
        self._shard[name] = value.contiguous()
        self._size += value.nbytes
        self.total += value.nbytes

    def finish(self, buffers: dict[str, torch.Tensor]) -> None:
        """Write the last file, with the buffers."""
        self._shard |= buffers
        self._write()

    def _write(self) -> None:
        file = f"{self.prefix}-{len(self.files)}"
        self.files.append((file, list(self._shard)))
        self.disk.do(write_file, self._shard, self.disk.staging / file)


def _buffers_of(models: list[PreTrainedModel]) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of this rank's stages, on the CPU, by published name."""
    parameters = {
        name for model in models for name, _ in model.named_parameters(remove_duplicate=False)
    }
    persistent = [name for model in models for name in model.state_dict() if name not in parameters]
    found: dict[str, torch.Tensor] = {}
    for name in persistent:
        held = (dict(model.named_buffers()).get(name) for model in models)
        buffer = next((buffer for buffer in held if buffer is not None), None)
        if buffer is not None:
            found[expert.own_name(models[0], name)] = buffer.cpu()
    return found


class Disk:
    """What a rank writes of an export.

    After its first error a rank writes nothing more, and still takes part in every collective.
    """

    def __init__(self, staging: Path):
        self.staging, self.error = staging, ""

    def do(self, write: Callable[..., object], *arguments: Any) -> None:
        """Call `write` and keep its error, if it is an error of the disk."""
        if self.error:
            return
        try:
            write(*arguments)
        except OSError as error:
            self.error = error.strerror or str(error)
        except SafetensorError as error:
            # safetensors 0.8 raises it for a full disk, with the text of the system in it.
            if "os error" not in str(error):
                raise
            self.error = str(error)

    def check(self) -> None:
        """Raise `Refusal` on every rank if a rank could not write (a collective).

        A later start of the same command may.
        """
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, self.error, group=waiting_group())
        if not (
            failures := [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
        ):
            return
        if dist.get_rank() == 0:
            shutil.rmtree(self.staging, ignore_errors=True)
        folder = self.staging.with_name(self.staging.name.removeprefix(".").removesuffix(".tmp"))
        fix = "the checkpoints are complete. Free space, then the same command writes the export"
        raise Refusal([Problem(f"export to {folder}", failures[0], fix)], START_AGAIN)


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def name_files(files: list[tuple[str, list[str]]], size: int, folder: Path) -> None:
    """Give the files of all ranks, (name, keys of its tensors), their published names; several
    files get an index.
    """
    names = (
        [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
        if len(files) > 1
        else ["model.safetensors"]
    )
    for (part, _), name in zip(files, names, strict=True):
        os.rename(folder / part, folder / name)
    if len(files) > 1:
        weight_map = {
            key: name for (_, keys), name in zip(files, names, strict=True) for key in keys
        }
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def save_small_files(built: Built, small: SmallFiles, folder: Path) -> None:
    """Write the files of an export except weights, and the adapter's config if there is an
    adapter.
    """
    model: Any = built.models[0]
    if hasattr(model, "peft_config"):
        next(iter(model.peft_config.values())).save_pretrained(folder)
    small.write(folder)


def write_file(tensors: dict[str, torch.Tensor], file: Path) -> None:
    write_with_umask(file, lambda path: save_file(tensors, path, metadata={"format": "pt"}))


def publish(staging: Path, folder: Path) -> None:
    """Replace the folder by the staged one, whose files are on the disk first.

    A card that somebody has edited stays.
    """
    if (card := folder / CARD).is_file() and not is_unchanged(card):
        shutil.copy2(card, staging / CARD)
    for path in [*staging.rglob("*"), staging]:
        fsync(path)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(staging, folder)
    fsync(folder.parent)


def _export_adapter(
    adapted: Any, built: Built, groups: Groups, small: SmallFiles, folder: Path, dtype: torch.dtype
) -> None:
    """Write the adapter as peft does: adapter_model.safetensors and adapter_config.json (a
    collective).
    """
    keys, rank0 = published_keys(adapted), dist.get_rank() == 0
    named, buffers = (
        dict(adapted.named_parameters(remove_duplicate=False)),
        dict(adapted.named_buffers()),
    )
    chosen = {id(named[name]): (name, named[name]) for name in keys.values() if name in named}
    gathered = zip(chosen, _joined(chosen.values(), dtype, built, groups), strict=True)
    values = {number: value for number, (_, value) in gathered if rank0}
    staging = folder.with_name(f".{folder.name}.tmp")

    def write() -> None:
        make_empty(staging)
        tensors = {
            key: (values[id(named[name])] if name in named else buffers[name].cpu()).clone()
            for key, name in keys.items()
        }
        write_file(tensors, staging / "adapter_model.safetensors")
        next(iter(adapted.peft_config.values())).save_pretrained(staging)
        small.write(staging, of_adapter=True)
        publish(staging, folder)

    disk = Disk(staging)
    if rank0:
        disk.do(write)
    disk.check()


def holds_adapter(export: Path) -> bool:
    """Return True if exported files are an adapter, which needs its base model."""
    return (export / ADAPTER).is_file()


def shards(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Collect tensors for files of at most SHARD_BYTES."""
    shard: dict[str, torch.Tensor] = {}
    for name, value in tensors:
        size = sum(own.nbytes for own in shard.values())
        if size and size + value.nbytes > safetensors_files.SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = value.contiguous()
    yield shard


def name_as_merged(model: Any, folder: Path, dtype: str = "") -> None:
    """Make the small files of an adapted model describe the merged one, with weights of `dtype` if
    that is stated.
    """
    (folder / ADAPTER).unlink(missing_ok=True)
    config = folder / "config.json"
    own = json.loads(config.read_text())
    changed = own | ({"tie_word_embeddings": False} if unties(model) else {})
    if dtype:
        changed = with_dtype(changed, dtype)
        changed |= {} if "torch_dtype" in changed else {"dtype": dtype}
    if changed != own:
        config.write_text(json.dumps(changed, indent=2) + "\n")
