"""Attention implementations for packed documents in transformers' AttentionInterface.

`varlen` needs no mask. A model's layers receive the result of `documents.as_attention_mask` as
their attention_mask. If they receive nothing, the documents are found by the rule that transformers
would use to create the mask.

transformers 5.22.2 does not separate documents in a bidirectional model. Each attention therefore
has a second name for such models (`bidirectional_name`). For an attention that creates a mask, the
model receives the document starts, (B, T) bool, as its attention_mask.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    packed_sequence_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .documents import as_attention_mask, cu_seqlens_from
from .varlen import Scoring, varlen

VARLEN = "varlen"
MASK_ATTENTIONS = ("sdpa", "eager")  # attentions that use a mask
MAX_HEAD_DIM = 256  # limit of FlashAttention 2
# Tensors that layers pass on but attention does not read: positions, and arguments of the model's
# own loss.
IGNORED_TENSORS = ("position_ids", "cache_position", "shift_labels", "num_items_in_batch")


class VarlenUnsupportedError(RuntimeError):
    """An attention feature that `varlen` does not support.

    `model.attention` detects such features before a run.
    """


def bidirectional_name(attention: str) -> str:
    """Return an attention's name for bidirectional models with packed documents."""
    return f"both_ways_{attention}"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    causal: bool = True,
    **more: object,
) -> tuple[Tensor, None]:
    """Compute a layer's attention, (B, heads, T, d) -> (B, T, heads, d of a value).

    Raise `VarlenUnsupportedError` for features that varlen does not support.
    """
    if dropout:
        raise VarlenUnsupportedError(f"attention dropout of {dropout}")
    if wanted := _unsupported_feature(module, causal, more):
        raise VarlenUnsupportedError(wanted)
    if attention_mask is None or attention_mask.dim() != 4 or attention_mask.dtype != torch.int32:
        raise VarlenUnsupportedError("a custom mask")
    rows, _, length, d = query.shape
    if key.shape[2] != length or value.shape[2] != length:
        raise VarlenUnsupportedError("keys of other tokens than the queries'")
    scale = d**-0.5 if scaling is None else float(scaling)
    # Autocast converts the inputs of scaled_dot_product_attention in the same way.
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (
            heads.to(torch.get_autocast_dtype(query.device.type)) for heads in (query, key, value)
        )
    width = value.shape[-1]
    # (B * T, heads, d)
    query, key, value = (
        heads.transpose(1, 2).flatten(0, 1) for heads in _pad_heads(query, key, value)
    )
    documents, longest = attention_mask[0, 0, 0], attention_mask.shape[2]
    scoring = Scoring(scale, sliding_window or 0, causal)
    output = varlen(query, key, value, documents, longest, scoring)
    return output[..., :width].unflatten(0, (rows, length)), None


def _pad_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Pad the heads to a common size that is a multiple of 8, as FlashAttention requires.

    The added zeros do not change the scores.
    """
    size = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    return tuple(
        pad(heads, (0, size - heads.shape[-1])) if heads.shape[-1] < size else heads
        for heads in (query, key, value)
    )


def _unsupported_feature(module: torch.nn.Module, causal: bool, more: dict[str, Any]) -> str:
    """Return the unsupported feature that a layer requests, or ""."""
    if more.get("softcap") is not None:
        return "a soft cap"
    back_only = (
        getattr(module, "is_causal", True) if more.get("is_causal") is None else more["is_causal"]
    )
    if bool(back_only) != causal:
        return "tokens that see later ones" if causal else "tokens that see none behind them"
    return next(
        (
            f"{name} of its own"
            for name, value in more.items()
            if torch.is_tensor(value) and name not in IGNORED_TENSORS
        ),
        "",
    )


def find_documents(
    *,
    batch_size: int,
    q_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """Return the attention_mask for `attend`. Called instead of a mask function.

    A document begins at each token that does not attend to the preceding token.
    """
    if attention_mask is not None:
        raise VarlenUnsupportedError("a custom mask")
    device = more.get("device", "cpu")
    later, row = (
        torch.arange(1, q_length, device=device),
        torch.arange(batch_size, device=device).unsqueeze(1),
    )
    starts = torch.ones(batch_size, q_length, dtype=torch.bool, device=device)
    starts[:, 1:] = ~mask_function(row, 0, later, later - 1)
    return as_attention_mask(cu_seqlens_from(starts).cpu(), starts.device)


def attend_bidirectional(
    inner: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **more: object,
) -> tuple[Tensor, Any]:
    """Compute a layer's attention with transformers' function `inner`."""
    # Each model has its own eager function, defined in the module that contains its attention.
    own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(inner, own)(
        module, query, key, value, attention_mask, **more
    )


def bidirectional_mask(
    inner: str,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    **more: object,
) -> Tensor | None:
    """Return the mask for one kind of layer: its own rule, limited to each token's document.

    Documents begin where `attention_mask`, (B, T) bool, is True.
    """
    if attention_mask is not None:
        mask_function = and_masks(
            mask_function, packed_sequence_mask_function(attention_mask.cumsum(-1))
        )
        more["allow_is_bidirectional_skip"] = False
    return ALL_MASK_ATTENTION_FUNCTIONS[inner](
        mask_function=mask_function, attention_mask=None, **more
    )


AttentionInterface.register(VARLEN, attend)
AttentionMaskInterface.register(VARLEN, find_documents)
AttentionInterface.register(bidirectional_name(VARLEN), partial(attend, causal=False))
AttentionMaskInterface.register(bidirectional_name(VARLEN), find_documents)
for inner in MASK_ATTENTIONS:
    AttentionInterface.register(bidirectional_name(inner), partial(attend_bidirectional, inner))
    AttentionMaskInterface.register(bidirectional_name(inner), partial(bidirectional_mask, inner))
