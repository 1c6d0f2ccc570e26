"""A command's plan: the sizes of --tiny, files that must exist, and batch ramps."""

import dataclasses
from pathlib import Path

import pytest
from command_lines import FILE, RECIPE, refused_of
from hypothesis import given, settings
from hypothesis import strategies as st
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe

pytestmark = pytest.mark.usefixtures("no_launcher")


def test_a_trial_has_a_folder_of_its_own():
    """A trial never blocks the run, because its default folder is different.

    An explicitly given folder is used.
    """
    outs = [
        resolve_run(parse(RECIPE, FILE, ["--dry_run", "--world", "4", *words])).out
        for words in ([], ["--tiny"], ["--tiny", "--out", "a"])
    ]
    assert outs == [Path("runs/mine"), Path("runs/mine_tiny"), Path("a")]


NUMBERS = {
    "tp": (1, 2, 4),
    "micro_batch": (1, 2, 4),
    "global_batch": (16, 32),
    "seq_len": (32, 512),
    "eval_rows": (4, 100),
    "warmup_steps": (0, 2),
    "steps": (3, 50),
}


@settings(deadline=None)  # hypothesis' deadline fails on a busy machine
@given(
    st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(values) for name, values in NUMBERS.items()}
    ),
    st.sampled_from((4, 8)),
)
def test_tiny_never_changes_a_typed_value(typed, world):
    argv = [word for name, value in typed.items() for word in (f"--{name}", str(value))]
    try:
        recipe = resolve_run(
            parse(RECIPE, FILE, ["--tiny", "--dry_run", "--world", str(world), *argv])
        ).recipe
    except ConfigError as error:  # the value fits or is rejected
        assert any(
            f"{name} = {value}" in str(error) or f"{name} {value}" in str(error)
            for name, value in typed.items()
        ), str(error)
        return
    assert {name: getattr(recipe, name) for name in typed} == typed


def test_tiny_never_changes_a_number_of_the_json():
    config = {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 3,
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 1},
    }
    plan = resolve_run(
        parse(
            dataclasses.replace(RECIPE, ds_config=config),
            FILE,
            ["--tiny", "--dry_run", "--world", "8"],
        )
    )
    assert (plan.recipe.global_batch, plan.recipe.micro_batch, plan.recipe.tp) == (24, 3, 2)
    assert (
        plan.ds_config["train_batch_size"],
        plan.ds_config["train_micro_batch_size_per_gpu"],
        plan.ds_config["gradient_accumulation_steps"],
    ) == (24, 3, 2)


@pytest.mark.parametrize(
    ("world", "degrees", "batch"),
    [
        (1, dict(tp=1), (2, 4)),
        (2, dict(tp=2), (2, 4)),
        (4, dict(tp=4), (2, 4)),
        (8, dict(tp=4), (2, 8)),
    ],
)
def test_tiny_fits_any_number_of_ranks(world, degrees, batch):
    plan = resolve_run(parse(RECIPE, FILE, ["--tiny", "--dry_run", "--world", str(world)]))
    assert plan.mesh.tp == degrees["tp"] and plan.mesh.world == world
    assert (plan.recipe.micro_batch, plan.recipe.global_batch) == batch
    assert (plan.recipe.dataset, plan.recipe.tokenizer, plan.recipe.init, plan.recipe.seq_len) == (
        "builtin",
        "bytes",
        "random",
        128,
    )
    lowered = [note for note in plan.notes if "lowered" in note]
    assert lowered == (
        []
        if world >= 4
        else [f"--tiny lowered tp 4 -> {world} to fit {world} rank{'s' if world > 1 else ''}"]
    )


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        (
            "--dataset",
            "{tmp}/missing.jsonl",
            ["--dataset {tmp}/missing.jsonl: the file does not exist"],
        ),
        ("--dataset", "{tmp}/tables", ["--dataset {tmp}/tables: "]),
        (
            "--dataset",
            "{tmp}/tables/a.xml",
            ["a.xml: .xml files are not supported. Convert the file to one of .txt, "],
        ),
        (
            "--dataset",
            "a={tmp}/good@70; b={tmp}/gone@20; c={tmp}/lost.txt@10",
            ["--dataset {tmp}/gone: ", "--dataset {tmp}/lost.txt: "],
        ),
        ("--dataset", "{tmp}/good/a.txt,{tmp}/good/b.jsonl", ["contains files of several formats"]),
        ("--dataset", "a=x; b=y", ["is not a valid part of a mixture"]),
        (
            "--token_cache",
            "{tmp}/good/a.txt/deep",
            [
                "--token_cache {tmp}/good/a.txt/deep: cannot be created: {tmp}/good/a.txt is not a"
                " folder"
            ],
        ),
        (
            "--out",
            "{tmp}/good/a.txt",
            [
                "out = {tmp}/good/a.txt: cannot be written: Not a directory. Set --out to a folder"
                " that you can write to"
            ],
        ),
        (
            "--out",
            "{tmp}/good/a.txt/run",
            [
                "out = {tmp}/good/a.txt/run: cannot be written: Not a directory: {tmp}/good/a.txt."
                " Set --out to a folder that you can write to"
            ],
        ),
        ("--tokenizer", "{tmp}/tok", ["--tokenizer {tmp}/tok: the folder does not exist"]),
        (
            "--tokenizer",
            "{tmp}/tables",
            ["--tokenizer {tmp}/tables: the folder contains no tokenizer"],
        ),
    ],
)
def test_data_and_tokenizer_that_are_not_there_are_refused_when_the_run_is_planned(
    tmp_path, flag, value, said
):
    for name in ("good/a.txt", "good/b.jsonl", "tables/a.xml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text\n")
    with pytest.raises(ConfigError) as refusal:
        resolve_run(
            parse(RECIPE, FILE, ["--dry_run", "--world", "4", flag, value.format(tmp=tmp_path)])
        )
    assert all(part.format(tmp=tmp_path) in str(refusal.value) for part in said), refusal.value
    (tmp_path / "tables" / "tokenizer.json").write_text('{"model": {}}')
    good = [
        "--dataset",
        f"a={tmp_path}/good/*.txt@70; b=builtin@20; c=some/hub_id@10",
        "--tokenizer",
        str(tmp_path / "tables"),
    ]
    assert resolve_run(
        parse(RECIPE, FILE, ["--dry_run", "--world", "4", *good])
    ).recipe.tokenizer == str(tmp_path / "tables")


def test_a_model_that_is_not_there_is_told_once():
    with pytest.raises(ConfigError) as refusal:
        resolve_run(parse(RECIPE, FILE, ["--dry_run", "--tiny", "--model", "./gone"]))
    (problem,) = refusal.value.problems
    assert problem.where == "model = ./gone" and problem.rule == "is not a folder on this machine"


@pytest.mark.parametrize(
    ("steps", "warmup", "decay"), [(20, 10, 2), (10, 1, 1), (1, 0, 1), (2, 0, 1), (600, 10, 500)]
)
def test_a_short_trial_shortens_the_decay_that_nobody_typed(steps, warmup, decay):
    recipe = dataclasses.replace(RECIPE, schedule="wsd", decay_steps=500)
    plan = resolve_run(
        parse(recipe, FILE, ["--tiny", "--dry_run", "--world", "4", "--steps", str(steps)])
    )
    assert (plan.recipe.warmup_steps, plan.recipe.decay_steps) == (warmup, decay)
    said = f"decay_steps: 500 of the recipe lowered to {decay} for {steps} steps"
    assert [note for note in plan.notes if "decay" in note] == ([said] if decay < 500 else [])
    with pytest.raises(ConfigError, match="decay_steps = 700"):
        resolve_run(
            parse(
                recipe,
                FILE,
                [
                    "--tiny",
                    "--dry_run",
                    "--world",
                    "4",
                    "--steps",
                    str(steps),
                    "--decay_steps",
                    "700",
                ],
            )
        )
    assert [
        problem.where
        for problem in refused_of(recipe, ["--steps", str(steps), "--worldd", "2"]).problems
    ] == ["--worldd 2"]


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ("--steps 43", "70%"),
        ("--steps 119", "25%"),
        ("--steps 120", ""),
        ("--steps 43 --warmup_steps 30", ""),
        ("", ""),
    ],
)
def test_a_warm_up_over_a_quarter_of_a_short_run_is_named(words, share):
    """The warm-up fits within the steps, but the learning rate is at its peak only briefly."""
    recipe = dataclasses.replace(RECIPE, steps=2000, warmup_steps=30)
    plan = resolve_run(parse(recipe, FILE, ["--tiny", "--dry_run", "--world", "4", *words.split()]))
    steps = plan.recipe.steps
    said = (
        f"warmup_steps: 30 of the recipe are {share} of {steps} steps. Shorten with --warmup_steps"
        f" {steps // 10}"
    )
    assert [note for note in plan.notes if "warmup" in note] == (
        [said] if share else []
    ) and plan.recipe.warmup_steps == 30


RAMPED = dataclasses.replace(
    RECIPE, tp=1, global_batch=16, micro_batch=2, batch_ramp="11:24, 21:40, 31:64", steps=100
)


def dry(recipe: Recipe, *argv: str, world: int = 4):
    return resolve_run(parse(recipe, FILE, ["--dry_run", "--world", str(world), *argv]))


def test_every_row_of_a_ramp_that_does_not_divide_is_named(capsys):
    assert dry(RAMPED).recipe.ramp.table == ((1, 16), (11, 24), (21, 40), (31, 64))
    with pytest.raises(ConfigError) as refusal:
        dry(RAMPED, "--micro_batch", "4")
    (problem,) = refusal.value.problems
    assert str(problem).startswith(
        "batch_ramp = 11:24, 21:40, 31:64: 24 rows from step 11 on and 40 rows from step 21 on do"
        ' not divide by 4 data-parallel ranks * micro_batch 4 = 16. Use --batch_ramp "11:32, 21:48,'
        ' 31:64"'
    )
    # micro_batch 2 and dp 2: steps of 4, 6, 10 and 16 micro-batches, but eight are required.
    with pytest.raises(ConfigError) as refusal:
        dry(
            dataclasses.replace(RAMPED, global_batch=32),
            "--pp",
            "4",
            "--pipeline_schedule",
            "dualpipev",
            "--deepspeed_config",
            "zero1.json",
            world=8,
        )
    (problem,) = refusal.value.problems
    assert (
        "24 rows from step 11 on give fewer than the 2 * pp = 8 micro-batches that dualpipev"
        " requires" in problem.rule
    )
    assert problem.fix.startswith('use --batch_ramp "11:32, 21:40, 31:64"')
    with pytest.raises(ConfigError) as refusal:
        dry(dataclasses.replace(RAMPED, ds_config={"gradient_accumulation_steps": 2}))
    assert (
        "batch_ramp = 11:24, 21:40, 31:64: its steps cannot all use the JSON's"
        " gradient_accumulation_steps = 2" in str(refusal.value)
    )


def test_a_trial_has_a_ramp_of_its_size():
    tiny = dry(RAMPED, "--tiny").recipe
    # 16, scaled by 1.5, 2.5 and 4.
    assert (tiny.global_batch, tiny.batch_ramp) == (16, "11:32, 21:48, 31:64")
    small = dry(RAMPED, "--tiny", "--steps", "20", world=1)
    assert (small.recipe.global_batch, small.recipe.batch_ramp) == (4, "11:8")
    assert "batch_ramp: 11:24, 21:40, 31:64 of the recipe cut off after 20 steps" in small.notes
    typed = dry(RAMPED, "--tiny", "--batch_ramp", "5:32")
    assert typed.recipe.batch_ramp == "5:32"
    with pytest.raises(ConfigError, match="step 31 is after the last step, 20"):
        dry(RAMPED, "--steps", "20", "--batch_ramp", "31:64")
