"""Model types, the tasks that train them, and config.json in the hub's cache."""

import os
from pathlib import Path

import pytest
from recipekit.architectures.lookup import (
    BIDIRECTIONAL_FAMILIES,
    CAUSAL_LM_CLASS,
    fitting_task,
    folder_of,
    model_types_of,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)


def test_the_types_are_those_of_transformers():
    for auto_class, table in (
        (CAUSAL_LM_CLASS, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("AutoModelForImageClassification", MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    ):
        assert model_types_of(auto_class) == {
            kind: (names,) if isinstance(names, str) else names for kind, names in table.items()
        }
    assert len(model_types_of("AutoModelForImageClassification")["deit"]) == 2
    assert BIDIRECTIONAL_FAMILIES.keys() <= model_types_of(CAUSAL_LM_CLASS).keys()


def test_of_two_tasks_that_take_a_type_the_class_decides():
    assert (
        fitting_task({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]})
        == "reward"
    )
    assert fitting_task({"model_type": "llama", "architectures": ["LlamaModel"]}) == "pretrain"


def test_a_file_of_the_hub_cache_is_looked_up_in_the_commit_of_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest file does not matter, and a snapshot without the file does not count."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--nobody--model"
    snapshots = repository / "snapshots"
    for name, file, time in (
        ("b", "config.json", 200),
        ("a", "config.json", 300),
        ("d", "config.json", 100),
        ("c", "tokenizer_config.json", 400),
    ):
        (snapshots / name).mkdir(parents=True)
        (snapshots / name / file).write_text("{}")
        os.utime(snapshots / name / file, (time, time))
    assert folder_of("nobody/model") is None
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b")
    assert (
        folder_of("nobody/model") == snapshots / "b"
        and folder_of("nobody/model", revision="d") == snapshots / "d"
    )
    assert folder_of("nobody/model", "tokenizer_config.json") is None
    assert (
        folder_of("nobody/model", "generation_config.json") is None
        and folder_of("nobody/other") is None
    )
    assert folder_of(str(tmp_path), "generation_config.json") == tmp_path
