"""A causal language model learns which of two answers is preferred: DPO (Rafailov et al., NeurIPS
2023, arXiv 2305.18290), its sigmoid loss.

The reference is the model that the run starts from. What it says of each pair is computed before
the first step (runtime/references.py) and comes with the pair, so no second model is held.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy, logsigmoid

from ..data.pairs import NUM_DRAWN, Pairs, collate_pairs, drawn, identity, keys_of, pairs_of
from ..model.causal import check_causal
from ..spec.recipe import Recipe
from ..spec.task import IGNORE, MicroBatch, Row, Samples, Task
from ..spec.task_specs import TASKS


def collate(pairs: Pairs, rows: list[Row | None], keys: list[int] | None) -> MicroBatch:
    """Makes a micro-batch of pairs, with "reference", (B, 2) fp32: the log-probabilities that the
    start gives the two answers; 0 for a row that fills up.

    Raises RuntimeError for a pair whose numbers have not been computed, though all have.
    """
    batch = collate_pairs(pairs, rows, keys)
    of_pairs = keys_of(batch)
    values, held = pairs.references(of_pairs)
    values[of_pairs == 0] = 0.0
    if pairs.references.complete and not (held | (of_pairs == 0)).all():
        raise RuntimeError(
            "no reference log-probability for a training pair. The reference pass before step 1"
            " should have computed it"
        )
    return batch | {"reference": torch.from_numpy(values)}


def forward(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Computes the logits, (2 * B, T, V)."""
    return model(**TASK.inputs_of(batch), **TASK.facts.constants).logits


def of_losses(task: Task) -> Task:
    """Returns a task whose model gives the loss of each token, (2 * B, T) fp32, in place of its
    logits (model/head.py).
    """

    def losses(model: Any, batch: MicroBatch) -> torch.Tensor:
        return task.forward(partial(model, losses_of=batch["labels"].flatten(0, 1)), batch)

    def handed(batch: MicroBatch, last: bool) -> MicroBatch:
        return {"losses_of": batch["labels"].flatten(0, 1)} if last else {}

    return replace(task, forward=losses, handed=handed)


def log_probabilities(output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Adds up the log-probabilities of the tokens of each answer, (B, 2) fp32.

    The output is logits, (2 * B, T, V), or the losses of tokens, (2 * B, T).
    """
    labels = batch["labels"].flatten(0, 1)
    if output.dim() == labels.dim() + 1:
        output = cross_entropy(
            output.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none"
        ).view_as(labels)
    return -output.sum(1).view(-1, 2)


def rewards(beta: float, output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Computes beta times how much likelier than at the start each answer has become, as a
    logarithm, (B, 2) fp32.
    """
    return beta * (log_probabilities(output, batch) - batch["reference"])


def loss(beta: float, output: torch.Tensor, batch: MicroBatch, by_row: bool) -> torch.Tensor:
    """Sums -log sigmoid(reward of the chosen answer - that of the rejected one): () of the
    micro-batch, or (B,).
    """
    chosen, rejected = rewards(beta, output, batch).unbind(1)
    rows = -logsigmoid(chosen - rejected) * count(batch)
    return rows if by_row else rows.sum()


def count(batch: MicroBatch) -> torch.Tensor:
    """Counts 1 for a pair, (B,) int64."""
    return (batch["labels"] != IGNORE).flatten(1).any(1).long()


@torch.no_grad()
def measure(beta: float, output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Adds up over the pairs, (4,) fp32: whether the chosen answer has the larger reward, by how
    much, and both rewards.
    """
    chosen, rejected = (rewards(beta, output, batch) * count(batch)[:, None]).unbind(1)
    return torch.stack([(chosen > rejected).float(), chosen - rejected, chosen, rejected]).sum(1)


def with_beta(beta: float) -> Task:
    """Makes the task for a number beta."""
    return replace(TASK, loss=partial(loss, beta), measure=partial(measure, beta))


TASK = Task(
    facts=TASKS["preference"],
    targets=("labels", "reference"),
    processor=pairs_of,
    forward=forward,
    of_losses=of_losses,
    loss=partial(loss, Recipe.beta),
    count=count,
    check=check_causal,
    samples=Samples(collate, drawn, NUM_DRAWN, identity),
    measures=("accuracy", "margin", "rewards/chosen", "rewards/rejected"),
    measure=partial(measure, Recipe.beta),
    each_step=True,
    numbers=("beta",),
    tuned=with_beta,
    score=log_probabilities,
)
