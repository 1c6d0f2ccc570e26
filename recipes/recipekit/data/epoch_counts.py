"""Epochs, which are passes over local data: the contents of an epoch, and the steps per epoch.

Packing never crosses the boundary between two epochs. The last block of an epoch ends with the
epoch, and its last rows are padded. So the R(e) rows of epoch e = 0, 1, ... contain each token of
each document exactly once. R(e) varies by a few rows, because each epoch packs different documents
together. If step s has b(s) rows, X epochs need this number of steps:

    steps(X) = the smallest S with
               b(1) + ... + b(S) >= R(0) + ... + R(n - 1) + ceil((X - n) * R(n)),  n = floor(X)

The surplus rows of step S are the first rows of the next epoch. The number of complete epochs after
a step is the number of tokens dealt so far, divided by the tokens in an epoch. For samples, this
ratio counts samples instead of tokens. So one epoch is R(0) / b steps.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from ..spec.errors import Say
from ..spec.schedules import Ramp
from .batching import Passing, RowDealer, pass_over
from .blocks import DocumentRanges, StreamPosition, iter_blocks
from .chunks import MAX_REPORTED_ROWS, Chunk, ChunkReader, SampleChunk
from .encode import Encoder
from .mixture import Domain
from .packing import pack_documents
from .request import Request, Sizes
from .source import Source
from .stream import Corpus, initial_stream_state

SAY_EVERY = 10.0  # seconds
# maximum documents or rows to pack or deal again for an exact count; larger counts are estimated
EXACT_COUNT_LIMIT = 1_000_000


@dataclass(frozen=True)
class EpochCounts:
    """Counts of a corpus's epoch, without held-out documents; `rows` counts the first epoch."""

    documents: int
    tokens: int  # equals `documents` if the documents are samples
    rows: int
    empty: int = 0  # skipped rows: null, empty or blank
    bad: int = 0  # rows that cannot be read
    barren: int = 0  # documents without a token to train on

    @property
    def skipped(self) -> int:
        return self.empty + self.bad + self.barren


class RowFill(NamedTuple):
    """The number of tokens in each row of a block, and the block's number of documents."""

    fill: np.ndarray  # (rows,) int64
    documents: int


@dataclass(frozen=True)
class CorpusLengths:
    """The lengths of all documents in a corpus, grouped by chunk.

    It provides the methods of a `ChunkReader`, so that the order of the rows can be computed
    without tokens.
    """

    source: Source
    sizes: Sizes
    encoder: Encoder | None
    seed: int
    seq_len: int
    # number of groups in each part, or a chunk that counts an unreadable part
    parts: list[int | Chunk | SampleChunk]
    chunks_by_group: dict[
        tuple[int, int], list[Chunk | SampleChunk]
    ]  # (part, group) -> chunks without tokens

    def groups(self, part: int) -> int | Chunk | SampleChunk:
        return self.parts[part]

    def chunks(self, part: int, group: int, row: int) -> Iterator[Chunk | SampleChunk]:
        assert row == 0, "a pass is followed from its beginning"
        return iter(self.chunks_by_group[part, group])

    def report(self, *counts: object, **more: object) -> None:
        """Report nothing, because the run's own reader reports."""

    def blocks_from(self, place: StreamPosition) -> Iterator[tuple[StreamPosition, RowFill]]:
        """Yield the stream's blocks, starting at the first block of an epoch."""
        packed = self.encoder is not None
        limit = self.sizes.tokens_of_block(self.seq_len) if packed else self.sizes.block_bytes
        join = partial(_packed_fill, self.seq_len) if packed else _sample_fill
        return iter_blocks(self, self.seed, limit, join, place)

    def row_fills(self, epoch: int) -> np.ndarray:
        """Return the number of tokens in each row of an epoch, (rows,) int64, in stream order."""
        found = []
        for place, block in self.blocks_from(StreamPosition(epoch=epoch)):
            if place.epoch_before > epoch:
                break
            found.append(block.fill)
            if place.epoch > epoch:
                break
        return np.concatenate(found)

    def rows(self, epoch: int) -> int:
        return self.first_epoch.rows if self.is_regular else len(self.row_fills(epoch))

    @cached_property
    def is_regular(self) -> bool:
        """True if every epoch has as many rows as the first epoch.

        The order of an epoch must not change which documents are packed together, or how well they
        fill rows. This condition is met by samples and by documents that fill their rows exactly.
        It is also met by a single block whose documents are all longer than a row, or all no longer
        than a row. Only the remainders of longer documents are split once more
        (`packing.pack_documents`).
        """
        lengths = self.lengths
        if self.encoder is None or not (lengths % self.seq_len).any():
            return True
        longer = lengths > self.seq_len
        return int(lengths.sum()) <= self.sizes.tokens_of_block(self.seq_len) and bool(
            longer.all() or not longer.any()
        )

    @cached_property
    def lengths(self) -> np.ndarray:
        """The lengths of all documents, (documents,) int64; for samples, their estimated bytes."""
        found = [chunk.lengths for chunks in self.chunks_by_group.values() for chunk in chunks]
        return np.concatenate([np.empty(0, np.int64), *found])

    @cached_property
    def first_epoch(self) -> EpochCounts:
        chunks = [chunk for chunks in self.chunks_by_group.values() for chunk in chunks]
        bad = sum(
            chunk.bad
            for chunk in [*chunks, *(part for part in self.parts if not isinstance(part, int))]
        )
        count = len(self.lengths)
        tokens = int(self.lengths.sum()) if self.encoder else count
        rows = len(self.row_fills(0)) if count else 0
        return EpochCounts(
            count,
            tokens,
            rows,
            sum(chunk.empty for chunk in chunks),
            bad,
            sum(chunk.barren for chunk in chunks),
        )


def _packed_fill(seq_len: int, ranges: DocumentRanges, *key: object) -> RowFill:
    lengths = np.concatenate([chunk.lengths[first:last] for chunk, first, last in ranges])
    return RowFill(
        pack_documents(np.zeros_like(lengths), lengths, 0, seq_len, *key).fill, len(lengths)
    )


def _sample_fill(ranges: DocumentRanges, *key: object) -> RowFill:
    count = sum(last - first for _, first, last in ranges)
    return RowFill(np.ones(count, dtype=np.int64), count)


def read_lengths(reader: ChunkReader, request: Request, say: Say, name: str = "") -> CorpusLengths:
    """Read all documents of a local corpus once, and return their lengths.

    The tokens are stored in the token cache if there is one. `say` receives a line every ten
    seconds. Raise `ConfigError` for a row that cannot be read, unless broken rows are skipped.
    """
    reader = replace(reader, told=[""] * MAX_REPORTED_ROWS)  # the stream reports skipped rows
    parts: list[int | Chunk | SampleChunk] = []
    read: dict[tuple[int, int], list[Chunk | SampleChunk]] = {}
    said, documents = time.monotonic(), 0
    for part in range(count := len(reader.source.parts)):
        parts.append(groups := reader.groups(part))
        for group in range(groups if isinstance(groups, int) else 0):
            chunks = read[part, group] = []
            for chunk in reader.chunks(part, group, 0):
                chunks.append(_without_content(chunk))
                documents += len(chunk.lengths)
                if time.monotonic() > said + SAY_EVERY:
                    said = time.monotonic()
                    say(
                        f"counting the data{f' {name}' if name else ''}: in part {part + 1:,} of"
                        f" {count:,}, {documents:,} documents so far"
                    )
    return CorpusLengths(
        reader.source, reader.sizes, reader.encoder, request.seed, request.seq_len, parts, read
    )


def _without_content(chunk: Chunk | SampleChunk) -> Chunk | SampleChunk:
    if isinstance(chunk, SampleChunk):
        return chunk._replace(samples=[])
    return chunk._replace(
        ids=chunk.ids[:0].copy(), labels=None, starts=chunk.starts[:0], lengths=chunk.lengths.copy()
    )


def steps_for_epochs(
    corpus_lengths: CorpusLengths, epochs: float, ramp: Ramp, say: Say
) -> tuple[int, int]:
    """Return (steps in `epochs`, rows of the last step that belong to the next epoch).

    `say` receives a line every ten seconds.
    """
    exact = Fraction(str(epochs))
    whole = math.floor(exact)
    if corpus_lengths.is_regular:
        rows = whole * corpus_lengths.first_epoch.rows
    else:
        rows, said = 0, time.monotonic()
        for epoch in range(whole):
            rows += corpus_lengths.rows(epoch)
            if time.monotonic() > said + SAY_EVERY:
                said = time.monotonic()
                say(f"counting the rows of the epochs: {epoch + 1:,} of {whole:,} are packed")
    if exact > whole:
        rows += math.ceil((exact - whole) * corpus_lengths.rows(whole))
    steps = ramp.step_of(rows)
    return steps, ramp.total(steps) - rows


def epochs_after_rows(corpus_lengths: CorpusLengths, rows: int) -> tuple[float, bool]:
    """Return (number of complete epochs after `rows` rows, True if that number is exact).

    An estimate assumes that all epochs have as many rows as the first epochs. It counts as many
    first epochs as can be packed in about a second.
    """
    if corpus_lengths.is_regular:
        epoch, rest = divmod(rows, corpus_lengths.first_epoch.rows)
    else:
        epoch, rest, most = (
            0,
            rows,
            max(1, EXACT_COUNT_LIMIT // max(1, corpus_lengths.first_epoch.documents)),
        )
        while rest >= (size := corpus_lengths.rows(epoch)):
            epoch, rest = epoch + 1, rest - size
            if epoch == most:
                return rows / (rows - rest) * epoch, False
    return epoch + (
        int(corpus_lengths.row_fills(epoch)[:rest].sum()) / corpus_lengths.first_epoch.tokens
        if rest
        else 0.0
    ), True


def mixture_epochs(
    domains: list[Domain], corpora_lengths: list[CorpusLengths], request: Request, steps: int
) -> tuple[list[float], bool]:
    """Return (each corpus's number of complete epochs after `steps`, True if it is exact).

    Batches that the `request` leaves out are included.

    An estimate extrapolates from the rows that can be dealt in one to two seconds.
    """
    row_tokens = corpora_lengths[0].seq_len if corpora_lengths[0].encoder else 1
    dealt = RowDealer(
        domains,
        lambda number, place: corpora_lengths[number].blocks_from(place),
        row_tokens,
        initial_stream_state(domains, {}),
    )
    rows, ramp = 0, request.ramp
    while dealt.step < steps and rows < EXACT_COUNT_LIMIT // 4:
        pass_over(dealt, request, Passing())
        dealt.deal(ramp.rows(dealt.step + 1))
        rows = request.left_out.dealt_rows(ramp, dealt.step)
    given = [found["tokens"] if found else 0 for found in dealt.delivered]
    scale = request.left_out.dealt_rows(ramp, steps) / rows
    return [
        scale * tokens / of.first_epoch.tokens
        for tokens, of in zip(given, corpora_lengths, strict=True)
    ], dealt.step == steps


def read_corpora_lengths(corpus: Corpus, wanted: set[str], say: Say) -> dict[str, CorpusLengths]:
    """Read the corpora with the names in `wanted`, and return their document lengths.

    Raise `ConfigError` as `read_lengths` does.
    """
    parts = zip(corpus.domains, corpus.readers(), strict=True)
    return {
        domain.name: read_lengths(reader, corpus.request, say, domain.name)
        for domain, reader in parts
        if domain.name in wanted
    }
