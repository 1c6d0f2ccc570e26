"""Sequence parallelism (Ulysses, arXiv 2309.14509).

Each rank stores a part of each row, and attention exchanges heads for tokens. DeepSpeed's own
UlyssesSPAttentionHF (0.19.8) drops the mask, so packed documents attend to each other except under
FlashAttention. Here the model builds its masks as usual, except that they cover the full row. Each
layer calls the recipe's attention inside the exchange. The mask function receives the starts of the
documents in the row.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.sequence.layer import _dim_zero_all_to_all, register_all_to_all_group
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    packed_sequence_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..compat.transformers import attention_called, set_attention
from ..kernels.attention import VARLEN
from ..kernels.documents import as_attention_mask, cu_seqlens_from, document_starts
from ..spec.errors import ConfigError, config_error
from .groups import ProcessGroups

TensorBatch = dict[str, torch.Tensor]


def local_sequence_chunk(batch: TensorBatch, sp: int, sp_rank: int) -> TensorBatch:
    """Return this rank's part of the rows, (B, T / sp), with tensors that describe the full rows.

    These tensors are `documents` or, without documents, `document_starts`, (B, T) bool. The label
    at a position is already that position's target, so a part needs nothing from the next part.
    Without sequence parallelism the batch is returned unchanged.
    """
    if sp == 1:
        return batch
    # tensors with one number per row, and the documents
    whole = {name: tensor for name, tensor in batch.items() if tensor.dim() == 1}
    if "documents" not in batch:
        whole["document_starts"] = document_starts(batch["position_ids"])
    return {
        name: tensor.chunk(sp, dim=1)[sp_rank]
        for name, tensor in batch.items()
        if name not in whole
    } | whole


def apply_sequence_parallel(
    model: PreTrainedModel, attention: str, seq_len: int, groups: ProcessGroups
) -> None:
    """Make the model's attention work on parts of rows, in place.

    The model receives `document_starts` as its attention_mask. Varlen attention also receives
    `documents`.

    Raises `ConfigError` for a model in which something other than attention carries information
    between tokens.
    """
    check_sequence_parallel(model, seq_len)
    name = f"sequence_parallel_{attention}"  # models look for "flash" in the name
    register_all_to_all_group(groups.sp_group)
    AttentionInterface.register(name, _ulysses_attention(attention, groups))
    AttentionMaskInterface.register(name, _full_row_mask(attention))
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            set_attention(module.config, name)


def check_sequence_parallel(model: PreTrainedModel, seq_len: int) -> None:
    """Raise `ConfigError` for a model whose results would change if its rows were split."""
    kind = type(model).__name__
    modules = [(name, module) for name, module in model.named_modules() if name]
    mixes = [name for name, module in modules if isinstance(module, nn.Conv1d | nn.RNNBase)]
    if any(getattr(module, "_is_stateful", False) for module in model.modules()) or mixes:
        raise _sequence_refusal(
            kind,
            "its layers carry information along the row outside of attention"
            + (f" ({mixes[0]})" if mixes else ""),
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise _sequence_refusal(
            kind, "its attention does not go through transformers' AttentionInterface"
        )
    if sinks := [name for name, _ in model.named_parameters() if "sink" in name]:
        raise _sequence_refusal(
            kind,
            f"{sinks[0]} contains one number for each head, but a rank has only some of the heads",
        )
    rope = getattr(model.config, "rope_parameters", None) or {}
    for numbers in [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]:
        most = numbers.get("original_max_position_embeddings") or getattr(
            model.config, "max_position_embeddings", seq_len
        )
        if numbers.get("rope_type") in ("dynamic", "longrope") and seq_len > most:
            rule = (
                f"beyond {most} tokens its rotary frequencies depend on the longest document of the"
                f" row ({numbers['rope_type']}), and each rank sees only a part of the row"
            )
            raise config_error(
                f"sp > 1 with seq_len = {seq_len}", rule, f"use --sp 1, or --seq_len {most} or less"
            )


def _sequence_refusal(kind: str, rule: str) -> ConfigError:
    return config_error(f"sp > 1 with {kind}", rule, "use --sp 1")


def _ulysses_attention(
    inner: str, groups: ProcessGroups
) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Wrap transformers' attention function `inner` to see full rows and 1 / sp of the heads."""
    group, sp = groups.sp_group, groups.mesh.sp

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, Any]:
        # too few key-value heads: some ranks share a head
        repeats = sp // math.gcd(key.shape[1], sp)
        if repeats > 1:
            key, value = (
                key.repeat_interleave(repeats, dim=1),
                value.repeat_interleave(repeats, dim=1),
            )
        # (B, H / sp, T, d)
        query, key, value = (
            _gather_seq_scatter_heads(heads, group, sp) for heads in (query, key, value)
        )
        shared = getattr(module, "num_key_value_groups", 1)
        with attention_called(module, inner, shared // repeats):
            if "flash" in inner:
                assert attention_mask is not None
                output, weights = _flash_over_documents(
                    module, query, key, value, attention_mask, **kwargs
                )
            else:
                # each model defines its own eager function next to its attention
                own: Any = getattr(
                    sys.modules[type(module).__module__], "eager_attention_forward", None
                )
                output, weights = ALL_ATTENTION_FUNCTIONS.get_interface(inner, own)(
                    module, query, key, value, attention_mask, **kwargs
                )
        return _gather_heads_scatter_seq(output, group, sp), weights

    return attention


def _flash_over_documents(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    **kwargs: object,
) -> tuple[torch.Tensor, Any]:
    """Run FlashAttention on all rows' documents, concatenated into one row.

    This is necessary because transformers 5.22.2 looks for documents in position_ids only if there
    is a single row (_is_packed_sequence).
    """
    rows, _, length, _ = query.shape
    place = torch.arange(length, device=query.device).expand(rows, -1)
    kwargs["position_ids"] = (place - torch.where(starts, place, 0).cummax(-1).values).reshape(
        1, -1
    )
    # (1, H / sp, B * T, d)
    query, key, value = (
        heads.transpose(0, 1).flatten(1, 2).unsqueeze(0) for heads in (query, key, value)
    )
    output, weights = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation](
        module, query, key, value, None, **kwargs
    )
    return output.unflatten(1, (rows, length)).squeeze(0), weights  # (B, T, H / sp, d)


def _full_row_mask(inner: str) -> Callable[..., torch.Tensor | None]:
    """Return a function that builds masks for `inner` over the full row.

    The mask follows the layer's own rule and does not cross document bounds.
    """

    def mask(
        *,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Any],
        attention_mask: torch.Tensor,
        **kwargs: object,
    ) -> torch.Tensor | None:
        starts = attention_mask  # (B, T) bool
        if "flash" in inner:
            return starts  # flash attention reads the documents from it
        if inner == VARLEN:
            return as_attention_mask(cu_seqlens_from(starts).cpu(), starts.device)
        if starts[:, 1:].any():
            mask_function = and_masks(
                mask_function, packed_sequence_mask_function(starts.cumsum(-1))
            )
            kwargs["allow_is_causal_skip"] = False
        length = starts.shape[1]
        return ALL_MASK_ATTENTION_FUNCTIONS[inner](
            q_length=length,
            kv_length=length,
            mask_function=mask_function,
            attention_mask=None,
            **kwargs,
        )

    return mask


def _gather_seq_scatter_heads(local: torch.Tensor, group: Any, sp: int) -> torch.Tensor:
    """Exchange this rank's (B, H, T / sp, d) for (B, H / sp, T, d) (a collective).

    The result contains all ranks' tokens for this rank's heads.
    """
    parts = local.unflatten(1, (sp, -1)).movedim(1, 0)  # (sp, B, H / sp, T / sp, d)
    return _dim_zero_all_to_all(group, parts).movedim(0, 2).flatten(2, 3).contiguous()


def _gather_heads_scatter_seq(gathered: torch.Tensor, group: Any, sp: int) -> torch.Tensor:
    """Exchange this rank's (B, T, H / sp, d) for (B, T / sp, H, d) (a collective).

    The result contains all ranks' heads for this rank's tokens.
    """
    parts = gathered.unflatten(1, (sp, -1)).movedim(1, 0)  # (sp, B, T / sp, H / sp, d)
    return _dim_zero_all_to_all(group, parts).movedim(0, 2).flatten(2, 3).contiguous()
