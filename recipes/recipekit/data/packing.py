"""Packing: which documents lie together in which row.

A pure function of the documents' lengths and a key.
"""

import hashlib
from typing import NamedTuple

import numpy as np

from ..spec.task import IGNORE


def hashes(numbers: np.ndarray, *key: object) -> np.ndarray:
    """Draws a number below 2^64 for each of `numbers`, (n,) -> (n,) uint64, from (key, number)
    only, in every version of everything.

    It is splitmix64 (Steele, Lea and Flood, OOPSLA 2014), begun at a hash of the key; no two are
    equal, since each step has an inverse.
    """
    begin = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(begin)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def permutation(count: int, *key: object) -> np.ndarray:
    """Orders 0 .. count-1 in a way that depends on `key` only: each number is sorted by its
    hash.
    """
    return np.argsort(hashes(np.arange(count, dtype=np.uint64), *key))


class Packing(NamedTuple):
    """Describes rows tiled by pieces: documents, parts of seq_len tokens of longer ones, and
    padding.

    Pieces are in the order of their rows.
    """

    # (pieces,) int64: first token of the piece, among the tokens of all documents and the padding
    # after them
    starts: np.ndarray
    lengths: np.ndarray  # (pieces,) int64
    first: np.ndarray  # (rows + 1,) int64: the row's first piece
    fill: np.ndarray  # (rows,) int64: tokens of documents that the row holds


def pack(
    begin: np.ndarray, lengths: np.ndarray, padding: int, seq_len: int, *key: object
) -> Packing:
    """Packs the documents of `lengths` (> 0) tokens that start at token `begin` into as few rows of
    `seq_len` as best-fit decreasing needs.

    Rows, and documents of one length, are in an order drawn by `key`. Only a document longer than a
    row is cut: into whole rows and a rest (best-fit packing: arXiv 2404.10830), and the rest once
    more where that saves a row. A row that is not full ends with tokens from `padding` on.
    """
    whole = lengths // seq_len  # (documents,): rows that each document fills
    number = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    full_starts = np.repeat(begin, whole) + number * seq_len

    rest = lengths - whole * seq_len
    if not rest.any():  # each row is one piece; the general case below gives the same
        order = permutation(len(full_starts), "rows", *key)
        full = np.full(len(order), seq_len)
        return Packing(full_starts[order], full, np.arange(len(order) + 1), full)

    rests = _pack_rests(begin + whole * seq_len, rest, whole > 0, seq_len, *key)
    return _shuffle_and_pad(full_starts, rests, padding, seq_len, *key)


def _pack_rests(
    starts: np.ndarray, sizes: np.ndarray, of_longer: np.ndarray, seq_len: int, *key: object
) -> np.ndarray:
    """Pack the rests of documents that are shorter than a row: (3, pieces) int64, which are the
    first token, the tokens and the row of each piece.

    `sizes` is 0 for a document without a rest. `of_longer` is true for the rest of a document that
    is longer than a row. Rests of one size are in an order drawn by `key`.
    """
    left = np.flatnonzero(sizes)
    left = left[permutation(len(left), "ties", *key)]
    left = left[np.argsort(-sizes[left], kind="stable")]

    tokens = sizes[left].tolist()
    pieces = list(zip(starts[left].tolist(), tokens, _best_fit(tokens, seq_len), strict=True))
    pieces = _dissolved(pieces, of_longer[left].tolist(), seq_len)
    return np.array(pieces, dtype=np.int64).reshape(-1, 3).T


def _shuffle_and_pad(
    full_starts: np.ndarray, rests: np.ndarray, padding: int, seq_len: int, *key: object
) -> Packing:
    """Order the full rows and the rows of `rests` by `key`, and end rows with room by a piece of
    padding.
    """
    num_full = len(full_starts)
    rest_starts, rest_sizes, rest_rows = rests
    num_rows = num_full + (int(rest_rows.max()) + 1 if len(rest_rows) else 0)
    rank = np.empty(num_rows, dtype=np.int64)  # of each row in the drawn order
    rank[permutation(num_rows, "rows", *key)] = np.arange(num_rows)
    rows = np.concatenate([rank[:num_full], rank[num_full + rest_rows]])
    sizes = np.concatenate([np.full(num_full, seq_len), rest_sizes])

    fill = np.bincount(rows, sizes, minlength=num_rows).astype(np.int64)
    padded = np.flatnonzero(fill < seq_len)
    rows = np.concatenate([rows, padded])
    sizes = np.concatenate([sizes, seq_len - fill[padded]])
    starts = np.concatenate([full_starts, rest_starts, np.full(len(padded), padding)])

    # The sort is stable, so the padding stays behind the other pieces of its row.
    order = np.argsort(rows, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=num_rows))])
    return Packing(starts[order], sizes[order], first, fill)


def _best_fit(sizes: list[int], seq_len: int) -> list[int]:
    """Chooses the row of each piece (sizes descending): the fullest one that has room, else a new
    one.
    """
    rows_with_room: dict[int, list[int]] = {}  # tokens of room -> rows that have just that
    # a bit for each key of it that is not empty, so that the smallest room that does is found at
    # once
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


Piece = tuple[int, int, int]  # first token, tokens, row


def _dissolved(pieces: list[Piece], of_longer: list[bool], seq_len: int) -> list[Piece]:
    """Puts the pieces into fewer rows: rests of longer documents, cut once more, fill the gaps of
    other rows.

    The emptiest row is dissolved if it holds nothing but such rests, and the gaps of the other rows
    take them in parts of a 32nd of a row at least.
    """
    pieces, of_longer, gone = list(pieces), list(of_longer), set[int]()
    gaps, held = _rows_of(pieces, seq_len)
    least = max(1, seq_len // 32)

    for donor in sorted(range(len(gaps)), key=lambda row: (-gaps[row], row)):
        needed = seq_len - gaps[donor]
        if sum(gaps) - gaps[donor] < needed:
            break
        if not all(of_longer[number] for number in held[donor]):
            continue
        takers = _takers(gaps, least, gone | {donor})
        if sum(gaps[row] for row in takers) < needed:
            continue

        for number in held[donor]:
            pieces[number], *others = _cut_into_gaps(pieces[number], takers, gaps)
            held[pieces[number][2]].append(number)
            for other in others:
                held[other[2]].append(len(pieces))
                pieces.append(other)
                of_longer.append(True)
        gone.add(donor)
        gaps[donor] = 0

    left = (row for row in range(len(gaps)) if row not in gone)
    rank = {row: number for number, row in enumerate(left)}
    return [(start, size, rank[row]) for start, size, row in pieces]


def _rows_of(pieces: list[Piece], seq_len: int) -> tuple[list[int], list[list[int]]]:
    """Return the free tokens of each row, and the numbers of its pieces."""
    count = max((row for _, _, row in pieces), default=-1) + 1
    gaps = [seq_len] * count
    held: list[list[int]] = [[] for _ in range(count)]
    for number, (_, size, row) in enumerate(pieces):
        gaps[row] -= size
        held[row].append(number)
    return gaps, held


def _takers(gaps: list[int], least: int, excluded: set[int]) -> list[int]:
    """Return the rows with `least` free tokens or more, the emptiest first."""
    rows = (row for row in range(len(gaps)) if row not in excluded and gaps[row] >= least)
    return sorted(rows, key=lambda row: (-gaps[row], row))


def _cut_into_gaps(piece: Piece, takers: list[int], gaps: list[int]) -> list[Piece]:
    """Cut a piece into parts that fill the gaps of `takers`, one row after the other.

    A row that is full afterwards leaves `takers`.
    """
    start, size, _ = piece
    parts = []
    while size:
        row = takers[0]
        part = min(size, gaps[row])
        parts.append((start, part, row))
        start, size = start + part, size - part
        gaps[row] -= part
        if not gaps[row]:
            takers.pop(0)
    return parts


class Block(NamedTuple):
    """Holds documents and the packed rows made of them."""

    parts: list[np.ndarray]  # each (tokens,) int32; none where `ids` holds them joined
    # (parts + 1,) int64: start of each part in the joined ids; bases[-1] is where seq_len padding
    # tokens begin
    bases: np.ndarray
    # (tokens + seq_len,) int32, all parts and the padding; None where every row is one piece
    ids: np.ndarray | None
    # like ids, the target of each token or IGNORE; None: every next token of a piece is one
    labels: np.ndarray | None
    packing: Packing
    documents: int = 0

    @property
    def fill(self) -> np.ndarray:
        return self.packing.fill


def make_block(
    ids: list[np.ndarray],
    labels: list[np.ndarray],
    begin: np.ndarray,
    lengths: np.ndarray,
    seq_len: int,
    pad: int,
    *key: object,
) -> Block:
    """Packs the documents at `begin` in the joined `ids`, (tokens,) int32 each, in an order drawn
    by `key`; `labels` has the shape of `ids`, or is empty.
    """
    bases = np.cumsum([0, *map(len, ids)])
    packing = pack(begin, lengths, int(bases[-1]), seq_len, *key)
    if not labels and (packing.lengths == seq_len).all() and (packing.fill == seq_len).all():
        return Block(ids, bases, None, None, packing, len(lengths))
    all_ids = np.concatenate([*ids, np.full(seq_len, pad, np.int32)])
    all_labels = np.concatenate([*labels, np.full(seq_len, IGNORE, np.int32)]) if labels else None
    return Block([], bases, all_ids, all_labels, packing, len(lengths))


def fill_whole_rows(rows: np.ndarray, block: Block, row: int) -> None:
    """Writes rows that are one piece each, from `row` on, into (rows, seq_len + 1) int64: the ids,
    then IGNORE. From 1 on these are the labels.
    """
    count, seq_len = rows.shape[0], rows.shape[1] - 1
    starts = block.packing.starts[row : row + count]
    part_of = np.searchsorted(block.bases, starts, side="right") - 1
    for number in range(part_of.min(), part_of.max() + 1):
        part, mine = block.parts[number], np.flatnonzero(part_of == number)
        if len(mine):
            # the seq_len tokens from each on
            windows = np.ndarray(
                (len(part) - seq_len + 1, seq_len), part.dtype, part, strides=2 * part.strides
            )
            rows[mine, :-1] = windows[starts[mine] - block.bases[number]]
    rows[:, -1] = IGNORE


def fill_rows(ids: np.ndarray, labels: np.ndarray, block: Block, row: int) -> None:
    """Writes the block's rows from `row` on into (rows, seq_len) int64 each: ids; labels, the next
    token of the piece or IGNORE.

    The padding at a row's end is a piece of its own without labels.
    """
    count, seq_len = ids.shape
    if block.ids is None:
        whole = np.empty((count, seq_len + 1), np.int64)
        fill_whole_rows(whole, block, row)
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


def fill_positions(positions: np.ndarray, block: Block, row: int) -> None:
    """Writes the positions of the block's rows from `row` on into (rows, seq_len) int64; they begin
    anew with each piece.
    """
    count, seq_len = positions.shape
    first = block.packing.first
    ramp = np.arange(seq_len)
    np.concatenate(
        [ramp[:size] for size in block.packing.lengths[first[row] : first[row + count]].tolist()],
        out=positions.reshape(-1),
    )
