"""Pipeline parallelism: any split into stages trains like plain PyTorch.

A split must be balanced, rejected or described correctly.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import (
    Case,
    accumulating,
    compare,
    compare_bf16,
    each,
    recipe_for,
    reference,
    train_and_compare,
    train_in_layout,
)
from recipekit.data.batching import DataRank
from recipekit.data.held_out import eval_rows
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import request_from_recipe
from recipekit.model.describe import draft_blueprint
from recipekit.model.empty import empty_model
from recipekit.parallel import blueprint, pipeline
from recipekit.parallel.plans import published_plans, resolve_plans
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe
from recipekit.spec.task_specs import TASKS, Plans
from shipped_jsons import strategy
from tiny_models import tiny_config

# Stages 0 and 3 are on rank 0, so a tied embedding and its head are on the same rank.
DUALPIPEV = {"pp": 2, "pipeline_schedule": "dualpipev"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pp": 2}),
    "pp4": (4, {"pp": 4}),
    "tp2": (2, {"tp": 2}),
    "pp2 tp2": (4, {"pp": 2, "tp": 2}),
    "pp2 dp2": (4, {"pp": 2}),
    "pp2 tp2 dp2": (8, {"pp": 2, "tp": 2}),
    "pp2 checkpointing": (2, {"pp": 2, "recompute_every": 2}),
    "pp2 dualpipev": (2, DUALPIPEV),
    "pp2 dp2 dualpipev": (4, DUALPIPEV),
    "pp2 tp2 dualpipev": (4, DUALPIPEV | {"tp": 2}),
    "pp2 dualpipev checkpointing": (2, DUALPIPEV | {"activation_checkpointing": True}),
    "pp2 tp2 checkpointing": (4, {"pp": 2, "tp": 2, "activation_checkpointing": True}),
}
FAMILIES = ("untied", "tied", "qwen3", "gemma2", "phi3", "olmo2", "qwen3_moe", "deepseek_v3")


def stages(family: str, layout: str, zero: str, slow: bool = False) -> Case:
    world, degrees = LAYOUTS[layout]
    return Case(f"{family} {layout} {zero}", world, zero, degrees, model=family, slow=slow)


QUICK = [
    # recipekit computes this norm itself, because the tied weight must count once.
    stages("tied", "pp2", "zero0"),
    *(stages("tied", layout, "zero1") for layout in ("pp2", "pp2 dualpipev")),
]
NAMES = {case.name for case in QUICK}
ALL = [
    stages(family, layout, zero, slow=True)
    for family in FAMILIES
    for layout in LAYOUTS
    for zero in ("zero0", "zero1")
]
# Its layers create several streams for each token.
ALL += [stages("hy_v4", "pp2", zero, slow=True) for zero in ("zero0", "zero1")]
CASES = QUICK + [case for case in ALL if case.name not in NAMES]


@each(CASES)
def test_stages_train_like_plain_pytorch(pools, tmp_path, case):
    train_and_compare(pools, tmp_path / "run", case)


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory) -> str:
    """Write documents of 10 to 50 characters, so that every row packs several."""
    words = [word for word in Path(__file__).read_text().split() if word.isalpha()]
    file = tmp_path_factory.mktemp("packed") / "short.jsonl"
    file.write_text(
        "".join(
            json.dumps({"text": " ".join(words[number % 97 : number % 97 + 2 + number % 5])[:50]})
            + "\n"
            for number in range(3000)
        )
    )
    return str(file)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("pp2 tp2", marks=pytest.mark.slow),
        "pp2 checkpointing",
        pytest.param("pp2 dualpipev", marks=pytest.mark.slow),
    ],
)
def test_stages_keep_packed_documents_apart(pools, tmp_path, layout, short_documents):
    """Later stages need the positions and documents of their micro-batch.

    This applies to training, recomputation and evaluation. Wrong positions would change the losses.
    """
    expected = reference("tied", dataset=short_documents)
    batch = next(
        iter(
            eval_rows(
                request_from_recipe(recipe_for("tied", dataset=short_documents)),
                byte_tokenizer(),
                rank=DataRank(1, 0),
            )
        )
    )
    assert ((batch["position_ids"] == 0).sum(1) > 1).all()
    world, degrees = LAYOUTS[layout]
    pools.run(
        world,
        train_in_layout,
        recipe=recipe_for("tied", dataset=short_documents, **accumulating(world, **degrees)),
        config=strategy("zero1"),
        out=str(tmp_path / "run"),
    )
    compare(tmp_path / "run", expected)


@pytest.mark.slow
def test_the_norm_that_clips_counts_every_parameter_once(pools, tmp_path):
    """Clipping far below the norm changes every step.

    If the norm lacked one stage's gradients, the weights would differ.
    """
    expected = reference("tied", gradient_clipping=0.1)
    assert min(expected.grad_norms) > 0.2
    for zero in ("zero0", "zero1"):
        recipe = recipe_for("tied", **accumulating(4, pp=2, tp=2), gradient_clipping=0.1)
        pools.run(
            4, train_in_layout, recipe=recipe, config=strategy(zero), out=str(tmp_path / zero)
        )
        compare(tmp_path / zero, expected)


@pytest.mark.parametrize(
    ("costs", "before", "after", "stages", "bounds"),
    [
        ([1, 1, 1, 1], 0, 0, 2, (0, 2, 4)),
        ([1, 1, 1, 1], 2, 0, 2, (0, 1, 4)),  # an embedding as large as two layers
        ([1, 1, 1, 1], 0, 9, 2, (0, 3, 4)),  # every stage has a layer
        ([3, 1, 1, 1], 0, 0, 2, (0, 1, 4)),
        ([1] * 5, 0, 0, 5, (0, 1, 2, 3, 4, 5)),
        ([1] * 7, 1, 1, 3, (0, 2, 5, 7)),
    ],
)
def test_the_largest_stage_is_as_small_as_it_can_be(costs, before, after, stages, bounds):
    assert blueprint.balance_stages(costs, before, after, stages) == bounds


def test_the_blueprint_says_what_the_stages_of_the_pipeline_are():
    whole = empty_model(tiny_config("llama_tied"))
    plan = draft_blueprint(whole)
    split = pipeline.split_stages(whole, plan, 3, published_plans(whole).pp)
    layout = blueprint.Layout(Mesh(pp=3), 1, "BF16_Optimizer", "bfloat16", split.bounds)
    held = [
        [tensor.name for tensor in blueprint.tensors_on_rank(plan, layout, stage)]
        for stage in range(3)
    ]
    assert sorted({name for names in held for name in names}) == sorted(
        name for name, _ in whole.named_parameters()
    )
    assert [name for name in held[0] if name in held[2]] == [
        "model.embed_tokens.weight"
    ] and not set(held[0]) & set(held[1])
    for stage in range(3):
        part = empty_model(tiny_config("llama_tied"))
        pipeline.make_stage(part, split, stage, torch.float32, TASKS["pretrain"])
        assert [name for name, _ in part.named_parameters()] == held[stage], (
            "the names are those of Hugging Face"
        )
        assert set(part.state_dict()) == set(blueprint.state_keys(plan, layout, stage))
    assert "stage 2 layers 3 (" in blueprint.describe_stages(plan, split.bounds)


def test_a_model_without_a_plan_is_refused_with_the_lines_that_help():
    model = empty_model(tiny_config("gpt2"))
    with pytest.raises(ConfigError) as refusal:
        pipeline.split_stages(model, draft_blueprint(model), 2, published_plans(model).pp)
    text = str(refusal.value)
    assert "publishes no pipeline plan" in text
    lines = text[text.index("pp_plan={") + len("pp_plan=") : text.rindex("}") + 1]
    plan = eval(lines)  # the plan that the user should write
    assert plan == {
        "transformer.wte": "first",
        "transformer.wpe": "first",
        "transformer.h": "split",
        "transformer.ln_f": "last",
        "lm_head": "last",
    }
    plans = resolve_plans(model, Plans(pp=plan), Plans())
    # The tiny model has more position embeddings than a layer has weights.
    assert pipeline.split_stages(model, draft_blueprint(model, plans), 2, plans.pp).bounds == (
        0,
        1,
        4,
    )


def test_more_stages_than_layers_are_refused():
    model = empty_model(tiny_config("llama"))
    with pytest.raises(ConfigError, match="only 4 layers"):
        pipeline.split_stages(model, draft_blueprint(model), 5, published_plans(model).pp)


def test_a_plan_that_does_not_fit_is_refused():
    model = empty_model(tiny_config("llama"))
    with pytest.raises(ConfigError, match="must name modules of the model"):
        pipeline.split_stages(
            model,
            draft_blueprint(model),
            2,
            resolve_plans(model, Plans(pp={"model.layer": "split"}), Plans()).pp,
        )


@pytest.mark.slow
# Micro-batches: fewer than DualPipeV requires, fewer than in a step, and more than in a step.
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("layout", [{"pp": 2}, DUALPIPEV], ids=["1f1b", "dualpipev"])
def test_any_number_of_held_out_rows_is_evaluated(pools, tmp_path, layout, rows):
    """The run also evaluates in the middle of training.

    The later steps show that an evaluation has no side effects.
    """
    pools.run(
        2,
        train_in_layout,
        recipe=recipe_for("untied", **layout, eval_rows=rows, eval_every=4),
        config=strategy("zero1"),
        out=str(tmp_path / "run"),
    )
    compare(tmp_path / "run", reference("untied", eval_rows=rows))


@pytest.mark.slow
def test_dualpipev_resumes_where_it_stopped(pools, tmp_path):
    for stop_at in (5, 0):
        pools.run(
            2,
            train_in_layout,
            recipe=recipe_for("tied", **DUALPIPEV, stop_at=stop_at),
            config=strategy("zero1"),
            out=str(tmp_path / "run"),
        )
    compare(tmp_path / "run", reference("tied"))


@pytest.mark.parametrize(
    "layout",
    [{"pp": 2}, pytest.param(DUALPIPEV, marks=pytest.mark.slow)],
    ids=["1f1b", "dualpipev"],
)
def test_stages_train_like_plain_pytorch_in_bf16(pools, tmp_path, layout):
    pools.run(
        2,
        train_in_layout,
        recipe=recipe_for("untied", **accumulating(2, **layout)),
        config=strategy("zero1", bf16=True),
        out=str(tmp_path / "run"),
    )
    compare_bf16(tmp_path / "run", str(layout))


def planned(monkeypatch, world: int, *flags: str, **fields) -> Recipe:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    recipe = Recipe(
        model="meta-llama/Llama-3.1-8B",
        init="random",
        tokenizer="bytes",
        ds_config="zero1.json",
        out="/nonexistent",
        **fields,
    )
    return resolve_run(parse(recipe, Path("pipeline.py"), list(flags))).recipe


@pytest.mark.parametrize(
    ("world", "flags"),
    [(2, ("--pp", "2")), (4, ("--pp", "2", "--micro_batch", "3")), (2, ("--pp", "2", "--tp", "1"))],
)
def test_tiny_takes_the_micro_batches_that_dualpipev_needs(monkeypatch, world, flags):
    recipe = planned(monkeypatch, world, "--tiny", "--pipeline_schedule", "dualpipev", *flags)
    assert recipe.pp == 2 and recipe.global_batch == world // 2 * recipe.micro_batch * 4


@pytest.mark.parametrize(
    ("schedule", "world", "pp"), [("1f1b", 8, 4), ("dualpipev", 8, 2), ("dualpipev", 1, 1)]
)
def test_tiny_lowers_a_pipeline_to_the_layers_of_a_tiny_model(monkeypatch, schedule, world, pp):
    recipe = planned(monkeypatch, world, "--tiny", pp=8, pipeline_schedule=schedule)
    assert recipe.pp == pp and recipe.pipeline_schedule == (schedule if pp > 1 else "1f1b")


def test_typing_pp_1_leaves_the_schedule_of_the_recipe_unused(monkeypatch):
    assert (
        planned(monkeypatch, 2, "--pp", "1", pp=2, pipeline_schedule="dualpipev").pipeline_schedule
        == "1f1b"
    )


def test_everything_wrong_with_a_pipeline_is_told_at_once(monkeypatch):
    with pytest.raises(ConfigError) as refused:
        planned(
            monkeypatch,
            24,
            "--pp",
            "24",
            "--pipeline_schedule",
            "dualpipev",
            "--global_batch",
            "8",
            "--micro_batch",
            "2",
        )
    assert (
        str(refused.value)
        == "pp = 24: makes 48 stages (two on each rank under dualpipev), but the model has only 32"
        " layers. Use --pp 12 or --pp 24 --pipeline_schedule 1f1b\nglobal_batch"
        " (train_batch_size) = 8: 1 data-parallel rank * micro_batch 2 leaves 4 micro-batches in"
        " a step, but dualpipev requires 2 * pp = 48. Use global_batch 96, or"
        " --pipeline_schedule 1f1b"
    )


@pytest.mark.parametrize(
    ("world", "flags", "text"),
    [
        (
            2,
            "--pipeline_schedule dualpipev",
            "pipeline_schedule = dualpipev: requires a pipeline, but pp = 1. Use --pp 2 or more",
        ),
        (64, "--pp 64", "pp = 64: makes 64 stages, but the model has only 32 layers. Use --pp 32"),
        (6, "--pp 6 --tiny", "pp = 6: makes 6 stages, but the model has only 4 layers. Use --pp 3"),
        (
            4,
            "--pp 4 --tiny --pipeline_schedule dualpipev",
            "pp = 4: makes 8 stages (two on each rank under dualpipev), but the model has"
            " only 4 layers. Use --pp 2 or",
        ),
        (
            4,
            "--pp 2 --pipeline_schedule dualpipev --global_batch 16 --micro_batch 4",
            "leaves 2 micro-batches in a step, but dualpipev requires 2 * pp = 4. Use "
            "global_batch 32, or micro_batch 2, or --pipeline_schedule 1f1b",
        ),
        (
            4,
            "--pp 2 --sp 2",
            "sp = 2 with pp = 2: sequence parallelism can be combined only with data"
            " parallelism and ZeRO. Use --sp 1, or --pp 1",
        ),
        (
            4,
            "--pp 2 --ep 2",
            "ep = 2 with pp = 2: expert parallelism can be combined only with data"
            " parallelism and ZeRO. Use --ep 1, or --pp 1",
        ),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(monkeypatch, world, flags, text):
    with pytest.raises(ConfigError) as refused:
        planned(monkeypatch, world, *flags.split())
    assert text in str(refused.value)


def test_a_plan_of_its_own_may_divide_another_list(monkeypatch):
    """config.json then lacks the number of layers, which is known once the model is built."""
    assert planned(monkeypatch, 64, "--pp", "64", pp_plan={"model.layers": "split"}).pp == 64
