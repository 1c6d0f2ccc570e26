"""A model's published files: where its parameters are stored, and how a rank reads its slices.

The slices follow tensor and pipeline parallelism. Under ZeRO-3, every rank reads full tensors,
which are partitioned later.
"""

import hashlib
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from ..architectures import safetensors_files
from ..architectures.headers import shape_mismatch_error
from ..architectures.lookup import read_config, with_labels
from ..architectures.small_files import CARD_FILE, SUFFIXES
from ..parallel import tensor
from ..parallel.blueprint import PublishedTensor
from ..parallel.tensor import ShardSpec
from ..spec.errors import ConfigError, Problem, config_error
from ..spec.hub import ask_for_model
from .file_keys import (
    find_stored,
    foreign_affix,
    refuse_affix,
    tied_names,
    untied_names,
    unused_keys,
)

# Parameters of a classification head, by their names in transformers.
CLASS_HEAD = re.compile(r"(\w*classifier|score|head)\.")
FINGERPRINT_VALUES = 4096  # values in a tensor's first and last row that its fingerprint covers
MAX_LISTED_KEYS = 3  # maximum number of unused keys that a line lists
# Files of a model on the Hub. Exports contain the small files, and the licence in an export's card
# comes from the model's card.
DOWNLOAD_PATTERNS = ["*.safetensors", *(f"*{suffix}" for suffix in SUFFIXES), CARD_FILE]
COMPARE_BLOCK_VALUES = 1 << 22  # number of value pairs compared at a time


class Weights:
    """A model's memory-mapped safetensors files.

    `bytes_read` is the number of bytes that `local_shard` has read. `sampled` contains the new
    head's parameters, which are not read. `note` is the line for the user about unused keys.
    `not_finite` lists the tensors that `check_finite` has rejected.
    """

    def __init__(self, files: list[Path], name: str = ""):
        self.name = name
        handles = [safe_open(file, framework="pt") for file in files]
        self.where = {key: handle for handle in handles for key in handle.keys()}  # noqa: SIM118 (a safetensors handle is no dict)
        self.files = {
            file.name: list(handle.keys()) for file, handle in zip(files, handles, strict=True)
        }
        self.stored: dict[str, PublishedTensor] = {}  # by parameter name
        self.sampled: set[str] = set()
        self.bytes_read = 0
        self.copies: dict[str, str] = {}  # missing key -> key that is read instead
        self.note = ""
        self.not_finite: list[Problem] = []

    def shape(self, name: str) -> list[int]:
        return self.shape_of(self.stored[name])

    def shape_of(self, stored: PublishedTensor) -> list[int]:
        shapes = [self._slice(keys[0]).get_shape() for keys in stored.parts]
        if not stored.stacked:
            return shapes[0]
        whole = [len(stored.parts[0]), *shapes[0]]
        if len(shapes) > 1:
            whole[stored.dim] = sum(shape[stored.dim - 1] for shape in shapes)
        return whole

    def full_tensor(self, name: str) -> torch.Tensor:
        """Return the full tensor in the files' dtype.

        The result is a view of the mapped file if the tensor is stored under one key.
        """
        return self._take(name, None, [])

    def fingerprint(self) -> str:
        """Return a hash of each tensor's name, shape and dtype, and of its first and last values.

        Weights that differ in these have different fingerprints. The number of files has no effect.
        """
        digest = hashlib.blake2b(digest_size=16)
        for key in sorted(self.where):
            tensor = self._slice(key)
            shape = tensor.get_shape()
            digest.update(f"{key} {shape} {tensor.get_dtype()} ".encode())
            for end in (slice(0, 1), slice(max(shape[0] - 1, 0), shape[0])) if shape else ():
                digest.update(
                    tensor[end]
                    .contiguous()
                    .flatten()[:FINGERPRINT_VALUES]
                    .view(torch.uint8)
                    .numpy()
                    .tobytes()
                )
        return digest.hexdigest()

    def contents(self) -> dict[str, dict[str, str]]:
        """Return the keys in each file with their dtypes, as safetensors names them.

        A copy is listed under the file that contains its original.
        """
        listed = {
            file: [*keys, *(key for key, held in self.copies.items() if held in keys)]
            for file, keys in self.files.items()
        }
        return {
            file: {key: self._slice(key).get_dtype() for key in keys}
            for file, keys in listed.items()
        }

    def local_shard(self, name: str, cut: ShardSpec | None, tp_mesh: Any) -> torch.Tensor:
        """Return a tensor-parallel rank's shard. Only the shard's bytes are read from the files.

        ZeRO-3 partitions the shard later.
        """
        sharded = cut is not None and cut.sharded
        value = (
            self._take(name, *tensor.local_shard_ranges(cut, tp_mesh))
            if sharded and cut
            else self.full_tensor(name)
        )
        self.bytes_read += value.nbytes
        return value

    def _take(self, name: str, dim: int | None, runs: list[tuple[int, int]]) -> torch.Tensor:
        """Return the indices `runs` along dimension `dim`, or the full tensor if `dim` is None."""
        stored = self.stored[name]
        if not stored.stacked:
            return self._read(stored.parts[0][0], dim, runs)
        pieces, begin = [], 0
        for keys in stored.parts:
            experts = (
                [number for start, stop in runs for number in range(start, stop)]
                if dim == 0
                else range(len(keys))
            )
            inner, size = runs, self._slice(keys[0]).get_shape()[max(stored.dim - 1, 0)]
            if dim == stored.dim and dim:
                clipped = [
                    (max(start, begin) - begin, min(stop, begin + size) - begin)
                    for start, stop in runs
                ]
                inner = [(start, stop) for start, stop in clipped if start < stop]
            pieces.append(
                torch.stack(
                    [
                        self._read(keys[number], dim - 1 if dim else None, inner)
                        for number in experts
                    ]
                )
            )
            begin += size
        return torch.cat(pieces, stored.dim) if len(pieces) > 1 else pieces[0]

    def _read(self, key: str, dim: int | None, runs: list[tuple[int, int]]) -> torch.Tensor:
        if dim is None:
            held = self.copies.get(key, key)
            return self.where[held].get_tensor(held)
        pieces = [
            self._slice(key)[(*[slice(None)] * dim, slice(start, stop))] for start, stop in runs
        ]
        return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]

    def _slice(self, key: str) -> Any:
        held = self.copies.get(key, key)
        return self.where[held].get_slice(held)

    def same_values(self, first: PublishedTensor, second: PublishedTensor) -> bool:
        """Return True if two tensors of the same shape have equal values.

        The tensors are compared block by block up to the first difference.
        """
        one, other = self._slice(first.parts[0][0]), self._slice(second.parts[0][0])
        shape = one.get_shape()
        rows = max(1, COMPARE_BLOCK_VALUES // max(1, math.prod(shape[1:])))
        for start in range(0, shape[0], rows):
            pair = one[start : start + rows], other[start : start + rows]
            dtype = torch.promote_types(pair[0].dtype, pair[1].dtype)
            if not torch.equal(pair[0].to(dtype), pair[1].to(dtype)):
                return False
        return True

    def check_finite(self, name: str, value: torch.Tensor, filled: torch.Tensor) -> None:
        """Record a problem for a parameter with a NaN or infinite value.

        The value may come from the files, or it may arise in the training dtype (`filled`).
        """
        if (
            not filled.numel()
            or not filled.is_floating_point()
            or all(end.isfinite() for end in torch.aminmax(filled.detach()))
        ):
            return
        low, high = torch.aminmax(value)
        found = (
            "a NaN" if low.isnan() else "an infinite value" if low.isinf() or high.isinf() else ""
        )
        if found:
            fix = "use files that were saved before the run diverged or the values were cast"
            self.not_finite.append(
                Problem(f"model = {self.name}", f"{name} contains {found} in its files", fix)
            )
        else:
            largest, dtype = max(-low, high).item(), str(filled.dtype).removeprefix("torch.")
            rule = f"{name} holds {largest:.3g} in its files, which is infinite in {dtype}"
            self.not_finite.append(
                Problem(f"model = {self.name}", rule, "use a strategy in bf16 or fp32")
            )


def open_weights(
    name: str, model: PreTrainedModel, new_head: bool = False, revision: str = ""
) -> Weights:
    """Open the weights of a model (a Hub id at a revision, or a folder) and find its parameters.

    With `new_head`, parameters outside the base model are sampled if they are missing or have a
    different shape. Otherwise only parameters that transformers allows to be missing are sampled.
    Raise a `ConfigError` that lists the missing parameters.
    """
    folder = weights_folder(name, revision)
    weights = open_files(name, folder)
    persistent, keys = model.state_dict(), list(weights.where)
    buffers = [key for key, _ in model.named_buffers() if key in persistent]
    wanted = [*dict(model.named_parameters()), *buffers]
    found = _find_all(model, weights, folder)
    weights.stored = {key: found[key] for key in wanted if key in found}

    # Find tensors with a different shape, missing tensors, and the new head's tensors among both.
    wrong = _mismatched_shapes(model, weights, found, wanted)
    missing = [key for key in wanted if key not in found]
    head = {key for key in (*wrong, *missing) if CLASS_HEAD.match(key)}
    weights.sampled |= head if new_head else set()
    weights.sampled |= _optional_missing(model, missing)

    labels = _hint_of_labels(model, head, {*wrong, *missing})
    if missing := [key for key in missing if key not in weights.sampled]:
        if affix := foreign_affix(model, keys, wanted):
            raise refuse_affix(model, keys, affix)
        raise _incomplete(name, missing, len(wanted), labels)
    if wrong := [key for key in wrong if key not in weights.sampled]:
        held, due = weights.shape_of(found[wrong[0]]), list(persistent[wrong[0]].shape)
        raise shape_mismatch_error(name, wrong[0], held, due, labels)

    weights.note = _note_of_unused(model, weights, found)
    return weights


def _incomplete(name: str, missing: list[str], wanted: int, labels: str) -> ConfigError:
    rule = f"its files lack {len(missing)} of {wanted} parameters, first {missing[0]}"
    fix = f"give the files that match this config.json and transformers version{labels}"
    return config_error(f"model = {name}", rule, fix)


def _find_all(model: PreTrainedModel, weights: Weights, folder: Path) -> dict[str, PublishedTensor]:
    """Return the stored tensors for a model's parameters and buffers.

    The search includes the names of tied parameters and of parameters that this model unties.
    """
    found = find_stored(model, list(weights.where))
    for alias, first in tied_names(model).items():
        if alias in found and first not in found:  # transformers ties either name to the other
            found[first] = found[alias]
    for target, source in untied_names(model, folder / "config.json").items():
        if source in found and target not in found:
            found[target], weights.copies[target] = (
                PublishedTensor(((target,),)),
                found[source].parts[0][0],
            )
    return found


def _mismatched_shapes(
    model: PreTrainedModel, weights: Weights, found: dict[str, PublishedTensor], wanted: list[str]
) -> list[str]:
    """Return the tensors whose shape in the files differs from their shape in the model."""
    persistent = model.state_dict()
    return [
        key
        for key in (*wanted, *tied_names(model))
        if key in found and weights.shape_of(found[key]) != list(persistent[key].shape)
    ]


def _hint_of_labels(model: PreTrainedModel, head: set[str], unusable: set[str]) -> str:
    """Return the end of a fix if the files lack only a classification head, or ""."""
    if not head or not head.issuperset(unusable) or model.get_output_embeddings() is not None:
        return ""
    return ". --num_labels N randomly initialises a new head for N classes"


def _optional_missing(model: PreTrainedModel, missing: list[str]) -> set[str]:
    """Return the missing parameters that transformers itself allows to be missing."""
    allowed = model._keys_to_ignore_on_load_missing or ()
    return {key for key in missing if any(re.search(pattern, key) for pattern in allowed)}


def _note_of_unused(
    model: PreTrainedModel, weights: Weights, found: dict[str, PublishedTensor]
) -> str:
    """Return the line about unused keys in the files, or "" if all keys are used."""
    unused = unused_keys(
        model,
        list(weights.where),
        found,
        weights.sampled,
        lambda key: weights.shape_of(PublishedTensor(((key,),))),
    )
    if not unused:
        return ""
    listed = ", ".join(unused[:MAX_LISTED_KEYS]) + (
        ", ..." if len(unused) > MAX_LISTED_KEYS else ""
    )
    count = (
        f"{len(unused)} tensors of its files are" if len(unused) > 1 else "1 tensor of its files is"
    )
    return f"model = {weights.name}: {count} not used: {listed}"


def open_files(name: str, folder: Path) -> Weights:
    """Open the files in a folder that transformers would load."""
    return Weights(
        [
            folder / file
            for file in sorted(
                {entry.file for entry in safetensors_files.tensor_entries(folder).values()}
            )
        ],
        name,
    )


def weights_folder(name: str, revision: str = "") -> Path:
    """Return the folder that contains a model's safetensors and small files.

    A Hub model is downloaded once per host. `revision` is a branch, tag or commit, or "" for main.
    Raise `ConfigError` if the files are not available.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    def fetch(away: bool) -> str:
        return snapshot_download(
            name, revision=revision or None, allow_patterns=DOWNLOAD_PATTERNS, local_files_only=away
        )

    return Path(ask_for_model(name, revision, fetch))


def fetch_config(
    name: str,
    task: str = "pretrain",
    num_labels: int = 0,
    classes: list[str] | None = None,
    revision: str = "",
) -> dict[str, Any]:
    """Download a model that is neither shipped nor local, and return its config.json.

    If `num_labels` is not 0, replace the labels in the config. Raise `ConfigError` if the model is
    not available.
    """
    return with_labels(
        read_config(weights_folder(name, revision) / "config.json", name, task), num_labels, classes
    )


def published_names(
    model_config: dict[str, Any], name: str, task: str, revision: str = ""
) -> dict[str, Any]:
    """Return a shipped config with the downloaded model's class names.

    This is needed because shipped configs contain no class names.
    """
    own = read_config(weights_folder(name, revision) / "config.json", name, task)
    if "id2label" in model_config or len(own.get("id2label") or {}) != model_config.get(
        "num_labels"
    ):
        return model_config
    return {key: value for key, value in model_config.items() if key != "num_labels"} | {
        key: own[key] for key in ("id2label", "label2id") if key in own
    }
