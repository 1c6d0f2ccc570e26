"""The command line made from the fields of a recipe."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import ROOT, environment, free_port
from recipekit.plan import make_plan
from recipekit.spec.command import parse, recipe_of
from recipekit.spec.recipe import Recipe, check_recipe, seconds_of
from recipekit.spec.refusal import Refusal

RECIPE = Recipe(model="meta-llama/Llama-3.2-1B", tp=4, warmup_steps=10)
FILE = Path("/somewhere/mine.py")
PLAIN = {item.name: item for item in dataclasses.fields(Recipe) if "help" in item.metadata}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def refused(argv: list[str]) -> Refusal:
    return refused_of(RECIPE, argv)


def refused_of(recipe: Recipe, argv: list[str]) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        parse(recipe, FILE, argv)
    return refusal.value


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
    value = (
        not default
        if isinstance(default, bool)
        else (
            choices[-1] if choices else default + 1 if isinstance(default, int | float) else "typed"
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
        (["--eep", "2"], "Did you mean --ep?"),  # as near to --keep, which begins otherwise
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
        # which argparse takes for a flag
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
    """Not one for each number that it is compared with."""
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


def test_a_trial_has_a_folder_of_its_own():
    """So that it never stands in the way of the run; a folder that is named is taken."""
    outs = [
        make_plan(parse(RECIPE, FILE, ["--dry_run", "--world", "4", *words])).out
        for words in ([], ["--tiny"], ["--tiny", "--out", "a"])
    ]
    assert outs == [Path("runs/mine"), Path("runs/mine_tiny"), Path("a")]


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


NUMBERS = {
    "tp": (1, 2, 4),
    "micro_batch": (1, 2, 4),
    "global_batch": (16, 32),
    "seq_len": (32, 512),
    "eval_rows": (4, 100),
    "warmup_steps": (0, 2),
    "steps": (3, 50),
}


@settings(deadline=None)  # of hypothesis, which a busy machine misses
@given(
    st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(values) for name, values in NUMBERS.items()}
    ),
    st.sampled_from((4, 8)),
)
def test_tiny_never_changes_a_typed_value(typed, world):
    argv = [word for name, value in typed.items() for word in (f"--{name}", str(value))]
    try:
        recipe = make_plan(
            parse(RECIPE, FILE, ["--tiny", "--dry_run", "--world", str(world), *argv])
        ).recipe
    except Refusal as refusal:  # it fits or is refused
        assert any(
            f"{name} = {value}" in str(refusal) or f"{name} {value}" in str(refusal)
            for name, value in typed.items()
        ), str(refusal)
        return
    assert {name: getattr(recipe, name) for name in typed} == typed


def test_tiny_never_changes_a_number_of_the_json():
    config = {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 3,
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 1},
    }
    plan = make_plan(
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
    plan = make_plan(parse(RECIPE, FILE, ["--tiny", "--dry_run", "--world", str(world)]))
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
    with pytest.raises(Refusal) as refusal:
        make_plan(
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
    assert make_plan(
        parse(RECIPE, FILE, ["--dry_run", "--world", "4", *good])
    ).recipe.tokenizer == str(tmp_path / "tables")


def test_a_model_that_is_not_there_is_told_once():
    with pytest.raises(Refusal) as refusal:
        make_plan(parse(RECIPE, FILE, ["--dry_run", "--tiny", "--model", "./gone"]))
    (problem,) = refusal.value.problems
    assert problem.where == "model = ./gone" and problem.rule == "is not a folder on this machine"


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
    ("steps", "warmup", "decay"), [(20, 10, 2), (10, 1, 1), (1, 0, 1), (2, 0, 1), (600, 10, 500)]
)
def test_a_short_trial_shortens_the_decay_that_nobody_typed(steps, warmup, decay):
    recipe = dataclasses.replace(RECIPE, schedule="wsd", decay_steps=500)
    plan = make_plan(
        parse(recipe, FILE, ["--tiny", "--dry_run", "--world", "4", "--steps", str(steps)])
    )
    assert (plan.recipe.warmup_steps, plan.recipe.decay_steps) == (warmup, decay)
    said = f"decay_steps: 500 of the recipe lowered to {decay} for {steps} steps"
    assert [note for note in plan.notes if "decay" in note] == ([said] if decay < 500 else [])
    with pytest.raises(Refusal, match="decay_steps = 700"):
        make_plan(
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
    """It fits the steps, but the learning rate is never long at its peak."""
    recipe = dataclasses.replace(RECIPE, steps=2000, warmup_steps=30)
    plan = make_plan(parse(recipe, FILE, ["--tiny", "--dry_run", "--world", "4", *words.split()]))
    steps = plan.recipe.steps
    said = (
        f"warmup_steps: 30 of the recipe are {share} of {steps} steps. Shorten with --warmup_steps"
        f" {steps // 10}"
    )
    assert [note for note in plan.notes if "warmup" in note] == (
        [said] if share else []
    ) and plan.recipe.warmup_steps == 30


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
    # what comes after has a batch
    assert "is after the last step" in said[-1] or Recipe(
        model="x", batch_ramp=table
    ).ramp.table == ((1, 8),)


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
    ] and recipe.ramp.most == 16
    assert [recipe.ramp.changes(step) for step in (2, 3, 5)] == [[], [[3, 8]], [[3, 8], [5, 16]]]


RAMPED = dataclasses.replace(
    RECIPE, tp=1, global_batch=16, micro_batch=2, batch_ramp="11:24, 21:40, 31:64", steps=100
)


def dry(recipe: Recipe, *argv: str, world: int = 4):
    return make_plan(parse(recipe, FILE, ["--dry_run", "--world", str(world), *argv]))


def test_every_row_of_a_ramp_that_does_not_divide_is_named(capsys):
    assert dry(RAMPED).recipe.ramp.table == ((1, 16), (11, 24), (21, 40), (31, 64))
    with pytest.raises(Refusal) as refusal:
        dry(RAMPED, "--micro_batch", "4")
    (problem,) = refusal.value.problems
    assert str(problem).startswith(
        "batch_ramp = 11:24, 21:40, 31:64: 24 rows from step 11 on and 40 rows from step 21 on do"
        ' not divide by 4 data-parallel ranks * micro_batch 4 = 16. Use --batch_ramp "11:32, 21:48,'
        ' 31:64"'
    )
    # micro_batch 2 and dp 2: steps of 4, 6, 10 and 16 micro-batches, where eight are needed
    with pytest.raises(Refusal) as refusal:
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
    with pytest.raises(Refusal) as refusal:
        dry(dataclasses.replace(RAMPED, ds_config={"gradient_accumulation_steps": 2}))
    assert (
        "batch_ramp = 11:24, 21:40, 31:64: its steps cannot all use the JSON's"
        " gradient_accumulation_steps = 2" in str(refusal.value)
    )


def test_a_trial_has_a_ramp_of_its_size():
    tiny = dry(RAMPED, "--tiny").recipe
    # 16, scaled by 1.5, 2.5 and 4
    assert (tiny.global_batch, tiny.batch_ramp) == (16, "11:32, 21:48, 31:64")
    small = dry(RAMPED, "--tiny", "--steps", "20", world=1)
    assert (small.recipe.global_batch, small.recipe.batch_ramp) == (4, "11:8")
    assert "batch_ramp: 11:24, 21:40, 31:64 of the recipe cut off after 20 steps" in small.notes
    typed = dry(RAMPED, "--tiny", "--batch_ramp", "5:32")
    assert typed.recipe.batch_ramp == "5:32"
    with pytest.raises(Refusal, match="step 31 is after the last step, 20"):
        dry(RAMPED, "--steps", "20", "--batch_ramp", "31:64")


@pytest.mark.parametrize(
    "name", [name for name, item in PLAIN.items() if isinstance(item.default, float)]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_is_finite(name, value):
    (problem,) = check_recipe(dataclasses.replace(RECIPE, **{name: value}))
    assert problem.where == f"{name} = {value}"


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
    ("fields", "where"),
    [
        (
            {"attention": "flash_attention_2", "micro_batch": 2},
            "micro_batch = 2 with attention = flash_attention_2",
        ),
        ({"pp": 2, "adapt": lambda model: model}, "pp = 2"),
        ({"recompute_every": -1}, "recompute_every = -1"),
        ({"keep_best": True}, "keep_best = True with eval_every = 0"),
        ({"keep_every": -1}, "keep_every = -1"),
    ],
)
def test_what_would_go_wrong_without_a_word_is_named(fields, where):
    (problem,) = check_recipe(Recipe(model="x", **fields))
    assert problem.where == where
    assert check_recipe(Recipe(model="x", attention="flash_attention_2", sp=2, micro_batch=2)) == []


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
    assert recipe.most_checkpoints == most and check_recipe(recipe) == []


def test_a_typo_brings_no_problem_that_is_none():
    """A short trial lowers the warm-up by itself."""
    assert [problem.where for problem in refused(["--steps", "5", "--worldd", "2"]).problems] == [
        "--worldd 2"
    ]


def test_a_recipe_changed_within_a_second_is_read_as_it_is_now(tmp_path, monkeypatch):
    """Of the same size and time as before, as a script leaves it that goes through values; nothing
    is left beside it.
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


ONE = ["--num_processes", "1", "--num_machines", "1", "--use_deepspeed"]
STAGE = (
    "accelerate launch --zero_stage 3: applies to scripts that use an Accelerator, but a recipe"
    " starts DeepSpeed itself. Leave it out. The JSON"
)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param(["--num_processes", "1"], [], marks=pytest.mark.slow),
        (
            [
                *ONE,
                "--mixed_precision",
                "bf16",
                "--gradient_accumulation_steps",
                "1",
                "--offload_param_device",
                "none",
                "--dynamo_backend",
                "no",
            ],
            [],
        ),
        (
            [*ONE, "--zero_stage", "3", "--gradient_accumulation_steps", "4"],
            ["--gradient_accumulation_steps 4: ", STAGE],
        ),
        pytest.param(
            ["--num_processes", "1", "--mixed_precision", "fp16", "--dynamo_backend", "inductor"],
            ["--mixed_precision fp16: ", "--dynamo_backend INDUCTOR: "],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--num_processes", "1", "--use_fsdp"],
            ["accelerate launch --use_fsdp: "],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value[-1] if value else "nothing",
)
def test_flags_of_accelerate_that_no_recipe_reads_are_refused(
    tmp_path: Path, flags: list[str], said: list[str]
) -> None:
    """They were ignored without a word: accelerate writes them into the environment for an
    Accelerator.
    """
    (tmp_path / "mine.py").write_text(
        "from recipekit.spec.accelerate import check_accelerate\nimport os\nfor problem in"
        " check_accelerate(os.environ):\n    print(problem)\n"
    )
    command = [
        str(Path(sys.executable).parent / "accelerate"),
        "launch",
        "--main_process_port",
        str(free_port()),
        *flags,
        "mine.py",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment() | {"HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = done.stdout.splitlines()
    assert (
        done.returncode == 0
        and len(told) == len(said)
        and all(part in line for part, line in zip(said, told, strict=True))
    ), (told, done.stderr[-3000:])


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param(["--num_processes", "2"], 0, id="several"),
        pytest.param(
            ["--cpu", "--num_processes", "2"], 0, id="several on the CPU", marks=pytest.mark.slow
        ),
        pytest.param(["--num_processes", "1"], 1, id="one", marks=pytest.mark.slow),
        pytest.param(
            ["--multi_gpu", "--num_processes", "2"],
            2,
            id="as the refusal says",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_accelerate_starts_as_many_ranks_as_it_was_asked_for(
    tmp_path: Path, flags: list[str], ranks: int
) -> None:
    """Without several GPUs it silently started one of several."""
    (tmp_path / "mine.py").write_text(
        "from recipekit.spec.accelerate import check_launcher\nimport os, sys\nfor problem in"
        " check_launcher(os.environ):\n   "
        " sys.exit(str(problem))\nopen(f\"rank{os.environ.get('RANK', '0')}\", 'w').close()\n"
    )
    place = (
        environment()
        | {"HF_HOME": str(tmp_path)}
        | ({"MASTER_PORT": str(free_port())} if ranks == 1 else {})
    )
    command = [
        str(Path(sys.executable).parent / "accelerate"),
        "launch",
        "--main_process_port",
        str(free_port()),
        *flags,
        "mine.py",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=place, capture_output=True, text=True, timeout=300, check=False
    )
    assert len(list(tmp_path.glob("rank*"))) == ranks, done.stderr[-3000:]
    told = (
        "accelerate launch: has started 1 of several processes, as it does where it sees fewer than"
        " two GPUs. Write accelerate launch --multi_gpu"
    )
    assert (done.returncode == 0) == (ranks > 0) and (told in done.stderr) == (ranks == 0), (
        done.stderr[-3000:]
    )
