"""Sequence parallelism (Ulysses, arXiv 2309.14509): a rank holds a part of each row, and attention
swaps heads for tokens.

DeepSpeed's own UlyssesSPAttentionHF (0.19.8) drops the mask, so that packed documents see each
other except under FlashAttention. Here the model builds its masks as always, but for the whole row:
what a layer calls is the attention that the recipe asked for, around it the exchange, and what
makes its mask gets the starts of the documents in the row.
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

from ..kernels.attention import VARLEN
from ..kernels.documents import document_starts, documents_from, for_layers
from ..spec.refusal import Refusal, refuse
from .groups import Groups

MicroBatch = dict[str, torch.Tensor]


def own_part(batch: MicroBatch, sp: int, sp_rank: int) -> MicroBatch:
    """This rank's part of the rows, each (B, T / sp), and what describes the whole rows:
    `documents`, or without them `document_starts`, (B, T) bool.

    Labels are the targets of their own position, so a part needs nothing of the next one. Without
    sequence parallelism the batch stays as it is.
    """
    if sp == 1:
        return batch
    # a number for each row, and the documents
    whole = {name: tensor for name, tensor in batch.items() if tensor.dim() == 1}
    if "documents" not in batch:
        whole["document_starts"] = document_starts(batch["position_ids"])
    return {
        name: tensor.chunk(sp, dim=1)[sp_rank]
        for name, tensor in batch.items()
        if name not in whole
    } | whole


def apply(model: PreTrainedModel, attention: str, seq_len: int, groups: Groups) -> None:
    """Makes the model's attention work on parts of rows, in place.

    It takes `document_starts` as its attention_mask, varlen `documents`, too.

    Raises `Refusal` for a model in which anything but attention carries information from token to
    token.
    """
    check(model, seq_len)
    name = f"sequence_parallel_{attention}"  # models look for "flash" in the name
    register_all_to_all_group(groups.sp_group)
    AttentionInterface.register(name, _attention(attention, groups))
    AttentionMaskInterface.register(name, _mask(attention))
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = name


def check(model: PreTrainedModel, seq_len: int) -> None:
    """Raises `Refusal` for a model that computes something else when its rows are cut."""
    kind = type(model).__name__
    modules = [(name, module) for name, module in model.named_modules() if name]
    mixes = [name for name, module in modules if isinstance(module, nn.Conv1d | nn.RNNBase)]
    if any(getattr(module, "_is_stateful", False) for module in model.modules()) or mixes:
        raise _refuse(
            kind,
            "its layers carry information along the row outside of attention"
            + (f" ({mixes[0]})" if mixes else ""),
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise _refuse(kind, "its attention does not go through transformers' AttentionInterface")
    if sinks := [name for name, _ in model.named_parameters() if "sink" in name]:
        raise _refuse(
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
            raise refuse(
                f"sp > 1 with seq_len = {seq_len}", rule, f"use --sp 1, or --seq_len {most} or less"
            )


def _refuse(kind: str, rule: str) -> Refusal:
    return refuse(f"sp > 1 with {kind}", rule, "use --sp 1")


def _attention(inner: str, groups: Groups) -> Callable[..., tuple[torch.Tensor, Any]]:
    """The attention function `inner` of transformers, on whole rows and 1 / sp of the heads."""
    group, sp = groups.sp_group, groups.mesh.sp

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        # too few key-value heads: some ranks get the same one
        repeats = sp // math.gcd(key.shape[1], sp)
        if repeats > 1:
            key, value = (
                key.repeat_interleave(repeats, dim=1),
                value.repeat_interleave(repeats, dim=1),
            )
        # (B, H / sp, T, d)
        query, key, value = (_whole_rows(heads, group, sp) for heads in (query, key, value))
        implementation = module.config._attn_implementation
        shared = getattr(module, "num_key_value_groups", 1)
        # FlashAttention loads its kernel by this name
        module.config._attn_implementation_internal = inner
        module.num_key_value_groups = shared // repeats
        try:
            if "flash" in inner:
                assert attention_mask is not None
                output, weights = _varlen(module, query, key, value, attention_mask, **kwargs)
            else:
                # each model has an eager function of its own, beside its attention
                own: Any = getattr(
                    sys.modules[type(module).__module__], "eager_attention_forward", None
                )
                output, weights = ALL_ATTENTION_FUNCTIONS.get_interface(inner, own)(
                    module, query, key, value, attention_mask, **kwargs
                )
        finally:
            module.config._attn_implementation_internal = implementation
            module.num_key_value_groups = shared
        return _own_part_of_rows(output, group, sp), weights

    return attention


def _varlen(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """FlashAttention on all documents of all rows, one after the other as one row.

    Since transformers 5.22.2 looks for documents in position_ids only where there is one row
    (_is_packed_sequence).
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


def _mask(inner: str) -> Callable[..., torch.Tensor | None]:
    """What builds the mask of one kind of layer: `inner`'s for the whole row, by the layer's own
    rule and within documents.
    """

    def mask(
        *,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Any],
        attention_mask: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        starts = attention_mask  # (B, T) bool
        if "flash" in inner:
            return starts  # it reads the documents from it
        if inner == VARLEN:
            return for_layers(documents_from(starts).cpu(), starts.device)
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


def _whole_rows(part: torch.Tensor, group: Any, sp: int) -> torch.Tensor:
    """(B, H, T / sp, d) of this rank -> (B, H / sp, T, d): the tokens of all ranks, the heads of
    this one (a collective).
    """
    parts = part.unflatten(1, (sp, -1)).movedim(1, 0)  # (sp, B, H / sp, T / sp, d)
    return _dim_zero_all_to_all(group, parts).movedim(0, 2).flatten(2, 3).contiguous()


def _own_part_of_rows(whole: torch.Tensor, group: Any, sp: int) -> torch.Tensor:
    """(B, T, H / sp, d) of this rank's heads -> (B, T / sp, H, d): the heads of all ranks, the
    tokens of this one (a collective).
    """
    parts = whole.unflatten(1, (sp, -1)).movedim(1, 0)  # (sp, B, T / sp, H / sp, d)
    return _dim_zero_all_to_all(group, parts).movedim(0, 2).flatten(2, 3).contiguous()
