"""Pipeline parallelism: any split into stages trains like plain PyTorch, and a split is balanced, refused or described as it should be."""

from pathlib import Path

import pytest
from recipekit.plan import make_plan
from recipekit.recipe import Recipe, parse
from recipekit.refusal import Refusal
from test_parity import compare, compare_bf16, recipe_for, reference, strategy, train_in_layout

DUALPIPEV = {"pp": 2, "pipeline_schedule": "dualpipev"}  # stages 0 and 3 on rank 0, so a tied embedding and its head lie together
CASES = [
    ("pp2 zero0", 2, "zero0", {"pp": 2}),
    ("pp2 zero1", 2, "zero1", {"pp": 2}),
    ("pp4 zero1", 4, "zero1", {"pp": 4}),
    ("pp2 tp2 zero0", 4, "zero0", {"pp": 2, "tp": 2}),
    ("pp2 tp2 zero1", 4, "zero1", {"pp": 2, "tp": 2}),
    ("pp2 dp2 zero1", 4, "zero1", {"pp": 2}),
    ("pp2 dp2 zero0", 4, "zero0", {"pp": 2}),
    ("pp2 tp2 dp2 zero1", 8, "zero1", {"pp": 2, "tp": 2}),
    ("dualpipev pp2 zero0", 2, "zero0", DUALPIPEV),
    ("dualpipev pp2 zero1", 2, "zero1", DUALPIPEV),
    ("dualpipev pp2 dp2 zero1", 4, "zero1", DUALPIPEV),
    ("dualpipev pp2 tp2 zero1", 4, "zero1", DUALPIPEV | {"tp": 2}),
    ("dualpipev pp2 activation checkpointing", 2, "zero1", DUALPIPEV | {"activation_checkpointing": True}),
]


@pytest.mark.parametrize("model", ["untied", "tied"])
@pytest.mark.parametrize(("world", "file", "layout"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_stages_train_like_plain_pytorch(pools, tmp_path, model, world, file, layout):
    recipe = recipe_for(model, **layout)
    codes = pools.run(world, train_in_layout, recipe=recipe, config=strategy(file), out=str(tmp_path / "run"))
    assert codes == [0] * world
    compare(tmp_path / "run", reference(model))


@pytest.mark.parametrize("rows", [1, 3, 16])  # of micro-batches: fewer than DualPipeV takes, fewer than a step has, and more
@pytest.mark.parametrize("layout", [{"pp": 2}, DUALPIPEV], ids=["1f1b", "dualpipev"])
def test_any_number_of_held_out_rows_is_evaluated(pools, tmp_path, layout, rows):
    """Evaluated in the middle too, so that the steps after it show that it leaves nothing behind."""
    pools.run(2, train_in_layout, recipe=recipe_for("untied", **layout, eval_rows=rows, eval_every=4), config=strategy("zero1"), out=str(tmp_path / "run"))
    compare(tmp_path / "run", reference("untied", eval_rows=rows))


def test_dualpipev_resumes_where_it_stopped(pools, tmp_path):
    for stop_at in (5, 0):
        pools.run(2, train_in_layout, recipe=recipe_for("tied", **DUALPIPEV, stop_at=stop_at), config=strategy("zero1"), out=str(tmp_path / "run"))
    compare(tmp_path / "run", reference("tied"))


@pytest.mark.parametrize("layout", [{"pp": 2}, DUALPIPEV], ids=["1f1b", "dualpipev"])
def test_stages_train_like_plain_pytorch_in_bf16(pools, tmp_path, layout):
    pools.run(2, train_in_layout, recipe=recipe_for("untied", **layout), config=strategy("zero1", bf16=True), out=str(tmp_path / "run"))
    compare_bf16(tmp_path / "run", str(layout))


def planned(monkeypatch, world: int, *flags: str, **fields) -> Recipe:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    recipe = Recipe(model="meta-llama/Llama-3.1-8B", init="random", tokenizer="bytes", ds_config="zero1.json", out="/nonexistent", **fields)
    return make_plan(parse(recipe, Path("pipeline.py"), list(flags))).recipe


@pytest.mark.parametrize(("world", "flags"), [(2, ("--pp", "2")), (4, ("--pp", "2", "--micro_batch", "3")), (2, ("--pp", "2", "--tp", "1"))])
def test_tiny_takes_the_micro_batches_that_dualpipev_needs(monkeypatch, world, flags):
    recipe = planned(monkeypatch, world, "--tiny", "--pipeline_schedule", "dualpipev", *flags)
    assert recipe.pp == 2 and recipe.global_batch == world // 2 * recipe.micro_batch * 4


@pytest.mark.parametrize(("schedule", "world", "pp"), [("1f1b", 8, 4), ("dualpipev", 8, 2), ("dualpipev", 1, 1)])
def test_tiny_lowers_a_pipeline_to_the_layers_of_a_tiny_model(monkeypatch, schedule, world, pp):
    recipe = planned(monkeypatch, world, "--tiny", pp=8, pipeline_schedule=schedule)
    assert recipe.pp == pp and recipe.pipeline_schedule == (schedule if pp > 1 else "1f1b")


def test_typing_pp_1_leaves_the_schedule_of_the_recipe_unused(monkeypatch):
    assert planned(monkeypatch, 2, "--pp", "1", pp=2, pipeline_schedule="dualpipev").pipeline_schedule == "1f1b"


def test_everything_wrong_with_a_pipeline_is_told_at_once(monkeypatch):
    with pytest.raises(Refusal) as refused:
        planned(monkeypatch, 24, "--pp", "24", "--pipeline_schedule", "dualpipev", "--global_batch", "8", "--micro_batch", "2")
    assert str(refused.value) == (
        "pp = 24: makes 48 stages, two on each rank under dualpipev, more than the model's 32 layers; use --pp 12 or --pp 24 --pipeline_schedule 1f1b\n"
        "global_batch (train_batch_size) = 8: 1 data-parallel rank * micro_batch 2 leaves 4 micro-batches of a step, and dualpipev needs 2 * pp = 48;"
        " use global_batch 96, or --pipeline_schedule 1f1b"
    )


@pytest.mark.parametrize(
    ("world", "flags", "text"),
    [
        (2, "--pipeline_schedule dualpipev", "pipeline_schedule = dualpipev: orders the micro-batches of a pipeline, and pp = 1 is none; use --pp 2 or more"),
        (64, "--pp 64", "pp = 64: makes 64 stages, more than the model's 32 layers; use --pp 32"),
        (6, "--pp 6 --tiny", "pp = 6: makes 6 stages, more than the model's 4 layers; use --pp 3"),
        (4, "--pp 4 --tiny --pipeline_schedule dualpipev", "pp = 4: makes 8 stages, two on each rank under dualpipev, more than the model's 4 layers; use --pp 2 or"),
        (4, "--pp 2 --pipeline_schedule dualpipev --global_batch 16 --micro_batch 4", "leaves 2 micro-batches of a step, and dualpipev needs 2 * pp = 4; use "
         "global_batch 32, or micro_batch 2, or --pipeline_schedule 1f1b"),
        (4, "--pp 2 --sp 2", "sp = 2: sequence parallelism does not work with pipeline parallelism: DeepSpeed's stages have no group for it; use --sp 1, or --pp 1"),
        (4, "--pp 2 --ep 2", "ep = 2: expert parallelism does not work with pipeline parallelism (AutoEP refuses it); use --ep 1, or --pp 1"),
    ],
)  # fmt: skip
def test_a_pipeline_that_cannot_be_is_refused(monkeypatch, world, flags, text):
    with pytest.raises(Refusal) as refused:
        planned(monkeypatch, world, *flags.split())
    assert text in str(refused.value)


def test_a_plan_of_its_own_may_divide_another_list(monkeypatch):
    """Then config.json does not tell the number of layers, and the model itself does when it is built."""
    assert planned(monkeypatch, 64, "--pp", "64", pp_plan={"model.layers": "split"}).pp == 64
