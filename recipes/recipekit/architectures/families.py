"""The config of a model type that has no published one at hand: what its class does not fill in by
itself.
"""

from typing import Any

from ..spec.task_specs import TASKS
from .lookup import CAUSAL, types_of
from .shrink import shrink

# Default configs of transformers 5.22.2 from which no model can be built and run, and what they
# lack.
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QWEN4_INDEXER = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 64,
}
LACKING = {
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
    """Makes the default config of a model type for a task, a `PreTrainedConfig`: for causal ones
    that of its language model, if that builds one by itself.
    """
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**LACKING.get(model_type, {}))
    if (auto_class := TASKS[task].auto_class) == CAUSAL:
        return _language_config(config)
    # of a type with several an Auto class wants to know which
    config.architectures = [types_of(auto_class)[model_type][0]]
    return config


def _language_config(whole: Any) -> Any:
    """Finds the config of the language model in a `PreTrainedConfig`; the config of the whole if
    only that builds the model.
    """
    text = whole.get_text_config(decoder=True)
    return (
        text
        if text.model_type in types_of(CAUSAL) and text.model_type != whole.model_type
        else whole
    )


def tiny_config(model_type: str, vocab_size: int = 0, task: str = "pretrain") -> dict[str, Any]:
    """Makes the config.json of a tiny model of a type that transformers knows, without the hub;
    `vocab_size` is for tasks of tokens.
    """
    config, most = default_config(model_type, task), TASKS[task].tiny
    return shrink(config.to_dict(), vocab_size, most) if most else tiny_copy(config, vocab_size)


def tiny_copy(config: Any, vocab_size: int) -> dict[str, Any]:
    """Makes the config.json of a tiny copy of the language model in a `PreTrainedConfig`.

    Raises `Refusal` as `shrink` does.
    """
    config = _language_config(config)
    text = config.get_text_config(decoder=True)
    if text is config or "text_config" not in config.sub_configs:
        return shrink(config.to_dict(), vocab_size)
    # the only part of it that the class takes
    return config.to_dict() | {"text_config": shrink(text.to_dict(), vocab_size)}
