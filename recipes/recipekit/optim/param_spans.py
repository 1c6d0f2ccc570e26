"""Positions of tensors in an optimizer's parameters, and sums over the shards of all ranks."""

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
    local_shape,
    optimizer_groups,
    shard_ranges,
)
from ..parallel.groups import ProcessGroups
from ..spec.errors import config_error
from ..spec.optimizer_specs import CHUNK_NUMEL


@dataclass(frozen=True)
class TensorSpan:
    """A rank's shard of a tensor: elements start..stop of one of its optimizer's parameters.

    The elements are consecutive in a row-major tensor with shape `shape` and start at `offset`.
    `split_dim` is the dimension that tensor parallelism splits. It has `split_dim_size` indices in
    total, and this tensor-parallel rank stores the indices `runs`. None means that each
    tensor-parallel rank stores the full tensor.
    """

    start: int
    stop: int
    shape: tuple[int, ...] = ()
    offset: int = 0
    split_dim: int | None = None
    split_dim_size: int = 0
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Return the tensor's shape before tensor parallelism split it."""
        return tuple(
            self.split_dim_size if dim == self.split_dim else size
            for dim, size in enumerate(self.shape)
        )

    def write_into(self, values: torch.Tensor, full: torch.Tensor) -> None:
        """Write this shard's values, (stop - start,), into the full tensor."""
        if self.split_dim is None:
            full.view(-1)[self.offset : self.offset + len(values)] = values
            return
        shard = full.new_zeros(self.shape)
        shard.view(-1)[self.offset : self.offset + len(values)] = values
        for (start, stop), piece in zip(
            self.runs,
            shard.split([stop - start for start, stop in self.runs], self.split_dim),
            strict=True,
        ):
            full.narrow(self.split_dim, start, stop - start).copy_(piece)

    def read_from(self, full: torch.Tensor) -> torch.Tensor:
        """Return this shard's values, (stop - start,), from the full tensor."""
        shard = (
            full
            if self.split_dim is None
            else torch.cat(
                [full.narrow(self.split_dim, start, stop - start) for start, stop in self.runs],
                self.split_dim,
            )
        )
        return shard.reshape(-1)[self.offset : self.offset + self.stop - self.start]


@dataclass(frozen=True)
class ParamSpans:
    """The tensor shards in each of an optimizer's parameters.

    A parameter that is not listed is a single tensor. `partitions` is the group of ranks that store
    the remaining elements of every parameter, or None if each rank stores all of them.
    `tensor_ranks` is the group of ranks that store the other shards of a tensor that tensor
    parallelism splits. Under a pipeline, neither group counts a different stage's copy of a tied
    weight. Sums are reduced on `device`, or on the parameters' device if it is None.
    """

    spans: Mapping[torch.Tensor, list[TensorSpan]] = field(default_factory=dict)
    partitions: Any = None
    tensor_ranks: dist.ProcessGroup | None = None
    device: torch.device | None = None

    def spans_of(self, parameter: torch.Tensor) -> list[TensorSpan]:
        return self.spans.get(parameter) or [_local_span(parameter)]

    def all_reduce_sums(self, sums: torch.Tensor, cut: list[slice]) -> torch.Tensor:
        """Add up `sums` (N, ...) over all ranks with shards of the same tensors (a collective).

        `cut` selects the sums to which each tensor-parallel rank contributes a different value.
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

    def gather_full(
        self, flat: torch.Tensor, full_tensors: list[torch.Tensor], spans: list[TensorSpan]
    ) -> None:
        """Assemble full tensors from their shards (a collective operation).

        `full_tensors` are views of `flat`. They contain this rank's shards, and zeros elsewhere.
        """
        if self.partitions is not None:
            dist.all_reduce(flat, group=self.partitions)
        for whole, part in zip(full_tensors, spans, strict=True):
            if self.tensor_ranks is not None and part.split_dim is not None:
                dist.all_reduce(whole, group=self.tensor_ranks)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's local shard if FSDP2 shards the tensor, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_span(parameter: torch.Tensor) -> TensorSpan:
    """Return the span of a parameter that is a single tensor.

    FSDP2 splits the parameter's rows in the same way as torch.chunk.
    """
    numel, first = local_tensor(parameter).numel(), 0
    if isinstance(parameter, DTensor):
        rows = (
            -(-parameter.shape[0] // parameter.device_mesh.size())
            * parameter.device_mesh.get_local_rank()
        )
        first = min(rows, parameter.shape[0]) * (parameter.numel() // max(1, parameter.shape[0]))
    return TensorSpan(0, numel, tuple(parameter.shape), first)


def sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares, () fp64."""
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for piece in flat.split(CHUNK_NUMEL):
        total += piece.double().square().sum()
    return total


def find_param_spans(
    tensors: list[Tensor],
    layout: Layout,
    groups: ProcessGroups,
    optimizer: Any,
    device: torch.device,
) -> ParamSpans:
    """Find the tensor shards in the parameters of DeepSpeed's `optimizer`.

    `tensors` are the tensors that this rank stores. Raise `ConfigError` if sub-groups end at
    different tensors on different tensor-parallel ranks, because these ranks add up their sums
    tensor by tensor.
    """
    made = [optimizer_groups(tensors, layout, tp_rank) for tp_rank in range(layout.mesh.tp)]
    names = [
        [[tensor.name for tensor, _ in flat] for flat in flat_tensors(each, layout)]
        for each in made
    ]
    if any(other != names[0] for other in names):
        rule = (
            "ends sub-groups at different tensors on different tensor ranks, so the norm of a"
            " tensor could not be summed"
        )
        raise config_error(
            f"zero_optimization.sub_group_size = {layout.sub_group_size}", rule, "leave it out"
        )
    parts: dict[torch.Tensor, list[TensorSpan]] = {}
    rank = groups.coords["dp"] * layout.mesh.sp + groups.coords["sp"]
    tp_rank = groups.coords["tp"]
    for parameter, own in zip(
        _inner_parameters(optimizer, layout.zero_stage),
        _spans_per_parameter(made[tp_rank], layout, rank, tp_rank),
        strict=True,
    ):
        assert own[-1].stop <= parameter.numel() and (
            layout.zero_stage or own[-1].stop == parameter.numel()
        ), "it is not the tensor that the layout names"
        parts[parameter] = own
    return ParamSpans(
        parts, optimizer.dp_process_group if layout.zero_stage else None, groups.tp_group, device
    )


def _inner_parameters(optimizer: Any, stage: int) -> list[torch.Tensor]:
    """Return the inner optimizer's parameters, in the order in which checkpoints number them."""
    if stage == 3:  # a group contains a sub-group's parameters only during its update
        return list(optimizer.fp32_partitioned_groups_flat)
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _spans_per_parameter(
    made: list[list[tuple[Tensor, int]]], layout: Layout, rank: int, tp_rank: int
) -> Iterator[list[TensorSpan]]:
    """For each parameter of the optimizer, yield a data-parallel rank's shards of its tensors.

    A shard may be empty.
    """

    def part(tensor: Tensor, start: int, stop: int, first: int) -> TensorSpan:
        shape = local_shape(tensor, layout.mesh.tp, tp_rank)
        if tensor.cut is None or layout.mesh.tp == 1:
            return TensorSpan(start, stop, shape, first)
        return TensorSpan(
            start,
            stop,
            shape,
            first,
            tensor.cut[0],
            tensor.shape[tensor.cut[0]],
            tuple(shard_ranges(tensor, layout.mesh.tp, tp_rank)),
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
