"""A corpus as an endless sequence of packed blocks, reshuffled for each epoch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..spec.errors import ConfigError, config_error
from .encode import ChatCounts
from .masking import TokenMasker
from .packing import PackedBlock, make_packed_block, permutation
from .source import Source

if TYPE_CHECKING:
    from .chunks import Chunk, SampleChunk
    from .encode import Encoder
    from .request import Sizes


class BlockReader(Protocol):
    """The members of a `ChunkReader` that blocks are read with."""

    @property
    def source(self) -> Source: ...
    @property
    def sizes(self) -> "Sizes": ...
    @property
    def encoder(self) -> "Encoder | None": ...
    def groups(self, part: int) -> "int | Chunk | SampleChunk": ...
    def chunks(self, part: int, group: int, row: int) -> "Iterator[Chunk | SampleChunk]": ...
    def report(self, counts: ChatCounts, rows: int, empty: int, /, *, is_all: bool) -> None: ...


@dataclass(frozen=True)
class StreamPosition:
    """The position at which a run resumes reading an endless corpus.

    `part` and `group` are indices into the epoch's shuffled orders. `row` is the first row of a
    chunk, and `document` is an index into that chunk's documents.
    """

    epoch: int = 0
    part: int = 0
    group: int = 0
    row: int = 0
    document: int = 0
    bad: int = 0  # broken rows skipped before this position
    lost: Sequence[int] = ()  # `ChatCounts.numbers` of all earlier chats; empty without chats
    empty: int = 0  # empty rows before this position

    @property
    def key(self) -> tuple[int, ...]:
        """The key that seeds the packing and shuffling of a block that starts here."""
        return self.epoch, self.part, self.group, self.row, self.document, self.bad

    @property
    def epoch_before(self) -> int:
        """The epoch of the document before this position.

        Part, group, row and document are all 0 only at the start of an epoch.
        """
        return self.epoch if any(self.key[1:5]) else self.epoch - 1

    @property
    def next_epoch(self) -> "StreamPosition":
        """The position where the next epoch begins."""
        return StreamPosition(self.epoch + 1, bad=self.bad, lost=self.lost, empty=self.empty)

    def after(self, chunk: "Chunk | SampleChunk") -> "StreamPosition":
        """Return the position after a chunk that begins here."""
        return replace(
            self,
            row=chunk.row,
            document=0,
            bad=self.bad + chunk.bad,
            lost=add_counts(self.lost, chunk.counts.numbers),
            empty=self.empty + chunk.empty,
        )


DocumentRanges = list[
    tuple[Any, int, int]
]  # each chunk with the index of its first document and the index after its last


@dataclass
class _OpenBlock:
    """A block that collects documents until it has enough tokens."""

    start: StreamPosition
    ranges: DocumentRanges = field(default_factory=list)
    tokens: int = 0

    def take(self, chunk: "Chunk | SampleChunk", first: int, limit: int) -> int:
        """Add as many documents of a chunk, from `first` on, as fit into `limit` tokens.

        Return the index of the next document. An empty block accepts its first document even if
        that document exceeds `limit`.
        """
        sums = np.cumsum(chunk.lengths[first:])
        fitting = int(np.searchsorted(sums, limit - self.tokens, side="right"))
        count = max(fitting, 0 if self.ranges else 1)
        if count:
            self.ranges.append((chunk, first, first + count))
            self.tokens += int(sums[count - 1])
        return first + count


@dataclass
class _RowCounts:
    """Counts of the rows read so far, for the report about the first rows and for config errors."""

    reader: BlockReader
    is_reported: bool
    counts: ChatCounts = field(default_factory=ChatCounts)
    rows: int = 0
    empty: int = 0
    bad: int = 0
    barren: int = 0  # documents without a target since the last document with a target

    def add(self, chunk: "Chunk | SampleChunk") -> None:
        """Count a chunk; raise `ConfigError` if too many consecutive documents have no target."""
        self.counts += chunk.counts
        self.rows += chunk.rows
        self.empty += chunk.empty
        self.bad += chunk.bad
        self.barren = 0 if len(chunk.lengths) else self.barren + chunk.barren
        if self.barren >= self.reader.sizes.barren_documents:
            raise _no_target_error(self.barren, self.reader)

    def report(self, is_all: bool) -> None:
        """Report the counts of the first rows once.

        `is_all` is True if these rows are a full epoch.
        """
        if not self.is_reported:
            self.reader.report(self.counts, self.rows, self.empty, is_all=is_all)
            self.is_reported = True

    def nothing_to_train_on(self) -> ConfigError:
        """Return the config error for an epoch without documents."""
        if self.barren:
            return _no_target_error(self.barren, self.reader)
        return no_document_error(self.reader.source, self.rows, self.empty, self.bad)


def iter_blocks(
    reader: BlockReader,
    seed: int,
    limit: int,
    build_block: Callable[..., Any],
    place: StreamPosition,
) -> Iterator[tuple[StreamPosition, Any]]:
    """Yield blocks of `limit` tokens without end, starting at `place`.

    Each item is (the position after the block, the result of `build_block`). `build_block` receives
    the block's documents and a key. Raise `ConfigError` if the corpus has no document.
    """
    # If a run resumes after the first rows, it does not report them, because an earlier start has
    # already done so.
    counts = _RowCounts(reader, is_reported=any(place.key))

    while True:
        block, any_document = _OpenBlock(place), any(place.key[1:5])
        for at, chunk in _epoch_chunks(reader, seed, place):
            counts.add(chunk)
            first = at.document
            any_document |= first < len(chunk.lengths)
            while first < len(chunk.lengths):
                first = block.take(chunk, first, limit)
                if first < len(chunk.lengths) or block.tokens >= limit:
                    counts.report(is_all=False)
                    place = replace(at, document=first)
                    yield place, build_block(block.ranges, seed, *block.start.key)
                    block = _OpenBlock(place)
            place = at.after(chunk)

        # Since a block never spans two epochs, the last block of an epoch may be smaller.
        counts.report(is_all=True)
        place = place.next_epoch
        if block.ranges:
            yield place, build_block(block.ranges, seed, *block.start.key)
        elif not any_document:
            raise counts.nothing_to_train_on()


def add_counts(one: Sequence[int], more: Sequence[int]) -> Sequence[int]:
    """Add chat counts element by element; the counts of a corpus without chats are empty."""
    return tuple(map(sum, zip(one, more, strict=True))) if one and more else one or more


def no_document_error(source: Source, rows: int, empty: int, bad: int) -> ConfigError:
    """Return the config error for data without trainable documents; the error lists the columns
    read.
    """
    met = (
        f". Its columns are {', '.join(map(repr, columns))}"
        if (columns := source.columns())
        else ""
    )
    if not rows and not bad:
        return config_error("--dataset", f"contains no rows{met}", "set --dataset to other data")
    left = rows - empty - bad
    held = f" and {left:,} held out for evaluation" if left > 0 else ""
    rule = (
        f"contains no document to train on: of {max(rows, empty + bad):,} rows {empty:,} are empty,"
        f" {bad:,} cannot be read{held}{met}"
    )
    return config_error(
        "--dataset",
        rule,
        "add more data, or name another column (--text_field, --messages_field, ...)",
    )


def _no_target_error(documents: int, reader: BlockReader) -> ConfigError:
    fix = "use longer documents"
    assert reader.encoder is not None
    if reader.encoder.chats:
        needed = "a message of the role assistant that is not excluded by weight or train"
        fix = f"each chat needs {needed} and begins within --seq_len tokens"
    return config_error(
        "--dataset", f"{documents} consecutive documents contain no token to train on", fix
    )


def _epoch_chunks(
    reader: BlockReader, seed: int, place: StreamPosition
) -> Iterator[tuple[StreamPosition, Any]]:
    """Yield an epoch's chunks with their positions, starting at `place`."""
    source, bad, lost, empty = reader.source, place.bad, place.lost, place.empty
    parts = permutation(len(source.parts), seed, place.epoch)
    for part in range(place.part, len(parts)):
        number = int(parts[part])
        count = reader.groups(number)
        if not isinstance(count, int):  # a chunk that counts the unreadable part
            yield StreamPosition(place.epoch, part, bad=bad, lost=lost, empty=empty), count
            bad += count.bad
            continue
        groups = permutation(count, seed, place.epoch, number)
        for group in range(place.group if part == place.part else 0, len(groups)):
            resumed = part == place.part and group == place.group
            row, document = (place.row, place.document) if resumed else (0, 0)
            for chunk in reader.chunks(number, int(groups[group]), row):
                yield (
                    StreamPosition(place.epoch, part, group, row, document, bad, lost, empty),
                    chunk,
                )
                row, document, bad, lost, empty = (
                    chunk.row,
                    0,
                    bad + chunk.bad,
                    add_counts(lost, chunk.counts.numbers),
                    empty + chunk.empty,
                )


def pack_chunks(
    seq_len: int, pad: int, ranges: DocumentRanges, *key: object, masks: TokenMasker | None = None
) -> PackedBlock:
    """Pack documents from several chunks into rows of `seq_len` tokens.

    `masks`, if given, masks some of the tokens.
    """
    ids, labels, starts, lengths, base = [], [], [], [], 0
    for chunk, first, last in ranges:
        low, high = int(chunk.starts[first]), int(chunk.starts[last - 1] + chunk.lengths[last - 1])
        ids.append(chunk.ids[low:high])
        if chunk.labels is not None:
            labels.append(chunk.labels[low:high])
        starts.append(chunk.starts[first:last] + (base - low))
        lengths.append(chunk.lengths[first:last])
        base += high - low
    if masks:
        ids, labels = ([tokens] for tokens in masks(np.concatenate(ids), *key))
    return make_packed_block(
        ids, labels, np.concatenate(starts), np.concatenate(lengths), seq_len, pad, *key
    )
