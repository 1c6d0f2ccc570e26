"""The location of each tensor in DeepSpeed's checkpoint files: the file, and the bytes in it.

The format is taken from DeepSpeed 0.19.8: runtime/engine.py, zero/stage_1_and_2.py, zero/stage3.py,
bf16_optimizer.py, fp16/unfused_optimizer.py, pipe/module.py. For sharded experts, see
runtime/engine.py, `_save_moe_checkpoint`.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ..parallel import adafactor_state_map
from ..parallel.blueprint import (
    Blueprint,
    Extent,
    Layout,
    Tensor,
    flat_groups,
    flat_tensors,
    local_shape,
    num_partitions,
    optimizer_groups,
    shard_ranges,
    stages_of_rank,
    state_keys,
    tensors_on_rank,
    weight_dtype,
)
from ..parallel.expert_sharding import ExpertTensorSource, shard_experts
from . import error_feedback
from .torch_files import KeyPath

ZERO12_STATE_KEYS = ("optimizer_state_dict", "base_optimizer_state", "state")


@dataclass(frozen=True)
class Shard:
    """A stored part of a tensor, in segments.

    The shard contains the indices `runs` of dimension `dim` (None: all) of a sub-tensor. The
    sub-tensor has the shape `shape`, and begins at element `base` of the full tensor in row-major
    order. Shards with different content differ in `tp_rank` or `base`.
    """

    shape: tuple[int, ...]
    segments: tuple["FileSegment", ...]
    dim: int | None = None
    runs: tuple[tuple[int, int], ...] = ()
    base: int = 0
    tp_rank: int = 0

    @property
    def inner_numel(self) -> int:
        """The number of elements at one index of `dim`, which must not be None."""
        assert self.dim is not None
        return prod(self.shape[self.dim + 1 :])

    @property
    def row_numel(self) -> int:
        """The elements of all indices of `dim`."""
        assert self.dim is not None
        return self.shape[self.dim] * self.inner_numel

    @property
    def stored_row_numel(self) -> int:
        """The number of elements of each row that the shard stores."""
        return sum(last - first for first, last in self.runs) * self.inner_numel


@dataclass(frozen=True)
class FileSegment:
    """The location of a shard's elements start..stop.

    They are in `file`, in the tensor at `keys` of the pickled object, from that tensor's element
    `offset` on.
    """

    file: str
    keys: KeyPath
    offset: int
    start: int
    stop: int


def model_file(layout: Layout, pp_rank: int, tp_rank: int, rank: int = 0) -> str:
    mp = pp_rank * layout.mesh.tp + tp_rank
    return (
        f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt"
        if layout.zero_stage == 3
        else f"mp_rank_{mp:02d}_model_states.pt"
    )


def optimizer_file(layout: Layout, pp_rank: int, tp_rank: int, rank: int) -> str:
    prefix = "bf16_" if layout.dtype == "bfloat16" else ""
    mp = pp_rank * layout.mesh.tp + tp_rank
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"


def layer_file(stage: int, tp_rank: int) -> str:
    return f"layer_{stage:02d}-model_{tp_rank:02d}-model_states.pt"


def expert_file(block: int, expert: int) -> str:
    """Return the file with an expert's weights.

    `block` and `expert` are indices over the entire model. ZeRO-3 has no such files.
    """
    return f"layer_{block}_expert_{expert}_mp_rank_00_model_states.pt"


def expert_optimizer_file(ep_rank: int) -> str:
    """Return the file with all optimizer states of an expert-parallel rank under ZeRO-0."""
    return f"expp_rank_{ep_rank}_mp_rank_00_optim_states.pt"


def swap_folder_name(layout: Layout, tp_rank: int, rank: int) -> str:
    return f"offloaded_tensors/rank{rank * layout.mesh.tp + tp_rank:02d}"


def swap_files(
    blueprint: Blueprint, layout: Layout, group: list[tuple[Tensor, int]], tp_rank: int, rank: int
) -> dict[str, str]:
    """Return a swapped flat tensor's files: role -> file with raw, padded fp32 values.

    DeepSpeed names a file after the tensor's first and last parameter.
    """
    numbers = {
        tensor.name: layout.swap_first + index
        for index, tensor in enumerate(tensor for tensor in blueprint.tensors if not tensor.buffer)
    }
    own = f"{numbers[group[0][0].name]}_{numbers[group[-1][0].name]}.tensor.swp"
    folder = swap_folder_name(layout, tp_rank, rank)
    return {"master": f"{folder}/{own}"} | {
        role: f"{folder}/{role}-{own}" for role in blueprint.states_of(group[0][0], layout)
    }


def is_swapped(layout: Layout, numel: int) -> bool:
    """Return True if a flat fp32 ZeRO-3 tensor is in a swap file.

    See swap_tensor/optimizer_utils.py, `is_swappable_tensor`.
    """
    return layout.swapped and 4 * numel >= layout.swap_bytes


@dataclass(frozen=True)
class ModelParallelRank:
    """A model-parallel rank's content: optimizer groups and shard shapes.

    The groups are in the order of the flat buffers. All expert-parallel ranks share one
    description, because their tensors differ only in their values. With sharded experts,
    `blueprint` and `groups` contain the names of the sharded model. `parts` maps these names to
    tensors of the full model.
    """

    blueprint: Blueprint
    layout: Layout
    pp_rank: int
    tp_rank: int
    # (tensor, number of elements in its shard), as returned by `optimizer_groups`
    groups: list[list[tuple[Tensor, int]]]
    shapes: dict[str, tuple[int, ...]]
    parts: dict[str, ExpertTensorSource]

    @property
    def trained(self) -> set[str]:
        return {tensor.name for group in self.groups for tensor, _ in group}

    @property
    def stages(self) -> list[int]:
        return stages_of_rank(self.pp_rank, self.layout.mesh.pp, self.layout.schedule)

    def states_of(self, tensor: Tensor) -> tuple[str, ...]:
        """Return a trained tensor's optimizer states.

        All tensors in a group, and therefore in a flat tensor, have the same states.
        """
        return self.blueprint.states_of(tensor, self.layout)

    def model_file(self, rank: int = 0) -> str:
        return model_file(self.layout, self.pp_rank, self.tp_rank, rank)

    def optimizer_file(self, rank: int) -> str:
        return optimizer_file(self.layout, self.pp_rank, self.tp_rank, rank)

    def ep_ranks(self, tensor: Tensor) -> range:
        """Return the expert-parallel ranks whose content of a tensor differs.

        If all ranks have the same content, return only rank 0.
        """
        return range(self.layout.mesh.ep if tensor.expert else 1)

    def partition_index(self, group: list[tuple[Tensor, int]], rank: int) -> int:
        """Return the index of the group's partition in a data-parallel rank's optimizer file."""
        return rank // (self.layout.partitions // num_partitions(group, self.layout))


def model_parallel_ranks(blueprint: Blueprint, layout: Layout) -> Iterator[ModelParallelRank]:
    """Yield every model-parallel rank of a layout."""
    blueprint, parts = shard_experts(blueprint, layout.mesh.ep)
    for pp_rank in range(layout.mesh.pp):
        tensors = tensors_on_rank(blueprint, layout, pp_rank)
        for tp_rank in range(layout.mesh.tp):
            shapes = {
                tensor.name: local_shape(tensor, layout.mesh.tp, tp_rank) for tensor in tensors
            }
            yield ModelParallelRank(
                blueprint,
                layout,
                pp_rank,
                tp_rank,
                optimizer_groups(tensors, layout, tp_rank),
                shapes,
                parts,
            )


def map_shards(blueprint: Blueprint, layout: Layout) -> dict[tuple[str, str], list[Shard]]:
    """Return (tensor, role) -> shards; copies of the same content are adjacent.

    The role "master" (fp32) and the layout's optimizer states exist only for trained tensors. The
    role "weight" (in the training dtype) exists for every tensor if the layout stores weights.
    """
    found: dict[tuple[str, str], list[Shard]] = {}
    for holder in model_parallel_ranks(blueprint, layout):
        states = _map_zero0_states(holder) if layout.zero_stage == 0 else _map_flat_states(holder)
        for tensor, ep_rank, role, pieces in itertools.chain(states, _map_weights(holder)):
            name, shard = _stored_shard(
                holder, adafactor_state_map.state_tensor(tensor, role), ep_rank, tuple(pieces)
            )
            if shard is not None:
                found.setdefault((name, role), []).append(shard)
    if layout.optimizer == "torch":  # torch's optimizer trains the weights themselves
        for tensor in blueprint.tensors:
            if tensor.group is not None and (tensor.name, "weight") in found:
                found[tensor.name, "master"] = found.pop((tensor.name, "weight"))
    return found


def _stored_shard(
    holder: ModelParallelRank, tensor: Tensor, ep_rank: int, segments: tuple[FileSegment, ...]
) -> tuple[str, Shard | None]:
    """Return (name of the full tensor, its shard on a model-parallel rank).

    The shard is None if the rank has no element of the tensor.
    """
    if (part := holder.parts.get(tensor.name)) is not None:
        if not tensor.expert:
            return part.source.name, Shard(tensor.shape, segments)
        shape = (tensor.shape[0], *part.source.shape[1:])
        dim, own = (1, (part.rows,)) if part.rows else (None, ())
        return part.source.name, Shard(shape, segments, dim, own, ep_rank * prod(shape), part.index)
    if tensor.cut is None or holder.layout.mesh.tp == 1:
        return tensor.name, Shard(tensor.shape, segments)
    own = tuple(shard_ranges(tensor, holder.layout.mesh.tp, holder.tp_rank))
    return tensor.name, (
        Shard(tensor.shape, segments, tensor.cut[0], own, 0, holder.tp_rank) if own else None
    )


# tensor, expert-parallel rank, role, segments of the shard on a model-parallel rank
Placements = Iterator[tuple[Tensor, int, str, list[FileSegment]]]


def _map_zero0_states(holder: ModelParallelRank) -> Placements:
    """Yield the segments of ZeRO-0's optimizer states and masters.

    They are unsharded in the model file. Each expert-parallel rank also has a file with all of its
    states, and DeepSpeed loads that file.
    """
    plain, ep = holder.layout.optimizer == "torch", holder.layout.mesh.ep
    state: KeyPath = (
        ("optimizer", "state") if plain else ("optimizer", "optimizer_state_dict", "state")
    )
    files = [(rank, expert_optimizer_file(rank)) for rank in range(ep if ep > 1 else 0)] + [
        (0, holder.model_file())
    ]
    number = 0
    for g, group in enumerate(holder.groups):
        for j, (tensor, numel) in enumerate(group):
            sizes = (
                adafactor_state_map.state_sizes(holder.shapes[tensor.name], numel)
                if holder.layout.uses_adafactor
                else dict.fromkeys(holder.states_of(tensor), numel)
            )
            for rank, file in files:
                for role, size in sizes.items():
                    yield (
                        tensor,
                        rank,
                        role,
                        [FileSegment(file, (*state, number, role), 0, 0, size)],
                    )
                if not plain:
                    yield (
                        tensor,
                        rank,
                        "master",
                        [FileSegment(file, ("optimizer", "fp32_groups", g, j), 0, 0, numel)],
                    )
            number += 1


def _map_flat_states(holder: ModelParallelRank) -> Placements:
    """Yield the segments of the optimizer states and masters for ZeRO-1, -2 and -3.

    They are in flat tensors, which are partitioned over all ranks' optimizer files or swap files.
    """
    layout, tensors = holder.layout, flat_tensors(holder.groups, holder.layout)
    for index, (group, numel, extents) in enumerate(flat_groups(holder.groups, layout)):
        swapped = is_swapped(layout, numel)
        states = layout.states if layout.uses_adafactor else holder.states_of(tensors[index][0][0])
        keys = _zero3_keys(index, states) if layout.zero_stage == 3 else _zero12_keys(group, states)
        if layout.uses_adafactor:
            yield from _map_factors(holder, tensors[index], extents, keys)
            states = ()
        for (tensor, _), pieces in zip(tensors[index], extents, strict=True):
            for role, ep_rank in itertools.product(("master", *states), holder.ep_ranks(tensor)):
                if swapped:
                    names = [
                        swap_files(
                            holder.blueprint, layout, tensors[index], holder.tp_rank, at.rank
                        )[role]
                        for at in pieces
                    ]
                    yield (
                        tensor,
                        ep_rank,
                        role,
                        [
                            FileSegment(name, (), at.offset, at.start, at.stop)
                            for at, name in zip(pieces, names, strict=True)
                        ],
                    )
                else:
                    ranks = [at.rank * len(holder.ep_ranks(tensor)) + ep_rank for at in pieces]
                    files = [holder.optimizer_file(rank) for rank in ranks]
                    yield (
                        tensor,
                        ep_rank,
                        role,
                        [
                            FileSegment(file, keys[role], at.offset, at.start, at.stop)
                            for at, file in zip(pieces, files, strict=True)
                        ],
                    )


def _map_factors(
    holder: ModelParallelRank,
    flat: list[tuple[Tensor, int]],
    extents: list[list[Extent]],
    keys: dict[str, KeyPath],
) -> Placements:
    """Yield the segments of Adafactor's states for a flat tensor.

    Each rank with a part of the tensor stores full row and column factors. The states of vectors
    are partitioned like the tensor.
    """
    parts: dict[str, list[FileSegment]] = {}
    for kept in adafactor_state_map.state_extents(flat, extents, holder.shapes):
        piece = FileSegment(
            holder.optimizer_file(kept.rank), keys[kept.state], kept.offset, kept.start, kept.stop
        )
        if kept.state == adafactor_state_map.ELEMENT_VAR:
            parts.setdefault(kept.tensor.name, []).append(piece)
        else:
            yield kept.tensor, 0, kept.state, [piece]
    for tensor, _ in flat:
        if tensor.name in parts:
            yield tensor, 0, adafactor_state_map.ELEMENT_VAR, parts[tensor.name]


def _zero12_keys(group: int, states: tuple[str, ...]) -> dict[str, KeyPath]:
    """Return role -> keys of a group's flat tensor in a ZeRO-1 or ZeRO-2 optimizer file."""
    masters: KeyPath = ("optimizer_state_dict", "single_partition_of_fp32_groups", group)
    return {"master": masters} | {role: (*ZERO12_STATE_KEYS, group, role) for role in states}


def _zero3_keys(index: int, states: tuple[str, ...]) -> dict[str, KeyPath]:
    """Return role -> keys of a sub-group's flat tensor in a ZeRO-3 optimizer file."""
    masters: KeyPath = ("optimizer_state_dict", "fp32_flat_groups", index)
    return {"master": masters} | {
        role: ("optimizer_state_dict", "optimizer_state_dict", "state", index, role)
        for role in states
    }


def _map_weights(holder: ModelParallelRank) -> Placements:
    """Yield the segments of weights and buffers in the training dtype.

    ZeRO-3 does not store trained weights, because DeepSpeed recreates them from the masters.
    """
    layout, trained = holder.layout, holder.trained
    for stage in holder.stages:
        for key, tensor in state_keys(holder.blueprint, layout, stage).items():
            numel = prod(holder.shapes[tensor.name])
            if key != tensor.name or not numel:
                continue
            if layout.zero_stage == 3 and not tensor.buffer:
                if key not in trained:
                    yield tensor, 0, "weight", _frozen_segments(holder, key, numel)
            elif layout.mesh.pp > 1:
                yield (
                    tensor,
                    0,
                    "weight",
                    [FileSegment(layer_file(stage, holder.tp_rank), (key,), 0, 0, numel)],
                )
            elif tensor.name in holder.parts and tensor.expert:
                for ep_rank in holder.ep_ranks(tensor):
                    yield tensor, ep_rank, "weight", _expert_segments(holder, tensor, ep_rank)
            else:
                for rank in range(layout.partitions if layout.zero_stage == 3 else 1):
                    yield (
                        tensor,
                        0,
                        "weight",
                        [FileSegment(holder.model_file(rank), ("module", key), 0, 0, numel)],
                    )
                if layout.zero_stage == 2 and not tensor.buffer and key not in trained:
                    yield (
                        tensor,
                        0,
                        "weight",
                        [
                            FileSegment(
                                holder.model_file(), ("frozen_param_fragments", key), 0, 0, numel
                            )
                        ],
                    )


def _expert_segments(holder: ModelParallelRank, tensor: Tensor, ep_rank: int) -> list[FileSegment]:
    """Return the segments of a rank's experts; each expert is in a separate file."""
    [block] = [
        number
        for number, block in enumerate(holder.blueprint.blocks)
        if tensor.name.startswith(f"{block.name}.experts.")
    ]
    count, numel = tensor.shape[0], prod(tensor.shape[1:])
    first = ep_rank * count
    return [
        FileSegment(
            expert_file(block, first + at),
            (f"{tensor.name}.{first + at}",),
            0,
            at * numel,
            (at + 1) * numel,
        )
        for at in range(count)
    ]


def _frozen_segments(holder: ModelParallelRank, name: str, numel: int) -> list[FileSegment]:
    """Return a frozen parameter's segments under ZeRO-3, one in each rank's model file."""
    part = -(-numel // holder.layout.partitions)
    ends = [
        (rank, rank * part, min((rank + 1) * part, numel))
        for rank in range(holder.layout.partitions)
    ]
    return [
        FileSegment(holder.model_file(rank), ("frozen_param_fragments", name), 0, start, stop)
        for rank, start, stop in ends
        if start < stop
    ]


def distinct_shards(copies: list[Shard]) -> list[Shard]:
    """Return the first shard of each distinct content, which is read if there are copies."""
    first: dict[tuple[int, int], Shard] = {}
    for shard in copies:
        first.setdefault(
            (shard.base, shard.tp_rank) if shard.dim is not None else (shard.base, 0), shard
        )
    return list(first.values())


def expected_bytes(blueprint: Blueprint, layout: Layout) -> int:
    """Return the total bytes of a checkpoint's tensors, including all copies."""
    wide = {
        tensor.name for tensor in blueprint.tensors if weight_dtype(tensor, layout) == "float32"
    }
    found = map_shards(blueprint, layout)
    of_tensors = sum(
        (piece.stop - piece.start) * (2 if role == "weight" and name not in wide else 4)
        for (name, role), own in found.items()
        for shard in own
        for piece in shard.segments
    )
    return of_tensors + error_feedback.expected_error_bytes(blueprint, layout)
