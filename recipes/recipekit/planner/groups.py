"""Counts what a rank's optimizer sees: groups of parameters, and the parts that ZeRO makes of
them.
"""

from dataclasses import dataclass
from math import prod

from ..parallel.blueprint import Blueprint, Layout, Tensor, local_shape


@dataclass(frozen=True)
class Group:
    """Counts the elements of each parameter of one optimizer group in a rank's shard, and the ranks
    over which ZeRO divides them.

    `matrix`: to the optimizer they are matrices.
    """

    numels: tuple[int, ...]
    ranks: int
    matrix: bool = False

    @property
    def numel(self) -> int:
        return sum(self.numels)

    @property
    def padded(self) -> int:
        """Counts the elements of the flat tensor of ZeRO-1 and -2: a multiple of two for each
        rank.
        """
        return -(-self.numel // (2 * self.ranks)) * 2 * self.ranks

    def touched(self, rank: int) -> list[int]:
        """Counts the elements of each parameter that lies, whole or in part, in a rank's partition
        of the flat tensor.
        """
        size, start, found = self.padded // self.ranks, 0, []
        for numel in self.numels:
            if start < (rank + 1) * size and start + numel > rank * size:
                found.append(numel)
            start += numel
        return found

    def parts(self) -> list[int]:
        """Counts the elements of ZeRO-3's partition of each parameter."""
        return [-(-numel // self.ranks) for numel in self.numels]

    def sub_groups(self, most: int) -> list[list[int]]:
        """Divides ZeRO-3's partitions into runs of at least `most` elements (stage3.py,
        _create_fp16_sub_groups).
        """
        parts = self.parts()
        if sum(parts) <= most:
            return [parts]
        runs: list[list[int]] = [[]]
        for part in parts:
            if runs[-1] and sum(runs[-1]) >= most:
                runs.append([])
            runs[-1].append(part)
        return runs


def groups_of(
    blueprint: Blueprint, tensors: list[Tensor], layout: Layout
) -> tuple[list[Group], list[int]]:
    """Divides the tensors of the model that a rank holds into the optimizer's groups and the
    elements of each frozen parameter.

    Divided experts are groups of their own.
    """
    ep = layout.mesh.ep
    found: dict[tuple[int, bool], list[int]] = {}
    frozen = []
    for tensor in tensors:
        expert = ep > 1 and ".experts." in tensor.name
        numel = prod(local_shape(tensor, layout.mesh.tp, 0)) // (ep if expert else 1)
        if tensor.buffer or not numel:
            continue
        if tensor.group is None:
            frozen.append(numel)
        else:
            found.setdefault((tensor.group, expert), []).append(numel)
    return [
        Group(
            tuple(found[key]),
            layout.partitions // (ep if key[1] else 1),
            blueprint.groups[key[0]].matrix,
        )
        for key in sorted(found)
    ], frozen
