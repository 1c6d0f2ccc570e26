"""Passes over local data, called epochs: what an epoch holds, and how many steps a number of epochs
takes.

Packing never crosses the border of two epochs: the last block of an epoch ends with it, and its
last rows are padded. So the R(e) rows of epoch e = 0, 1, ... hold each token of each document once.
R(e) changes by a few rows where the order of an epoch packs other documents together. With b(s)
rows in step s

    steps(X) = the smallest S with
               b(1) + ... + b(S) >= R(0) + ... + R(n - 1) + ceil((X - n) * R(n)),  n = floor(X)

and the rows that step S has in addition are the first ones of the next epoch. The epochs that are
complete after a step are the tokens given so far (of samples: the samples) over those of an epoch.
So one epoch is R(0) / b steps.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from ..spec.phases import Ramp
from ..spec.refusal import Say
from .blocks import Held, Place, blocks
from .chunks import TOLD, Chunk, Reader, SampleChunk
from .encode import Encoder
from .lanes import Domains
from .mixture import Domain
from .packing import pack
from .request import Request, Sizes
from .source import Source
from .stream import Corpus, start

SAY_EVERY = 10.0  # seconds
# documents or rows that are packed or dealt again for a number that may also be estimated
MOST_WORK = 1_000_000


@dataclass(frozen=True)
class Epoch:
    """What an epoch of a corpus holds, without the documents that are held out; `rows` are the rows
    of the first one.
    """

    documents: int
    tokens: int  # of samples as many as these
    rows: int
    empty: int = 0  # rows of the data that are skipped: null, empty or blank
    bad: int = 0  # that cannot be read
    barren: int = 0  # that hold no token to learn

    @property
    def skipped(self) -> int:
        return self.empty + self.bad + self.barren


class RowFill(NamedTuple):
    """The rows of a block: the tokens of each, and how many documents they are made of."""

    fill: np.ndarray  # (rows,) int64
    documents: int


@dataclass(frozen=True)
class Outline:
    """The lengths of all documents of a corpus, in its chunks.

    It takes the place of a `Reader`, to follow the order of its rows.
    """

    source: Source
    sizes: Sizes
    encoder: Encoder | None
    seed: int
    seq_len: int
    # number of groups, or a chunk that counts what cannot be read
    parts: list[int | Chunk | SampleChunk]
    read: dict[tuple[int, int], list[Chunk | SampleChunk]]  # (part, group) -> chunks without tokens

    def groups(self, part: int) -> int | Chunk | SampleChunk:
        return self.parts[part]

    def chunks(self, part: int, group: int, row: int) -> Iterator[Chunk | SampleChunk]:
        assert row == 0, "a pass is followed from its beginning"
        return iter(self.read[part, group])

    def report(self, *counts: Any, **more: Any) -> None:
        """Say nothing: the reader of the run does."""

    def rows_from(self, place: Place) -> Iterator[tuple[Place, RowFill]]:
        """Yield the blocks of the stream from the first block of an epoch on."""
        packed = self.encoder is not None
        limit = self.sizes.tokens_of_block(self.seq_len) if packed else self.sizes.block_bytes
        join = partial(_packed_fill, self.seq_len) if packed else _sample_fill
        return blocks(self, self.seed, limit, join, place)

    def fills(self, epoch: int) -> np.ndarray:
        """Return the tokens of each row of an epoch, (rows,) int64, in the order of the stream."""
        found = []
        for place, block in self.rows_from(Place(epoch=epoch)):
            if place.epoch_before > epoch:
                break
            found.append(block.fill)
            if place.epoch > epoch:
                break
        return np.concatenate(found)

    def rows(self, epoch: int) -> int:
        return self.counted.rows if self.is_regular else len(self.fills(epoch))

    @cached_property
    def is_regular(self) -> bool:
        """Return True if every epoch has as many rows as the first: its order does not change what
        is packed together, or how well.

        That holds for samples, for documents of whole rows, and for one block of documents of which
        all or none are longer than a row: only rests of longer documents are cut once more
        (`packing.pack`).
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
        """The lengths of all documents, (documents,) int64; of samples, what each takes of a
        block.
        """
        found = [chunk.lengths for chunks in self.read.values() for chunk in chunks]
        return np.concatenate([np.empty(0, np.int64), *found])

    @cached_property
    def counted(self) -> Epoch:
        chunks = [chunk for chunks in self.read.values() for chunk in chunks]
        bad = sum(
            chunk.bad
            for chunk in [*chunks, *(part for part in self.parts if not isinstance(part, int))]
        )
        count = len(self.lengths)
        tokens = int(self.lengths.sum()) if self.encoder else count
        rows = len(self.fills(0)) if count else 0
        return Epoch(
            count,
            tokens,
            rows,
            sum(chunk.empty for chunk in chunks),
            bad,
            sum(chunk.barren for chunk in chunks),
        )


def _packed_fill(seq_len: int, held: Held, *key: object) -> RowFill:
    lengths = np.concatenate([chunk.lengths[first:last] for chunk, first, last in held])
    return RowFill(pack(np.zeros_like(lengths), lengths, 0, seq_len, *key).fill, len(lengths))


def _sample_fill(held: Held, *key: object) -> RowFill:
    count = sum(last - first for _, first, last in held)
    return RowFill(np.ones(count, dtype=np.int64), count)


def outline(reader: Reader, request: Request, say: Say, name: str = "") -> Outline:
    """Read all documents of a local corpus once, for their lengths.

    Their tokens are kept in the token cache, where there is one.

    `say` gets a line every ten seconds. Raises `Refusal` for a row that cannot be read, unless
    broken rows are skipped.
    """
    reader = replace(reader, told=[""] * TOLD)  # the stream says which rows are left out
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
    return Outline(
        reader.source, reader.sizes, reader.encoder, request.seed, request.seq_len, parts, read
    )


def _without_content(chunk: Chunk | SampleChunk) -> Chunk | SampleChunk:
    if isinstance(chunk, SampleChunk):
        return chunk._replace(samples=[])
    return chunk._replace(
        ids=chunk.ids[:0].copy(), labels=None, starts=chunk.starts[:0], lengths=chunk.lengths.copy()
    )


def steps_of(of: Outline, epochs: float, ramp: Ramp, say: Say) -> tuple[int, int]:
    """Return how many steps `epochs` take, and how many rows of the last step are of the next
    epoch.

    `say` gets a line every ten seconds.
    """
    exact = Fraction(str(epochs))
    whole = math.floor(exact)
    if of.is_regular:
        rows = whole * of.counted.rows
    else:
        rows, said = 0, time.monotonic()
        for epoch in range(whole):
            rows += of.rows(epoch)
            if time.monotonic() > said + SAY_EVERY:
                said = time.monotonic()
                say(f"counting the rows of the epochs: {epoch + 1:,} of {whole:,} are packed")
    if exact > whole:
        rows += math.ceil((exact - whole) * of.rows(whole))
    steps = ramp.step_of(rows)
    return steps, ramp.total(steps) - rows


def epochs_of(of: Outline, rows: int) -> tuple[float, bool]:
    """Return the epochs that are complete after `rows` rows, and True if that is exact.

    An estimate takes the rows of all epochs for those of the first ones, as many as are packed in
    about a second.
    """
    if of.is_regular:
        epoch, rest = divmod(rows, of.counted.rows)
    else:
        epoch, rest, most = 0, rows, max(1, MOST_WORK // max(1, of.counted.documents))
        while rest >= (size := of.rows(epoch)):
            epoch, rest = epoch + 1, rest - size
            if epoch == most:
                return rows / (rows - rest) * epoch, False
    return epoch + (int(of.fills(epoch)[:rest].sum()) / of.counted.tokens if rest else 0.0), True


def epochs_of_mixture(
    domains: list[Domain], outlines: list[Outline], ramp: Ramp, steps: int
) -> tuple[list[float], bool]:
    """Return the epochs of each corpus that are complete after `steps`, and True if that is exact.

    An estimate lets the run go on as it began, for as many rows as are dealt in a second or two.
    """
    row_tokens = outlines[0].seq_len if outlines[0].encoder else 1
    dealt = Domains(
        domains,
        lambda number, place: outlines[number].rows_from(place),
        row_tokens,
        start(domains, {}),
    )
    rows = 0
    while dealt.step < steps and rows < MOST_WORK // 4:
        rows += ramp.rows(dealt.step + 1)
        dealt.deal(ramp.rows(dealt.step + 1))
    given = [found["tokens"] if found else 0 for found in dealt.given]
    scale = ramp.total(steps) / rows
    return [
        scale * tokens / of.counted.tokens for tokens, of in zip(given, outlines, strict=True)
    ], dealt.step == steps


def outlines_of(corpus: Corpus, wanted: set[str], say: Say) -> dict[str, Outline]:
    """Read the corpora of these names for their lengths. Raises `Refusal` as `outline` does."""
    parts = zip(corpus.domains, corpus.readers(), strict=True)
    return {
        domain.name: outline(reader, corpus.request, say, domain.name)
        for domain, reader in parts
        if domain.name in wanted
    }
