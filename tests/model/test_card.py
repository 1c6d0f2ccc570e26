"""An export's model card contains the recorded facts of its run, and no other facts."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipekit.architectures.small_files import CARD_FILE
from recipekit.commands.convert import main
from recipekit.convert.hugging_face import from_hf
from recipekit.model.card import BASE_LICENSE, card_of, card_of_run, is_unchanged, license_of
from recipekit.model.describe import published_blueprint
from recipekit.model.export import replace_folder
from recipekit.model.small_files import SmallFiles
from recipekit.parallel.blueprint import Layout, default_optimizer
from recipekit.spec.mesh import Mesh
from tiny_models import save_tiny

FACTS: dict[str, Any] = {
    "recipe": {
        "name": "qwen3_0_6b_sft_zero2",
        "model": "Qwen/Qwen3-0.6B-Base",
        "init": "pretrained",
        "dataset": "org/chats",
        "subset": "en",
        "split": "train",
        "task": "sft",
        "engine": "deepspeed",
        "ds_config": "zero2.json",
        "seq_len": 2048,
        "global_batch": 16,
        "steps": 1200,
        "lr": 2e-05,
        "schedule": "cosine",
        "seed": 0,
        "tiny": False,
    },
    "identity": {"adapter": None},
    "mesh": {"world": 2, "name": "dp2"},
    "ds_config": {"zero_optimization": {"stage": 2}},
    "versions": {
        "torch": "2.13.0",
        "deepspeed": "0.19.8",
        "transformers": "5.22.2",
        "python": "3.11.7",
        "wandb": "0.31.0",
    },
    "git_commit": "9389555",
    "commits": {"model": "a" * 40, "datasets": {"org/chats": "b" * 40}},
    BASE_LICENSE: {"license": "other", "license_name": "own|1.0", "license_link": "LICENSE"},
    "host": {"device": "NVIDIA H200"},
    "date": "2026-11-28",
}
LINES = [
    {"step": 1, "loss": 2.5, "tokens": 9000, "eval_loss": 2.25, "eval_s": 1.5},
    {
        "step": 1200,
        "loss": 1.5,
        "tokens": 1234567,
        "eval_loss": 1.4142135,
        "eval_accuracy": 0.5,
        "eval_s": 1.5,
    },
]
WHOLE = f"""\
---
base_model: Qwen/Qwen3-0.6B-Base
base_model_relation: finetune
library_name: transformers
datasets:
- org/chats
license: other
license_name: "own|1.0"
license_link: LICENSE
---

# qwen3_0_6b_sft_zero2

[Qwen/Qwen3-0.6B-Base](https://huggingface.co/Qwen/Qwen3-0.6B-Base), \
trained further with DeepSpeed recipes \
(task `sft`: chats, with the loss on the assistant's answers only).

| fact | value |
| --- | --- |
| base model | [Qwen/Qwen3-0.6B-Base](https://huggingface.co/Qwen/Qwen3-0.6B-Base) at commit \
`{"a" * 40}` |
| licence of the base model | own\\|1.0, as its card says (LICENSE) |
| data set | [org/chats](https://huggingface.co/datasets/org/chats) at commit `{"b" * 40}` |
| subset | en |
| split | train |
| recipe | qwen3_0_6b_sft_zero2, commit `9389555` |
| steps | 1,200 of 1,200 |
| tokens with a label | 1,234,567 |
| rows of a step | 16 |
| tokens of a row | 2048 |
| peak learning rate | 2e-05 |
| learning-rate schedule | cosine |
| seed | 0 |
| strategy | zero2.json |
| layout | dp2, 2 ranks, NVIDIA H200 |
| versions | python 3.11.7, torch 2.13.0, deepspeed 0.19.8, transformers 5.22.2 |
| first start | 2026-11-28 |

## Held-out metrics at step 1,200

| metric | value |
| --- | --- |
| `eval_loss` | 1.41421 |
| `eval_accuracy` | 0.5 |

## DeepSpeed JSON

```json
{{
  "zero_optimization": {{
    "stage": 2
  }}
}}
```

<!-- written by recipekit, DIGEST -->
"""
LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}


def card(
    facts: dict[str, Any] = FACTS,
    lines: Any = LINES,
    files: Any = None,
    step: int = 1200,
    merged: bool = False,
) -> str:
    return card_of(facts, lines, files or {}, step, merged)


def header(text: str) -> dict[str, Any]:
    return yaml.safe_load(text.split("---\n")[1])


def changed(part: str, **values: Any) -> dict[str, Any]:
    return FACTS | {part: FACTS[part] | values}


def rows(text: str) -> dict[str, str]:
    return dict(
        line.strip("| ").split(" | ", 1) for line in text.split("\n") if line.startswith("| ")
    )


def test_the_whole_card():
    text = card()
    begin, _, end = text.rpartition("recipekit, ")
    assert begin + "recipekit, DIGEST" + end[16:] == WHOLE


def test_the_card_of_an_adapter():
    facts = changed("identity", adapter=LORA)
    text = card(facts)
    assert (
        header(text)["base_model_relation"] == "adapter" and header(text)["library_name"] == "peft"
    )
    assert (
        "\nAn adapter for [Qwen/Qwen3-0.6B-Base]" in text
        and rows(text)["adapter"] == "LORA, rank 8, alpha 16"
    )
    merged = card(facts, merged=True)
    assert (
        header(merged) == header(card())
        and rows(merged)["adapter"] == "LORA, rank 8, alpha 16, merged into the weights"
    )


def test_random_weights_have_no_base_model():
    text = card(changed("recipe", init="random", tiny=True))
    assert header(text) == {"library_name": "transformers", "datasets": ["org/chats"]}
    assert (
        "A model with the architecture of [Qwen/Qwen3-0.6B-Base]" in text
        and "it is a trial, not a useful model." in text
    )
    assert "architecture" in rows(text) and "base model" not in rows(text)


@pytest.mark.parametrize("hashed", [True, False])
def test_a_folder_is_named_without_its_path(hashed):
    """Neither the header nor the text may show the local path of a model or data."""
    facts = changed(
        "recipe", model="/data/people/me/base", dataset="/data/people/me/rows.jsonl"
    ) | {"commits": {}}
    facts |= {"identity": {"model_config": "0" * 16}} if hashed else {}
    text = card(facts, files={"": {"/data/people/me/rows.jsonl": "cd5188c45e25af82"}})
    assert header(text) == {"library_name": "transformers"} and "/data" not in text
    assert rows(text)["base model"] == "`base`"
    assert rows(text)["data file"] == "`rows.jsonl`, fingerprint `cd5188c45e25af82`"


def test_a_card_lists_ten_data_files():
    text = card(
        files={
            "a": {f"{number}.jsonl": str(number) for number in range(8)},
            "b": {f"{number}.csv": str(number) for number in range(5)},
        }
    )
    assert (
        text.count("| data file |") == 10
        and rows(text)["data files"] == "3 more; data_files.json of the run lists all"
    )


def test_samples_are_counted_as_samples():
    text = card(
        changed("recipe", task="image_classification"),
        [{"step": 3, "samples": 48, "tokens": 48}],
        step=3,
    )
    assert (
        rows(text)["samples"] == "48"
        and not {"tokens with a label", "tokens of a row"} & rows(text).keys()
    )
    assert "Held-out" not in text


def test_torch_engines_have_no_json():
    text = card(changed("recipe", engine="fsdp2"))
    assert rows(text)["strategy"] == "fsdp2" and "## DeepSpeed JSON" not in text


def test_no_folder_of_the_machine_is_published() -> None:
    """Cards are often published, and paths can contain the names of users and disks."""
    offload = {"device": "nvme", "nvme_path": "/scratch/ann/swap"}
    config = {
        "zero_optimization": {"stage": 3, "offload_param": offload},
        "monitor": {"path": "~/ann/logs", "on": True},
    }
    text = card(changed("recipe", ds_config="/disks/ann/mine.json") | {"ds_config": config})
    assert (
        rows(text)["strategy"] == "mine.json"
        and "ann" not in text
        and '"nvme_path": "swap"' in text
        and '"path": "logs"' in text
    )


@pytest.mark.parametrize("missing", FACTS)
def test_a_missing_fact_is_left_out(missing):
    """A fact that is not an object, for example after a manual edit, is also omitted."""
    for facts in (
        {name: value for name, value in FACTS.items() if name != missing},
        FACTS | {missing: None},
        FACTS | {missing: []},
    ):
        text = card(facts)
        assert not {"None", "null", "[]", "{}"} & {
            *text.replace("`", " ").replace("|", " ").split()
        }
        assert header(text)["library_name"] == "transformers" and rows(text)["steps"].startswith(
            "1,200"
        )


@pytest.mark.parametrize("missing", FACTS["recipe"])
def test_a_missing_field_of_the_recipe_is_left_out(missing):
    text = card(
        FACTS
        | {"recipe": {name: value for name, value in FACTS["recipe"].items() if name != missing}}
    )
    assert "None" not in text and header(text)["library_name"] == "transformers"


def test_a_run_without_anything():
    assert rows(card({}, [], step=7)) == {"fact": "value", "---": "---", "steps": "7"}


# Run folders


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps(FACTS))
    (tmp_path / "run" / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in LINES)
    )
    (tmp_path / "run" / "data_files.json").write_text('{"": {"rows.jsonl": "cd5188c45e25af82"}}')
    return tmp_path / "run"


def test_a_checkpoint_has_the_metrics_of_its_step(run):
    text = card_of_run(run, 600, merged=False)
    assert text == card(lines=LINES[:1], files={"": {"rows.jsonl": "cd5188c45e25af82"}}, step=600)
    assert rows(text)["steps"] == "600 of 1,200" and "## Held-out metrics at step 1\n" in text


def test_a_folder_without_run_json_has_no_card(run):
    (run / "run.json").unlink()
    assert card_of_run(run, 600, merged=False) == ""
    assert SmallFiles({"a": b"b"}).with_card("").contents == {"a": b"b"}


def test_a_missing_metrics_file_leaves_its_numbers_out(run):
    (run / "metrics.jsonl").unlink()
    (run / "data_files.json").unlink()
    assert card_of_run(run, 600, merged=False) == card(lines=[], step=600)


# License of the base model


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("---\nlicense: apache-2.0\ntags:\n- a\n---\n# Base\n", {"license": "apache-2.0"}),
        (
            "---\nlicense: other\nlicense_name: own\nlicense_link: https://example.com\n---\n",
            {"license": "other", "license_name": "own", "license_link": "https://example.com"},
        ),
        ("---\nlicense:\n- mit\n---\n", {}),
        ("---\ntags: [a]\n---\n", {}),
        ("---\n- a\n---\n", {}),
        ("---\nlicense: [\n---\n", {}),
        ("# MIT, says the text\n", {}),
        ("", {}),
        (None, {}),
    ],
)
def test_the_licence_is_what_the_base_models_card_says(page, found, tmp_path):
    if page is not None:
        (tmp_path / CARD_FILE).write_text(page)
    assert license_of(str(tmp_path)) == found


def test_the_licence_goes_from_card_to_card(tmp_path):
    """If a second run starts from an export, its card states the license in that export's card."""
    (tmp_path / CARD_FILE).write_text(card())
    assert license_of(str(tmp_path)) == FACTS[BASE_LICENSE]


def test_a_hub_model_that_is_not_here_has_no_licence(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert license_of("someone/nothing") == {}


# Edited cards


def test_an_edited_card_is_kept(tmp_path):
    folder, staging = tmp_path / "hf", tmp_path / ".hf.tmp"
    for page in (
        "# Mine\n",
        card().replace("trained further", "my best model"),
        card() + "More.\n",
    ):
        for path in (folder, staging):
            path.mkdir()
        (folder / CARD_FILE).write_text(page)
        SmallFiles({"config.json": b"{}"}).with_card(card()).write(staging)
        replace_folder(staging, folder)
        assert (folder / CARD_FILE).read_text() == page and (
            folder / "config.json"
        ).read_text() == "{}"
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_a_card_as_it_was_written_is_replaced(tmp_path):
    folder, staging = tmp_path / "hf", tmp_path / ".hf.tmp"
    for step in (600, 1200):
        staging.mkdir()
        SmallFiles({}).with_card(card(step=step)).write(staging, of_adapter=True)
        replace_folder(staging, folder)
        assert is_unchanged(folder / CARD_FILE)
        assert (folder / CARD_FILE).read_text() == card(step=step)


def test_to_hf_writes_the_card_of_a_checkpoint_in_a_run_folder(run, tmp_path):
    """A step folder outside a run folder has no card."""
    save_tiny(tmp_path / "base")
    blueprint = published_blueprint(tmp_path / "base")
    step = run / "checkpoints" / "step_00000000"
    step.parent.mkdir()
    from_hf(
        tmp_path / "base",
        step,
        blueprint,
        Layout(Mesh(), 0, default_optimizer(0, "float32"), "float32"),
    )
    assert main(["to-hf", str(step), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / CARD_FILE).read_text() == card_of_run(run, 0, merged=False)
    step.rename(tmp_path / "alone")
    assert main(["to-hf", str(tmp_path / "alone"), str(tmp_path / "without")]) == 0
    assert not (tmp_path / "without" / CARD_FILE).exists()
