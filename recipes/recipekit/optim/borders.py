"""Says where whole tensors lie in what one rank's optimizer updates, and adds up over the ranks what each has of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..parallel.blueprint import Layout, Tensor, flat_groups, flat_tensors, groups_of, runs
from ..parallel.groups import Groups
from ..refusal import refuse

PIECE = 1 << 24  # elements that are squared in fp64 at a time


@dataclass(frozen=True)
class Part:
    """Is what a rank has of one tensor: elements start..stop of a parameter of its optimizer; `cut`: other tensor ranks have others.

    `shape` is that of the whole tensor. Of it a tensor rank has a shard, in which this part begins at element `first`: the indices
    `runs` of dimension `dim`, or all if it is not cut.
    """

    start: int
    stop: int
    cut: bool = False
    shape: tuple[int, ...] = ()
    first: int = 0
    dim: int = 0
    runs: tuple[tuple[int, int], ...] = ()

    def put(self, values: torch.Tensor, whole: torch.Tensor) -> None:
        """Writes this part, (stop - start,), into the whole tensor."""
        if not self.cut:
            whole.view(-1)[self.first : self.first + len(values)] = values
            return
        sizes = [stop - start for start, stop in self.runs]
        shard = whole.new_zeros([sum(sizes) if dim == self.dim else size for dim, size in enumerate(self.shape)])
        shard.view(-1)[self.first : self.first + len(values)] = values
        for (start, _), piece in zip(self.runs, shard.split(sizes, self.dim), strict=True):
            whole.narrow(self.dim, start, piece.shape[self.dim]).copy_(piece)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this part, (stop - start,), of the whole tensor."""
        shard = torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.runs], self.dim) if self.cut else whole
        return shard.reshape(-1)[self.first : self.first + self.stop - self.start]


@dataclass(frozen=True)
class Borders:
    """Lists the parts of tensors that lie in each parameter of an optimizer; a parameter that is not listed is a tensor of its own.

    `partitions`: the group of ranks that have the other elements of every parameter, None where a rank has all of them;
    `tensor_ranks`: of those that have the others of a tensor that tensor parallelism cut. Under a pipeline neither counts another
    stage's copy of a tied weight. Sums travel from `device`; None: from where the parameters are.
    """

    parts: Mapping[torch.Tensor, list[Part]] = field(default_factory=dict)
    partitions: Any = None
    tensor_ranks: Any = None
    device: torch.device | None = None

    def of(self, parameter: torch.Tensor) -> list[Part]:
        """Returns the parts that lie in a parameter. FSDP2 cuts rows as torch.chunk does."""
        if parameter in self.parts:
            return self.parts[parameter]
        first, own = 0, local(parameter)
        if isinstance(parameter, DTensor) and parameter.shape:
            rows = -(-parameter.shape[0] // parameter.device_mesh.size()) * parameter.device_mesh.get_local_rank()
            first = min(rows, parameter.shape[0]) * (parameter.numel() // max(1, parameter.shape[0]))
        return [Part(0, own.numel(), shape=tuple(parameter.shape), first=first)]

    def add_up(self, sums: torch.Tensor, parts: list[Part]) -> torch.Tensor:
        """Returns the sums (N, ...) of N tensors over all ranks that have parts of them, where `sums` are this rank's (a collective)."""
        total = sums.to(self.device or sums.device)
        if self.partitions is not None:
            dist.all_reduce(total, group=self.partitions)
        if self.tensor_ranks is not None and any(part.cut for part in parts):
            cut = torch.tensor([number for number, part in enumerate(parts) if part.cut], device=total.device)
            of_cut = total[cut]
            dist.all_reduce(of_cut, group=self.tensor_ranks)
            total[cut] = of_cut
        return total.to(sums.device)

    def join(self, flat: torch.Tensor, wholes: list[torch.Tensor], parts: list[Part]) -> None:
        """Makes whole tensors of their parts (a collective): `wholes` lie in `flat`, and hold this rank's parts and zeros."""
        if self.partitions is not None:
            dist.all_reduce(flat, group=self.partitions)
        for whole, part in zip(wholes, parts, strict=True):
            if self.tensor_ranks is not None and part.cut:
                dist.all_reduce(whole, group=self.tensor_ranks)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank has of a tensor, as FSDP2 divides it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the squares, () fp64."""
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for piece in flat.split(PIECE):
        total += piece.double().square().sum()
    return total


def borders_of(tensors: list[Tensor], layout: Layout, groups: Groups, optimizer: Any, device: torch.device) -> Borders:
    """Finds the borders in what DeepSpeed's `optimizer` made of the tensors that a rank holds.

    Raises `Refusal` where tensor ranks cut their flat tensors between other tensors, since they add up tensor by tensor.
    """
    made = [groups_of(tensors, layout, tp_rank) for tp_rank in range(layout.mesh.tp)]
    names = [[[tensor.name for tensor, _ in flat] for flat in flat_tensors(each, layout)] for each in made]
    if any(other != names[0] for other in names):
        rule = "ends sub-groups between other tensors on other tensor ranks, which then could not add up the norms of a tensor"
        raise refuse(f"zero_optimization.sub_group_size = {layout.sub_group_size}", rule, "leave it out")
    parts: dict[torch.Tensor, list[Part]] = {}
    rank = groups.coords["dp"] * layout.mesh.sp + groups.coords["sp"]
    for parameter, own in zip(_parameters(optimizer, layout.zero_stage), _parts(made[groups.coords["tp"]], layout, rank, groups.coords["tp"]), strict=True):
        assert own[-1].stop <= parameter.numel() and (layout.zero_stage or own[-1].stop == parameter.numel()), "it is not the tensor that the layout names"
        parts[parameter] = own
    return Borders(parts, optimizer.dp_process_group if layout.zero_stage else None, groups.tp_group, device)


def _parameters(optimizer: Any, stage: int) -> list[torch.Tensor]:
    """Lists the parameters of the optimizer inside, in the order in which checkpoints number them."""
    if stage == 3:  # its groups hold a sub-group's while it is updated, and nothing at other times
        return list(optimizer.fp32_partitioned_groups_flat)
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parts(made: list[list[tuple[Tensor, int]]], layout: Layout, rank: int, tp_rank: int) -> Iterator[list[Part]]:
    """Yields for each parameter of the optimizer a data rank's parts of its tensors; a part may be empty."""
    if layout.zero_stage == 0:
        yield from ([_part(tensor, layout, tp_rank, (0, numel, 0))] for group in made for tensor, numel in group)
        return
    for tensors, (_, _, extents) in zip(flat_tensors(made, layout), flat_groups(made, layout), strict=True):
        own = []
        for (tensor, _), pieces in zip(tensors, extents, strict=True):
            mine = [(at.offset, at.offset + at.stop - at.start, at.start) for at in pieces if at.rank == rank]
            own.append(_part(tensor, layout, tp_rank, mine[0] if mine else (0, 0, 0)))
        yield own


def _part(tensor: Tensor, layout: Layout, tp_rank: int, place: tuple[int, int, int]) -> Part:
    """Makes the part of a tensor that lies at `place`: start, stop, and where it begins in the tensor rank's shard."""
    start, stop, first = place
    if tensor.cut is None or layout.mesh.tp == 1:
        return Part(start, stop, False, tensor.shape, first)
    return Part(start, stop, True, tensor.shape, first, tensor.cut[0], tuple(runs(tensor, layout.mesh.tp, tp_rank)))
