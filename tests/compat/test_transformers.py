"""Attributes of transformers that we replace, tested on small models and on transformers'
functions.
"""

from typing import Any

import pytest
import torch
import transformers
from recipekit.compat import transformers as compat
from torch import nn
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.initialization import trunc_normal_
from transformers.modeling_layers import GradientCheckpointingLayer as RecomputedLayer
from transformers.utils.deprecation import deprecate_kwarg

STYLES: Any = ALL_PARALLEL_STYLES


def config_of() -> Any:
    return transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def test_a_config_names_its_attention() -> None:
    config = config_of()
    compat.set_attention(config, "eager")
    model = transformers.LlamaForCausalLM(config)
    assert model.config._attn_implementation == "eager"


def test_a_built_model_computes_with_another_attention() -> None:
    """Only eager attention returns its probabilities."""
    model = transformers.LlamaForCausalLM._from_config(config_of(), attn_implementation="sdpa")
    parts = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    ids = torch.arange(6).unsqueeze(0)
    compat.change_attention(model, parts, "eager")
    output = model(input_ids=ids, output_attentions=True)
    assert output.attentions[0].shape == (1, 4, 6, 6)


def test_a_recomputed_layer_runs_to_its_end() -> None:
    """torch's recomputation stops as soon as the last tensor is saved."""
    ends = []
    for whole in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config_of()).train()
        compat.recompute_layers(model)
        layers = [each for each in model.modules() if isinstance(each, RecomputedLayer)]
        ended: list[int] = []
        for layer in layers:
            if whole:
                compat.without_early_stop(layer)
            layer.mlp.register_forward_hook(lambda *_, ended=ended: ended.append(1))  # type: ignore[union-attr]
        model(torch.arange(8).view(1, 8)).logits.sum().backward()
        ends.append(len(ended))
    assert ends == [2, 4]


def test_an_attention_is_called_by_another_name() -> None:
    config = config_of()
    compat.set_attention(config, "eager")
    module: Any = nn.Module()
    module.config, module.num_key_value_groups = config, 2
    with compat.attention_called(module, "flash_attention_2", 1):
        assert (config._attn_implementation, module.num_key_value_groups) == (
            "flash_attention_2",
            1,
        )
    assert (config._attn_implementation, module.num_key_value_groups) == ("eager", 2)


def test_a_module_counts_its_own_part() -> None:
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4
    )
    model = transformers.T5EncoderModel(config)
    attention: Any = model.encoder.block[0].layer[0].SelfAttention
    compat.set_count(attention, "n_heads", 2)
    assert attention.n_heads == 2 and config.num_heads == 4


def test_a_style_sums_the_incoming_gradient() -> None:
    style = STYLES["replicated_with_grad_allreduce"]
    installed: list[Any] = []

    def install(self: Any, module: Any, mesh: Any) -> Any:
        installed.append((module, mesh))
        return module

    before = type(style).install_forward
    with compat.gradients_summed_by(install):
        style.install_forward("module", "mesh")
    assert installed == [("module", "mesh")] and type(style).install_forward is before


def test_a_style_is_asked_for_its_placement() -> None:
    linear = nn.Linear(4, 6)
    with compat.placements_noted() as placed:
        STYLES["colwise"].shard_param(linear, "weight", None)
        STYLES["rowwise"].shard_param(linear, "weight", None)
    assert [placement.dim % 2 for placement in placed] == [0, 1]
    assert linear.weight.shape == (6, 4)


def test_trunc_normal_is_seen_on_meta() -> None:
    weight = torch.empty(3, device="meta")
    trunc_normal_(weight)
    assert weight._version == 0, "transformers or torch shows the call: the workaround can go"
    with compat.seen_on_meta():
        trunc_normal_(weight)
    assert weight._version == 1
    trunc_normal_(weight)
    assert weight._version == 1


def test_a_plan_is_asked_for_the_style_of_a_name() -> None:
    plan = {"layers.*.mlp.up": "colwise", "layers.*.scale": "rowwise"}
    assert compat.without_layer_numbers("layers.3.mlp.w1.0") == "layers.*.mlp.w1.*"
    assert compat.style_of("layers.3.mlp.up.weight", plan) == "colwise"
    assert compat.style_of("layers.3.mlp.up", plan, is_weight=False) == "colwise"
    assert compat.style_of("layers.3.mlp.up.weight", plan, is_weight=False) is None
    assert compat.style_of("layers.3.mlp.down", plan) is None


def test_a_plan_of_patterns_shards_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The styles are asked in the order that their own function has, for every layer."""
    model = transformers.LlamaForCausalLM(config_of())
    asked: list[tuple[str, str]] = []
    names = {id(module): name for name, module in model.named_modules()}
    kind = type(STYLES["colwise"])

    def shard(style: Any, module: Any, param: str, mesh: Any) -> None:
        asked.append((names[id(module)], param))

    def install(style: Any, module: Any, mesh: Any) -> Any:
        asked.append((names[id(module)], "forward"))
        return module

    monkeypatch.setattr(kind, "shard_param", shard)
    monkeypatch.setattr(kind, "install_forward", install)
    monkeypatch.setattr(kind, "validate_param", lambda *_, **__: None, raising=False)
    compat.shard_by_plan(model, None, {"model.layers.*.mlp.up_proj": "colwise"})  # type: ignore[arg-type]
    assert asked == [
        (f"model.layers.{layer}.mlp.up_proj", what)
        for layer in range(2)
        for what in ("weight", "forward")
    ]


def test_the_style_that_hands_out_shards_is_known() -> None:
    known = {name for name in list(STYLES) if compat.only_hands_out_shards(STYLES[name])}
    assert known == {"local_params"} & set(STYLES)


def test_a_layer_with_another_forward_is_recomputed() -> None:
    """The number of calls is two for each layer, with and without another forward."""
    counts, gradients = [], []
    for replaced in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config_of()).train()
        compat.recompute_layers(model)
        called: list[Any] = []
        for layer in (each for each in model.modules() if isinstance(each, RecomputedLayer)):
            layer.mlp.register_forward_pre_hook(lambda *_, called=called: called.append(1))  # type: ignore[union-attr]
            if replaced:
                forward = compat.forward_of_layer(layer)
                compat.set_layer_forward(
                    layer,
                    lambda *args, forward=forward, layer=layer, **more: forward(
                        layer, *args, **more
                    ),
                )
        model(torch.arange(8).view(1, 8)).logits.sum().backward()
        counts.append(len(called))
        model.eval()
        model(torch.arange(8).view(1, 8))
        counts.append(len(called))
        gradients.append(model.model.layers[0].mlp.up_proj.weight.grad)
    assert counts == [4, 6, 4, 6]
    assert torch.equal(*gradients)


def test_the_forward_inside_old_names_is_found() -> None:
    def own(cache: int = 0) -> int:
        return cache

    wrapped = deprecate_kwarg("old", "99.0", new_name="cache")(own)
    assert compat.without_old_names(wrapped) is own and compat.without_old_names(own) is own
    attention = transformers.LlamaForCausalLM(config_of()).model.layers[0].self_attn
    found: Any = compat.without_old_names(type(attention).forward)
    assert "apply_rotary_pos_emb" in found.__code__.co_names
