"""Masked language modelling: predict masked tokens (data/masking.py) from their context."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..model.probes import check_bidirectional
from ..spec.task import IGNORE, MicroBatch, Task
from ..spec.task_specs import TASKS
from . import pretrain

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def forward(model: "PreTrainedModel", batch: MicroBatch) -> torch.Tensor:
    """Return the logits, (B, T, V)."""
    return model(
        **{name: batch[name] for name in TASKS["masked_lm"].inputs},
        **pretrain.document_kwargs(batch, True),
    ).logits


@torch.no_grad()
def measure(output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the number of masked tokens that were predicted correctly, (1,) fp32."""
    hidden = batch["labels"] != IGNORE
    return (output[hidden].argmax(-1) == batch["labels"][hidden]).sum().float().unsqueeze(0)


def with_chunked_masked_loss(task: Task) -> Task:
    """Return a task whose model returns each token's loss and most likely token.

    The model's output is then (B, T, 2) fp32 instead of logits (model/chunked_loss.py).
    """

    def loss(output: torch.Tensor, batch: MicroBatch, by_row: bool) -> torch.Tensor:
        return task.loss(output[..., 0], batch, by_row)

    def measure(output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return (output.detach()[..., 1] == batch["labels"]).sum().float().unsqueeze(0)

    return replace(pretrain.with_chunked_causal_loss(task), loss=loss, measure=measure)


def report_perplexity(means: dict[str, float]) -> dict[str, float]:
    """Return the perplexity over masked tokens, or infinity if it exceeds the range of fp64."""
    return {"perplexity": math.exp(means["loss"]) if means["loss"] < 709 else math.inf}


TASK = replace(
    pretrain.TASK,
    spec=TASKS["masked_lm"],
    forward=forward,
    with_chunked_loss=with_chunked_masked_loss,
    check=check_bidirectional,
    measures=("accuracy",),
    measure=measure,
    report=report_perplexity,
    reports_each_step=True,
)
