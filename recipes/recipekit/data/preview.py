"""The first document of a stream as text, with marks around the trained parts."""

from typing import Any

import numpy as np

from ..spec.task import IGNORE, MicroBatch

LEARNED_START, LEARNED_END = ">>>", "<<<"


def first_document(tokenizer: Any, batch: MicroBatch, in_place: bool) -> str:
    """Return the first document of the first row, with marks around the trained tokens.

    A document that is longer than the row is shown up to the end of the row. A label applies to the
    next token. With `in_place`, a label applies to the token at the same position.
    """
    ids, labels, positions = (
        batch[name][0].numpy() for name in ("input_ids", "labels", "position_ids")
    )
    ends = np.flatnonzero(positions == 0)[1:]
    size = int(ends[0]) if len(ends) else len(ids)
    learned = labels[:size] != IGNORE
    if not in_place:
        learned = np.concatenate([[False], learned[:-1]])

    text, runs = "", np.split(np.arange(size), np.flatnonzero(np.diff(learned)) + 1)
    for run in runs:
        part = tokenizer.decode(ids[run].tolist(), skip_special_tokens=False)
        text += f"{LEARNED_START}{part}{LEARNED_END}" if learned[run[0]] else part
    return text
