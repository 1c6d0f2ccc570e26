"""The held-out rows, which training never sees."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..kernels.documents import with_documents, with_starts
from ..spec.refusal import Say, refuse
from ..spec.task import IGNORE, MicroBatch, Samples
from .blocks import packed
from .chunks import Chunk, Reader, SampleChunk
from .content import HeldOut
from .lanes import DataRank
from .masks import Masks, masks_of
from .packing import fill_positions, fill_rows, permutation
from .processors import pad_id
from .request import Request
from .sameness import StreamState
from .samples import collator, open_rows
from .source import Document
from .stream import Corpus, open_corpus

LOG = logging.getLogger(__name__)
LONG_READ = 20_000  # rows that are read for an evaluation, from which on the run says what it does


def eval_rows(
    request: Request,
    tokenizer: Any,
    *,
    rank: DataRank,
    state: StreamState | None = None,
    documents: bool = False,
    say: Say = LOG.warning,
) -> list[MicroBatch]:
    """Makes the micro-batches that this rank evaluates: `request.eval_rows` rows of held-out
    documents, fewer if there are fewer.

    All ranks together hold the same rows on every layout; rows whose labels are all -100 fill up
    the ranks that have fewer. A mixture is evaluated in the shares that its training begins with.
    With the `state` of a stream a data set of the hub is read at the same commit as by the stream.
    `documents` as of the stream. Raises `Refusal` if no document is held out.
    """
    corpus = open_corpus(request, tokenizer, say, state)
    say_once = say if rank.dp_rank == 0 else lambda _: None
    report(corpus.rule, say)
    masks = masks_of(request, tokenizer)  # drawn by one key, the same in each evaluation
    drawn = _of_domains(
        corpus,
        lambda reader, count: _held_out(reader, request.seq_len, count, pad_id(tokenizer), masks),
    )
    rows = np.concatenate(drawn, axis=1)[:, : request.eval_rows]
    count = rows.shape[1]
    mine = _rows_of_a_rank(request, count, "documents", rank.dp, say_once)
    empty = np.stack(
        [
            np.full(request.seq_len, pad_id(tokenizer)),
            np.full(request.seq_len, IGNORE),
            np.arange(request.seq_len),
        ]
    )
    rows = np.concatenate([rows, np.repeat(empty[:, None], rank.dp * mine - count, axis=1)], axis=1)
    rows = rows[:, rank.dp_rank * mine : (rank.dp_rank + 1) * mine]
    parts = [
        np.ascontiguousarray(rows[:, first : first + request.micro_batch])
        for first in range(0, mine, request.micro_batch)
    ]
    found = [
        {
            name: torch.from_numpy(tensor)
            for name, tensor in zip(("input_ids", "labels", "position_ids"), part, strict=True)
        }
        for part in parts
    ]
    add = with_documents if documents else with_starts if request.masked else dict
    return [add(batch) for batch in found]


def eval_samples(
    request: Request,
    processor: Any,
    samples: Samples,
    *,
    rank: DataRank,
    state: StreamState | None = None,
    say: Say = LOG.warning,
) -> list[MicroBatch]:
    """Makes the micro-batches that this rank evaluates of a task whose rows are samples, otherwise
    like `eval_rows`.

    Rows are taken from parts and groups in an order drawn once and for all, as those of a sorted
    data set begin with one class.
    """
    corpus, say_once = (
        open_rows(request, samples, processor, say, state),
        say if rank.dp_rank == 0 else lambda _: None,
    )
    if request.eval_rows * 100 > LONG_READ:
        say_once(
            f"evaluation: 1 row in 100 is held out, so for eval_rows = {request.eval_rows} every"
            f" rank first reads about {request.eval_rows * 100:,} rows"
        )
    report(corpus.rule, say_once)
    found = _of_domains(corpus, _held_out_samples)
    rows: list[Document | None] = [sample for own in found for sample in own][: request.eval_rows]
    mine = _rows_of_a_rank(request, len(rows), "rows", rank.dp, say_once)
    rows += [None] * (rank.dp * mine - len(rows))
    rows = rows[rank.dp_rank * mine : (rank.dp_rank + 1) * mine]
    collate = collator(request, processor, samples, say)
    return [
        collate(rows[first : first + request.micro_batch], None)
        for first in range(0, mine, request.micro_batch)
    ]


def report(rule: HeldOut, say: Say) -> None:
    """Say which document of a small corpus is held out."""
    if rule.chosen is not None:
        what = "the last tenth of the only document" if rule.is_part else "one document"
        say(
            f"evaluation: no document of this small data set falls into the held-out 1 %, so {what}"
            " is held out from training"
        )


def _of_domains(corpus: Corpus, held_out: Callable[[Reader, int], Any]) -> list[Any]:
    """Calls `held_out(reader, count)` for each domain, with its share of the rows."""
    weights = [domain.weight(1) for domain in corpus.domains]
    wanted = [round(corpus.request.eval_rows * weight / sum(weights)) for weight in weights]
    return [
        held_out(reader, count)
        for reader, count in zip(corpus.readers(held_out=True), wanted, strict=True)
    ]


def _rows_of_a_rank(request: Request, count: int, documents: str, dp: int, say: Say) -> int:
    """Computes how many rows each rank has, those included that only fill up.

    Raises `Refusal` if none is held out.
    """
    mine = -(-count // (dp * request.micro_batch)) * request.micro_batch
    if not count:
        raise refuse(
            f"--dataset {request.dataset}",
            "is too small: the 1 % held out for evaluation is empty",
            "use --eval_every 0, or add more data",
        )
    if count < request.eval_rows:
        say(
            f"evaluation has {count} row{'s' * (count != 1)}, not eval_rows = {request.eval_rows}:"
            f" the held-out 1 % of the {documents} holds no more"
        )
    return mine


def _held_out_samples(reader: Reader, count: int) -> list[Document]:
    found: list[Document] = []
    for part in permutation(len(reader.source.parts), "held out").tolist():
        groups = reader.groups(part)
        for group in permutation(
            groups if isinstance(groups, int) else 0, "held out", part
        ).tolist():
            for chunk in reader.chunks(part, group, 0):
                assert isinstance(chunk, SampleChunk)
                found += chunk.samples
                if len(found) >= count:
                    return found[:count]
    return found


def _held_out(
    reader: Reader, seq_len: int, count: int, pad: int, masks: Masks | None
) -> np.ndarray:
    """Packs held-out documents, in the order of the corpus: (3, up to `count`, seq_len) int64, ids,
    labels and positions.
    """
    held, tokens = [], 0
    for chunk in _all_chunks(reader):
        if tokens >= count * seq_len:
            break
        assert isinstance(chunk, Chunk)
        if len(chunk.lengths):
            held.append((chunk, 0, len(chunk.lengths)))
            tokens += int(chunk.lengths.sum())
    if not held or not count:
        return np.empty((3, 0, seq_len), dtype=np.int64)
    block = packed(seq_len, pad, held, "held out", masks=masks)
    out = np.empty((3, min(count, len(block.fill)), seq_len), dtype=np.int64)
    fill_rows(out[0], out[1], block, 0)
    fill_positions(out[2], block, 0)
    return out


def _all_chunks(reader: Reader) -> Iterator[Chunk | SampleChunk]:
    for part in range(len(reader.source.parts)):
        count = reader.groups(part)
        for group in range(count if isinstance(count, int) else 0):
            yield from reader.chunks(part, group, 0)
