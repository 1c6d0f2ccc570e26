"""Training with torch alone: DistributedDataParallel or FSDP2 (`fully_shard`).

The engine has the same interface as the DeepSpeed engine.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterator
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
from ..compat.torch import (
    gather_in_fp32,
    keep_own_buffers,
    reduce_unused_parameters,
    set_forward,
    set_gradient_sync,
)
from ..model.build import BuiltModel
from ..optim import factory
from ..optim.groups import parameter_groups
from ..optim.one_bit import OneBitAdam
from ..optim.param_spans import ParamSpans
from ..parallel.blueprint import Blueprint, Layout
from ..parallel.groups import ProcessGroups
from ..spec.engine import Engine

NORM_CHUNK_ELEMENTS = 1 << 24  # elements of a gradient that are squared in fp64 at a time


@dataclass(eq=False)
class TorchEngine:
    """A model with a torch optimizer. The fp32 weights are also the master weights.

    `forward_module` computes the forward pass. Under FSDP2 it is `module` itself, under DDP it is
    the DDP wrapper. `autocast` is the mixed precision for DDP, while FSDP2 has its own policy.
    `accumulation` is the initial number of micro-batches per step. `clipping` is the maximum
    gradient norm, or 0 for no limit.

    In fp16, if a gradient overflows, the step is skipped and the loss scale is lowered.
    """

    module: nn.Module
    forward_module: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    group: Any  # data-parallel ranks
    accumulation: int
    clipping: float
    autocast: torch.dtype | None
    scaler: torch.amp.GradScaler  # scales the loss; disabled except in fp16
    # Counts that a DeepSpeed checkpoint contains. `global_steps` is kept up to date.
    counts: dict[str, Any]
    micro_batches: int = 1  # used by pipelines, which this engine does not support
    most_norm: float = math.inf

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
        self.micro_step = 0  # number of micro-batches taken in the current step
        self.grad_norm: torch.Tensor | None = None
        self.before_step_hooks: list[Callable[[], None]] = []
        self.after_step_hooks: list[Callable[[bool], None]] = []

    def __call__(self, *inputs: object, **named: object) -> Any:
        if isinstance(self.forward_module, DistributedDataParallel):
            # DDP's no_sync() sets the same attribute during a forward pass.
            set_gradient_sync(
                self.forward_module,
                self.is_gradient_accumulation_boundary() and not self.compresses,
            )
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            return self.forward_module(*inputs, **named)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def accumulate(self, micro_batches: int) -> None:
        assert self.micro_step == 0, "within a step"
        self.accumulation = micro_batches

    @property
    def compresses(self) -> bool:
        """Return True if the optimizer's next step requires each rank's own gradients.

        Such gradients are neither summed nor clipped.
        """
        return isinstance(self.optimizer, OneBitAdam) and self.optimizer.compresses

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.micro_step + 1 == self.accumulation

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss / self.accumulation).backward()

    def step(self) -> None:
        """Take an optimizer step after the last micro-batch. Before that, only count."""
        self.micro_step += 1
        if self.micro_step < self.accumulation:
            return
        self.micro_step = 0
        for parameter in self.trained.values():
            if parameter.grad is None:  # no rank used it; weight decay still applies, as in ZeRO
                parameter.grad = torch.zeros_like(parameter)
        self._sum_scalars()
        self.scaler.unscale_(self.optimizer)
        for act in reversed(self.before_step_hooks):
            act()
        skipped = not self._update_weights()
        # Under DDP, set the gradients to zero, because they are views of DDP's buckets and must not
        # be replaced.
        self.optimizer.zero_grad(set_to_none=self.forward_module is self.module)
        if self.scaler.is_enabled():
            self.counts["loss_scale"] = self.scaler.state_dict()
        self.counts["skipped_steps"] += skipped
        self.counts["global_steps"] += 1
        resolved = self.counts["ds_config"]
        self.counts["global_samples"] += (
            resolved["train_batch_size"]
            // resolved["gradient_accumulation_steps"]
            * self.accumulation
        )
        for follow in self.after_step_hooks:
            follow(not skipped)

    def _update_weights(self) -> bool:
        """Clip the gradients and call the optimizer. Return False if nothing has changed.

        Nothing changes if the gradient norm is above `most_norm` or not finite. For this check, the
        host waits for the norm before it starts the optimizer.
        """
        compresses = self.compresses
        norm = self._grad_norm()
        if compresses:  # each rank has its own gradients; the sum only shows if all are finite
            dist.all_reduce(norm, group=self.group)
        self.grad_norm = norm
        takes = math.isfinite(value := float(norm)) and (compresses or value <= self.most_norm)

        if takes and self.clipping > 0 and not compresses:
            factor = torch.clamp(self.clipping / (norm + 1e-6), max=1.0)
            for parameter in self.trained.values():
                _local_shard(parameter.grad).mul_(factor)

        # In fp16, the scaler skips an overflow, and then lowers the scale.
        scale = self.scaler.get_scale()
        overflows = self.scaler.is_enabled() and not math.isfinite(value)
        if takes or overflows:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        takes = takes and self.scaler.get_scale() >= scale

        if takes and isinstance(self.optimizer, OneBitAdam) and self.optimizer.norm is not None:
            self.grad_norm = self.optimizer.norm
        return takes

    def _sum_scalars(self) -> None:
        """Average the gradients of 0-dimensional parameters over the ranks.

        FSDP2 does not shard these parameters. If there are any, this is a collective operation.
        """
        if self.forward_module is self.module:
            for scalar in self.scalars:
                dist.all_reduce(scalar.grad, group=self.group)
                scalar.grad /= dist.get_world_size(self.group)

    def _grad_norm(self) -> torch.Tensor:
        """Return the fp64 norm of all gradients, () (a collective if they are sharded)."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in self.trained.values():
            if parameter.dim() > 0:
                for piece in _local_shard(parameter.grad).flatten().split(NORM_CHUNK_ELEMENTS):
                    squares += piece.double().square().sum()
        if self.forward_module is self.module:
            dist.all_reduce(squares, group=self.group)
        for scalar in self.scalars:
            squares += scalar.grad.double().square()
        return squares.sqrt()

    def load_states(
        self, step: Path, blueprint: Blueprint, layout: Layout, has_stepped: bool
    ) -> None:
        self._load_states(step, blueprint, layout, has_stepped)
        if saved := self.counts.get("loss_scale"):
            self.scaler.load_state_dict(saved)

    def get_global_grad_norm(self) -> torch.Tensor:
        assert self.grad_norm is not None, "asked for after a step"
        return self.grad_norm

    def current_loss_scale(self) -> float | None:
        return self.scaler.get_scale() if self.scaler.is_enabled() else None

    def record_counters(self) -> Callable[[], None]:
        assert self.micro_step == 0, "within a step"
        counts, scaling = dict(self.counts), self.scaler.state_dict()

        def restore() -> None:
            self.counts.clear()
            self.counts.update(counts)
            if self.scaler.is_enabled():
                self.scaler.load_state_dict(scaling)

        return restore

    def before_step(self, act: Callable[[], None]) -> None:
        self.before_step_hooks.append(act)

    def after_step(self, act: Callable[[bool], None]) -> None:
        self.after_step_hooks.append(act)

    def train(self) -> None:
        """Switch the model to training mode.

        After a forward without a backward, FSDP2 leaves the root's weights gathered. This method
        shards them again.
        """
        self.module.train()
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def eval(self) -> None:
        self.module.eval()

    def destroy(self) -> None:
        """Do nothing, because this engine has no resources to release."""

    def train_batch(self, batches: Iterator[Any]) -> torch.Tensor:
        raise AssertionError("a pipeline is DeepSpeed's")

    eval_batch = train_batch


def make_torch_engine(
    built: BuiltModel,
    groups: ProcessGroups,
    kind: str,
    precision: str,
    ds_config: dict[str, Any],
    device: torch.device,
) -> Engine:
    """Return the engine of kind `kind`, ddp or fsdp2, for the built model (a collective).

    For fsdp2, `fsdp2_sharder` must already have sharded the model.
    """
    module: Any = built.model
    called, autocast = module, None
    if kind == "ddp":
        autocast = compute_dtype(precision)
        compute_in_fp32(module, built.fp32_parameters, device.type)
        called = _wrap_ddp(module, groups, device)
    else:
        # If a rank does not use a parameter, it contributes a zero gradient.
        if not reduce_unused_parameters(module):
            warnings.warn(
                f"engine = fsdp2: with torch {torch.__version__}, every rank must use every"
                " parameter, or the run hangs. Install the torch of requirements.txt.",
                stacklevel=1,
            )
        if device.type == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo does not support the mean
    counts = {
        "global_steps": 0,
        "skipped_steps": 0,
        "global_samples": 0,
        "lr_scheduler": None,
        "ds_config": ds_config,
    }
    return TorchEngine(
        module=module,
        forward_module=called,
        optimizer=_torch_optimizer(
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


def _torch_optimizer(
    trained: list[dict[str, Any]], ds_config: dict[str, Any], ranks: object, sharded: bool
) -> torch.optim.Optimizer:
    """Return torch's AdamW, or one of our optimizers if the JSON names it.

    `sharded` is True if each data-parallel rank stores a shard of every tensor.
    """
    if (make := factory.optimizer_factory(ds_config)) is None:
        numbers = {
            key: value
            for key, value in ds_config["optimizer"]["params"].items()
            if key != "torch_adam"
        }
        if sharded and any(
            parameter.dim() == 0 for group in trained for parameter in group["params"]
        ):
            # torch 2.13 does not accept a list that mixes full and sharded tensors.
            numbers |= {"foreach": False, "fused": False}
        return torch.optim.AdamW(trained, **numbers)
    made: Any = make(trained)
    if hasattr(made, "borders"):  # this optimizer needs full tensors
        made.borders = ParamSpans(partitions=ranks if sharded else None)
    if hasattr(made, "ranks"):  # this optimizer communicates by itself
        made.ranks = ranks
    return made


def compute_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype for the computation, or None to compute in the weights' dtype, fp32."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[precision]


def compute_in_fp32(module: nn.Module, kept: list[nn.Parameter], device_type: str) -> None:
    """Run the modules whose parameters are all in `kept` outside of autocast.

    Autocast would compute their products in half precision. A module that also has other
    parameters, such as an attention with sinks, stays inside autocast.
    """
    found = {id(parameter) for parameter in kept}
    inner = [id(parameter) for parameter in module.parameters()]
    if inner and found.issuperset(inner):
        set_forward(module, torch.autocast(device_type, enabled=False)(module.forward))
        return
    if found.intersection(inner):
        for child in module.children():
            compute_in_fp32(child, kept, device_type)


def fsdp2_sharder(
    groups: ProcessGroups,
    precision: str,
    device_type: str,
    fp32: Callable[[], Collection[nn.Parameter]] = tuple,
) -> Callable[[nn.Module], Any]:
    """Return a function that shards a module over the data-parallel ranks with FSDP2.

    In half precision the module computes in `precision`, and gradients are summed in fp32. `fp32`
    returns the model's parameters that are gathered in fp32, which may change with each sharding.
    """
    group: Any = groups.dp_group or dist.group.WORLD
    mesh = DeviceMesh.from_group(group, device_type, mesh_dim_names=("dp",))
    dtype = compute_dtype(precision)
    policy = (
        MixedPrecisionPolicy()
        if dtype is None
        else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    )

    def divide(layer: nn.Module) -> None:
        # fully_shard (torch 2.13) rejects 0-dimensional parameters. They stay unsharded, and the
        # engine sums their gradients.
        scalars = {parameter for parameter in layer.parameters() if parameter.dim() == 0}
        own = set(layer.parameters())
        kept = [p for p in fp32() if p in own and p.dim() > 0 and not isinstance(p, DTensor)]
        others = own.difference(scalars, kept)
        if kept and all(isinstance(p, DTensor) for p in others):  # inner modules own the others
            in_fp32 = MixedPrecisionPolicy(cast_forward_inputs=False)
            fully_shard(layer, mesh=mesh, mp_policy=in_fp32, ignored_params=scalars)
            return
        sharded = fully_shard(
            layer, mesh=mesh, mp_policy=policy, ignored_params=scalars.union(kept)
        )
        gather_in_fp32(sharded, kept)

    return divide


def _wrap_ddp(module: nn.Module, groups: ProcessGroups, device: torch.device) -> nn.Module:
    """Wrap a model in DDP with buckets that never change.

    Different buckets would sum in a different order, so a resumed run would differ. Without
    `find_unused_parameters`, DDP (torch 2.13) rebuilds its buckets after the first step. The option
    is also required if no rank uses some parameter.
    """
    made = DistributedDataParallel(
        _WithSpareParameter(module, device),
        device_ids=[device] if device.type == "cuda" else None,
        process_group=groups.dp_group,
        **keep_own_buffers(DistributedDataParallel),
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
    )
    # In a process's first step, each gradient becomes a view of its bucket. torch 2.13 then
    # multiplies it by 1 / ranks, but in later steps it divides (reducer.cpp,
    # mark_variable_ready_dense). On 3 ranks, a resumed run would therefore differ. The hook always
    # divides.
    made.register_comm_hook(groups.dp_group, allreduce_hook)
    # Without this call, torch 2.13 copies the logits, in case a loss changes them in place.
    made._set_ddp_sink_clone(False)
    return made


class _WithSpareParameter(nn.Module):
    """A model with an additional parameter that is never used.

    If every parameter were used, `find_unused_parameters` (torch 2.13) would print a warning.
    """

    def __init__(self, module: nn.Module, device: torch.device):
        super().__init__()
        self.module, self.spare = module, nn.Parameter(torch.zeros(1, device=device))

    def forward(self, *inputs: object, **named: object) -> Any:
        return self.module(*inputs, **named)


def _local_shard(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's buffers that checkpoints contain, by name."""
    saved = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}
