"""The weights that Muon trains: the matrices in the layers of every model that a recipe trains.

Embeddings, heads and convolutions are never among these weights.
"""

import json
import re
from typing import Any

import pytest
import torch
import transformers
from recipekit.architectures.families import tiny_config
from recipekit.architectures.lookup import SHIPPED, fitting_task
from recipekit.model.describe import draft_blueprint
from recipekit.model.empty import empty_model
from recipekit.parallel.param_groups import check_group_names
from recipekit.parallel.plans import hidden_matrices, resolve_plans
from recipekit.spec.errors import ConfigError
from recipekit.spec.task_specs import LAYER_PATTERNS, TASKS, Plans
from torch import nn

MODELS = {path.stem: json.loads(path.read_text()) for path in sorted(SHIPPED.glob("*.json"))}
NOT = (
    "embed",
    "wte",
    "wpe",
    "head",
    "score",
    "classifier",
    "cls",
    "conv",
    "bias",
    "norm",
    "position",
    "decoder.weight",
    "table",
)
OF_LAYERS = re.compile(r"(layers|layer|h)\.\d+\.")


def taken(model: Any, own: Plans, task: str) -> set[str]:
    facts = TASKS[task]
    blueprint = draft_blueprint(model, resolve_plans(model, own, facts.plans, facts.matrices))
    return {name for name, group in blueprint.trained.items() if group.matrix}


@pytest.mark.parametrize("name", MODELS)
def test_the_matrices_of_a_recipes_model_are_those_of_its_layers(name: str) -> None:
    """All matrices of the layers are found.

    Every other trained tensor with two dimensions is an embedding or a head. Experts have three
    dimensions, so they do not count as matrices. ERNIE's router biases are not trained.
    """
    config = dict(MODELS[name])
    if "num_hidden_layers" in config:
        config["num_hidden_layers"] = 2
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:2]
    task = fitting_task(config)
    model = empty_model(config, "eager", auto_class=TASKS[task].auto_class)
    found = taken(model, Plans(), task)
    flat = {
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and parameter.requires_grad
    }
    assert found == {name for name in flat if OF_LAYERS.search(name)}, (
        "these are the layers' weights of two dimensions"
    )
    assert all(
        word in name
        for name in flat - found
        for word in [next((word for word in NOT if word in name), "?")]
    ), flat - found
    assert not any(word in name for name in found for word in NOT), found
    assert bool(found) == ("resnet" not in name)


def test_a_head_and_what_is_tied_to_an_embedding_are_none() -> None:
    """Heads and weights tied to an embedding are excluded, even if a pattern matches every
    parameter.
    """
    everything = Plans(matrices=("*",))
    reward = empty_model(
        tiny_config("llama", 264, "reward") | {"num_labels": 1},
        auto_class=TASKS["reward"].auto_class,
    )
    assert "score.weight" not in taken(reward, Plans(), "reward")
    for kind in ("llama", "gpt2"):
        for tied in (False, True):
            model = empty_model(tiny_config(kind, 264) | {"tie_word_embeddings": tied})
            found = taken(model, everything, "pretrain")
            assert found and not any(
                "embed_tokens" in name or "lm_head" in name or "wte" in name or "wpe" in name
                for name in found
            )


@pytest.mark.parametrize(
    ("kind", "never"),
    [
        ("T5", ["shared", "relative_attention_bias", "embed_tokens", "lm_head"]),
        ("Bert", ["embeddings", "distance_embedding", "decoder"]),
        ("Swin", ["relative_position_bias_table", "patch_embeddings"]),
        ("ConvNext", ["dwconv", "downsampling", "patch_embeddings"]),
        ("Mamba", ["A_log", "conv1d", "embeddings"]),
    ],
)
def test_tables_and_convolutions_within_layers_are_none(kind: str, never: list[str]) -> None:
    """T5's shared embedding and its relative position biases have names like layers."""
    config = getattr(transformers, f"{kind}Config")(
        **({"position_embedding_type": "relative_key"} if kind == "Bert" else {})
    )
    with torch.device("meta"):
        model = (
            transformers.AutoModelForSeq2SeqLM.from_config(config)
            if kind == "T5"
            else transformers.AutoModel.from_config(config)
        )
    found = hidden_matrices(model, (*LAYER_PATTERNS, "*"))
    assert found and all(
        isinstance(model.get_parameter(name), nn.Parameter) and model.get_parameter(name).dim() == 2
        for name in found
    )
    assert not any(part in name for name in found for part in never), found
    assert not any(
        isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding) for name in found
    )


def test_a_model_without_matrices_is_refused() -> None:
    """The layers of a ResNet are convolutions."""
    facts = TASKS["image_classification"]
    model = empty_model(MODELS["microsoft--resnet-50"], "eager", auto_class=facts.auto_class)
    plans = resolve_plans(model, Plans(), facts.plans, facts.matrices)
    with pytest.raises(ConfigError, match="finds no weight of two dimensions in the layers"):
        check_group_names(draft_blueprint(model, plans).trained, plans)


def test_a_recipe_may_name_its_matrices() -> None:
    """A recipe's patterns replace the default, which is all matrices in the layers.

    A pattern that matches no matrix is rejected. Other optimizers ignore the patterns.
    """
    model, facts = empty_model(tiny_config("llama", 264)), TASKS["pretrain"]
    own = Plans(matrices=("*.mlp.*",))
    found = taken(model, own, "pretrain")
    assert (
        found
        == {
            name
            for name, parameter in model.named_parameters()
            if ".mlp." in name and parameter.dim() == 2
        }
        != set()
    )
    assert not any(
        group.matrix
        for group in draft_blueprint(model, resolve_plans(model, own, facts.plans)).trained.values()
    )
    plans = resolve_plans(model, Plans(matrices=("*.mlp.*", "*norm*")), facts.plans, facts.matrices)
    with pytest.raises(
        ConfigError, match=r"matrices = '\*norm\*': must match a trained weight of two dimensions"
    ) as refused:
        check_group_names(draft_blueprint(model, plans).trained, plans, ("*.mlp.*", "*norm*"))
    assert len(refused.value.problems) == 1
