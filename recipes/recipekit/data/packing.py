"""Packing: which documents lie together in which row. A pure function of the documents' lengths and a key."""

import hashlib
from typing import NamedTuple

import numpy as np

from ..tokens import IGNORE


def permutation(count: int, *key: object) -> np.ndarray:
    """0 .. count-1 in an order that depends on `key` only, in every version of everything.

    Each number is sorted by a hash of (key, number): splitmix64 (Steele, Lea and Flood, OOPSLA 2014), begun at a hash of the key.
    """
    begin = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
    mixed = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(begin)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")


class Packing(NamedTuple):
    """Rows of pieces. A piece is a document, or up to seq_len tokens of a longer one. The arrays of pieces are in the order of rows."""

    starts: np.ndarray  # (pieces,) int64: first token of the piece, among the tokens of all documents
    lengths: np.ndarray  # (pieces,) int64
    first: np.ndarray  # (rows + 1,) int64: the row's first piece
    fill: np.ndarray  # (rows,) int64: tokens that the row holds


def pack(begin: np.ndarray, lengths: np.ndarray, seq_len: int, *key: object) -> Packing:
    """The documents of `lengths` (> 0) tokens that start at token `begin`, in as few rows of `seq_len` as best-fit decreasing needs, rows and ties in an order drawn by `key`.

    Only a document longer than a row is cut: into whole rows and a rest (best-fit packing: arXiv 2404.10830).
    """
    whole = lengths // seq_len  # pieces that fill a row
    rest = lengths - whole * seq_len
    number = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    full_starts = np.repeat(begin, whole) + number * seq_len
    left = np.flatnonzero(rest)
    left = left[permutation(len(left), "ties", *key)]
    left = left[np.argsort(-rest[left], kind="stable")]
    row_of = np.array(_best_fit(rest[left].tolist(), seq_len), dtype=np.int64) + len(full_starts)
    num_rows = int(row_of.max()) + 1 if len(row_of) else len(full_starts)

    rank = np.empty(num_rows, dtype=np.int64)
    rank[permutation(num_rows, "rows", *key)] = np.arange(num_rows)
    rows = np.concatenate([rank[: len(full_starts)], rank[row_of]])
    starts = np.concatenate([full_starts, (begin + whole * seq_len)[left]])
    sizes = np.concatenate([np.full(len(full_starts), seq_len), rest[left]])
    order = np.argsort(rows, kind="stable")
    pieces = np.bincount(rows, minlength=num_rows)
    fill = np.zeros(num_rows, dtype=np.int64)
    np.add.at(fill, rows, sizes)
    return Packing(starts[order], sizes[order], np.concatenate([[0], np.cumsum(pieces)]), fill)


def _best_fit(sizes: list[int], seq_len: int) -> list[int]:
    """The row of each piece (sizes descending): the fullest one that has room, else a new one."""
    rows_with_room: dict[int, list[int]] = {}  # tokens of room -> rows that have just that
    rooms = 0  # a bit for each key of it that is not empty, so that the smallest room that does is found at once
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


class Block(NamedTuple):
    """The packed rows of some documents."""

    ids: np.ndarray  # (rows, seq_len) int32, padded
    labels: np.ndarray | None  # (rows, seq_len) int32, the target of each position or IGNORE; None: every next token of a piece is one
    packing: Packing


def lay_out(ids: np.ndarray, labels: np.ndarray | None, starts: np.ndarray, lengths: np.ndarray, seq_len: int, pad: int, *key: object) -> Block:
    """Documents, which lie in `ids` (and `labels`), (tokens,) int32, as packed rows."""
    packing = pack(starts, lengths, seq_len, *key)
    return Block(_placed(ids, packing, seq_len, pad), None if labels is None else _placed(labels, packing, seq_len, IGNORE), packing)


def _placed(tokens: np.ndarray, packing: Packing, seq_len: int, pad: int) -> np.ndarray:
    starts, fill = packing.starts, packing.fill
    ends = (starts + packing.lengths).tolist()
    moved = np.concatenate([tokens[start:end] for start, end in zip(starts.tolist(), ends, strict=True)]) if len(starts) else tokens[:0]
    if len(moved) == len(fill) * seq_len:
        return moved.reshape(-1, seq_len)
    placed = np.full((len(fill), seq_len), pad, dtype=tokens.dtype)
    at = 0
    for row, size in enumerate(fill.tolist()):
        placed[row, :size] = moved[at : at + size]
        at += size
    return placed


def fill_rows(out: np.ndarray, block: Block, rows: np.ndarray) -> None:
    """Writes `rows` of the block into `out`, (3, rows, seq_len) int64: ids; labels, the next token of the same piece or IGNORE; positions.

    Positions begin anew with each piece; the padding at a row's end is a piece of its own without labels.
    """
    ids, labels, positions = out
    seq_len = ids.shape[1]
    packing = block.packing
    ids[...] = block.ids[rows]
    if block.labels is None:
        labels[:, :-1] = ids[:, 1:]
        labels[:, -1] = IGNORE
    else:
        labels[...] = block.labels[rows]
    positions[...] = ramp = np.arange(seq_len)
    single = (packing.first[rows + 1] - packing.first[rows] == 1) & (packing.fill[rows] == seq_len)
    for at in np.flatnonzero(~single).tolist():
        row = int(rows[at])
        begin = 0
        for size in packing.lengths[packing.first[row] : packing.first[row + 1]].tolist():
            positions[at, begin : begin + size] = ramp[:size]
            begin += size
            labels[at, begin - 1] = IGNORE
        labels[at, begin:] = IGNORE
        positions[at, begin:] = ramp[: seq_len - begin]
