"""Trains with torch alone: its DistributedDataParallel, or its FSDP2 (`fully_shard`), behind the
same seam as DeepSpeed's engine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..checkpoints.torch_io import TorchStates
from ..model.build import Built
from ..optim import ours
from ..optim.borders import Borders
from ..optim.groups import parameter_groups
from ..optim.one_bit import OneBitAdam
from ..parallel.groups import Groups
from ..spec.engine import Engine

PIECE = 1 << 24  # elements of a gradient that are squared in fp64 at a time


@dataclass(eq=False)
class TorchEngine:
    """Holds a model with torch's optimizer, whose fp32 weights are their own masters.

    `called` is what computes: `module` itself under FSDP2, or DDP's wrapper of it. `autocast` is
    DDP's mixed precision; FSDP2 has its own policy. The number of micro-batches of a step is
    `accumulation`, at first, `clipping` the largest norm (0: any). A step whose gradient overflows
    in fp16 is skipped, and the next loss is scaled by less.
    """

    module: nn.Module
    called: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    group: Any  # of the data-parallel ranks
    accumulation: int
    clipping: float
    autocast: torch.dtype | None
    scaler: torch.amp.GradScaler  # of the loss; switched off but in fp16
    # what a checkpoint of DeepSpeed counts; `global_steps` is kept up to date
    counts: dict[str, Any]
    micro_batches: int = 1  # of a pipeline, which there is none of

    def __post_init__(self) -> None:
        self.trained = {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        }
        self.scalars: list[Any] = [
            parameter for parameter in self.trained.values() if parameter.dim() == 0
        ]
        states = TorchStates(
            dict(self.module.named_parameters()) | _persistent_buffers(self.module),
            self.optimizer,
            self.counts,
        )
        self.save_states, self._load_states = states.save, states.load
        self.taken = 0  # micro-batches of the step that runs
        self.grad_norm: torch.Tensor | None = None
        self.watchers: list[Callable[[], None]] = []
        self.followers: list[Callable[[bool], None]] = []

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if isinstance(self.called, DistributedDataParallel):
            # as its no_sync() does around a forward
            self.called.require_backward_grad_sync = (
                self.is_gradient_accumulation_boundary() and not self.compresses
            )
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            return self.called(*inputs, **named)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def accumulate(self, micro_batches: int) -> None:
        assert self.taken == 0, "within a step"
        self.accumulation = micro_batches

    @property
    def compresses(self) -> bool:
        """Says whether the optimizer takes the gradients of the next step as each rank has them,
        not summed and not clipped.
        """
        return isinstance(self.optimizer, OneBitAdam) and self.optimizer.compresses

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.taken + 1 == self.accumulation

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss / self.accumulation).backward()

    def step(self) -> None:
        """Takes the optimizer's step after the last micro-batch; before that it only counts."""
        self.taken += 1
        if self.taken < self.accumulation:
            return
        self.taken = 0
        for parameter in self.trained.values():
            if parameter.grad is None:  # no rank used it; as under ZeRO it decays nevertheless
                parameter.grad = torch.zeros_like(parameter)
        self._sum_scalars()
        self.scaler.unscale_(self.optimizer)
        for act in reversed(self.watchers):
            act()
        self.grad_norm = norm = None if self.compresses else self._grad_norm()
        if norm is not None and self.clipping > 0:
            factor = torch.clamp(self.clipping / (norm + 1e-6), max=1.0)
            for parameter in self.trained.values():
                _local(parameter.grad).mul_(factor)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        if isinstance(self.optimizer, OneBitAdam) and self.optimizer.norm is not None:
            self.grad_norm = self.optimizer.norm
        self.scaler.update()
        # zeros, where DDP sums: its gradients are views of its buckets, and stay there
        self.optimizer.zero_grad(set_to_none=self.called is self.module)
        skipped = self.scaler.get_scale() < scale
        if self.scaler.is_enabled():
            self.counts |= {
                "loss_scale": self.scaler.state_dict(),
                "skipped_steps": self.counts["skipped_steps"] + skipped,
            }
        self.counts["global_steps"] += 1
        resolved = self.counts["ds_config"]
        self.counts["global_samples"] += (
            resolved["train_batch_size"]
            // resolved["gradient_accumulation_steps"]
            * self.accumulation
        )
        for follow in self.followers:
            follow(not skipped)

    def _sum_scalars(self) -> None:
        """Average the gradients of parameters without dimension, which FSDP2 does not shard, over
        the ranks (a collective if there are any).
        """
        if self.called is self.module:
            for scalar in self.scalars:
                dist.all_reduce(scalar.grad, group=self.group)
                scalar.grad /= dist.get_world_size(self.group)

    def _grad_norm(self) -> torch.Tensor:
        """Computes the norm of all gradients in fp64, () (a collective where they are divided)."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in self.trained.values():
            if parameter.dim() > 0:
                for piece in _local(parameter.grad).flatten().split(PIECE):
                    squares += piece.double().square().sum()
        if self.called is self.module:
            dist.all_reduce(squares, group=self.group)
        for scalar in self.scalars:
            squares += scalar.grad.double().square()
        return squares.sqrt()

    def load_states(self, step: Path, blueprint: Any, layout: Any, begun: bool) -> None:
        self._load_states(step, blueprint, layout, begun)
        if saved := self.counts.get("loss_scale"):
            self.scaler.load_state_dict(saved)

    def get_global_grad_norm(self) -> torch.Tensor:
        assert self.grad_norm is not None, "asked for after a step"
        return self.grad_norm

    def before_step(self, act: Callable[[], None]) -> None:
        self.watchers.append(act)

    def after_step(self, act: Callable[[bool], None]) -> None:
        self.followers.append(act)

    def train(self) -> None:
        """Makes the model train.

        FSDP2 leaves the root's weights gathered after a forward without a backward: they are
        divided again.
        """
        self.module.train()
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def eval(self) -> None:
        self.module.eval()

    def destroy(self) -> None:
        """Has nothing to give back."""

    def train_batch(self, batches: Iterator[Any]) -> torch.Tensor:
        raise AssertionError("a pipeline is DeepSpeed's")

    eval_batch = train_batch


def make(
    built: Built,
    groups: Groups,
    kind: str,
    precision: str,
    ds_config: dict[str, Any],
    device: torch.device,
) -> Engine:
    """Makes the engine of a kind, ddp or fsdp2, around the built model, which `divider` has divided
    for fsdp2 (a collective).
    """
    module: Any = built.model
    called, autocast = module, None
    if kind == "ddp":
        called, autocast = _ddp(module, groups, device), half(precision)
    else:
        # a parameter that a rank does not use has a gradient of zeros
        module.set_reduce_scatter_unused_params(True)
        if device.type == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    counts = {
        "global_steps": 0,
        "skipped_steps": 0,
        "global_samples": 0,
        "lr_scheduler": None,
        "ds_config": ds_config,
    }
    return TorchEngine(
        module=module,
        called=called,
        optimizer=_optimizer(
            parameter_groups(module, built.blueprint.trained),
            ds_config,
            groups.dp_group,
            kind == "fsdp2",
        ),
        device=device,
        group=groups.dp_group,
        accumulation=ds_config["gradient_accumulation_steps"],
        clipping=ds_config["gradient_clipping"],
        autocast=autocast,
        scaler=torch.amp.GradScaler(device.type, enabled=precision == "fp16"),
        counts=counts,
    )


def _optimizer(
    trained: list[dict[str, Any]], ds_config: dict[str, Any], ranks: Any, divided: bool
) -> torch.optim.Optimizer:
    """Makes torch's AdamW, or the optimizer of ours that a JSON names; `divided`: each of the
    data-parallel ranks has a part of every tensor.
    """
    if (make := ours.maker(ds_config)) is None:
        numbers = {
            key: value
            for key, value in ds_config["optimizer"]["params"].items()
            if key != "torch_adam"
        }
        if divided and any(
            parameter.dim() == 0 for group in trained for parameter in group["params"]
        ):
            # torch 2.13 takes no list of whole and sharded tensors
            numbers |= {"foreach": False, "fused": False}
        return torch.optim.AdamW(trained, **numbers)
    made: Any = make(trained)
    if hasattr(made, "borders"):  # it needs whole tensors
        made.borders = Borders(partitions=ranks if divided else None)
    if hasattr(made, "ranks"):  # it sends to them itself
        made.ranks = ranks
    return made


def half(precision: str) -> torch.dtype | None:
    """Returns the dtype that a precision computes in; None: that of the weights, fp32."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[precision]


def divider(groups: Groups, precision: str, device_type: str) -> Callable[[nn.Module], Any]:
    """Returns what divides a module over the data-parallel ranks as FSDP2 does: computed in half
    precision, summed in fp32.
    """
    group: Any = groups.dp_group or dist.group.WORLD
    mesh = DeviceMesh.from_group(group, device_type, mesh_dim_names=("dp",))
    dtype = half(precision)
    policy = (
        MixedPrecisionPolicy()
        if dtype is None
        else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    )

    def divide(layer: nn.Module) -> None:
        # fully_shard (torch 2.13) refuses parameters without dimension: they stay whole, and the
        # engine sums their gradients
        scalars = {parameter for parameter in layer.parameters() if parameter.dim() == 0}
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=scalars)

    return divide


def _ddp(module: nn.Module, groups: Groups, device: torch.device) -> nn.Module:
    """Wraps a model in DDP. Its buckets must stay as they are made: other buckets sum in another
    order, and a resume would differ.

    That is so with `find_unused_parameters` only, which a parameter that no rank uses needs, too:
    without it DDP (torch 2.13) sorts its buckets anew after the first step.
    """
    made = DistributedDataParallel(
        _Spare(module, device),
        device_ids=[device] if device.type == "cuda" else None,
        process_group=groups.dp_group,
        forward_sync_buffers=False,  # a task owns its buffers, as under DeepSpeed
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
    )
    # torch 2.13 multiplies a gradient by 1 / ranks while it becomes a view of its bucket, in the
    # first step of a process, and divides it later (reducer.cpp, mark_variable_ready_dense): on 3
    # ranks a resumed run would differ. The hook always divides.
    made.register_comm_hook(groups.dp_group, allreduce_hook)
    # else torch 2.13 copies the logits, for losses that change them in place
    made._set_ddp_sink_clone(False)
    return made


class _Spare(nn.Module):
    """Holds a model and a number that nothing reads: where every parameter is used,
    `find_unused_parameters` (torch 2.13) prints a warning.
    """

    def __init__(self, module: nn.Module, device: torch.device):
        super().__init__()
        self.module, self.spare = module, nn.Parameter(torch.zeros(1, device=device))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)


def _local(tensor: Any) -> torch.Tensor:
    """Returns what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Finds the buffers that checkpoints keep, by name."""
    saved = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}
