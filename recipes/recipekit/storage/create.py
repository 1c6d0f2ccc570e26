"""Writes the files of a step folder without an engine."""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from ..parallel import factors
from ..parallel.blueprint import (
    Blueprint,
    Extent,
    Layout,
    Tensor,
    flat_groups,
    flat_tensors,
    held,
    holders_of,
    state_keys,
)
from . import expert_files, torch_files
from .places import (
    Holder,
    expert_optimizer_file,
    holders,
    is_swapped,
    layer_file,
    swap_files,
    swap_folder,
)
from .torch_files import DynamicLossScaler, FileTensor, Fragment, LossScaler, Size, ZeroStage

INTERVAL = 2000  # steps after which torch's GradScaler raises its scale


@dataclass
class Carried:
    """Holds what a checkpoint has besides tensors: step counts, and the numbers of each optimizer
    group.
    """

    groups: dict[int, dict[str, Any]]
    scalars: dict[str, float]  # of the optimizer: its count of steps, and what follows from it
    counts: dict[str, Any]  # global_steps, skipped_steps, global_samples, lr_scheduler, ds_config
    scaler: dict[str, Any] = field(default_factory=dict)  # the entries of ZeRO's loss scaler

    @property
    def clipping(self) -> float:
        """Returns the run's clipping norm; DeepSpeed 0.19.8's default for a checkpoint that no run
        made.
        """
        return float(self.counts["ds_config"].get("gradient_clipping", 1.0))

    def regrouped(self, was: Blueprint, now: Blueprint) -> "Carried":
        """Returns the same with the numbers of the groups of another blueprint; a group that was
        not there gets those of the first one.
        """
        if was.groups == now.groups:
            return self
        known = {
            was.groups[number]: numbers
            for number, numbers in self.groups.items()
            if number < len(was.groups)
        }
        bare = {
            group: {key: value for key, value in numbers.items() if key not in group.entries}
            for group, numbers in known.items()
        }
        first = next(iter(bare.values()), {})
        return replace(
            self,
            groups={
                number: bare.get(group, first) | group.entries
                for number, group in enumerate(now.groups)
            },
        )


def read_carried(folder: Path, blueprint: Blueprint, layout: Layout) -> Carried:
    """Read the content of a step folder that is not in its tensors."""
    groups: dict[int, dict[str, Any]] = {}
    scalars: dict[str, float] = {}
    counts: dict[str, Any] = {}
    scaler: dict[str, Any] = {}
    for holder in holders(blueprint, layout):
        numbers = [group[0][0].group for group in holder.groups]
        model = _numbers(torch_files.read(folder / holder.model_file()))
        optimizer, scaler = _read_optimizer(folder, holder, model)
        for number, group in zip(numbers, optimizer["param_groups"], strict=False):
            # the first counts: the groups of divided experts, which have other names, follow
            if number is not None:
                groups.setdefault(
                    number, {key: value for key, value in group.items() if key != "params"}
                )
        # Adams that count in a group
        for kept in [*optimizer["state"].values(), *optimizer["param_groups"]]:
            # a weight may have been left out of a step
            if "step" in kept and float(kept["step"]) >= scalars.get("step", 0.0):
                scalars |= {name: float(kept[name]) for name in layout.scalars if name in kept}
        if not counts:
            counts = {
                key: model.get(key)
                for key in (
                    "global_steps",
                    "skipped_steps",
                    "global_samples",
                    "lr_scheduler",
                    "ds_config",
                )
            }
            counts |= _scale_of_torch(model, scaler)
    return Carried(groups, scalars, counts, scaler=scaler)


def _read_optimizer(
    folder: Path, holder: Holder, model: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (the `state_dict()` of the optimizer that DeepSpeed wraps, the entries of ZeRO's loss
    scaler), at ZeRO-0 from the model file.
    """
    layout = holder.layout
    if layout.zero_stage == 0:
        own = model["optimizer"]
        return own if layout.optimizer == "torch" else own["optimizer_state_dict"], {}
    whole = _numbers(torch_files.read(folder / holder.optimizer_file(0)))["optimizer_state_dict"]
    key = "optimizer_state_dict" if layout.zero_stage == 3 else "base_optimizer_state"
    scaler = {name: whole[name] for name in ("loss_scaler", "dynamic_loss_scale") if name in whole}
    return whole[key], scaler


def _numbers(value: Any) -> Any:
    """Replaces tensors of one element by their numbers, so that nobody has to read the file
    again.
    """
    if isinstance(value, FileTensor):
        return value if value.value is None else value.value
    if isinstance(value, dict):
        return type(value)({key: _numbers(item) for key, item in value.items()})
    return type(value)(map(_numbers, value)) if type(value) in (list, tuple) else value


def create(folder: Path, blueprint: Blueprint, layout: Layout, carried: Carried) -> None:
    """Writes the files that DeepSpeed loads in `layout`; their tensors are zeros (holes) to be
    filled in.
    """
    for holder in holders(blueprint, layout):
        if layout.mesh.pp > 1:
            for stage in holder.stages:
                torch_files.write(
                    folder / layer_file(stage, holder.tp_rank), OrderedDict(_weights(holder, stage))
                )
        for rank in range(layout.partitions if layout.zero_stage == 3 else 1):
            content = (
                module_states(holder, carried)
                | carried.counts
                | expert_files.model_entries(holder, rank)
            )
            if layout.zero_stage:
                content.pop("loss_scale", None)  # it is in the optimizer's file
            torch_files.write(folder / holder.model_file(rank), content)
        for file, content in expert_files.files_of_experts(holder):
            torch_files.write(folder / file, content)
        for ep_rank in range(layout.mesh.ep if holder.parts and not layout.zero_stage else 0):
            torch_files.write(
                folder / expert_optimizer_file(ep_rank),
                {"optimizer": zero0_states(holder, carried)},
            )
        for rank in range(layout.partitions) if layout.zero_stage else ():
            if layout.swapped:
                _create_swap_files(folder, holder, rank)
            state = (
                zero3_states(holder, carried, rank)
                if layout.zero_stage == 3
                else zero12_states(holder, carried, rank)
            )
            content = {
                "optimizer_state_dict": state,
                "ds_config": carried.counts["ds_config"],
                "ds_version": version("deepspeed"),
            }
            torch_files.write(folder / holder.optimizer_file(rank), content)


def _weights(holder: Holder, stage: int) -> dict[str, FileTensor]:
    """Makes the `state_dict()` of a stage, without divided experts.

    An alias is the same tensor again; under ZeRO-3 parameters are empty.
    """
    made: dict[str, FileTensor] = {}
    for key, tensor in state_keys(holder.blueprint, holder.layout, stage).items():
        if tensor.expert and holder.parts:
            continue
        gone = holder.layout.zero_stage == 3 and not tensor.buffer
        dtype = tensor.buffer or holder.layout.dtype
        made[key] = (
            made[tensor.name]
            if tensor.name in made
            else FileTensor((0,) if gone else holder.shapes[tensor.name], dtype)
        )
    return made


def module_states(holder: Holder, carried: Carried) -> dict[str, Any]:
    """Makes a model file without the numbers of `carried.counts`: the weights, and under ZeRO-0 the
    optimizer's states.
    """
    layout, shapes, trained = holder.layout, holder.shapes, holder.trained
    tensors = held(holder.blueprint, layout, holder.pp_rank)
    frozen = [tensor for tensor in tensors if tensor.name not in trained and not tensor.buffer]
    module = _weights(holder, 0) if layout.mesh.pp == 1 else None
    zero, groups = layout.zero_stage > 0, flat_tensors(holder.groups, layout)
    return {
        "module": module,
        "buffer_names": [tensor.name for tensor in tensors if tensor.buffer],
        "optimizer": None if zero else zero0_states(holder, carried),
        "param_shapes": [
            OrderedDict((tensor.name, Size(shapes[tensor.name])) for tensor, _ in group)
            for group in groups
        ]
        if zero
        else None,
        "frozen_param_shapes": {tensor.name: Size(shapes[tensor.name]) for tensor in frozen}
        if layout.zero_stage > 1
        else None,
        "shared_params": {
            alias: name
            for alias, (name, _) in holder.blueprint.aliases.items()
            if name in shapes and name not in holder.parts
        }
        if zero
        else None,
        "frozen_param_fragments": _fragments(holder, frozen, module or {})
        if layout.zero_stage > 1
        else None,
        "data_sampler": None,
        "random_ltd": None,
        "dp_world_size": layout.partitions,
        "mp_world_size": layout.mesh.tp * layout.mesh.pp,
        "checkpoint_parallel_dimensions": {
            "pp_degree": layout.mesh.pp,
            "tp_degree": layout.mesh.tp,
        },
        "ds_version": version("deepspeed"),
    }


def _fragments(
    holder: Holder, frozen: list[Tensor], module: dict[str, FileTensor]
) -> dict[str, FileTensor | None]:
    """Make a rank's parts of frozen parameters; ZeRO-2 has the full weights of the module."""
    if holder.layout.zero_stage != 3:
        return {tensor.name: module.get(tensor.name) for tensor in frozen}
    ranks = holder.layout.partitions
    sizes = {tensor.name: -(-prod(holder.shapes[tensor.name]) // ranks) for tensor in frozen}
    return {name: FileTensor((size,), holder.layout.dtype) for name, size in sizes.items()}


def zero0_states(holder: Holder, carried: Carried) -> dict[str, Any]:
    """Makes the optimizer states in a model file of ZeRO-0: torch's, or FP16_UnfusedOptimizer's
    with a master of each parameter.
    """
    shapes, first = (
        [[holder.shapes[tensor.name] for tensor, _ in group] for group in holder.groups],
        0,
    )
    indices = []
    for group in shapes:
        indices.append(list(range(first, first + len(group))))
        first += len(group)
    optimizer = _base_optimizer(holder, carried, 0, indices, shapes)
    if holder.layout.optimizer == "torch":
        return optimizer
    scale = {
        "dynamic_loss_scale": False,
        "cur_scale": 1.0,
        "cur_iter": carried.counts["global_steps"],
    }
    return scale | {
        "optimizer_state_dict": optimizer,
        "fp32_groups": [[FileTensor(shape) for shape in group] for group in shapes],
    }


def zero12_states(holder: Holder, carried: Carried, rank: int) -> dict[str, Any]:
    """Makes the optimizer states in a data rank's file of ZeRO-1 or -2: the rank's partition of
    each group, as the layout's optimizer class stores it.
    """
    layout, groups, flats = holder.layout, holder.groups, flat_groups(holder.groups, holder.layout)
    sizes = [size for _, size, _ in flats]
    bf16 = layout.optimizer == "BF16_Optimizer"
    own_parts = [holder.partition(group, rank) for group in groups]
    totals = [sum(numel for _, numel in group) for group in groups]
    paddings = [
        max(0, min(size, (part + 1) * size - total))
        for size, part, total in zip(sizes, own_parts, totals, strict=True)
    ]
    own = {
        "partition_count": [holders_of(group, layout) for group in groups],
        "ds_version": version("deepspeed"),
        "clip_grad": carried.clipping,
    }
    own |= {
        "base_optimizer_state": _base_optimizer(
            holder,
            carried,
            rank,
            [[number] for number in range(len(groups))],
            [[(size,)] for size in sizes],
        ),
        "single_partition_of_fp32_groups": [
            FileTensor((size if bf16 else size - end,))
            for size, end in zip(sizes, paddings, strict=True)
        ],
        "group_paddings": paddings,
        "param_slice_mappings": [
            _slice_mapping(group, extents, part)
            for group, (_, _, extents), part in zip(groups, flats, own_parts, strict=True)
        ],
    }
    if bf16:
        return own
    return (
        _scaler(carried)
        | own
        | {
            "param_alignment_paddings": [[0] * len(group) for group in groups],
            "zero_stage": ZeroStage(layout.zero_stage),
        }
    )


def _slice_mapping(
    group: list[tuple[Tensor, int]], extents: list[list[Extent]], part: int
) -> OrderedDict[str, Fragment]:
    """Maps each tensor to the place of its elements in one partition of the group."""
    pairs = [
        (tensor.name, at)
        for (tensor, _), places in zip(group, extents, strict=True)
        for at in places
        if at.rank == part
    ]
    return OrderedDict(
        (name, Fragment(numel=at.stop - at.start, start=at.offset)) for name, at in pairs
    )


def zero3_states(holder: Holder, carried: Carried, rank: int) -> dict[str, Any]:
    """Makes the optimizer states in a data rank's file of ZeRO-3: the rank's partition of each
    sub-group; empty tensors if that lies in swap files.
    """
    layout, flats = holder.layout, flat_groups(holder.groups, holder.layout)
    kept = [0 if is_swapped(layout, size) else size for _, size, _ in flats]
    indices = [
        [index for index, flat in enumerate(flats) if flat[0] == number]
        for number in range(len(holder.groups))
    ]
    base = _base_optimizer(
        holder, carried, rank, indices, [[(kept[index],) for index in own] for own in indices]
    )
    masters = [FileTensor((size,)) for size in kept]
    states = {
        "zero_stage": ZeroStage(3),
        "partition_count": layout.partitions,
        "fp32_flat_groups": masters,
        "optimizer_state_dict": base,
    }
    return _scaler(carried) | states | expert_files.optimizer_entries(holder, rank)


def _create_swap_files(folder: Path, holder: Holder, rank: int) -> None:
    """Makes the swap files of a data rank, in full size and of zeros."""
    layout, tensors = holder.layout, flat_tensors(holder.groups, holder.layout)
    (folder / swap_folder(layout, holder.tp_rank, rank)).mkdir(parents=True)
    for index, (_, size, _) in enumerate(flat_groups(holder.groups, layout)):
        if is_swapped(layout, size):
            for name in swap_files(
                holder.blueprint, layout, tensors[index], holder.tp_rank, rank
            ).values():
                with (folder / name).open("wb") as stream:
                    stream.truncate(-(-4 * size // layout.swap_align) * layout.swap_align)


def _base_optimizer(
    holder: Holder,
    carried: Carried,
    rank: int,
    indices: list[list[int]],
    shapes: list[list[tuple[int, ...]]],
) -> dict[str, Any]:
    """Makes the `state_dict()` of the optimizer that DeepSpeed wraps on a data rank.

    `indices`, `shapes`: the numbers and shapes of the tensors of each group.
    """
    state, param_groups = {}, []
    factored = (
        factors.sizes_of(holder.groups, holder.layout, holder.shapes)
        if holder.layout.factored
        else None
    )
    for group, numbers, sizes in zip(holder.groups, indices, shapes, strict=True):
        for index, shape in zip(numbers, sizes, strict=True):
            numbers_of_it = {name: carried.scalars.get(name, 0.0) for name in holder.layout.scalars}
            scalars = {
                name: int(value) if holder.layout.int_step else FileTensor((), value=value)
                for name, value in numbers_of_it.items()
            }
            if factored is not None:
                states = {
                    role: FileTensor((numel,))
                    for role, numel in factored[index].get(rank, {}).items()
                }
            else:
                states = {role: FileTensor(shape) for role in holder.states_of(group[0][0])}
            if kept := scalars | states:  # torch makes no entry without anything in it
                state[index] = kept
        number = group[0][0].group
        own = carried.groups.get(number if number is not None else -1, {}) | {"params": numbers}
        param_groups.append(own | expert_files.group_entries(holder, group[0][0]))
    return {"state": state, "param_groups": param_groups}


def _scaler(carried: Carried) -> dict[str, Any]:
    """Return the entries of the loss scaler in an optimizer file.

    They come from the converted checkpoint. Without a scaler there, it is off.
    """
    off = {"loss_scaler": LossScaler(cur_scale=1, dynamic=False), "dynamic_loss_scale": False}
    return off | (carried.scaler or _of_deepspeed(carried)) | {"overflow": False}


def _of_deepspeed(carried: Carried) -> dict[str, Any]:
    """Return the entries of DeepSpeed's loss scaler with the scale of torch's; {} for a checkpoint
    without fp16.
    """
    if not (scale := carried.counts.get("loss_scale")):
        return {}
    steps = carried.counts["global_steps"]
    made = DynamicLossScaler(
        cur_scale=scale["scale"],
        cur_iter=steps,
        last_overflow_iter=steps - 1 - scale["_growth_tracker"],
        scale_factor=scale["growth_factor"],
        scale_window=scale["growth_interval"],
        min_scale=1,
        delayed_shift=1,
        cur_hysteresis=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
        dynamic=True,
    )
    return {"loss_scaler": made, "dynamic_loss_scale": True}


def _scale_of_torch(model: dict[str, Any], scaler: dict[str, Any]) -> dict[str, Any]:
    """Return the loss scale as `torch.amp.GradScaler.state_dict()`, from a model file or ZeRO's
    scaler; {} without fp16.
    """
    if scale := model.get("loss_scale"):
        return {"loss_scale": scale}
    held: Any = scaler.get("loss_scaler")
    if held is None or not held.dynamic:
        return {}
    good = held.cur_iter - held.last_overflow_iter - 1  # steps since the last one that overflowed
    numbers = {
        "growth_factor": held.scale_factor,
        "backoff_factor": 1 / held.scale_factor,
        "growth_interval": INTERVAL,
    }
    return {
        "loss_scale": {
            "scale": float(held.cur_scale),
            **numbers,
            "_growth_tracker": min(good % held.scale_window, INTERVAL - 1),
        }
    }
