"""The held-out rows, which training never sees."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..recipe import Recipe
from ..refusal import refuse
from ..tokens import IGNORE, pad_id
from .chunks import Chunk, Reader
from .packing import fill_positions, fill_rows
from .stream import MicroBatch, open_corpus, packed

LOG = logging.getLogger(__name__)


def eval_rows(
    recipe: Recipe, tokenizer: Any, *, dp: int, dp_rank: int, state: dict | None = None, say: Callable[[str], None] = LOG.warning
) -> list[MicroBatch]:
    """The micro-batches of this rank of the evaluation: `recipe.eval_rows` rows of held-out documents, fewer if there are fewer.

    All ranks together hold the same rows on every layout; rows whose labels are all -100 make their numbers equal. A
    mixture is evaluated in the shares that its training begins with; a data set of the hub is read as the stream with `state`
    reads it. Raises `Refusal` if no document is held out.
    """
    corpus = open_corpus(recipe, tokenizer, say, state)
    weights = [domain.weight(1) for domain in corpus.domains]
    wanted = [round(recipe.eval_rows * weight / sum(weights)) for weight in weights]
    found = [_held_out(reader, recipe.seq_len, count, pad_id(tokenizer)) for reader, count in zip(corpus.readers(recipe, held_out=True), wanted, strict=True)]
    rows = np.concatenate(found, axis=1)[:, : recipe.eval_rows]
    count = rows.shape[1]
    if not count:
        raise refuse(f"--dataset {recipe.dataset}", "is so small that its held-out 1 % is empty", "use --eval_every 0, or more data")
    if count < recipe.eval_rows and dp_rank == 0:
        say(f"evaluation has {count} rows, not eval_rows = {recipe.eval_rows}: the held-out 1 % of the documents holds no more")
    mine = -(-count // (dp * recipe.micro_batch)) * recipe.micro_batch  # on each rank
    empty = np.stack([np.full(recipe.seq_len, pad_id(tokenizer)), np.full(recipe.seq_len, IGNORE), np.arange(recipe.seq_len)])
    rows = np.concatenate([rows, np.repeat(empty[:, None], dp * mine - count, axis=1)], axis=1)[:, dp_rank * mine : (dp_rank + 1) * mine]
    parts = [np.ascontiguousarray(rows[:, first : first + recipe.micro_batch]) for first in range(0, mine, recipe.micro_batch)]
    return [{name: torch.from_numpy(tensor) for name, tensor in zip(("input_ids", "labels", "position_ids"), part, strict=True)} for part in parts]


def _held_out(reader: Reader, seq_len: int, count: int, pad: int) -> np.ndarray:
    """(3, up to `count`, seq_len) int64: packed rows of held-out documents, in the order of the corpus."""
    held, tokens = [], 0
    for chunk in _all_chunks(reader):
        if tokens >= count * seq_len:
            break
        if len(chunk.lengths):
            held.append((chunk, 0, len(chunk.lengths)))
            tokens += int(chunk.lengths.sum())
    if not held or not count:
        return np.empty((3, 0, seq_len), dtype=np.int64)
    block = packed(seq_len, pad, held, "held out")
    out = np.empty((3, min(count, len(block.fill)), seq_len), dtype=np.int64)
    fill_rows(out[0], out[1], block, 0)
    fill_positions(out[2], block, 0)
    return out


def _all_chunks(reader: Reader) -> Iterator[Chunk]:
    for part in range(len(reader.source.parts)):
        count = reader.groups(part)
        for group in range(0 if isinstance(count, Chunk) else count):
            yield from reader.chunks(part, group, 0)
