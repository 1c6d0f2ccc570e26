"""Which parameters decay."""

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Makes two optimizer groups: matrices decay, vectors (norms, biases) do not. Frozen parameters are in neither."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dims = {id(parameter): len(getattr(parameter, "ds_shape", parameter.shape)) for parameter in trained}
    matrices = [parameter for parameter in trained if dims[id(parameter)] >= 2]
    vectors = [parameter for parameter in trained if dims[id(parameter)] < 2]
    # DeepSpeed splits experts off each group by its name (moe/utils.py)
    return [{"params": matrices, "name": "matrices"}] + ([{"params": vectors, "weight_decay": 0.0, "name": "vectors"}] if vectors else [])
