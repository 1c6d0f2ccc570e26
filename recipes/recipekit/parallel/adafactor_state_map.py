"""Map of Adafactor's states to ranks.

If a rank has a part of a tensor, it stores the tensor's row and column states. For vectors, the
rank stores only its own elements.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..spec.optimizer_specs import ADAFACTOR_STATES, state_sizes
from .blueprint import (
    Extent,
    Layout,
    Tensor,
    flat_groups,
    flat_tensors,
    local_shape,
    optimizer_groups,
)

ROW_VAR, COL_VAR, ELEMENT_VAR = ADAFACTOR_STATES


def state_tensor(tensor: Tensor, state: str) -> Tensor:
    """Return the tensor of a state: the weight's shape, or (..., R) and (..., C) for (..., R, C).

    If tensor parallelism shards a weight by rows, the row state is sharded and the column state is
    not. If it shards by columns, the reverse is true.
    """
    if state not in (ROW_VAR, COL_VAR):
        return tensor
    gone = len(tensor.shape) - (1 if state == ROW_VAR else 2)
    shape = tuple(size for dim, size in enumerate(tensor.shape) if dim != gone)
    if tensor.cut is None or tensor.cut[0] == gone:
        return replace(tensor, shape=shape, cut=None, ranges=())
    return replace(tensor, shape=shape, cut=(tensor.cut[0] - (tensor.cut[0] > gone), tensor.cut[1]))


@dataclass(frozen=True)
class StateExtent:
    """Part of a state on one data-parallel rank.

    The rank stores elements start..stop of its shard of the state, beginning at element `offset` of
    the flat tensor's state.
    """

    tensor: Tensor
    state: str
    rank: int
    offset: int
    start: int
    stop: int


def state_extents(
    flat: list[tuple[Tensor, int]],
    extents: list[list[Extent]],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[StateExtent]:
    """Yield the states of one ZeRO-1, -2 or -3 flat tensor on all its data-parallel ranks.

    The order is the same as in optim/adafactor.py: one tensor after the other. `flat` and `extents`
    come from `flat_tensors` and `flat_groups`. `shapes` maps names to the shapes of the shards. A
    rank has at most one part of each tensor.
    """
    sizes = Counter[tuple[int, str]]()
    for (tensor, _), pieces in zip(flat, extents, strict=True):
        for at in pieces:
            for state, size in state_sizes(shapes[tensor.name], at.stop - at.start).items():
                start = at.start if state == ELEMENT_VAR else 0
                yield StateExtent(
                    tensor, state, at.rank, sizes[at.rank, state], start, start + size
                )
                sizes[at.rank, state] += size


def state_sizes_by_rank(
    groups: list[list[tuple[Tensor, int]]], layout: Layout, shapes: Mapping[str, tuple[int, ...]]
) -> list[dict[int, Counter[str]]]:
    """Count the elements of each state, by data-parallel rank, for every parameter of an optimizer.

    The optimizer's parameters are ZeRO's flat tensors or, without ZeRO, the tensors of the groups.
    Without ZeRO, rank 0's counts apply to all ranks.
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
        for kept in state_extents(flat, extents, shapes):
            own.setdefault(kept.rank, Counter())[kept.state] += kept.stop - kept.start
        found.append(own)
    return found


def state_numel_by_rank(tensors: list[Tensor], layout: Layout, tp_rank: int) -> Counter[int]:
    """Count the elements of all states on each data-parallel rank, given the `tensors_on_rank`.

    Without ZeRO, rank 0's count applies to all ranks.
    """
    found, shapes = (
        Counter[int](),
        {tensor.name: local_shape(tensor, layout.mesh.tp, tp_rank) for tensor in tensors},
    )
    for own in state_sizes_by_rank(optimizer_groups(tensors, layout, tp_rank), layout, shapes):
        found.update({rank: sizes.total() for rank, sizes in own.items()})
    return found
