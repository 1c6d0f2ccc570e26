"""The safetensors format: where each tensor lies in a file, and files of a given content to be
filled in.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..spec.hub import POINTER_BYTES, check_pointer
from ..spec.refusal import refuse

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
    with path.open("rb") as stream:
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        if size < POINTER_BYTES:
            check_pointer(path, first + stream.read())
            stream.seek(8)
        if size < 8 or length > min(size - 8, 100_000_000):
            raise refuse(
                str(path),
                f"is not a safetensors file: a header of {length} bytes in a file of {size}",
                AGAIN,
            )
        try:
            header = json.loads(stream.read(length))
            entries = {
                key: Entry(
                    file,
                    facts["dtype"],
                    tuple(facts["shape"]),
                    8 + length + facts["data_offsets"][0],
                )
                for key, facts in header.items()
                if key != "__metadata__"
            }
            ends = sorted(
                (facts["data_offsets"][0], facts["data_offsets"][1], key)
                for key, facts in header.items()
                if key != "__metadata__"
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise refuse(str(path), "does not have a safetensors header", AGAIN) from None
    position = 0
    for begin, end, key in ends:
        if entries[key].dtype not in SIZES or QUANTISED.fullmatch(key):
            rule = (
                f"is {entries[key].dtype} of a quantised model"
                if QUANTISED.fullmatch(key)
                else f"is {entries[key].dtype}, which cannot be trained"
            )
            raise refuse(f"{path}: {key}", rule, "use the unquantised model")
        numel = SIZES[entries[key].dtype]
        for dim in entries[key].shape:
            numel *= dim
        if begin != position or end - begin != numel:
            raise refuse(
                f"{path}: {key}",
                f"is stored at bytes {begin} to {end}, but must start at {position} and have"
                f" {numel} bytes",
                AGAIN,
            )
        position = end
    if 8 + length + position != size:
        raise refuse(
            str(path), f"has {size} bytes, but its header describes {8 + length + position}", AGAIN
        )
    return entries


def open_folder(folder: Path) -> dict[str, Entry]:
    """Finds every tensor of a model's files, those that transformers would load.

    Raises `Refusal` for files that are missing, cut off, quantised or of another kind, and for an
    index that names a file which is not there or lies outside the folder.
    """
    if (folder / INDEX).is_file() and not (folder / WHOLE).is_file():
        try:
            weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise refuse(
                str(folder / INDEX), "is not an index of safetensors files", AGAIN
            ) from None
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise refuse(
                    str(folder / INDEX),
                    f"names {name!r}, which is not a file of this folder",
                    "do not use files from this source",
                )
            if not (folder / name).is_file():
                raise refuse(str(folder / name), "is missing, but the index names it", AGAIN)
    else:
        found_names = sorted(path.name for path in folder.glob("*.safetensors"))
        weight_map, names = {}, [WHOLE] if WHOLE in found_names else found_names
    if not names:
        others = sorted(path.name for pattern in OTHER_FILES for path in folder.glob(pattern))
        rule = (
            f"contains {others[0]}, which is not supported, but no .safetensors file"
            if others
            else "contains no .safetensors file"
        )
        raise refuse(
            str(folder),
            rule,
            "download its .safetensors files, or load the model once with transformers and save it"
            " with save_pretrained",
        )
    parts = {
        (int(part[1]), int(part[2]))
        for name in names
        if (part := re.fullmatch(r".*-(\d{5})-of-(\d{5})\.safetensors", name))
    }
    if missing := sorted(
        set(range(1, max((of for _, of in parts), default=0) + 1)) - {number for number, _ in parts}
    ):
        raise refuse(
            str(folder),
            f"lacks part {missing[0]} of {max(of for _, of in parts)} of its .safetensors files",
            AGAIN,
        )
    found: dict[str, Entry] = {}
    for name in names:
        for key, entry in read_header(folder, name).items():
            if key in found or weight_map.get(key, name) != name:
                raise refuse(
                    f"{folder / name}: {key}",
                    "is in two files, or is not in the file that the index names",
                    AGAIN,
                )
            found[key] = entry
    if missing := sorted(set(weight_map) - set(found)):
        raise refuse(
            str(folder),
            f"lacks {len(missing)} of the tensors that its index names, first {missing[0]}",
            AGAIN,
        )
    return found


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
        size = SIZES[dtype]
        for dim in shape:
            size *= dim
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
