"""BatchNorm whose running statistics are the same on every rank, and for every number of ranks.

Each micro-batch is normalised by its own mean and variance, as torch does it. The running
statistics move once an optimizer step, by the mean over all its micro-batches and ranks; torch's
own would move with each micro-batch, and on each rank apart.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from ..spec.refusal import refuse


def normalise(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes a norm's output for `x`, (B, C, ...), and while it trains adds the statistics of
    this micro-batch to its sums.

    Statistics, weight and bias are those of the buffers' dtype, fp32: torch 2.13 takes no bf16
    weights beside fp32 statistics on a CPU. What is computed again in a backward pass (activation
    checkpointing) has been counted already. Raises `Refusal` for one value a channel, which has no
    variance.
    """
    mean, var = norm.running_mean, norm.running_var
    weight, bias = (
        None if value is None else value.to(mean.dtype) for value in (norm.weight, norm.bias)
    )
    if not norm.training:
        return batch_norm(x, mean, var, weight, bias, False, 0.0, norm.eps)
    if x.numel() == x.shape[1]:
        raise refuse(
            "micro_batch = 1",
            f"BatchNorm receives {tuple(x.shape)}, and one value per channel has no variance",
            "use --micro_batch 2 or more",
        )
    mean, var = torch.zeros_like(mean), torch.ones_like(var)
    # with a momentum of 1 they become those of this micro-batch
    out = batch_norm(x, mean, var, weight, bias, True, 1.0, norm.eps)
    if torch._C._current_graph_task_id() == -1:  # no backward pass runs
        seen = torch.cat([mean, var, mean.new_ones(1)]).double()  # (2 C + 1,)
        norm.sums = seen if norm.sums is None else norm.sums + seen
    return out


class StepBatchNorm1d(nn.BatchNorm1d):
    sums: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return normalise(self, input)


class StepBatchNorm2d(nn.BatchNorm2d):
    sums: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return normalise(self, input)


OURS: dict[type, type] = {nn.BatchNorm1d: StepBatchNorm1d, nn.BatchNorm2d: StepBatchNorm2d}


def norms_of(model: nn.Module) -> list[Any]:
    """Lists a model's norms of ours, in its order."""
    return [
        module
        for module in model.modules()
        if isinstance(module, StepBatchNorm1d | StepBatchNorm2d)
    ]


def replace_norms(model: nn.Module) -> None:
    """Makes every BatchNorm of a model ours, in place: parameters, buffers and names stay.

    Raises `Refusal` as `check_norms` does.
    """
    check_norms(model)
    for module in model.modules():
        if type(module) in OURS:
            module.__class__ = OURS[type(module)]


def check_norms(model: nn.Module) -> None:
    """Raises `Refusal` for a BatchNorm with a forward pass of its own, or without running
    statistics.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (
            type(module) not in (*OURS, *OURS.values()) or not module.track_running_stats
        ):
            kind = type(module).__name__
            rule = (
                f"{name} is a {kind} without running statistics"
                if type(module) in OURS
                else f"{name} is a {kind}, whose statistics are not known here"
            )
            raise refuse(
                f"model = {type(model).__name__}",
                rule,
                "use a model with torch's BatchNorm1d or BatchNorm2d, or without BatchNorm",
            )


@torch.no_grad()
def move_statistics(norms: Sequence[Any], group: Any, changed: bool = True) -> None:
    """Moves the running statistics by those of a step, which it forgets (a collective of the
    data-parallel ranks' `group`; None: one rank).

    Only forgets those of a step that did not change the weights, as no rank's were.

    running = (1 - momentum) running + momentum mean; without a momentum they become the mean over
    all steps, as in torch.
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
        ran = seen[-1] > 0  # it lies on this stage of a pipeline; the device is not waited for
        norm.num_batches_tracked += ran
        share = ran * (
            1 / norm.num_batches_tracked.clamp(min=1).double()
            if norm.momentum is None
            else norm.momentum
        )
        means = (seen[:-1] / seen[-1].clamp(min=1)).split(norm.num_features)
        for running, mean in zip((norm.running_mean, norm.running_var), means, strict=True):
            running.copy_(running.double().lerp(mean, share.double()))
