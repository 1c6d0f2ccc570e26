"""Reader for `.wandb` files, which wandb 0.31 writes but cannot read."""

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
    """Yield a file's complete records; skip an incomplete last record, left by a crash."""
    data = path.read_bytes()
    assert data[:4] == b":W&B", f"{path} is not a .wandb file"
    position, parts = FILE_HEADER, b""
    while position + CHUNK_HEADER.size <= len(data):
        if BLOCK - position % BLOCK < CHUNK_HEADER.size:
            position += BLOCK - position % BLOCK  # the padding at the end of a block
            continue
        _, length, kind = CHUNK_HEADER.unpack_from(data, position)
        position += CHUNK_HEADER.size
        if kind not in (FULL, FIRST, MIDDLE, LAST) or position + length > len(data):
            return
        parts = (
            data[position : position + length]
            if kind in (FULL, FIRST)
            else parts + data[position : position + length]
        )
        position += length
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record


def wandb_files(run_dir: Path) -> list[Path]:
    """Return a run folder's `.wandb` files, in the order of their jobs."""
    return sorted(
        (run_dir / "wandb").glob("*run-*/*.wandb"),
        key=lambda path: path.parent.name.split("-", 1)[1].removeprefix("run-"),
    )


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """Return the history that W&B recorded for a run, without W&B's own `_` keys.

    Each step comes from the last file that contains it. A file may contain several records of a
    step, because `save_stall_s` and images are recorded separately. Images are left out here.
    """
    steps: dict[int, dict[str, Any]] = {}
    for path in wandb_files(run_dir):
        of_file: dict[int, dict[str, Any]] = {}
        for record in read_records(path):
            if record.WhichOneof("record_type") == "history":
                items = [item for item in record.history.item if len(item.nested_key) < 2]
                payload = {
                    item.key or item.nested_key[0]: json.loads(item.value_json) for item in items
                }
                of_file.setdefault(payload["step"], {}).update(
                    {key: value for key, value in payload.items() if not key.startswith("_")}
                )
        steps |= of_file
    return [steps[step] for step in sorted(steps)]


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the config attached to the run."""
    config: dict[str, Any] = {}
    for path in wandb_files(run_dir):
        for record in read_records(path):
            if record.WhichOneof("record_type") == "run":
                config |= {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
    return config


def read_exit_codes(run_dir: Path) -> list[int]:
    """Return the exit code of each finished job in the run."""
    return [
        record.exit.exit_code
        for path in wandb_files(run_dir)
        for record in read_records(path)
        if record.WhichOneof("record_type") == "exit"
    ]


def read_pictures(run_dir: Path) -> set[str]:
    """Return the keys of the images that W&B stores."""
    items = [
        item
        for path in wandb_files(run_dir)
        for record in read_records(path)
        for item in record.history.item
    ]
    return {
        item.nested_key[0]
        for item in items
        if item.nested_key[1:] == ["_type"] and json.loads(item.value_json) == "image-file"
    }


def read_lowest(run_dir: Path) -> set[str]:
    """Return the metrics whose W&B summary is their lowest value."""
    return {
        record.metric.name
        for path in wandb_files(run_dir)
        for record in read_records(path)
        if record.metric.summary.min
    }


def read_artifacts(run_dir: Path) -> list[tuple[str, str, list[str]]]:
    """Return (type, name, files) for each artifact of the run."""
    found = [
        record.request.log_artifact.artifact
        for path in wandb_files(run_dir)
        for record in read_records(path)
        if record.request.HasField("log_artifact")
    ]
    found += [
        record.artifact
        for path in wandb_files(run_dir)
        for record in read_records(path)
        if record.HasField("artifact")
    ]
    return [
        (artifact.type, artifact.name, sorted(entry.path for entry in artifact.manifest.contents))
        for artifact in found
    ]
