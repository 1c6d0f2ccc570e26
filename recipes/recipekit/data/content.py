"""The hash that selects held-out documents, and estimates of a document's size."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HELD_OUT_ONE_IN = 100  # about one document in 100 is held out
TAIL_ONE_IN = 10  # the last tenth is held out if the corpus has only one document


@dataclass(frozen=True)
class HeldOut:
    """The rule that selects documents for evaluation: about 1% of all, by a hash of their content.

    In a small corpus, this rule may select no document. In that case, `chosen` is the hash of the
    document that is held out. With `is_part`, the corpus contains only the document `chosen`, and
    its last tenth is held out.
    """

    chosen: int | None = None
    is_part: bool = False

    def part(self, content: Any, held_out: bool) -> Any:
        """Return a document's part for evaluation (`held_out`) or for training.

        Return None if there is no such part.
        """
        number = content_hash(content)
        if number == self.chosen and self.is_part:
            cut = tail_start(content)
            return content[cut:] if held_out else content[:cut]
        return (
            content
            if (number % HELD_OUT_ONE_IN == 0 or number == self.chosen) == held_out
            else None
        )

    def tokens(
        self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, held_out: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (starts, lengths) of the selected documents among pretokenized documents.

        The rule is the same as in `part`. Every document must have at least one token.
        """
        numbers = token_hashes(ids, starts, lengths)
        chosen = (
            numbers == np.uint64(self.chosen)
            if self.chosen is not None
            else np.zeros(len(numbers), dtype=bool)
        )
        if self.is_part:
            cut = np.where(chosen, lengths * (TAIL_ONE_IN - 1) // TAIL_ONE_IN, 0)
            starts, lengths = (
                (starts + cut, lengths - cut)
                if held_out
                else (starts, np.where(chosen, cut, lengths))
            )
            kept = chosen | ((numbers % np.uint64(HELD_OUT_ONE_IN) == 0) == held_out)
        else:
            kept = ((numbers % np.uint64(HELD_OUT_ONE_IN) == 0) | chosen) == held_out
        return starts[kept], lengths[kept]


ONE_PERCENT = HeldOut()


def tail_start(text: str) -> int:
    """Return the index at which a string's last tenth begins, after a blank if there is one."""
    cut = len(text) * (TAIL_ONE_IN - 1) // TAIL_ONE_IN
    return max(text.rfind("\n", 0, cut), text.rfind(" ", 0, cut)) + 1 or cut


def is_held_out(content: object) -> bool:
    """Return True for about 1% of all documents; the result depends only on a document's content.

    A sample is selected by its first column.
    """
    return content_hash(content) % HELD_OUT_ONE_IN == 0


def content_hash(content: object) -> int:
    """Return a 64-bit hash of a document; for a sample, only the first column is hashed."""
    value = next(iter(content.values())) if isinstance(content, dict) else content
    return int.from_bytes(hashlib.blake2b(_content_bytes(value), digest_size=8).digest(), "big")


def _content_bytes(value: object) -> bytes:
    # the form in which `datasets` stores a file
    if isinstance(value, dict) and (value.get("bytes") or value.get("path")):
        value = value["bytes"] or Path(value["path"])
    if isinstance(value, Path):
        value = f"{value.parent.name}/{value.name}"  # hash the name, so that no file has to be read
    if isinstance(value, bytes | np.ndarray):
        return value if isinstance(value, bytes) else value.tobytes()
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text.encode("utf-8", "replace")


def token_hashes(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each pretokenized document, (documents,) uint64.

    The hash covers the document's length, first four tokens and last four tokens. Every document
    must have at least one token.
    """
    mixed, last = lengths.astype(np.uint64), lengths - 1
    for offset in range(4):
        inside = np.minimum(offset, last)
        for at in (starts + inside, starts + last - inside):
            mixed = (mixed ^ ids[at].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
    return mixed


def count_characters(content: object) -> int:
    return len(content) if isinstance(content, str) else 1000


def estimate_bytes(value: object) -> int:
    """Estimate the memory in bytes of a row's value.

    The size of a list is estimated from its first element.
    """
    if isinstance(value, dict):
        return sum(map(estimate_bytes, value.values()))
    if isinstance(value, list):
        return 56 + len(value) * (
            8
            + (
                estimate_bytes(value[0])
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
