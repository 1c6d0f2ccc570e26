"""The value of a step that was the first on all ranks not to be finite."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class BadValue:
    """A value that is not finite, as a hook on one rank has seen it.

    `what` is "output", "gradient of the output" or "gradient". `order` is the number of values that
    the rank's hooks had seen before it in the step. `stage` is the pipeline stage, or 0.
    """

    rank: int
    host: str
    device: str
    module: str  # or the name of a parameter
    what: str
    backward: bool  # seen in a backward pass
    micro_batch: int  # of this rank, from 1
    stage: int
    order: int

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        return (
            f"the {self.what} of {self.module} (micro-batch {self.micro_batch}, {way} pass) on rank"
            f" {self.rank} ({self.host}, {self.device})"
        )


def first_of_ranks(values: Iterable[BadValue]) -> BadValue | None:
    """Return the value from which the others follow, or None without values.

    `values` are the first bad values of each rank and direction. The outputs of one stage are the
    inputs of the next, and gradients come back in the reverse order. Therefore a forward pass comes
    before a backward pass, in the lowest stage; without one, the highest stage is the first. Ranks
    of a stage that exchange values, as in tensor parallelism, see them in the same order.
    """
    key = lambda value: (  # noqa: E731
        value.backward,
        -value.stage if value.backward else value.stage,
        value.order,
        value.rank,
    )
    return min(values, key=key, default=None)
