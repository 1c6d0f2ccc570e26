"""What the loop asks of a task, and what every task's micro-batches share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .tasks.facts import Facts

MicroBatch = dict[str, torch.Tensor]  # dimension 0 of every tensor runs over the rows

IGNORE = -100  # a label that carries no loss


@dataclass(frozen=True)
class Task:
    """What computes, of a task; tasks/facts.py has what can be said without torch.

    The loop owns all sums: the loss of a step is the sum over the global batch divided by the count over the global batch,
    so that it does not depend on how rows are split into micro-batches and ranks.
    """

    facts: Facts
    targets: tuple[str, ...]  # tensors of a micro-batch that the loss takes
    forward: Callable[[Any, MicroBatch], torch.Tensor]  # (model, batch) -> its output
    loss: Callable[[torch.Tensor, MicroBatch, bool], torch.Tensor]  # (output, batch, by row) -> fp32 sum, () or for each row (B,)
    count: Callable[[MicroBatch], torch.Tensor]  # (B,) int64: what each row's loss is summed over; 0 for a row that only fills up
    check: Callable[[dict[str, Any], str, str], str]  # (model_config, attention, name) -> "", or why it could not be looked at; raises Refusal
