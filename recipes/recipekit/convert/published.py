"""Assigns tensors to the files of a Hugging Face folder."""

from dataclasses import replace
from math import prod

from ..architectures import safetensors_files
from ..checkpoints.step_folder import Step
from ..parallel.blueprint import Blueprint, Stored
from ..spec.refusal import refuse
from ..storage.tensor_files import TORCH

NAMES = {value: key for key, value in TORCH.items()}


def published_as(step: Step, dtype: str | None) -> tuple[Blueprint, dict[str, dict[str, str]]]:
    """Return (the blueprint with the keys to write, file -> {key: dtype}) for a checkpoint's
    Hugging Face files.
    """
    blueprint = step.blueprint
    wanted = NAMES.get(dtype or step.state["export_dtype"], "")
    if not wanted:
        raise refuse(
            f"dtype = {dtype}",
            "is not a supported dtype",
            "use --dtype bfloat16, float16 or float32",
        )
    if blueprint.files:
        return blueprint, _own_files(blueprint, wanted if dtype else "")

    return _new_files(blueprint, wanted)


def _new_files(
    blueprint: Blueprint, float_dtype: str
) -> tuple[Blueprint, dict[str, dict[str, str]]]:
    """Assign tensors to files of at most SHARD_BYTES, for a model that was not read from files.

    Of a LoRA run only the adapter is written, in one file.
    """
    adapter = blueprint.adapter or _keys_of_lora(blueprint)
    keys = {name: key for key, name in reversed(adapter.items())}
    if not adapter:
        keys = {tensor.name: tensor.name for tensor in blueprint.tensors}
    tensors = tuple(tensor for tensor in blueprint.tensors if tensor.name in keys)
    # tied modules
    further = {key: (name, "every") for key, name in adapter.items() if keys[name] != key}

    files: list[dict[str, str]] = [{}]
    size = 0
    for tensor in tensors:
        own = NAMES[tensor.buffer] if tensor.buffer else float_dtype
        nbytes = tensor.numel * safetensors_files.SIZES[own]
        # peft reads one file
        if size and size + nbytes > safetensors_files.SHARD_BYTES and not adapter:
            files.append({})
            size = 0
        files[-1][keys[tensor.name]] = own
        files[-1] |= {key: own for key, (name, _) in further.items() if name == tensor.name}
        size += nbytes

    names = _file_names(len(files), is_adapter=bool(adapter))
    blueprint = replace(
        blueprint,
        tensors=tensors,
        published={name: Stored(((key,),)) for name, key in keys.items()},
        # a tied weight of the base model is frozen, and not in the adapter's files
        aliases=further if adapter else blueprint.aliases,
    )
    return blueprint, dict(zip(names, files, strict=True))


def _own_files(blueprint: Blueprint, float_dtype: str) -> dict[str, dict[str, str]]:
    """Return file -> {key: dtype} as in the model's own files, without the keys and the files that
    the model does not have.

    `float_dtype` replaces the dtypes of floating-point tensors unless it is "".
    """
    known = shapes_of(blueprint)
    contents = {
        file: {
            key: float_dtype if float_dtype and own in ("F64", "F32", "BF16", "F16") else own
            for key, own in keys.items()
            if key in known
        }
        for file, keys in blueprint.files.items()
    }
    return {file: keys for file, keys in contents.items() if keys}


def _file_names(count: int, is_adapter: bool) -> list[str]:
    """List the names that transformers and peft give to `count` files of a model."""
    if count == 1:
        return ["adapter_model.safetensors" if is_adapter else "model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _keys_of_lora(blueprint: Blueprint) -> dict[str, str]:
    """Return the keys of a LoRA run whose step folder is older than `Blueprint.adapter`; {} for
    other runs.

    They name every trained tensor as in peft 0.21.2. The adapter was always called default.
    """
    if not any("lora_" in tensor.name for tensor in blueprint.tensors):
        return {}
    names = [
        tensor.name
        for tensor in blueprint.tensors
        if tensor.group is not None or "lora_" in tensor.name
    ]
    return {_key_of_lora(name): name for name in names}


def _key_of_lora(name: str) -> str:
    name = name.replace(".modules_to_save.default.", ".").removesuffix(".default")
    if name.endswith("lora_magnitude_vector.default.weight"):
        return name.removesuffix(".default.weight")
    return name.replace(".default.", ".")


def extra_keys(blueprint: Blueprint) -> list[str]:
    """List the tensors in the model's own files that the model does not have.

    Examples are rotary frequencies and attention masks.
    """
    known = shapes_of(blueprint)
    return sorted(key for keys in blueprint.files.values() for key in keys if key not in known)


def published_bytes(blueprint: Blueprint, contents: dict[str, dict[str, str]]) -> int:
    shapes = shapes_of(blueprint)
    return sum(
        prod(shapes[key]) * safetensors_files.SIZES[own]
        for keys in contents.values()
        for key, own in keys.items()
    )


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
                    shape = tuple(
                        size // len(stored.parts) if dim == stored.dim - 1 else size
                        for dim, size in enumerate(shape)
                    )
                shapes[key] = shape
    for alias, (name, _) in blueprint.aliases.items():
        shapes.setdefault(
            alias, next(tensor.shape for tensor in blueprint.tensors if tensor.name == name)
        )
    return shapes
