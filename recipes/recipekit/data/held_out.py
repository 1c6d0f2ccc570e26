"""Held-out rows, which training never sees."""

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..kernels.documents import with_document_starts, with_documents
from ..spec.errors import Say, config_error
from ..spec.task import IGNORE, MicroBatch, Samples
from .batching import DataRank
from .blocks import pack_chunks
from .chunks import Chunk, ChunkReader, SampleChunk
from .content import HeldOut
from .masking import TokenMasker, make_token_masker
from .packing import fill_positions, fill_rows, permutation
from .processors import pad_id
from .request import Request
from .samples import make_collator, open_rows
from .source import Document
from .stream import Corpus, open_corpus
from .stream_state import StreamState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger(__name__)
LONG_READ_ROWS = 20_000  # maximum rows that an evaluation reads without a report


def eval_rows(
    request: Request,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    rank: DataRank,
    state: StreamState | None = None,
    documents: bool = False,
    say: Say = LOG.warning,
) -> list[MicroBatch]:
    """Return the micro-batches that this rank evaluates.

    All ranks together evaluate `request.eval_rows` rows of held-out documents, or fewer if the
    corpus has fewer. These rows are the same for every layout. If a rank has fewer rows, it
    receives additional rows whose labels are all -100. A mixture is evaluated with the weights of
    its first step.

    If the `state` of a stream is given, a hub data set is read at the commit that the stream used.
    `documents` has the same meaning as for `open_stream`. Raise `ConfigError` if no document is
    held out.
    """
    corpus = open_corpus(request, tokenizer, say, state)
    say_once = say if rank.dp_rank == 0 else lambda _: None
    report_held_out_rule(corpus.rule, say)
    masks = make_token_masker(request, tokenizer)  # one key: the same in each evaluation
    drawn = _read_domains(
        corpus,
        lambda reader, count: _pack_held_out(
            reader, request.seq_len, count, pad_id(tokenizer), masks
        ),
    )
    rows = np.concatenate(drawn, axis=1)[:, : request.eval_rows]
    count = rows.shape[1]
    mine = _rows_per_rank(request, count, "documents", rank.dp, say_once)
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
    add = with_documents if documents else with_document_starts if request.bidirectional else dict
    return [add(batch) for batch in found]


def eval_samples(
    request: Request,
    processor: object,
    samples: Samples,
    *,
    rank: DataRank,
    state: StreamState | None = None,
    say: Say = LOG.warning,
) -> list[MicroBatch]:
    """Return the micro-batches of samples that this rank evaluates; see `eval_rows`.

    Parts and groups are read in a fixed shuffled order, because a sorted data set begins with
    samples of a single class.
    """
    corpus, say_once = (
        open_rows(request, samples, processor, say, state),
        say if rank.dp_rank == 0 else lambda _: None,
    )
    if request.eval_rows * 100 > LONG_READ_ROWS:
        say_once(
            f"evaluation: 1 row in 100 is held out, so for eval_rows = {request.eval_rows} every"
            f" rank first reads about {request.eval_rows * 100:,} rows"
        )
    report_held_out_rule(corpus.rule, say_once)
    found = _read_domains(corpus, _read_held_out_samples)
    rows: list[Document | None] = [sample for own in found for sample in own][: request.eval_rows]
    mine = _rows_per_rank(request, len(rows), "rows", rank.dp, say_once)
    rows += [None] * (rank.dp * mine - len(rows))
    rows = rows[rank.dp_rank * mine : (rank.dp_rank + 1) * mine]
    collate = make_collator(request, processor, samples, say)
    return [
        collate(rows[first : first + request.micro_batch], None)
        for first in range(0, mine, request.micro_batch)
    ]


def report_held_out_rule(rule: HeldOut, say: Say) -> None:
    """Report which document is held out in a small corpus."""
    if rule.chosen is not None:
        what = "the last tenth of the only document" if rule.is_part else "one document"
        say(
            f"evaluation: no document of this small data set falls into the held-out 1 %, so {what}"
            " is held out from training"
        )


def _read_domains(corpus: Corpus, held_out: Callable[[ChunkReader, int], Any]) -> list[Any]:
    """For each domain, call `held_out(reader, count)` with the domain's share of the rows."""
    weights = [domain.weight(1) for domain in corpus.domains]
    wanted = [round(corpus.request.eval_rows * weight / sum(weights)) for weight in weights]
    return [
        held_out(reader, count)
        for reader, count in zip(corpus.readers(held_out=True), wanted, strict=True)
    ]


def _rows_per_rank(request: Request, count: int, documents: str, dp: int, say: Say) -> int:
    """Return each rank's number of rows, including fill-up rows.

    Raise `ConfigError` if no row is held out.
    """
    mine = -(-count // (dp * request.micro_batch)) * request.micro_batch
    if not count:
        raise config_error(
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


def _read_held_out_samples(reader: ChunkReader, count: int) -> list[Document]:
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


def _pack_held_out(
    reader: ChunkReader, seq_len: int, count: int, pad: int, masks: TokenMasker | None
) -> np.ndarray:
    """Pack held-out documents in corpus order.

    Return ids, labels and positions as (3, up to `count`, seq_len) int64.
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
    block = pack_chunks(seq_len, pad, held, "held out", masks=masks)
    out = np.empty((3, min(count, len(block.fill)), seq_len), dtype=np.int64)
    fill_rows(out[0], out[1], block, 0)
    fill_positions(out[2], block, 0)
    return out


def _all_chunks(reader: ChunkReader) -> Iterator[Chunk | SampleChunk]:
    for part in range(len(reader.source.parts)):
        count = reader.groups(part)
        for group in range(count if isinstance(count, int) else 0):
            yield from reader.chunks(part, group, 0)
