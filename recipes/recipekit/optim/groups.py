"""The optimizer's groups of a model's parameters."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..parallel.param_groups import Group, group_of, numbered
from ..spec.task_specs import Plans


def parameter_groups(
    model: nn.Module, groups: Mapping[str, Group] | None = None
) -> list[dict[str, Any]]:
    """Makes the groups of a model's parameters, which the blueprint knows by name (`trained`), in
    the order of their numbers; frozen ones are in none.

    Without `groups`, matrices decay, and vectors (norms, biases) do not. A group whose learning
    rate is scaled says so in `lr_scale`; in `matrix`, one that its optimizer updates as matrices.
    """
    found: dict[Group, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own = (
                groups[name]
                if groups is not None
                else group_of(name, len(getattr(parameter, "ds_shape", parameter.shape)), Plans())
            )
            found.setdefault(own, []).append(parameter)
    return [_made(group, found[group]) for group in numbered(found) if group in found]


def _made(group: Group, parameters: list[nn.Parameter]) -> dict[str, Any]:
    numbers: dict[str, Any] = {} if group.decays else {"weight_decay": 0.0}
    # DeepSpeed splits experts off each group by its name (moe/utils.py)
    return {"params": parameters} | numbers | group.entries
