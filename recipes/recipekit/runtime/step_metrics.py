"""Additional sums over a step or an evaluation, next to its loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import torch
import torch.distributed as dist

from ..spec.mesh import Mesh
from .stopping import STOP_REASONS


@dataclass
class StepMetrics:
    """The numbers that a step or an evaluation sums in addition to its loss.

    The sums are created before the engine, because a pipeline's loss adds to them.
    """

    # (2, domains) fp64 for a mixture: the loss sum and count of each corpus
    by_domain: torch.Tensor | None = None
    # (measures,) fp64 during an evaluation, and during a step that reports measures
    measures: torch.Tensor | None = None
    # during the reference pass: each micro-batch's log-probabilities, on ranks with the output
    row_logprobs: list[torch.Tensor] | None = None
    # (world,) fp64 during a step: the mean loss of each rank's own labels
    losses_of_ranks: torch.Tensor | None = None

    def start_step(
        self, num_measures: int | None, world: int, device: torch.device
    ) -> torch.Tensor:
        """Zero all sums and return zeros for a step's sums, (1 + measures + world,) fp64.

        One tensor contains the loss, the measures and the losses of the ranks, so that a single
        all-reduce sums them. `measures` and `losses_of_ranks` are views of its other parts. If
        `num_measures` is None, the step reports no measures.
        """
        if self.by_domain is not None:
            self.by_domain.zero_()
        size = 1 + (num_measures or 0)
        sums = torch.zeros(size + world, dtype=torch.float64, device=device)
        self.measures = None if num_measures is None else sums[1:size]
        self.losses_of_ranks = sums[size:]
        return sums

    def note_own_loss(self, loss: torch.Tensor, labels: int) -> None:
        """Set this rank's mean loss before the step's sums are added over the ranks.

        `loss`, (), is the sum over this rank's labels.
        """
        if self.losses_of_ranks is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            self.losses_of_ranks[rank] = loss.detach() / max(1, labels)

    def take_losses_of_ranks(self) -> list[float]:
        """Return the mean loss of each rank's own labels, and free its memory.

        This call waits for the device.
        """
        losses, self.losses_of_ranks = self.losses_of_ranks, None
        return [] if losses is None else losses.tolist()

    def reduce(self) -> None:
        """Sum a step's numbers over the ranks (a collective).

        The tensor-parallel ranks count the same rows. A corpus's loss sum and count are therefore
        both too large by a factor of tp.
        """
        if self.by_domain is not None:
            dist.all_reduce(self.by_domain)


@dataclass(frozen=True)
class StepCounters:
    """The integers that one rank contributes to a step's sums over all ranks.

    `stop` is a key of stopping.STOP_REASONS if this rank received a request to stop. `extra` maps
    names to further counts. The names and lengths must be the same on every rank.
    """

    mesh: Mesh
    stop: str | None = None
    extra: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def peers(self) -> int:
        """Return the number of ranks that count the same labels."""
        return self.mesh.tp * self.mesh.pp

    def start_sum(self, labels: int, device: torch.device) -> "StepTotals":
        """Pack the counts and this rank's number of labels, and start their sum over the ranks."""
        stops = (reason == self.stop for reason in STOP_REASONS)
        packed = torch.tensor(
            [labels, *stops, *chain.from_iterable(self.extra.values())],
            dtype=torch.int64,
            device=device,
        )
        return StepTotals(self, packed, start_all_reduce(packed))


@dataclass(frozen=True)
class StepTotals:
    """The sums of all ranks' `StepCounters`. Call `wait` before you read them."""

    counters: StepCounters
    packed: torch.Tensor  # int64: labels, stopping ranks per STOP_REASONS, extra counts
    work: dist.Work

    def wait(self) -> None:
        self.work.wait()

    @property
    def labels_over_ranks(self) -> torch.Tensor:
        """Return the number of labels summed over all ranks, ().

        A row is counted once for each rank that reads it.
        """
        return self.packed[0]

    @property
    def labels(self) -> torch.Tensor:
        """Return the number of labels in the global batch, ()."""
        return self.packed[0] // self.counters.peers

    def unpack(self) -> "StepCounts":
        """Return the sums by name. This call waits for the device."""
        labels, *rest = self.packed.tolist()
        stops, counts = rest[: len(STOP_REASONS)], iter(rest[len(STOP_REASONS) :])
        return StepCounts(
            labels=labels // self.counters.peers,
            stop=next(
                (reason for reason, ranks in zip(STOP_REASONS, stops, strict=True) if ranks), None
            ),
            extra={
                name: list(islice(counts, len(own))) for name, own in self.counters.extra.items()
            },
        )


@dataclass(frozen=True)
class StepCounts:
    """A step's sums over all ranks, by name."""

    labels: int  # of the global batch
    stop: str | None  # the first of STOP_REASONS that any rank reported
    extra: dict[str, list[int]]


def start_all_reduce(tensor: torch.Tensor) -> dist.Work:
    """Start to sum a tensor over all ranks, in place. The tensor contains the sum after `wait`.

    On an accelerator, the device waits for the sum at once, and the host continues. Otherwise the
    sum would run next to a collective of another NCCL communicator of the same ranks, and two
    communicators in flight may deadlock (torch.distributed.new_group, NVIDIA/nccl issue 195).
    """
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None, "only a rank outside of the group gets no work"
    if tensor.device.type != "cpu":
        work.wait()
    return work
