"""Places tensors in DeepSpeed's checkpoint files: which file holds what, and where a tensor's bytes
lie.

Taken from DeepSpeed 0.19.8: runtime/engine.py, zero/stage_1_and_2.py, zero/stage3.py,
bf16_optimizer.py, fp16/unfused_optimizer.py, pipe/module.py; for divided experts runtime/engine.py,
`_save_moe_checkpoint`.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ..parallel import factors
from ..parallel.blueprint import (
    Blueprint,
    Extent,
    Layout,
    Tensor,
    flat_groups,
    flat_tensors,
    groups_of,
    held,
    holders_of,
    local_shape,
    runs,
    stages_of,
    state_keys,
)
from ..parallel.divided import Part, divide
from . import errors
from .torch_files import Keys

STATE = ("optimizer_state_dict", "base_optimizer_state", "state")


@dataclass(frozen=True)
class Shard:
    """Describes a stored part of a tensor: the indices `runs` of dimension `dim` (None: all) of the
    sub-tensor `shape` that begins at element `base` of the whole, row-major, in pieces.

    Shards with other content have another `tp_rank`.
    """

    shape: tuple[int, ...]
    pieces: tuple["Piece", ...]
    dim: int | None = None
    runs: tuple[tuple[int, int], ...] = ()
    base: int = 0
    tp_rank: int = 0

    @property
    def inner(self) -> int:
        """Count the elements of one index of `dim`. The shard must have a `dim`."""
        assert self.dim is not None
        return prod(self.shape[self.dim + 1 :])

    @property
    def row(self) -> int:
        """Count the elements of all indices of `dim`."""
        assert self.dim is not None
        return self.shape[self.dim] * self.inner

    @property
    def width(self) -> int:
        """Count the elements of each row that the shard stores."""
        return sum(last - first for first, last in self.runs) * self.inner


@dataclass(frozen=True)
class Piece:
    """Says where elements start..stop of a shard lie: in `file`, in the tensor at `keys` of the
    pickled object, from its element `offset` on.
    """

    file: str
    keys: Keys
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
    """Names the file of the weights of an expert, both counted over the model; ZeRO-3 has none."""
    return f"layer_{block}_expert_{expert}_mp_rank_00_model_states.pt"


def expert_optimizer_file(ep_rank: int) -> str:
    """Names the file of all optimizer states of an expert-parallel rank under ZeRO-0."""
    return f"expp_rank_{ep_rank}_mp_rank_00_optim_states.pt"


def swap_folder(layout: Layout, tp_rank: int, rank: int) -> str:
    return f"offloaded_tensors/rank{rank * layout.mesh.tp + tp_rank:02d}"


def swap_files(
    blueprint: Blueprint, layout: Layout, group: list[tuple[Tensor, int]], tp_rank: int, rank: int
) -> dict[str, str]:
    """Names the files of a swapped flat tensor: role -> file, raw fp32, padded.

    DeepSpeed names a file after its first and last parameter.
    """
    numbers = {
        tensor.name: layout.swap_first + index
        for index, tensor in enumerate(tensor for tensor in blueprint.tensors if not tensor.buffer)
    }
    own = f"{numbers[group[0][0].name]}_{numbers[group[-1][0].name]}.tensor.swp"
    folder = swap_folder(layout, tp_rank, rank)
    return {"master": f"{folder}/{own}"} | {
        role: f"{folder}/{role}-{own}" for role in blueprint.states_of(group[0][0], layout)
    }


def is_swapped(layout: Layout, numel: int) -> bool:
    """Returns True if a flat fp32 tensor of ZeRO-3 lies in a swap file
    (swap_tensor/optimizer_utils.py, `is_swappable_tensor`).
    """
    return layout.swapped and 4 * numel >= layout.swap_bytes


@dataclass(frozen=True)
class Holder:
    """Describes what a model-parallel rank holds: its optimizer's groups in the order of the flat
    buffers, and the shapes of its shards.

    Expert-parallel ranks have one description: their tensors differ in values only. `blueprint` and
    `groups` then have the names of the divided model, and `parts` says what those are.
    """

    blueprint: Blueprint
    layout: Layout
    pp_rank: int
    tp_rank: int
    # (tensor, elements of its shard), as `groups_of` gives them
    groups: list[list[tuple[Tensor, int]]]
    shapes: dict[str, tuple[int, ...]]
    parts: dict[str, Part]

    @property
    def trained(self) -> set[str]:
        return {tensor.name for group in self.groups for tensor, _ in group}

    @property
    def stages(self) -> list[int]:
        return stages_of(self.pp_rank, self.layout.mesh.pp, self.layout.schedule)

    def states_of(self, tensor: Tensor) -> tuple[str, ...]:
        """Names what the optimizer keeps for a trained tensor; those of a group, and so of a flat
        tensor, have the same states.
        """
        return self.blueprint.states_of(tensor, self.layout)

    def model_file(self, rank: int = 0) -> str:
        return model_file(self.layout, self.pp_rank, self.tp_rank, rank)

    def optimizer_file(self, rank: int) -> str:
        return optimizer_file(self.layout, self.pp_rank, self.tp_rank, rank)

    def ep_ranks(self, tensor: Tensor) -> range:
        """Lists the expert-parallel ranks that hold something else of a tensor: one stands for all
        where they hold the same.
        """
        return range(self.layout.mesh.ep if tensor.expert else 1)

    def partition(self, group: list[tuple[Tensor, int]], rank: int) -> int:
        """Returns which partition of a group lies in the optimizer file of a data rank."""
        return rank // (self.layout.partitions // holders_of(group, self.layout))


def holders(blueprint: Blueprint, layout: Layout) -> Iterator[Holder]:
    """Yields every model-parallel rank of a layout."""
    blueprint, parts = divide(blueprint, layout.mesh.ep)
    for pp_rank in range(layout.mesh.pp):
        tensors = held(blueprint, layout, pp_rank)
        for tp_rank in range(layout.mesh.tp):
            shapes = {
                tensor.name: local_shape(tensor, layout.mesh.tp, tp_rank) for tensor in tensors
            }
            yield Holder(
                blueprint,
                layout,
                pp_rank,
                tp_rank,
                groups_of(tensors, layout, tp_rank),
                shapes,
                parts,
            )


def shards(blueprint: Blueprint, layout: Layout) -> dict[tuple[str, str], list[Shard]]:
    """Maps (tensor, role) to its shards; copies of the same content follow each other.

    Roles: "master" (fp32) and the layout's optimizer states of trained tensors; "weight" (in the
    training dtype) of every tensor, if the layout stores it.
    """
    found: dict[tuple[str, str], list[Shard]] = {}
    for holder in holders(blueprint, layout):
        states = _zero0_states(holder) if layout.zero_stage == 0 else _flat_states(holder)
        for tensor, ep_rank, role, pieces in itertools.chain(states, _weights(holder)):
            name, shard = _shard(holder, factors.state_of(tensor, role), ep_rank, tuple(pieces))
            if shard is not None:
                found.setdefault((name, role), []).append(shard)
    if layout.optimizer == "torch":  # this optimizer trains the weights themselves
        for tensor in blueprint.tensors:
            if tensor.group is not None and (tensor.name, "weight") in found:
                found[tensor.name, "master"] = found.pop((tensor.name, "weight"))
    return found


def _shard(
    holder: Holder, tensor: Tensor, ep_rank: int, pieces: tuple[Piece, ...]
) -> tuple[str, Shard | None]:
    """Returns (name of the whole tensor, what a holder has of it); None if the holder has no
    element of it.
    """
    if (part := holder.parts.get(tensor.name)) is not None:
        if not tensor.expert:
            return part.of.name, Shard(tensor.shape, pieces)
        shape = (tensor.shape[0], *part.of.shape[1:])
        dim, own = (1, (part.rows,)) if part.rows else (None, ())
        return part.of.name, Shard(shape, pieces, dim, own, ep_rank * prod(shape), part.number)
    if tensor.cut is None or holder.layout.mesh.tp == 1:
        return tensor.name, Shard(tensor.shape, pieces)
    own = tuple(runs(tensor, holder.layout.mesh.tp, holder.tp_rank))
    return tensor.name, (
        Shard(tensor.shape, pieces, tensor.cut[0], own, 0, holder.tp_rank) if own else None
    )


# tensor, expert-parallel rank, role, where a holder's shard lies
Placed = Iterator[tuple[Tensor, int, str, list[Piece]]]


def _zero0_states(holder: Holder) -> Placed:
    """Places the optimizer's states and the masters of ZeRO-0: whole, in the model's file.

    Each expert-parallel rank has a file of all its states besides, which is the one that is loaded.
    """
    plain, ep = holder.layout.optimizer == "torch", holder.layout.mesh.ep
    state: Keys = (
        ("optimizer", "state") if plain else ("optimizer", "optimizer_state_dict", "state")
    )
    files = [(rank, expert_optimizer_file(rank)) for rank in range(ep if ep > 1 else 0)] + [
        (0, holder.model_file())
    ]
    number = 0
    for g, group in enumerate(holder.groups):
        for j, (tensor, numel) in enumerate(group):
            sizes = (
                factors.state_sizes(holder.shapes[tensor.name], numel)
                if holder.layout.factored
                else dict.fromkeys(holder.states_of(tensor), numel)
            )
            for rank, file in files:
                for role, size in sizes.items():
                    yield tensor, rank, role, [Piece(file, (*state, number, role), 0, 0, size)]
                if not plain:
                    yield (
                        tensor,
                        rank,
                        "master",
                        [Piece(file, ("optimizer", "fp32_groups", g, j), 0, 0, numel)],
                    )
            number += 1


def _flat_states(holder: Holder) -> Placed:
    """Places the optimizer's states and the masters of ZeRO-1, -2 and -3: in flat tensors, a part
    of each in every rank's optimizer file or swap file.
    """
    layout, tensors = holder.layout, flat_tensors(holder.groups, holder.layout)
    for index, (group, numel, extents) in enumerate(flat_groups(holder.groups, layout)):
        swapped = is_swapped(layout, numel)
        states = layout.states if layout.factored else holder.states_of(tensors[index][0][0])
        keys = _zero3_keys(index, states) if layout.zero_stage == 3 else _zero12_keys(group, states)
        if layout.factored:
            yield from _factors(holder, tensors[index], extents, keys)
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
                            Piece(name, (), at.offset, at.start, at.stop)
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
                            Piece(file, keys[role], at.offset, at.start, at.stop)
                            for at, file in zip(pieces, files, strict=True)
                        ],
                    )


def _factors(
    holder: Holder,
    flat: list[tuple[Tensor, int]],
    extents: list[list[Extent]],
    keys: dict[str, Keys],
) -> Placed:
    """Places Adafactor's states of a flat tensor: rows and columns whole on each rank that has a
    part of the tensor, of vectors that part.
    """
    parts: dict[str, list[Piece]] = {}
    for kept in factors.kept_of(flat, extents, holder.shapes):
        piece = Piece(
            holder.optimizer_file(kept.rank), keys[kept.state], kept.offset, kept.start, kept.stop
        )
        if kept.state == factors.ELEMENTS:
            parts.setdefault(kept.tensor.name, []).append(piece)
        else:
            yield kept.tensor, 0, kept.state, [piece]
    for tensor, _ in flat:
        if tensor.name in parts:
            yield tensor, 0, factors.ELEMENTS, parts[tensor.name]


def _zero12_keys(group: int, states: tuple[str, ...]) -> dict[str, Keys]:
    """Role -> the keys of a group's flat tensor in an optimizer file of ZeRO-1 or -2."""
    masters: Keys = ("optimizer_state_dict", "single_partition_of_fp32_groups", group)
    return {"master": masters} | {role: (*STATE, group, role) for role in states}


def _zero3_keys(index: int, states: tuple[str, ...]) -> dict[str, Keys]:
    """Role -> the keys of a sub-group's flat tensor in an optimizer file of ZeRO-3."""
    masters: Keys = ("optimizer_state_dict", "fp32_flat_groups", index)
    return {"master": masters} | {
        role: ("optimizer_state_dict", "optimizer_state_dict", "state", index, role)
        for role in states
    }


def _weights(holder: Holder) -> Placed:
    """Places the weights and buffers of the training dtype.

    ZeRO-3 has no place for trained weights: DeepSpeed makes them from the masters.
    """
    layout, trained = holder.layout, holder.trained
    for stage in holder.stages:
        for key, tensor in state_keys(holder.blueprint, layout, stage).items():
            numel = prod(holder.shapes[tensor.name])
            if key != tensor.name or not numel:
                continue
            if layout.zero_stage == 3 and not tensor.buffer:
                if key not in trained:
                    yield tensor, 0, "weight", _frozen_parts(holder, key, numel)
            elif layout.mesh.pp > 1:
                yield (
                    tensor,
                    0,
                    "weight",
                    [Piece(layer_file(stage, holder.tp_rank), (key,), 0, 0, numel)],
                )
            elif tensor.name in holder.parts and tensor.expert:
                for ep_rank in holder.ep_ranks(tensor):
                    yield tensor, ep_rank, "weight", _expert_pieces(holder, tensor, ep_rank)
            else:
                for rank in range(layout.partitions if layout.zero_stage == 3 else 1):
                    yield (
                        tensor,
                        0,
                        "weight",
                        [Piece(holder.model_file(rank), ("module", key), 0, 0, numel)],
                    )
                if layout.zero_stage == 2 and not tensor.buffer and key not in trained:
                    yield (
                        tensor,
                        0,
                        "weight",
                        [Piece(holder.model_file(), ("frozen_param_fragments", key), 0, 0, numel)],
                    )


def _expert_pieces(holder: Holder, tensor: Tensor, ep_rank: int) -> list[Piece]:
    """Lists where the experts of a rank lie: each in a file of its own."""
    [block] = [
        number
        for number, block in enumerate(holder.blueprint.blocks)
        if tensor.name.startswith(f"{block.name}.experts.")
    ]
    count, numel = tensor.shape[0], prod(tensor.shape[1:])
    first = ep_rank * count
    return [
        Piece(
            expert_file(block, first + at),
            (f"{tensor.name}.{first + at}",),
            0,
            at * numel,
            (at + 1) * numel,
        )
        for at in range(count)
    ]


def _frozen_parts(holder: Holder, name: str, numel: int) -> list[Piece]:
    """Lists the parts of a frozen parameter under ZeRO-3, one in each rank's model file."""
    part = -(-numel // holder.layout.partitions)
    ends = [
        (rank, rank * part, min((rank + 1) * part, numel))
        for rank in range(holder.layout.partitions)
    ]
    return [
        Piece(holder.model_file(rank), ("frozen_param_fragments", name), 0, start, stop)
        for rank, start, stop in ends
        if start < stop
    ]


def originals(copies: list[Shard]) -> list[Shard]:
    """Lists the first shard of each content: the one that is read where there are copies."""
    first: dict[tuple[int, int], Shard] = {}
    for shard in copies:
        first.setdefault(
            (shard.base, shard.tp_rank) if shard.dim is not None else (shard.base, 0), shard
        )
    return list(first.values())


def expected_bytes(blueprint: Blueprint, layout: Layout) -> int:
    """Counts the bytes of the tensors that a checkpoint holds, every copy included."""
    width = {"weight": 4 if layout.dtype == "float32" else 2}
    found = shards(blueprint, layout)
    of_tensors = sum(
        (piece.stop - piece.start) * width.get(role, 4)
        for (_, role), own in found.items()
        for shard in own
        for piece in shard.pieces
    )
    return of_tensors + errors.expected(blueprint, layout)
