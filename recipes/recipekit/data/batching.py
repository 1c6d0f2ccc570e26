"""Batching: deal rows to the slots of the global batch.

Each data-parallel rank owns a range of adjacent slots.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..spec.errors import Say
from ..spec.task import MicroBatch
from .blocks import StreamPosition
from .mixture import Domain, furthest_behind
from .packing import fill_positions, fill_rows, fill_single_segment_rows
from .request import Request
from .stream_state import DeliveredCounts, DomainState, StreamState, identity_at_step

SAY_PASSED_EVERY = 10.0  # seconds between two lines about batches that are passed over


@dataclass(frozen=True)
class DataRank:
    """Rank `dp_rank` of the `dp` data-parallel ranks of a job."""

    dp: int
    dp_rank: int


class RowDealer:
    """Dealer of rows from a stream's corpora, with a count of the tokens dealt from each corpus.

    `open_blocks(domain, place)` iterates over the packed blocks of that domain, starting at
    `place`. A row contains at most `row_tokens` tokens.
    """

    def __init__(
        self,
        domains: list[Domain],
        open_blocks: Callable[[int, StreamPosition], Iterator[tuple[StreamPosition, Any]]],
        row_tokens: int,
        state: StreamState,
    ):
        self.domains = domains
        self.step = state["step"]
        # weights in force while `tokens` was counted
        self.weights = [state["domains"][domain.name]["weight"] for domain in domains]
        self.tokens = [state["domains"][domain.name]["tokens"] for domain in domains]
        # start of the block in use
        self.block_starts = [
            StreamPosition(**state["domains"][domain.name]["place"]) for domain in domains
        ]
        self.rows_used = [state["domains"][domain.name]["used"] for domain in domains]  # in block
        # bad rows skipped before the end of the current block
        self.bad = [state["domains"][domain.name]["bad"] for domain in domains]
        # chats, counted up to the same point
        self.lost: list[Sequence[int]] = [
            tuple(state["domains"][domain.name].get("lost", ())) for domain in domains
        ]
        # empty rows skipped before the end of the current block
        self.empty = [state["domains"][domain.name].get("empty", 0) for domain in domains]
        self.delivered = [_delivered_counts(state["domains"][domain.name]) for domain in domains]
        # counts of the first epoch; None until that epoch is complete
        self.first_epoch = [state["domains"][domain.name].get("epoch") for domain in domains]
        self.streams = [
            open_blocks(number, place) for number, place in enumerate(self.block_starts)
        ]
        self.block_ends: list[StreamPosition | None] = [None] * len(domains)
        self.block: list[Any] = [None] * len(domains)
        self.row_tokens = row_tokens

    def state(self) -> dict[str, DomainState]:
        """Return the state of each domain.

        A domain's state stores the position of the current block, the rows used in the block, and
        the domain's weight. It also stores the number of tokens dealt since the weights changed,
        and the number of bad rows skipped.
        """
        found: dict[str, DomainState] = {}
        columns = (
            self.domains,
            self.block_starts,
            self.rows_used,
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
        for domain, given, epoch in zip(
            self.domains, self.delivered, self.first_epoch, strict=True
        ):
            if given:
                found[domain.name]["given"] = given.copy()
            if epoch:
                found[domain.name]["epoch"] = epoch
        return found

    def current_block(self, number: int) -> Any:
        """Return the block that contains the domain's next row."""
        block = self.block[number]
        while block is None or self.rows_used[number] >= len(block.fill):
            # If rows of this block were already dealt, a resumed run only rebuilds the block and
            # must not count it twice.
            is_new = block is not None or not self.rows_used[number]
            if block is not None:
                after = self.block_ends[number]
                assert after is not None
                self.block_starts[number], self.rows_used[number] = after, 0
            self.block_ends[number], self.block[number] = after, block = next(self.streams[number])
            if is_new:
                self._count_block(number, after.epoch_before, block.documents)
            self.bad[number], self.lost[number], self.empty[number] = (
                after.bad,
                after.lost,
                after.empty,
            )
        return block

    def _count_block(self, number: int, epoch: int, documents: int) -> None:
        """Count the documents of a block in epoch `epoch`, before the block's rows are dealt."""
        given = self.delivered[number]
        if given is None:
            return
        if epoch == 1 and self.first_epoch[number] is None:
            self.first_epoch[number] = {
                **given,
                "empty": self.empty[number],
                "bad": self.bad[number],
            }
        given["documents"] += documents

    def deal(self, count: int) -> list["RowRun"]:
        """Deal the rows of the next global batch."""
        self.step += 1
        return self.deal_at(self.step, count)

    def deal_at(self, step: int, count: int) -> list["RowRun"]:
        """Deal `count` rows with the weights of `step`, without counting a step."""
        weights = [domain.weight(step) for domain in self.domains]
        if weights != self.weights:  # changed by the mixture's schedule or by a resume
            self.weights, self.tokens = weights, [0] * len(self.domains)
        runs: list[RowRun] = []
        dealt = 0
        while dealt < count:
            number = (
                furthest_behind(self.tokens, weights, self.row_tokens)
                if len(self.domains) > 1
                else 0
            )
            block = self.current_block(number)
            row = self.rows_used[number]
            size = 1 if len(self.domains) > 1 else min(count - dealt, len(block.fill) - row)
            runs.append(RowRun(number, block, row, dealt, size))
            tokens = int(block.fill[row : row + size].sum())
            self.tokens[number] += tokens
            self.rows_used[number] += size
            if given := self.delivered[number]:
                given["tokens"] += tokens
                given["rows"] += size
            dealt += size
        return runs


def _delivered_counts(state: DomainState) -> DeliveredCounts | None:
    """Return the counts of a corpus so far.

    Return None if a version without these counts started the stream.
    """
    is_fresh = not state["used"] and not state["place"]
    found = state.get("given", DeliveredCounts(documents=0, tokens=0, rows=0) if is_fresh else None)
    return found.copy() if found else None


class RowRun(NamedTuple):
    """Consecutive rows of one block that fill adjacent slots of a global batch."""

    domain: int
    block: Any
    row: int  # first row in the block
    slot: int  # slot of the first row
    size: int


@dataclass(frozen=True)
class Passing:
    """Receiver of progress lines about batches that are passed over, and the stream's end."""

    say: Say = lambda _: None
    closed: threading.Event = field(default_factory=threading.Event)


def pass_over(domains: RowDealer, request: Request, passing: Passing) -> None:
    """Pass over the batches that the request leaves out before the next step.

    Rows are dealt as for the steps that would have taken them. No micro-batch is made of them, so
    images are not decoded, for example. If `passing` is closed, return early.
    """
    step, ramp = domains.step + 1, request.ramp
    counts = request.left_out.before(step)
    said = time.monotonic()
    steps_ahead = (ahead for count in counts for ahead in range(count))
    for done, ahead in enumerate(steps_ahead, 1):
        if passing.closed.is_set():
            return
        domains.deal_at(step + ahead, ramp.rows(step + ahead))
        if time.monotonic() > said + SAY_PASSED_EVERY:
            said = time.monotonic()
            passing.say(
                f"data: {done:,} of {sum(counts):,} global batches passed over, which are left out"
                f" before step {step}"
            )


def iter_steps(
    domains: RowDealer,
    build: Callable[[list[RowRun]], list[MicroBatch]],
    request: Request,
    identity: dict,
    rank: DataRank,
    passing: Passing = Passing(),
) -> Iterator[tuple[list[MicroBatch], StreamState]]:
    """For each step, yield (micro-batches, state) for one data-parallel rank's slots.

    The request's batch ramp sets the number of rows in each step. `build` makes micro-batches from
    row runs, whose slot numbers are relative to the rank's first slot. Batches that the request
    leaves out are passed over.
    """
    pinned, ramp, left_out = torch.cuda.is_available(), request.ramp, request.left_out
    while True:
        pass_over(domains, request, passing)
        mine, rows = [], ramp.rows(domains.step + 1)
        owned = rank_slots(rows, rank.dp, rank.dp_rank)
        for run in domains.deal(rows):
            low, high = max(owned.start, run.slot), min(owned.stop, run.slot + run.size)
            if low < high:
                mine.append(
                    RowRun(
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
        if pinned:
            batches = [
                {name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches
            ]
        yield (
            batches,
            {
                "identity": identity_at_step(identity, ramp, left_out, domains.step),
                "step": domains.step,
                "domains": domains.state(),
            },
        )


def packed_batch_builder(
    micro_batch: int, seq_len: int, add: Callable[[MicroBatch], MicroBatch] = dict
) -> Callable[[list[RowRun]], list[MicroBatch]]:
    """Return a function that builds a step's micro-batches from this rank's packed rows.

    `add` adds derived tensors to each micro-batch.
    """
    # Allocating new memory costs more than filling it, so buffers of earlier steps are reused. They
    # are grouped by their number of dimensions.
    buffers: dict[int, deque[np.ndarray]] = {2: deque(), 3: deque()}
    whole = torch.arange(seq_len).repeat(micro_batch, 1)  # positions of single-segment rows

    def build(runs: list[RowRun]) -> list[MicroBatch]:
        rows = sum(run.size for run in runs)
        if all(run.block.ids is None for run in runs):
            out = _reusable_buffer(buffers[2], (rows, seq_len + 1))
            batches = _single_segment_batches(runs, out, whole)
        else:
            out = _reusable_buffer(buffers[3], (3, rows, seq_len))
            batches = _multi_segment_batches(runs, out, micro_batch)
        return [add(batch) for batch in batches]

    return build


def _single_segment_batches(
    runs: list[RowRun], out: np.ndarray, positions: torch.Tensor
) -> list[MicroBatch]:
    """Write single-segment rows into `out`, (rows, seq_len + 1), and return views of `out`.

    `positions` contains a micro-batch's positions, (micro_batch, seq_len).
    """
    for run in runs:
        fill_single_segment_rows(out[run.slot : run.slot + run.size], run.block, run.row)
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


def _multi_segment_batches(
    runs: list[RowRun], out: np.ndarray, micro_batch: int
) -> list[MicroBatch]:
    """Write multi-segment rows into `out`, (3, rows, seq_len), and return views of `out`."""
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


def _reusable_buffer(buffers: deque[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Return the oldest buffer that no batch refers to any more, or a new buffer.

    Drop buffers with a different shape: they date from before a change of the batch size.
    """
    if buffers and buffers[-1].shape != shape:
        buffers.clear()
    # Try each buffer once, because a batch that the caller keeps must not block the other buffers.
    for _ in range(len(buffers)):
        buffers.rotate(-1)
        if sys.getrefcount(buffers[-1]) == 2:  # the deque and this call
            return buffers[-1]
    buffers.append(np.empty(shape, dtype=np.int64))
    return buffers[-1]


def rank_slots(global_batch: int, dp: int, dp_rank: int) -> range:
    """Return the slots of the global batch that a data-parallel rank owns."""
    count = global_batch // dp
    return range(dp_rank * count, (dp_rank + 1) * count)
