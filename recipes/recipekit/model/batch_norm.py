"""BatchNorm whose running statistics are equal on all ranks and for any number of ranks.

Each micro-batch is normalised by its own mean and variance, as in torch. The running statistics are
updated once per optimizer step, with the mean over all micro-batches and ranks. In contrast, torch
updates them after each micro-batch, and separately on each rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from ..compat.torch import set_class
from ..spec.errors import config_error


def step_batch_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the norm's output for `x`, (B, C, ...).

    In training, also add the micro-batch's statistics to the norm's sums. Statistics, weight and
    bias have the dtype of the buffers, fp32, because on a CPU torch 2.13 does not accept bf16
    weights with fp32 statistics. A recomputation in the backward pass (activation checkpointing) is
    not counted again.

    Raise `ConfigError` if there is only one value per channel, since a single value has no
    variance.
    """
    mean, var = norm.running_mean, norm.running_var
    weight, bias = (
        None if value is None else value.to(mean.dtype) for value in (norm.weight, norm.bias)
    )
    if not norm.training:
        return batch_norm(x, mean, var, weight, bias, False, 0.0, norm.eps)
    if x.numel() == x.shape[1]:
        raise config_error(
            "micro_batch = 1",
            f"BatchNorm receives {tuple(x.shape)}, and one value per channel has no variance",
            "use --micro_batch 2 or more",
        )
    mean, var = torch.zeros_like(mean), torch.ones_like(var)
    # With a momentum of 1, the running statistics become the micro-batch's own statistics.
    out = batch_norm(x, mean, var, weight, bias, True, 1.0, norm.eps)
    if torch._C._current_graph_task_id() == -1:  # not in a backward pass
        seen = torch.cat([mean, var, mean.new_ones(1)]).double()  # (2 C + 1,)
        norm.sums = seen if norm.sums is None else norm.sums + seen
    return out


class StepBatchNorm1d(nn.BatchNorm1d):
    sums: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return step_batch_norm(self, input)


class StepBatchNorm2d(nn.BatchNorm2d):
    sums: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return step_batch_norm(self, input)


STEP_NORM_CLASSES: dict[type, type] = {
    nn.BatchNorm1d: StepBatchNorm1d,
    nn.BatchNorm2d: StepBatchNorm2d,
}


def norms_of(model: nn.Module) -> list[Any]:
    """Return the model's step norms (StepBatchNorm1d and StepBatchNorm2d) in model order."""
    return [
        module
        for module in model.modules()
        if isinstance(module, StepBatchNorm1d | StepBatchNorm2d)
    ]


def replace_norms(model: nn.Module) -> None:
    """Replace every BatchNorm in a model with a step norm, in place.

    Parameters, buffers and names stay the same. Raise the same `ConfigError` as `check_norms`.
    """
    check_norms(model)
    for module in model.modules():
        if type(module) in STEP_NORM_CLASSES:
            set_class(module, STEP_NORM_CLASSES[type(module)])


def check_norms(model: nn.Module) -> None:
    """Raise `ConfigError` for a BatchNorm with a custom forward or without running statistics."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (
            type(module) not in (*STEP_NORM_CLASSES, *STEP_NORM_CLASSES.values())
            or not module.track_running_stats
        ):
            kind = type(module).__name__
            rule = (
                f"{name} is a {kind} without running statistics"
                if type(module) in STEP_NORM_CLASSES
                else f"{name} is a {kind}, whose statistics are not known here"
            )
            raise config_error(
                f"model = {type(model).__name__}",
                rule,
                "use a model with torch's BatchNorm1d or BatchNorm2d, or without BatchNorm",
            )


@torch.no_grad()
def update_running_stats(norms: Sequence[Any], group: object, changed: bool = True) -> None:
    """Update the running statistics with a step's sums, then clear the sums.

    This is a collective operation over `group`, the data-parallel ranks (None: one rank). If
    `changed` is False, the step changed the weights on no rank, so only the sums are cleared.

    The update is running = (1 - momentum) running + momentum mean. If the momentum is None, the
    statistics are the mean over all steps, as in torch.
    """
    if not changed:
        for norm in norms:
            norm.sums = None
        return
    sums = torch.cat(
        [
            norm.running_mean.new_zeros(2 * norm.num_features + 1).double()
            if norm.sums is None
            else norm.sums
            for norm in norms
        ]
    )
    if group is not None:
        dist.all_reduce(sums, group=group)
    for norm, seen in zip(
        norms, sums.split([2 * norm.num_features + 1 for norm in norms]), strict=True
    ):
        norm.sums = None
        ran = seen[-1] > 0  # False if the norm is on a different pipeline stage; no device sync
        norm.num_batches_tracked.add_(ran)
        share = ran * (
            1 / norm.num_batches_tracked.clamp(min=1).double()
            if norm.momentum is None
            else norm.momentum
        )
        means = (seen[:-1] / seen[-1].clamp(min=1)).split(norm.num_features)
        for running, mean in zip((norm.running_mean, norm.running_var), means, strict=True):
            running.copy_(running.double().lerp(mean, share.double()))
