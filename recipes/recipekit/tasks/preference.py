"""Preference training of a causal language model with DPO and its sigmoid loss.

The model learns which of two answers is preferred (Rafailov et al., NeurIPS 2023, arXiv
2305.18290). The reference is the model from which the run starts. The reference log-probabilities
of each pair are computed before the first step (runtime/reference_logprobs.py) and stored with the
pair. Therefore no second model is kept in memory.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy, logsigmoid

from ..data.pairs import (
    NUM_BUILTIN_PAIRS,
    PairProcessor,
    collate_pairs,
    generate_pair,
    make_pair_processor,
    pair_identity,
    pair_keys,
)
from ..model.probes import check_causal
from ..spec.recipe import Recipe
from ..spec.task import IGNORE, DatasetRow, MicroBatch, Samples, Task
from ..spec.task_specs import TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def collate(
    pairs: PairProcessor, rows: list[DatasetRow | None], keys: list[int] | None
) -> MicroBatch:
    """Return a micro-batch of pairs with the entry "reference", (B, 2) fp32.

    This entry contains the reference log-probabilities of the two answers, or 0 for a padding row.
    Raise RuntimeError if a pair still lacks reference log-probabilities after all of them were
    computed.
    """
    batch = collate_pairs(pairs, rows, keys)
    of_pairs = pair_keys(batch)
    values, held = pairs.references(of_pairs)
    values[of_pairs == 0] = 0.0
    if pairs.references.complete and not (held | (of_pairs == 0)).all():
        raise RuntimeError(
            "no reference log-probability for a training pair. The reference pass before step 1"
            " should have computed it"
        )
    return batch | {"reference": torch.from_numpy(values)}


def forward(model: "PreTrainedModel", batch: MicroBatch) -> torch.Tensor:
    """Return the logits, (2 * B, T, V)."""
    return model(**TASK.inputs_of(batch), **TASK.spec.constants).logits


def with_chunked_dpo_loss(task: Task) -> Task:
    """Return a task whose model returns token losses, (2 * B, T) fp32, instead of logits.

    See model/chunked_loss.py.
    """

    def losses(model: "PreTrainedModel", batch: MicroBatch) -> torch.Tensor:
        return task.forward(partial(model, losses_of=batch["labels"].flatten(0, 1)), batch)

    def handed(batch: MicroBatch, last: bool) -> MicroBatch:
        return {"losses_of": batch["labels"].flatten(0, 1)} if last else {}

    return replace(task, forward=losses, stage_kwargs=handed)


def answer_log_probs(output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return each answer's log-probability, summed over its tokens, (B, 2) fp32.

    `output` contains logits, (2 * B, T, V), or token losses, (2 * B, T).
    """
    labels = batch["labels"].flatten(0, 1)
    if output.dim() == labels.dim() + 1:
        output = cross_entropy(
            output.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none"
        ).view_as(labels)
    return -output.sum(1).view(-1, 2)


def rewards(beta: float, output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return each answer's DPO reward, (B, 2) fp32.

    The reward is beta times the difference between the answer's log-probability and the reference
    log-probability.
    """
    return beta * (answer_log_probs(output, batch) - batch["reference"])


def loss(beta: float, output: torch.Tensor, batch: MicroBatch, by_row: bool) -> torch.Tensor:
    """Return -log sigmoid(reward of the chosen answer - reward of the rejected one), summed.

    The sum is () for the micro-batch or, if `by_row` is True, (B,).
    """
    chosen, rejected = rewards(beta, output, batch).unbind(1)
    rows = -logsigmoid(chosen - rejected) * count(batch)
    return rows if by_row else rows.sum()


def count(batch: MicroBatch) -> torch.Tensor:
    """Return 1 for each pair and 0 for padding, (B,) int64."""
    return (batch["labels"] != IGNORE).flatten(1).any(1).long()


@torch.no_grad()
def measure(beta: float, output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return sums over the pairs, (4,) fp32: accuracy, margin, and both rewards.

    A pair counts as correct if the chosen answer has the larger reward. The margin is the
    difference between the two rewards.
    """
    chosen, rejected = (rewards(beta, output, batch) * count(batch)[:, None]).unbind(1)
    return torch.stack([(chosen > rejected).float(), chosen - rejected, chosen, rejected]).sum(1)


def with_beta(beta: float) -> Task:
    """Return the task for a value of beta."""
    return replace(TASK, loss=partial(loss, beta), measure=partial(measure, beta))


TASK = Task(
    spec=TASKS["preference"],
    targets=("labels", "reference"),
    processor=make_pair_processor,
    forward=forward,
    with_chunked_loss=with_chunked_dpo_loss,
    loss=partial(loss, Recipe.beta),
    count=count,
    check=check_causal,
    samples=Samples(collate, generate_pair, NUM_BUILTIN_PAIRS, pair_identity),
    measures=("accuracy", "margin", "rewards/chosen", "rewards/rejected"),
    measure=partial(measure, Recipe.beta),
    reports_each_step=True,
    hyperparameters=("beta",),
    with_hyperparameters=with_beta,
    row_logprobs=answer_log_probs,
)
