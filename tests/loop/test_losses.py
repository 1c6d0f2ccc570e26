"""In every layout, the chunked loss equals the loss computed from full logits.

The tests compare the losses of steps, corpora and evaluations, and the gradients.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from parity import TP2, accumulating, corpus, recipe_for, train_in_layout
from peft_models import add_lora
from recipekit.spec.recipe import Recipe
from shipped_jsons import strategy

VOCABULARY = 264
COLUMNS = 64  # rows of a block in this test, small enough for several blocks


def train_and_watch(
    recipe: Recipe, config: dict[str, Any], out: str
) -> tuple[int, list[tuple[int, int]]]:
    """Run the real loop on a rank, with small blocks.

    Return the loop's exit code and, for its losses, (rows of the head's weight, columns of a
    block).
    """
    from recipekit.kernels import cross_entropy
    from recipekit.model import chunked_loss, loss_path

    token_losses, logits, operations_of, seen = (
        chunked_loss.token_losses,
        cross_entropy._block_logits,
        loss_path.operations_of,
        set(),
    )

    def in_small_blocks(hidden: Any, head: Any, labels: Any, block: Any) -> Any:
        return token_losses(hidden, head, labels, COLUMNS * labels.numel())

    def watched(hidden: Any, weight: Any, bias: Any, columns: slice) -> Any:
        made = logits(hidden, weight, bias, columns)
        seen.add((len(weight), made.shape[1]))
        return made

    def unwatched(*given: Any) -> Any:
        found = operations_of(*given)
        seen.clear()  # discard the blocks of the small test model
        return found

    chunked_loss.token_losses, cross_entropy._block_logits, loss_path.operations_of = (
        in_small_blocks,
        watched,
        unwatched,
    )
    try:
        return train_in_layout(recipe, config, out), sorted(seen)
    finally:
        chunked_loss.token_losses, cross_entropy._block_logits, loss_path.operations_of = (
            token_losses,
            logits,
            operations_of,
        )


@dataclass(frozen=True)
class Case:
    name: str
    file: str
    layout: dict[str, Any] = field(default_factory=dict)
    model: str = "untied"
    rows: int = VOCABULARY  # of the head's weight on a rank
    slow: bool = False


CASES = [
    Case("zero3, tied, soft cap", "zero3", model="gemma2", slow=True),
    Case("tp2", "zero1", TP2, rows=VOCABULARY // 2),
    Case("pp2", "zero1", {"pp": 2}, slow=True),
    Case("lora", "zero3", {"adapt": add_lora}, slow=True),
    Case("tp2, tied", "zero1", TP2, model="tied", slow=True),
    Case("dualpipev", "zero1", {"pp": 2, "pipeline_schedule": "dualpipev"}, slow=True),
    Case("pp2, tied, soft cap", "zero1", {"pp": 2}, model="gemma2", slow=True),
    Case("fsdp2", "", {"engine": "fsdp2", "precision": "fp32"}, slow=True),
    Case("ddp", "", {"engine": "ddp", "precision": "fp32"}, slow=True),
    Case("checkpointing", "zero3", {"activation_checkpointing": True}, slow=True),
    Case("sp2", "zero1", {"sp": 2}, slow=True),
    Case("experts", "zero1", {"ep": 2}, model="moe", slow=True),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.slow if case.slow else ())
        for case in CASES
    ],
)
def test_a_loss_in_chunks_is_that_of_whole_logits(pools, tmp_path, case):
    mixture = f"short={corpus('borders')}@1; long=builtin@2"
    numbers = {
        "steps": 4,
        "warmup_steps": 1,
        "eval_every": 2,
        "dataset": mixture,
        "tokenizer": "bytes",
        "export": False,
    }
    recipe = recipe_for(case.model, **accumulating(2, **case.layout), **numbers)
    found = {}
    for loss in ("whole", "chunked"):
        config = strategy(case.file) if case.file else {}
        told = pools.run(
            2,
            train_and_watch,
            recipe=replace(recipe, loss=loss),
            config=config,
            out=str(tmp_path / loss),
        )
        assert [code for code, _ in told] == [0, 0]
        blocks = [seen for _, seen in told if seen]
        if loss == "whole":
            assert not blocks
        else:  # only a pipeline's last stage has blocks, which is on the first rank under DualPipeV
            wanted = {(case.rows, COLUMNS), (case.rows, case.rows % COLUMNS)}
            assert len(blocks) == (1 if recipe.pp > 1 else 2) and all(
                set(seen) == wanted for seen in blocks
            ), told
        found[loss] = [
            json.loads(line)
            for line in (tmp_path / loss / "metrics.jsonl").read_text().splitlines()
        ]
    for mine, theirs in zip(found["chunked"], found["whole"], strict=True):
        for name in (
            "loss",
            "grad_norm",
            "loss/short",
            "loss/long",
            *(["eval_loss"] if mine["step"] % 2 == 0 else []),
        ):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5), (mine["step"], name)
