"""Export of the trained model as Hugging Face files, from a live engine in any layout."""

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
from ..architectures.small_files import ADAPTER_FILE, CARD_FILE, with_dtype
from ..parallel import expert, tensor
from ..parallel.groups import ProcessGroups, long_wait_group
from ..spec.atomic_write import fsync
from ..spec.engine import Engine
from ..spec.errors import START_AGAIN, ConfigError, Problem
from ..spec.paths import write_with_umask
from .adapter import merge_unties_head, merged_weights, published_keys
from .build import BuiltModel
from .card import is_unchanged
from .small_files import SmallFiles


def full_parameters(
    model: nn.Module, built: BuiltModel, groups: ProcessGroups, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor on the CPU) for every parameter of this rank's stages.

    Yield one parameter at a time. This is a collective operation: all ranks must iterate. In every
    layout, names and tensors equal those in the Hugging Face model. If the training dtype is
    smaller than `dtype`, the values are the optimizer's fp32 master weights.
    """
    return expert.restore_expert_layout(
        model, _gather_parameters(model.named_parameters(), dtype, built=built, groups=groups)
    )


def _gather_parameters(
    parameters: Iterable[tuple[str, nn.Parameter]],
    dtype: torch.dtype,
    built: BuiltModel,
    groups: ProcessGroups,
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parameters:
        if getattr(parameter, "ds_pipe_replicated", False):
            continue  # an earlier stage also contains this parameter
        master = None
        # ZeRO-3 sets the first attribute, ZeRO-1 and ZeRO-2 the second.
        kept = hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")
        if kept and parameter.requires_grad and dtype == torch.float32 and parameter.dtype != dtype:
            master = safe_get_full_fp32_param(parameter)
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            value = (parameter if master is None else master).detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value  # FSDP2
            cut = built.cuts.get(built.names.get(id(parameter), ""))
            if cut is not None:
                assert groups.tp_mesh is not None
                value = tensor.gather_full_tensor(
                    value.to(parameter.device).view_as(parameter), cut, groups.tp_mesh
                )
            value = expert.gather_experts(parameter, value.to(parameter.device)).to(
                "cpu", dtype, copy=True
            )
        yield name, value


@dataclass(frozen=True)
class WeightFormat:
    """The format of exported weights: their dtype, and whether an adapter is merged."""

    dtype: torch.dtype
    merge: bool = False


def export(
    engine: Engine,
    built: BuiltModel,
    groups: ProcessGroups,
    small: SmallFiles,
    folder: Path,
    weights: WeightFormat,
) -> None:
    """Write safetensors and the small files into `folder`, either completely or not at all.

    This is a collective operation. The first rank of each pipeline stage writes the stage's files.
    For a LoRA model, write the adapter, or the merged weights if `weights.merge` is True. Tensors
    that transformers ties are written once.
    """
    model: Any = engine.module  # an adapter may wrap the model
    adapter = hasattr(model, "peft_config")
    dtype = weights.dtype
    if adapter and not weights.merge:
        _export_adapter(model, built, groups, small, folder, dtype)
        return
    writes = groups.coords["dp"] == groups.coords["tp"] == groups.coords["sp"] == 0
    gather = partial(_gather_parameters, built=built, groups=groups)
    tensors = (
        merged_weights(model, gather, dtype, writes)
        if adapter
        else full_parameters(model, built, groups, dtype)
    )
    staging = folder.with_name(f".{folder.name}.tmp")
    rank0, disk = dist.get_rank() == 0, ExportDisk(staging)
    if rank0:
        disk.do(recreate_folder, staging)
    dist.barrier()

    # Every rank takes part in gathering each tensor, but only some ranks write files.
    parts = _ShardWriter(f"part-{groups.coords['pp']}", disk)
    for name, value in tensors:
        if writes:
            parts.add(name, value)
    if writes:
        # A merged model's tensors already include its buffers.
        parts.finish({} if adapter else _buffers_of(built.models))
    disk.check()
    everyone: list[Any] = [None] * groups.mesh.world
    dist.all_gather_object(everyone, (parts.files, parts.total))

    def complete() -> None:
        rename_shards(
            [file for written, _ in everyone for file in written],
            sum(size for _, size in everyone),
            staging,
        )
        small.write(staging)
        if adapter:
            describe_as_merged(model, staging)
        replace_folder(staging, folder)

    if rank0:
        disk.do(complete)
    disk.check()


class _ShardWriter:
    """One rank's safetensors files, each with at most SHARD_BYTES of parameters.

    `files` lists (file, names of its tensors). `total` is the parameters' size in bytes.
    """

    def __init__(self, prefix: str, disk: "ExportDisk"):
        self.prefix, self.disk = prefix, disk
        self.files: list[tuple[str, list[str]]] = []
        self.total = 0
        self._shard: dict[str, torch.Tensor] = {}
        self._size = 0

    def add(self, name: str, value: torch.Tensor) -> None:
        """Add a parameter, after writing the current file if it would become too large."""
        if self._size and self._size + value.nbytes > safetensors_files.SHARD_BYTES:
            self._write()
            self._shard, self._size = {}, 0
        self._shard[name] = value.contiguous()
        self._size += value.nbytes
        self.total += value.nbytes

    def finish(self, buffers: dict[str, torch.Tensor]) -> None:
        """Write the last file, which includes the buffers."""
        self._shard |= buffers
        self._write()

    def _write(self) -> None:
        file = f"{self.prefix}-{len(self.files)}"
        self.files.append((file, list(self._shard)))
        self.disk.do(write_safetensors, self._shard, self.disk.staging / file)


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
            found[expert.name_before_auto_ep(models[0], name)] = buffer.cpu()
    return found


class ExportDisk:
    """A rank's disk writes during an export.

    After its first error, a rank writes nothing more but still takes part in every collective
    operation.
    """

    def __init__(self, staging: Path):
        self.staging, self.error = staging, ""

    def do(self, write: Callable[..., object], *arguments: object) -> None:
        """Call `write`, and store the error if a disk error occurs."""
        if self.error:
            return
        try:
            write(*arguments)
        except OSError as error:
            self.error = error.strerror or str(error)
        except SafetensorError as error:
            # For a full disk, safetensors 0.8 raises SafetensorError with the system's text in the
            # message.
            if "os error" not in str(error):
                raise
            self.error = str(error)

    def check(self) -> None:
        """Raise `ConfigError` on every rank if any rank could not write (a collective operation).

        The exit code is START_AGAIN, because the same command may succeed if it is started again.
        """
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, self.error, group=long_wait_group())
        if not (
            failures := [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
        ):
            return
        if dist.get_rank() == 0:
            shutil.rmtree(self.staging, ignore_errors=True)
        folder = self.staging.with_name(self.staging.name.removeprefix(".").removesuffix(".tmp"))
        fix = "the checkpoints are complete. Free space, then the same command writes the export"
        raise ConfigError([Problem(f"export to {folder}", failures[0], fix)], START_AGAIN)


def recreate_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def rename_shards(files: list[tuple[str, list[str]]], size: int, folder: Path) -> None:
    """Rename all ranks' files to their published names.

    `files` lists (name, keys of its tensors). If there are several files, write an index.
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


def save_small_files(built: BuiltModel, small: SmallFiles, folder: Path) -> None:
    """Write an export's files except the weights, including an adapter's config."""
    model: Any = built.models[0]
    if hasattr(model, "peft_config"):
        next(iter(model.peft_config.values())).save_pretrained(folder)
    small.write(folder)


def write_safetensors(tensors: dict[str, torch.Tensor], file: Path) -> None:
    write_with_umask(file, lambda path: save_file(tensors, path, metadata={"format": "pt"}))


def replace_folder(staging: Path, folder: Path) -> None:
    """Replace the folder with the staged one, after flushing the staged files to disk.

    A model card that a user has edited is kept.
    """
    if (card := folder / CARD_FILE).is_file() and not is_unchanged(card):
        shutil.copy2(card, staging / CARD_FILE)
    for path in [*staging.rglob("*"), staging]:
        fsync(path)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(staging, folder)
    fsync(folder.parent)


def _export_adapter(
    model: PreTrainedModel,
    built: BuiltModel,
    groups: ProcessGroups,
    small: SmallFiles,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    """Write adapter_model.safetensors and adapter_config.json as peft does (a collective)."""
    keys, rank0 = published_keys(model), dist.get_rank() == 0
    named, buffers = (
        dict(model.named_parameters(remove_duplicate=False)),
        dict(model.named_buffers()),
    )
    chosen = {id(named[name]): (name, named[name]) for name in keys.values() if name in named}
    gathered = zip(chosen, _gather_parameters(chosen.values(), dtype, built, groups), strict=True)
    values = {number: value for number, (_, value) in gathered if rank0}
    staging = folder.with_name(f".{folder.name}.tmp")

    def write() -> None:
        recreate_folder(staging)
        tensors = {
            key: (values[id(named[name])] if name in named else buffers[name].cpu()).clone()
            for key, name in keys.items()
        }
        write_safetensors(tensors, staging / "adapter_model.safetensors")
        next(iter(model.peft_config.values())).save_pretrained(staging)
        small.write(staging, of_adapter=True)
        replace_folder(staging, folder)

    disk = ExportDisk(staging)
    if rank0:
        disk.do(write)
    disk.check()


def is_adapter_export(export: Path) -> bool:
    """Return True if the export is an adapter, which requires its base model."""
    return (export / ADAPTER_FILE).is_file()


def shards_by_size(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors in groups of at most SHARD_BYTES, one group per file."""
    shard: dict[str, torch.Tensor] = {}
    for name, value in tensors:
        size = sum(own.nbytes for own in shard.values())
        if size and size + value.nbytes > safetensors_files.SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = value.contiguous()
    yield shard


def describe_as_merged(model: PreTrainedModel, folder: Path, dtype: str = "") -> None:
    """Change an adapted model's small files to describe the merged model.

    If `dtype` is given, record it as the dtype of the weights.
    """
    (folder / ADAPTER_FILE).unlink(missing_ok=True)
    config = folder / "config.json"
    own = json.loads(config.read_text())
    changed = own | ({"tie_word_embeddings": False} if merge_unties_head(model) else {})
    if dtype:
        changed = with_dtype(changed, dtype)
        changed |= {} if "torch_dtype" in changed else {"dtype": dtype}
    if changed != own:
        config.write_text(json.dumps(changed, indent=2) + "\n")
