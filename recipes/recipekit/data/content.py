"""What a document is held out by, and how large it is."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SHARE = 100  # about one document in so many is held out
PART = 10  # of a document that is alone the last one in so many parts


@dataclass(frozen=True)
class HeldOut:
    """The rule of the documents that are held out for evaluation: about 1 % of all, by a hash of
    their content.

    In a small corpus that may be no document. Then `chosen` is the hash of the document that is
    held out, or, with `is_part`, of the only document, whose last tenth is held out.
    """

    chosen: int | None = None
    is_part: bool = False

    def part(self, content: Any, held_out: bool) -> Any:
        """Return the part of a document for evaluation (`held_out`) or for training; None if it is
        for the other.
        """
        number = hash_of(content)
        if number == self.chosen and self.is_part:
            cut = cut_of(content)
            return content[cut:] if held_out else content[:cut]
        return content if (number % SHARE == 0 or number == self.chosen) == held_out else None

    def tokens(
        self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, held_out: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (starts, lengths) of the documents of ready tokens, or of their parts, as `part`
        does.

        None may be empty.
        """
        numbers = hash_of_tokens(ids, starts, lengths)
        chosen = (
            numbers == np.uint64(self.chosen)
            if self.chosen is not None
            else np.zeros(len(numbers), dtype=bool)
        )
        if self.is_part:
            cut = np.where(chosen, lengths * (PART - 1) // PART, 0)
            starts, lengths = (
                (starts + cut, lengths - cut)
                if held_out
                else (starts, np.where(chosen, cut, lengths))
            )
            kept = chosen | ((numbers % np.uint64(SHARE) == 0) == held_out)
        else:
            kept = ((numbers % np.uint64(SHARE) == 0) | chosen) == held_out
        return starts[kept], lengths[kept]


ONE_PERCENT = HeldOut()


def cut_of(text: str) -> int:
    """Return where the last tenth of a text begins, after a blank if there is one."""
    cut = len(text) * (PART - 1) // PART
    return max(text.rfind("\n", 0, cut), text.rfind(" ", 0, cut)) + 1 or cut


def is_held_out(content: Any) -> bool:
    """Return True for about 1 % of all documents, by their content alone; of a sample by its first
    column.
    """
    return hash_of(content) % SHARE == 0


def hash_of(content: Any) -> int:
    """Return 64 bits of a document; of a sample, 64 bits of its first column."""
    value = next(iter(content.values())) if isinstance(content, dict) else content
    return int.from_bytes(hashlib.blake2b(_content(value), digest_size=8).digest(), "big")


def _content(value: Any) -> bytes:
    # how `datasets` stores a file
    if isinstance(value, dict) and (value.get("bytes") or value.get("path")):
        value = value["bytes"] or Path(value["path"])
    if isinstance(value, Path):
        value = f"{value.parent.name}/{value.name}"  # so that nothing has to be read to know
    if isinstance(value, bytes | np.ndarray):
        return value if isinstance(value, bytes) else value.tobytes()
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text.encode("utf-8", "replace")


def hash_of_tokens(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return 64 bits of each document of ready tokens, (documents,) uint64: of its length, and
    first and last four tokens.

    None may be empty.
    """
    mixed, last = lengths.astype(np.uint64), lengths - 1
    for offset in range(4):
        inside = np.minimum(offset, last)
        for at in (starts + inside, starts + last - inside):
            mixed = (mixed ^ ids[at].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
    return mixed


def characters_of(content: Any) -> int:
    return len(content) if isinstance(content, str) else 1000


def size_of(value: Any) -> int:
    """Estimates the bytes that a value of a row takes in memory; of a list by its first element."""
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list):
        return 56 + len(value) * (
            8
            + (
                size_of(value[0])
                if value and isinstance(value[0], list | str | bytes | dict)
                else 0
            )
        )
    return (
        value.nbytes
        if isinstance(value, np.ndarray)
        else len(value)
        if isinstance(value, bytes | str)
        else 8
    )
