"""The models, recipes and documents that bench_gpu.py measures and roofline.py predicts."""

from typing import Any

LLAMA, MOE = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B"
QWEN, LORA = "recipes/qwen3_0_6b_zero2.py", "recipes/qwen3_0_6b_lora_zero3.py"
LORA_FLAGS = [
    "--task",
    "pretrain",
    "--deepspeed_config",
    "zero2.json",
    "--no-activation_checkpointing",
]
# The settings that differ from Llama 3.1 8B, or for "moe" from Qwen3 30B. Both configs are shipped.
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
    "moe": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
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
DRAWN = ("small", "moe")  # models with weights in files, which --tiny does not shrink
# Document lengths are log-normal, as on the web. The median is exp(6.3) = 545 tokens.
MEDIAN, SPREAD, SHORTEST, LONGEST = 6.3, 1.0, 16, 16_000


def config_of(name: str) -> dict[str, Any]:
    """Return the config.json of a model in `MODELS`."""
    from recipekit.architectures.lookup import model_config

    published = model_config(MOE if name == "moe" else LLAMA)
    assert published is not None, "shipped"
    return published | MODELS[name]
