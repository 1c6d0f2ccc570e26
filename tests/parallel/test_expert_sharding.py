"""The planned sharding of experts equals AutoEP's: names, shapes, values and optimizer groups."""

from typing import Any

import pytest
import torch
from built_models import build_model
from recipekit.architectures import families
from recipekit.optim.groups import parameter_groups
from recipekit.parallel import blueprint as plan
from recipekit.parallel.blueprint import Blueprint, Layout, MoEBlock, Tensor, optimizer_groups
from recipekit.parallel.expert_sharding import shard_experts
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe
from tiny_models import ds_config

FAMILIES = [
    "qwen3_moe",
    "mixtral",
    "qwen2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "minimax_m3_vl_text",
]


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_divided_model_is_what_autoep_makes(kind):
    """The shards equal AutoEP's shards for all families that AutoEP supports (recipes/SUPPORT.md).

    The reference is DeepSpeed's own replacement, and the order in its engine's optimizer.
    """
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.runtime.engine import _remap_param_groups_after_module_replacement

    config = families.tiny_config(kind, 264) | {"dtype": "float32"}
    built = build_model(
        Recipe(model="none", init="random"), config, None, ds_config(0), torch.device("cpu")
    )
    model: Any = built.model
    before, groups = (
        {name: value.clone() for name, value in model.state_dict().items()},
        parameter_groups(model),
    )
    auto = AutoEP(model, AutoEPConfig(enabled=True, autoep_size=2))
    sources = auto.replace_moe_layers(auto.ep_parser(), ep_size=2, ep_rank=1, collect_sources=True)
    _remap_param_groups_after_module_replacement(groups, model, sources)
    divided, parts = shard_experts(built.blueprint, 2)
    state, names = (
        model.state_dict(),
        {id(parameter): name for name, parameter in model.named_parameters()},
    )
    assert {tensor.name: tensor.shape for tensor in divided.tensors} == {
        name: tuple(state[name].shape) for name in state if name not in divided.aliases
    }
    assert set(divided.aliases) <= set(state)
    for number, group in enumerate(groups):
        assert [names[id(parameter)] for parameter in group["params"]] == [
            tensor.name for tensor in divided.tensors if tensor.group == number
        ]
    for name, part in parts.items():
        whole = before[part.source.name]
        own = whole[len(whole) // 2 :] if part.source.expert else whole
        assert torch.equal(own[:, slice(*part.rows)] if part.rows else own, state[name]), name


def test_experts_that_autoep_does_not_take_are_no_blocks():
    for kind in ("olmoe", "dbrx", "llama"):
        built = build_model(
            Recipe(model="none", init="random"),
            families.tiny_config(kind, 264),
            None,
            ds_config(0),
            torch.device("cpu"),
        )
        assert built.blueprint.blocks == () and built.blueprint.num_experts == 0


def test_large_experts_fall_into_several_groups_as_in_deepspeed(monkeypatch):
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    monkeypatch.setattr(plan, "MAX_EXPERT_GROUP_NUMEL", 18)
    # Shapes of gate and up. The shapes for down are experts x 1 x half the width.
    sizes = [(4, 10, 1), (4, 20, 1), (4, 4, 1), (4, 8, 1), (4, 2, 3)]
    tensors, blocks = [Tensor("embed", (3, 3), 0)], []
    for number, shape in enumerate(sizes):
        tensors += [Tensor(f"{number}.experts.gate_up_proj", shape, 0, expert=True)]
        tensors += [
            Tensor(
                f"{number}.experts.down_proj", (shape[0], shape[2], shape[1] // 2), 0, expert=True
            )
        ]
        blocks.append(MoEBlock(str(number), {}, {}))
    divided, _ = shard_experts(Blueprint(tuple(tensors), {}, 0, False, blocks=tuple(blocks)), 2)
    parameters = {
        tensor.name: torch.nn.Parameter(torch.zeros(tensor.shape)) for tensor in divided.tensors
    }
    for tensor in divided.tensors:
        parameters[tensor.name].__dict__.update(
            {"allreduce": False, "group_name": "ep_size_2"} if tensor.expert else {}
        )
    theirs = split([{"params": list(parameters.values()), "name": "matrices"}], max_group_size=18)
    names = {id(parameter): name for name, parameter in parameters.items()}
    layout = Layout(Mesh(dp=2, ep=2), 1, "DeepSpeedZeroOptimizer", "float32")
    ours = [
        [tensor.name for tensor, _ in group]
        for group in optimizer_groups(list(divided.tensors), layout, 0)
    ]
    assert (
        ours
        == [
            [names[id(parameter)] for parameter in group["params"]]
            for group in theirs
            if group["params"]
        ]
        and len(ours) > 3
    )
