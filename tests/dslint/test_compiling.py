"""The models and strategies whose full layers are compiled, and the size of such a layer."""

from typing import Any

import pytest
from recipekit.architectures.lookup import model_config
from recipekit.dslint.compiling import (
    FULLY_COMPILED_TYPES,
    compiles_full_layers,
    layer_numel,
    leaf_obstacle,
)
from shipped_jsons import shipped
from transformers import AutoConfig, AutoModelForCausalLM

SIZE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}


@pytest.mark.parametrize("kind", FULLY_COMPILED_TYPES)
def test_the_elements_of_a_layer_are_those_in_its_matrices(kind: str) -> None:
    config = AutoConfig.for_model(model_type=kind, **SIZE)
    layer = AutoModelForCausalLM.from_config(config).model.layers[0]
    matrices = [weight.numel() for weight in layer.parameters() if weight.dim() == 2]
    assert layer_numel(SIZE | {"model_type": kind}) == sum(matrices)
    assert layer_numel(SIZE | {"model_type": kind}, tp=2) == sum(matrices) // 2


def test_the_layer_of_an_8b_model_by_hand_and_unknown_layers() -> None:
    config = model_config("meta-llama/Llama-3.1-8B")
    assert layer_numel(config) == 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert layer_numel(SIZE | {"model_type": "mixtral"}) == layer_numel(None) == 0


def test_a_model_or_a_degree_that_shards_layers_is_left_out() -> None:
    assert compiles_full_layers("llama", 1, 1, 1) and not compiles_full_layers("gpt2", 1)
    assert not compiles_full_layers("llama", 1, 2, 1)


@pytest.mark.parametrize(
    ("file", "recompute", "adapted", "why"),
    [
        ("zero2", 1, True, ""),
        ("zero3", 0, False, ""),
        ("zero3_hosts", 0, False, ""),
        ("zero3", 2, False, "use --activation_budget 0 instead"),
        ("zero3", 0, True, "unlike with an adapter"),
        ("zero3_cpu", 0, False, "offloaded weights"),
        ("zero3_nvme", 0, False, "offloaded weights"),
    ],
)
def test_why_zero3_cannot_gather_a_full_layer(
    file: str, recompute: int, adapted: bool, why: str
) -> None:
    found = leaf_obstacle(shipped(file), recompute, adapted)
    assert why in found and bool(found) == bool(why)
