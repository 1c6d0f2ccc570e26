"""Sums over a step or an evaluation, in addition to its loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import torch
import torch.distributed as dist

from ..spec.mesh import Mesh
from .stopping import REASONS


@dataclass
class Sums:
    """The numbers that a step or an evaluation adds up in addition to its loss.

    They are made before the engine, because a pipeline's loss adds to them.
    """

    # (2, domains) fp64 for a mixture: loss sum and count of each corpus
    by_domain: torch.Tensor | None = None
    # (measures,) fp64 during an evaluation, and during a step that reports measures
    measured: torch.Tensor | None = None
    # of each micro-batch, where a rank has its output: while the start model reads the rows
    scores: list[torch.Tensor] | None = None

    def start_step(self, num_measures: int | None, device: torch.device) -> torch.Tensor:
        """Set all sums to zero; return zeros for a step's loss and measures, (1 + measures,) fp64.

        They share a tensor, so that one all-reduce sums them all, and `measured` is a view of the
        measures. `num_measures` None: the step reports no measures.
        """
        if self.by_domain is not None:
            self.by_domain.zero_()
        loss_and_measures = torch.zeros(1 + (num_measures or 0), dtype=torch.float64, device=device)
        self.measured = None if num_measures is None else loss_and_measures[1:]
        return loss_and_measures

    def reduce(self) -> None:
        """Add up the ranks' sums of a step (a collective).

        The tensor-parallel ranks count the same rows, so both numbers of a corpus are too large by
        tp.
        """
        if self.by_domain is not None:
            dist.all_reduce(self.by_domain)


@dataclass(frozen=True)
class StepCounters:
    """The whole numbers that one rank adds to a step's sums over all ranks.

    `stop` is a key of stopping.REASONS if this rank was asked to stop. `extra` holds further counts
    by name, with the same names and lengths on every rank.
    """

    mesh: Mesh
    stop: str | None = None
    extra: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def peers(self) -> int:
        """The number of ranks that count the same labels."""
        return self.mesh.tp * self.mesh.pp

    def start_sum(self, labels: int, device: torch.device) -> "StepTotals":
        """Pack the counts and this rank's number of labels into one tensor, and start to sum it
        over the ranks.
        """
        stops = (reason == self.stop for reason in REASONS)
        packed = torch.tensor(
            [labels, *stops, *chain.from_iterable(self.extra.values())],
            dtype=torch.int64,
            device=device,
        )
        return StepTotals(self, packed, start_all_reduce(packed))


@dataclass(frozen=True)
class StepTotals:
    """The sums of all ranks' `StepCounters`; call `wait` before you read them."""

    counters: StepCounters
    packed: torch.Tensor  # int64: labels, ranks that stop for each of REASONS, extra counts
    work: dist.Work

    def wait(self) -> None:
        self.work.wait()

    @property
    def labels_over_ranks(self) -> torch.Tensor:
        """The labels of all ranks, (): those of a row once for each rank that has the row."""
        return self.packed[0]

    @property
    def labels(self) -> torch.Tensor:
        """The labels of the global batch, ()."""
        return self.packed[0] // self.counters.peers

    def unpack(self) -> "StepCounts":
        """Return the sums by name; the device is waited for."""
        labels, *rest = self.packed.tolist()
        stops, counts = rest[: len(REASONS)], iter(rest[len(REASONS) :])
        return StepCounts(
            labels=labels // self.counters.peers,
            stop=next(
                (reason for reason, ranks in zip(REASONS, stops, strict=True) if ranks), None
            ),
            extra={
                name: list(islice(counts, len(own))) for name, own in self.counters.extra.items()
            },
        )


@dataclass(frozen=True)
class StepCounts:
    """The sums of a step over all ranks, by name."""

    labels: int  # of the global batch
    stop: str | None  # the first of REASONS that a rank has
    extra: dict[str, list[int]]


def start_all_reduce(tensor: torch.Tensor) -> dist.Work:
    """Start to sum a tensor over all ranks, in place; it has the sum after `wait`."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None, "only a rank outside of the group gets no work"
    return work
