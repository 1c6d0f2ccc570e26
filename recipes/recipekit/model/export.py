"""The trained model as Hugging Face files, written from a live engine in any layout."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from ..architectures import safetensors_files
from ..engine import Engine
from ..parallel import expert, tensor
from ..parallel.groups import Groups
from ..paths import write_with_umask
from .adapter import merged, published_keys, unties
from .build import Built
from .small_files import SmallFiles


def whole_parameters(model: nn.Module, built: Built, groups: Groups, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, whole tensor on the CPU) of every parameter of this rank's stages, one at a time, on every rank (a collective).

    Names and tensors are the Hugging Face model's, whatever a layout made of them. Where the training dtype is smaller than
    `dtype`, the optimizer's fp32 master weights are given.
    """
    return expert.published(model, _joined(model.named_parameters(), dtype, built=built, groups=groups))


def _joined(parameters: Iterable[tuple[str, nn.Parameter]], dtype: torch.dtype, built: Built, groups: Groups) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parameters:
        if getattr(parameter, "ds_pipe_replicated", False):
            continue  # an earlier stage has it too
        master = None
        kept = hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")  # the marks of ZeRO-3, and of ZeRO-1 and -2
        if kept and parameter.requires_grad and dtype == torch.float32 and parameter.dtype != dtype:
            master = safe_get_full_fp32_param(parameter)
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            value = (parameter if master is None else master).detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value  # of FSDP2
            cut = built.cuts.get(built.names.get(id(parameter), ""))
            if cut is not None:
                assert groups.tp_mesh is not None
                value = tensor.join(value.to(parameter.device).view_as(parameter), cut, groups.tp_mesh)
            value = expert.whole(parameter, value.to(parameter.device)).to("cpu", dtype, copy=True)
        yield name, value


def export(engine: Engine, built: Built, groups: Groups, small: SmallFiles, folder: Path, dtype: torch.dtype, merge: bool) -> None:
    """Write safetensors and the small files into `folder`, complete or not at all (a collective).

    The first rank of each pipeline stage writes its files.

    A LoRA model writes its adapter, or the merged weights with `merge`. Tensors that transformers ties are written once.
    """
    model: Any = engine.module  # maybe wrapped by an adapter
    adapter = hasattr(model, "peft_config")
    if adapter and not merge:
        _export_adapter(model, built, groups, small, folder, dtype)
        return
    writes = groups.coords["dp"] == groups.coords["tp"] == groups.coords["sp"] == 0
    gather = partial(_joined, built=built, groups=groups)
    tensors = merged(model, gather, dtype, writes) if adapter else whole_parameters(model, built, groups, dtype)
    models = [] if adapter else built.models  # the merged tensors hold their buffers
    staging = folder.with_name(f".{folder.name}.tmp")
    rank0 = dist.get_rank() == 0
    if rank0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    dist.barrier()
    shard: dict[str, torch.Tensor] = {}
    files: list[tuple[str, list[str]]] = []  # (file, its tensors)
    total = size = 0
    for name, value in tensors:
        if not writes:
            continue
        if size and size + value.nbytes > safetensors_files.SHARD_BYTES:
            files.append(_write(shard, staging, groups.coords["pp"], len(files)))
            shard, size = {}, 0
        shard[name] = value.contiguous()
        size += value.nbytes
        total += value.nbytes
    if writes:
        parameters = {name for model in models for name, _ in model.named_parameters(remove_duplicate=False)}
        for name in [name for model in models for name in model.state_dict() if name not in parameters]:
            if (buffer := next((buffers[name] for model in models if name in (buffers := dict(model.named_buffers()))), None)) is not None:
                shard[expert.own_name(models[0], name)] = buffer.cpu()
        files.append(_write(shard, staging, groups.coords["pp"], len(files)))
    everyone: list[Any] = [None] * groups.mesh.world
    dist.all_gather_object(everyone, (files, total))
    if rank0:
        files = [file for written, _ in everyone for file in written]
        names = [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))] if len(files) > 1 else ["model.safetensors"]
        for (part, _), name in zip(files, names, strict=True):
            os.rename(staging / part, staging / name)
        if len(files) > 1:
            weight_map = {key: name for (_, keys), name in zip(files, names, strict=True) for key in keys}
            index = {"metadata": {"total_size": sum(size for _, size in everyone)}, "weight_map": weight_map}
            (staging / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        small.write(staging)
        if adapter:
            _name_as_merged(model, staging)
        _publish(staging, folder)
    dist.barrier()


def save_small_files(built: Built, small: SmallFiles, folder: Path) -> None:
    """Write the files of an export except weights, and the adapter's config if there is an adapter."""
    model: Any = built.models[0]
    if hasattr(model, "peft_config"):
        next(iter(model.peft_config.values())).save_pretrained(folder)
    small.write(folder)


def _write(shard: dict[str, torch.Tensor], staging: Path, stage: int, number: int) -> tuple[str, list[str]]:
    name = f"part-{stage}-{number}"
    write_file(shard, staging / name)
    return name, list(shard)


def write_file(tensors: dict[str, torch.Tensor], file: Path) -> None:
    write_with_umask(file, lambda path: save_file(tensors, path, metadata={"format": "pt"}))


def _publish(staging: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(staging, folder)


def _export_adapter(adapted: Any, built: Built, groups: Groups, small: SmallFiles, folder: Path, dtype: torch.dtype) -> None:
    """Write the adapter as peft does: adapter_model.safetensors and adapter_config.json (a collective)."""
    keys, rank0 = published_keys(adapted), dist.get_rank() == 0
    named, buffers = dict(adapted.named_parameters(remove_duplicate=False)), dict(adapted.named_buffers())
    chosen = {id(named[name]): (name, named[name]) for name in keys.values() if name in named}
    gathered = zip(chosen, _joined(chosen.values(), dtype, built, groups), strict=True)
    values = {number: value for number, (_, value) in gathered if rank0}

    if rank0:
        staging = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        tensors = {key: (values[id(named[name])] if name in named else buffers[name].cpu()).clone() for key, name in keys.items()}
        write_file(tensors, staging / "adapter_model.safetensors")
        next(iter(adapted.peft_config.values())).save_pretrained(staging)
        small.write(staging, of_adapter=True)
        _publish(staging, folder)
    dist.barrier()


def _name_as_merged(model: Any, folder: Path) -> None:
    """Make the small files of an adapted model describe the merged one."""
    (folder / "adapter_config.json").unlink(missing_ok=True)
    if unties(model):
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}, indent=2) + "\n")
