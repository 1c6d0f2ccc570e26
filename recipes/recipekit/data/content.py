"""What a document is held out by, and how large it is."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np


def is_held_out(content: Any) -> bool:
    """Chooses about 1 % of all documents, for evaluation only; depends on the content alone, of a sample on that of its first column."""
    value = next(iter(content.values())) if isinstance(content, dict) else content
    return int.from_bytes(hashlib.blake2b(_content(value), digest_size=8).digest(), "big") % 100 == 0


def _content(value: Any) -> bytes:
    if isinstance(value, dict) and (value.get("bytes") or value.get("path")):  # how `datasets` stores a file
        value = value["bytes"] or Path(value["path"])
    if isinstance(value, Path):
        value = f"{value.parent.name}/{value.name}"  # so that nothing has to be read to know
    if isinstance(value, bytes | np.ndarray):
        return value if isinstance(value, bytes) else value.tobytes()
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text.encode("utf-8", "replace")


def held_out_tokens(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Chooses documents of ready tokens, (documents,) bool, as `is_held_out` does texts: by length and first and last four tokens. None may be empty."""
    mixed, last = lengths.astype(np.uint64), lengths - 1
    for offset in range(4):
        inside = np.minimum(offset, last)
        for at in (starts + inside, starts + last - inside):
            mixed = (mixed ^ ids[at].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
    return mixed % np.uint64(100) == 0


def is_empty(value: Any) -> bool:
    """Return True for null, text that is empty or blank, empty lists and bytes, and files without bytes and path."""
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:  # how `datasets` stores a file
        return not (value["bytes"] or value["path"])
    return value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, list | bytes) and not value)


def characters_of(content: Any) -> int:
    return len(content) if isinstance(content, str) else 1000


def size_of(value: Any) -> int:
    """Estimates the bytes that a value of a row takes in memory; of a list by its first element."""
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list):
        return 56 + len(value) * (8 + (size_of(value[0]) if value and isinstance(value[0], list | str | bytes | dict) else 0))
    return value.nbytes if isinstance(value, np.ndarray) else len(value) if isinstance(value, bytes | str) else 8
