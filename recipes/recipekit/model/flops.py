"""Model FLOPs: what a step has to compute, for `mfu`.

Nothing here imports torch; models and batches are asked by their attributes.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from ..spec.task_specs import PACKED

CONVENTION = (
    "model FLOPs over the device's dense bf16 peak: 6 for each trained parameter that a token (a"
    " patch of a picture) meets and 4 for each frozen one; attention only where causality, windows"
    " and documents allow it; a multiply-add counts as two; nothing for recomputation and for"
    " embeddings that are only looked up"
)
WHOLE = 0  # the window of a layer that sees everything before it


@dataclass(frozen=True)
class Flops:
    """`per_unit`: of what a task counts, for a token those of the weights, for a sample all.

    `per_key`: window -> FLOPs, over the layers of that window, for each key that a token looks at.
    """

    per_unit: float
    per_key: dict[int, float]
    both_ways: bool = False  # a window lies to either side of a token

    def of_step(self, units: int, keys: Iterable[int] = ()) -> float:
        """The FLOPs of `units` tokens, which look at so many keys under each window (in the order
        of `per_key`), or of `units` samples.
        """
        return self.per_unit * units + sum(
            cost * count for cost, count in zip(self.per_key.values(), keys, strict=True)
        )


def model_flops(model: Any, rows: str = PACKED) -> Flops | None:
    """Forward and backward of a whole model (adapted or not) of a task with such rows
    (tasks.facts.Facts.rows); None where they cannot be counted.
    """
    return _of_tokens(model) if rows == PACKED else _of_pictures(model)


def _of_tokens(model: Any) -> Flops | None:
    """Counts those of a causal model; None where its config says that a layer mixes tokens
    otherwise, or lacks a number.

    A weight costs 2 FLOPs a token forward, 2 for the gradient of its input and 2 for its own, which
    a frozen one does without. Not met by a token: an embedding that is only looked up, and the
    experts that it is not sent to. A key costs 2 x (its width and the value's) forward and twice
    that backward.
    """
    config, embedding = model.config.get_text_config(), model.get_input_embeddings().weight
    layers, heads, hidden = (
        _number(config, name)
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    # an indexer chooses the keys
    if not (layers and heads and hidden) or _number(config, "index_topk"):
        return None
    if _number(config, "kv_lora_rank"):
        widths = [
            _number(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        ]
    else:
        widths = [2 * (_number(config, "head_dim") or hidden // heads)]
    windows = _windows(config, layers)
    expert_ids = {
        id(parameter) for name, parameter in model.named_parameters() if ".experts." in name
    }
    chosen = _number(config, "num_experts_per_tok")
    held = _number(
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


def _of_pictures(model: Any) -> Flops | None:
    """Counts those of a vision transformer for a picture; None for a model of another kind: of
    stages, of convolutions, with other attention than that of all patches to all.

    A weight of a layer meets every patch and every token beside them (a class token, registers),
    that of the patch embedding every patch, without a gradient of its input; the head meets one
    place. A query looks at all keys.
    """
    config = getattr(model.config, "vision_config", None) or model.config
    layers, heads, hidden, patch = (
        _number(config, name)
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
    # Added to patches, or put before them.
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
    """Count the class tokens and registers, given the model's parameters by name."""
    tokens = sum(
        shape[-2]
        for name, value in named.items()
        if re.fullmatch(r".*(cls|distillation|register)_tokens?", name)
        and len(shape := value.shape) == 3
    )
    return tokens + any(name.endswith("class_embedding") for name in named)


def _number(config: Any, *names: str) -> int:
    """The config's number under the first of the names that it has; 0 if it has none."""
    return next((number for name in names if (number := getattr(config, name, None))), 0)


def _windows(config: Any, layers: int) -> list[int] | None:
    """The window of each layer; None for a kind that is no softmax attention over the keys before a
    token.
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
    of_kind = {"full_attention": WHOLE, "sliding_attention": sliding}
    found = [of_kind.get(kind) for kind in kinds]
    return None if None in found or len(found) != layers else found  # pyright: ignore[reportReturnType]


def keys_seen(batches: Iterable[Any], windows: Iterable[int], both_ways: bool = False) -> list[int]:
    """For each window, how many (token, key) pairs the micro-batches allow: `position_ids` counts
    from 0 in each document of a row.

    Without windows, as samples have none, nothing is looked at.

    `both_ways`: a token sees the whole document, or so many tokens to either side.
    """
    sums = dict.fromkeys(windows, 0)
    for batch in batches if sums else ():
        before = batch["position_ids"].flatten()
        behind = _tokens_behind(batch) if both_ways else None
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


def _tokens_behind(batch: Any) -> Any:
    """Counts the tokens that follow each one in its document, (tokens,), from what the micro-batch
    says of its documents.
    """
    before = batch["position_ids"].flatten()
    if "documents" in batch:
        lengths = batch["documents"].diff()
    else:
        begun = batch["document_starts"].flatten().nonzero().flatten()
        lengths = begun.diff(append=begun.new_tensor([len(before)]))
    return lengths.repeat_interleave(lengths) - 1 - before
