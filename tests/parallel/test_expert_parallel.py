"""A model with sharded experts is trained, saved and exported like the full model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from built_models import build_model
from parity import accumulating, compare, recipe_for, reference, train_in_layout
from recipekit.architectures import families
from recipekit.dslint import check as ds_config
from recipekit.dslint import resolve
from recipekit.engine.unused_parameters import compare_parameters
from recipekit.model.empty import empty_model
from recipekit.optim.groups import parameter_groups
from recipekit.parallel.expert import check_expert_parallel
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import make_mesh
from recipekit.spec.recipe import Recipe
from shipped_jsons import strategy
from tiny_models import ds_config as ds
from tiny_models import tiny_config

CASES = [
    ("ep2 zero0", 2, "zero0"),
    ("ep2 zero1", 2, "zero1"),
    ("ep2 zero3", 2, "zero3"),
    ("ep2 in dp4 zero2", 4, "zero2"),
]
SLOW = ("ep2 zero0", "ep2 zero3", "ep2 in dp4 zero2")


@pytest.mark.parametrize(
    ("world", "file"),
    [
        pytest.param(*case[1:], id=case[0], marks=pytest.mark.slow if case[0] in SLOW else ())
        for case in CASES
    ],
)
def test_divided_experts_train_like_plain_pytorch(pools, tmp_path, world, file):
    """The run stops after step 5 and resumes, so the saved experts must be the trained experts."""
    for stop_at in (5, 0):
        recipe = recipe_for("moe", **accumulating(world, ep=2), stop_at=stop_at)
        assert (
            pools.run(
                world,
                train_in_layout,
                recipe=recipe,
                config=strategy(file),
                out=str(tmp_path / "run"),
            )
            == [0] * world
        )
    compare(tmp_path / "run", reference("moe"))


@pytest.mark.slow
def test_whole_experts_train_like_plain_pytorch_under_zero3(pools, tmp_path):
    pools.run(
        2,
        train_in_layout,
        recipe=recipe_for("moe", **accumulating(2)),
        config=strategy("zero3"),
        out=str(tmp_path / "run"),
    )
    compare(tmp_path / "run", reference("moe"))


def config_of(family: str) -> dict[str, Any]:
    return (
        tiny_config(family)
        if family == "moe"
        else families.tiny_config(family, 264) | {"dtype": "float32"}
    )


def train_starved(family: str, stage: int, ep: int) -> list[float]:
    """Return the losses of two steps in which all of a rank's tokens use the same two experts.

    Rank 0's tokens use the first two experts. Rank 1's tokens use the last two (with ep the first
    two).
    """
    import deepspeed
    import torch.distributed as dist
    from deepspeed.moe.ep_router import TokenChoiceTopKRouter
    from recipekit.parallel.groups import ProcessGroups

    world, rank = dist.get_world_size(), dist.get_rank()
    groups = ProcessGroups(make_mesh(world, ep=ep), "cpu")
    config = ds(stage, world) | (
        {"expert_parallel": {"enabled": True, "autoep_size": ep}} if ep > 1 else {}
    )
    built = build_model(
        Recipe(model="none", init="random", ep=ep),
        config_of(family),
        groups,
        config,
        torch.device("cpu"),
    )
    trained: Any = parameter_groups(built.model)
    engine: Any = deepspeed.initialize(
        model=built.model, model_parameters=trained, config=config, dist_init_required=False
    )[0]
    favourites = torch.tensor([0, 1] if rank == 0 or ep > 1 else [2, 3])
    routers = [
        module for module in built.model.modules() if type(module).__name__.endswith("Router")
    ]
    assert len(routers) == 4

    def send(module: Any, inputs: Any, output: Any) -> Any:
        if isinstance(module, TokenChoiceTopKRouter):
            scores, chosen, _ = output
            chosen = favourites.repeat(len(chosen), 1)
            return scores, chosen, torch.bincount(chosen.flatten(), minlength=4).to(output[2].dtype)
        if isinstance(output, torch.Tensor):  # DBRX returns logits
            return output + 100.0 * torch.zeros(4).index_fill(0, favourites, 1.0)
        *before, chosen = output
        return *before, favourites.repeat(len(chosen), 1)

    for router in routers:
        router.register_forward_hook(send)
    ids = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(rank))
    losses = []
    for step in (1, 2):
        with compare_parameters(engine, groups.mesh, step, on=step == 1):
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


STARVED = [
    ("moe", 3, 1),
    ("olmoe", 3, 1),
    ("dbrx", 3, 1),
    ("moe", 3, 2),
    ("moe", 2, 2),
    ("moe", 1, 2),
]


@pytest.mark.parametrize(("family", "stage", "ep"), STARVED)
def test_an_expert_without_tokens_on_a_rank_does_not_hang_the_others(pools, family, stage, ep):
    """OLMoE's block is not among DeepSpeed's default ZeRO-3 leaf modules.

    Its experts are one fused tensor, which needs no leaf module. DBRX's experts need a leaf module.
    """
    for losses in pools.run(2, train_starved, timeout=60, family=family, stage=stage, ep=ep):
        assert losses[1] < losses[0]


def export_untrained(family: str, out: str) -> list[str]:
    """Export a model with sharded experts and random weights and buffers.

    Return the names of the tensors that changed.
    """
    import deepspeed
    from recipekit.data.processors import byte_tokenizer
    from recipekit.model.export import WeightFormat, export
    from recipekit.model.small_files import Origin, collect_small_files
    from recipekit.parallel.groups import ProcessGroups
    from safetensors.torch import load_file

    groups = ProcessGroups(make_mesh(2, ep=2), "cpu")
    config = ds(1, 2) | {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    built = build_model(
        Recipe(model="none", init="random", ep=2),
        config_of(family),
        groups,
        config,
        torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(1)
    saved = built.model.state_dict()
    for name, buffer in built.model.named_buffers():
        if name in saved:
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    expected = {name: value.clone() for name, value in saved.items()}
    trained: Any = parameter_groups(built.model)
    engine: Any = deepspeed.initialize(
        model=built.model, model_parameters=trained, config=config, dist_init_required=False
    )[0]
    small = collect_small_files(
        built, config_of(family), byte_tokenizer(), torch.float32, Origin(), ()
    )
    export(engine, built, groups, small, Path(out), WeightFormat(torch.float32))
    engine.destroy()
    found = load_file(Path(out) / "model.safetensors")
    return sorted(
        {
            name
            for name in expected
            if name not in found or not torch.equal(found[name], expected[name])
        }
        ^ (found.keys() - expected.keys())
    )


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_what_autoep_renames_is_exported_under_its_own_name(pools, tmp_path, family):
    """AutoEP (0.19.8) renames Qwen2-MoE's shared_expert to shared_experts.

    AutoEP also moves DeepSeek-V3's e_score_correction_bias.
    """
    assert pools.run(2, export_untrained, family=family, out=str(tmp_path / "hf")) == [[], []]


MOE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 261,
    "intermediate_size": 128,
    "num_experts": 6,
}


@pytest.mark.parametrize(
    ("world", "changes", "shape", "text"),
    [
        (8, {"ep": 4}, MOE, "ep = 4: does not divide the model's 6 experts. Use --ep 2"),
        (4, {"ep": 2}, MOE | {"num_experts": 0}, "ep = 2: this model has no experts. Use --ep 1"),
        (
            4,
            {"ep": 2, "pp": 2},
            MOE,
            (
                "ep = 2 with pp = 2: expert parallelism can be combined only with data parallelism"
                " and ZeRO. Use --ep 1, or --pp 1"
            ),
        ),
        (
            4,
            {"ep": 2, "tp": 2},
            MOE,
            (
                "ep = 2 with tp = 2: expert parallelism can be combined only with data parallelism"
                " and ZeRO. Use --ep 1, or --tp 1"
            ),
        ),
        (4, {"ep": 2}, MOE, None),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_the_nearest(world, changes, shape, text):
    recipe = Recipe(model="org/model", seq_len=64, global_batch=world, **changes)
    problems = [
        str(problem)
        for problem in ds_config.lint_config(
            ds_config.LintInput(strategy("zero1"), world=world, recipe=recipe, model_config=shape)
        )
    ]
    assert problems == ([text] if text else [])


def test_the_resolved_json_carries_the_block():
    recipe, mesh = Recipe(model="org/model", global_batch=4, ep=2), make_mesh(4, ep=2)
    config = strategy("zero2") | {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    assert (
        ds_config.lint_config(
            ds_config.LintInput(config, mesh=mesh, recipe=recipe, model_config=MOE)
        )
        == []
    )
    assert resolve.resolve_ds_config(config, recipe, mesh, MOE)[0]["expert_parallel"] == {
        "enabled": True,
        "autoep_size": 2,
    }
    assert (
        "expert_parallel"
        not in resolve.resolve_ds_config(strategy("zero2"), recipe, make_mesh(4), MOE)[0]
    )


def test_experts_that_autoep_cannot_take_apart_are_refused():
    """AutoEP would fail with a traceback, because OLMoE matches several of its presets.

    For LFM2-MoE AutoEP would warn and leave the experts unsharded.
    """
    refused = {
        "gpt_oss": "not laid out",
        "olmoe": "several of its presets fit.* AutoEP supports deepseek_v2, deepseek_v3, ",
        "lfm2_moe": "finds no experts",
    }
    for config, says in (
        (tiny_config("llama"), "no experts"),
        *((config_of(family), says) for family, says in refused.items()),
    ):
        with pytest.raises(ConfigError, match=says):
            check_expert_parallel(empty_model(config, "eager"), 2)
