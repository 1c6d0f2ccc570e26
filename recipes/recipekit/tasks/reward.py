"""A reward model learns to give the preferred one of two answers the larger number (Bradley and
Terry, Biometrika 1952; Ouyang et al., 2022).

The model is the classifier of sequences that transformers makes of a decoder, with one output: it
reads an answer up to its last token that is no padding. transformers itself finds that token, by
the `pad_token_id` of config.json.
"""

from typing import Any

import torch
from torch.nn.functional import logsigmoid

from ..data.pairs import NUM_DRAWN, Pairs, collate_pairs, drawn, identity, pairs_of
from ..model.config_errors import WRONG_VALUE
from ..model.small import EXAMPLES, small_copy
from ..spec.refusal import Refusal, refuse
from ..spec.task import IGNORE, MicroBatch, Row, Samples, Task
from ..spec.task_specs import TASKS

READS_PADS_FROM = 1e-5  # a change of a number, as a share of the largest one
PADS = 5


def configured(model_config: dict[str, Any], pairs: Pairs) -> dict[str, Any]:
    """Names the tokenizer's padding in a config.json, also in its part of the language model:
    without it transformers reads the last place of a row.
    """
    text = model_config.get("text_config")
    inner = {"text_config": text | {"pad_token_id": pairs.pad}} if isinstance(text, dict) else {}
    return model_config | {"pad_token_id": pairs.pad} | inner


def collate(pairs: Pairs, rows: list[Row | None], keys: list[int] | None) -> MicroBatch:
    """Makes {"input_ids", "position_ids"}, each (B, 2, T), and "labels", (B,): 0, the place of the
    better answer, or IGNORE for a row that fills up.
    """
    batch = collate_pairs(pairs, rows, keys)
    return batch | {"labels": torch.tensor([IGNORE if row is None else 0 for row in rows])}


def forward(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Computes the number of each answer, (2 * B, 1)."""
    return model(**TASK.inputs_of(batch), **TASK.facts.constants).logits


def loss(output: torch.Tensor, batch: MicroBatch, by_row: bool) -> torch.Tensor:
    """Sums -log sigmoid(number of the chosen answer - that of the rejected one), in fp32: () of the
    micro-batch, or (B,).
    """
    chosen, rejected = output.float().view(-1, 2).unbind(1)
    rows = -logsigmoid(chosen - rejected) * count(batch)
    return rows if by_row else rows.sum()


def count(batch: MicroBatch) -> torch.Tensor:
    """Counts 1 for a pair, (B,) int64."""
    return (batch["labels"] != IGNORE).long()


@torch.no_grad()
def measure(output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Adds up over the pairs, (2,) fp32: whether the chosen answer has the larger number, and by
    how much.
    """
    chosen, rejected = (output.float().view(-1, 2) * count(batch)[:, None]).unbind(1)
    return torch.stack([(chosen > rejected).float(), chosen - rejected]).sum(1)


def check(model_config: dict[str, Any], attention: str, name: str) -> str:
    """Raises `Refusal` for a model whose number for a row changes with the padding behind it, or
    does not with its last token.

    The former are models that attend both ways, since no mask of padding is given; the latter read
    the first place, from which a causal one has seen nothing of the answer. Returns "", or why this
    could not be looked at.
    """
    kind, facts = model_config["model_type"], TASKS["reward"]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        try:
            model: Any = small_copy(model_config, facts, name).eval()
            ids = EXAMPLES["input_ids"](model.config)
            padded = torch.cat(
                [ids, ids.new_full((len(ids), PADS), model.config.get_text_config().pad_token_id)],
                1,
            )
            ending = torch.cat([ids[:, :-1], ids[:, -1:] + 1], 1)
            alone, behind, other = (
                model(
                    input_ids=rows,
                    position_ids=torch.arange(rows.shape[1]).expand(len(rows), -1),
                    **facts.constants,
                ).logits
                for rows in (ids, padded, ending)
            )
        except (*WRONG_VALUE, ImportError) as error:
            told = (
                error.problems[0].rule
                if isinstance(error, Refusal)
                else f"{type(error).__name__}: {str(error)[:200]}"
            )
            return f"it could not be tested whether a {kind} ignores the padding of a row: {told}"
    if (
        alone.shape != (len(ids), 1)
        or not (alone - behind).abs().max() <= READS_PADS_FROM * alone.abs().max()
    ):
        rule = f"the score of a {kind} for an answer changes with the padding after it"
    elif torch.equal(alone, other):
        rule = f"the score of a {kind} for an answer does not depend on its last token"
    else:
        return ""
    raise refuse(f"model = {name}", rule, "use a decoder of recipes/SUPPORT.md")


TASK = Task(
    facts=TASKS["reward"],
    targets=("labels",),
    processor=pairs_of,
    forward=forward,
    loss=loss,
    count=count,
    check=check,
    samples=Samples(collate, drawn, NUM_DRAWN, identity),
    measures=("accuracy", "margin"),
    measure=measure,
    each_step=True,
    configured=configured,
)
