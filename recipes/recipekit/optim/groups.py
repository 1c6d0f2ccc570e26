"""The optimizer's groups for a model's parameters."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..parallel.param_groups import ParamGroup, order_groups, param_group_of
from ..spec.task_specs import Plans


def parameter_groups(
    model: nn.Module, groups: Mapping[str, ParamGroup] | None = None
) -> list[dict[str, Any]]:
    """Build the groups for a model's trained parameters, in the order of the group numbers.

    `groups` maps the name of each trained parameter to its group, as in the blueprint. If it is
    None, matrices have weight decay, and vectors (norms, biases) do not. A group with a scaled
    learning rate has an entry `lr_scale`. A group whose parameters the optimizer updates as
    matrices has an entry `matrix`.
    """
    found: dict[ParamGroup, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own = (
                groups[name]
                if groups is not None
                else param_group_of(
                    name, len(getattr(parameter, "ds_shape", parameter.shape)), Plans()
                )
            )
            found.setdefault(own, []).append(parameter)
    return [_group_entry(group, found[group]) for group in order_groups(found) if group in found]


def _group_entry(group: ParamGroup, parameters: list[nn.Parameter]) -> dict[str, Any]:
    numbers: dict[str, Any] = {} if group.decays else {"weight_decay": 0.0}
    # DeepSpeed splits experts off each group by the group's name (moe/utils.py).
    return {"params": parameters} | numbers | group.entries
