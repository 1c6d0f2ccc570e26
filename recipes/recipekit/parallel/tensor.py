"""Tensor parallelism by the model's own published plan, with plain local shards as parameters.

DeepSpeed and ZeRO see ordinary tensors. A module sees its shards as DTensors only during its
forward, where transformers' plan styles require DTensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel
from transformers.distributed import tensor_parallel as styles
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from ..compat.deepspeed import mark_shard
from ..compat.torch import set_forward, set_parameters
from ..compat.transformers import (
    gradients_summed_by,
    placements_noted,
    set_count,
    shard_by_plan,
    style_of,
    without_layer_numbers,
)
from ..spec.errors import config_error
from ..spec.task_specs import Plans


@dataclass(frozen=True)
class ShardSpec:
    """Sharding of one parameter over the tensor group: placements, full shape and full stride."""

    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def sharded(self) -> bool:
        return not self.placements[0].is_replicate()


class PackedColwise(styles.PackedColwiseParallel):
    """Style that shards each block of a fused linear layer, such as queries, keys and values.

    transformers 5.22.2's own style shards the bias as a single block.
    """

    def shard_param(self, module: nn.Module, param: str, mesh: object) -> None:
        parameter = module._parameters.get(param)
        if parameter is not None:
            placement = _StridedShard(dim=0, split_factor=self.split_factor)
            whole = known_styles.distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            made = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            set_parameters(module, {param: made})


class SplitOutput(styles.TensorParallelLayer):
    """Style for a module that needs all columns, between column-wise and row-wise layers.

    Every rank computes the full output and passes its own columns on. In the backward pass, the
    ranks gather the gradient of all columns.
    """

    def transform_output_post_forward(
        self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh
    ) -> torch.Tensor:
        full = DTensor.from_local(output, mesh, [Replicate()], run_check=False)
        return full.redistribute(placements=[Shard(-1)]).to_local()


class SharedExperts(styles.AllReduceParallel):
    """Style for experts that every token uses, with weights that are parameters of one module.

    The output is summed in the forward pass, and the gradient of each input in the backward pass.
    transformers 5.24.0's own style sums only the output, and expects weights without shards.
    """

    def should_use_local_tensors(self, module: nn.Module) -> Any:
        return True

    def transform_inputs_pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        read = partial(_copy_to_tensor_parallel, group=mesh.get_group())
        return tuple(map(read, args)), {key: read(value) for key, value in kwargs.items()}


known_styles: Any = styles
known_styles.ALL_PARALLEL_STYLES.register("split_output", SplitOutput())
known_styles.ALL_PARALLEL_STYLES.register("shared_experts", SharedExperts())
known_styles.ALL_PARALLEL_STYLES.register(
    "rowwise_scatter_output",
    styles.RowwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(-1)),
)
for blocks in (2, 3):
    known_styles.ALL_PARALLEL_STYLES.register(
        f"packed_colwise_{blocks}", PackedColwise(split_factor=blocks)
    )


def check_tp_plan(model: PreTrainedModel, plan: Mapping[str, str]) -> None:
    """Raise `ConfigError` if the tensor-parallel plan is missing or contains an unknown style.

    The known styles are the styles in transformers.
    """
    if not plan:
        raise config_error(
            f"tp > 1 with {type(model).__name__}",
            "this model publishes no base_model_tp_plan",
            "use --tp 1",
        )
    if odd := sorted(set(plan.values()) - set(ALL_PARALLEL_STYLES.keys())):
        rule = (
            f"transformers {transformers.__version__} has no tensor-parallel style {', '.join(odd)}"
        )
        raise config_error("tp_plan", rule, f"use {', '.join(sorted(ALL_PARALLEL_STYLES.keys()))}")


def apply_tensor_parallel(
    model: PreTrainedModel, tp_mesh: DeviceMesh, plans: Plans, summed: frozenset[str] = frozenset()
) -> dict[str, ShardSpec]:
    """Shard a meta-device model by `plans`, in place, and return its sharded parameters' specs.

    Afterwards each sharded parameter is a plain meta parameter with this rank's local shape.
    `summed` lists unsharded parameters whose gradients must be summed over the ranks
    (`partial.partial_gradients`).
    """
    plan = dict(plans.tp)
    with gradients_summed_by(_sum_incoming_gradient):
        shard_by_plan(model, tp_mesh, plan)
    shared = _SharedInput(tp_mesh.get_group())
    cuts: dict[str, ShardSpec] = {}
    for name, module in model.named_modules():
        own = {}
        for key, parameter in list(module._parameters.items()):
            if not isinstance(parameter, DTensor):
                if parameter is not None and without_layer_numbers(f"{name}.{key}") in summed:
                    _sum_gradients(module, (key,), tp_mesh)
                continue
            cut = ShardSpec(tuple(parameter.placements), parameter.shape, parameter.stride())
            local = nn.Parameter(
                parameter.to_local().detach(), requires_grad=parameter.requires_grad
            )
            mark_shard(local, cut.sharded)
            set_parameters(module, {key: local})
            own[key] = cuts[f"{name}.{key}"] = cut
        # A module without a style uses its shard together with local activations. An
        # example is an attention layer with a sink for each head.
        style = style_of(name, plan, is_weight=False) if own else None
        if style is not None:
            _present_as_dtensors(module, own, tp_mesh)
            _use_local_shards(module, ALL_PARALLEL_STYLES[style], shared)
    _divide_counts(model, plans.tp_local, tp_mesh.size())
    return cuts


def _divide_counts(model: nn.Module, tp_local: Mapping[str, Sequence[str]], tp: int) -> None:
    """Divide attributes that count sharded items by tp, for example the number of heads in T5.

    T5's attention creates zeros for this number of heads. Raises `ConfigError` if an attribute is
    not divisible by tp.
    """
    for name, module in model.named_modules():
        for key in tp_local.get(type(module).__name__, ()):
            if not isinstance(count := getattr(module, key, None), int) or count % tp:
                raise config_error(
                    f"tp_local: {type(module).__name__}.{key}",
                    f"is {count!r} in {name}, which is not divisible by tp = {tp}",
                    "use another --tp",
                )
            set_count(module, key, count // tp)


def sharding_rules(model: PreTrainedModel, plan: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Return a map of each parameter that the plan shards to its (dim, blocks).

    The rules apply to any number of ranks (see blueprint.Tensor), and no group is created. Each
    style runs on each parameter, and its placement is recorded where the style calls
    `distribute_tensor`.
    """
    rules: dict[str, tuple[int, int]] = {}
    styled = dict(plan)
    with placements_noted() as placed:
        for name, module in model.named_modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                style = style_of(f"{name}.{key}", styled)
                if style is None or style not in ALL_PARALLEL_STYLES:
                    continue
                placed.clear()
                ALL_PARALLEL_STYLES[style].shard_param(module, key, None)
                set_parameters(module, {key: parameter})
                if placed and not placed[0].is_replicate():
                    dim = placed[0].dim % parameter.ndim
                    rules[f"{name}.{key}"] = dim, getattr(placed[0], "split_factor", 1)
    return rules


def check_head_cut(name: str, plan: Mapping[str, str]) -> None:
    """Raise ValueError if a rank cannot compute losses from its columns of the head `name`.

    The head's style in the tensor-parallel plan decides this.
    """
    style = style_of(name, plan, is_weight=False)
    if style not in (None, "colwise_gather_output", "colwise_rep"):
        raise ValueError(f"its plan cuts the head {style}")


def local_head_columns(
    name: str, columns: int, plan: Mapping[str, str], tp_mesh: DeviceMesh | None
) -> tuple[int, dist.ProcessGroup] | None:
    """Return (first column, group) for this rank's part of a head's logits, or None for all logits.

    `check_head_cut` must have accepted the plan.
    """
    style = style_of(name, plan, is_weight=False) if tp_mesh else None
    if tp_mesh is None or style is None:
        return None
    # the same split as torch.chunk and DTensor
    return min(
        columns, tp_mesh.get_local_rank() * -(-columns // tp_mesh.size())
    ), tp_mesh.get_group()


def shard_tensor(full: torch.Tensor, spec: ShardSpec, tp_mesh: DeviceMesh) -> torch.Tensor:
    """Return a copy of this rank's part of a full tensor, without communication."""
    return (
        distribute_tensor(full, tp_mesh, list(spec.placements), src_data_rank=None)
        .to_local()
        .clone()
    )


def local_shard_ranges(spec: ShardSpec, tp_mesh: DeviceMesh) -> tuple[int, list[tuple[int, int]]]:
    """Return (dim, [(start, stop), ...]): a sharded dim's index ranges on this rank, in order.

    This needs no communication.
    """
    dim = spec.placements[0].dim % len(spec.shape)
    index = torch.arange(spec.shape[dim]).view(
        [-1 if axis == dim else 1 for axis in range(len(spec.shape))]
    )
    mine = (
        distribute_tensor(index, tp_mesh, list(spec.placements), src_data_rank=None)
        .to_local()
        .flatten()
        .tolist()
    )
    runs: list[tuple[int, int]] = []
    for number in mine:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return dim, runs


def gather_full_tensor(local: torch.Tensor, spec: ShardSpec, tp_mesh: DeviceMesh) -> torch.Tensor:
    """Return the full tensor on every rank in the tensor group (a collective)."""
    return DTensor.from_local(
        local, tp_mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    ).full_tensor()


class _GroupContext(Protocol):
    """The value that the forward pass keeps for the backward pass."""

    group: dist.ProcessGroup

    def mark_dirty(self, *tensors: torch.Tensor) -> None: ...


class _CopyToTensorParallel(torch.autograd.Function):
    """Identity whose gradient is summed over the group."""

    @staticmethod
    def forward(ctx: _GroupContext, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _GroupContext, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _copy_to_tensor_parallel(value: object, group: dist.ProcessGroup) -> object:
    """Return an input whose gradient is summed over the group; other values stay as they are."""
    if not (torch.is_tensor(value) and value.requires_grad):
        return value
    return _CopyToTensorParallel.apply(value, group)


class _ReduceFromTensorParallel(torch.autograd.Function):
    """In-place sum of x over the group. The gradient passes through unchanged."""

    @staticmethod
    def forward(ctx: _GroupContext, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _SharedInput:
    """Input that consecutive projections share.

    Because the input is shared, the gradients of q, k and v, or of gate and up, need only one
    all-reduce.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.latest: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def read(self, x: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self.latest is None or self.latest[0] is not x or self.latest[1] != x._version:
            self.latest = x, x._version, _CopyToTensorParallel.apply(x, self.group)
        return self.latest[2]


def _use_local_shards(module: nn.Module, style: object, shared: _SharedInput) -> None:
    """Make a linear layer of the two usual styles compute with plain shards instead of DTensors.

    The result is the same. DTensors cost CPU time in each operation. With DTensors, every
    column-wise layer would also need a separate all-reduce in the backward pass
    (tools/bench/bench_tensor_parallel.md).
    """
    if type(module) is not nn.Linear:
        return
    presented = module.forward
    layouts = (
        type(style),
        getattr(style, "input_layouts", None),
        getattr(style, "output_layouts", None),
        getattr(style, "use_local_output", None),
    )

    def colwise(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):
            return presented(x)
        return nn.functional.linear(shared.read(x), module.weight, module.bias)

    def rowwise(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):
            return presented(x)
        shared.latest = None
        total = _ReduceFromTensorParallel.apply(
            nn.functional.linear(x, module.weight), shared.group
        )
        return total if module.bias is None else total + module.bias

    if layouts == (styles.ColwiseParallel, Replicate(), Shard(-1), True):
        set_forward(module, colwise)
    elif layouts == (styles.RowwiseParallel, Shard(-1), Replicate(), True):
        set_forward(module, rowwise)


def _present_as_dtensors(
    module: nn.Module, specs: dict[str, ShardSpec], tp_mesh: DeviceMesh
) -> None:
    inner = module.forward

    def forward(*args: object, **kwargs: object) -> Any:
        locals_ = {key: module._parameters[key] for key in specs}
        for key, cut in specs.items():
            tensor = locals_[key]
            assert tensor is not None
            whole = DTensor.from_local(
                tensor, tp_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride
            )
            set_parameters(module, {key: whole})
        try:
            return inner(*args, **kwargs)
        finally:
            set_parameters(module, locals_)

    set_forward(module, forward)


def _sum_incoming_gradient(self: object, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    _sum_gradients(module, tuple(key for key, _ in module.named_parameters(recurse=False)), mesh)
    return module


def _sum_gradients(module: nn.Module, keys: tuple[str, ...], mesh: DeviceMesh) -> None:
    """Sum each gradient of these parameters over the ranks as soon as it is computed.

    Each rank has only the part of the gradient that comes from its own heads or columns.
    """
    inner = module.forward
    hooked: set[int] = set()

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=mesh.get_group())
        return gradient

    def forward(*args: object, **kwargs: object) -> Any:
        for key in keys:
            parameter = module._parameters[key]
            if parameter is not None and parameter.requires_grad and id(parameter) not in hooked:
                parameter.register_hook(summed)
                hooked.add(id(parameter))
        return inner(*args, **kwargs)

    set_forward(module, forward)
