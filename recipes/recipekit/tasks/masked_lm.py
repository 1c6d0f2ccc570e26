"""A masked language model learns the tokens that are hidden in a text (data/masks.py), from what is
before and behind them.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from ..model.both_ways import check_both_ways
from ..spec.task import IGNORE, MicroBatch, Task
from ..spec.task_specs import TASKS
from . import pretrain


def forward(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Computes the logits, (B, T, V)."""
    return model(
        **{name: batch[name] for name in TASKS["masked_lm"].inputs}, **pretrain.handed(batch, True)
    ).logits


@torch.no_grad()
def measure(output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Counts the hidden tokens that are the likeliest ones at their places, (1,) fp32."""
    hidden = batch["labels"] != IGNORE
    return (output[hidden].argmax(-1) == batch["labels"][hidden]).sum().float().unsqueeze(0)


def of_losses(task: Task) -> Task:
    """Returns a task whose model gives (loss, likeliest token) of each token, (B, T, 2) fp32, in
    place of its logits (model/head.py).
    """

    def loss(output: torch.Tensor, batch: MicroBatch, by_row: bool) -> torch.Tensor:
        return task.loss(output[..., 0], batch, by_row)

    def measure(output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return (output.detach()[..., 1] == batch["labels"]).sum().float().unsqueeze(0)

    return replace(pretrain.of_losses(task), loss=loss, measure=measure)


def report(means: dict[str, float]) -> dict[str, float]:
    """Adds the perplexity of hidden tokens; it is infinite from where fp64 ends."""
    return {"perplexity": math.exp(means["loss"]) if means["loss"] < 709 else math.inf}


TASK = replace(
    pretrain.TASK,
    facts=TASKS["masked_lm"],
    forward=forward,
    of_losses=of_losses,
    check=check_both_ways,
    measures=("accuracy",),
    measure=measure,
    report=report,
    each_step=True,
)
