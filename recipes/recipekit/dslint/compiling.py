"""Selection of the models whose full layers are compiled.

This module imports nothing heavy, because a dry run counts the activations that compiled layers
store.
"""

from typing import Any

from .schema import value_at
from .shapes import read_config_size

# Model types whose full layers were compiled and compared with plain PyTorch.
FULLY_COMPILED_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def compiles_full_layers(model_type: str, *degrees: int) -> bool:
    """Return True if a full layer can be compiled, because no collectives run inside it.

    `degrees` are the degrees of the kinds of parallelism that shard the inside of a layer.
    """
    return model_type in FULLY_COMPILED_TYPES and all(degree == 1 for degree in degrees)


def leaf_obstacle(ds_config: dict[str, Any], recompute: int, adapted: bool) -> str:
    """Return why ZeRO-3 cannot gather full layers, or "" if it can or if the stage is lower.

    A layer whose weights are gathered at once, DeepSpeed's leaf module, has no hooks inside.
    `recompute` is N if every N-th layer is recomputed, else 0.
    """
    if value_at(ds_config, "zero_optimization.stage", 0) < 3:
        return ""
    if adapted:
        # Otherwise the hook at the input of the first layer runs before its gradients exist.
        return (
            "ZeRO-3 reduces a full layer only if its input has a gradient, unlike with an adapter"
        )
    if recompute:
        # torch.utils.checkpoint compares the saved weights, which ZeRO-3 has released by then.
        return "ZeRO-3 cannot recompute a full layer, so use --activation_budget 0 instead"
    if value_at(ds_config, "zero_optimization.offload_param.device", "none") != "none":
        return "ZeRO-3 brings offloaded weights to the device one at a time, to save its memory"
    return ""


def layer_numel(model_config: dict[str, Any] | None, tp: int = 1) -> int:
    """Return the number of elements in a layer's weight matrices on one rank, or 0 if unknown.

    It is known for `FULLY_COMPILED_TYPES`: queries, keys, values, their product, and a gated MLP.
    """
    if (model_config or {}).get("model_type") not in FULLY_COMPILED_TYPES:
        return 0
    names = ("hidden_size", "num_attention_heads", "intermediate_size")
    hidden, heads, inner = (read_config_size(model_config, name) for name in names)
    shared = read_config_size(model_config, "num_key_value_heads") or heads
    dim = read_config_size(model_config, "head_dim") or hidden // (heads or 1)
    return hidden * (2 * dim * (heads + shared) + 3 * inner) // tp
