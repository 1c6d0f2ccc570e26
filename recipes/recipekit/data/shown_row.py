"""The first document of a stream as text, with the part that is learned between two marks."""

from typing import Any

import numpy as np

from ..spec.task import IGNORE, MicroBatch

BEGIN, END = ">>>", "<<<"


def first_document(tokenizer: Any, batch: MicroBatch, masked: bool) -> str:
    """Return the first document of the first row, or the part of it that is in this row, with its
    learned tokens marked.

    A label is the next token, with `masked` the token in its place.
    """
    ids, labels, positions = (
        batch[name][0].numpy() for name in ("input_ids", "labels", "position_ids")
    )
    ends = np.flatnonzero(positions == 0)[1:]
    size = int(ends[0]) if len(ends) else len(ids)
    learned = labels[:size] != IGNORE
    if not masked:
        learned = np.concatenate([[False], learned[:-1]])

    text, runs = "", np.split(np.arange(size), np.flatnonzero(np.diff(learned)) + 1)
    for run in runs:
        part = tokenizer.decode(ids[run].tolist(), skip_special_tokens=False)
        text += f"{BEGIN}{part}{END}" if learned[run[0]] else part
    return text
