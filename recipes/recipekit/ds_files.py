"""DeepSpeed's checkpoint files: what is in which of them, where a tensor's bytes lie, and empty ones to be filled in.

Read from 0.19.8: runtime/engine.py, zero/stage_1_and_2.py, zero/stage3.py, bf16_optimizer.py, fp16/unfused_optimizer.py,
pipe/module.py.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from . import torch_files
from .blueprint import Blueprint, Layout, Tensor, flat_groups, flat_tensors, groups_of, held, local_shape, runs, stages_of, state_keys
from .refusal import refuse
from .torch_files import FileTensor, Fragment, Keys, LossScaler, Size, ZeroStage

MOMENTS = ("exp_avg", "exp_avg_sq")  # what Adam keeps beside the master weights
STATE = ("optimizer_state_dict", "base_optimizer_state", "state")


@dataclass(frozen=True)
class Shard:
    """A part of a tensor as it is stored: the indices `runs` of dimension `dim` (None: all) of the sub-tensor `shape` that begins at
    element `base` of the whole, row-major, in pieces. `tp_rank` tells shards of different content apart."""

    shape: tuple[int, ...]
    pieces: tuple["Piece", ...]
    dim: int | None = None
    runs: tuple[tuple[int, int], ...] = ()
    base: int = 0
    tp_rank: int = 0


@dataclass(frozen=True)
class Piece:
    """Elements start..stop of a shard lie in `file`: in the tensor at `keys` of the pickled object, `offset` elements from its beginning."""

    file: str
    keys: Keys
    offset: int
    start: int
    stop: int


def model_file(layout: Layout, pp_rank: int, tp_rank: int, rank: int = 0) -> str:
    mp = pp_rank * layout.mesh.tp + tp_rank
    return f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt" if layout.zero_stage == 3 else f"mp_rank_{mp:02d}_model_states.pt"


def optimizer_file(layout: Layout, pp_rank: int, tp_rank: int, rank: int) -> str:
    prefix = "bf16_" if layout.dtype == "bfloat16" else ""
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_{pp_rank * layout.mesh.tp + tp_rank:02d}_optim_states.pt"


def layer_file(stage: int, tp_rank: int) -> str:
    return f"layer_{stage:02d}-model_{tp_rank:02d}-model_states.pt"


def swap_folder(layout: Layout, tp_rank: int, rank: int) -> str:
    return f"offloaded_tensors/rank{rank * layout.mesh.tp + tp_rank:02d}"


def swap_files(blueprint: Blueprint, layout: Layout, group: list[tuple[Tensor, int]], tp_rank: int, rank: int) -> dict[str, str]:
    """Role -> the file of a swapped flat tensor: raw fp32, padded. DeepSpeed names it after its first and last parameter."""
    numbers = {tensor.name: layout.swap_first + index for index, tensor in enumerate(tensor for tensor in blueprint.tensors if not tensor.buffer)}
    own = f"{numbers[group[0][0].name]}_{numbers[group[-1][0].name]}.tensor.swp"
    folder = swap_folder(layout, tp_rank, rank)
    return {"master": f"{folder}/{own}"} | {role: f"{folder}/{role}-{own}" for role in MOMENTS}


def is_swapped(layout: Layout, numel: int) -> bool:
    """Whether a flat fp32 tensor of ZeRO-3 lies in a swap file (swap_tensor/optimizer_utils.py, `is_swappable_tensor`)."""
    return layout.swapped and 4 * numel >= layout.swap_bytes


def holders(layout: Layout) -> Iterator[tuple[int, int]]:
    """(pp rank, tp rank) of every model-parallel rank."""
    for pp_rank in range(layout.mesh.pp):
        for tp_rank in range(layout.mesh.tp):
            yield pp_rank, tp_rank


def shards(blueprint: Blueprint, layout: Layout) -> dict[tuple[str, str], list[Shard]]:
    """(tensor, role) -> where its shards lie; copies of the same content follow each other.

    Roles: "master" (fp32) and MOMENTS of what is trained; "weight" (in the training dtype) of every tensor, as far as
    the layout stores it.
    """
    found: dict[tuple[str, str], list[Shard]] = {}

    def add(tensor: Tensor, role: str, tp_rank: int, pieces: list[Piece]) -> None:
        cut = tensor.cut is not None and layout.mesh.tp > 1
        dim, own = (tensor.cut[0], tuple(runs(tensor, layout.mesh.tp, tp_rank))) if cut and tensor.cut else (None, ())
        if not cut or own:
            found.setdefault((tensor.name, role), []).append(Shard(tensor.shape, tuple(pieces), dim, own, 0, tp_rank if cut else 0))

    for pp_rank, tp_rank in holders(layout):
        groups = groups_of(blueprint, layout, pp_rank, tp_rank)
        trained = {tensor.name for group in groups for tensor, _ in group}
        file = model_file(layout, pp_rank, tp_rank)
        sizes = {tensor.name: prod(local_shape(tensor, layout.mesh.tp, tp_rank)) for tensor in held(blueprint, layout, pp_rank)}
        if layout.zero_stage == 0:
            number = 0
            for g, group in enumerate(groups):
                for j, (tensor, numel) in enumerate(group):
                    at: Keys = ("optimizer", "optimizer_state_dict", "state") if layout.optimizer != "torch" else ("optimizer", "state")
                    for role in MOMENTS:
                        add(tensor, role, tp_rank, [Piece(file, (*at, number, role), 0, 0, numel)])
                    if layout.optimizer != "torch":
                        add(tensor, "master", tp_rank, [Piece(file, ("optimizer", "fp32_groups", g, j), 0, 0, numel)])
                    number += 1
        else:
            tensors = flat_tensors(groups, layout)
            for index, (group, numel, extents) in enumerate(flat_groups(groups, layout)):
                for (tensor, _), pieces in zip(tensors[index], extents, strict=True):
                    for role in ("master", *MOMENTS):
                        if is_swapped(layout, numel):
                            swapped = [(at, swap_files(blueprint, layout, tensors[index], tp_rank, at.rank)[role]) for at in pieces]
                            add(tensor, role, tp_rank, [Piece(name, (), at.offset, at.start, at.stop) for at, name in swapped])
                            continue
                        if layout.zero_stage == 3:
                            keys: Keys = ("optimizer_state_dict", "fp32_flat_groups", index)
                            keys = keys if role == "master" else ("optimizer_state_dict", "optimizer_state_dict", "state", index, role)
                        else:
                            keys = ("optimizer_state_dict", "single_partition_of_fp32_groups", group) if role == "master" else (*STATE, group, role)
                        stored = [Piece(optimizer_file(layout, pp_rank, tp_rank, at.rank), keys, at.offset, at.start, at.stop) for at in pieces]
                        add(tensor, role, tp_rank, stored)
        for stage in stages_of(pp_rank, layout.mesh.pp, layout.schedule):
            for key, tensor in state_keys(blueprint, layout, stage).items():
                if key != tensor.name or not sizes[tensor.name]:
                    continue
                if layout.zero_stage == 3 and not tensor.buffer:
                    if tensor.name in trained:
                        continue  # its 16-bit parts are made from the masters
                    part = -(-sizes[tensor.name] // layout.partitions)
                    ends = [(rank, rank * part, min((rank + 1) * part, sizes[tensor.name])) for rank in range(layout.partitions)]
                    own = [
                        Piece(model_file(layout, pp_rank, tp_rank, rank), ("frozen_param_fragments", key), 0, start, stop)
                        for rank, start, stop in ends
                        if start < stop
                    ]
                    add(tensor, "weight", tp_rank, own)
                    continue
                files = [model_file(layout, pp_rank, tp_rank, rank) for rank in range(layout.partitions if layout.zero_stage == 3 else 1)]
                if layout.mesh.pp > 1:
                    own = [Piece(layer_file(stage, tp_rank), (key,), 0, 0, sizes[key])]
                    add(tensor, "weight", tp_rank, own)
                    continue
                for name in files:
                    add(tensor, "weight", tp_rank, [Piece(name, ("module", key), 0, 0, sizes[key])])
                if layout.zero_stage == 2 and not tensor.buffer and tensor.name not in trained:
                    add(tensor, "weight", tp_rank, [Piece(file, ("frozen_param_fragments", key), 0, 0, sizes[key])])
    if layout.optimizer == "torch":  # what it trains are the weights themselves
        for tensor in blueprint.tensors:
            if tensor.group is not None and (tensor.name, "weight") in found:
                found[tensor.name, "master"] = found.pop((tensor.name, "weight"))
    return found


def originals(copies: list[Shard]) -> list[Shard]:
    """The first shard of each content: what is read, where there are copies."""
    first: dict[tuple[int, int], Shard] = {}
    for shard in copies:
        first.setdefault((shard.base, shard.tp_rank) if shard.dim is not None else (shard.base, 0), shard)
    return list(first.values())


def expected_bytes(blueprint: Blueprint, layout: Layout) -> int:
    """Bytes of the tensors that a checkpoint holds, every copy counted."""
    width = {"weight": 4 if layout.dtype == "float32" else 2}
    found = shards(blueprint, layout)
    return sum((piece.stop - piece.start) * width.get(role, 4) for (_, role), own in found.items() for shard in own for piece in shard.pieces)


# What is in the files besides tensors -----------------------------------------------------------------------------


@dataclass
class Carried:
    """What a checkpoint holds besides tensors: step counts, and the numbers of each optimizer group."""

    groups: dict[int, dict[str, Any]]
    step: float  # of Adam
    engine: dict[str, Any]  # global_steps, skipped_steps, global_samples, lr_scheduler, ds_config

    @property
    def clipping(self) -> float:
        """As the run had it; what 0.19.8 takes by itself where a checkpoint is of no run."""
        return float(self.engine["ds_config"].get("gradient_clipping", 1.0))


def read_carried(folder: Path, blueprint: Blueprint, layout: Layout) -> Carried:
    groups: dict[int, dict[str, Any]] = {}
    step, engine = 0.0, {}
    for pp_rank, tp_rank in holders(layout):
        numbers = sorted({tensor.group for tensor in held(blueprint, layout, pp_rank) if tensor.group is not None})
        model = _numbers(torch_files.read(folder / model_file(layout, pp_rank, tp_rank)))
        if layout.zero_stage == 0:
            optimizer = model["optimizer"] if layout.optimizer == "torch" else model["optimizer"]["optimizer_state_dict"]
        else:
            whole = _numbers(torch_files.read(folder / optimizer_file(layout, pp_rank, tp_rank, 0)))["optimizer_state_dict"]
            optimizer = whole["optimizer_state_dict"] if layout.zero_stage == 3 else whole["base_optimizer_state"]
        for number, group in zip(numbers, optimizer["param_groups"], strict=False):
            groups.setdefault(number, {key: value for key, value in group.items() if key != "params"})
        steps = [state["step"] for state in optimizer["state"].values() if "step" in state] or [group.get("step", 0) for group in optimizer["param_groups"]]
        step = max([step, *map(float, steps)])
        if not engine:
            engine = {key: model.get(key) for key in ("global_steps", "skipped_steps", "global_samples", "lr_scheduler", "ds_config")}
    return Carried(groups, step, engine)


def _numbers(value: Any) -> Any:
    """The same with numbers in the places of tensors of one element: what is carried over is not read again from the file."""
    if isinstance(value, FileTensor):
        return value if value.value is None else value.value
    if isinstance(value, dict):
        return type(value)({key: _numbers(item) for key, item in value.items()})
    return type(value)(map(_numbers, value)) if type(value) in (list, tuple) else value


def create(folder: Path, blueprint: Blueprint, layout: Layout, carried: Carried) -> None:
    """Files that DeepSpeed loads in `layout`, whose tensors are zeros (holes) to be filled in."""
    for pp_rank, tp_rank in holders(layout):
        groups = groups_of(blueprint, layout, pp_rank, tp_rank)
        shapes = {tensor.name: local_shape(tensor, layout.mesh.tp, tp_rank) for tensor in held(blueprint, layout, pp_rank)}
        numbers = [next(iter(group))[0].group for group in groups]
        trained = {tensor.name for group in groups for tensor, _ in group}
        hyper = [dict(carried.groups.get(number if number is not None else -1, {})) for number in numbers]
        flats, tensors = flat_groups(groups, layout), flat_tensors(groups, layout)

        def weights(stage: int, shapes: dict = shapes, trained: set = trained) -> dict[str, FileTensor]:
            made: dict[str, FileTensor] = {}  # an alias is the same tensor again
            for key, tensor in state_keys(blueprint, layout, stage).items():
                gone = layout.zero_stage == 3 and not tensor.buffer
                own = tensor.buffer or layout.dtype
                made[key] = made[tensor.name] if tensor.name in made else FileTensor((0,) if gone else shapes[tensor.name], own)
            return made

        def optimizer_state(indices: list[tuple[list[int], list[tuple[int, ...]]]], hyper: list = hyper) -> dict[str, Any]:
            """indices: of each group the numbers of its tensors, and their shapes."""
            kept = {}
            for own, sizes in indices:
                for index, shape in zip(own, sizes, strict=True):
                    step: Any = int(carried.step) if layout.int_step else FileTensor((), value=carried.step)
                    kept[index] = {"step": step} | {role: FileTensor(shape) for role in MOMENTS}
            return {"state": kept, "param_groups": [numbers | {"params": own} for numbers, (own, _) in zip(hyper, indices, strict=True)]}

        optimizer: dict[str, Any] | None = None
        if layout.zero_stage == 0:
            first, indices = 0, []
            for group in groups:
                indices.append((list(range(first, first + len(group))), [shapes[tensor.name] for tensor, _ in group]))
                first += len(group)
            optimizer = optimizer_state(indices)
            if layout.optimizer != "torch":
                scale = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": carried.engine["global_steps"]}
                masters = [[FileTensor(shapes[tensor.name]) for tensor, _ in group] for group in groups]
                optimizer = scale | {"optimizer_state_dict": optimizer, "fp32_groups": masters}
        if layout.mesh.pp > 1:
            for stage in stages_of(pp_rank, layout.mesh.pp, layout.schedule):
                torch_files.write(folder / layer_file(stage, tp_rank), OrderedDict(weights(stage)))
        frozen = [tensor for tensor in held(blueprint, layout, pp_rank) if tensor.name not in trained and not tensor.buffer]
        zero = layout.zero_stage > 0
        for rank in range(layout.partitions if layout.zero_stage == 3 else 1):
            module = weights(0) if layout.mesh.pp == 1 else None
            fragments = {
                tensor.name: FileTensor((-(-prod(shapes[tensor.name]) // layout.partitions),), layout.dtype)
                if layout.zero_stage == 3
                else (module or {}).get(tensor.name)
                for tensor in frozen
            }
            shown = [tensors[index] for index in range(len(flats))] if layout.zero_stage == 3 else groups
            state = {
                "module": module,
                "buffer_names": [tensor.name for tensor in held(blueprint, layout, pp_rank) if tensor.buffer],
                "optimizer": optimizer,
                "param_shapes": [OrderedDict((tensor.name, Size(shapes[tensor.name])) for tensor, _ in group) for group in shown] if zero else None,
                "frozen_param_shapes": {tensor.name: Size(shapes[tensor.name]) for tensor in frozen} if layout.zero_stage > 1 else None,
                "shared_params": {alias: name for alias, (name, _) in blueprint.aliases.items() if name in shapes} if zero else None,
                "frozen_param_fragments": fragments if layout.zero_stage > 1 else None,
                "data_sampler": None,
                "random_ltd": None,
                "dp_world_size": layout.partitions,
                "mp_world_size": layout.mesh.tp * layout.mesh.pp,
                "checkpoint_parallel_dimensions": {"pp_degree": layout.mesh.pp, "tp_degree": layout.mesh.tp},
                "ds_version": version("deepspeed"),
            }
            torch_files.write(folder / model_file(layout, pp_rank, tp_rank, rank), state | carried.engine)
        for rank in range(layout.partitions) if zero else ():
            indices = [([index for index, flat in enumerate(flats) if flat[0] == number]) for number in range(len(groups))]
            kept = [0 if is_swapped(layout, size) else size for _, size, _ in flats]  # elements that are not in swap files
            sizes = [[(kept[index],) for index in own] for own in indices]
            if layout.swapped:
                (folder / swap_folder(layout, tp_rank, rank)).mkdir(parents=True)
            for index, (_, size, _) in enumerate(flats):
                for name in swap_files(blueprint, layout, tensors[index], tp_rank, rank).values() if is_swapped(layout, size) else ():
                    with (folder / name).open("wb") as stream:
                        stream.truncate(-(-4 * size // layout.swap_align) * layout.swap_align)
            base = optimizer_state(list(zip(indices, sizes, strict=True)))
            own = {"partition_count": [layout.partitions] * len(groups), "ds_version": version("deepspeed"), "clip_grad": carried.clipping}
            scaler = {"loss_scaler": LossScaler(cur_scale=1, dynamic=False), "dynamic_loss_scale": False, "overflow": False}
            ends = [max(0, min(size, (rank + 1) * size - sum(numel for _, numel in group))) for (_, size, _), group in zip(flats, groups, strict=False)]
            if layout.zero_stage == 3:
                masters = [FileTensor((size,)) for size in kept]
                parts = {
                    "zero_stage": ZeroStage(3),
                    "partition_count": layout.partitions,
                    "fp32_flat_groups": masters,
                    "optimizer_state_dict": base,
                }
                state = scaler | parts
            else:
                mappings = [
                    OrderedDict(
                        (tensor.name, Fragment(numel=at.stop - at.start, start=at.offset))
                        for (tensor, _), extents in zip(group, flat[2], strict=True)
                        for at in extents
                        if at.rank == rank
                    )
                    for flat, group in zip(flats, groups, strict=True)
                ]
                bf16 = layout.optimizer == "BF16_Optimizer"
                masters = [FileTensor((size if bf16 else size - end,)) for (_, size, _), end in zip(flats, ends, strict=True)]
                own |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": masters, "group_paddings": ends, "param_slice_mappings": mappings}
                stage = ZeroStage(layout.zero_stage)
                paddings = {"param_alignment_paddings": [[0] * len(group) for group in groups], "zero_stage": stage}
                state = own if bf16 else scaler | own | paddings
            content = {"optimizer_state_dict": state, "ds_config": carried.engine["ds_config"], "ds_version": version("deepspeed")}
            torch_files.write(folder / optimizer_file(layout, pp_rank, tp_rank, rank), content)


class OpenedFile:
    """Where the tensors of a torch.save file lie in it; nothing of them is read."""

    def __init__(self, path: Path):
        self.path = path
        self.tensors = torch_files.tensors(torch_files.read(path))

    def offset(self, keys: Keys) -> int:
        """Bytes from the beginning of the file. Raises `Refusal` if the file has no such tensor."""
        if keys not in self.tensors:
            raise refuse(str(self.path), f"has no tensor {'/'.join(map(str, keys))}, which its layout says is there", "use another copy of the checkpoint")
        if (start := self.tensors[keys].start) < 0:
            raise refuse(f"{self.path}: {'/'.join(map(str, keys))}", "is not stored in row-major order", "save it once more after .contiguous()")
        return start
