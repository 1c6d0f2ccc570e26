"""Effects of a recipe's task before a run starts.

The task decides the flags, the degrees, the values of --tiny, the model's config.json, and a run's
identity.
"""

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from recipekit.architectures.shrink import BYTE_VOCAB
from recipekit.plan import RunPlan, resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import AXES, Recipe, check_recipe
from recipekit.spec.run_folder import IDENTITY, find_resume, run_identity
from recipekit.spec.task_specs import TASKS, task_fields

INSTALLED = f"transformers {version('transformers')}"

FILE = Path("/somewhere/mine.py")
VIT = {
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    **dict(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        image_size=224,
        patch_size=16,
        num_channels=3,
    ),
    "id2label": {str(label): f"LABEL_{label}" for label in range(1000)},
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **dict(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
    ),
}
BERT = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    **dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=30522,
        max_position_embeddings=2048,
    ),
}
TASK = "image_classification"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Return an image recipe whose model folder contains only a config.json."""
    return Recipe(
        model=folder_of(VIT, tmp_path / "vit"),
        task=TASK,
        init="random",
        ds_config="zero1.json",
        out=str(tmp_path / "run"),
    )


def folder_of(config: dict[str, Any], folder: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def plan(recipe: Recipe, *words: str, world: int = 1) -> RunPlan:
    return resolve_run(parse(recipe, FILE, ["--dry_run", "--world", str(world), *words]))


def refused(recipe: Recipe, *words: str, world: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        plan(recipe, *words, world=world)
    return [str(problem) for problem in refusal.value.problems]


def test_a_recipe_of_images_needs_no_tokenizer_and_no_row_length(recipe: Recipe) -> None:
    planned = plan(recipe)
    assert planned.model_config == VIT and planned.recipe.task_spec is TASKS[TASK]
    assert (
        plan(dataclasses.replace(recipe, tokenizer="bytes", seq_len=2**20)).model_config == VIT
    ), "what the task does not read changes nothing"


def test_tiny_sets_what_the_task_reads(recipe: Recipe, tmp_path: Path) -> None:
    planned = plan(
        dataclasses.replace(recipe, dataset="some/hub_id", global_batch=4096), "--tiny", world=2
    )
    assert (
        planned.model_config is not None
        and "vocab_size" not in planned.model_config
        and "id2label" not in planned.model_config
    )
    assert {
        key: planned.model_config[key]
        for key in ("image_size", "patch_size", "num_labels", "hidden_size")
    } == {
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 10,
        "hidden_size": 64,
    }
    small = planned.recipe
    assert (small.dataset, small.init, small.micro_batch, small.global_batch) == (
        "builtin",
        "random",
        2,
        8,
    )
    assert (small.tokenizer, small.seq_len) == (Recipe.tokenizer, Recipe.seq_len)
    text = plan(
        Recipe(model=folder_of(LLAMA, tmp_path / "llama"), ds_config="zero1.json"), "--tiny"
    )
    assert text.model_config is not None and text.model_config["vocab_size"] == BYTE_VOCAB
    assert (text.recipe.tokenizer, text.recipe.seq_len) == ("bytes", 128)


def test_a_flag_that_the_task_does_not_read_is_refused_with_the_tasks_that_do(
    recipe: Recipe, tmp_path: Path
) -> None:
    readers = {name: ", ".join(tasks) for name, tasks in task_fields().items()}
    assert refused(recipe, "--seq_len", "256", "--text_field", "story") == [
        (
            f"--text_field story: applies only to {readers['text_field']}, not to"
            " image_classification. Leave it out"
        ),
        (
            f"--seq_len 256: applies only to {readers['seq_len']}, not to image_classification."
            " Leave it out"
        ),
    ]
    rule = f"applies only to {readers['loss']}, not to image_classification. Leave it out"
    assert refused(recipe, "--loss", "chunked") == [f"--loss chunked: {rule}"]
    demand = f"loss = chunked: {rule}"
    assert refused(dataclasses.replace(recipe, loss="chunked")) == [demand], (
        "a demand, which would come to nothing"
    )
    text = Recipe(
        model=folder_of(LLAMA, tmp_path / "llama"),
        init="random",
        tokenizer="bytes",
        ds_config="zero1.json",
    )
    assert refused(text, "--augment", "none") == [
        "--augment none: applies only to image_classification, not to pretrain. Leave it out"
    ]
    assert refused(text, "--task", "sft", "--text_field", "x") == [
        f"--text_field x: applies only to {readers['text_field']}, not to sft. Leave it out"
    ]
    # A value in the recipe's file applies to the recipe's own task.
    plan(dataclasses.replace(text, text_field="story"), "--task", "sft")


@pytest.mark.parametrize("task", TASKS)
def test_every_field_of_a_task_is_taken_by_it_and_refused_by_the_others(
    recipe: Recipe, tmp_path: Path, task: str
) -> None:
    config = VIT if task == TASK else BERT if TASKS[task].bidirectional else LLAMA
    model = folder_of(config, tmp_path / "model")
    made = dataclasses.replace(recipe, model=model, task=task, tokenizer="bytes")
    for name, tasks in task_fields().items():
        value = str(getattr(made, name))
        switch = isinstance(getattr(made, name), bool)
        words = (
            [f"--{name}"]
            if switch
            else [f"--{name}", "off" if name == "token_cache" else value or "bytes"]
        )
        if task in tasks:
            plan(made, *words)
        else:
            assert [line.partition(" ")[0] for line in refused(made, *words)] == [f"--{name}"]


@pytest.mark.parametrize("axis", [name for name in TASKS[TASK].unsupported if name in AXES])
def test_a_degree_that_the_task_lacks_is_refused_wherever_it_is_written(
    recipe: Recipe, axis: str
) -> None:
    """The degree is reported only once, with the task's reason, and --tiny does not lower it."""
    told = [f"{axis} = 2: {TASKS[TASK].unsupported[axis]}. Use --{axis} 1"]
    own = dataclasses.replace(recipe, **{axis: 2})
    assert (
        refused(recipe, f"--{axis}", "2", world=2)
        == refused(own, world=2)
        == refused(own, "--tiny", world=2)
        == refused(own, "--tiny")
        == told
    )
    keys: dict[str, dict[str, Any]] = {
        "sp": {"sequence_parallel_size": 2},
        "ep": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    }
    config = {"zero_optimization": {"stage": 1}} | keys[axis]
    assert refused(dataclasses.replace(recipe, ds_config=config), world=2) == told
    assert (
        not check_recipe(dataclasses.replace(recipe, tp=2, pp=2))
        and [str(problem) for problem in check_recipe(own)] == told
    )


def test_an_adapter_and_a_mixture_are_refused_where_a_task_lacks_them(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = "a=some/one@1; b=some/other@1"
    assert refused(dataclasses.replace(recipe, adapt=lambda model: model)) == [
        f"adapt: {TASKS[TASK].unsupported['adapt']}. Remove adapt from the recipe"
    ]
    monkeypatch.setitem(TASKS, TASK, dataclasses.replace(TASKS[TASK], unsupported={}))
    plan(dataclasses.replace(recipe, adapt=lambda model: model), "--dataset", mixture)
    monkeypatch.setitem(
        TASKS,
        TASK,
        dataclasses.replace(
            TASKS[TASK], unsupported={"adapt": "nothing to adapt", "mixture": "one is enough"}
        ),
    )
    assert refused(
        dataclasses.replace(recipe, adapt=lambda model: model), "--dataset", mixture
    ) == [
        "adapt: nothing to adapt. Remove adapt from the recipe",
        "--dataset of 2 corpora: one is enough. Set --dataset to a single data set",
    ]
    plan(recipe, "--dataset", "some/one")


def test_what_is_about_packed_rows_is_not_said_of_images(recipe: Recipe) -> None:
    """Checks of document masks, FlashAttention and positions do not apply to images."""
    long = dataclasses.replace(recipe, seq_len=2**20, attention="flash_attention_2", micro_batch=8)
    assert check_recipe(long) == [] and check_recipe(dataclasses.replace(long, task="pretrain"))
    plan(dataclasses.replace(long, attention="sdpa"))


def test_a_model_of_another_task_is_refused_with_the_flag_that_helps(recipe: Recipe) -> None:
    (told,) = refused(recipe, "--task", "pretrain", "--tokenizer", "bytes")
    assert told.startswith(
        f"model = {recipe.model}: {INSTALLED} does not support a vit as a causal language model"
    ) and told.endswith(". Use --task image_classification")
    assert refused(recipe, "--task", "pretrain", "--tokenizer", "bytes", "--tiny") == [told]


PAIRS = ("prompt_field", "chosen_field", "rejected_field")


@pytest.mark.parametrize("task", ["preference", "reward"])
def test_a_run_of_pairs_is_made_of_its_columns_and_numbers_and_no_other_run_is(
    tmp_path: Path, task: str
) -> None:
    """Runs from before these tasks existed can therefore be resumed."""
    pairs = Recipe(model="Qwen/Qwen3-0.6B", out=str(tmp_path), task=task)
    own = {*PAIRS, *(["beta"] if task == "preference" else [])}
    assert run_identity(pairs, None).keys() == {*IDENTITY, *own}
    assert all(
        run_identity(dataclasses.replace(pairs, task=other), None).keys() == set(IDENTITY)
        for other in ("pretrain", "sft", TASK)
    )
    (tmp_path / "run.json").write_text(
        json.dumps({"identity": run_identity(pairs, None), "recipe": {"tiny": False}})
    )
    assert find_resume(pairs, tmp_path, None, False) == tmp_path
    for name in own:
        with pytest.raises(ConfigError, match=f"{name} = .*: the run in .* has"):
            find_resume(
                dataclasses.replace(pairs, **{name: 0.5 if name == "beta" else "other"}),
                tmp_path,
                None,
                False,
            )


def test_the_head_of_a_reward_model_has_one_output_whatever_the_config_says(tmp_path: Path) -> None:
    made = Recipe(
        model=folder_of(LLAMA | VIT | LLAMA, tmp_path / "llama"),
        task="reward",
        init="random",
        tokenizer="bytes",
        ds_config="zero1.json",
    )
    for words in ((), ("--tiny",)):
        config = plan(made, *words).model_config
        assert config is not None and config["num_labels"] == 1 and "id2label" not in config


@pytest.mark.parametrize("task", ["preference", "reward"])
@pytest.mark.parametrize("axis", ["sp", "ep"])
def test_a_degree_in_which_pairs_are_not_proved_is_refused(
    tmp_path: Path, task: str, axis: str
) -> None:
    made = Recipe(
        model=folder_of(LLAMA, tmp_path / "llama"),
        task=task,
        init="random",
        tokenizer="bytes",
        ds_config="zero1.json",
    )
    assert refused(made, f"--{axis}", "2", world=2) == [
        f"{axis} = 2: {TASKS[task].unsupported[axis]}. Use --{axis} 1"
    ]


def test_beta_is_a_positive_number(tmp_path: Path) -> None:
    made = Recipe(
        model=folder_of(LLAMA, tmp_path / "llama"),
        task="preference",
        init="random",
        tokenizer="bytes",
        ds_config="zero1.json",
    )
    assert refused(made, "--beta", "0") == [
        "beta = 0.0: must be a positive number. Use a positive number, for example --beta 0.1"
    ]


YOUNGER = ("image_field", "label_field", "augment", "num_labels")


def test_a_run_that_is_older_than_a_field_goes_on(tmp_path: Path) -> None:
    recipe = Recipe(model="Qwen/Qwen3-0.6B", out=str(tmp_path))
    assert set(YOUNGER) <= set(IDENTITY)
    saved = {
        name: value for name, value in run_identity(recipe, None).items() if name not in YOUNGER
    }
    (tmp_path / "run.json").write_text(json.dumps({"identity": saved, "recipe": {"tiny": False}}))
    assert find_resume(recipe, tmp_path, None, False) == tmp_path
    with pytest.raises(ConfigError, match=r"image_field = photo: the run in .* has image"):
        find_resume(dataclasses.replace(recipe, image_field="photo"), tmp_path, None, False)


@pytest.mark.parametrize("name", YOUNGER)
def test_what_of_an_image_run_must_stay_is_compared(
    recipe: Recipe, tmp_path: Path, name: str
) -> None:
    (tmp_path / "run.json").write_text(
        json.dumps({"identity": run_identity(recipe, VIT), "recipe": {"tiny": False}})
    )
    assert find_resume(recipe, tmp_path, VIT, False) == tmp_path
    with pytest.raises(
        ConfigError, match=f"{name} = none: .*Resume with --{name} {getattr(recipe, name)}"
    ):
        find_resume(dataclasses.replace(recipe, **{name: "none"}), tmp_path, VIT, False)
    assert find_resume(dataclasses.replace(recipe, threads=7), tmp_path, VIT, False) == tmp_path, (
        "threads change no row"
    )
