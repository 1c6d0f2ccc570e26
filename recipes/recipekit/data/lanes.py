"""Rows dealt to the slots ("lanes") of the global batch; a data-parallel rank owns a run of
neighbouring lanes.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..spec.task import MicroBatch
from .blocks import Place
from .mixture import Domain, furthest_behind
from .packing import fill_positions, fill_rows, fill_whole_rows
from .request import Request
from .sameness import DomainState, Given, StreamState, at_step


@dataclass(frozen=True)
class DataRank:
    """Rank `dp_rank` of the `dp` data-parallel ranks of a job."""

    dp: int
    dp_rank: int


class Domains:
    """Deals rows of the corpora of a stream, and counts the tokens that each corpus has given.

    `open_blocks(domain, place)` iterates over that domain's packed blocks from `place` on; a row
    holds at most `row_tokens`.
    """

    def __init__(
        self,
        domains: list[Domain],
        open_blocks: Callable[[int, Place], Iterator[tuple[Place, Any]]],
        row_tokens: int,
        state: StreamState,
    ):
        self.domains = domains
        self.step = state["step"]
        # in force when the tokens were given
        self.weights = [state["domains"][domain.name]["weight"] for domain in domains]
        self.tokens = [state["domains"][domain.name]["tokens"] for domain in domains]
        # of the block in use
        self.before = [Place(**state["domains"][domain.name]["place"]) for domain in domains]
        self.used = [state["domains"][domain.name]["used"] for domain in domains]  # rows of it
        # rows left out up to its end
        self.bad = [state["domains"][domain.name]["bad"] for domain in domains]
        # of chats, up to there
        self.lost: list[Sequence[int]] = [
            tuple(state["domains"][domain.name].get("lost", ())) for domain in domains
        ]
        # empty rows left out, up to there
        self.empty = [state["domains"][domain.name].get("empty", 0) for domain in domains]
        self.given = [_given(state["domains"][domain.name]) for domain in domains]
        # what the first one has given, once it is complete
        self.epoch = [state["domains"][domain.name].get("epoch") for domain in domains]
        self.streams = [open_blocks(number, place) for number, place in enumerate(self.before)]
        self.after: list[Place | None] = [None] * len(domains)
        self.block: list[Any] = [None] * len(domains)
        self.row_tokens = row_tokens

    def state(self) -> dict[str, DomainState]:
        """Describes each domain: place of its block, rows used of the block, weight, tokens given
        since the weights changed, broken rows left out.
        """
        found: dict[str, DomainState] = {}
        columns = (
            self.domains,
            self.before,
            self.used,
            self.weights,
            self.tokens,
            self.bad,
            self.lost,
            self.empty,
        )
        for domain, place, used, weight, tokens, bad, lost, empty in zip(*columns, strict=True):
            at = {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in vars(place).items()
                if value
            }
            found[domain.name] = {
                "place": at,
                "used": used,
                "weight": weight,
                "tokens": tokens,
                "bad": bad,
            }
            if lost:
                found[domain.name]["lost"] = list(lost)
            if empty:
                found[domain.name]["empty"] = empty
        for domain, given, epoch in zip(self.domains, self.given, self.epoch, strict=True):
            if given:
                found[domain.name]["given"] = given.copy()
            if epoch:
                found[domain.name]["epoch"] = epoch
        return found

    def ready(self, number: int) -> Any:
        """Finds the block whose next row is the domain's next."""
        block = self.block[number]
        while block is None or self.used[number] >= len(block.fill):
            # else the block in use, which a resume makes again
            is_new = block is not None or not self.used[number]
            if block is not None:
                after = self.after[number]
                assert after is not None
                self.before[number], self.used[number] = after, 0
            self.after[number], self.block[number] = after, block = next(self.streams[number])
            if is_new:
                self._count_block(number, after.epoch_before, block.documents)
            self.bad[number], self.lost[number], self.empty[number] = (
                after.bad,
                after.lost,
                after.empty,
            )
        return block

    def _count_block(self, number: int, epoch: int, documents: int) -> None:
        """Count the documents of a block that is about to be dealt, which is of `epoch`."""
        given = self.given[number]
        if given is None:
            return
        if epoch == 1 and self.epoch[number] is None:
            self.epoch[number] = {**given, "empty": self.empty[number], "bad": self.bad[number]}
        given["documents"] += documents

    def deal(self, count: int) -> list["Run"]:
        """Deals the rows of the next global batch."""
        self.step += 1
        weights = [domain.weight(self.step) for domain in self.domains]
        if weights != self.weights:  # as the mixture says, or since it was resumed with others
            self.weights, self.tokens = weights, [0] * len(self.domains)
        runs: list[Run] = []
        dealt = 0
        while dealt < count:
            number = (
                furthest_behind(self.tokens, weights, self.row_tokens)
                if len(self.domains) > 1
                else 0
            )
            block = self.ready(number)
            row = self.used[number]
            size = 1 if len(self.domains) > 1 else min(count - dealt, len(block.fill) - row)
            runs.append(Run(number, block, row, dealt, size))
            tokens = int(block.fill[row : row + size].sum())
            self.tokens[number] += tokens
            self.used[number] += size
            if given := self.given[number]:
                given["tokens"] += tokens
                given["rows"] += size
            dealt += size
        return runs


def _given(state: DomainState) -> Given | None:
    """Return what a stream has given of a corpus; None if it was begun by a version that did not
    count.
    """
    is_fresh = not state["used"] and not state["place"]
    found = state.get("given", Given(documents=0, tokens=0, rows=0) if is_fresh else None)
    return found.copy() if found else None


class Run(NamedTuple):
    """Names rows of one block that fill neighbouring slots of a global batch."""

    domain: int
    block: Any
    row: int  # the first
    slot: int  # of the first
    size: int


def steps(
    domains: Domains,
    build: Callable[[list[Run]], list[MicroBatch]],
    request: Request,
    identity: dict,
    rank: DataRank,
    add: Callable[[MicroBatch], MicroBatch] = dict,
) -> Iterator[tuple[list[MicroBatch], StreamState]]:
    """Yields (micro-batches, state) of each step for the lanes of one data-parallel rank; a step
    has as many as its ramp says.

    `build` makes the micro-batches of runs whose slots count from the rank's first lane, `add` puts
    into each what is made of it.
    """
    pinned, ramp = torch.cuda.is_available(), request.ramp
    while True:
        mine, rows = [], ramp.rows(domains.step + 1)
        owned = lanes(rows, rank.dp, rank.dp_rank)
        for run in domains.deal(rows):
            low, high = max(owned.start, run.slot), min(owned.stop, run.slot + run.size)
            if low < high:
                mine.append(
                    Run(
                        run.domain,
                        run.block,
                        run.row + low - run.slot,
                        low - owned.start,
                        high - low,
                    )
                )
        batches = build(mine)
        if len(domains.domains) > 1:
            of_rows = torch.tensor([run.domain for run in mine for _ in range(run.size)])
            for batch, part in zip(batches, of_rows.split(request.micro_batch), strict=True):
                batch["domain"] = part
        batches = [add(batch) for batch in batches]
        if pinned:
            batches = [
                {name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches
            ]
        yield (
            batches,
            {
                "identity": at_step(identity, ramp, domains.step),
                "step": domains.step,
                "domains": domains.state(),
            },
        )


def packed_batches(micro_batch: int, seq_len: int) -> Callable[[list[Run]], list[MicroBatch]]:
    """Returns what makes the micro-batches of a step from the packed rows of this rank."""
    # Fresh memory costs more than what is written into it, so steps that are gone give theirs back;
    # by the number of dimensions.
    buffers: dict[int, deque[np.ndarray]] = {2: deque(), 3: deque()}
    whole = torch.arange(seq_len).repeat(micro_batch, 1)  # the positions of rows that are one piece

    def build(runs: list[Run]) -> list[MicroBatch]:
        rows = sum(run.size for run in runs)
        if all(run.block.ids is None for run in runs):
            out = _buffer(buffers[2], (rows, seq_len + 1))
            return _of_whole_rows(runs, out, whole)
        return _of_pieces(runs, _buffer(buffers[3], (3, rows, seq_len)), micro_batch)

    return build


def _of_whole_rows(runs: list[Run], out: np.ndarray, positions: torch.Tensor) -> list[MicroBatch]:
    """Write rows that are one piece each into `out`, (rows, seq_len + 1), and return views of it.

    `positions` are those of each micro-batch, (micro_batch, seq_len).
    """
    for run in runs:
        fill_whole_rows(out[run.slot : run.slot + run.size], run.block, run.row)
    micro_batch = len(positions)
    parts = [out[first : first + micro_batch] for first in range(0, len(out), micro_batch)]
    return [
        {
            "input_ids": torch.from_numpy(part[:, :-1]),
            "labels": torch.from_numpy(part[:, 1:]),
            "position_ids": positions,
        }
        for part in parts
    ]


def _of_pieces(runs: list[Run], out: np.ndarray, micro_batch: int) -> list[MicroBatch]:
    """Write rows of several pieces into `out`, (3, rows, seq_len), and return views of it."""
    for run in runs:
        ids, labels, positions = out[:, run.slot : run.slot + run.size]
        fill_rows(ids, labels, run.block, run.row)
        fill_positions(positions, run.block, run.row)
    names = ("input_ids", "labels", "position_ids")
    parts = [out[:, first : first + micro_batch] for first in range(0, out.shape[1], micro_batch)]
    return [
        {name: torch.from_numpy(tensor) for name, tensor in zip(names, part, strict=True)}
        for part in parts
    ]


def _buffer(buffers: deque[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Takes the oldest of `buffers` to which no batch refers any more, else a new one; those of
    another shape, from before a ramp's change, go.
    """
    if buffers and buffers[-1].shape != shape:
        buffers.clear()
    # one turn: a batch that somebody keeps must not stand before the others
    for _ in range(len(buffers)):
        buffers.rotate(-1)
        if sys.getrefcount(buffers[-1]) == 2:  # the deque, and the call
            return buffers[-1]
    buffers.append(np.empty(shape, dtype=np.int64))
    return buffers[-1]


def lanes(global_batch: int, dp: int, dp_rank: int) -> range:
    """Names the slots of the global batch that a data-parallel rank owns."""
    count = global_batch // dp
    return range(dp_rank * count, (dp_rank + 1) * count)
