"""Checks of a recipe's numbers, without a command line."""

import dataclasses

import pytest
from command_lines import PLAIN, RECIPE
from recipekit.spec.recipe import Recipe, check_recipe

pytestmark = pytest.mark.usefixtures("no_launcher")


def test_every_impossible_number_is_named_at_once():
    recipe = Recipe(
        seq_len=0, steps=5, warmup_steps=5, stop_at=6, lr=0.0, min_lr=-1.0, beta1=1.0, merge=True
    )
    named = {problem.where.split(" = ")[0] for problem in check_recipe(recipe)}
    assert named == {
        "model",
        "seq_len",
        "warmup_steps",
        "stop_at",
        "lr",
        "min_lr",
        "beta1",
        "merge",
    }
    several = dataclasses.replace(RECIPE, lr=float("nan"), task="SFT", eps=0.0, beta1=2.0)
    assert [problem.where for problem in check_recipe(several)] == [
        "task = 'SFT'",
        "lr = nan",
        "eps = 0.0",
        "beta1 = 2.0",
    ]
    assert check_recipe(RECIPE) == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"schedule": "wsd"},
            (
                "decay_steps = 0: must be at least 1 with a wsd schedule, which ends with a decay."
                " Use --decay_steps 100"
            ),
        ),
        (
            {"schedule": "wsd", "decay_steps": 990, "warmup_steps": 20},
            (
                "decay_steps = 990: with warmup_steps = 20 it takes 1010 of the 1000 steps. Use"
                " --decay_steps 980 or less, or a larger --steps"
            ),
        ),
        (
            {"schedule": "wsd", "decay_steps": 1001},
            (
                "decay_steps = 1001: takes 1001 of the 1000 steps. Use --decay_steps 1000 or less,"
                " or a larger --steps"
            ),
        ),
        (
            {"decay_steps": 5},
            (
                "decay_steps = 5: applies only to schedule = wsd, not to cosine, which falls from"
                " its warm-up on. Use --decay_steps 0"
            ),
        ),
        (
            {"decay_steps": 5, "schedule": "constant"},
            (
                "decay_steps = 5: applies only to schedule = wsd, not to constant, which never"
                " falls. Use --decay_steps 0"
            ),
        ),
    ],
)
def test_a_decay_fits_its_schedule(fields, said):
    (problem,) = check_recipe(Recipe(model="x", **fields))
    assert str(problem).startswith(said)
    assert (
        check_recipe(
            Recipe(model="x", schedule="wsd", decay_steps=980, warmup_steps=20, min_lr=1e-5)
        )
        == []
    )


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("501-512", ["is not a valid table of steps and rows. Write"]),
        ("501:512, 700", ["is not a valid table of steps and rows. Write"]),
        (
            "1:64, 501:512",
            [
                "step 1 starts the run, and its rows are set by global_batch. Omit this entry, and"
                " set --global_batch"
            ],
        ),
        (
            "501:512, 501:600, 400:700",
            ["its steps must ascend, but it has 501 after 501, 400 after 501. Write"],
        ),
        ("501:0, 600:8, 601:0", ["from step 501, 601 on, the batch must have at least 1 row"]),
        (
            "501:512, 1001:600, 2000:700",
            [
                'step 1001, 2000 is after the last step, 1000. Use --batch_ramp "501:512", or a'
                " larger --steps"
            ],
        ),
        (
            "0:0, 2000:4",
            [
                "step 0 starts the run",
                "from step 0 on, the batch must have at least 1 row",
                "step 2000 is after the last step",
            ],
        ),
    ],
)
def test_a_ramp_that_is_none_is_refused(table, said):
    problems = check_recipe(Recipe(model="x", batch_ramp=table))
    assert len(problems) == len(said) and all(
        problem.where == f"batch_ramp = {table}" for problem in problems
    )
    assert all(part in str(problem) for part, problem in zip(said, problems, strict=True)), problems
    # Later steps have a batch.
    assert "is after the last step" in said[-1] or Recipe(
        model="x", batch_ramp=table
    ).ramp.table == ((1, 8),)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("41", ["is not a valid table of steps and batches. Write"]),
        ("41:25, 40:3", ["its steps must not descend, but it has 40 after 41. Write"]),
        ("0:25", ["the first step of a run is step 1. Use step 1 or later"]),
        ("41:0", ["before step 41, at least 1 batch must be left out"]),
        (
            "41:25, 1001:3",
            ['step 1001 is after the last step, 1000. Use --leave_out "41:25", or a larger'],
        ),
    ],
)
def test_a_table_of_batches_left_out_is_checked(table, said):
    problems = check_recipe(Recipe(model="x", leave_out=table))
    assert [problem.where for problem in problems] == [f"leave_out = {table}"] * len(said)
    assert all(part in str(problem) for part, problem in zip(said, problems, strict=True)), problems


def test_the_batches_left_out():
    recipe = Recipe(model="x", global_batch=4, batch_ramp="3:8", leave_out="2:2,2:1 , 5:1", steps=6)
    assert check_recipe(recipe) == []
    left_out = recipe.left_out
    assert [left_out.before(step) for step in (1, 2, 5)] == [[], [2, 1], [1]]
    assert left_out.entries(4) == [[2, 2], [2, 1]]
    # 4 + 4 rows and, before step 2, 4 + 8 and 4 more
    assert left_out.dealt_rows(recipe.ramp, 1) == 4
    assert left_out.dealt_rows(recipe.ramp, 2) == 4 + 4 + 4 + 8 + 4
    assert left_out.with_entries([[2, 7], [9, 9]]).table == ((2, 2), (2, 1), (2, 7), (5, 1), (9, 9))
    shorter, lines = dataclasses.replace(recipe, steps=4).fit_to_steps(frozenset({"steps"}))
    assert shorter.leave_out == "2:2, 2:1"
    assert lines[-1] == "leave_out: 2:2,2:1 , 5:1 of the recipe cut off after 4 steps"


def test_the_rows_of_a_ramp():
    recipe = Recipe(model="x", global_batch=4, batch_ramp="3:8,5:16", steps=6)
    assert check_recipe(recipe) == [] and [recipe.ramp.rows(step) for step in range(1, 8)] == [
        4,
        4,
        8,
        8,
        16,
        16,
        16,
    ]
    assert [recipe.ramp.total(steps) for steps in range(8)] == [
        0,
        4,
        8,
        16,
        24,
        40,
        56,
        72,
    ] and recipe.ramp.max_rows == 16
    assert [recipe.ramp.changes(step) for step in (2, 3, 5)] == [[], [[3, 8]], [[3, 8], [5, 16]]]


@pytest.mark.parametrize(
    "name", [name for name, item in PLAIN.items() if isinstance(item.default, float)]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_is_finite(name, value):
    (problem,) = check_recipe(dataclasses.replace(RECIPE, **{name: value}))
    assert problem.where == f"{name} = {value}"


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        (
            {"attention": "flash_attention_2", "micro_batch": 2},
            "micro_batch = 2 with attention = flash_attention_2",
        ),
        ({"pp": 2, "adapt": lambda model: model}, "pp = 2"),
        ({"recompute_every": -1}, "recompute_every = -1"),
        ({"activation_budget": 1.5}, "activation_budget = 1.5"),
        ({"activation_budget": -0.1}, "activation_budget = -0.1"),
        (
            {"activation_budget": 0.5, "activation_checkpointing": True},
            "activation_budget = 0.5 with recompute_every = 1",
        ),
        (
            {"activation_budget": 0.0, "recompute_every": 2},
            "activation_budget = 0.0 with recompute_every = 2",
        ),
        (
            {"activation_budget": 0.9, "compile": "off"},
            "activation_budget = 0.9 with compile = off",
        ),
        ({"keep_best": True}, "keep_best = True with eval_every = 0"),
        ({"keep_every": -1}, "keep_every = -1"),
    ],
)
def test_what_would_go_wrong_without_a_word_is_named(fields, where):
    (problem,) = check_recipe(Recipe(model="x", **fields))
    assert problem.where == where
    assert check_recipe(Recipe(model="x", attention="flash_attention_2", sp=2, micro_batch=2)) == []
    assert check_recipe(Recipe(model="x", activation_budget=0, compile="on")) == []
    assert check_recipe(Recipe(model="x", activation_checkpointing=True, compile="off")) == []
