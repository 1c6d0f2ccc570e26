"""The command line, which is generated from a recipe's fields."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import FILE, PLAIN, RECIPE, refused
from pool import ROOT, environment
from recipekit.spec.command import parse, recipe_of
from recipekit.spec.recipe import Recipe, check_recipe, seconds_of

pytestmark = pytest.mark.usefixtures("no_launcher")


def test_without_flags_the_recipe_is_unchanged():
    command = parse(RECIPE, FILE, [])
    assert command.recipe == RECIPE and command.typed == frozenset()
    assert (command.name, command.folder, command.world, command.rank, command.local_rank) == (
        "mine",
        Path("/somewhere"),
        1,
        0,
        0,
    )
    assert not command.tiny and not command.dry_run


@pytest.mark.parametrize(
    ("word", "expected"),
    [("--deterministic=True", True), ("--deterministic=false", False), ("--deterministic", True)],
)
def test_a_switch_may_have_the_value_that_a_sweep_writes(word: str, expected: bool):
    command = parse(RECIPE, FILE, [word, "--steps", "3"])
    assert command.recipe.deterministic is expected and command.typed == {"deterministic", "steps"}
    assert "ignored explicit argument 'maybe'" in str(refused(["--deterministic=maybe"]))


def test_every_plain_field_is_a_flag_and_no_other():
    assert {item.name for item in dataclasses.fields(Recipe)} - PLAIN.keys() == {
        "ds_config",
        "adapt",
        "pp_plan",
        "tp_plan",
        "tp_local",
        "no_decay",
        "lr_scale",
        "matrices",
    }
    for words in (["--ds_config", "zero3.json"], ["--adapt", "x"]):
        assert f"{' '.join(words)}: is not a flag of this command" in str(refused(words))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("spelling", [str, lambda name: name.replace("_", "-")], ids=["_", "-"])
def test_flag_sets_its_field_alone(name, spelling):
    default = getattr(RECIPE, name)
    choices = PLAIN[name].metadata.get("choices")
    other = -default / 2 if name == "activation_budget" else default  # at most 1
    value = (
        not default
        if isinstance(default, bool)
        else (
            choices[-1] if choices else other + 1 if isinstance(default, int | float) else "typed"
        )
    )
    flag = "--" + spelling(name)
    argv = (
        [flag if value else "--no-" + spelling(name)]
        if isinstance(default, bool)
        else [flag, str(value)]
    )
    command = parse(RECIPE, FILE, argv)
    assert command.recipe == dataclasses.replace(RECIPE, **{name: value}) and type(
        getattr(command.recipe, name)
    ) is type(default)
    assert command.typed == {name}


def test_typing_the_default_counts_as_typed():
    assert parse(RECIPE, FILE, ["--tp", "4", "--lr", "3e-4"]).typed == {"tp", "lr"}


def test_json_has_its_own_flag():
    command = parse(
        RECIPE, FILE, ["--deepspeed_config", "zero3.json", "--tiny", "--dry-run", "--world", "8"]
    )
    assert command.recipe.ds_config == "zero3.json" and command.typed == {"ds_config"}
    assert command.tiny and command.dry_run and command.world == 8


def test_ranks_come_from_the_launcher(monkeypatch):
    for name, value in (("WORLD_SIZE", "8"), ("RANK", "5"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    command = parse(RECIPE, FILE, ["--local_rank=1", "--steps", "20"])
    assert (command.world, command.rank, command.local_rank) == (8, 5, 1)
    assert command.typed == {"steps"}


def test_parsing_has_no_side_effect(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    parse(RECIPE, FILE, ["--out", "run", "--seed", "3"])
    assert (
        dict(os.environ) == before
        and not list(tmp_path.iterdir())
        and capsys.readouterr() == ("", "")
    )


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--micro_bach", "2"], "Did you mean --micro_batch?"),
        (["--global-bacth=2"], "Did you mean --global_batch?"),
        (["--step", "20"], "Did you mean --steps?"),  # no silent abbreviation
        (["--deepspeed", "x.json"], "Use --deepspeed_config"),
        (["--eep", "2"], "Did you mean --ep?"),  # equally close to --keep, which begins differently
        (["--sed", "3"], "Did you mean --seed?"),
        (["--globl_batch", "8"], "Did you mean --global_batch?"),
        (["--pp_", "2"], "Did you mean --pp?"),
        (["--stpe", "20"], "Did you mean --steps?"),
        (["--ave_every", "5"], "Did you mean --save_every?"),
        (["--steps", "twenty"], "--steps"),
        (["--steps", "2.5"], "--steps"),
        (["--schedule", "cosinus"], "cosine"),
        (["--steps"], "--steps"),
        (["extra"], "extra"),
        (["--world", "4"], "requires --dry_run"),
        (["--dry_run", "--world", "0"], "must be at least 1"),
        (["--dp", "2"], "the ranks that --tp, --pp, --sp and --ep leave are data-parallel"),
        (["--learning-rate=1e-4"], "Use --lr"),
        (["--num_gpus", "2"], "write it before the recipe's file"),
        # argparse takes the number for a flag.
        (["--lr", "-1e-4", "--stepz", "1"], "lr = -0.0001: must be a positive number"),
        (["--wandb=no"], "ignored explicit argument 'no'"),
    ],
)
def test_a_wrong_command_line_is_refused_with_the_nearest_flag(argv, named):
    refusal = refused(argv)
    assert refusal.exit_code == 2 and named in str(refusal)


def test_every_mistake_is_told_at_once_each_with_its_own_fix():
    problems = refused(
        [
            "--tiny",
            "--step",
            "5",
            "--micro_bacth=3",
            "--dp",
            "2",
            "odd",
            "--lr",
            "abc",
            "--eps",
            "--seed",
            "-1",
        ]
    ).problems
    assert [problem.where for problem in problems] == [
        "--lr abc",
        "--step 5",
        "--micro_bacth=3",
        "--dp 2 odd",
        "--eps",
        "seed = -1",
    ]
    fixes = [
        "use a number, for example --lr 0.0003",
        "did you mean --steps?",
        "did you mean --micro_batch?",
        "leave it out: the ranks",
        "write --eps",
        "use --seed 0",
    ]
    assert all(problem.fix.startswith(fix) for problem, fix in zip(problems, fixes, strict=True)), [
        str(problem) for problem in problems
    ]
    assert {problem.where for problem in refused(["--lr", "abc", "--steps", "-3"]).problems} == {
        "--lr abc",
        "steps = -3",
    }


@pytest.mark.parametrize("name", ["steps", "lr"])
def test_a_number_below_0_is_one_problem(name):
    """The number is not reported again for each number that it is compared with."""
    (problem,) = check_recipe(parse(RECIPE, FILE, [f"--{name}", "-3"]).recipe)
    assert problem.where.startswith(f"{name} = -3")


@pytest.mark.parametrize("text", ["0", "-5", "inf", "nan", "soon"])
def test_a_grace_that_is_no_time_is_one_problem(text):
    (problem,) = check_recipe(parse(RECIPE, FILE, [f"--grace={text}"]).recipe)
    assert (
        str(problem)
        == f"grace = {text}: must be auto or a positive number of seconds. Use --grace auto, or a"
        " number such as --grace 120"
    )


@pytest.mark.parametrize("grace", ["auto", "90", "0.5", 60, 25.0])
def test_a_grace_is_auto_or_seconds_also_in_a_recipe(grace):
    assert check_recipe(dataclasses.replace(RECIPE, grace=grace)) == []
    assert seconds_of(grace) == (None if grace == "auto" else float(grace))


def test_an_empty_word_is_a_value():
    assert (
        parse(dataclasses.replace(RECIPE, subset="x"), FILE, ["--subset", ""]).recipe.subset == ""
    )
    assert parse(dataclasses.replace(RECIPE, subset="x"), FILE, ["--subset="]).recipe.subset == ""


def test_a_wrong_flag_exits_2_without_traceback(tmp_path):
    argv = [sys.executable, ROOT / "recipes" / "llama_nano_zero2.py", "--step", "3"]
    done = subprocess.run(
        argv, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.splitlines()[0] == "refused: 1 problem"
        and "Did you mean --steps?" in done.stderr
    )
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_a_value_written_in_the_file_is_checked_like_a_flag():
    wrong = Recipe(
        model="x", steps="20", micro_batch=2.0, export=1, seed=True, schedule="cosin", task="SFT"
    )  # type: ignore[arg-type]
    named = {problem.where for problem in check_recipe(wrong)}
    assert named == {
        "steps = '20'",
        "micro_batch = 2.0",
        "export = 1",
        "seed = True",
        "schedule = 'cosin'",
        "task = 'SFT'",
    }


def test_a_whole_number_in_the_file_leaves_the_flag_a_fraction():
    recipe = Recipe(model="x", weight_decay=0, lr=1)
    assert check_recipe(recipe) == []
    assert parse(recipe, FILE, ["--weight_decay", "0.1"]).recipe.weight_decay == 0.1


@pytest.mark.parametrize(
    ("fields", "flags", "every"),
    [
        ({}, "", 0),
        ({}, "--recompute_every 1", 1),
        ({}, "--recompute-every 3", 3),
        ({}, "--activation_checkpointing", 1),
        ({}, "--activation_checkpointing --recompute_every 3", 3),
        ({}, "--no-activation_checkpointing --recompute_every 0", 0),
        ({"recompute_every": 2}, "", 2),
        ({"recompute_every": 2}, "--recompute_every 0", 0),
        ({"recompute_every": 2}, "--activation_checkpointing", 2),
        ({"recompute_every": 2}, "--no-activation_checkpointing", 0),
        ({"activation_checkpointing": True}, "", 1),
        ({"activation_checkpointing": True}, "--recompute_every 2", 2),
        ({"activation_checkpointing": True}, "--recompute_every 0", 0),
        ({"activation_checkpointing": True, "recompute_every": 2}, "", 2),
        ({"activation_checkpointing": True, "recompute_every": 2}, "--recompute_every 0", 0),
        (
            {"activation_checkpointing": True, "recompute_every": 2},
            "--no-activation_checkpointing",
            0,
        ),
    ],
)
def test_recomputation_needs_one_switch_and_a_typed_one_beats_the_file(fields, flags, every):
    command = parse(Recipe(model="x", **fields), FILE, flags.split())
    assert command.recipe.recompute == every and check_recipe(command.recipe) == []
    assert command.typed == {
        name
        for name in ("activation_checkpointing", "recompute_every")
        if name in flags.replace("-every", "_every")
    }


def test_a_budget_beside_recomputation_is_one_line_and_code_2():
    error = refused(["--activation_budget", "0.25", "--recompute_every", "2"])
    assert error.exit_code == 2 and str(error) == (
        "activation_budget = 0.25 with recompute_every = 2: cannot be combined, because a"
        " recomputed layer keeps only its input. Add --recompute_every 0, or leave"
        " --activation_budget out"
    )
    typed = ["--activation_budget", "0.25", "--recompute_every", "0"]
    recipe = parse(Recipe(model="x", activation_checkpointing=True), FILE, typed).recipe
    assert (recipe.activation_budget, recipe.recompute) == (0.25, 0)


@pytest.mark.parametrize(
    ("typed", "rule"),
    [
        (["1.5"], "activation_budget = 1.5: must be at least 0 and at most 1"),
        (["-0.1"], "activation_budget = -0.1: must be at least 0 and at most 1"),
        (["0.5", "--compile", "off"], "activation_budget = 0.5 with compile = off: requires"),
        (["0.5", "--activation_checkpointing"], "activation_budget = 0.5 with recompute_every = 1"),
    ],
)
def test_a_budget_that_cannot_hold_is_one_line_and_code_2(typed, rule):
    error = refused(["--activation_budget", *typed])
    assert error.exit_code == 2 and str(error).startswith(rule) and "\n" not in str(error)


@pytest.mark.parametrize(
    "flags",
    [
        "--no-activation_checkpointing --recompute_every 2",
        "--activation_checkpointing --recompute_every 0",
    ],
)
def test_flags_that_switch_recomputation_on_and_off_are_refused(flags):
    (problem,) = refused(flags.split()).problems
    switch, _, every = flags.partition(" ")
    where = f"{switch} with {every}"
    assert (
        str(problem)
        == f"{where}: contradict each other: one switches recomputation on, the other switches it"
        " off. Leave one of them out"
    )
    assert [problem.where for problem in check_recipe(Recipe(model="x", recompute_every=-2))] == [
        "recompute_every = -2"
    ]


@pytest.mark.parametrize(
    ("flags", "saved", "most"),
    [
        ({"save_every": 2, "keep": 0}, [2, 4, 6, 8, 10, 11], 6),
        ({"save_every": 2}, [2, 4, 6, 8, 10, 11], 3),
        ({"save_every": 2, "keep": 1, "keep_every": 4}, [2, 4, 6, 8, 10, 11], 4),
        ({"save_every": 4, "keep": 0, "keep_every": 6}, [4, 6, 8, 11], 4),
        ({"keep": 1, "keep_every": 5, "keep_best": True, "eval_every": 1}, [5, 10, 11], 3),
        (
            {"save_every": 1, "keep": 3, "keep_best": True, "eval_every": 1, "stop_at": 7},
            [1, 2, 3, 4, 5, 6, 7],
            5,
        ),
        ({}, [11], 1),
    ],
)
def test_the_steps_that_are_saved_and_how_many_are_there_at_a_time(flags, saved, most):
    recipe = Recipe(model="x", steps=11, **flags)
    last = recipe.stop_at or recipe.steps
    assert [step for step in range(1, last + 1) if step == last or recipe.saves_at(step)] == saved
    assert recipe.max_checkpoints == most and check_recipe(recipe) == []


def test_a_typo_brings_no_problem_that_is_none():
    """A short trial lowers the warm-up automatically."""
    assert [problem.where for problem in refused(["--steps", "5", "--worldd", "2"]).problems] == [
        "--worldd 2"
    ]


def test_a_recipe_changed_within_a_second_is_read_as_it_is_now(tmp_path, monkeypatch):
    """The file keeps its size and time, as after a script that loops over values.

    No files remain next to it.
    """
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    for steps in (11, 22):
        path.write_text(
            f"from recipekit import Recipe\nRECIPE = Recipe(model='x', steps={steps})\n"
        )
        os.utime(path, (1e9, 1e9))
        assert recipe_of(path).steps == steps
    assert list(tmp_path.iterdir()) == [path]
