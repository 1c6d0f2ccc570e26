"""Pipeline parallelism: any split into stages trains like plain PyTorch, and a split is balanced, refused or described as it should be."""

from typing import Any

import pytest
import torch
from recipekit import pipeline
from recipekit.model import empty_model
from recipekit.recipe import Recipe
from recipekit.refusal import Refusal
from test_model import tiny_config
from test_parity import compare, recipe_for, reference, strategy, train_in_layout

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pp": 2}),
    "pp4": (4, {"pp": 4}),
    "tp2": (2, {"tp": 2}),
    "pp2 tp2": (4, {"pp": 2, "tp": 2}),
    "pp2 dp2": (4, {"pp": 2}),
    "pp2 tp2 dp2": (8, {"pp": 2, "tp": 2}),
    "pp2 checkpointing": (2, {"pp": 2, "activation_checkpointing": True, "checkpoint_every": 2}),
    "pp2 tp2 checkpointing": (4, {"pp": 2, "tp": 2, "activation_checkpointing": True}),
}
FAMILIES = ("untied", "tied", "qwen3", "gemma2", "phi3", "olmo2", "qwen3_moe", "deepseek_v3")
QUICK = {  # the others are slow tests
    *(("untied", layout, zero) for layout in LAYOUTS for zero in ("zero0", "zero1") if "tp2 dp2" not in layout),
    ("tied", "pp2", "zero1"),
    ("tied", "pp4", "zero0"),
    ("tied", "pp2 tp2 dp2", "zero1"),
    *((family, "pp2 tp2", "zero1") for family in FAMILIES),
}
CASES = [
    pytest.param(family, layout, zero, id=f"{family} {layout} {zero}", marks=() if (family, layout, zero) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for layout in LAYOUTS
    for zero in ("zero0", "zero1")
]


@pytest.mark.parametrize(("family", "layout", "zero"), CASES)
def test_stages_train_like_plain_pytorch(pools, tmp_path, family, layout, zero):
    world, degrees = LAYOUTS[layout]
    codes = pools.run(world, train_in_layout, recipe=recipe_for(family, **degrees), config=strategy(zero), out=str(tmp_path / "run"))
    assert codes == [0] * world
    compare(tmp_path / "run", reference(family))


def test_the_norm_that_clips_counts_every_parameter_once(pools, tmp_path):
    """Clipping far below the norm changes every step, so a norm that left out a stage would change the weights."""
    expected = reference("tied", gradient_clipping=0.1)
    assert min(expected.grad_norms) > 0.2
    for zero in ("zero0", "zero1"):
        recipe = recipe_for("tied", pp=2, tp=2, gradient_clipping=0.1)
        pools.run(4, train_in_layout, recipe=recipe, config=strategy(zero), out=str(tmp_path / zero))
        compare(tmp_path / zero, expected)


def test_stages_train_in_bf16(pools, tmp_path):
    """Every loss within 3 x the largest difference between single-process runs that only split the batch differently."""
    import json

    plain = [reference("untied", micro_batch=micro_batch, bf16=True).losses for micro_batch in (8, 4, 2, 1)]
    noise = max(max(step) - min(step) for step in zip(*plain, strict=True))
    pools.run(2, train_in_layout, recipe=recipe_for("untied", pp=2), config=strategy("zero1", bf16=True), out=str(tmp_path / "run"))
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    middle = [sum(step) / len(step) for step in zip(*plain, strict=True)]
    worst = max(abs(mine - theirs) for mine, theirs in zip(losses, middle, strict=True))
    print(f"pp2 bf16: worst difference {worst:.1e}, noise of the reference {noise:.1e}")
    assert worst <= 3 * noise


@pytest.mark.parametrize(
    ("costs", "before", "after", "stages", "bounds"),
    [
        ([1, 1, 1, 1], 0, 0, 2, (0, 2, 4)),
        ([1, 1, 1, 1], 2, 0, 2, (0, 1, 4)),  # an embedding as heavy as two layers
        ([1, 1, 1, 1], 0, 9, 2, (0, 3, 4)),  # every stage has a layer
        ([3, 1, 1, 1], 0, 0, 2, (0, 1, 4)),
        ([1] * 5, 0, 0, 5, (0, 1, 2, 3, 4, 5)),
        ([1] * 7, 1, 1, 3, (0, 2, 5, 7)),
    ],
)
def test_the_largest_stage_is_as_small_as_it_can_be(costs, before, after, stages, bounds):
    assert pipeline.balance(costs, before, after, stages) == bounds


def test_every_parameter_is_on_a_stage_and_tied_ones_are_on_two():
    model = empty_model(Recipe(model="none"), tiny_config("llama_tied"))
    split = pipeline.split(model, 3)
    held = [pipeline.names_of(split, model, [stage]) for stage in range(3)]
    assert sorted({name for names in held for name in names}) == sorted(name for name, _ in model.named_parameters())
    assert [name for name in held[0] if name in held[2]] == ["model.embed_tokens.weight"] and not set(held[0]) & set(held[1])
    for stage in range(3):
        part = empty_model(Recipe(model="none"), tiny_config("llama_tied"))
        pipeline.cut(part, split, stage, torch.float32)
        assert [name for name, _ in part.named_parameters()] == held[stage], "the names are those of Hugging Face"
    assert "stage 2 layers 3 (" in pipeline.describe(split, model)


def test_a_model_without_a_plan_is_refused_with_the_lines_that_help():
    model = empty_model(Recipe(model="none"), tiny_config("gpt2"))
    with pytest.raises(Refusal) as refusal:
        pipeline.split(model, 2)
    text = str(refusal.value)
    assert "publishes no pipeline plan" in text
    lines = text[text.index("pp_plan={") + len("pp_plan=") : text.rindex("}") + 1]
    plan = eval(lines)  # what the user is told to write
    assert plan == {"transformer.wte": "first", "transformer.wpe": "first", "transformer.h": "split", "transformer.ln_f": "last", "lm_head": "last"}
    assert pipeline.split(model, 2, plan).bounds == (0, 1, 4)  # the tiny model has more positions than a layer has weights


def test_more_stages_than_layers_are_refused():
    model = empty_model(Recipe(model="none"), tiny_config("llama"))
    with pytest.raises(Refusal, match="only 4 layers"):
        pipeline.split(model, 5)


def test_a_plan_that_does_not_fit_is_refused():
    model = empty_model(Recipe(model="none"), tiny_config("llama"))
    with pytest.raises(Refusal, match="must name modules of the model"):
        pipeline.split(model, 2, {"model.layer": "split"})
