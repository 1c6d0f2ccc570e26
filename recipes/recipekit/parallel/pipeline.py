"""Pipeline parallelism for an unmodified model: a stage is the model without other stages' layers.

The model's own forward still creates masks, rotary embeddings and everything else that differs
between families. On every stage, parameters keep the model's names. `RemovedLayer` modules replace
the removed layers. The removed layer before the stage's first layer returns the previous stage's
output. The removed layer after the stage's last layer leaves the forward with the result.
"""

import contextlib
import itertools
import json
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from ..compat.deepspeed import mark_copy, set_named_parameters, set_tied_weights
from ..compat.torch import remove_parameter, set_forward, stop_tracking
from ..spec.errors import config_error
from ..spec.mesh import Mesh
from ..spec.task_specs import TaskSpec
from .blueprint import Blueprint, on_stage, stage_bounds, stages_of_rank
from .groups import ProcessGroups
from .param_groups import DEFAULT_GROUPS, ParamGroup
from .plans import embedding_and_head, has_tied_head


@dataclass(frozen=True)
class StageSplit:
    """Assignment of modules to pipeline stages.

    Stage s owns the blocks `bounds[s]` to `bounds[s + 1] - 1` of the chain `blocks`.

    `blocks`, `first` and `last` contain names of modules. Only the first stage needs `first`, and
    only the last stage needs `last`. Modules that appear in none of these lists are on every stage.
    `tied` is True if the last stage needs the input embedding as its head.
    """

    blocks: tuple[str, ...]
    first: tuple[str, ...]
    last: tuple[str, ...]
    bounds: tuple[int, ...]
    tied: bool

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1


def pipeline_blocks(model: nn.Module, plan: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of a pipeline's blocks in the order of the forward pass.

    The blocks are the children of each module list that the plan splits.

    Raises `ConfigError` if the model has no plan or its plan does not fit. The error contains the
    lines to write.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    lists = [name for name, place in plan.items() if place == "split"]
    if not lists or set(plan.values()) - {"first", "split", "last"} or set(plan) - set(modules):
        guess = ", ".join(
            f"{name!r}: {place!r}" for name, place in _guess_pp_plan(model, modules).items()
        )
        raise config_error(
            f"pp > 1 with {type(model).__name__}",
            (
                "this model publishes no pipeline plan"
                if not plan
                else (
                    f"its plan {dict(plan)} must name modules of the model, one of them the list to"
                    " split"
                )
            ),
            f"add one to the recipe:\n    pp_plan={{{guess}}}",
        )
    for name in lists:
        if not isinstance(modules[name], nn.ModuleList | nn.Sequential):
            raise config_error(
                f"pp_plan: {name}",
                f"is a {type(modules[name]).__name__}, which has no blocks to split",
                "name a list of layers in pp_plan",
            )
    return tuple(f"{name}.{child}" for name in lists for child, _ in modules[name].named_children())


def _guess_pp_plan(model: Any, modules: dict[str, nn.Module]) -> dict[str, str]:
    """Return the likely plan of a model that publishes no plan.

    The model's largest module list is split. The list's siblings with parameters are placed before
    or after the list.
    """
    lists = [name for name, module in modules.items() if isinstance(module, nn.ModuleList)]
    layers = max(
        lists,
        key=lambda name: sum(parameter.numel() for parameter in modules[name].parameters()),
        default="layers",
    )
    parent = layers.rpartition(".")[0]
    plan, place = {}, "first"
    for child, module in modules[parent].named_children() if lists else []:
        name = f"{parent}.{child}" if parent else child
        if name == layers:
            plan[name], place = "split", "last"
        elif any(True for _ in module.parameters()):
            plan[name] = place
    head = model.get_output_embeddings()
    return plan | {name: "last" for name, module in modules.items() if module is head}


def split_stages(
    model: PreTrainedModel, blueprint: Blueprint, num_stages: int, plan: Mapping[str, str]
) -> StageSplit:
    """Split a model into stages with the bounds from `stage_bounds`.

    Raises `ConfigError` if the model has fewer blocks than stages, if it has no plan, or if the
    stages' optimizer groups differ.
    """
    blocks = pipeline_blocks(model, plan)
    first, last = (
        tuple(name for name, where in plan.items() if where == place) for place in ("first", "last")
    )
    if num_stages > (count := blueprint.num_layers):
        raise config_error(
            f"{num_stages} pipeline stages",
            f"{type(model).__name__} has only {count} layers",
            f"use --pp {count} or less",
        )
    if has_tied_head(model):
        weight = embedding_and_head(model)[1].weight  # type: ignore[union-attr]
        name = next(name for name, parameter in model.named_parameters() if parameter is weight)
        if any(name.startswith(f"{module}.") for module in last):
            rule = (
                f"its head is its embedding and stands before it ({name}), so that the stages would"
                " call one weight by two names"
            )
            raise config_error(f"pp > 1 with {type(model).__name__}", rule, "use --pp 1")
    bounds = stage_bounds(blueprint, num_stages)
    check_stages(blueprint, bounds)
    return StageSplit(blocks, first, last, bounds, has_tied_head(model))


def check_stages(blueprint: Blueprint, bounds: tuple[int, ...]) -> None:
    """Raise `ConfigError` if the stages of a pipeline differ in their optimizer groups.

    The first two groups are on all stages. DeepSpeed 0.19.8 sums the norms over the stages one
    group at a time (stage_1_and_2.py, scaled_global_norm). If a stage lacked one of the groups, it
    would wait for the other stages forever.
    """
    if missing := missing_groups(blueprint, bounds):
        stage, group = missing[0]
        rule = (
            f"leaves stage {stage} without the optimizer group {group.name!r}, and DeepSpeed adds"
            " up norms group by group over the stages"
        )
        raise config_error(
            f"{len(bounds) - 1} pipeline stages",
            rule,
            "use --pp 1, or lr_scale and matrices with names that every stage has, without"
            " layer_decay",
        )


def missing_groups(blueprint: Blueprint, bounds: tuple[int, ...]) -> list[tuple[int, ParamGroup]]:
    """Return (stage, an optimizer group that it lacks and another stage has), in order.

    If there are only the first two groups, none is missing.
    """
    own = [
        {
            tensor.group
            for tensor in blueprint.tensors
            if tensor.group is not None and on_stage(tensor.place, stage, bounds)
        }
        for stage in range(len(bounds) - 1)
    ]
    if len(blueprint.groups) <= len(DEFAULT_GROUPS):
        return []
    every = set[int]().union(*own)
    return [
        (stage, blueprint.groups[number])
        for stage, groups in enumerate(own)
        for number in sorted(every - groups)
    ]


class RemovedLayer(nn.Module):
    """Replacement for a layer that belongs to a different stage."""

    def __init__(self, layer: nn.Module, replacement: Callable[[Any, Any], Any]):
        super().__init__()
        self._replacement = replacement
        # Some models read an attribute of the layer, for example its attention type.
        for name, value in vars(layer).items():
            if isinstance(value, str | int | float | bool) and not name.startswith("_"):
                setattr(self, name, value)
        self.training = layer.training

    def forward(self, *args: object, **kwargs: object) -> Any:
        given = (*args, *kwargs.values())
        return self._replacement(
            next(value for value in given if torch.is_tensor(value)),
            next((value for value in given if isinstance(value, UserDict)), None),
        )


def remove_parameters(
    module: nn.Module,
    dtype: torch.dtype,
    forward: Callable[..., Any],
    shared_module: nn.Module | None = None,
) -> None:
    """Remove a module's parameters, in place, and replace its `forward`.

    The module itself stays, because models read attributes of modules on other stages. For example,
    ViT reads the dtype of an embedding weight, so an empty buffer replaces each parameter. If the
    module contains `shared_module`, that part keeps its parameters, because BERT's head is inside
    its embeddings.
    """
    for inner in module.modules():
        if inner is shared_module:
            continue
        for key in [key for key, parameter in inner._parameters.items() if parameter is not None]:
            remove_parameter(inner, key)
            # a buffer moves to the device together with the other tensors
            inner.register_buffer(key, torch.empty(0, dtype=dtype), persistent=False)
        for key, buffer in inner.named_buffers(recurse=False):
            # checkpoints read this buffer from the stage that owns it
            inner.register_buffer(key, buffer, persistent=False)
        if isinstance(inner, _BatchNorm):
            stop_tracking(inner)
    set_forward(module, forward)


# tensors that layers stored for later layers, by the keys of the model
Stored = Mapping[str | int, tuple[torch.Tensor, ...]]


class _StageExit(Exception):
    """Exception that carries the hidden states and stored tensors out of the model's forward."""


class Stage:
    """The forward pass of one pipeline stage, from the stage's first block to its last block.

        first     inputs -> embedding ---------------> blocks -> `send` -> (hidden states, inputs)
        others    inputs -> `embed` -> `receive` -> blocks -> `send` -> (hidden states, inputs)
        last      inputs -> `embed` -> `receive` -> blocks -> head -> logits

    `embed` replaces the embedding, `receive` replaces each block before the stage, and `send`
    replaces the block after the stage. `send` leaves the model's forward by raising an exception,
    because only the model knows which calls follow in its forward.

    Layers of Gemma 3n and Gemma 4 read keys and values that earlier layers stored in a `UserDict`.
    Its contents are sent together with the hidden states.
    """

    def __init__(
        self, model: Any, first: bool, last: bool, dtype: torch.dtype, task_spec: TaskSpec
    ):
        self.first, self.last = first, last
        self._model = model
        self._full_forward = model.forward
        self._dtype = dtype
        self._task_spec = task_spec
        self._passed_inputs = [
            name for name in task_spec.inputs if name not in task_spec.float_inputs
        ]
        self._received: Any = None  # output of the previous stage's last block
        self._received_stored: Stored = {}
        self._last_output: Any = None  # output of this stage's last block
        # `_pack`'s description of the received tensors, the same for every micro-batch
        self._packing: list[int] | None = None

    def receive(self, hidden: torch.Tensor, stored: "UserDict[Any, Any] | None") -> Any:
        """Return the previous stage's output instead of a removed block's output.

        `stored` holds tensors that layers store for later layers, or is None.
        """
        if stored is not None:
            stored.update(self._received_stored)
        return self._received

    def send(self, hidden: torch.Tensor, stored: Stored | None) -> Any:
        """Leave the model's forward with this stage's output."""
        raise _StageExit(hidden, self._last_output, dict(stored or {}))

    def keep_output(self, module: nn.Module, inputs: object, output: object) -> None:
        """Store the output of the last block (a forward hook)."""
        self._last_output = output

    def embed(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Return zeros with the embedding's true shape, so that the model can create its masks.

        `receive` later replaces the hidden states that the model computes from these zeros.
        """
        received = self._received
        hidden = received[0] if isinstance(received, tuple) else received
        # these zeros use the memory of a single element
        return hidden.new_zeros(()).expand(_embedding_shape(hidden, self._task_spec.reads_tokens))

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        """Run the model's forward on this stage's part.

        The last elements of `inputs` are the tensors from `set_stage_inputs`.
        """
        names: tuple[str, ...] = self._model.stage_kwargs
        count = len(inputs) - len(names)
        handed = dict(zip(names, inputs[count:], strict=True))
        given = self._inputs(inputs[:count], handed)
        try:
            output = self._full_forward(**given, **self._task_spec.constants)
        except _StageExit as left:
            return *_pack(*left.args), *(given[name] for name in self._passed_inputs)
        return output.logits

    def _inputs(
        self, inputs: tuple[torch.Tensor, ...], stage_kwargs: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the arguments of the model's forward, and store the previous stage's output."""
        facts = self._task_spec
        if self.first:
            given = dict(zip(facts.inputs, inputs, strict=True)) | stage_kwargs
            return given | {name: given[name].to(self._dtype) for name in facts.float_inputs}

        states = list(inputs[: len(inputs) - len(self._passed_inputs)])
        given = dict(zip(self._passed_inputs, inputs[len(states) :], strict=True)) | stage_kwargs
        if len(states) > 1 and self._packing is None:
            self._packing = states[-1].tolist()
        self._received, self._received_stored = (
            (states[0], {}) if self._packing is None else _unpack(states, self._packing)
        )
        # The forward requires a float input, but the input's values have no effect here.
        return given | {
            name: states[0].new_zeros(len(states[0]), 1, 1, 1) for name in facts.float_inputs
        }


def make_stage(
    model: Any, split: StageSplit, stage: int, dtype: torch.dtype, task_spec: TaskSpec
) -> list[str]:
    """Convert `model` to one stage, in place, and return the names of removed non-block modules.

    The first stage's forward accepts the task's inputs. Other stages accept and return
    (hidden_states, ..., integer inputs), and the last stage returns logits. ids are int64 (B, T),
    and hidden states are (B, T, D) in `dtype`. If a block returns more than hidden states, its
    other tensors are also sent, with a flag for each position that is None. Float inputs stay on
    the first stage, because DeepSpeed 0.19.8 requires a gradient for every float that it sends. The
    tensors from `set_stage_inputs` come last.
    """
    first, last = stage == 0, stage == split.num_stages - 1
    own = Stage(model, first, last, dtype, task_spec)
    modules = dict(model.named_modules())

    start, stop = split.bounds[stage], split.bounds[stage + 1]
    for number, name in enumerate(split.blocks):
        if number < start:
            model.set_submodule(name, RemovedLayer(modules[name], own.receive))
        elif number >= stop:
            model.set_submodule(name, RemovedLayer(modules[name], own.send))
        elif number == stop - 1:
            modules[name].register_forward_hook(own.keep_output)

    # A tied head shares the embedding's weight, so the last stage keeps this weight.
    kept = embedding_and_head(model)[0] if last and split.tied else None
    absent = [] if first else [name for name in split.first if modules[name] is not kept]
    for name in absent:
        remove_parameters(modules[name], dtype, own.embed, kept)
    for name in () if last else split.last:
        model.set_submodule(name, nn.Identity())

    set_forward(model, own.forward)
    model.last_stage, model.stage_kwargs = last, ()
    return absent if last else [*absent, *split.last]


def _embedding_shape(hidden: torch.Tensor, of_tokens: bool) -> tuple[int, ...]:
    """Return the shape of the embedding's output, given a layer's output `hidden`.

    A token model may have expanded each token into several streams.
    """
    return (*hidden.shape[:2], hidden.shape[-1]) if of_tokens else tuple(hidden.shape)


def _pack(hidden: torch.Tensor, output: object, stored: Stored) -> tuple[torch.Tensor, ...]:
    """Return the tensors to send to the next stage.

    The result is (hidden states,) for a layer that returns one tensor. For a layer that returns a
    tuple, or if layers stored tensors, it is (hidden states, the other tensors, stored tensors,
    packing). `packing` (int64) starts with the tuple's length. Then it holds 1 for each position of
    a tensor and 0 for None. The bytes of a JSON list of the stored tensors' keys come last.
    """
    hidden = hidden.contiguous()  # torch 2.13 sends only contiguous tensors (SigLIP's are not)
    values = output if isinstance(output, tuple) else ()
    if not values and not stored:
        return (hidden,)
    flags = [int(torch.is_tensor(value)) for value in values]
    keys = json.dumps([(key, len(own)) for key, own in stored.items()]).encode()
    others = [value for value in values[1:] if torch.is_tensor(value)]
    others += [value for own in stored.values() for value in own]
    packing = torch.tensor([len(flags), *flags, *keys], device=hidden.device)
    return hidden, *(value.contiguous() for value in others), packing


def _unpack(states: list[torch.Tensor], packing: list[int]) -> tuple[Any, Stored]:
    """Return a block's output and the stored tensors from the tensors of `_pack`."""
    length, keys = packing[0], json.loads(bytes(packing[packing[0] + 1 :]))
    count = sum(number for _, number in keys)
    last = len(states) - 1 - count
    held = iter(states[last : last + count])
    stored = {key: tuple(itertools.islice(held, number)) for key, number in keys}
    # DeepSpeed sends a gradient back for each tensor, also for a tensor that no layer reads.
    hidden = _ReadAll.apply(states[0], *states[last : last + count]) if count else states[0]
    values = iter([hidden, *states[1:last]])
    output = tuple(next(values) if present else None for present in packing[1 : length + 1])
    return output if length else hidden, stored


class _ReadContext(Protocol):
    """The value that the forward pass keeps for the backward pass."""

    others: list[torch.Tensor]


class _ReadAll(torch.autograd.Function):
    """Identity of the first tensor, with a gradient of zeros for the other tensors."""

    @staticmethod
    def forward(ctx: "_ReadContext", hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = [torch.empty_like(other, device="meta") for other in others]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: "_ReadContext", *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        device = gradients[0].device
        return gradients[0], *(torch.zeros_like(other, device=device) for other in ctx.others)


def build_pipeline_module(
    models: Sequence[nn.Module],
    groups: ProcessGroups,
    loss_fn: Callable[..., torch.Tensor],
    schedule: str,
    num_stages: int,
) -> Any:
    """Build DeepSpeed's module for this rank's stages (a collective).

    Its parameters keep the model's own names.
    """
    mesh = groups.mesh
    stages = stages_of_rank(groups.coords["pp"], mesh.pp, schedule)
    layers: list[Any] = [nn.Identity() for _ in range(num_stages)]
    for stage, model in zip(stages, models, strict=True):
        layers[stage] = model
    kind = DualPipeVModule if schedule == "dualpipev" else PipelineModule
    with contextlib.redirect_stdout(None):  # DeepSpeed prints every layer's class
        net: Any = kind(
            layers=layers,
            topology=PipeModelDataParallelTopology(num_pp=mesh.pp, num_mp=mesh.tp, num_dp=mesh.dp),
            loss_fn=loss_fn,
            partition_method="uniform",
        )
    set_named_parameters(net, partial(_named_parameters, models))
    net.stages, net.pending_kwargs = list(models), [deque() for _ in models]
    net.register_forward_pre_hook(_append_stage_kwargs)
    return net


def partition_settings(model: PreTrainedModel, mesh: Mesh) -> dict[str, Any]:
    """Return additions to DeepSpeed's JSON for stages that send stored tensors.

    Under tp, DeepSpeed 0.19.8 partitions the hidden states between stages, and then requires that
    all other tensors have no gradient (pipe/engine.py, _exec_forward_pass).
    """
    stored = getattr(model.config.get_text_config(), "num_kv_shared_layers", 0)
    if not stored or mesh.pp == 1 or mesh.tp == 1:
        return {}
    return {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}


def set_stage_inputs(
    net: Any, stage_kwargs: Callable[[bool], list[dict[str, torch.Tensor]]], device: torch.device
) -> None:
    """Store the inputs of this rank's stages that are not sent between stages.

    `stage_kwargs(last)` returns further arguments of the model's forward, for the last stage or for
    any other stage. The result is one dict per micro-batch of the next schedule, and all dicts must
    have the same names. DeepSpeed 0.19.8 runs every stage's forwards in the order of the
    micro-batches (TrainSchedule, InferenceSchedule, and each phase of DualPipeVSchedule). Therefore
    each forward can consume the next dict.
    """
    for model, waiting in zip(net.stages, net.pending_kwargs, strict=True):
        assert not waiting, "a pipeline stage did not consume its previous inputs"
        batches = stage_kwargs(model.last_stage)
        model.stage_kwargs = tuple(batches[0])
        waiting.extend(
            tuple(tensor.to(device, non_blocking=True) for tensor in batch.values())
            for batch in batches
        )


def _append_stage_kwargs(net: Any, args: tuple[Any]) -> tuple[tuple[torch.Tensor, ...]]:
    """Append the next micro-batch's stored tensors to the inputs of a stage.

    Because they are arguments, these tensors are also available, unchanged, when the stage is
    recomputed.
    """
    (inputs,) = args
    # DeepSpeed 0.19.8 unpacks one-element tuples under tensor parallelism.
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    return ((*inputs, *net.pending_kwargs[getattr(net, "active_phase", 0)].popleft()),)


def _named_parameters(
    models: Sequence[nn.Module],
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, nn.Parameter]]:
    seen: set[int] = set()
    for model in models:
        for name, parameter in model.named_parameters(prefix, recurse, remove_duplicate):
            if not remove_duplicate or id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter


def tie_shared_params(net: nn.Module, groups: ProcessGroups) -> None:
    """Sum the gradients of parameters that several pipeline ranks share (a collective).

    This sum keeps the copies equal. These parameters are tied embeddings and all other parameters
    that the split leaves on every stage. DeepSpeed's gradient norm counts only the copy on the
    lowest rank.
    """
    mine = {
        name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad
    }
    everyone: list[Any] = [None] * groups.mesh.pp
    dist.all_gather_object(everyone, list(mine), group=groups.pp_group)
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(everyone):
        for name in names:
            holders.setdefault(name, []).append(rank)
    shared = {name: tuple(ranks) for name, ranks in holders.items() if len(ranks) > 1}
    made = {}
    for ranks in sorted(set(shared.values())):
        for fiber in groups.mesh.groups("pp"):  # every rank makes every group, in the same order
            members = [fiber[rank] for rank in ranks]
            group = dist.new_group(members, groups.timeout, group_desc="tied weights")
            if groups.rank in fiber:
                made[ranks] = group
    held = [(mine[name], made[ranks]) for name, ranks in sorted(shared.items()) if name in mine]
    for name, ranks in shared.items():
        if name in mine and groups.coords["pp"] != ranks[0]:
            mark_copy(mine[name])

    def weights_and_groups() -> list[tuple[nn.Parameter, Any]]:
        for parameter, _ in held:
            if parameter.grad is None and not hasattr(parameter, "_hp_grad"):
                # unused on this stage, but other ranks wait for it
                parameter.grad = torch.zeros_like(parameter)
        return held

    set_tied_weights(net, weights_and_groups)
