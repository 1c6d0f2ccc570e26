"""Names what the loop, the tasks, the checkpoints and the export call of the engine that trains a
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # light: importing torch takes seconds
    import torch
    from torch import nn


class Engine(Protocol):
    """Holds a model with its optimizer.

    Every rank has one, and calls it in the same order as the others.

    A step is one `backward` and one `step` for each of its micro-batches, which `accumulate`
    counts. The engine divides each loss by their number and takes the mean of the gradients over
    the data-parallel ranks; with the last micro-batch it clips them and changes the weights.
    """

    device: torch.device
    module: nn.Module
    optimizer: Any  # has `param_groups`
    micro_batches: int  # of a step, under a pipeline

    def __call__(self, *inputs: Any, **named: Any) -> Any: ...
    def backward(self, loss: torch.Tensor) -> Any: ...
    def step(self) -> Any: ...
    def train(self) -> Any: ...
    def eval(self) -> Any: ...
    def destroy(self) -> None: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    # of the steps from here on, on this rank; called between two steps
    def accumulate(self, micro_batches: int) -> None: ...
    def is_gradient_accumulation_boundary(self) -> bool: ...
    def get_global_grad_norm(self) -> Any: ...

    def train_batch(self, batches: Iterator[Any]) -> torch.Tensor: ...  # a whole step of a pipeline
    def eval_batch(self, batches: Iterator[Any]) -> torch.Tensor: ...

    # Calls a function once a step, between the last backward pass and the optimizer: every gradient
    # is there, summed over the ranks (where the optimizer takes it so) and not yet clipped, and no
    # weight has changed. What is added later acts earlier.
    before_step: Callable[[Callable[[], None]], None]
    # Calls a function once a step, after the optimizer, with whether the weights have changed: no
    # where a gradient overflowed.
    after_step: Callable[[Callable[[bool], None]], None]
    # (step folder, blueprint, layout, whether a copy is to be written later) -> what this rank
    # wrote, or is to write, and where: (None, file) or (value, file). A collective; it raises what
    # a disk raises only when it has taken part in all of it.
    save_states: Callable[[Path, Any, Any, bool], list[tuple[Any, Path]]]
    # (step folder, blueprint, layout, whether a step has been taken): restores what `save_states`
    # saved in this layout (a collective)
    load_states: Callable[[Path, Any, Any, bool], None]
