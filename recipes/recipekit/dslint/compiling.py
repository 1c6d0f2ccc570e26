"""Says which layers are compiled as a whole.

Imports nothing heavy, since a dry run counts what they keep.
"""

from typing import Any

from .schema import at

# model types whose layers were compiled as a whole, and held against plain PyTorch
WHOLE = ("llama", "mistral", "qwen2", "qwen3")


def layers_whole(model_type: str, ds_config: dict[str, Any], *degrees: int) -> bool:
    """Returns True for layers with no hooks and no collectives inside.

    `degrees`: of the parallelisms that divide what is in a layer.
    """
    return (
        model_type in WHOLE
        and at(ds_config, "zero_optimization.stage", 0) < 3
        and all(degree == 1 for degree in degrees)
    )
