"""The safetensors format: where each tensor lies in a file, and files of a given content to be filled in."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from .refusal import refuse

SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "U16": 2, "U32": 4, "U64": 8}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    file: str
    dtype: str  # as the format names it: F32, BF16, ...
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file


def read_header(folder: Path, file: str) -> dict[str, Entry]:
    """The tensors of a file. Raises `Refusal` for a header that does not describe the file exactly (huggingface/safetensors, format section)."""
    path = folder / file
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, 100_000_000):
            raise refuse(str(path), f"is no safetensors file: a header of {length} bytes in a file of {size}", "copy the file again")
        try:
            header = json.loads(stream.read(length))
            entries = {
                key: Entry(file, facts["dtype"], tuple(facts["shape"]), 8 + length + facts["data_offsets"][0])
                for key, facts in header.items()
                if key != "__metadata__"
            }
            ends = sorted((facts["data_offsets"][0], facts["data_offsets"][1], key) for key, facts in header.items() if key != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise refuse(str(path), "has a header that is not one of safetensors", "copy the file again") from None
    position = 0
    for begin, end, key in ends:
        numel = SIZES.get(entries[key].dtype, 0)
        for dim in entries[key].shape:
            numel *= dim
        if begin != position or end - begin != numel:
            raise refuse(f"{path}: {key}", f"lies at {begin} to {end} where {position} and {numel} bytes are due", "copy the file again")
        position = end
    if 8 + length + position != size:
        raise refuse(str(path), f"has {size} bytes, its header describes {8 + length + position}", "copy the file again")
    return entries


def open_folder(folder: Path) -> dict[str, Entry]:
    """Every tensor of a model's files. Raises `Refusal` for an index that names what is not there, or leaves the folder."""
    if (folder / INDEX).is_file():
        try:
            weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise refuse(str(folder / INDEX), "is not an index of safetensors files", "copy it again") from None
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise refuse(str(folder / INDEX), f"names {name!r}, which is no file of this folder", "do not use files from this source")
            if not (folder / name).is_file():
                raise refuse(str(folder / name), "is missing, though the index names it", "copy it again")
    else:
        weight_map, names = {}, sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise refuse(str(folder), "holds no .safetensors file", "save the model with transformers' save_pretrained")
    found: dict[str, Entry] = {}
    for name in names:
        for key, entry in read_header(folder, name).items():
            if key in found or weight_map.get(key, name) != name:
                raise refuse(f"{folder / name}: {key}", "is in two files, or not in the one the index names", "copy the files again")
            found[key] = entry
    if missing := sorted(set(weight_map) - set(found)):
        raise refuse(str(folder), f"lacks {len(missing)} of the tensors that its index names, first {missing[0]}", "copy the files again")
    return found


def create(folder: Path, file: str, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, Entry]:
    """A file with the tensors {key: (dtype, shape)}, all zeros, and where each of them lies."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-SIZES[item[1][0]], item[0])):  # aligned, as the library orders them
        size = SIZES[dtype]
        for dim in shape:
            size *= dim
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (folder / file).open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        os.truncate(stream.fileno(), 8 + len(text) + position)
    return read_header(folder, file)


def write_index(folder: Path, files: dict[str, dict[str, Entry]]) -> None:
    total = sum(SIZES[entry.dtype] * _numel(entry.shape) for entries in files.values() for entry in entries.values())
    weight_map = {key: file for file, entries in files.items() for key in entries}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n")


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for dim in shape:
        numel *= dim
    return numel
