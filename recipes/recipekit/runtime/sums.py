"""Sums over a step or an evaluation, besides its loss."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class Sums:
    """Adds up what a step or an evaluation tells besides its loss; made before the engine, since a
    pipeline's loss adds to it.
    """

    # (2, domains) fp64 for a mixture: loss sum and count of each corpus
    by_domain: torch.Tensor | None = None
    # (measures,) fp64 during an evaluation, and a step that tells them
    measured: torch.Tensor | None = None
    # of each micro-batch, where a rank has its output: while the start model reads the rows
    scores: list[torch.Tensor] | None = None

    def clear(self) -> None:
        if self.by_domain is not None:
            self.by_domain.zero_()

    def reduce(self) -> None:
        """Adds up the ranks' sums of a step (a collective); the tensor-parallel ranks count the
        same rows, so both numbers of a corpus are too large by tp.
        """
        if self.by_domain is not None:
            dist.all_reduce(self.by_domain)
