"""Reward modelling: assign the higher score to the preferred one of two answers.

See Bradley and Terry, Biometrika 1952, and Ouyang et al., 2022. The model is the sequence
classifier that transformers derives from a decoder, with one output. An answer's score is the
output at the last token before the padding. transformers itself finds this token with the
`pad_token_id` in config.json.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import logsigmoid

from ..data.pairs import (
    NUM_BUILTIN_PAIRS,
    PairProcessor,
    collate_pairs,
    generate_pair,
    make_pair_processor,
    pair_identity,
)
from ..model.config_errors import CONSTRUCTOR_ERRORS
from ..model.probes import probe
from ..model.small import in_words
from ..spec.errors import config_error
from ..spec.task import IGNORE, DatasetRow, MicroBatch, Samples, Task
from ..spec.task_specs import TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def with_pad_token(model_config: dict[str, Any], pairs: PairProcessor) -> dict[str, Any]:
    """Return a config.json with the tokenizer's padding token, also set in its text config.

    Without the padding token, transformers would score a row's last position.
    """
    text = model_config.get("text_config")
    inner = {"text_config": text | {"pad_token_id": pairs.pad}} if isinstance(text, dict) else {}
    return model_config | {"pad_token_id": pairs.pad} | inner


def collate(
    pairs: PairProcessor, rows: list[DatasetRow | None], keys: list[int] | None
) -> MicroBatch:
    """Return {"input_ids", "position_ids"}, each (B, 2, T), and "labels", (B,).

    The label is 0, the index of the better answer, or IGNORE for a padding row.
    """
    batch = collate_pairs(pairs, rows, keys)
    return batch | {"labels": torch.tensor([IGNORE if row is None else 0 for row in rows])}


def forward(model: "PreTrainedModel", batch: MicroBatch) -> torch.Tensor:
    """Return each answer's score, (2 * B, 1)."""
    return model(**TASK.inputs_of(batch), **TASK.spec.constants).logits


def loss(output: torch.Tensor, batch: MicroBatch, by_row: bool) -> torch.Tensor:
    """Return -log sigmoid(score of the chosen answer - score of the rejected one), summed.

    The sum is fp32. It is () for the micro-batch or, if `by_row` is True, (B,).
    """
    chosen, rejected = output.float().view(-1, 2).unbind(1)
    rows = -logsigmoid(chosen - rejected) * count(batch)
    return rows if by_row else rows.sum()


def count(batch: MicroBatch) -> torch.Tensor:
    """Return 1 for each pair and 0 for padding, (B,) int64."""
    return (batch["labels"] != IGNORE).long()


@torch.no_grad()
def measure(output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return sums over the pairs, (2,) fp32: accuracy and margin.

    A pair counts as correct if the chosen answer has the larger score. The margin is the difference
    between the two scores.
    """
    chosen, rejected = (output.float().view(-1, 2) * count(batch)[:, None]).unbind(1)
    return torch.stack([(chosen > rejected).float(), chosen - rejected]).sum(1)


def check_reward_model(model_config: dict[str, Any], attention: str, name: str) -> str:
    """Raise `ConfigError` for a model whose scores depend on padding or ignore the last token.

    Return "", or the reason why the model could not be tested.
    """
    kind = model_config["model_type"]
    try:
        fault = probe(model_config, TASKS["reward"].auto_class, name).score_fault
    except (*CONSTRUCTOR_ERRORS, ImportError) as error:
        why = in_words(error)
        return f"it could not be tested whether a {kind} ignores the padding of a row: {why}"
    if fault:
        rule = f"the score of a {kind} for an answer {fault}"
        raise config_error(f"model = {name}", rule, "use a decoder of recipes/SUPPORT.md")
    return ""


TASK = Task(
    spec=TASKS["reward"],
    targets=("labels",),
    processor=make_pair_processor,
    forward=forward,
    loss=loss,
    count=count,
    check=check_reward_model,
    samples=Samples(collate, generate_pair, NUM_BUILTIN_PAIRS, pair_identity),
    measures=("accuracy", "margin"),
    measure=measure,
    reports_each_step=True,
    fit_config=with_pad_token,
)
