"""What we mend in DeepSpeed around the optimizer's step: this file and `train_step` are all that
changes weights.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import nn

from ..parallel import expert
from .one_bit import OneBitAdam


class DeepSpeedEngine(Protocol):
    """Names what our repairs use of DeepSpeed 0.19.8's engine, its private parts included: it has
    no other way.
    """

    device: torch.device
    module: nn.Module
    optimizer: Any  # torch's, or DeepSpeed's around it
    basic_optimizer: Any  # the one inside, which computes the update
    mpu: Any  # the model-parallel groups, None where DeepSpeed's own are right
    micro_batches: int  # of a step, under a pipeline
    micro_steps: int  # micro-batches that it has taken
    _config: Any
    _global_grad_norm: Any
    enable_backward_allreduce: bool
    _take_model_step: Callable[..., None]
    clip_fp32_gradients: Callable[[], None]

    def train_batch_size(self) -> int: ...
    def gradient_accumulation_steps(self) -> int: ...
    def gradient_clipping(self) -> float: ...
    def was_step_applied(self) -> bool: ...


def undo_hidden_step(engine: DeepSpeedEngine) -> None:
    """Makes step 1 the first one that the optimizer takes.

    DeepSpeed 0.19.8 allocates the states of its ZeRO-0 mixed-precision optimizer by a step with
    zero gradients (unfused_optimizer.py, initialize_optimizer_states): it decays the weights once,
    and Adam's bias correction is one step ahead ever after, which makes the first update a quarter
    too small.
    """
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        engine.basic_optimizer.state.clear()
        with torch.no_grad():
            for masters, weights in zip(
                engine.optimizer.fp32_groups, engine.optimizer.fp16_groups, strict=True
            ):
                for master, weight in zip(masters, weights, strict=True):
                    master.copy_(weight)


def accumulate(engine: DeepSpeedEngine, micro_batches: int) -> None:
    """Makes each step from here on take so many micro-batches on this rank; called between two
    steps.

    DeepSpeed 0.19.8 ends a step where the number of all micro-batches so far is a multiple of those
    of a step (engine.py, is_gradient_accumulation_boundary), so after its own set_train_batch_size
    a first step may end early: after three steps of two, one of four would end after two. It counts
    from here.
    """
    if isinstance(engine.basic_optimizer, OneBitAdam):
        _leave_gradients(engine, engine.basic_optimizer)
    if (before := engine.gradient_accumulation_steps()) == micro_batches:
        return
    engine._config.train_batch_size = engine.train_batch_size() // before * micro_batches
    engine._config.gradient_accumulation_steps = engine.micro_batches = micro_batches
    engine.micro_steps = 0


def _leave_gradients(engine: DeepSpeedEngine, optimizer: OneBitAdam) -> None:
    """Leaves the gradients of the next step as each rank has them, not summed and not clipped,
    where its optimizer sends signs.
    """
    # where it is False DeepSpeed tells all ranks of an overflow on one
    engine.enable_backward_allreduce = not optimizer.compresses
    if optimizer.compresses:
        engine._config.gradient_clipping = 0.0
        if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
            engine.optimizer.clip_grad = 0.0


def keep_momentum_norm(engine: DeepSpeedEngine) -> None:
    """Makes grad_norm that of the momentum, where the optimizer sends signs: a gradient of all
    ranks is never made.
    """
    if isinstance(optimizer := engine.basic_optimizer, OneBitAdam):

        def tell(applied: bool) -> None:
            if applied and optimizer.norm is not None:
                engine._global_grad_norm = optimizer.norm

        after_step(engine, tell)


def before_step(engine: DeepSpeedEngine, act: Callable[[], None]) -> None:
    """Calls `act` once a step, between the last backward pass and the optimizer: every gradient is
    there, summed over the ranks (but for signs of 1-bit Adam), and nothing has changed yet.

    The only such place that DeepSpeed 0.19.8 has under every ZeRO stage and under a pipeline. What
    is added later acts earlier.
    """
    take_step = engine._take_model_step

    def acting(*args: Any) -> None:
        act()
        take_step(*args)

    engine._take_model_step = acting


def after_step(engine: DeepSpeedEngine, act: Callable[[bool], None]) -> None:
    """Calls `act` once a step, after the optimizer, with whether the weights have changed:
    DeepSpeed skips the step of a gradient that overflows.
    """
    take_step = engine._take_model_step

    def acting(*args: Any) -> None:
        take_step(*args)
        act(engine.was_step_applied())

    engine._take_model_step = acting


def keep_grad_norm(engine: DeepSpeedEngine) -> None:
    """Computes the gradient norm and clips by it, in the two cases where DeepSpeed 0.19.8 does not.

    It has no norm with a plain optimizer (fp32, ZeRO-0). Under a pipeline its clipping counts, in
    the stages behind the first, only what tensor parallelism cut (runtime/utils.py,
    clip_grad_norm_).
    """
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        return

    def clip() -> None:
        norm = grad_norm(engine)
        if (most := engine.gradient_clipping()) > 0:
            scale = torch.clamp(most / (norm + 1e-6), max=1.0)
            for parameter in engine.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        engine._global_grad_norm = norm

    before_step(engine, clip)
    engine.clip_fp32_gradients = lambda: None


def grad_norm(engine: DeepSpeedEngine) -> torch.Tensor:
    """Computes the norm of all gradients, each parameter counted once over the tensor, pipeline and
    expert ranks (a collective).
    """
    first = engine.mpu is None or engine.mpu.get_tensor_model_parallel_rank() == 0
    squares = torch.zeros((), dtype=torch.float64, device=engine.device)
    for parameter in engine.module.parameters():
        counted = (first or getattr(parameter, "model_parallel", False)) and not getattr(
            parameter, "ds_pipe_replicated", False
        )
        if parameter.grad is not None and counted:
            square = parameter.grad.detach().double().square().sum()
            if (holders := expert.group_of(parameter)) is not None:
                dist.all_reduce(square, group=holders)
            squares += square
    if engine.mpu is not None:
        dist.all_reduce(squares, group=engine.mpu.get_model_parallel_group())
    return squares.sqrt()
