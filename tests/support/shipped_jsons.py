"""The shipped DeepSpeed JSONs, as tests change them."""

import copy
import json
from pathlib import Path
from typing import Any

from pool import ROOT
from recipekit.dslint.schema import value_at
from recipekit.spec.recipe import Recipe

FILES = sorted((ROOT / "ds_configs").glob("*.json"))


RECIPE = Recipe(
    model="org/model",
    global_batch=24,
    micro_batch=3,
    lr=7e-4,
    weight_decay=0.07,
    beta1=0.8,
    beta2=0.97,
    eps=3e-7,
    gradient_clipping=0.7,
    steps=50,
)
LLAMA = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 261,
    "intermediate_size": 128,
}


def shipped(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())


def put(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return `config` with `value` at a dotted path; missing blocks are added."""
    config = copy.deepcopy(config)
    *blocks, key = path.split(".")
    block = config
    for name in blocks:
        if not isinstance(block.get(name), dict):
            block[name] = {}
        block = block[name]
    block[key] = value
    return config


def without(config: dict[str, Any], path: str) -> dict[str, Any]:
    config = copy.deepcopy(config)
    block, _, key = path.rpartition(".")
    (value_at(config, block) if block else config).pop(key, None)
    return config


def strategy(file: str, bf16: bool = False) -> dict[str, Any]:
    """Return a shipped JSON; for fp32, remove its bf16 block and the settings that need bf16."""
    config = json.loads((Path(__file__).parents[2] / "ds_configs" / f"{file}.json").read_text())
    for block in ("offload_param", "offload_optimizer"):
        if "buffer_size" in (offload := config["zero_optimization"].get(block, {})):
            # DeepSpeed pins buffer_count buffers of this size, and a warm worker never frees the
            # buffers.
            offload["buffer_size"] = 1_000_000
    if "zero_hpz_partition_size" in (zero := config["zero_optimization"]):
        # The four ranks act as two hosts, and each rank allocates a bucket of this size.
        zero |= {"zero_hpz_partition_size": 2, "reduce_bucket_size": 1_000_000}
    if not bf16:
        config["bf16"] = {"enabled": False}
        config.pop("data_types", None)
    return config
