"""The optimizer's groups of a model's parameters."""

from typing import Any

from torch import nn

from ..parallel.param_groups import Group, group_of, numbered
from ..tasks.facts import Plans


def parameter_groups(model: nn.Module, plans: Plans | None = None) -> list[dict[str, Any]]:
    """Makes the groups that a model's parameters are in: matrices decay; vectors (norms, biases) and what the plans name do not. Frozen parameters are in none.

    Their order is that of their numbers (`parallel/param_groups.py`). A group whose learning rate is scaled says so in `lr_scale`;
    in `matrix`, one that its optimizer updates as matrices.
    """
    found: dict[Group, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = group_of(name, len(getattr(parameter, "ds_shape", parameter.shape)), plans or Plans())
            found.setdefault(group, []).append(parameter)
    return [_made(group, found[group]) for group in numbered(found) if group in found]


def _made(group: Group, parameters: list[nn.Parameter]) -> dict[str, Any]:
    numbers: dict[str, Any] = {} if group.decays else {"weight_decay": 0.0}
    return {"params": parameters} | numbers | group.entries  # DeepSpeed splits experts off each group by its name (moe/utils.py)
