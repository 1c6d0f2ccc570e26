"""Causal language modelling: predict the next token at every position of the text."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy

from ..data.processors import fitting_tokenizer
from ..model.probes import check_causal
from ..spec.task import IGNORE, MicroBatch, Task
from ..spec.task_specs import TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def forward(model: "PreTrainedModel", batch: MicroBatch) -> torch.Tensor:
    """Return the logits, (B, T, V)."""
    inputs = {name: batch[name] for name in TASKS["pretrain"].inputs}
    return model(**inputs, **document_kwargs(batch, True), **TASKS["pretrain"].constants).logits


def document_kwargs(batch: MicroBatch, last: bool) -> MicroBatch:
    """Return the documents for the layers, if the run's attention reads documents.

    Under sequence parallelism with a different attention, return the document starts in the full
    rows.
    """
    documents = batch.get("documents", batch.get("document_starts"))
    return {} if documents is None else {"attention_mask": documents}


def with_chunked_causal_loss(task: Task) -> Task:
    """Return a task whose model returns token losses, (B, T) fp32, instead of logits.

    For this purpose, the model receives the labels (model/chunked_loss.py).
    """

    def losses(model: "PreTrainedModel", batch: MicroBatch) -> torch.Tensor:
        return task.forward(partial(model, losses_of=batch["labels"]), batch)

    def handed(batch: MicroBatch, last: bool) -> MicroBatch:
        return task.stage_kwargs(batch, last) | ({"losses_of": batch["labels"]} if last else {})

    return replace(task, forward=losses, stage_kwargs=handed)


def loss(output: torch.Tensor, batch: MicroBatch, by_row: bool) -> torch.Tensor:
    """Return the cross-entropy, summed in fp32 over the tokens with a label.

    The sum is () for the micro-batch or, if `by_row` is True, (B,). `output` contains logits, (B,
    T, V), or token losses that the model has already computed, (B, T).
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
    """Return the number of tokens with a label in each row, (B,) int64."""
    return (batch["labels"] != IGNORE).sum(1)


TASK = Task(
    spec=TASKS["pretrain"],
    targets=("labels",),
    processor=fitting_tokenizer,
    forward=forward,
    with_chunked_loss=with_chunked_causal_loss,
    loss=loss,
    count=count,
    check=check_causal,
    stage_kwargs=document_kwargs,
)
