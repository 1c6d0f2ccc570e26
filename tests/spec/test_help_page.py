"""The `--help` pages: the most commonly used flags and all flags, for the recipe's task only."""

import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pool import ROOT, environment
from recipekit.spec.command import parse, recipe_of
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.task_specs import TASKS, task_fields

FILES = sorted((ROOT / "recipes").glob("*.py"))
MINE = Path("mine.py")
PLAIN = {item.name for item in dataclasses.fields(Recipe) if "help" in item.metadata}
FLAG = re.compile(r"^  --(?:\[no-\])?(\w+)", re.MULTILINE)
SUBJECTS = [
    *("try it", "model", "data", "layout", "batch", "schedule and optimizer"),
    *("evaluation, checkpoints, export", "run", "tracking", "watch"),
]


def page(capsys: pytest.CaptureFixture[str], recipe: Recipe, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse(recipe, MINE, list(words))
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a terminal with 80 columns, on one rank."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_help_of_a_recipe_fits_a_screen_and_shows_flags_of_its_task_alone(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(path)
    first, whole = page(capsys, recipe, "--help"), page(capsys, recipe, "--help", "all")
    some, every = FLAG.findall(first), FLAG.findall(whole)

    assert first.count("\n") < 60 and 15 <= len(some) <= 20 and len({*some}) == len(some)
    assert (
        {"tiny", "dry_run", "model", "dataset", "steps", "lr", "out", *recipe.task_spec.columns}
        <= {*some}
        < {*every}
    )
    assert len({*every}) == len(every)
    others = {name for name, tasks in task_fields().items() if recipe.task not in tasks}
    lacking = (
        others
        | (recipe.task_spec.unsupported.keys() & PLAIN)
        | (set() if recipe.adapt else {"merge"})
    )
    assert PLAIN - {*every} == lacking and "deepspeed_config" in every
    assert f"{len(every) - len(some)} more flags, by subject: python mine.py --help all" in first


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_examples_of_the_help_are_commands_of_the_recipe(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(path)
    examples = [
        line.strip()
        for line in page(capsys, recipe, "-h").splitlines()
        if line.startswith("    ") and " mine.py " in line
    ]
    assert len(examples) == 3
    for example in examples:
        before, _, flags = example.partition(" mine.py ")
        command = parse(recipe, MINE, shlex.split(flags, comments=True))
        assert command.typed <= {"dataset"}
        ranks = (
            int(found[0])
            if (found := re.findall(r"(?:num_gpus|nproc_per_node) (\d+)", before))
            else command.world
        )
        assert (
            ranks % (recipe.tp * recipe.pp * recipe.sp) == 0
            or command.tiny
            or "--hostfile" in before
        )


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_a_first_page(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The page exists with and without an adapter, and for each engine.

    It must show the recipe's values.
    """
    for changes in ({}, {"adapt": lambda model: model}, {"engine": "ddp"}):
        recipe = Recipe(model="x/y", task=task, lr=0.00125, **changes)  # type: ignore[arg-type]
        text = page(capsys, recipe, "--help")
        some = FLAG.findall(text)
        assert text.count("\n") < 60 and 15 <= len(some) <= 20, some
        assert ("merge" in some) == ("adapt" in changes) and ("deepspeed_config" in some) == (
            "engine" not in changes
        )
        assert f"--dataset {TASKS[task].example}\n" in text and "(default: 0.00125)" in text


def test_the_whole_page_is_by_subject(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, Recipe(model="x"), "--help", "all")
    assert re.findall(r"^([a-z ,]+):$", text, re.MULTILINE) == SUBJECTS
    assert (
        text
        == page(capsys, Recipe(model="x"), "--help=all")
        == page(capsys, Recipe(model="x"), "--steps", "x", "--help", "all")
    )
    assert max(map(len, text.splitlines())) <= 80


def test_a_page_is_printed_once_for_a_host_and_no_other_page_exists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = page(capsys, Recipe(model="x"), "--help")
    assert first == page(capsys, Recipe(model="x"), "--local_rank=0", "-h", "--steps", "3")
    for words in (["--help", "lr"], ["--help=everything"]):
        with pytest.raises(
            ConfigError, match=r"the page does not exist\. Use --help or --help all"
        ) as refusal:
            parse(Recipe(model="x"), MINE, words)
        assert refusal.value.exit_code == 2
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert page(capsys, Recipe(model="x"), "--help") == ""


def test_a_wide_terminal_is_used_up_to_120_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert 100 < max(map(len, page(capsys, Recipe(model="x"), "--help", "all").splitlines())) <= 120


def test_the_help_names_the_file_as_typed_and_imports_nothing_heavy() -> None:
    argv = [sys.executable, "-X", "importtime", "recipes/llama_nano_zero2.py", "--help"]
    done = subprocess.run(
        argv, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported and not imported & {"torch", "transformers", "numpy"}
    assert done.stdout.startswith(
        "    deepspeed --num_gpus 2 recipes/llama_nano_zero2.py --dataset my_text.jsonl\n"
    )
    assert "(default: 0.002)" in " ".join(done.stdout.split())
