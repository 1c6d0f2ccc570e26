"""Initial weights: random weights are the same in every layout, and published weights equal the
files.
"""

import hashlib

import pytest
import torch
from built_models import build_model
from recipekit.architectures.families import tiny_config as tiny_of
from recipekit.architectures.shrink import BYTE_VOCAB
from recipekit.model.describe import draft_blueprint
from recipekit.optim.groups import parameter_groups
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import make_mesh
from recipekit.spec.recipe import Recipe
from tiny_models import CONFIGS, ds_config, tiny_config


def digests(kind: str, stage: int, tp: int, seed: int) -> dict[str, str]:
    """Return each full parameter's digest for a model built in this layout."""
    import torch.distributed as dist
    from recipekit.model.export import full_parameters
    from recipekit.parallel.groups import ProcessGroups

    world = dist.get_world_size()
    groups = ProcessGroups(make_mesh(world, tp=tp), "cpu")
    recipe = Recipe(model="none", init="random", seed=seed)
    built = build_model(
        recipe, tiny_config(kind), groups, ds_config(stage, world, tp), torch.device("cpu")
    )
    return {
        name: _digest(value)
        for name, value in full_parameters(built.model, built, groups, torch.float32)
    }


def _digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:12]


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_random_init_does_not_depend_on_the_layout(pools, kind):
    alone = build_model(
        Recipe(model="none", init="random", seed=7),
        tiny_config(kind),
        None,
        ds_config(0),
        torch.device("cpu"),
    )
    expected = {name: _digest(value.detach()) for name, value in alone.model.named_parameters()}
    matrices = {
        name: expected[name] for name, value in alone.model.named_parameters() if value.ndim > 1
    }
    assert len(set(matrices.values())) == len(matrices)  # no two matrices are equal
    layouts = [(1, 1), (3, 1)] if kind == "gpt2" else [(1, 1), (3, 1), (0, 2), (3, 2)]
    for stage, tp in layouts:
        for got in pools.run(2, digests, kind=kind, stage=stage, tp=tp, seed=7):
            assert got == expected, f"ZeRO-{stage}, tp {tp}"
    other = pools.run(2, digests, kind=kind, stage=1, tp=1, seed=8)[0]
    assert other != expected


def test_another_seed_draws_other_weights():
    models = [
        build_model(
            Recipe(model="none", init="random", seed=seed),
            tiny_config("llama"),
            None,
            ds_config(0),
            torch.device("cpu"),
        ).model
        for seed in (7, 8, 7)
    ]
    for (name, one), (_, other), (_, again) in zip(
        *(model.named_parameters() for model in models), strict=True
    ):
        assert torch.equal(one, again) and (one.ndim < 2 or not torch.equal(one, other)), name


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_random_init_has_the_models_own_distribution(kind):
    """Every random parameter must have the mean and the spread that transformers' initialisation
    gives.
    """
    import transformers

    config = tiny_config(kind)
    mine = build_model(
        Recipe(model="none", init="random"), config, None, ds_config(0), torch.device("cpu")
    ).model
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(mine.config)
    for (name, a), (other, b) in zip(
        mine.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == other and a.shape == b.shape
        if b.std() == 0:
            assert torch.equal(a, b), name
        else:
            assert abs(a.std() / b.std() - 1) < 0.2 and abs(a.mean()) < 0.2 * b.std() + 1e-3, name
    for (name, a), (other, b) in zip(mine.named_buffers(), theirs.named_buffers(), strict=True):
        assert name == other and torch.equal(a, b), name


def test_a_parameter_that_only_the_constructor_draws_is_refused():
    """OpenAI-GPT's Conv1D (transformers 5.22.2) has no initialiser.

    The values would therefore depend on the order in which modules are constructed.
    """
    config = tiny_of("openai-gpt", BYTE_VOCAB)
    with pytest.raises(
        ConfigError,
        match=(
            r"--init random: OpenAIGPTLMHeadModel has no initialiser for"
            r" transformer\.h\.0\.attn\.c_attn\.weight\. Give pretrained"
        ),
    ):
        build_model(
            Recipe(model="none", init="random", attention="eager"),
            config,
            None,
            ds_config(0),
            torch.device("cpu"),
        )


@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_nth_layer_is_recomputed(every):
    recipe = Recipe(model="none", init="random", recompute_every=every)
    model = build_model(
        recipe,
        tiny_config("llama") | {"num_hidden_layers": 5, "layer_types": None},
        None,
        ds_config(0),
        torch.device("cpu"),
    ).model
    calls = [0] * len(model.model.layers)
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(
            lambda *_, number=number: calls.__setitem__(number, calls[number] + 1)
        )
    ids = torch.arange(8).unsqueeze(0)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert (
        calls == [2 if number % every == 0 else 1 for number in range(len(calls))]
        and len(calls) == 5
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "moe"])
def test_the_blueprint_has_the_groups_of_the_optimizer(kind):
    model = build_model(
        Recipe(model="none", init="random"),
        tiny_config(kind),
        None,
        ds_config(0),
        torch.device("cpu"),
    ).model
    groups = parameter_groups(model)
    numbers = {
        id(parameter): number
        for number, group in enumerate(groups)
        for parameter in group["params"]
    }
    assert {
        tensor.name: tensor.group for tensor in draft_blueprint(model).tensors if not tensor.buffer
    } == {name: numbers[id(parameter)] for name, parameter in model.named_parameters()}
    assert [group.get("weight_decay") for group in groups] == [None, 0.0]
    assert all(parameter.ndim >= 2 for parameter in groups[0]["params"]) and all(
        parameter.ndim < 2 for parameter in groups[1]["params"]
    )
