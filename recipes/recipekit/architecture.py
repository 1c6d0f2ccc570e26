"""The shape of a model before any of it exists: its config.json as a dict, and a tiny copy that keeps its traits."""

import json
import os
from pathlib import Path
from typing import Any

from .recipe import Recipe
from .refusal import refuse

SHIPPED = Path(__file__).parent / "architectures"


def model_config(recipe: Recipe) -> dict[str, Any] | None:
    """The model's config.json: from its folder, the shipped architectures, or the local hub cache; None if none has it.

    Raises `Refusal` for a folder without a readable config.json.
    """
    folder = Path(recipe.model)
    if folder.is_dir():
        return _read(folder / "config.json") if (folder / "config.json").exists() or not any(folder.glob("*.gguf")) else None
    if recipe.model.startswith((".", "/", "~")):
        raise refuse(f"model = {recipe.model}", "is no folder on this machine", "give a folder that holds config.json, or a hub id ORG/NAME")
    cached = sorted(_hub_cache(recipe.model).glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime)
    if cached:
        return _read(cached[-1])
    shipped = SHIPPED / (recipe.model.replace("/", "--") + ".json")
    return _read(shipped) if shipped.exists() else None


# Numbers of a config.json that a tiny model keeps small: key -> largest value.
MOST = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "rotary_dim": 16,
    "sliding_window": 64,
    "sliding_window_pattern": 4,
    "max_window_layers": 2,
    "max_position_embeddings": 2048,
    "n_positions": 2048,
}


def shrink(config: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """A few hundred thousand parameters of the same class, which tp 2 and 4 can cut: numbers fall, structural traits stay.

    Kept: tied embeddings, the ratio of query to key-value heads (up to 8), a head_dim that is not hidden_size / heads,
    sliding windows and every kind of layer, experts, soft caps, rotary type. Raises `Refusal` for a config that names its
    layers, heads or width in a way not known here.
    """
    layers = "num_hidden_layers" if "num_hidden_layers" in config else "n_layer"
    heads = "num_attention_heads" if "num_attention_heads" in config else "n_head"
    hidden = "hidden_size" if "hidden_size" in config else "n_embd"
    if unknown := [key for key in (layers, heads, hidden) if key not in config]:
        rule = f"cannot shrink a {config['model_type']}: its config.json has no {', '.join(unknown)}"
        raise refuse("--tiny", rule, "make a small model of that class, save it with save_pretrained, and give the folder with --model, without --tiny")
    queries = config[heads]
    key_values = config.get("num_key_value_heads") or queries
    ratio = min(queries // key_values, 8)  # of query to key-value heads
    tiny = config | {key: min(config[key], most) for key, most in MOST.items() if config.get(key)}
    tiny[layers] = 4
    tiny[heads] = 4 * ratio if key_values > 1 else 4
    if config.get("num_key_value_heads"):
        tiny["num_key_value_heads"] = 4 if key_values > 1 else 1  # a single one is a trait too
    head_dim = 16 if tiny[heads] <= 8 else 8 if tiny[heads] <= 16 else 4
    tiny[hidden] = head_dim * tiny[heads]
    if config.get("head_dim"):
        tiny["head_dim"] = head_dim
        if config["head_dim"] * queries != config[hidden]:
            tiny[hidden] //= 2
    for key in ("intermediate_size", "n_inner"):
        if config.get(key):
            tiny[key] = tiny[hidden] if config.get("num_local_experts") else 2 * tiny[hidden]
    if kinds := config.get("layer_types"):
        missing = [kind for kind in dict.fromkeys(kinds) if kind not in kinds[: tiny[layers]]]
        tiny["layer_types"] = kinds[: tiny[layers] - len(missing)] + missing
    for key in ("rope_parameters", "rope_scaling"):
        if "original_max_position_embeddings" in (config.get(key) or {}):
            tiny[key] = config[key] | {"original_max_position_embeddings": 512}
    tiny["vocab_size"] = vocab_size
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        tiny[key] = None  # those of the real vocabulary
    return tiny


def is_local(recipe: Recipe) -> bool:
    """True if the model's files lie on this machine: a folder, or the local hub cache."""
    return Path(recipe.model).is_dir() or any(_hub_cache(recipe.model).glob("snapshots/*/config.json"))


def _hub_cache(model: str) -> Path:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / ("models--" + model.replace("/", "--"))


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise refuse(f"model = {path.parent}", "the folder holds no config.json", "give the folder that save_pretrained wrote") from None
    except json.JSONDecodeError as error:
        raise refuse(str(path), f"is not JSON: {error}", "download the model again") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise refuse(str(path), "names no model_type", "give the config.json of a transformers model")
    return config
