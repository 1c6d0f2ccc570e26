"""Reads `.wandb` files, which wandb 0.31 writes but has no reader for."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32 * 1024  # bytes; a chunk never crosses a block
FILE_HEADER = 7  # bytes: ":W&B", magic, version
CHUNK_HEADER = struct.Struct("<IHB")  # checksum, length, kind
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_records(path: Path) -> Iterator[Record]:
    """The whole records of a file; what a crash left incomplete at its end is skipped."""
    data = path.read_bytes()
    assert data[:4] == b":W&B", f"{path} is not a .wandb file"
    position, parts = FILE_HEADER, b""
    while position + CHUNK_HEADER.size <= len(data):
        if BLOCK - position % BLOCK < CHUNK_HEADER.size:
            position += BLOCK - position % BLOCK  # the padding of a block's end
            continue
        _, length, kind = CHUNK_HEADER.unpack_from(data, position)
        position += CHUNK_HEADER.size
        if kind not in (FULL, FIRST, MIDDLE, LAST) or position + length > len(data):
            return
        parts = data[position : position + length] if kind in (FULL, FIRST) else parts + data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record


def wandb_files(run_dir: Path) -> list[Path]:
    """The `.wandb` files of a run folder, in the order of their jobs."""
    return sorted((run_dir / "wandb").glob("*run-*/*.wandb"), key=lambda path: path.parent.name.split("-", 1)[1].removeprefix("run-"))


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """What W&B holds of a run: for each step the last record in the order of the files, without W&B's own `_` keys."""
    steps: dict[int, dict[str, Any]] = {}
    for path in wandb_files(run_dir):
        for record in read_records(path):
            if record.WhichOneof("record_type") == "history":
                payload = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                steps[payload["step"]] = {key: value for key, value in payload.items() if not key.startswith("_")}
    return [steps[step] for step in sorted(steps)]


def read_config(run_dir: Path) -> dict[str, Any]:
    """The config attached to the run."""
    config: dict[str, Any] = {}
    for path in wandb_files(run_dir):
        for record in read_records(path):
            if record.WhichOneof("record_type") == "run":
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return config


def read_exit_codes(run_dir: Path) -> list[int]:
    """The exit code of each finished job of the run."""
    return [record.exit.exit_code for path in wandb_files(run_dir) for record in read_records(path) if record.WhichOneof("record_type") == "exit"]
