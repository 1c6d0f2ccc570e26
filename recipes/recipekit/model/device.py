"""Device support for varlen attention, which does not need a mask."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.attention import MAX_HEAD_DIM
from ..spec.recipe import FLASH_KERNELS
from .empty import config_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


# Major compute capabilities that torch 2.13 accepts for each choice of `attention`. Its files
# nn/attention/_fa3.py and _fa4.py check them.
FLASH_CAPABILITIES = {"flash3": (9,), "flash4": (9, 10)}


@dataclass(frozen=True)
class Activations:
    """Properties of the tensors that attention layers process.

    `rows` is a micro-batch's shape, (B, T).
    """

    dtype: torch.dtype
    device: torch.device
    rows: tuple[int, int] = (1, 1)


def device_fallback_reason(
    model_config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> str:
    """Return why this device does not support varlen, or "" if it does.

    A CPU supports varlen for every model.
    """
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
    if (size := max_head_dim(config_of(model_config))) > MAX_HEAD_DIM:
        return f"heads of {size} numbers, and FlashAttention takes {MAX_HEAD_DIM}"
    return ""


def flash_refusal(attention: str, device: torch.device) -> str:
    """Return why a device does not support the requested FlashAttention kernels, or ""."""
    if attention not in FLASH_KERNELS:
        return ""
    majors = FLASH_CAPABILITIES[attention]
    rule = (
        f"requires an NVIDIA GPU of compute capability {' or '.join(f'{one}.0' for one in majors)}"
    )
    if device.type != "cuda":
        return f"{rule}, and this run uses a {device.type}"
    if not torch.cuda.is_available():  # a dry run for a device that is not here
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or major not in majors:
        return f"{rule}, and this GPU has {major}.{minor}"
    return ""


def max_head_dim(config: "PreTrainedConfig") -> int:
    """Return the model's largest head dimension, under any of its names in config.json."""
    inner = config.get_text_config(decoder=True)
    text: dict[str, Any] = inner.to_dict()
    named = [
        value for key, value in text.items() if key.endswith("head_dim") and isinstance(value, int)
    ]
    # In GPT-2's config.json these values are named n_embd and n_head. The attributes below also
    # exist for GPT-2.
    hidden, heads = getattr(inner, "hidden_size", None), getattr(inner, "num_attention_heads", None)
    derived = (
        hidden // heads
        if not named and isinstance(hidden, int) and isinstance(heads, int) and heads
        else 0
    )
    return max(
        [derived, (text.get("qk_nope_head_dim") or 0) + (text.get("qk_rope_head_dim") or 0), *named]
    )
