"""Model FLOPs: what a step has to compute, for `mfu`. Nothing here imports torch; models and batches are asked by their
attributes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

CONVENTION = (
    "model FLOPs over the device's dense bf16 peak: 6 for each trained parameter that a token meets and 4 for each frozen one, "
    "attention only where causality, windows and documents allow it, a multiply-add as two; nothing for recomputation and for embeddings that are only looked up"
)
WHOLE = 0  # the window of a layer that sees everything before it


@dataclass(frozen=True)
class Flops:
    """`per_token`: of the weights. `per_key`: window -> FLOPs, over the layers of that window, for each key that a
    token looks at.
    """

    per_token: float
    per_key: dict[int, float]

    def of_step(self, tokens: int, keys: Iterable[int]) -> float:
        """The FLOPs of `tokens` tokens, which look at so many keys under each window (in the order of `per_key`)."""
        return self.per_token * tokens + sum(cost * count for cost, count in zip(self.per_key.values(), keys, strict=True))


def model_flops(model: Any) -> Flops | None:
    """Forward and backward of a whole causal model (adapted or not); None where its config says that a layer mixes
    tokens otherwise, or lacks a number.

    A weight costs 2 FLOPs a token forward, 2 for the gradient of its input and 2 for its own, which a frozen one does
    without. Not met by a token: an embedding that is only looked up, and the experts that it is not sent to. A key
    costs 2 x (its width and the value's) forward and twice that backward.
    """
    config, embedding = model.config.get_text_config(), model.get_input_embeddings().weight
    layers, heads, hidden = (_number(config, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if not (layers and heads and hidden) or _number(config, "index_topk"):  # an indexer chooses the keys
        return None
    if _number(config, "kv_lora_rank"):
        widths = [_number(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    else:
        widths = [2 * (_number(config, "head_dim") or hidden // heads)]
    windows = _windows(config, layers)
    expert_ids = {id(parameter) for name, parameter in model.named_parameters() if ".experts." in name}
    chosen = _number(config, "num_experts_per_tok")
    held = _number(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not all(widths) or windows is None or (expert_ids and not (chosen and held)):
        return None
    looked_up = embedding is not model.get_output_embeddings().weight
    per_token = 0.0
    for parameter in model.parameters():
        if parameter is embedding and looked_up:
            continue
        met = chosen / held if id(parameter) in expert_ids else 1
        per_token += (6 if parameter.requires_grad else 4) * parameter.numel() * met
    per_key = {window: 6.0 * heads * sum(widths) * windows.count(window) for window in sorted(set(windows))}
    return Flops(per_token, per_key)


def _number(config: Any, *names: str) -> int:
    """The config's number under the first of the names that it has; 0 if it has none."""
    return next((number for name in names if (number := getattr(config, name, None))), 0)


def _windows(config: Any, layers: int) -> list[int] | None:
    """The window of each layer; None for a kind that is no softmax attention over the keys before a token."""
    sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if sliding else "full_attention"] * layers
    of_kind = {"full_attention": WHOLE, "sliding_attention": sliding}
    found = [of_kind.get(kind) for kind in kinds]
    return None if None in found or len(found) != layers else found  # pyright: ignore[reportReturnType]


def keys_seen(batches: Iterable[Any], windows: Iterable[int]) -> list[int]:
    """For each window, how many (token, key) pairs the micro-batches allow: `position_ids` counts from 0 in each
    document of a row.
    """
    sums = dict.fromkeys(windows, 0)
    for batch in batches:
        seen = batch["position_ids"] + 1
        for window in sums:
            sums[window] += int((seen.clamp(max=window) if window else seen).sum())
    return list(sums.values())
