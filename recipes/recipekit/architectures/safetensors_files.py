"""The safetensors format: reading the headers of files, and creating zero files to fill later."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..spec.errors import ConfigError, config_error
from ..spec.hub import MAX_POINTER_BYTES, check_lfs_pointer

DTYPE_BYTES = {
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
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# names of tensors that no unquantised model contains
QUANTISED = re.compile(
    r".*(\.(qweight|qzeros|absmax|SCB|weight_packed|weight_scale(_inv)?)|_blocks)"
)
# weight files of other formats, which are not read
OTHER_FILES = ("pytorch_model*.bin", "*.pth", "*.gguf", "tf_model.h5", "flax_model*.msgpack")
SHARD_BYTES = 4 * 1024**3  # size of a file that we write, if the model's own files do not set it
DOWNLOAD_AGAIN = "download or copy it again"
NO_HEADER = "does not have a safetensors header"


@dataclass(frozen=True)
class Entry:
    file: str
    dtype: str  # as the format names it: F32, BF16, ...
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file


def read_header(folder: Path, file: str) -> dict[str, Entry]:
    """Return a file's tensors by their keys.

    Raises `ConfigError` for a header that does not describe the file exactly
    (huggingface/safetensors, format section).
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
        raise config_error(str(path), NO_HEADER, DOWNLOAD_AGAIN) from None

    position = 0
    for start, end, key in ends:
        _check_entry(path, key, entries[key], (start, end), position)
        position = end
    if begin + position != size:
        rule = f"has {size} bytes, but its header describes {begin + position}"
        raise config_error(str(path), rule, DOWNLOAD_AGAIN)
    return entries


def _header_of(path: Path, size: int) -> tuple[int, Any]:
    """Return the offset of a file's first tensor byte, and the JSON before it.

    Raises `ConfigError` for a file that begins with something else, for example a Git LFS pointer.
    """
    with path.open("rb") as stream:
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        if size < MAX_POINTER_BYTES:
            check_lfs_pointer(path, first + stream.read())
            stream.seek(8)
        if size < 8 or length > min(size - 8, 100_000_000):
            rule = f"is not a safetensors file: a header of {length} bytes in a file of {size}"
            raise config_error(str(path), rule, DOWNLOAD_AGAIN)
        try:
            return 8 + length, json.loads(stream.read(length))
        except ValueError:
            raise config_error(str(path), NO_HEADER, DOWNLOAD_AGAIN) from None


def _check_entry(
    path: Path, key: str, entry: Entry, offsets: tuple[int, int], position: int
) -> None:
    """Raise `ConfigError` for a tensor that cannot be trained or does not start at `position`.

    `offsets` contains the byte offsets from the header.
    """
    if entry.dtype not in DTYPE_BYTES or QUANTISED.fullmatch(key):
        rule = (
            f"is {entry.dtype} of a quantised model"
            if QUANTISED.fullmatch(key)
            else f"is {entry.dtype}, which cannot be trained"
        )
        raise config_error(f"{path}: {key}", rule, "use the unquantised model")
    begin, end = offsets
    size = DTYPE_BYTES[entry.dtype] * _numel(entry.shape)
    if begin != position or end - begin != size:
        rule = (
            f"is stored at bytes {begin} to {end}, but must start at {position} and have"
            f" {size} bytes"
        )
        raise config_error(f"{path}: {key}", rule, DOWNLOAD_AGAIN)


def tensor_entries(folder: Path) -> dict[str, Entry]:
    """Return every tensor in a model's files that transformers would load.

    Raises `ConfigError` for files that are missing, truncated, quantised or of a different kind. It
    is also raised for an index that names a missing file or a file outside the folder.
    """
    weight_map: dict[str, str] = {}
    if (folder / INDEX_FILE).is_file() and not (folder / SINGLE_FILE).is_file():
        weight_map = _read_index(folder)
        names = sorted(set(weight_map.values()))
    else:
        found_names = sorted(path.name for path in folder.glob("*.safetensors"))
        names = [SINGLE_FILE] if SINGLE_FILE in found_names else found_names
    if not names:
        raise _no_files(folder)
    _check_parts(folder, names)

    found: dict[str, Entry] = {}
    for name in names:
        for key, entry in read_header(folder, name).items():
            if key in found or weight_map.get(key, name) != name:
                rule = "is in two files, or is not in the file that the index names"
                raise config_error(f"{folder / name}: {key}", rule, DOWNLOAD_AGAIN)
            found[key] = entry
    if missing := sorted(set(weight_map) - set(found)):
        count = len(missing)
        rule = f"lacks {count} of the tensors that its index names, first {missing[0]}"
        raise config_error(str(folder), rule, DOWNLOAD_AGAIN)
    return found


def _read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, as recorded in the index.

    Raises `ConfigError` for an index that cannot be read, and for files that are missing or outside
    the folder.
    """
    try:
        weight_map: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise config_error(
            str(folder / INDEX_FILE), "is not an index of safetensors files", DOWNLOAD_AGAIN
        ) from None
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            rule = f"names {name!r}, which is not a file of this folder"
            raise config_error(str(folder / INDEX_FILE), rule, "do not use files from this source")
        if not (folder / name).is_file():
            raise config_error(
                str(folder / name), "is missing, but the index names it", DOWNLOAD_AGAIN
            )
    return weight_map


def _no_files(folder: Path) -> ConfigError:
    """Return the error for a folder without weights in the safetensors format."""
    others = sorted(path.name for pattern in OTHER_FILES for path in folder.glob(pattern))
    rule = (
        f"contains {others[0]}, which is not supported, but no .safetensors file"
        if others
        else "contains no .safetensors file"
    )
    return config_error(
        str(folder),
        rule,
        "download its .safetensors files, or load the model once with transformers and save it"
        " with save_pretrained",
    )


def _check_parts(folder: Path, names: list[str]) -> None:
    """Raise `ConfigError` if any of the files model-00001-of-00003.safetensors, ... is missing."""
    parts = {
        (int(part[1]), int(part[2]))
        for name in names
        if (part := re.fullmatch(r".*-(\d{5})-of-(\d{5})\.safetensors", name))
    }
    count = max((of for _, of in parts), default=0)
    if missing := sorted(set(range(1, count + 1)) - {number for number, _ in parts}):
        rule = f"lacks part {missing[0]} of {count} of its .safetensors files"
        raise config_error(str(folder), rule, DOWNLOAD_AGAIN)


def create_zero_file(
    folder: Path, file: str, tensors: dict[str, tuple[str, tuple[int, ...]]]
) -> dict[str, Entry]:
    """Create a file with the zero tensors {key: (dtype, shape)}, and return their positions."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    # aligned, in the order that the library uses
    for key, (dtype, shape) in sorted(
        tensors.items(), key=lambda item: (-DTYPE_BYTES[item[1][0]], item[0])
    ):
        size = DTYPE_BYTES[dtype] * _numel(shape)
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
        DTYPE_BYTES[entry.dtype] * _numel(entry.shape)
        for entries in files.values()
        for entry in entries.values()
    )
    weight_map = {key: file for file, entries in files.items() for key in entries}
    (folder / INDEX_FILE).write_text(
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
