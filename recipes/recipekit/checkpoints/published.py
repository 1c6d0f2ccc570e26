"""Assigns tensors to the files of a Hugging Face folder."""

from dataclasses import replace
from math import prod

from ..architectures import safetensors_files
from ..parallel.blueprint import Blueprint, Stored
from ..refusal import refuse
from .step_folder import Step
from .tensor_files import TORCH

NAMES = {value: key for key, value in TORCH.items()}


def published_as(step: Step, dtype: str | None) -> tuple[Blueprint, dict[str, dict[str, str]]]:
    """Returns (the blueprint with the keys to write, file -> {key: dtype}) for a checkpoint's Hugging Face files."""
    blueprint = step.blueprint
    wanted = NAMES.get(dtype or step.state["export_dtype"], "")
    if not wanted:
        raise refuse(f"dtype = {dtype}", "is no dtype of weights", "use --dtype bfloat16, float16 or float32")
    if blueprint.files:
        known = shapes_of(blueprint)
        contents = {
            file: {key: wanted if dtype and own in ("F64", "F32", "BF16", "F16") else own for key, own in keys.items() if key in known}
            for file, keys in blueprint.files.items()
        }
        return blueprint, {file: keys for file, keys in contents.items() if keys}
    adapter = [tensor for tensor in blueprint.tensors if "lora_" in tensor.name]
    chosen = adapter or [tensor for tensor in blueprint.tensors]
    keys = {tensor.name: tensor.name.replace(".default", "") if adapter else tensor.name for tensor in chosen}
    named = {tensor.name: NAMES[tensor.buffer] if tensor.buffer else wanted for tensor in chosen}
    files: list[dict[str, str]] = [{}]
    size = 0
    for tensor in chosen:
        nbytes = tensor.numel * safetensors_files.SIZES[named[tensor.name]]
        if size and size + nbytes > safetensors_files.SHARD_BYTES:
            files.append({})
            size = 0
        files[-1][keys[tensor.name]] = named[tensor.name]
        size += nbytes
    single = "adapter_model.safetensors" if adapter else "model.safetensors"
    names = [single] if len(files) == 1 else [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    published = {name: Stored(((key,),)) for name, key in keys.items()}
    return replace(blueprint, tensors=tuple(chosen), published=published), dict(zip(names, files, strict=True))


def extra_keys(blueprint: Blueprint) -> list[str]:
    """List the tensors of the model's own files that the model does not have, such as rotary frequencies or attention masks."""
    known = shapes_of(blueprint)
    return sorted(key for keys in blueprint.files.values() for key in keys if key not in known)


def published_bytes(blueprint: Blueprint, contents: dict[str, dict[str, str]]) -> int:
    shapes = shapes_of(blueprint)
    return sum(prod(shapes[key]) * safetensors_files.SIZES[own] for keys in contents.values() for key, own in keys.items())


def shapes_of(blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each key in the model's files."""
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
