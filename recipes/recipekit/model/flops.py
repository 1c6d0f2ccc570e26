"""The model FLOPs in a training step, from which `mfu` is computed.

This module does not import torch. It reads only attributes of models and batches.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ..spec.task import MicroBatch
from ..spec.task_specs import PACKED

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

CONVENTION = (
    "model FLOPs over the device's dense bf16 peak: 6 for each trained parameter that a token (a"
    " patch of a picture) meets and 4 for each frozen one; attention only where causality, windows"
    " and documents allow it; a multiply-add counts as two; nothing for recomputation and for"
    " embeddings that are only looked up"
)
NO_WINDOW = 0  # window size of a layer that attends to all earlier tokens


@dataclass(frozen=True)
class Flops:
    """Model FLOPs per unit, where a unit is a token or a sample, depending on the task.

    `per_unit` covers a token's FLOPs in the weights, or all of a sample's FLOPs. `per_key` maps a
    window to the FLOPs for each key that a token attends to, summed over the layers with that
    window.
    """

    per_unit: float
    per_key: dict[int, float]
    bidirectional: bool = False  # a window extends to both sides of a token

    def of_step(self, units: int, keys: Iterable[int] = ()) -> float:
        """Return the FLOPs for `units` tokens or samples.

        For tokens, `keys` lists the number of attended keys per window, in the order of `per_key`.
        """
        return self.per_unit * units + sum(
            cost * count for cost, count in zip(self.per_key.values(), keys, strict=True)
        )


def model_flops(model: "PreTrainedModel", rows: str = PACKED) -> Flops | None:
    """Return a full model's FLOPs in the forward and backward pass, adapted or not.

    `rows` is the task's kind of rows (TaskSpec.rows). Return None if the FLOPs cannot be counted.
    """
    return _token_flops(model) if rows == PACKED else _image_flops(model)


def _token_flops(model: "PreTrainedModel") -> Flops | None:
    """Return a causal model's FLOPs.

    Return None if the config describes a layer without plain attention, or lacks a number.

    A weight costs 2 FLOPs per token in the forward pass and 2 for the gradient of its input. A
    trained weight costs 2 more for its own gradient. An embedding that is only looked up costs
    nothing, and neither do the experts to which a token is not routed. A key costs 2 x (its width
    plus the value's width) in the forward pass and twice that in the backward pass.
    """
    config, embedding = model.config.get_text_config(), model.get_input_embeddings().weight
    layers, heads, hidden = (
        _config_number(config, name)
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    # With `index_topk`, an indexer selects the keys.
    if not (layers and heads and hidden) or _config_number(config, "index_topk"):
        return None
    if _config_number(config, "kv_lora_rank"):
        widths = [
            _config_number(config, name)
            for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        ]
    else:
        widths = [2 * (_config_number(config, "head_dim") or hidden // heads)]
    windows = _layer_windows(config, layers)
    expert_ids = {
        id(parameter) for name, parameter in model.named_parameters() if ".experts." in name
    }
    chosen = _config_number(config, "num_experts_per_tok")
    held = _config_number(
        config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"
    )
    if not all(widths) or windows is None or (expert_ids and not (chosen and held)):
        return None
    looked_up = embedding is not getattr(model.get_output_embeddings(), "weight", None)
    per_unit = 0.0
    for parameter in model.parameters():
        if parameter is embedding and looked_up:
            continue
        met = chosen / held if id(parameter) in expert_ids else 1
        per_unit += (6 if parameter.requires_grad else 4) * parameter.numel() * met
    per_key = {
        window: 6.0 * heads * sum(widths) * windows.count(window) for window in sorted(set(windows))
    }
    return Flops(per_unit, per_key)


def _image_flops(model: "PreTrainedModel") -> Flops | None:
    """Return a vision transformer's FLOPs per image.

    Return None for models with stages or convolutions, and for attention other than all patches to
    all patches.

    A layer's weight is used for every patch and every extra token (a class token, registers). The
    patch embedding's weight is used for every patch, but no gradient of its input is computed. The
    head is used for one position. A query attends to all keys.
    """
    config = getattr(model.config, "vision_config", None) or model.config
    layers, heads, hidden, patch = (
        _config_number(config, name)
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "patch_size")
    )
    size = getattr(config, "image_size", None)
    named = dict(model.named_parameters())
    embeddings = [name for name, parameter in named.items() if len(parameter.shape) == 4]
    odd = any("relative_position" in name or ".probe" in name for name in named)
    if (
        not (layers and heads and hidden and patch and size)
        or len(embeddings) != 1
        or odd
        or getattr(config, "depths", None)
    ):
        return None
    patches = prod(
        side // patch for side in (size if isinstance(size, list | tuple) else (size, size))
    )
    if list(named[embeddings[0]].shape[2:]) != [patch, patch]:
        return None
    # These parameters are added to the patches or placed in front of them.
    looked_up = re.compile(r".*(_tokens?|position_embeddings?(\.weight)?|class_embedding)")
    places = patches + _tokens_beside_patches(named)
    per_picture = 12.0 * layers * hidden * places**2
    for name, parameter in named.items():
        if not looked_up.fullmatch(name):
            met = patches if name in embeddings else places if re.search(r"\.\d+\.", name) else 1
            per_picture += (
                ((6 if parameter.requires_grad else 4) - 2 * (name in embeddings))
                * parameter.numel()
                * met
            )
    return Flops(per_picture, {})


def _tokens_beside_patches(named: dict[str, Any]) -> int:
    """Return the number of class tokens and registers, given the model's named parameters."""
    tokens = sum(
        shape[-2]
        for name, value in named.items()
        if re.fullmatch(r".*(cls|distillation|register)_tokens?", name)
        and len(shape := value.shape) == 3
    )
    return tokens + any(name.endswith("class_embedding") for name in named)


def _config_number(config: "PreTrainedConfig", *names: str) -> int:
    """Return the config's value for the first of these names that it contains, or 0."""
    return next((number for name in names if (number := getattr(config, name, None))), 0)


def _layer_windows(config: "PreTrainedConfig", layers: int) -> list[int] | None:
    """Return each layer's window, or None if a layer has an unsupported kind of attention.

    Only softmax attention over earlier keys is supported.
    """
    sliding = (
        getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True)
        else None
    )
    kinds = (
        getattr(config, "layer_types", None)
        or ["sliding_attention" if sliding else "full_attention"] * layers
    )
    of_kind = {"full_attention": NO_WINDOW, "sliding_attention": sliding}
    found = [of_kind.get(kind) for kind in kinds]
    return None if None in found or len(found) != layers else found  # pyright: ignore[reportReturnType]


def attended_keys(
    batches: Iterable[Any], windows: Iterable[int], bidirectional: bool = False
) -> list[int]:
    """Return the number of (token, key) pairs that the micro-batches allow, for each window.

    `position_ids` restart from 0 in each document of a row. Without windows, as in tasks with
    samples, the batches are not read. If `bidirectional` is True, a token attends to the full
    document, or to the window's number of tokens on each side.
    """
    sums = dict.fromkeys(windows, 0)
    for batch in batches if sums else ():
        before = batch["position_ids"].flatten()
        behind = _tokens_after(batch) if bidirectional else None
        for window in sums:
            if behind is None:
                seen = (before + 1).clamp(max=window) if window else before + 1
            else:
                seen = (
                    before.clamp(max=window) + behind.clamp(max=window)
                    if window
                    else before + behind
                ) + 1
            sums[window] += int(seen.sum())
    return list(sums.values())


def _tokens_after(batch: MicroBatch) -> "torch.Tensor":
    """Return the number of tokens that follow each token in its document, (tokens,).

    The documents are read from the micro-batch.
    """
    before = batch["position_ids"].flatten()
    if "documents" in batch:
        lengths = batch["documents"].diff()
    else:
        begun = batch["document_starts"].flatten().nonzero().flatten()
        lengths = begun.diff(append=begun.new_tensor([len(before)]))
    return lengths.repeat_interleave(lengths) - 1 - before
