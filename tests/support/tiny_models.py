"""Configs and files of tiny models with random weights."""

from pathlib import Path
from typing import Any

import torch
from built_models import build_model
from recipekit.architectures.lookup import SHIPPED
from recipekit.architectures.shrink import BYTE_VOCAB, shrink
from recipekit.spec.recipe import Recipe

CONFIGS = {
    "llama": "meta-llama--Llama-3.1-8B",
    "llama_tied": "meta-llama--Llama-3.2-1B",
    "qwen3": "Qwen--Qwen3-0.6B",
    "gpt2": "openai-community--gpt2",
    "moe": "Qwen--Qwen3-30B-A3B",
}


def tiny_config(kind: str) -> dict:
    import json

    return shrink(
        json.loads((SHIPPED / f"{CONFIGS[kind]}.json").read_text()), vocab_size=BYTE_VOCAB
    )


def ds_config(stage: int, world: int = 1, tp: int = 1, **zero: object) -> dict:
    return {
        "train_batch_size": world // tp,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }


def save_tiny(folder: Path, kind: str = "llama", seed: int = 5, **changes: Any) -> Any:
    """Save a tiny model with random weights, as transformers does; return the model."""
    from recipekit.architectures import families

    config = (
        families.tiny_config(kind, 264) if kind in ("mixtral", "qwen3_moe") else tiny_config(kind)
    )
    config |= changes
    model = build_model(
        Recipe(model="none", init="random", seed=seed),
        config,
        None,
        ds_config(0),
        torch.device("cpu"),
    ).model
    model.save_pretrained(folder, max_shard_size="500KB")
    return model
