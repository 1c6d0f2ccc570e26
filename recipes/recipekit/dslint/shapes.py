"""Reads from a model's config.json what limits its parallel degrees."""

import math
from typing import Any

from ..architectures.shrink import LAYERS
from ..spec.task_specs import PACKED


def limiting(model_config: dict[str, Any] | None, rows: str) -> dict[str, Any] | None:
    """Returns the config whose numbers limit a task with such rows: of a model of text and pictures
    the part that the task trains.
    """
    tower = (model_config or {}).get("vision_config")
    if rows == PACKED or model_config is None or not isinstance(tower, dict):
        return model_config
    return {key: value for key, value in model_config.items() if key != "text_config"} | tower


def divisible(model_config: dict[str, Any] | None, seq_len: int) -> dict[str, dict[str, int]]:
    """Returns what the degree of an axis has to divide: axis -> name -> number, 0 if it is not
    known.
    """
    heads = shape_of(model_config, "num_attention_heads", "n_head")
    return {
        "tp": {
            "attention heads": heads,
            "key-value heads": shape_of(model_config, "num_key_value_heads") or heads,
            "columns of the feed-forward layer": shape_of(
                model_config, "intermediate_size", "n_inner"
            ),
        },
        "sp": {"attention heads": heads, "seq_len": seq_len},
        "ep": {
            "experts": shape_of(
                model_config,
                "num_experts",
                "num_local_experts",
                "n_routed_experts",
                "moe_num_experts",
            )
        },
    }


def divisors(*numbers: int) -> list[int]:
    """Lists the common divisors of the numbers; 0 stands for an unknown number, which everything
    divides.
    """
    common = math.gcd(*numbers)
    return [degree for degree in range(1, common + 1) if common % degree == 0]


def mask_bytes(attention: str, rows: int, seq_len: int, width: int) -> int:
    """Counts the bytes of the (rows, 1, seq_len, seq_len) masks that a rank holds while a layer
    attends.

    `width`: bytes of a number of the model. For packed documents transformers 5.22.2 builds a mask
    of bools (masking_utils.sdpa_mask), whatever sp is. torch's sdpa and eager attention add numbers
    to the scores, so each layer also has a bias in the model's dtype. FlashAttention needs neither,
    and varlen is that; where `auto` becomes sdpa, it is asked again (model/attention.py).
    """
    return (
        0
        if attention in ("auto", "varlen", "flash_attention_2")
        else rows * seq_len**2 * (1 + width)
    )


def count_layers(model_config: dict[str, Any] | None) -> int:
    """Counts the layers that a pipeline may divide; 0 if they are not known."""
    return shape_of(model_config, *LAYERS)


def shape_of(model_config: dict[str, Any] | None, *names: str) -> int:
    """Reads a number of the model's config under one of several names; 0 if it is not known."""
    for config in (model_config or {}, (model_config or {}).get("text_config") or {}):
        for name in names:
            if isinstance(config.get(name), int):
                return config[name]
    return 0
