"""The attentions of packed documents for transformers' AttentionInterface: `varlen`, without a
mask, and those that look both ways.

With varlen the layers of a model get as their attention_mask what `documents.for_layers` makes;
where they get nothing, the documents are found by the rule by which transformers would have made
the mask. Of a model that looks both ways transformers 5.22.2 keeps no documents apart, so each
attention has a name of its own for it (`both_ways`): with those that make a mask, the model gets
the starts of the documents, (B, T) bool, as its attention_mask.
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

from .documents import documents_from, for_layers
from .varlen import Scoring, varlen

VARLEN = "varlen"
MASKING = ("sdpa", "eager")  # that make a mask
MOST_HEAD_DIM = 256  # of FlashAttention 2
# Tensors that layers hand on and that attention does not read: places, and what a model's own loss
# is given.
HARMLESS = ("position_ids", "cache_position", "shift_labels", "num_items_in_batch")


class Unfit(RuntimeError):
    """Says what an attention wants that `varlen` does not compute; `model.attention` finds it out
    before a run.
    """


def both_ways(attention: str) -> str:
    """Names an attention that looks both ways within a document."""
    return f"both_ways_{attention}"


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    causal: bool = True,
    **more: Any,
) -> tuple[Tensor, None]:
    """Computes the attention of a layer, (B, heads, T, d) -> (B, T, heads, d of a value).

    Raises `Unfit` for what it cannot compute.
    """
    if dropout:
        raise Unfit(f"attention dropout of {dropout}")
    if wanted := _wanted(module, causal, more):
        raise Unfit(wanted)
    if attention_mask is None or attention_mask.dim() != 4 or attention_mask.dtype != torch.int32:
        raise Unfit("a custom mask")
    rows, _, length, d = query.shape
    if key.shape[2] != length or value.shape[2] != length:
        raise Unfit("keys of other tokens than the queries'")
    scale = d**-0.5 if scaling is None else float(scaling)
    # as scaled_dot_product_attention does by itself
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (
            heads.to(torch.get_autocast_dtype(query.device.type)) for heads in (query, key, value)
        )
    width = value.shape[-1]
    # (B * T, heads, d)
    query, key, value = (
        heads.transpose(1, 2).flatten(0, 1) for heads in _of_one_size(query, key, value)
    )
    documents, longest = attention_mask[0, 0, 0], attention_mask.shape[2]
    scoring = Scoring(scale, sliding_window or 0, causal)
    output = varlen(query, key, value, documents, longest, scoring)
    return output[..., :width].unflatten(0, (rows, length)), None


def _of_one_size(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Pad heads to one size, a multiple of 8, as FlashAttention needs them; zeros add nothing to a
    score.
    """
    size = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    return tuple(
        pad(heads, (0, size - heads.shape[-1])) if heads.shape[-1] < size else heads
        for heads in (query, key, value)
    )


def _wanted(module: Any, causal: bool, more: dict[str, Any]) -> str:
    """Names what a layer asks for besides, or ""."""
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
            if torch.is_tensor(value) and name not in HARMLESS
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
    """Makes the attention_mask of `attend` where a mask would be made: a document begins at a token
    that does not see the one before it.
    """
    if attention_mask is not None:
        raise Unfit("a custom mask")
    device = more.get("device", "cpu")
    later, row = (
        torch.arange(1, q_length, device=device),
        torch.arange(batch_size, device=device).unsqueeze(1),
    )
    starts = torch.ones(batch_size, q_length, dtype=torch.bool, device=device)
    starts[:, 1:] = ~mask_function(row, 0, later, later - 1)
    return for_layers(documents_from(starts).cpu(), starts.device)


def attend_both_ways(
    inner: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **more: Any,
) -> tuple[Tensor, Any]:
    """Computes the attention of a layer by transformers' own function `inner`."""
    # each model has one of its own, beside its attention
    own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(inner, own)(
        module, query, key, value, attention_mask, **more
    )


def mask_both_ways(
    inner: str,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    **more: Any,
) -> Tensor | None:
    """Makes the mask of one kind of layer, by its own rule and within documents: these begin where
    `attention_mask`, (B, T) bool, says.
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
AttentionInterface.register(both_ways(VARLEN), partial(attend, causal=False))
AttentionMaskInterface.register(both_ways(VARLEN), find_documents)
for inner in MASKING:
    AttentionInterface.register(both_ways(inner), partial(attend_both_ways, inner))
    AttentionMaskInterface.register(both_ways(inner), partial(mask_both_ways, inner))
