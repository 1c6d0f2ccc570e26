"""Sizes of an optimizer's parameter groups on a rank, and of their ZeRO partitions."""

from dataclasses import dataclass
from math import prod

from ..parallel.blueprint import Blueprint, Layout, Tensor, keeps_fp32, local_shape


@dataclass(frozen=True)
class GroupSizes:
    """The number of elements in a rank's shard of each parameter in one optimizer group.

    `ranks` is the number of ranks over which ZeRO partitions the parameters. `matrix` is True if
    the optimizer treats the parameters as matrices. `fp32` is True if the parameters stay in fp32
    in a bf16 model.
    """

    numels: tuple[int, ...]
    ranks: int
    matrix: bool = False
    fp32: bool = False

    @property
    def numel(self) -> int:
        return sum(self.numels)

    @property
    def padded(self) -> int:
        """Return the size of ZeRO-1 and -2's flat tensor in elements.

        It is a multiple of two for each rank.
        """
        return -(-self.numel // (2 * self.ranks)) * 2 * self.ranks

    def numels_in_partition(self, rank: int) -> list[int]:
        """Return how many elements of each parameter overlap a rank's part of the flat tensor."""
        size, start, found = self.padded // self.ranks, 0, []
        for numel in self.numels:
            if start < (rank + 1) * size and start + numel > rank * size:
                found.append(numel)
            start += numel
        return found

    def partition_numels(self) -> list[int]:
        """Return the number of elements in ZeRO-3's partition of each parameter."""
        return [-(-numel // self.ranks) for numel in self.numels]

    def sub_groups(self, min_elements: int) -> list[list[int]]:
        """Split ZeRO-3's partitions into consecutive groups of at least `min_elements` elements.

        See stage3.py, _create_fp16_sub_groups.
        """
        parts = self.partition_numels()
        if sum(parts) <= min_elements:
            return [parts]
        runs: list[list[int]] = [[]]
        for part in parts:
            if runs[-1] and sum(runs[-1]) >= min_elements:
                runs.append([])
            runs[-1].append(part)
        return runs


def group_sizes(
    blueprint: Blueprint, tensors: list[Tensor], layout: Layout
) -> tuple[list[GroupSizes], list[int]]:
    """Return the optimizer groups of a rank's tensors, and the size of each frozen parameter.

    The sizes are in elements. Sharded experts are in separate groups. A frozen parameter that stays
    in fp32 in a bf16 model counts twice.
    """
    ep = layout.mesh.ep
    wide = keeps_fp32(layout)
    found: dict[tuple[int, bool], list[int]] = {}
    frozen = []
    for tensor in tensors:
        expert = ep > 1 and ".experts." in tensor.name
        numel = prod(local_shape(tensor, layout.mesh.tp, 0)) // (ep if expert else 1)
        if tensor.buffer or not numel:
            continue
        if tensor.group is None:
            frozen.append(2 * numel if wide and tensor.dtype else numel)
        else:
            found.setdefault((tensor.group, expert), []).append(numel)
    return [
        GroupSizes(
            tuple(found[key]),
            layout.partitions // (ep if key[1] else 1),
            blueprint.groups[key[0]].matrix,
            blueprint.groups[key[0]].fp32,
        )
        for key in sorted(found)
    ], frozen
