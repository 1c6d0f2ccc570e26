"""The learning rate of each optimizer step."""

import math
from typing import Protocol


class Schedule(Protocol):
    """The numbers of a learning-rate schedule; a `Recipe` has them."""

    @property
    def steps(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def min_lr(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def schedule(self) -> str: ...  # "cosine", "linear" or "constant": after the warm-up


def lr_at(numbers: Schedule, step: int) -> float:
    """Computes the learning rate of optimizer step `step` (1, 2, ...): linear warm-up, then cosine, linear or constant."""
    if step <= numbers.warmup_steps:
        return numbers.lr * step / numbers.warmup_steps
    if numbers.schedule == "constant":
        return numbers.lr
    assert numbers.schedule in ("cosine", "linear"), numbers.schedule
    done = (step - numbers.warmup_steps) / max(1, numbers.steps - numbers.warmup_steps)
    left = 1 - done if numbers.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return numbers.min_lr + (numbers.lr - numbers.min_lr) * left
