"""The safetensors format: where each tensor lies in a file, and files of a given content to be
filled in.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..spec.hub import POINTER_BYTES, check_pointer
from ..spec.refusal import Refusal, refuse

SIZES = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "U16": 2,
    "U32": 4,
    "U64": 8,
}
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# tensors that no model of whole weights has
QUANTISED = re.compile(
    r".*(\.(qweight|qzeros|absmax|SCB|weight_packed|weight_scale(_inv)?)|_blocks)"
)
# of weights, which are not read
OTHER_FILES = ("pytorch_model*.bin", "*.pth", "*.gguf", "tf_model.h5", "flax_model*.msgpack")
SHARD_BYTES = 4 * 1024**3  # of a file that we write, where the model's own files do not say
AGAIN = "download or copy it again"
NO_HEADER = "does not have a safetensors header"


@dataclass(frozen=True)
class Entry:
    file: str
    dtype: str  # as the format names it: F32, BF16, ...
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file


def read_header(folder: Path, file: str) -> dict[str, Entry]:
    """Reads which tensors a file holds.

    Raises `Refusal` for a header that does not describe the file exactly (huggingface/safetensors,
    format section).
    """
    path = folder / file
    size = path.stat().st_size
    begin, header = _header_of(path, size)
    try:
        entries = {
            key: Entry(
                file,
                facts["dtype"],
                tuple(facts["shape"]),
                begin + facts["data_offsets"][0],
            )
            for key, facts in header.items()
            if key != "__metadata__"
        }
        ends = sorted(
            (facts["data_offsets"][0], facts["data_offsets"][1], key)
            for key, facts in header.items()
            if key != "__metadata__"
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        raise refuse(str(path), NO_HEADER, AGAIN) from None

    position = 0
    for start, end, key in ends:
        _check_entry(path, key, entries[key], (start, end), position)
        position = end
    if begin + position != size:
        rule = f"has {size} bytes, but its header describes {begin + position}"
        raise refuse(str(path), rule, AGAIN)
    return entries


def _header_of(path: Path, size: int) -> tuple[int, Any]:
    """Return the first byte of the tensors in a file, and the JSON before it.

    Raises `Refusal` for a file that begins with something else, such as a pointer of Git LFS.
    """
    with path.open("rb") as stream:
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        if size < POINTER_BYTES:
            check_pointer(path, first + stream.read())
            stream.seek(8)
        if size < 8 or length > min(size - 8, 100_000_000):
            rule = f"is not a safetensors file: a header of {length} bytes in a file of {size}"
            raise refuse(str(path), rule, AGAIN)
        try:
            return 8 + length, json.loads(stream.read(length))
        except ValueError:
            raise refuse(str(path), NO_HEADER, AGAIN) from None


def _check_entry(
    path: Path, key: str, entry: Entry, offsets: tuple[int, int], position: int
) -> None:
    """Raise `Refusal` for a tensor that cannot be trained, or that does not lie at `position`.

    `offsets` are the bytes that the header states.
    """
    if entry.dtype not in SIZES or QUANTISED.fullmatch(key):
        rule = (
            f"is {entry.dtype} of a quantised model"
            if QUANTISED.fullmatch(key)
            else f"is {entry.dtype}, which cannot be trained"
        )
        raise refuse(f"{path}: {key}", rule, "use the unquantised model")
    begin, end = offsets
    size = SIZES[entry.dtype] * _numel(entry.shape)
    if begin != position or end - begin != size:
        rule = (
            f"is stored at bytes {begin} to {end}, but must start at {position} and have"
            f" {size} bytes"
        )
        raise refuse(f"{path}: {key}", rule, AGAIN)


def open_folder(folder: Path) -> dict[str, Entry]:
    """Finds every tensor of a model's files, those that transformers would load.

    Raises `Refusal` for files that are missing, cut off, quantised or of another kind, and for an
    index that names a file which is not there or lies outside the folder.
    """
    weight_map: dict[str, str] = {}
    if (folder / INDEX).is_file() and not (folder / WHOLE).is_file():
        weight_map = _read_index(folder)
        names = sorted(set(weight_map.values()))
    else:
        found_names = sorted(path.name for path in folder.glob("*.safetensors"))
        names = [WHOLE] if WHOLE in found_names else found_names
    if not names:
        raise _no_files(folder)
    _check_parts(folder, names)

    found: dict[str, Entry] = {}
    for name in names:
        for key, entry in read_header(folder, name).items():
            if key in found or weight_map.get(key, name) != name:
                rule = "is in two files, or is not in the file that the index names"
                raise refuse(f"{folder / name}: {key}", rule, AGAIN)
            found[key] = entry
    if missing := sorted(set(weight_map) - set(found)):
        count = len(missing)
        rule = f"lacks {count} of the tensors that its index names, first {missing[0]}"
        raise refuse(str(folder), rule, AGAIN)
    return found


def _read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, as the index names it.

    Raises `Refusal` for an index that cannot be read, and for files outside the folder or missing.
    """
    try:
        weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise refuse(str(folder / INDEX), "is not an index of safetensors files", AGAIN) from None
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            rule = f"names {name!r}, which is not a file of this folder"
            raise refuse(str(folder / INDEX), rule, "do not use files from this source")
        if not (folder / name).is_file():
            raise refuse(str(folder / name), "is missing, but the index names it", AGAIN)
    return weight_map


def _no_files(folder: Path) -> Refusal:
    """Return the refusal of a folder without weights of this format."""
    others = sorted(path.name for pattern in OTHER_FILES for path in folder.glob(pattern))
    rule = (
        f"contains {others[0]}, which is not supported, but no .safetensors file"
        if others
        else "contains no .safetensors file"
    )
    return refuse(
        str(folder),
        rule,
        "download its .safetensors files, or load the model once with transformers and save it"
        " with save_pretrained",
    )


def _check_parts(folder: Path, names: list[str]) -> None:
    """Raise `Refusal` if one of the files model-00001-of-00003.safetensors, ... is missing."""
    parts = {
        (int(part[1]), int(part[2]))
        for name in names
        if (part := re.fullmatch(r".*-(\d{5})-of-(\d{5})\.safetensors", name))
    }
    count = max((of for _, of in parts), default=0)
    if missing := sorted(set(range(1, count + 1)) - {number for number, _ in parts}):
        rule = f"lacks part {missing[0]} of {count} of its .safetensors files"
        raise refuse(str(folder), rule, AGAIN)


def create(
    folder: Path, file: str, tensors: dict[str, tuple[str, tuple[int, ...]]]
) -> dict[str, Entry]:
    """Makes a file with the tensors {key: (dtype, shape)}, all zeros; returns where each tensor
    lies.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    # aligned, as the library orders them
    for key, (dtype, shape) in sorted(
        tensors.items(), key=lambda item: (-SIZES[item[1][0]], item[0])
    ):
        size = SIZES[dtype] * _numel(shape)
        header[key] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (folder / file).open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        os.truncate(stream.fileno(), 8 + len(text) + position)
    return read_header(folder, file)


def write_index(folder: Path, files: dict[str, dict[str, Entry]]) -> None:
    total = sum(
        SIZES[entry.dtype] * _numel(entry.shape)
        for entries in files.values()
        for entry in entries.values()
    )
    weight_map = {key: file for file, entries in files.items() for key in entries}
    (folder / INDEX).write_text(
        json.dumps(
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
            indent=2,
        )
        + "\n"
    )


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for dim in shape:
        numel *= dim
    return numel
