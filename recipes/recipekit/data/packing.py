"""Packing: the assignment of documents to rows.

The assignment depends only on the documents' lengths and a key.
"""

import hashlib
from typing import NamedTuple

import numpy as np

from ..spec.task import IGNORE


def keyed_hashes(numbers: np.ndarray, *key: object) -> np.ndarray:
    """Return a pseudo-random number below 2^64 for each of `numbers`, (n,) -> (n,) uint64.

    The result depends only on (key, number), and must never change between versions. The function
    is splitmix64 (Steele, Lea and Flood, OOPSLA 2014), seeded with a hash of the key. Different
    numbers have different results because each step of splitmix64 is invertible.
    """
    begin = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(begin)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def permutation(count: int, *key: object) -> np.ndarray:
    """Return 0 .. count-1, sorted by hashes that depend only on `key`."""
    return np.argsort(keyed_hashes(np.arange(count, dtype=np.uint64), *key))


class Packing(NamedTuple):
    """Rows filled with segments: documents, seq_len tokens of longer documents, and padding.

    The segments are sorted by row.
    """

    # (segments,) int64: index of each segment's first token in the sequence of all documents'
    # tokens and the padding
    starts: np.ndarray
    lengths: np.ndarray  # (segments,) int64
    first_segment: np.ndarray  # (rows + 1,) int64: index of each row's first segment
    fill: np.ndarray  # (rows,) int64: document tokens in each row


def pack_documents(
    starts: np.ndarray, lengths: np.ndarray, padding: int, seq_len: int, *key: object
) -> Packing:
    """Pack documents of `lengths` (> 0) tokens, which start at `starts`, into rows of `seq_len`.

    The number of rows never exceeds the number that best-fit decreasing needs. `key` determines the
    order of the rows, and of documents with equal lengths. Only a document that is longer than a
    row is split: into full rows and a remainder (best-fit packing: arXiv 2404.10830). The remainder
    is split once more if that saves a row. A row that is not full ends with tokens that start at
    index `padding`.
    """
    whole = lengths // seq_len  # (documents,): full rows of each document
    number = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    full_starts = np.repeat(starts, whole) + number * seq_len

    rest = lengths - whole * seq_len
    if not rest.any():  # all rows have a single segment; the general case below gives the same
        order = permutation(len(full_starts), "rows", *key)
        full = np.full(len(order), seq_len)
        return Packing(full_starts[order], full, np.arange(len(order) + 1), full)

    rests = _pack_remainders(starts + whole * seq_len, rest, whole > 0, seq_len, *key)
    return _shuffle_and_pad(full_starts, rests, padding, seq_len, *key)


def _pack_remainders(
    starts: np.ndarray, sizes: np.ndarray, is_remainder: np.ndarray, seq_len: int, *key: object
) -> np.ndarray:
    """Pack the remainders of documents into rows.

    Return (3, segments) int64: each segment's first token, number of tokens, and row. `sizes` is 0
    for a document without a remainder. `is_remainder` is True for a document that is longer than a
    row. `key` determines the order of remainders with equal sizes.
    """
    left = np.flatnonzero(sizes)
    left = left[permutation(len(left), "ties", *key)]
    left = left[np.argsort(-sizes[left], kind="stable")]

    tokens = sizes[left].tolist()
    pieces = list(zip(starts[left].tolist(), tokens, _best_fit(tokens, seq_len), strict=True))
    pieces = _dissolve_rows(pieces, is_remainder[left].tolist(), seq_len)
    return np.array(pieces, dtype=np.int64).reshape(-1, 3).T


def _shuffle_and_pad(
    full_starts: np.ndarray, remainders: np.ndarray, padding: int, seq_len: int, *key: object
) -> Packing:
    """Order the full rows and the rows of `remainders` by `key`, and pad incomplete rows.

    A row's padding is a separate segment.
    """
    num_full = len(full_starts)
    rest_starts, rest_sizes, rest_rows = remainders
    num_rows = num_full + (int(rest_rows.max()) + 1 if len(rest_rows) else 0)
    rank = np.empty(num_rows, dtype=np.int64)  # position of each row in the shuffled order
    rank[permutation(num_rows, "rows", *key)] = np.arange(num_rows)
    rows = np.concatenate([rank[:num_full], rank[num_full + rest_rows]])
    sizes = np.concatenate([np.full(num_full, seq_len), rest_sizes])

    fill = np.bincount(rows, sizes, minlength=num_rows).astype(np.int64)
    padded = np.flatnonzero(fill < seq_len)
    rows = np.concatenate([rows, padded])
    sizes = np.concatenate([sizes, seq_len - fill[padded]])
    starts = np.concatenate([full_starts, rest_starts, np.full(len(padded), padding)])

    # The sort is stable, so each row's padding stays behind the row's other segments.
    order = np.argsort(rows, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=num_rows))])
    return Packing(starts[order], sizes[order], first, fill)


def _best_fit(sizes: list[int], seq_len: int) -> list[int]:
    """Return a row for each size: the fullest row with enough room, or a new row.

    `sizes` must be in descending order.
    """
    rows_with_room: dict[int, list[int]] = {}  # free tokens -> rows with exactly this many
    # One bit per non-empty key of `rows_with_room`, so that the smallest sufficient room is found
    # directly.
    rooms = 0
    rows, count = [], 0
    for size in sizes:
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            having = rows_with_room[room]
            row = having.pop()
            if not having:
                rooms ^= 1 << room
        else:
            room, row, count = seq_len, count, count + 1
        rows.append(row)
        if room > size:
            having = rows_with_room.setdefault(room - size, [])
            if not having:
                rooms |= 1 << (room - size)
            having.append(row)
    return rows


PackedSegment = tuple[int, int, int]  # first token, tokens, row


def _dissolve_rows(
    segments: list[PackedSegment], is_remainder: list[bool], seq_len: int
) -> list[PackedSegment]:
    """Move segments into fewer rows by splitting remainders over the gaps of other rows.

    The emptiest row is dissolved if it contains only remainders of longer documents. These
    remainders move to the gaps of the other rows, in parts of at least a 32nd of a row.
    """
    segments, is_remainder, gone = list(segments), list(is_remainder), set[int]()
    gaps, held = _row_contents(segments, seq_len)
    least = max(1, seq_len // 32)

    for donor in sorted(range(len(gaps)), key=lambda row: (-gaps[row], row)):
        needed = seq_len - gaps[donor]
        if sum(gaps) - gaps[donor] < needed:
            break
        if not all(is_remainder[number] for number in held[donor]):
            continue
        takers = _rows_with_room(gaps, least, gone | {donor})
        if sum(gaps[row] for row in takers) < needed:
            continue

        for number in held[donor]:
            segments[number], *others = _split_into_gaps(segments[number], takers, gaps)
            held[segments[number][2]].append(number)
            for other in others:
                held[other[2]].append(len(segments))
                segments.append(other)
                is_remainder.append(True)
        gone.add(donor)
        gaps[donor] = 0

    left = (row for row in range(len(gaps)) if row not in gone)
    rank = {row: number for number, row in enumerate(left)}
    return [(start, size, rank[row]) for start, size, row in segments]


def _row_contents(segments: list[PackedSegment], seq_len: int) -> tuple[list[int], list[list[int]]]:
    """Return the number of free tokens in each row, and the indices of the row's segments."""
    count = max((row for _, _, row in segments), default=-1) + 1
    gaps = [seq_len] * count
    held: list[list[int]] = [[] for _ in range(count)]
    for number, (_, size, row) in enumerate(segments):
        gaps[row] -= size
        held[row].append(number)
    return gaps, held


def _rows_with_room(gaps: list[int], least: int, excluded: set[int]) -> list[int]:
    """Return the rows with at least `least` free tokens, emptiest row first."""
    rows = (row for row in range(len(gaps)) if row not in excluded and gaps[row] >= least)
    return sorted(rows, key=lambda row: (-gaps[row], row))


def _split_into_gaps(
    segment: PackedSegment, rows: list[int], gaps: list[int]
) -> list[PackedSegment]:
    """Split a segment into parts that fill the gaps of `rows`, one row after the other.

    A row that becomes full is removed from `rows`.
    """
    start, size, _ = segment
    parts = []
    while size:
        row = rows[0]
        part = min(size, gaps[row])
        parts.append((start, part, row))
        start, size = start + part, size - part
        gaps[row] -= part
        if not gaps[row]:
            rows.pop(0)
    return parts


class PackedBlock(NamedTuple):
    """Documents and the rows into which they are packed."""

    parts: list[np.ndarray]  # each (tokens,) int32; empty if `ids` contains the joined parts
    # (parts + 1,) int64: start of each part in the joined ids; bases[-1] is the start of seq_len
    # padding tokens
    bases: np.ndarray
    # (tokens + seq_len,) int32: all parts and the padding; None if every row is a single segment
    ids: np.ndarray | None
    # same shape as ids: the target of each token or IGNORE; None if the target is the segment's
    # next token
    labels: np.ndarray | None
    packing: Packing
    documents: int = 0

    @property
    def fill(self) -> np.ndarray:
        return self.packing.fill


def make_packed_block(
    ids: list[np.ndarray],
    labels: list[np.ndarray],
    starts: np.ndarray,
    lengths: np.ndarray,
    seq_len: int,
    pad: int,
    *key: object,
) -> PackedBlock:
    """Pack the documents at `starts` in the joined `ids`, (tokens,) int32 each, ordered by `key`.

    `labels` must have the shape of `ids`, or be empty.
    """
    bases = np.cumsum([0, *map(len, ids)])
    packing = pack_documents(starts, lengths, int(bases[-1]), seq_len, *key)
    if not labels and (packing.lengths == seq_len).all() and (packing.fill == seq_len).all():
        return PackedBlock(ids, bases, None, None, packing, len(lengths))
    all_ids = np.concatenate([*ids, np.full(seq_len, pad, np.int32)])
    all_labels = np.concatenate([*labels, np.full(seq_len, IGNORE, np.int32)]) if labels else None
    return PackedBlock([], bases, all_ids, all_labels, packing, len(lengths))


def fill_single_segment_rows(rows: np.ndarray, block: PackedBlock, row: int) -> None:
    """Write single-segment rows, starting at `row`, into (rows, seq_len + 1) int64.

    Each output row contains the ids, followed by IGNORE. Without its first value, the output row
    contains the labels.
    """
    count, seq_len = rows.shape[0], rows.shape[1] - 1
    starts = block.packing.starts[row : row + count]
    part_of = np.searchsorted(block.bases, starts, side="right") - 1
    for number in range(part_of.min(), part_of.max() + 1):
        part, mine = block.parts[number], np.flatnonzero(part_of == number)
        if len(mine):
            # a view of all windows of seq_len tokens in `ids`
            windows = np.ndarray(
                (len(part) - seq_len + 1, seq_len), part.dtype, part, strides=2 * part.strides
            )
            rows[mine, :-1] = windows[starts[mine] - block.bases[number]]
    rows[:, -1] = IGNORE


def fill_rows(ids: np.ndarray, labels: np.ndarray, block: PackedBlock, row: int) -> None:
    """Write the ids and labels of a block's rows, starting at `row`, (rows, seq_len) int64 each.

    A token's label is the segment's next token or IGNORE. The padding at the end of a row is a
    separate segment without labels.
    """
    count, seq_len = ids.shape
    if block.ids is None:
        whole = np.empty((count, seq_len + 1), np.int64)
        fill_single_segment_rows(whole, block, row)
        ids[...], labels[...] = whole[:, :-1], whole[:, 1:]
        return
    starts, lengths, first, fill = block.packing
    pieces = slice(first[row], first[row + count])
    starts, lengths = starts[pieces], lengths[pieces]
    spans = list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True))
    np.concatenate([block.ids[start:end] for start, end in spans], out=ids.reshape(-1))
    if block.labels is not None:
        np.concatenate([block.labels[start:end] for start, end in spans], out=labels.reshape(-1))
        return
    labels[:, :-1] = ids[:, 1:]
    labels.reshape(-1)[np.cumsum(lengths) - 1] = IGNORE
    for at in np.flatnonzero(fill[row : row + count] < seq_len).tolist():
        labels[at, fill[row + at] :] = IGNORE


def fill_positions(positions: np.ndarray, block: PackedBlock, row: int) -> None:
    """Write the positions of a block's rows, starting at `row`, into (rows, seq_len) int64.

    Positions restart at 0 in each segment.
    """
    count, seq_len = positions.shape
    first = block.packing.first_segment
    ramp = np.arange(seq_len)
    np.concatenate(
        [ramp[:size] for size in block.packing.lengths[first[row] : first[row + count]].tolist()],
        out=positions.reshape(-1),
    )
