"""Says where whole tensors lie in what one rank's optimizer updates, and adds up over the ranks
what each has of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..parallel.blueprint import (
    Layout,
    Tensor,
    flat_groups,
    flat_tensors,
    groups_of,
    local_shape,
    runs,
)
from ..parallel.groups import Groups
from ..spec.optimizer_specs import AT_ONCE
from ..spec.refusal import refuse


@dataclass(frozen=True)
class Part:
    """Is what a rank has of one tensor: elements start..stop of a parameter of its optimizer.

    They are those from `first` on of a row-major tensor of `shape`. `cut`: the dimension of which
    other tensor ranks have other indices, `whole` in all, and this one has `runs`; None: each
    tensor rank has the tensor whole.
    """

    start: int
    stop: int
    shape: tuple[int, ...] = ()
    first: int = 0
    cut: int | None = None
    whole: int = 0
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the shape of the tensor before tensor ranks divided it."""
        return tuple(self.whole if dim == self.cut else size for dim, size in enumerate(self.shape))

    def put(self, values: torch.Tensor, whole: torch.Tensor) -> None:
        """Writes this part, (stop - start,), into the whole tensor, (*sizes,)."""
        if self.cut is None:
            whole.view(-1)[self.first : self.first + len(values)] = values
            return
        shard = whole.new_zeros(self.shape)
        shard.view(-1)[self.first : self.first + len(values)] = values
        for (start, stop), piece in zip(
            self.runs,
            shard.split([stop - start for start, stop in self.runs], self.cut),
            strict=True,
        ):
            whole.narrow(self.cut, start, stop - start).copy_(piece)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this part, (stop - start,), of the whole tensor, (*sizes,)."""
        shard = (
            whole
            if self.cut is None
            else torch.cat(
                [whole.narrow(self.cut, start, stop - start) for start, stop in self.runs], self.cut
            )
        )
        return shard.reshape(-1)[self.first : self.first + self.stop - self.start]


@dataclass(frozen=True)
class Borders:
    """Lists the parts of tensors that lie in each parameter of an optimizer; a parameter that is
    not listed is a tensor of its own.

    `partitions`: the group of ranks that have the other elements of every parameter, None where a
    rank has all of them; `tensor_ranks`: of those that have the others of a tensor that tensor
    parallelism cut. Under a pipeline neither counts another stage's copy of a tied weight. Sums
    travel from `device`; None: from where the parameters are.
    """

    parts: Mapping[torch.Tensor, list[Part]] = field(default_factory=dict)
    partitions: Any = None
    tensor_ranks: Any = None
    device: torch.device | None = None

    def of(self, parameter: torch.Tensor) -> list[Part]:
        return self.parts.get(parameter) or [_own(parameter)]

    def add_up(self, sums: torch.Tensor, cut: list[slice]) -> torch.Tensor:
        """Returns `sums` (N, ...) added up over all ranks that have parts of the same tensors (a
        collective); `cut`: those to which each tensor rank adds something else.
        """
        total = sums.to(self.device or sums.device)
        if self.partitions is not None:
            dist.all_reduce(total, group=self.partitions)
        if self.tensor_ranks is not None and cut:
            of_cut = torch.cat([total[own] for own in cut])
            dist.all_reduce(of_cut, group=self.tensor_ranks)
            for own, added in zip(
                cut, of_cut.split([own.stop - own.start for own in cut]), strict=True
            ):
                total[own] = added
        return total.to(sums.device)

    def join(self, flat: torch.Tensor, wholes: list[torch.Tensor], parts: list[Part]) -> None:
        """Makes whole tensors of their parts (a collective): `wholes` lie in `flat`, and hold this
        rank's parts and zeros.
        """
        if self.partitions is not None:
            dist.all_reduce(flat, group=self.partitions)
        for whole, part in zip(wholes, parts, strict=True):
            if self.tensor_ranks is not None and part.cut is not None:
                dist.all_reduce(whole, group=self.tensor_ranks)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank has of a tensor, as FSDP2 divides it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _own(parameter: torch.Tensor) -> Part:
    """Returns what this rank has of a parameter that is a tensor of its own; FSDP2 divides its rows
    as torch.chunk does.
    """
    numel, first = local(parameter).numel(), 0
    if isinstance(parameter, DTensor):
        rows = (
            -(-parameter.shape[0] // parameter.device_mesh.size())
            * parameter.device_mesh.get_local_rank()
        )
        first = min(rows, parameter.shape[0]) * (parameter.numel() // max(1, parameter.shape[0]))
    return Part(0, numel, tuple(parameter.shape), first)


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the squares, () fp64."""
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for piece in flat.split(AT_ONCE):
        total += piece.double().square().sum()
    return total


def borders_of(
    tensors: list[Tensor], layout: Layout, groups: Groups, optimizer: Any, device: torch.device
) -> Borders:
    """Finds the borders in what DeepSpeed's `optimizer` made of the tensors that a rank holds.

    Raises `Refusal` where tensor ranks cut their flat tensors between other tensors, since they add
    up tensor by tensor.
    """
    made = [groups_of(tensors, layout, tp_rank) for tp_rank in range(layout.mesh.tp)]
    names = [
        [[tensor.name for tensor, _ in flat] for flat in flat_tensors(each, layout)]
        for each in made
    ]
    if any(other != names[0] for other in names):
        rule = (
            "ends sub-groups at different tensors on different tensor ranks, so the norm of a"
            " tensor could not be summed"
        )
        raise refuse(
            f"zero_optimization.sub_group_size = {layout.sub_group_size}", rule, "leave it out"
        )
    parts: dict[torch.Tensor, list[Part]] = {}
    rank = groups.coords["dp"] * layout.mesh.sp + groups.coords["sp"]
    tp_rank = groups.coords["tp"]
    for parameter, own in zip(
        _parameters(optimizer, layout.zero_stage),
        _parts(made[tp_rank], layout, rank, tp_rank),
        strict=True,
    ):
        assert own[-1].stop <= parameter.numel() and (
            layout.zero_stage or own[-1].stop == parameter.numel()
        ), "it is not the tensor that the layout names"
        parts[parameter] = own
    return Borders(
        parts, optimizer.dp_process_group if layout.zero_stage else None, groups.tp_group, device
    )


def _parameters(optimizer: Any, stage: int) -> list[torch.Tensor]:
    """Lists the parameters of the optimizer inside, in the order in which checkpoints number
    them.
    """
    if stage == 3:  # its groups hold a sub-group's while it is updated, and nothing at other times
        return list(optimizer.fp32_partitioned_groups_flat)
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parts(
    made: list[list[tuple[Tensor, int]]], layout: Layout, rank: int, tp_rank: int
) -> Iterator[list[Part]]:
    """Yields for each parameter of the optimizer a data rank's parts of its tensors; a part may be
    empty.
    """

    def part(tensor: Tensor, start: int, stop: int, first: int) -> Part:
        shape = local_shape(tensor, layout.mesh.tp, tp_rank)
        if tensor.cut is None or layout.mesh.tp == 1:
            return Part(start, stop, shape, first)
        return Part(
            start,
            stop,
            shape,
            first,
            tensor.cut[0],
            tensor.shape[tensor.cut[0]],
            tuple(runs(tensor, layout.mesh.tp, tp_rank)),
        )

    if layout.zero_stage == 0:
        yield from ([part(tensor, 0, numel, 0)] for group in made for tensor, numel in group)
        return
    for tensors, (_, _, extents) in zip(
        flat_tensors(made, layout), flat_groups(made, layout), strict=True
    ):
        own = []
        for (tensor, _), pieces in zip(tensors, extents, strict=True):
            mine = [
                (at.offset, at.offset + at.stop - at.start, at.start)
                for at in pieces
                if at.rank == rank
            ]
            own.append(part(tensor, *(mine[0] if mine else (0, 0, 0))))
        yield own
