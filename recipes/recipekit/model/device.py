"""Whether a device computes attention without a mask."""

from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.attention import MOST_HEAD_DIM
from .empty import config_of


@dataclass(frozen=True)
class Activations:
    """The tensors that attention layers compute on: `rows` is (B, T) of a micro-batch."""

    dtype: torch.dtype
    device: torch.device
    rows: tuple[int, int] = (1, 1)


def unfit_here(model_config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> str:
    """Says why varlen does not run on this device, or "": a CPU takes all."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda":
        return f"not made for a device of type {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return (
            f"FlashAttention computes in bf16 or fp16, not in {str(dtype).removeprefix('torch.')}"
        )
    if torch.cuda.is_available() and (
        torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        return "FlashAttention 2 is for NVIDIA's cards of compute capability 8.0 and above"
    if (size := largest_head(config_of(model_config))) > MOST_HEAD_DIM:
        return f"heads of {size} numbers, and FlashAttention takes {MOST_HEAD_DIM}"
    return ""


def largest_head(config: Any) -> int:
    """Finds the most numbers that a head of the model has, under whatever name its config.json has
    them.
    """
    inner = config.get_text_config(decoder=True)
    text: dict[str, Any] = inner.to_dict()
    named = [
        value for key, value in text.items() if key.endswith("head_dim") and isinstance(value, int)
    ]
    # gpt2 calls them n_embd and n_head
    hidden, heads = getattr(inner, "hidden_size", None), getattr(inner, "num_attention_heads", None)
    derived = (
        hidden // heads
        if not named and isinstance(hidden, int) and isinstance(heads, int) and heads
        else 0
    )
    return max(
        [derived, (text.get("qk_nope_head_dim") or 0) + (text.get("qk_rope_head_dim") or 0), *named]
    )
