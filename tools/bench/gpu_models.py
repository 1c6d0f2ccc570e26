"""The models, recipes and documents that bench_gpu.py measures and roofline.py predicts."""

from typing import Any

LLAMA = "meta-llama/Llama-3.1-8B"
QWEN, LORA = "recipes/qwen3_0_6b_zero2.py", "recipes/qwen3_0_6b_lora_zero3.py"
LORA_FLAGS = [
    "--task",
    "pretrain",
    "--deepspeed_config",
    "zero2.json",
    "--no-activation_checkpointing",
]
# The settings that differ from Llama 3.1 8B, whose config is shipped.
MODELS: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "1b": {
        "vocab_size": 50368,
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "tie_word_embeddings": True,
    },
    "8b": {},
}
# Document lengths are log-normal, as on the web. The median is exp(6.3) = 545 tokens.
MEDIAN, SPREAD, SHORTEST, LONGEST = 6.3, 1.0, 16, 16_000


def config_of(name: str) -> dict[str, Any]:
    """Return the config.json of a model in `MODELS`."""
    from recipekit.architectures.lookup import model_config

    llama = model_config(LLAMA)
    assert llama is not None, "shipped"
    return llama | MODELS[name]
