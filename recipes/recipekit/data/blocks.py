"""A corpus as an endless sequence of packed blocks, in an order drawn for each epoch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


Held = list[tuple[Any, int, int]]  # chunks, and from which to before which of their documents


def blocks(
    reader: Any, seed: int, limit: int, join: Callable[..., Any], place: Place
) -> Iterator[tuple[Place, Any]]:
    """Yields blocks of `limit` tokens from `place` on, without end: (the place after the block,
    what `join` makes of its documents and a key).

    Raises `Refusal` if there is no document.
    """
    barren, counts, rows, empty, bad = 0, Counts(), 0, 0, 0
    # a resume behind the first rows, which an earlier start has reported
    is_reported = any(place.key)
    while True:
        held: Held = []
        tokens, begin, epoch, any_document = 0, place, place.epoch, any(place.key[1:5])
        for at, chunk in _epoch(reader, seed, place):
            first = at.document
            counts += chunk.counts
            rows, empty, bad = rows + chunk.rows, empty + chunk.empty, bad + chunk.bad
            barren = 0 if len(chunk.lengths) else barren + chunk.barren
            if barren >= reader.sizes.barren_documents:
                raise _no_target(barren, reader)
            while first < len(chunk.lengths):
                sums = np.cumsum(chunk.lengths[first:])
                count = max(
                    int(np.searchsorted(sums, limit - tokens, side="right")), 0 if held else 1
                )
                if count:
                    held.append((chunk, first, first + count))
                    tokens += int(sums[count - 1])
                    first += count
                    any_document = True
                if first < len(chunk.lengths) or tokens >= limit:
                    if not is_reported:
                        reader.report(counts, rows, empty, is_all=False)
                        is_reported = True
                    place = Place(
                        at.epoch, at.part, at.group, at.row, first, at.bad, at.lost, at.empty
                    )
                    yield place, join(held, seed, *begin.key)
                    held, tokens, begin = [], 0, place
            place = Place(
                at.epoch,
                at.part,
                at.group,
                chunk.row,
                0,
                at.bad + chunk.bad,
                added(at.lost, chunk.counts.numbers),
                at.empty + chunk.empty,
            )
        if not is_reported:
            reader.report(counts, rows, empty, is_all=True)
            is_reported = True
        if held:
            place = Place(epoch=epoch + 1, bad=place.bad, lost=place.lost, empty=place.empty)
            yield place, join(held, seed, *begin.key)
        elif not any_document:
            raise (
                _no_target(barren, reader)
                if barren
                else no_document(reader.source, rows, empty, bad)
            )
        place = Place(epoch=epoch + 1, bad=place.bad, lost=place.lost, empty=place.empty)


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
