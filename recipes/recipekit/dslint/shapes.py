"""Sizes in a model's config.json that limit the model's parallel degrees."""

import math
from typing import Any

from ..architectures.shrink import NUM_LAYERS_KEYS
from ..spec.recipe import FLASH_KERNELS
from ..spec.task_specs import PACKED


def limiting_config(model_config: dict[str, Any] | None, rows: str) -> dict[str, Any] | None:
    """Return the config whose numbers limit a task with this kind of rows.

    For a model of text and images, this is the config of the part that the task trains.
    """
    tower = (model_config or {}).get("vision_config")
    if rows == PACKED or model_config is None or not isinstance(tower, dict):
        return model_config
    return {key: value for key, value in model_config.items() if key != "text_config"} | tower


def sharded_sizes(model_config: dict[str, Any] | None, seq_len: int) -> dict[str, dict[str, int]]:
    """Return the sizes that an axis's degree must divide: axis -> name -> number (0 if unknown)."""
    heads = read_config_size(model_config, "num_attention_heads", "n_head")
    return {
        "tp": {
            "attention heads": heads,
            "key-value heads": read_config_size(model_config, "num_key_value_heads") or heads,
            "columns of the feed-forward layer": read_config_size(
                model_config, "intermediate_size", "n_inner"
            ),
        },
        "sp": {"attention heads": heads, "seq_len": seq_len},
        "ep": {
            "experts": read_config_size(
                model_config,
                "num_experts",
                "num_local_experts",
                "n_routed_experts",
                "moe_num_experts",
            )
        },
    }


def common_divisors(*numbers: int) -> list[int]:
    """Return the common divisors of the numbers, where 0 means that a number is unknown.

    Every degree divides an unknown number.
    """
    common = math.gcd(*numbers)
    return [degree for degree in range(1, common + 1) if common % degree == 0]


def dense_mask_bytes(attention: str, rows: int, seq_len: int, width: int) -> int:
    """Return the bytes of a rank's (rows, 1, seq_len, seq_len) masks during attention.

    `width` is the number of bytes per number in the model. For packed documents, transformers
    5.22.2 builds a mask of bools (masking_utils.sdpa_mask), for any sp. torch's sdpa and eager
    attention add numbers to the scores, so each layer also has a bias in the model's dtype.
    FlashAttention, including varlen, needs neither the mask nor the bias. If `auto` becomes sdpa,
    the check runs again (model/attention.py).
    """
    return (
        0
        if attention in ("auto", "varlen", "flash_attention_2", *FLASH_KERNELS)
        else rows * seq_len**2 * (1 + width)
    )


def count_layers(model_config: dict[str, Any] | None) -> int:
    """Return the number of layers that a pipeline can split, or 0 if unknown."""
    return read_config_size(model_config, *NUM_LAYERS_KEYS)


def read_config_size(model_config: dict[str, Any] | None, *names: str) -> int:
    """Return a number in the model's config under the first matching name, or 0 if unknown."""
    for config in (model_config or {}, (model_config or {}).get("text_config") or {}):
        for name in names:
            if isinstance(config.get(name), int):
                return config[name]
    return 0
