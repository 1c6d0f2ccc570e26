"""Workarounds around DeepSpeed's optimizer step that need our optimizers and groups.

Weights change only here, in `undo_hidden_step` of `compat/deepspeed.py` and in `train_step`.
"""

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ..compat.deepspeed import (
    DeepSpeedEngine,
    after_step,
    before_step,
    disable_clipping,
    discard_steps,
    leave_gradients,
    limit_norm,
    set_grad_norm,
    set_micro_batches,
    sum_gradients_without_copy,
    sum_partition_without_copy,
)
from ..parallel import expert
from .one_bit import OneBitAdam


def accumulate(engine: DeepSpeedEngine, micro_batches: int) -> None:
    """Set the number of micro-batches per step on this rank, starting with the next step.

    This must be called between two steps.
    """
    if isinstance(optimizer := engine.basic_optimizer, OneBitAdam):
        leave_gradients(engine, optimizer.compresses)
    set_micro_batches(engine, micro_batches)


def sum_without_copies(engine: DeepSpeedEngine) -> None:
    """Add bf16 gradients to DeepSpeed's fp32 sums without an fp32 copy, under ZeRO-1 and ZeRO-2.

    The sums keep their bits. Other optimizers of DeepSpeed are not changed.
    """
    if isinstance(engine.optimizer, BF16_Optimizer):
        sum_gradients_without_copy(cast("Any", engine.optimizer))
    elif isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        sum_partition_without_copy(cast("Any", engine.optimizer))


def keep_momentum_norm(engine: DeepSpeedEngine) -> None:
    """Report the momentum's norm as grad_norm if the optimizer exchanges signs.

    In that case, no gradient over all ranks exists.
    """
    if isinstance(optimizer := engine.basic_optimizer, OneBitAdam):

        def tell(applied: bool) -> None:
            if applied and optimizer.norm is not None:
                set_grad_norm(engine, optimizer.norm)

        after_step(engine, tell)


def norm_limit_of(engine: DeepSpeedEngine) -> float:
    """Return the largest gradient norm of a step that `engine` takes, or infinity.

    If an optimizer exchanges signs, its gradients have no common norm, and so no limit.
    """
    optimizer = engine.basic_optimizer
    return math.inf if exchanges_signs(optimizer) else engine.most_norm


def exchanges_signs(optimizer: object) -> bool:
    """Return True if the optimizer's next step uses each rank's own gradients."""
    return isinstance(optimizer, OneBitAdam) and optimizer.compresses


def apply_most_norm(engine: DeepSpeedEngine) -> None:
    """Let the engine's steps change nothing if their norm is above `most_norm` or not finite."""
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        limit_norm(engine.optimizer, lambda: norm_limit_of(engine))
        return

    def discards() -> bool:
        norm = float(engine._global_grad_norm)
        return not math.isfinite(norm) or norm > norm_limit_of(engine)

    discard_steps(engine.optimizer, discards)


def keep_grad_norm(engine: DeepSpeedEngine) -> None:
    """Compute the gradient norm and clip by it where DeepSpeed 0.19.8 does not.

    DeepSpeed computes no norm with a plain optimizer (fp32, ZeRO-0). Under a pipeline, its clipping
    counts only tensor-parallel parameters in all stages after the first (runtime/utils.py,
    clip_grad_norm_).
    """
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        return

    def clip() -> None:
        norm = grad_norm(engine)
        if exchanges_signs(engine.optimizer):
            # Each rank has its own gradients. The sum only shows whether all of them are finite.
            dist.all_reduce(norm, group=engine.optimizer.ranks)
        if (most := engine.gradient_clipping()) > 0:
            scale = torch.clamp(most / (norm + 1e-6), max=1.0)
            for parameter in engine.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        set_grad_norm(engine, norm)

    before_step(engine, clip)
    disable_clipping(engine)


def grad_norm(engine: DeepSpeedEngine) -> torch.Tensor:
    """Compute the norm of all gradients (a collective operation).

    Each parameter counts once across the tensor, pipeline and expert ranks.
    """
    first = engine.mpu is None or engine.mpu.get_tensor_model_parallel_rank() == 0
    squares = torch.zeros((), dtype=torch.float64, device=engine.device)
    for parameter in engine.module.parameters():
        counted = (first or getattr(parameter, "model_parallel", False)) and not getattr(
            parameter, "ds_pipe_replicated", False
        )
        if parameter.grad is not None and counted:
            square = parameter.grad.detach().double().square().sum()
            if (holders := expert.expert_parallel_group(parameter)) is not None:
                dist.all_reduce(square, group=holders)
            squares += square
    if engine.mpu is not None:
        dist.all_reduce(squares, group=engine.mpu.get_model_parallel_group())
    return squares.sqrt()
