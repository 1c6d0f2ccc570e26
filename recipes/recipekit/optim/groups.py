"""Which parameters decay."""

from typing import Any

from torch import nn

from ..parallel.plans import decays


def parameter_groups(model: nn.Module, no_decay: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Makes two optimizer groups: matrices decay; vectors (norms, biases) and what `no_decay` names do not. Frozen parameters are in neither."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    dims = {name: len(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in trained.items()}
    decayed = [parameter for name, parameter in trained.items() if decays(name, dims[name], no_decay)]
    others = [parameter for name, parameter in trained.items() if not decays(name, dims[name], no_decay)]
    # DeepSpeed splits experts off each group by its name (moe/utils.py)
    return [{"params": decayed, "name": "matrices"}] + ([{"params": others, "weight_decay": 0.0, "name": "vectors"}] if others else [])
