"""Values that are empty, blank or too large."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from pool import ROOT, environment
from recipekit.data.files import local_files
from recipekit.data.mixture import domains_of
from recipekit.plan import RunPlan, resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import AXES, MAX_INT, MAY_BE_EMPTY, PATHS, Recipe

RECIPE = Recipe(model="recipekit/llama-nano", tokenizer="bytes", init="random", steps=4, seq_len=64)
TEXTS = [
    item.name
    for item in dataclasses.fields(Recipe)
    if item.type is str and "choices" not in item.metadata
]
NUMBERS = [item.name for item in dataclasses.fields(Recipe) if item.type is int]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def planned(*argv: str, recipe: Recipe = RECIPE) -> RunPlan:
    return resolve_run(parse(recipe, Path("mine.py"), list(argv)))


def problems(*argv: str, recipe: Recipe = RECIPE) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        planned(*argv, recipe=recipe)
    return [str(problem) for problem in refused.value.problems]


@pytest.mark.parametrize("value", ["", " ", "\t\n"], ids=["empty", "space", "tab"])
@pytest.mark.parametrize("name", [*TEXTS, "deepspeed_config"])
def test_an_empty_value_is_refused_or_documented(name: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a file in the current folder"}\n')
    if not value and name in MAY_BE_EMPTY and name not in ("out", "prompt_field"):
        # The model's own tokenizer is used.
        planned(
            f"--{name}", value, *(("--model", "Qwen/Qwen3-0.6B") if name == "tokenizer" else ())
        )
        return
    if not value and name == "prompt_field":  # only other tasks read it
        return
    (found,) = problems(f"--{name}", value)
    assert (
        found.startswith(f"{name} = ")
        and "must not be empty or blank" in found
        and found.endswith("Check the variables of your shell")
    )


def test_an_empty_value_of_the_recipe_itself_is_refused() -> None:
    for changes in ({"dataset": ""}, {"model": " "}, {"ds_config": ""}, {"split": ""}):
        (found,) = problems(recipe=dataclasses.replace(RECIPE, **changes))
        assert "must not be empty or blank" in found
    assert planned(
        recipe=dataclasses.replace(RECIPE, out="", subset="", batch_ramp="")
    ).out == Path("runs/mine")


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        ("a.jsonl,", "entry 2 of the list is empty"),
        (",a.jsonl", "entry 1 of the list is empty"),
        ("a.jsonl, ,b.jsonl", "entry 2 of the list is empty"),
        ("one=a.jsonl@1; two= @1", "two = '': must not be empty or blank"),
        ("one=a.jsonl,@1; two=b.jsonl@1", "entry 2 of the list is empty"),
    ],
)
def test_an_empty_entry_of_a_list_is_refused(tmp_path: Path, dataset: str, named: str) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "some words"}\n')
    assert any(named in problem for problem in problems("--dataset", dataset))
    planned("--dataset", "a.jsonl, b.jsonl")
    planned("--dataset", "one=a.jsonl@1; two=b.jsonl@1")


def test_a_comma_in_the_name_of_a_file_is_no_list(tmp_path: Path) -> None:
    (tmp_path / "a,.jsonl").write_text('{"text": "some words"}\n')
    planned("--dataset", "a,.jsonl")


@pytest.mark.parametrize("separator", [",", ", "])
def test_a_list_of_files_may_be_longer_than_the_name_of_a_file(
    tmp_path: Path, separator: str
) -> None:
    for number in range(40):
        (tmp_path / f"part_{number:03d}.jsonl").write_text('{"text": "a row"}\n')
    listed = separator.join(sorted(path.name for path in tmp_path.glob("part_*")))
    assert (
        len(local_files(listed) or []) == 40
        and planned("--dataset", listed).recipe.dataset == listed
    )
    assert len(domains_of(f"a={listed}@1; b=part_000.jsonl@1")) == 2


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("value", ["x" * 256, "runs/" + "é" * 128, "x" * 300 + "/y"])
def test_a_name_that_no_file_can_have_is_refused(name: str, value: str) -> None:
    flag = "deepspeed_config" if name == "ds_config" else name
    (found,) = problems(f"--{flag}", value)
    assert found.startswith(f"{flag} = ") and "but file systems allow at most 255. " in found


@pytest.mark.parametrize(
    ("flag", "value"),
    [("bad_rows", "\n"), ("steps", "\n"), ("lr", " "), ("task", "a\tb"), ("init", "")],
)
def test_a_value_that_does_not_print_is_quoted(flag: str, value: str) -> None:
    assert problems(f"--{flag}", value)[0].startswith(f"--{flag} {value!r}: ")


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_more_than_64_bits_is_refused(name: str) -> None:
    for value in (MAX_INT + 1, -(10**30)):
        (found,) = problems(f"--{name}", str(value))
        assert found.startswith(f"{name} = {value}: must be at most ")


@pytest.mark.parametrize("name", AXES)
def test_a_huge_degree_is_refused_at_once(name: str) -> None:
    for value in (10**12, 65537):
        assert problems(f"--{name}", str(value)) == [
            f"{name} = {value}: must be at most 65536. For example --{name} 1"
        ]
    assert problems(f"--{name}", "65536"), "planned, and refused on one rank"


def test_the_largest_seed_gives_weights_and_an_order() -> None:
    import torch
    from recipekit.data.packing import permutation

    planned("--seed", str(MAX_INT))
    torch.manual_seed(MAX_INT)
    assert sorted(permutation(5, MAX_INT, 0).tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("task", ["pretrain", "sft"])
def test_a_row_of_one_token_has_no_target(task: str) -> None:
    (found,) = problems("--seq_len", "1", "--task", task)
    assert found.startswith("seq_len = 1: a row of one token has no target") and found.endswith(
        "Use --seq_len 2 or more"
    )
    planned("--seq_len", "2", "--task", task)


@pytest.mark.parametrize("task", ["preference", "reward"])
def test_a_pair_of_one_token_has_no_answer(task: str) -> None:
    pairs = dataclasses.replace(RECIPE, task=task, micro_batch=1)
    assert any(
        line.startswith("seq_len = 1: ") for line in problems("--seq_len", "1", recipe=pairs)
    )


@pytest.mark.parametrize(
    "words",
    [
        ["lint", "{}"],
        ["lint", "--recipe", "{}"],
        ["convert_checkpoint", "verify", "{}"],
        ["convert_checkpoint", "to-hf", "x", "{}"],
        ["doctor", "--recipe", "{}"],
    ],
    ids=" ".join,
)
def test_a_tool_takes_no_empty_path_for_the_current_folder(words: list[str]) -> None:
    for value in ("", " "):
        tool, *rest = [word.format(value) for word in words]
        done = subprocess.run(
            [sys.executable, ROOT / "tools" / f"{tool}.py", *rest],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 2 and done.stderr.endswith(
            "must not be empty or blank. Check the variables of your shell\n"
        ), done.stderr


@pytest.mark.parametrize(
    "name",
    ["HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME"],
)
def test_an_empty_variable_of_a_cache_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(other, raising=False)
    for value in ("", " "):
        monkeypatch.setenv(name, value)
        rule = "must not be empty or blank: the cache would be in the current folder"
        assert problems() == [f"{name} = {value!r}: {rule}. Unset {name}, or name a folder"]
    monkeypatch.setenv(name, "/somewhere")
    planned()


def test_a_folder_that_is_missing_is_no_hub_id(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "docs.jsonl").write_text("{}")
    for model in ("./nope", "nope/", "/nope", "a/b/", "models/a/b", "data/docs.jsonl"):
        assert any(
            f"model = {model}: is not a folder on this machine" in problem
            for problem in problems("--model", model)
        )
