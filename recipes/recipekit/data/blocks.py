"""A corpus as an endless sequence of packed blocks, in an order drawn for each epoch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..spec.refusal import Refusal, refuse
from .encode import Counts
from .masks import Masks
from .packing import Block, make_block, permutation
from .source import Source


@dataclass(frozen=True)
class Place:
    """Says where reading of an endless corpus goes on.

    Part and group are positions in the orders drawn for the epoch; then come the row, and the
    document of the chunk that begins there.
    """

    epoch: int = 0
    part: int = 0
    group: int = 0
    row: int = 0
    document: int = 0
    bad: int = 0  # broken rows skipped before it
    lost: Sequence[int] = ()  # `Counts.numbers` of the chats before it; empty without chats
    empty: int = 0  # empty rows before it

    @property
    def key(self) -> tuple[int, ...]:
        """The key of the order in which a block that starts here is packed and shuffled."""
        return self.epoch, self.part, self.group, self.row, self.document, self.bad

    @property
    def epoch_before(self) -> int:
        """The epoch of the documents that end here: a block within an epoch ends behind a document
        of a chunk.
        """
        return self.epoch if any(self.key[1:5]) else self.epoch - 1

    @property
    def next_epoch(self) -> "Place":
        """The place where the next epoch begins."""
        return Place(self.epoch + 1, bad=self.bad, lost=self.lost, empty=self.empty)

    def after(self, chunk: Any) -> "Place":
        """Return the place behind a chunk that begins here."""
        return replace(
            self,
            row=chunk.row,
            document=0,
            bad=self.bad + chunk.bad,
            lost=added(self.lost, chunk.counts.numbers),
            empty=self.empty + chunk.empty,
        )


Held = list[tuple[Any, int, int]]  # chunks, and from which to before which of their documents


@dataclass
class _OpenBlock:
    """A block that takes documents until it has enough tokens."""

    begin: Place
    held: Held = field(default_factory=list)
    tokens: int = 0

    def take(self, chunk: Any, first: int, limit: int) -> int:
        """Take the documents of a chunk from `first` on that fit into `limit` tokens, and return
        the number of the next document.

        An empty block takes its first document whatever its length.
        """
        sums = np.cumsum(chunk.lengths[first:])
        fitting = int(np.searchsorted(sums, limit - self.tokens, side="right"))
        count = max(fitting, 0 if self.held else 1)
        if count:
            self.held.append((chunk, first, first + count))
            self.tokens += int(sums[count - 1])
        return first + count


@dataclass
class _RowCounts:
    """Counts of the rows read so far, for the report on the first rows and for refusals."""

    reader: Any
    is_reported: bool
    counts: Counts = field(default_factory=Counts)
    rows: int = 0
    empty: int = 0
    bad: int = 0
    barren: int = 0  # documents without a target since the last document with one

    def add(self, chunk: Any) -> None:
        """Count a chunk. Raise `Refusal` if too many consecutive documents have no target."""
        self.counts += chunk.counts
        self.rows += chunk.rows
        self.empty += chunk.empty
        self.bad += chunk.bad
        self.barren = 0 if len(chunk.lengths) else self.barren + chunk.barren
        if self.barren >= self.reader.sizes.barren_documents:
            raise _no_target(self.barren, self.reader)

    def report(self, is_all: bool) -> None:
        """Report the first rows, once; `is_all`: they are the rows of a whole epoch."""
        if not self.is_reported:
            self.reader.report(self.counts, self.rows, self.empty, is_all=is_all)
            self.is_reported = True

    def nothing_to_train_on(self) -> Refusal:
        """Return the refusal of an epoch without a document."""
        if self.barren:
            return _no_target(self.barren, self.reader)
        return no_document(self.reader.source, self.rows, self.empty, self.bad)


def blocks(
    reader: Any, seed: int, limit: int, join: Callable[..., Any], place: Place
) -> Iterator[tuple[Place, Any]]:
    """Yield blocks of `limit` tokens from `place` on, without end: (the place after the block,
    what `join` makes of its documents and a key).

    Raises `Refusal` if there is no document.
    """
    # A resume behind the first rows does not report them: an earlier start has done so.
    counts = _RowCounts(reader, is_reported=any(place.key))

    while True:
        block, any_document = _OpenBlock(place), any(place.key[1:5])
        for at, chunk in _epoch(reader, seed, place):
            counts.add(chunk)
            first = at.document
            any_document |= first < len(chunk.lengths)
            while first < len(chunk.lengths):
                first = block.take(chunk, first, limit)
                if first < len(chunk.lengths) or block.tokens >= limit:
                    counts.report(is_all=False)
                    place = replace(at, document=first)
                    yield place, join(block.held, seed, *block.begin.key)
                    block = _OpenBlock(place)
            place = at.after(chunk)

        # A block never crosses the border of two epochs: the last one holds what is left.
        counts.report(is_all=True)
        place = place.next_epoch
        if block.held:
            yield place, join(block.held, seed, *block.begin.key)
        elif not any_document:
            raise counts.nothing_to_train_on()


def added(one: Sequence[int], more: Sequence[int]) -> Sequence[int]:
    """Add up numbers of chats; without chats they are empty."""
    return tuple(map(sum, zip(one, more, strict=True))) if one and more else one or more


def no_document(source: Source, rows: int, empty: int, bad: int) -> Refusal:
    """Return the refusal of data without a document to train on, with the columns that were
    read.
    """
    met = (
        f". Its columns are {', '.join(map(repr, columns))}"
        if (columns := source.columns())
        else ""
    )
    if not rows and not bad:
        return refuse("--dataset", f"contains no rows{met}", "set --dataset to other data")
    left = rows - empty - bad
    held = f" and {left:,} held out for evaluation" if left > 0 else ""
    rule = (
        f"contains no document to train on: of {max(rows, empty + bad):,} rows {empty:,} are empty,"
        f" {bad:,} cannot be read{held}{met}"
    )
    return refuse(
        "--dataset",
        rule,
        "add more data, or name another column (--text_field, --messages_field, ...)",
    )


def _no_target(documents: int, reader: Any) -> Refusal:
    fix = "use longer documents"
    if reader.encoder.chats:
        needed = "a message of the role assistant that is not excluded by weight or train"
        fix = f"each chat needs {needed} and begins within --seq_len tokens"
    return refuse(
        "--dataset", f"{documents} consecutive documents contain no token to train on", fix
    )


def _epoch(reader: Any, seed: int, place: Place) -> Iterator[tuple[Place, Any]]:
    """Yields the chunks of the epoch from `place` on, each with its place."""
    source, bad, lost, empty = reader.source, place.bad, place.lost, place.empty
    parts = permutation(len(source.parts), seed, place.epoch)
    for part in range(place.part, len(parts)):
        number = int(parts[part])
        count = reader.groups(number)
        if not isinstance(count, int):  # a chunk that counts what cannot be read
            yield Place(place.epoch, part, bad=bad, lost=lost, empty=empty), count
            bad += count.bad
            continue
        groups = permutation(count, seed, place.epoch, number)
        for group in range(place.group if part == place.part else 0, len(groups)):
            resumed = part == place.part and group == place.group
            row, document = (place.row, place.document) if resumed else (0, 0)
            for chunk in reader.chunks(number, int(groups[group]), row):
                yield Place(place.epoch, part, group, row, document, bad, lost, empty), chunk
                row, document, bad, lost, empty = (
                    chunk.row,
                    0,
                    bad + chunk.bad,
                    added(lost, chunk.counts.numbers),
                    empty + chunk.empty,
                )


def packed(seq_len: int, pad: int, held: Held, *key: object, masks: Masks | None = None) -> Block:
    """Packs documents of several chunks into rows of `seq_len` tokens; `masks` hides some of
    these.
    """
    ids, labels, starts, lengths, base = [], [], [], [], 0
    for chunk, first, last in held:
        low, high = int(chunk.starts[first]), int(chunk.starts[last - 1] + chunk.lengths[last - 1])
        ids.append(chunk.ids[low:high])
        if chunk.labels is not None:
            labels.append(chunk.labels[low:high])
        starts.append(chunk.starts[first:last] + (base - low))
        lengths.append(chunk.lengths[first:last])
        base += high - low
    if masks:
        ids, labels = ([tokens] for tokens in masks(np.concatenate(ids), *key))
    return make_block(
        ids, labels, np.concatenate(starts), np.concatenate(lengths), seq_len, pad, *key
    )
