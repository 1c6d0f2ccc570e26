"""The held-out rows, which training never sees."""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..refusal import Say, refuse
from ..task import IGNORE, MicroBatch
from .blocks import packed
from .chunks import Chunk, Reader
from .packing import fill_positions, fill_rows
from .processors import pad_id
from .request import Request
from .sameness import StreamState
from .stream import open_corpus

LOG = logging.getLogger(__name__)


def eval_rows(request: Request, tokenizer: Any, *, dp: int, dp_rank: int, state: StreamState | None = None, say: Say = LOG.warning) -> list[MicroBatch]:
    """Makes the micro-batches that this rank evaluates: `request.eval_rows` rows of held-out documents, fewer if there are fewer.

    All ranks together hold the same rows on every layout; rows whose labels are all -100 fill up the ranks that have fewer. A
    mixture is evaluated in the shares that its training begins with. With the `state` of a stream a data set of the hub is read
    at the same commit as by the stream. Raises `Refusal` if no document is held out.
    """
    corpus = open_corpus(request, tokenizer, say, state)
    weights = [domain.weight(1) for domain in corpus.domains]
    wanted = [round(request.eval_rows * weight / sum(weights)) for weight in weights]
    found = [_held_out(reader, request.seq_len, count, pad_id(tokenizer)) for reader, count in zip(corpus.readers(held_out=True), wanted, strict=True)]
    rows = np.concatenate(found, axis=1)[:, : request.eval_rows]
    count = rows.shape[1]
    if not count:
        raise refuse(f"--dataset {request.dataset}", "is so small that its held-out 1 % is empty", "use --eval_every 0, or more data")
    if count < request.eval_rows and dp_rank == 0:
        say(f"evaluation has {count} rows, not eval_rows = {request.eval_rows}: the held-out 1 % of the documents holds no more")
    mine = -(-count // (dp * request.micro_batch)) * request.micro_batch  # on each rank
    empty = np.stack([np.full(request.seq_len, pad_id(tokenizer)), np.full(request.seq_len, IGNORE), np.arange(request.seq_len)])
    rows = np.concatenate([rows, np.repeat(empty[:, None], dp * mine - count, axis=1)], axis=1)[:, dp_rank * mine : (dp_rank + 1) * mine]
    parts = [np.ascontiguousarray(rows[:, first : first + request.micro_batch]) for first in range(0, mine, request.micro_batch)]
    return [{name: torch.from_numpy(tensor) for name, tensor in zip(("input_ids", "labels", "position_ids"), part, strict=True)} for part in parts]


def _held_out(reader: Reader, seq_len: int, count: int, pad: int) -> np.ndarray:
    """Packs held-out documents, in the order of the corpus: (3, up to `count`, seq_len) int64, ids, labels and positions."""
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
