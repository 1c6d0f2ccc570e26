"""Token classifiers train like plain PyTorch in every layout that their task supports.

They resume bit for bit, and transformers can read their exports.
"""

import functools
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pool import ROOT
from recipekit.architectures.families import default_config
from recipekit.data.batching import DataRank
from recipekit.data.held_out import eval_rows
from recipekit.data.request import Request, request_from_recipe
from recipekit.data.stream import open_stream
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import reproducible_values
from recipekit.spec.task import IGNORE
from recipekit.tasks.token_classification import TASK
from reference import Plain, Trained, num_right, train_plain
from safetensors.torch import load_file

STEPS = 10
NUMBERS = dict(
    lr=3e-4,
    eps=1e-6,
    steps=STEPS,
    seq_len=64,
    micro_batch=2,
    global_batch=8,
    warmup_steps=2,
    weight_decay=0.1,
    eval_every=STEPS,
    eval_rows=8,
    wandb=False,
    seed=3,
)
FLAGS = ("dataset", "micro_batch", "global_batch", "seq_len", "eval_rows", "warmup_steps")
NAMES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


@functools.cache
def family(model_type: str, dropout: float = 0.0) -> str:
    """Return a folder with the default config of a family, with this dropout and five classes."""
    config = default_config(model_type, "token_classification").to_dict()
    config |= {key: dropout for key in config if key.endswith(("dropout_prob", "_dropout"))}
    config |= {
        "id2label": {str(number): name for number, name in enumerate(NAMES)},
        "label2id": {name: number for number, name in enumerate(NAMES)},
    }
    folder = Path(tempfile.mkdtemp(prefix="tagged_"))
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return str(folder)


@functools.cache
def tagged_words() -> str:
    """Return a file of rows of 1 to 20 words: packed rows have several documents and padding.

    The class of a word is its first letter, and depends on the word behind it. Every tenth word has
    no class.
    """
    draw = random.Random(5)
    lines = []
    for _ in range(3000):
        words = ["".join(draw.choices("abcde", k=draw.randint(1, 6))) for _ in range(20)]
        words = words[: draw.randint(1, 20)]
        behind = [*words[1:], "a"]
        tags: list[str | int] = [
            NAMES[("abcde".index(word[0]) + (other[0] == "b")) % len(NAMES)]
            for word, other in zip(words, behind, strict=True)
        ]
        tags = [IGNORE if number % 10 == 9 else tag for number, tag in enumerate(tags)]
        lines.append(json.dumps({"text": words, "label": list(map(str, tags))}) + "\n")
    folder = Path(tempfile.mkdtemp(prefix="tagged_"))
    (folder / "tagged.jsonl").write_text("".join(lines))
    return str(folder / "tagged.jsonl")


def recipe_for(model: str, dropout: float = 0.0, **changes: Any) -> Recipe:
    numbers = NUMBERS | {"dataset": tagged_words()} | changes
    return Recipe(
        task="token_classification", model=family(model, dropout), ds_config={}, **numbers
    )


def plan_of(recipe: Recipe) -> Any:
    """Return the plan of a run, with flags for the values that --tiny would otherwise change."""
    names = (*FLAGS, "tp", "pp")
    typed = [word for name in names for word in (f"--{name}", str(getattr(recipe, name)))]
    return resolve_run(parse(recipe, Path("tagged.py"), ["--tiny", *typed]))


def train_tagged(recipe: Recipe, config: dict[str, Any], out: str) -> int:
    """Run the real loop on a rank of a pool, as `run` starts it."""
    from recipekit.train import main

    sys.argv = ["tagged.py"]
    return main(plan_of(replace(recipe, ds_config=config, out=out)))


def strategy(file: str) -> dict[str, Any]:
    """Return a shipped JSON for fp32."""
    config = json.loads((ROOT / "ds_configs" / f"{file}.json").read_text())
    config.pop("data_types", None)
    return config | {"bf16": {"enabled": False}}


# Plain PyTorch
# --------------------------------------------------------------------------------------------------


def documents(batch: dict[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (ids, labels), both (tokens,), of each document. Positions of 0 separate documents."""
    for ids, labels, positions in zip(
        batch["input_ids"], batch["labels"], batch["position_ids"], strict=True
    ):
        edges = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for start, stop in pairwise(edges):
            yield ids[start:stop], labels[start:stop]


def logits_of(
    model: Any, batch: dict[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (logits, labels) of the labelled tokens of each document.

    The model of transformers reads each document alone, without a mask and usually without
    positions.
    """
    for ids, labels in documents(batch):
        if (chosen := labels >= 0).any():
            told = {}
            # The padding token of a tiny RoBERTa is a byte, and RoBERTa gives it no position.
            if model.config.pad_token_id in ids.tolist():
                told = {"position_ids": torch.arange(len(ids)).unsqueeze(0)}
            output = model(input_ids=ids.unsqueeze(0), **told)
            yield output.logits[0, chosen].float(), labels[chosen]


def summed_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    losses = (
        -logits.log_softmax(-1).gather(1, labels.unsqueeze(1)).sum()
        for logits, labels in logits_of(model, batch)
    )
    return sum(losses, torch.zeros(()))


def right(model: Any, batch: dict[str, torch.Tensor]) -> list[float]:
    return [sum(num_right(logits, labels) for logits, labels in logits_of(model, batch))]


def rows_of(opens: Any, recipe: Recipe, model_config: dict[str, Any]) -> Any:
    request: Request = replace(request_from_recipe(recipe), documents=TASK.documents)
    return opens(request, TASK.processor(request, model_config), rank=DataRank(1, 0))


TAGGED = Plain(
    stream=functools.partial(rows_of, open_stream),
    held_out=functools.partial(rows_of, eval_rows),
    loss=summed_loss,
    right=right,
)


@functools.cache
def reference(model: str) -> Trained:
    os.environ.pop("WORLD_SIZE", None)
    plan = plan_of(replace(recipe_for(model), ds_config=strategy("zero0"), out="/nonexistent"))
    return train_plain(plan.recipe, plan.model_config, STEPS, plain=TAGGED)


# Layouts
# --------------------------------------------------------------------------------------------------


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def compare(run: Path, expected: Trained) -> None:
    """Compare losses, norms, rates, labels and accuracy with the reference, and all weights.

    The tolerances are 1e-5 relative for losses and norms, and 1e-5 absolute for weights.
    """
    lines = metrics_of(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == pytest.approx(expected.losses, rel=1e-5)
    assert [line["grad_norm"] for line in lines] == pytest.approx(expected.grad_norms, rel=1e-5)
    assert [line["lr"] for line in lines] == pytest.approx(expected.lrs, rel=1e-9)
    assert [line["tokens"] for line in lines] == expected.tokens
    assert lines[-1]["eval_loss"] == pytest.approx(expected.eval_loss, rel=1e-5)
    assert [lines[-1]["eval_accuracy"]] == pytest.approx(expected.right)
    got = exported(run / "hf")
    assert got.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        worst = (got[name] - value).abs().max().item()
        assert worst <= 1e-5, f"{name} differs by {worst}"


TP2, PP2 = {"tp": 2}, {"pp": 2}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "world", "file", "layout"),
    [
        pytest.param("bert", 2, "zero2", {}, id="bert zero2 dp2"),
        pytest.param("bert", 2, "zero2", TP2, id="bert zero2 tp2"),
        pytest.param("bert", 2, "zero1", PP2, id="bert zero1 pp2", marks=SLOW),
        pytest.param("roberta", 2, "zero2", {}, id="roberta zero2 dp2", marks=SLOW),
        pytest.param("xlm-roberta", 2, "zero2", TP2, id="xlm-roberta zero2 tp2", marks=SLOW),
        pytest.param("electra", 4, "zero1", TP2 | PP2, id="electra zero1 tp2 pp2", marks=SLOW),
        pytest.param("modernbert", 2, "zero2", {}, id="modernbert zero2 dp2", marks=SLOW),
        pytest.param("modernbert", 2, "zero2", TP2, id="modernbert zero2 tp2", marks=SLOW),
        pytest.param("modernbert", 2, "zero1", PP2, id="modernbert zero1 pp2", marks=SLOW),
        pytest.param("modernbert", 4, "zero3", TP2, id="modernbert zero3 tp2 dp2", marks=SLOW),
    ],
)
def test_token_classifiers_train_like_plain_pytorch(
    pools: Any, tmp_path: Path, model: str, world: int, file: str, layout: dict[str, int]
) -> None:
    recipe = recipe_for(model, **layout)
    codes = pools.run(
        world, train_tagged, recipe=recipe, config=strategy(file), out=str(tmp_path / "run")
    )
    assert codes == [0] * world
    compare(tmp_path / "run", reference(model))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, TP2], ids=["dp2", "tp2"])
def test_a_resume_with_dropout_is_bit_for_bit(
    pools: Any, tmp_path: Path, layout: dict[str, int]
) -> None:
    """BERT's default dropout is 0.1, in embeddings, attention and layers, and before the head."""
    for out, stops in (("whole", (0,)), ("parts", (4, 0))):
        for stop_at in stops:
            recipe = recipe_for("bert", dropout=0.1, stop_at=stop_at, steps=6, **layout)
            assert pools.run(
                2, train_tagged, recipe=recipe, config=strategy("zero2"), out=str(tmp_path / out)
            ) == [0, 0]
    whole, parts = (metrics_of(tmp_path / out) for out in ("whole", "parts"))
    assert reproducible_values(whole) == reproducible_values(parts)
    first, second = (exported(tmp_path / out / "hf") for out in ("whole", "parts"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_what_is_exported_is_read_and_judged_by_plain_transformers(
    pools: Any, tmp_path: Path
) -> None:
    """transformers computes the loss and accuracy that the run reported, and knows the names."""
    recipe = recipe_for("roberta")
    pools.run(1, train_tagged, recipe=recipe, config=strategy("zero0"), out=str(tmp_path / "run"))
    folder = tmp_path / "run" / "hf"
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    assert model.config.id2label == dict(enumerate(NAMES))
    plan = plan_of(replace(recipe, ds_config=strategy("zero0"), out="/nonexistent"))
    with torch.no_grad():
        batches = TAGGED.held_out(plan.recipe, plan.model_config)
        judged = [pair for batch in batches for pair in logits_of(model, batch)]
    logits, labels = (torch.cat(tensors) for tensors in zip(*judged, strict=True))
    last = metrics_of(tmp_path / "run")[-1]
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert last["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert last["eval_accuracy"] == pytest.approx(num_right(logits, labels) / len(labels))
    assert transformers.AutoTokenizer.from_pretrained(folder)("a b")["input_ids"]
