"""Weight files' headers compared with config.json, for families that need no torch to check."""

from typing import Any

import pytest
from recipekit.architectures.families import tiny_config
from recipekit.architectures.headers import FAMILIES, check_headers
from recipekit.architectures.safetensors_files import Entry
from recipekit.spec.errors import ConfigError
from recipekit.spec.task_specs import TASKS


def files_of(config: dict[str, Any], task: str) -> dict[str, Entry]:
    """Return the tensors that transformers saves for a model with this config.json."""
    from recipekit.model.empty import empty_model

    model = empty_model(config, "eager", "tiny", auto_class=TASKS[task].auto_class)
    return {
        name: Entry("model.safetensors", "F32", tuple(tensor.shape), 0)
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_has_the_shapes_that_transformers_gives_it(kind: str) -> None:
    """All files that transformers saves pass, with or without the prefix of the base model.

    An additional layer, a different width and a different vocabulary are rejected.
    """
    task, family = "masked_lm" if kind == "bert" else "pretrain", FAMILIES[kind]
    config = tiny_config(kind, 264, task)
    entries = files_of(config, task)
    short = {name.removeprefix(family.base): entry for name, entry in entries.items()}
    for files in (entries, short):
        check_headers(config, files, "m")
        known = {name.removeprefix(family.base).replace(".0.", ".", 1) for name in files}
        assert set(family.shapes) <= known, "each name in the table is a tensor of the family"
        changes = {
            key
            for words in family.shapes.values()
            for product in words
            for key in product.split("*")
        } & config.keys()
        changes -= {key for key in changes if type(config[key]) is not int}
        for key in {*changes, family.num_layers} - {"num_attention_heads"}:
            for other in (config[key] + 1, max(1, config[key] - 1)):
                if other != config[key]:
                    with pytest.raises(ConfigError, match=r"^model = m: "):
                        check_headers(config | {key: other}, files, "m")


def test_other_families_and_missing_keys_are_not_judged() -> None:
    entries = {"model.embed_tokens.weight": Entry("model.safetensors", "F32", (8, 4), 0)}
    check_headers({"model_type": "mamba", "vocab_size": 9, "hidden_size": 4}, entries, "m")
    check_headers({"model_type": "llama", "hidden_size": 4}, entries, "m")
    with pytest.raises(
        ConfigError,
        match=r"model.embed_tokens.weight is \[8, 4\] in its files but \[9, 4\] in its config.json",
    ):
        check_headers({"model_type": "llama", "vocab_size": 9, "hidden_size": 4}, entries, "m")


def test_layers_that_predict_further_tokens_may_be_beyond_the_last() -> None:
    entries = {
        f"model.layers.{number}.input_layernorm.weight": Entry("model.safetensors", "F32", (4,), 0)
        for number in range(3)
    }
    config = {"model_type": "llama", "num_hidden_layers": 2}
    with pytest.raises(
        ConfigError,
        match=r"its files contain 3 layers in model.layers, but its config.json specifies 2",
    ):
        check_headers(config, entries, "m")
    check_headers(config | {"num_nextn_predict_layers": 1}, entries, "m")
