"""Training in any layout, and a comparison with plain PyTorch (reference.py)."""

import functools
import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from recipekit.architectures.families import default_config
from recipekit.architectures.lookup import SHIPPED
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import unit_of_metrics
from reference import Trained, train_plain
from shipped_jsons import strategy

STEPS = 10
MODELS = {
    "untied": "meta-llama/Llama-3.1-8B",
    "tied": "meta-llama/Llama-3.2-1B",
    "qwen3": "Qwen/Qwen3-0.6B",
    "moe": "Qwen/Qwen3-30B-A3B",
    "gpt2": "openai-community/gpt2",
}
NUMBERS = dict(
    lr=3e-4,
    eps=1e-6,
    steps=STEPS,
    seq_len=64,
    global_batch=8,
    warmup_steps=2,
    weight_decay=0.1,
    eval_every=STEPS,
    eval_rows=8,
    wandb=False,
    seed=3,
)


@functools.cache
def without_dropout(model: str) -> str:
    """Return a folder with the model's config, without dropout.

    Dropout would make the runs impossible to compare.
    """
    config = json.loads((SHIPPED / f"{model.replace('/', '--')}.json").read_text())
    folder = Path(tempfile.mkdtemp(prefix="parity_"))
    (folder / "config.json").write_text(
        json.dumps(config | {key: 0.0 for key in config if key.endswith("pdrop")})
    )
    return str(folder)


@functools.cache
def family(model_type: str) -> str:
    """Return a folder with a model family's default config."""
    folder = Path(tempfile.mkdtemp(prefix="parity_"))
    (folder / "config.json").write_text(json.dumps(default_config(model_type).to_dict()))
    return str(folder)


def recipe_for(model: str, **changes: Any) -> Recipe:
    """Return a recipe; `model` is a key of MODELS or a family's model type."""
    name = (
        family(model)
        if model not in MODELS
        else without_dropout(MODELS[model])
        if model == "gpt2"
        else MODELS[model]
    )
    if model in ("gemma2", "hy_v4"):
        changes["attention"] = "eager"  # only eager supports soft caps and token streams
    return Recipe(model=name, ds_config={}, **(NUMBERS | {"micro_batch": 1} | changes))


def accumulating(world: int, **layout: Any) -> dict[str, Any]:
    """Add to a layout the largest micro-batch that still accumulates gradients.

    The step then has two micro-batches, or two for each pipeline stage.
    """
    model_parallel = layout.get("tp", 1) * layout.get("sp", 1) * (pp := layout.get("pp", 1))
    return {
        "micro_batch": max(1, NUMBERS["global_batch"] * model_parallel // world // (2 * pp))
    } | layout


def train_in_layout(recipe: Recipe, config: dict[str, Any], out: str) -> int:
    """Run the real loop on a rank of a pool, in the same way as `run` does."""
    from recipekit.train import main

    recipe = replace(recipe, ds_config=config, out=out)
    command = parse(recipe, Path("parity.py"), ["--tiny", *pinned(recipe)])
    sys.argv = ["parity.py"]
    return main(resolve_run(command))


def pinned(recipe: Recipe) -> list[str]:
    """Return flags for the values that --tiny would otherwise change."""
    names = (
        "dataset",
        "micro_batch",
        "global_batch",
        "seq_len",
        "eval_rows",
        "warmup_steps",
        "tp",
        "pp",
        "sp",
        "ep",
    )
    names += ("dataset",) if recipe.dataset != "builtin" else ()
    return [word for name in names for word in (f"--{name}", str(getattr(recipe, name)))]


@functools.cache
def reference(model: str, micro_batch: int = 1, bf16: bool = False, **changes: Any) -> Trained:
    recipe = recipe_for(model, micro_batch=micro_batch, **changes)
    if recipe.attention == "auto":
        recipe = replace(recipe, attention="sdpa")  # attention of transformers
    os.environ.pop("WORLD_SIZE", None)
    plan = resolve_run(
        parse(
            Recipe(
                **(vars(recipe) | {"ds_config": strategy("zero0", bf16), "out": "/nonexistent"})
            ),
            Path("parity.py"),
            ["--tiny", *pinned(recipe)],
        )
    )
    assert plan.model_config is not None
    return train_plain(plan.recipe, plan.model_config, STEPS, bf16)


def compare(
    out: Path, expected: Trained, check_weights: bool = True, norm_rel: float = 1e-5
) -> None:
    """Compare a run with the reference, with the fp32 tolerances of a layout.

    The tolerances are 1e-5 relative for losses, `norm_rel` relative for norms, and 1e-5 absolute
    for every weight.
    """
    from safetensors.torch import load_file

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == pytest.approx(expected.losses, rel=1e-5)
    norms = [line["grad_norm"] for line in lines]
    assert norms == pytest.approx(expected.grad_norms, rel=norm_rel)
    assert [line["lr"] for line in lines] == pytest.approx(expected.lrs, rel=1e-9)
    assert [line[unit_of_metrics(line)] for line in lines] == expected.tokens
    if expected.eval_loss is not None:
        assert lines[-1]["eval_loss"] == pytest.approx(expected.eval_loss, rel=1e-5)
    if check_weights:
        got = {
            name: value
            for file in (out / "hf").glob("*.safetensors")
            for name, value in load_file(file).items()
        }
        assert got.keys() == expected.weights.keys()
        for name, value in expected.weights.items():
            worst = (got[name] - value).abs().max().item()
            assert worst <= 1e-5, f"{name} differs by {worst}"


@dataclass(frozen=True)
class Case:
    """A layout that trains like plain PyTorch.

    `layout` contains fields that only the distributed recipe uses. `numbers` contains fields that
    the reference uses as well.
    """

    name: str
    world: int
    file: str
    layout: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    model: str = "untied"
    corpus: str = ""  # argument of `corpus`, or "" for the builtin data
    slow: bool = False
    norm_rel: float = 1e-5

    @property
    def both(self) -> dict[str, Any]:
        """Return the recipe fields that the reference has as well."""
        return self.numbers | (
            {"dataset": corpus(self.corpus), "task": TASKS[self.corpus]} if self.corpus else {}
        )


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, id=case.name, marks=pytest.mark.slow if case.slow else ())
            for case in cases
        ],
    )


TP2 = {"tp": 2}
TASKS = {"chats": "sft", "borders": "pretrain"}


def train_and_compare(pools: Any, out: Path, case: Case) -> None:
    recipe = recipe_for(case.model, **accumulating(case.world, **case.layout), **case.both)
    codes = pools.run(
        case.world, train_in_layout, recipe=recipe, config=strategy(case.file), out=str(out)
    )
    assert codes == [0] * case.world
    compare(out, reference(case.model, **case.both), norm_rel=case.norm_rel)


@functools.cache
def corpus(kind: str) -> str:
    """Write chats with answers of 1 to 40 letters, or documents of 5 to 60 letters.

    The number of labels therefore differs between rows and between ranks.
    """
    draw = random.Random(kind)

    def text(longest):
        return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(1, longest)))

    rows = [
        {
            "messages": [
                {"role": "user", "content": text(8)},
                {"role": "assistant", "content": f"{text(39)}."},
            ]
        }
        for _ in range(3000)
    ]
    rows = rows if kind == "chats" else [{"text": f"start{text(55)}"} for _ in range(3000)]
    file = Path(tempfile.mkdtemp(prefix="parity_")) / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def compare_bf16(out: Path, layout: str) -> None:
    plain = [
        reference("untied", micro_batch=micro_batch, bf16=True).losses
        for micro_batch in (8, 4, 2, 1)
    ]
    noise = max(max(step) - min(step) for step in zip(*plain, strict=True))
    losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    middle = [sum(step) / len(step) for step in zip(*plain, strict=True)]
    worst = max(abs(mine - theirs) for mine, theirs in zip(losses, middle, strict=True))
    print(f"{layout}: worst difference {worst:.1e}, noise of the reference {noise:.1e}")
    assert 0 < noise < 0.05
    assert worst <= 3 * noise
