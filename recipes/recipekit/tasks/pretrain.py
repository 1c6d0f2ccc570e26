"""A causal language model learns the token that follows, at every position of the text."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from ..data.processors import fitting_tokenizer
from ..model.causal import check_causal
from ..spec.task import IGNORE, MicroBatch, Task
from ..spec.task_specs import TASKS


def forward(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Computes the logits, (B, T, V)."""
    inputs = {name: batch[name] for name in TASKS["pretrain"].inputs}
    return model(**inputs, **handed(batch, True), **TASKS["pretrain"].constants).logits


def handed(batch: MicroBatch, last: bool) -> MicroBatch:
    """Names the documents for the layers, if the run's attention reads them; under sequence
    parallelism with another one their starts in the whole rows.
    """
    documents = batch.get("documents", batch.get("document_starts"))
    return {} if documents is None else {"attention_mask": documents}


def of_losses(task: Task) -> Task:
    """Returns a task whose model gives the loss of each token, (B, T) fp32, in place of its logits
    (model/head.py): it takes the labels for that.
    """

    def losses(model: Any, batch: MicroBatch) -> torch.Tensor:
        return task.forward(partial(model, losses_of=batch["labels"]), batch)

    def handed(batch: MicroBatch, last: bool) -> MicroBatch:
        return task.handed(batch, last) | ({"losses_of": batch["labels"]} if last else {})

    return replace(task, forward=losses, handed=handed)


def loss(output: torch.Tensor, batch: MicroBatch, by_row: bool) -> torch.Tensor:
    """Sums the cross-entropy over the tokens that have a label, in fp32: () of the micro-batch, or
    (B,).

    The output is logits, (B, T, V), or already the loss of each token, (B, T).
    """
    labels = batch["labels"]
    if output.dim() == labels.dim():
        return output.sum(1) if by_row else output.sum()
    logits = output.float().flatten(0, 1)
    if not by_row:
        return cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return (
        cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="none")
        .view_as(labels)
        .sum(1)
    )


def count(batch: MicroBatch) -> torch.Tensor:
    """Counts the tokens of each row that have a label, (B,) int64."""
    return (batch["labels"] != IGNORE).sum(1)


TASK = Task(
    facts=TASKS["pretrain"],
    targets=("labels",),
    processor=fitting_tokenizer,
    forward=forward,
    of_losses=of_losses,
    loss=loss,
    count=count,
    check=check_causal,
    handed=handed,
)
