"""Interface between a training engine and the loop, the tasks, the checkpoints and the export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # light: importing torch takes seconds
    import torch
    from torch import nn


class Engine(Protocol):
    """A model with its optimizer.

    Every rank has an engine, and all ranks must call its methods in the same order.

    A step consists of one `backward` and one `step` call per micro-batch. `accumulate` sets the
    number of micro-batches. The engine divides each loss by this number and averages the gradients
    over the data-parallel ranks. On the last micro-batch it clips the gradients and updates the
    weights.
    """

    device: torch.device
    module: nn.Module
    optimizer: Any  # has `param_groups`
    micro_batches: int  # per step, under a pipeline
    # A step whose gradient norm is above this number, or not finite, changes neither weights nor
    # optimizer states. It must be the same on every rank. By default it is infinite.
    most_norm: float

    def __call__(self, *inputs: object, **named: object) -> Any: ...
    def backward(self, loss: torch.Tensor) -> Any: ...
    def step(self) -> Any: ...
    def train(self) -> Any: ...
    def eval(self) -> Any: ...
    def destroy(self) -> None: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    # Set the number of micro-batches per step on this rank from the next step on. Must be called
    # between two steps.
    def accumulate(self, micro_batches: int) -> None: ...
    def is_gradient_accumulation_boundary(self) -> bool: ...
    def get_global_grad_norm(self) -> Any: ...
    def current_loss_scale(self) -> float | None: ...  # None unless in fp16
    # Return a function that sets the counters of steps and samples and the fp16 loss scale back to
    # their present values. Must be called between two steps.
    def record_counters(self) -> Callable[[], None]: ...

    def train_batch(self, batches: Iterator[Any]) -> torch.Tensor: ...  # a full pipeline step
    def eval_batch(self, batches: Iterator[Any]) -> torch.Tensor: ...

    # Register a function that is called once per step, between the last backward pass and the
    # optimizer. At that point all gradients are complete but not yet clipped, and no weight has
    # changed. The gradients are summed over the ranks if the optimizer expects summed gradients.
    # Functions are called in reverse order of registration.
    before_step: Callable[[Callable[[], None]], None]
    # Register a function that is called once per step, after the optimizer. Its argument is True if
    # the weights have changed. The weights do not change if a gradient overflowed.
    after_step: Callable[[Callable[[bool], None]], None]
    # (step folder, blueprint, layout, whether a copy is written later) -> (value, file) for each
    # file of this rank. The value is None if the file is already written; otherwise the caller must
    # write it. This is a collective operation, so a rank must raise a disk error only after it has
    # taken part in every collective.
    save_states: Callable[[Path, Any, Any, bool], list[tuple[Any, Path]]]
    # (step folder, blueprint, layout, whether a step has been taken): restore the states that
    # `save_states` saved in this layout. This is a collective operation.
    load_states: Callable[[Path, Any, Any, bool], None]
