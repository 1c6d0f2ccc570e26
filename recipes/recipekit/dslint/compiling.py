"""Selection of the models whose full layers are compiled.

This module imports nothing heavy, because a dry run counts the activations that compiled layers
store.
"""

from typing import Any

from .schema import value_at

# Model types whose full layers were compiled and compared with plain PyTorch.
FULLY_COMPILED_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def compiles_full_layers(model_type: str, ds_config: dict[str, Any], *degrees: int) -> bool:
    """Return True if a full layer can be compiled, because it contains no hooks or collectives.

    `degrees` are the degrees of the kinds of parallelism that shard the inside of a layer.
    """
    return (
        model_type in FULLY_COMPILED_TYPES
        and value_at(ds_config, "zero_optimization.stage", 0) < 3
        and all(degree == 1 for degree in degrees)
    )
