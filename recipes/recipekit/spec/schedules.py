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
    def decay_steps(self) -> int: ...  # of wsd: the last ones
    @property
    def schedule(self) -> str: ...  # "cosine", "linear", "constant" or "wsd": after the warm-up


def lr_at(numbers: Schedule, step: int) -> float:
    """Computes the learning rate of optimizer step `step` (1, 2, ...): linear warm-up, then cosine,
    linear, constant or wsd.

    wsd (warm-up, stable, decay) is of MiniCPM, arXiv 2404.06395, section 4: the rate stays at lr,
    and falls in the last steps only, so that steps before these do not depend on how many there
    are. Its decay is 1 - sqrt of the share of it that is done, which ended at lower losses than a
    linear one (Hägele et al., arXiv 2405.18392) and, unlike MiniCPM's exponential one, at min_lr.
    """
    if step <= numbers.warmup_steps:
        return numbers.lr * step / numbers.warmup_steps
    # the last step before it falls
    begun = (
        numbers.steps - numbers.decay_steps if numbers.schedule == "wsd" else numbers.warmup_steps
    )
    if numbers.schedule == "constant" or step <= begun:
        return numbers.lr
    done = (step - begun) / max(1, numbers.steps - begun)
    falls = {
        "linear": lambda: 1 - done,
        "cosine": lambda: (1 + math.cos(math.pi * done)) / 2,
        "wsd": lambda: 1 - math.sqrt(done),
    }
    left = falls[numbers.schedule]()
    return numbers.min_lr + (numbers.lr - numbers.min_lr) * left
