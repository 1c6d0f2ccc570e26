"""Workarounds for peft features that have no hook, tested on a small model's adapter."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from recipekit.compat import peft as compat
from torch import nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled


def model_of() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def test_a_config_is_checked_before_peft_makes_layers() -> None:
    model, config = model_of(), LoraConfig(target_modules=["0"])
    seen: list[Any] = []

    def check(given: Any) -> None:
        seen.append(given)
        raise ValueError("not this one")

    with compat.checked_configs(check), pytest.raises(ValueError, match="not this one"):
        get_peft_model(model, config)
    assert seen == [config] and type(model[0]) is nn.Linear
    assert type(get_peft_model(model, config).base_model.model[0]) is not nn.Linear


def test_peft_hears_of_zero3() -> None:
    with compat.known_to_peft({"zero_optimization": {"stage": 3}}):
        assert is_deepspeed_zero3_enabled()
    assert not is_deepspeed_zero3_enabled()


def test_a_copied_layer_is_merged_and_the_model_stays() -> None:
    made = get_peft_model(model_of(), LoraConfig(target_modules=["0"], init_lora_weights=False))
    layer: Any = made.base_model.model[0]
    layer.register_forward_pre_hook(lambda *_: None)
    tensors = {f"0.{name}": value.detach().clone() for name, value in layer.named_parameters()}
    before = layer.base_layer.weight.detach().clone()
    whole = compat.copied(layer, tensors, "0.")
    assert not whole._forward_pre_hooks and len(layer._forward_pre_hooks) == 1
    whole.merge()
    merged, x = whole.get_base_layer(), torch.ones(4)
    torch.testing.assert_close(merged(x), layer(x))
    assert torch.equal(layer.base_layer.weight, before) and layer.merged_adapters == []
