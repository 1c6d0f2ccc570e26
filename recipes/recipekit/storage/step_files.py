"""Step folder files, written without an engine."""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from ..parallel import adafactor_state_map
from ..parallel.blueprint import (
    Blueprint,
    Extent,
    Layout,
    Tensor,
    flat_groups,
    flat_tensors,
    num_partitions,
    state_keys,
    tensors_on_rank,
    weight_dtype,
)
from . import expert_files, torch_files
from .file_map import (
    ModelParallelRank,
    expert_optimizer_file,
    is_swapped,
    layer_file,
    model_parallel_ranks,
    swap_files,
    swap_folder_name,
)
from .torch_files import DynamicLossScaler, FileTensor, Fragment, LossScaler, Size, ZeroStage

SCALE_GROWTH_INTERVAL = 2000  # number of steps after which torch's GradScaler raises its scale


@dataclass
class CommonState:
    """A checkpoint's content except tensors: step counts and values of each optimizer group."""

    groups: dict[int, dict[str, Any]]
    scalars: dict[str, float]  # the optimizer's step count, and values computed from it
    counts: dict[str, Any]  # global_steps, skipped_steps, global_samples, lr_scheduler, ds_config
    scaler: dict[str, Any] = field(default_factory=dict)  # entries of ZeRO's loss scaler

    @property
    def clipping(self) -> float:
        """The run's gradient-clipping norm; without a run, the default of DeepSpeed 0.19.8."""
        return float(self.counts["ds_config"].get("gradient_clipping", 1.0))

    def remap_groups(self, was: Blueprint, now: Blueprint) -> "CommonState":
        """Return this state with its groups renumbered as in blueprint `now`.

        A new group in fp32 receives the values of the group with the same rules. Another new group
        receives the values of the first group.
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
                number: bare.get(group, bare.get(replace(group, fp32=False), first)) | group.entries
                for number, group in enumerate(now.groups)
            },
        )


def read_common_state(folder: Path, blueprint: Blueprint, layout: Layout) -> CommonState:
    """Read a step folder's content that is not stored in its tensors."""
    groups: dict[int, dict[str, Any]] = {}
    scalars: dict[str, float] = {}
    counts: dict[str, Any] = {}
    scaler: dict[str, Any] = {}
    for holder in model_parallel_ranks(blueprint, layout):
        numbers = [group[0][0].group for group in holder.groups]
        model = _unwrap_scalars(torch_files.read_torch_file(folder / holder.model_file()))
        optimizer, scaler = _read_optimizer(folder, holder, model)
        for number, group in zip(numbers, optimizer["param_groups"], strict=False):
            # The first group counts, because groups of sharded experts, which have different names,
            # follow it.
            if number is not None:
                groups.setdefault(
                    number, {key: value for key, value in group.items() if key != "params"}
                )
        # some Adam implementations count their steps in the group
        for kept in [*optimizer["state"].values(), *optimizer["param_groups"]]:
            # a weight may have been skipped in a step, so use the maximum
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
            counts |= _grad_scaler_state(model, scaler)
    return CommonState(groups, scalars, counts, scaler=scaler)


def _read_optimizer(
    folder: Path, holder: ModelParallelRank, model: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (the wrapped optimizer's `state_dict()`, entries of ZeRO's loss scaler).

    The wrapped optimizer is the one inside DeepSpeed's ZeRO optimizer. ZeRO-0 stores both in the
    model file.
    """
    layout = holder.layout
    if layout.zero_stage == 0:
        own = model["optimizer"]
        return own if layout.optimizer == "torch" else own["optimizer_state_dict"], {}
    whole = _unwrap_scalars(torch_files.read_torch_file(folder / holder.optimizer_file(0)))[
        "optimizer_state_dict"
    ]
    key = "optimizer_state_dict" if layout.zero_stage == 3 else "base_optimizer_state"
    scaler = {name: whole[name] for name in ("loss_scaler", "dynamic_loss_scale") if name in whole}
    return whole[key], scaler


def _unwrap_scalars(value: Any) -> Any:
    """Replace one-element tensors by their numbers, so that the file is not read again."""
    if isinstance(value, FileTensor):
        return value if value.value is None else value.value
    if isinstance(value, dict):
        return type(value)({key: _unwrap_scalars(item) for key, item in value.items()})
    return type(value)(map(_unwrap_scalars, value)) if type(value) in (list, tuple) else value


def create_step_files(
    folder: Path, blueprint: Blueprint, layout: Layout, common: CommonState
) -> None:
    """Write the files that DeepSpeed loads in `layout`.

    Their tensors are initially zeros (holes in the files) and are filled later.
    """
    for holder in model_parallel_ranks(blueprint, layout):
        if layout.mesh.pp > 1:
            for stage in holder.stages:
                torch_files.write_torch_file(
                    folder / layer_file(stage, holder.tp_rank),
                    OrderedDict(_stage_state_dict(holder, stage)),
                )
        for rank in range(layout.partitions if layout.zero_stage == 3 else 1):
            content = (
                module_states(holder, common)
                | common.counts
                | expert_files.model_entries(holder, rank)
            )
            if layout.zero_stage:
                content.pop("loss_scale", None)  # it is in the optimizer file
            torch_files.write_torch_file(folder / holder.model_file(rank), content)
        for file, content in expert_files.files_of_experts(holder):
            torch_files.write_torch_file(folder / file, content)
        for ep_rank in range(layout.mesh.ep if holder.parts and not layout.zero_stage else 0):
            torch_files.write_torch_file(
                folder / expert_optimizer_file(ep_rank),
                {"optimizer": zero0_states(holder, common)},
            )
        for rank in range(layout.partitions) if layout.zero_stage else ():
            if layout.swapped:
                _create_swap_files(folder, holder, rank)
            state = (
                zero3_states(holder, common, rank)
                if layout.zero_stage == 3
                else zero12_states(holder, common, rank)
            )
            content = {
                "optimizer_state_dict": state,
                "ds_config": common.counts["ds_config"],
                "ds_version": version("deepspeed"),
            }
            torch_files.write_torch_file(folder / holder.optimizer_file(rank), content)


def _stage_state_dict(holder: ModelParallelRank, stage: int) -> dict[str, FileTensor]:
    """Return a pipeline stage's `state_dict()` without sharded experts.

    An alias is the same tensor object as the original. Under ZeRO-3, parameters are empty.
    """
    made: dict[str, FileTensor] = {}
    for key, tensor in state_keys(holder.blueprint, holder.layout, stage).items():
        if tensor.expert and holder.parts:
            continue
        gone = holder.layout.zero_stage == 3 and not tensor.buffer
        dtype = weight_dtype(tensor, holder.layout)
        made[key] = (
            made[tensor.name]
            if tensor.name in made
            else FileTensor((0,) if gone else holder.shapes[tensor.name], dtype)
        )
    return made


def module_states(holder: ModelParallelRank, common: CommonState) -> dict[str, Any]:
    """Return a model file's content without the numbers in `common.counts`.

    The content consists of the weights and, under ZeRO-0, the optimizer states.
    """
    layout, shapes, trained = holder.layout, holder.shapes, holder.trained
    tensors = tensors_on_rank(holder.blueprint, layout, holder.pp_rank)
    frozen = [tensor for tensor in tensors if tensor.name not in trained and not tensor.buffer]
    module = _stage_state_dict(holder, 0) if layout.mesh.pp == 1 else None
    zero, groups = layout.zero_stage > 0, flat_tensors(holder.groups, layout)
    return {
        "module": module,
        "buffer_names": [tensor.name for tensor in tensors if tensor.buffer],
        "optimizer": None if zero else zero0_states(holder, common),
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
        "frozen_param_fragments": _frozen_fragments(holder, frozen, module or {})
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


def _frozen_fragments(
    holder: ModelParallelRank, frozen: list[Tensor], module: dict[str, FileTensor]
) -> dict[str, FileTensor | None]:
    """Return a rank's parts of frozen parameters; ZeRO-2 stores the module's full weights."""
    if holder.layout.zero_stage != 3:
        return {tensor.name: module.get(tensor.name) for tensor in frozen}
    ranks = holder.layout.partitions
    return {
        tensor.name: FileTensor(
            (-(-prod(holder.shapes[tensor.name]) // ranks),), weight_dtype(tensor, holder.layout)
        )
        for tensor in frozen
    }


def zero0_states(holder: ModelParallelRank, common: CommonState) -> dict[str, Any]:
    """Return the optimizer states in a ZeRO-0 model file.

    They have the format of torch's optimizer or of FP16_UnfusedOptimizer, which stores a master of
    each parameter.
    """
    shapes, first = (
        [[holder.shapes[tensor.name] for tensor, _ in group] for group in holder.groups],
        0,
    )
    indices = []
    for group in shapes:
        indices.append(list(range(first, first + len(group))))
        first += len(group)
    optimizer = _base_optimizer(holder, common, 0, indices, shapes)
    if holder.layout.optimizer == "torch":
        return optimizer
    scale = {
        "dynamic_loss_scale": False,
        "cur_scale": 1.0,
        "cur_iter": common.counts["global_steps"],
    }
    return scale | {
        "optimizer_state_dict": optimizer,
        "fp32_groups": [[FileTensor(shape) for shape in group] for group in shapes],
    }


def zero12_states(holder: ModelParallelRank, common: CommonState, rank: int) -> dict[str, Any]:
    """Return the optimizer states in a data-parallel rank's ZeRO-1 or ZeRO-2 file.

    They are the rank's partition of each group, in the format of the layout's optimizer class.
    """
    layout, groups, flats = holder.layout, holder.groups, flat_groups(holder.groups, holder.layout)
    sizes = [size for _, size, _ in flats]
    bf16 = layout.optimizer == "BF16_Optimizer"
    own_parts = [holder.partition_index(group, rank) for group in groups]
    totals = [sum(numel for _, numel in group) for group in groups]
    paddings = [
        max(0, min(size, (part + 1) * size - total))
        for size, part, total in zip(sizes, own_parts, totals, strict=True)
    ]
    own = {
        "partition_count": [num_partitions(group, layout) for group in groups],
        "ds_version": version("deepspeed"),
        "clip_grad": common.clipping,
    }
    own |= {
        "base_optimizer_state": _base_optimizer(
            holder,
            common,
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
        _loss_scaler_entries(common)
        | own
        | {
            "param_alignment_paddings": [[0] * len(group) for group in groups],
            "zero_stage": ZeroStage(layout.zero_stage),
        }
    )


def _slice_mapping(
    group: list[tuple[Tensor, int]], extents: list[list[Extent]], part: int
) -> OrderedDict[str, Fragment]:
    """Return tensor -> location of the tensor's elements in one partition of the group."""
    pairs = [
        (tensor.name, at)
        for (tensor, _), places in zip(group, extents, strict=True)
        for at in places
        if at.rank == part
    ]
    return OrderedDict(
        (name, Fragment(numel=at.stop - at.start, start=at.offset)) for name, at in pairs
    )


def zero3_states(holder: ModelParallelRank, common: CommonState, rank: int) -> dict[str, Any]:
    """Return the optimizer states in a data-parallel rank's ZeRO-3 file.

    They are the rank's partition of each sub-group. Tensors whose values are in swap files are
    empty.
    """
    layout, flats = holder.layout, flat_groups(holder.groups, holder.layout)
    kept = [0 if is_swapped(layout, size) else size for _, size, _ in flats]
    indices = [
        [index for index, flat in enumerate(flats) if flat[0] == number]
        for number in range(len(holder.groups))
    ]
    base = _base_optimizer(
        holder, common, rank, indices, [[(kept[index],) for index in own] for own in indices]
    )
    masters = [FileTensor((size,)) for size in kept]
    states = {
        "zero_stage": ZeroStage(3),
        "partition_count": layout.partitions,
        "fp32_flat_groups": masters,
        "optimizer_state_dict": base,
    }
    return _loss_scaler_entries(common) | states | expert_files.optimizer_entries(holder, rank)


def _create_swap_files(folder: Path, holder: ModelParallelRank, rank: int) -> None:
    """Create a data-parallel rank's swap files in full size, filled with zeros."""
    layout, tensors = holder.layout, flat_tensors(holder.groups, holder.layout)
    (folder / swap_folder_name(layout, holder.tp_rank, rank)).mkdir(parents=True)
    for index, (_, size, _) in enumerate(flat_groups(holder.groups, layout)):
        if is_swapped(layout, size):
            for name in swap_files(
                holder.blueprint, layout, tensors[index], holder.tp_rank, rank
            ).values():
                with (folder / name).open("wb") as stream:
                    stream.truncate(-(-4 * size // layout.swap_align) * layout.swap_align)


def _base_optimizer(
    holder: ModelParallelRank,
    common: CommonState,
    rank: int,
    indices: list[list[int]],
    shapes: list[list[tuple[int, ...]]],
) -> dict[str, Any]:
    """Return the `state_dict()` of the optimizer inside DeepSpeed's on a data-parallel rank.

    `indices` and `shapes` contain the indices and shapes of the tensors in each group.
    """
    state, param_groups = {}, []
    factored = (
        adafactor_state_map.state_sizes_by_rank(holder.groups, holder.layout, holder.shapes)
        if holder.layout.uses_adafactor
        else None
    )
    for group, numbers, sizes in zip(holder.groups, indices, shapes, strict=True):
        for index, shape in zip(numbers, sizes, strict=True):
            numbers_of_it = {name: common.scalars.get(name, 0.0) for name in holder.layout.scalars}
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
            if kept := scalars | states:  # torch creates no entry for an empty state
                state[index] = kept
        number = group[0][0].group
        own = common.groups.get(number if number is not None else -1, {}) | {"params": numbers}
        param_groups.append(own | expert_files.group_entries(holder, group[0][0]))
    return {"state": state, "param_groups": param_groups}


def _loss_scaler_entries(common: CommonState) -> dict[str, Any]:
    """Return the loss scaler's entries in an optimizer file.

    They are taken from the converted checkpoint. If that checkpoint has no scaler, the scaler is
    off.
    """
    off = {"loss_scaler": LossScaler(cur_scale=1, dynamic=False), "dynamic_loss_scale": False}
    return off | (common.scaler or _deepspeed_scaler_entries(common)) | {"overflow": False}


def _deepspeed_scaler_entries(common: CommonState) -> dict[str, Any]:
    """Return DeepSpeed's loss-scaler entries with torch's loss scale; {} without fp16."""
    if not (scale := common.counts.get("loss_scale")):
        return {}
    steps = common.counts["global_steps"]
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


def _grad_scaler_state(model: dict[str, Any], scaler: dict[str, Any]) -> dict[str, Any]:
    """Return the loss scale as `torch.amp.GradScaler.state_dict()`; {} without fp16.

    The scale is taken from a model file or from ZeRO's loss scaler.
    """
    if scale := model.get("loss_scale"):
        return {"loss_scale": scale}
    held = scaler.get("loss_scaler")
    if held is None or not held.dynamic:
        return {}
    good = held.cur_iter - held.last_overflow_iter - 1  # steps since the last overflow
    numbers = {
        "growth_factor": held.scale_factor,
        "backoff_factor": 1 / held.scale_factor,
        "growth_interval": SCALE_GROWTH_INTERVAL,
    }
    return {
        "loss_scale": {
            "scale": float(held.cur_scale),
            **numbers,
            "_growth_tracker": min(good % held.scale_window, SCALE_GROWTH_INTERVAL - 1),
        }
    }
