"""Adapters of peft around tiny models."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from recipekit.model.adapter import AdapterRequest, apply_adapter
from recipekit.model.empty import empty_model
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from tiny_models import ds_config, tiny_config

NUMBERS: dict[str, Any] = dict(
    tokenizer="bytes",
    seq_len=64,
    global_batch=4,
    steps=4,
    lr=1e-3,
    eval_every=4,
    eval_rows=4,
    wandb=False,
)


def add_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )


CASES: dict[str, tuple[str, dict[str, Any]]] = {  # (model, fields of LoraConfig)
    "every linear layer": ("llama", {"target_modules": "all-linear"}),
    "rank-stabilised": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
    "DoRA": ("llama", {"target_modules": ["v_proj", "up_proj"], "use_dora": True}),
    "DoRA of Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "own ranks and alphas": (
        "llama",
        {
            "target_modules": ["q_proj", "o_proj"],
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"o_proj": 3},
        },
    ),
    "some layers": (
        "llama",
        {
            "target_modules": ["q_proj", "v_proj"],
            "layers_to_transform": [1],
            "layers_pattern": "layers",
        },
    ),
    "all biases": ("gpt2", {"target_modules": ["c_attn"], "bias": "all"}),
    "biases of LoRA": ("gpt2", {"target_modules": ["c_attn"], "bias": "lora_only"}),
    "a bias of B": ("gpt2", {"target_modules": ["c_attn"], "lora_bias": True}),
    "head saved": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "norms saved": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "norm"]},
    ),
    "both ends saved": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "both ends": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "some tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 70]}),
    "tied, embedding saved": (
        "qwen3",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "tied, head saved": ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tied, both saved": (
        "qwen3",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "tied, saved as one": (
        "qwen3",
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "tied, some tokens": (
        "qwen3",
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 70]},
    ),
    "drawn orthogonal": (
        "llama",
        {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    ),
    "drawn at random": ("llama", {"target_modules": ["q_proj"], "init_lora_weights": False}),
    "experts": (
        "moe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "experts by all-linear": ("moe", {"target_modules": "all-linear"}),
}


def wrapped(model: Any, fields: dict[str, Any]) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return get_peft_model(
            model, LoraConfig(**({"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM"} | fields))
        )


def recipe_with(fields: dict[str, Any], **more: Any) -> Recipe:
    return Recipe(
        **(
            {
                "model": "none",
                "init": "random",
                "attention": "eager",
                "adapt": partial(wrapped, fields=fields),
            }
            | more
        )
    )


def trained(model: Any) -> Any:
    """Change every trained weight, as training would."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def logits_of(model: Any) -> torch.Tensor:
    ids = torch.arange(64).reshape(2, 32) * 3 % 256
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits.float()


def refused(adapt: Callable[[Any], Any], kind: str = "llama", stage: int = 0, **more: Any) -> str:
    model = empty_model(tiny_config(kind), "eager", "none")
    with pytest.raises(ConfigError) as caught, warnings.catch_warnings(action="ignore"):
        apply_adapter(model, AdapterRequest(adapt, **more), ds_config(stage))
    return str(caught.value)


Q = ["q_proj"]
