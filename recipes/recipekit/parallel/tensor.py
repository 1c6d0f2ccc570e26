"""Tensor parallelism by the model's own published plan, with parameters that are plain local
shards.

DeepSpeed and ZeRO see ordinary tensors; a module meets its shards as DTensors only inside its
forward, where transformers' plan styles need them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel
from transformers.distributed import tensor_parallel as styles

from ..spec.refusal import refuse
from ..spec.task_specs import Plans


@dataclass(frozen=True)
class Cut:
    """How one parameter lies on the tensor group: DTensor placements, whole shape and stride."""

    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def sharded(self) -> bool:
        return not self.placements[0].is_replicate()


class PackedColwise(styles.PackedColwiseParallel):
    """Cuts each block of a linear layer that computes several at a time, such as queries, keys and
    values; of transformers 5.22.2's own style the bias is cut as one.
    """

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        parameter = module._parameters.get(param)
        if parameter is not None:
            placement = _StridedShard(dim=0, split_factor=self.split_factor)
            whole = known_styles.distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            module._parameters[param] = nn.Parameter(whole, requires_grad=parameter.requires_grad)


known_styles: Any = styles
for blocks in (2, 3):
    known_styles.ALL_PARALLEL_STYLES.register(
        f"packed_colwise_{blocks}", PackedColwise(split_factor=blocks)
    )


def check_plan(model: PreTrainedModel, plan: Mapping[str, str]) -> None:
    """Raises `Refusal` for a model without a tensor-parallel plan, and for a plan with a style that
    transformers does not have.
    """
    known: Any = styles
    if not plan:
        raise refuse(
            f"tp > 1 with {type(model).__name__}",
            "this model publishes no base_model_tp_plan",
            "use --tp 1",
        )
    if odd := sorted(set(plan.values()) - set(known.ALL_PARALLEL_STYLES.keys())):
        rule = (
            f"transformers {transformers.__version__} has no tensor-parallel style {', '.join(odd)}"
        )
        raise refuse("tp_plan", rule, f"use {', '.join(sorted(known.ALL_PARALLEL_STYLES.keys()))}")


def apply(
    model: PreTrainedModel, tp_mesh: DeviceMesh, plans: Plans, summed: frozenset[str] = frozenset()
) -> dict[str, Cut]:
    """Cuts a model whose parameters are on the meta device by `plans`, in place, and returns the
    cut of every parameter it cut.

    Afterwards each cut parameter is a plain meta parameter of this rank's local shape. The
    gradients of the whole parameters that `summed` names (`partial.partial_gradients`) are summed
    over the ranks.
    """
    plan = dict(plans.tp)
    original = styles.ReplicatedWithGradAllReduce.install_forward
    styles.ReplicatedWithGradAllReduce.install_forward = _sum_incoming_gradient
    try:
        styles.apply_tensor_parallelism(model, tp_mesh, plan)
    finally:
        styles.ReplicatedWithGradAllReduce.install_forward = original
    known: Any = styles
    shared = _Shared(tp_mesh.get_group())
    cuts: dict[str, Cut] = {}
    for name, module in model.named_modules():
        own = {}
        for key, parameter in list(module._parameters.items()):
            if not isinstance(parameter, DTensor):
                if (
                    parameter is not None
                    and styles.replace_layer_number_by_wildcard(f"{name}.{key}") in summed
                ):
                    _sum_gradients(module, (key,), tp_mesh)
                continue
            cut = Cut(tuple(parameter.placements), parameter.shape, parameter.stride())
            local = nn.Parameter(
                parameter.to_local().detach(), requires_grad=parameter.requires_grad
            )
            # The clipping norm sums over the tensor group what carries this mark, and counts once
            # what does not.
            local.model_parallel = local.tensor_model_parallel = cut.sharded  # pyright: ignore[reportAttributeAccessIssue]
            module._parameters[key] = local
            own[key] = cuts[f"{name}.{key}"] = cut
        # a module without a style of its own, such as an attention with a sink for each head, uses
        # its shard beside local activations
        style = styles._get_parameter_plan(name, plan, is_weight=False) if own else None
        if style is not None:
            _present_as_dtensors(module, own, tp_mesh)
            _use_shards(module, known.ALL_PARALLEL_STYLES[style], shared)
    _divide_counts(model, plans.tp_local, tp_mesh.size())
    return cuts


def _divide_counts(model: nn.Module, tp_local: Mapping[str, Sequence[str]], tp: int) -> None:
    """Divides the attributes that count what is cut, such as the heads that T5's attention makes
    zeros for.

    Raises `Refusal` where tp does not divide one.
    """
    for name, module in model.named_modules():
        for key in tp_local.get(type(module).__name__, ()):
            if not isinstance(count := getattr(module, key, None), int) or count % tp:
                raise refuse(
                    f"tp_local: {type(module).__name__}.{key}",
                    f"is {count!r} in {name}, which is not divisible by tp = {tp}",
                    "use another --tp",
                )
            setattr(module, key, count // tp)


def cut_rules(model: PreTrainedModel, plan: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Parameter name -> (dim, blocks) of every parameter that the plan cuts, for any number of
    ranks (see blueprint.Tensor); no group is made.

    Each style is asked what it does to a parameter, by taking note of the placement that it gives
    to `distribute_tensor`.
    """
    rules: dict[str, tuple[int, int]] = {}
    styled = dict(plan)
    placed: list[Any] = []
    known: Any = styles
    distribute, known.distribute_tensor = (
        known.distribute_tensor,
        lambda tensor, mesh, placements, **_: (placed.append(placements[0]), tensor)[1],
    )
    try:
        for name, module in model.named_modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                style = styles._get_parameter_plan(f"{name}.{key}", styled)
                if style is None or style not in known.ALL_PARALLEL_STYLES:
                    continue
                placed.clear()
                known.ALL_PARALLEL_STYLES[style].shard_param(module, key, None)
                module._parameters[key] = parameter
                if placed and not placed[0].is_replicate():
                    dim = placed[0].dim % parameter.ndim
                    rules[f"{name}.{key}"] = dim, getattr(placed[0], "split_factor", 1)
    finally:
        known.distribute_tensor = distribute
    return rules


def columns_of(
    name: str, columns: int, plan: Mapping[str, str], tp_mesh: DeviceMesh | None
) -> tuple[int, dist.ProcessGroup] | None:
    """Returns (first column, group) of what this rank computes of a head's logits; None: all of
    them.

    Raises ValueError for a style that cuts them otherwise.
    """
    style = styles._get_parameter_plan(name, dict(plan), is_weight=False) if tp_mesh else None
    if tp_mesh is None or style is None:
        return None
    if style not in ("colwise_gather_output", "colwise_rep"):
        raise ValueError(f"its plan cuts the head {style}")
    # as torch.chunk, and so DTensor, cuts
    return min(
        columns, tp_mesh.get_local_rank() * -(-columns // tp_mesh.size())
    ), tp_mesh.get_group()


def shard(whole: torch.Tensor, cut: Cut, tp_mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a whole tensor, a copy; no communication."""
    return (
        distribute_tensor(whole, tp_mesh, list(cut.placements), src_data_rank=None)
        .to_local()
        .clone()
    )


def local_runs(cut: Cut, tp_mesh: DeviceMesh) -> tuple[int, list[tuple[int, int]]]:
    """(dim, [(start, stop), ...]): which indices of a sharded tensor's dim this rank keeps, in
    order; no communication.
    """
    dim = cut.placements[0].dim % len(cut.shape)
    index = torch.arange(cut.shape[dim]).view(
        [-1 if axis == dim else 1 for axis in range(len(cut.shape))]
    )
    mine = (
        distribute_tensor(index, tp_mesh, list(cut.placements), src_data_rank=None)
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


def join(local: torch.Tensor, cut: Cut, tp_mesh: DeviceMesh) -> torch.Tensor:
    """The whole tensor on every rank of the tensor group (a collective)."""
    return DTensor.from_local(
        local, tp_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride
    ).full_tensor()


class _SumOfGradients(torch.autograd.Function):
    """x itself; its gradient is the sum over the group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """The sum of x over the group, in its place; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Shared:
    """What the projections that follow each other read, so that the gradients of q, k and v, or of
    gate and up, are summed in one all-reduce.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.latest: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def read(self, x: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self.latest is None or self.latest[0] is not x or self.latest[1] != x._version:
            self.latest = x, x._version, _SumOfGradients.apply(x, self.group)
        return self.latest[2]


def _use_shards(module: nn.Module, style: Any, shared: _Shared) -> None:
    """Lets a linear layer of one of the two usual styles work on its plain shards, without
    DTensors.

    What is computed is the same. A DTensor costs the CPU time at each operation, and every
    column-wise layer an all-reduce of its own in the backward pass
    (tools/bench/bench_tensor_parallel.md).
    """
    if type(module) is not nn.Linear:
        return
    presented: Any = module.forward
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
        total = _Sum.apply(nn.functional.linear(x, module.weight), shared.group)
        return total if module.bias is None else total + module.bias

    if layouts == (styles.ColwiseParallel, Replicate(), Shard(-1), True):
        module.forward = colwise  # type: ignore[method-assign]
    elif layouts == (styles.RowwiseParallel, Shard(-1), Replicate(), True):
        module.forward = rowwise  # type: ignore[method-assign]


def _present_as_dtensors(module: nn.Module, own: dict[str, Cut], tp_mesh: DeviceMesh) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        locals_ = {key: module._parameters[key] for key in own}
        for key, cut in own.items():
            tensor = locals_[key]
            assert tensor is not None
            module._parameters[key] = DTensor.from_local(  # type: ignore
                tensor, tp_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride
            )
        try:
            return inner(*args, **kwargs)
        finally:
            module._parameters.update(locals_)

    module.forward = forward  # type: ignore[method-assign]


def _sum_incoming_gradient(self: Any, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    # transformers 5.22.2 all-reduces the accumulated .grad after every backward, which counts
    # earlier micro-batches again and runs after ZeRO's own hooks; the incoming gradient is the one
    # to sum.
    _sum_gradients(module, tuple(key for key, _ in module.named_parameters(recurse=False)), mesh)
    return module


def _sum_gradients(module: nn.Module, keys: tuple[str, ...], mesh: DeviceMesh) -> None:
    """Sums each gradient of these parameters over the ranks as it comes: every rank has the part of
    its own heads or columns.
    """
    inner = module.forward
    hooked: set[int] = set()

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=mesh.get_group())
        return gradient

    def forward(*args: Any, **kwargs: Any) -> Any:
        for key in keys:
            parameter = module._parameters[key]
            if parameter is not None and parameter.requires_grad and id(parameter) not in hooked:
                parameter.register_hook(summed)
                hooked.add(id(parameter))
        return inner(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]
