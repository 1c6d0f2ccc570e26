"""Which rank keeps which of Adafactor's states: rows and columns of the tensors of which it has a
part, of vectors its elements.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..spec.optimizer_specs import FACTORS, state_sizes
from .blueprint import Extent, Layout, Tensor, flat_groups, flat_tensors, groups_of, local_shape

ROWS, COLUMNS, ELEMENTS = FACTORS


def state_of(tensor: Tensor, state: str) -> Tensor:
    """Returns the tensor that is kept as a state: of the weight's shape, or (..., R) and (..., C)
    of a weight (..., R, C).

    What tensor parallelism cuts by rows has cut rows and whole columns, and the reverse.
    """
    if state not in (ROWS, COLUMNS):
        return tensor
    gone = len(tensor.shape) - (1 if state == ROWS else 2)
    shape = tuple(size for dim, size in enumerate(tensor.shape) if dim != gone)
    if tensor.cut is None or tensor.cut[0] == gone:
        return replace(tensor, shape=shape, cut=None, ranges=())
    return replace(tensor, shape=shape, cut=(tensor.cut[0] - (tensor.cut[0] > gone), tensor.cut[1]))


@dataclass(frozen=True)
class Kept:
    """Says that a data rank keeps elements start..stop of its shard of a state, from element
    `offset` of the flat tensor's state on.
    """

    tensor: Tensor
    state: str
    rank: int
    offset: int
    start: int
    stop: int


def kept_of(
    flat: list[tuple[Tensor, int]],
    extents: list[list[Extent]],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[Kept]:
    """Yields the states of one flat tensor of ZeRO-1, -2 or -3 on all its data ranks, as
    optim/adafactor.py makes them: one tensor's after the other's.

    `flat` and `extents` are those of `flat_tensors` and `flat_groups`, `shapes` those of the
    shards, by name. A rank has one part of a tensor at most.
    """
    sizes = Counter[tuple[int, str]]()
    for (tensor, _), pieces in zip(flat, extents, strict=True):
        for at in pieces:
            for state, size in state_sizes(shapes[tensor.name], at.stop - at.start).items():
                start = at.start if state == ELEMENTS else 0
                yield Kept(tensor, state, at.rank, sizes[at.rank, state], start, start + size)
                sizes[at.rank, state] += size


def sizes_of(
    groups: list[list[tuple[Tensor, int]]], layout: Layout, shapes: Mapping[str, tuple[int, ...]]
) -> list[dict[int, Counter[str]]]:
    """Counts the elements of each state, by data rank, for every parameter that an optimizer has of
    such groups: ZeRO's flat tensors, without ZeRO the tensors.

    Without ZeRO rank 0 stands for all.
    """
    if layout.zero_stage == 0:
        return [
            {0: Counter(state_sizes(shapes[tensor.name], numel))}
            for group in groups
            for tensor, numel in group
        ]
    found = []
    for flat, (_, _, extents) in zip(
        flat_tensors(groups, layout), flat_groups(groups, layout), strict=True
    ):
        own: dict[int, Counter[str]] = {}
        for kept in kept_of(flat, extents, shapes):
            own.setdefault(kept.rank, Counter())[kept.state] += kept.stop - kept.start
        found.append(own)
    return found


def elements_of(tensors: list[Tensor], layout: Layout, tp_rank: int) -> Counter[int]:
    """Counts the elements of all states that each data rank keeps of the tensors that it holds
    (`held`).

    Without ZeRO rank 0 stands for all.
    """
    found, shapes = (
        Counter[int](),
        {tensor.name: local_shape(tensor, layout.mesh.tp, tp_rank) for tensor in tensors},
    )
    for own in sizes_of(groups_of(tensors, layout, tp_rank), layout, shapes):
        found.update({rank: sizes.total() for rank, sizes in own.items()})
    return found
