"""Configs for model types without a published config, completed where defaults are missing."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..spec.task_specs import TASKS
from .lookup import CAUSAL_LM_CLASS, model_types_of
from .shrink import shrink

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Missing values in transformers 5.22.2's default configs, without which no model can be built and
# run.
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QWEN4_INDEXER = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 64,
}
MISSING_DEFAULTS = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 500000.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": QWEN4_INDEXER},
    "qwen4_exp_text": QWEN4_INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
}


def default_config(model_type: str, task: str = "pretrain") -> Any:
    """Return a model type's default config for a task, a `PreTrainedConfig`.

    For causal tasks, this is the language model's config if that config alone builds the model.
    """
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**MISSING_DEFAULTS.get(model_type, {}))
    if (auto_class := TASKS[task].auto_class) == CAUSAL_LM_CLASS:
        return _language_config(config)
    # If a type has several classes, an Auto class needs this name.
    config.architectures = [model_types_of(auto_class)[model_type][0]]
    return config


def _language_config(config: "PreTrainedConfig") -> Any:
    """Return the config of the language model in a `PreTrainedConfig`.

    The full config is returned if only the full config builds the model.
    """
    text = config.get_text_config(decoder=True)
    return (
        text
        if text.model_type in model_types_of(CAUSAL_LM_CLASS)
        and text.model_type != config.model_type
        else config
    )


def tiny_config(model_type: str, vocab_size: int = 0, task: str = "pretrain") -> dict[str, Any]:
    """Return a tiny model's config.json for a type that transformers knows, without using the hub.

    `vocab_size` is used for token tasks.
    """
    config, facts = default_config(model_type, task), TASKS[task]
    if facts.reads_tokens:
        return tiny_copy(config, vocab_size, facts.tiny)
    return shrink(config.to_dict(), limits=facts.tiny)


def tiny_copy(
    config: "PreTrainedConfig", vocab_size: int, limits: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the config.json of a tiny copy of the language model in a `PreTrainedConfig`.

    `limits` has the same meaning as in `shrink`. Raises `ConfigError` in the same cases as
    `shrink`.
    """
    config = _language_config(config)
    text = config.get_text_config(decoder=True)
    if text is config or "text_config" not in config.sub_configs:
        return shrink(config.to_dict(), vocab_size, limits)
    # text_config is the only part that the class uses
    return config.to_dict() | {"text_config": shrink(text.to_dict(), vocab_size)}
