"""Assignment of tensors to the files of a Hugging Face folder."""

from dataclasses import replace
from math import prod

from ..architectures import safetensors_files
from ..checkpoints.step_folder import StepFolder
from ..parallel.blueprint import Blueprint, PublishedTensor
from ..spec.errors import config_error
from ..storage.tensor_files import TORCH_DTYPE_NAMES

SAFETENSORS_DTYPES = {value: key for key, value in TORCH_DTYPE_NAMES.items()}


def plan_published_files(
    step: StepFolder, dtype: str | None
) -> tuple[Blueprint, dict[str, dict[str, str]]]:
    """Plan the Hugging Face files of a checkpoint.

    Return (blueprint with the keys to write, file -> {key: dtype}).
    """
    blueprint = step.blueprint
    wanted = SAFETENSORS_DTYPES.get(dtype or step.state["export_dtype"], "")
    if not wanted:
        raise config_error(
            f"dtype = {dtype}",
            "is not a supported dtype",
            "use --dtype bfloat16, float16 or float32",
        )
    if blueprint.files:
        return blueprint, _original_files(blueprint, wanted if dtype else "")

    return _new_files(blueprint, wanted)


def _new_files(
    blueprint: Blueprint, float_dtype: str
) -> tuple[Blueprint, dict[str, dict[str, str]]]:
    """Assign tensors to files of at most SHARD_BYTES, for a model that was not read from files.

    For a LoRA run, only the adapter is written, and it is written to one file.
    """
    adapter = blueprint.adapter or _legacy_lora_keys(blueprint)
    keys = {name: key for key, name in reversed(adapter.items())}
    if not adapter:
        keys = {tensor.name: tensor.name for tensor in blueprint.tensors}
    tensors = tuple(tensor for tensor in blueprint.tensors if tensor.name in keys)
    # keys of tied modules
    further = {key: (name, "every") for key, name in adapter.items() if keys[name] != key}

    files: list[dict[str, str]] = [{}]
    size = 0
    for tensor in tensors:
        own = SAFETENSORS_DTYPES[tensor.buffer] if tensor.buffer else float_dtype
        nbytes = tensor.numel * safetensors_files.DTYPE_BYTES[own]
        # peft reads only one file
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
        published={name: PublishedTensor(((key,),)) for name, key in keys.items()},
        # a tied weight of the base model is frozen, so the adapter's files do not contain it
        aliases=further if adapter else blueprint.aliases,
    )
    return blueprint, dict(zip(names, files, strict=True))


def _original_files(blueprint: Blueprint, float_dtype: str) -> dict[str, dict[str, str]]:
    """Return file -> {key: dtype} as in the model's original files.

    Keys and files that the model does not use are excluded. `float_dtype` replaces the dtypes of
    floating-point tensors unless it is "".
    """
    known = published_shapes(blueprint)
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
    """Return the names that transformers and peft give to a model's `count` files."""
    if count == 1:
        return ["adapter_model.safetensors" if is_adapter else "model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _legacy_lora_keys(blueprint: Blueprint) -> dict[str, str]:
    """Return the keys of a LoRA run whose step folder predates `Blueprint.adapter`, or {}.

    The keys name every trained tensor as peft 0.21.2 does. In such folders, the adapter was always
    named default.
    """
    if not any("lora_" in tensor.name for tensor in blueprint.tensors):
        return {}
    names = [
        tensor.name
        for tensor in blueprint.tensors
        if tensor.group is not None or "lora_" in tensor.name
    ]
    return {_legacy_lora_key(name): name for name in names}


def _legacy_lora_key(name: str) -> str:
    name = name.replace(".modules_to_save.default.", ".").removesuffix(".default")
    if name.endswith("lora_magnitude_vector.default.weight"):
        return name.removesuffix(".default.weight")
    return name.replace(".default.", ".")


def unused_file_keys(blueprint: Blueprint) -> list[str]:
    """Return the tensors in the model's original files that the model does not use.

    Examples are rotary frequencies and attention masks.
    """
    known = published_shapes(blueprint)
    return sorted(key for keys in blueprint.files.values() for key in keys if key not in known)


def published_bytes(blueprint: Blueprint, contents: dict[str, dict[str, str]]) -> int:
    shapes = published_shapes(blueprint)
    return sum(
        prod(shapes[key]) * safetensors_files.DTYPE_BYTES[own]
        for keys in contents.values()
        for key, own in keys.items()
    )


def published_shapes(blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    """Return the shape of each key in the model's files."""
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
