"""Pipeline parallelism on an unmodified model: a stage is the model with the layers it does not own
taken out.

The model's own forward still makes masks, rotary embeddings and everything else that differs
between families, and the parameter names of every stage are the model's. `Away` modules stand where
layers were taken out: the one before the stage's first layer hands in what the stage before sent,
the one after its last layer leaves the forward with the result.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from ..spec.refusal import refuse
from ..spec.task_specs import Facts
from .blueprint import Blueprint, on_stage, stage_bounds, stages_of
from .groups import Groups
from .param_groups import FIRST
from .plans import ends_of, tied


@dataclass(frozen=True)
class Split:
    """Which stage holds what.

    Stage s owns the blocks `bounds[s]` to `bounds[s + 1] - 1` of the chain `blocks`.

    `blocks`, `first` and `last` are names of modules, the latter of those that only the first and
    the last stage need; whatever is named nowhere is on every stage. `tied`: the last stage needs
    the input embedding as its head.
    """

    blocks: tuple[str, ...]
    first: tuple[str, ...]
    last: tuple[str, ...]
    bounds: tuple[int, ...]
    tied: bool

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1


def chain(model: nn.Module, plan: Mapping[str, str]) -> tuple[str, ...]:
    """Names the blocks of a pipeline in the order of the forward pass: the children of each module
    list that a plan splits.

    Raises `Refusal`, with the lines to write, for a model without a plan, and for a plan that does
    not fit the model.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    lists = [name for name, place in plan.items() if place == "split"]
    if not lists or set(plan.values()) - {"first", "split", "last"} or set(plan) - set(modules):
        guess = ", ".join(f"{name!r}: {place!r}" for name, place in _guess(model, modules).items())
        raise refuse(
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
            raise refuse(
                f"pp_plan: {name}",
                f"is a {type(modules[name]).__name__}, which has no blocks to split",
                "name a list of layers in pp_plan",
            )
    return tuple(f"{name}.{child}" for name in lists for child, _ in modules[name].named_children())


def _guess(model: Any, modules: dict[str, nn.Module]) -> dict[str, str]:
    """The likely plan of a model that publishes none: its largest module list is split, its
    siblings with parameters lie around it.
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


def split(
    model: PreTrainedModel, blueprint: Blueprint, num_stages: int, plan: Mapping[str, str]
) -> Split:
    """The split into the stages of `stage_bounds`.

    Raises `Refusal` if the model has fewer blocks, or no plan, or if the stages' optimizer groups
    differ.
    """
    blocks = chain(model, plan)
    first, last = (
        tuple(name for name, where in plan.items() if where == place) for place in ("first", "last")
    )
    if num_stages > (count := blueprint.num_layers):
        raise refuse(
            f"{num_stages} pipeline stages",
            f"{type(model).__name__} has only {count} layers",
            f"use --pp {count} or less",
        )
    if tied(model):
        weight = ends_of(model)[1].weight  # type: ignore[union-attr]
        name = next(name for name, parameter in model.named_parameters() if parameter is weight)
        if any(name.startswith(f"{module}.") for module in last):
            rule = (
                f"its head is its embedding and stands before it ({name}), so that the stages would"
                " call one weight by two names"
            )
            raise refuse(f"pp > 1 with {type(model).__name__}", rule, "use --pp 1")
    bounds = stage_bounds(blueprint, num_stages)
    check_stages(blueprint, bounds)
    return Split(blocks, first, last, bounds, tied(model))


def check_stages(blueprint: Blueprint, bounds: tuple[int, ...]) -> None:
    """Raises `Refusal` where the stages of a pipeline have parameters of other optimizer groups.

    The first two groups are on all.

    DeepSpeed 0.19.8 adds up the norm of one group after the other over the stages
    (stage_1_and_2.py, scaled_global_norm): a stage without one of them would wait for the others
    for ever.
    """
    own = [
        {
            tensor.group
            for tensor in blueprint.tensors
            if tensor.group is not None and on_stage(tensor.place, stage, bounds)
        }
        for stage in range(len(bounds) - 1)
    ]
    if len(blueprint.groups) > len(FIRST) and any(groups != own[0] for groups in own):
        every = set[int]().union(*own)
        lacking = [
            (stage, blueprint.groups[number].name)
            for stage, groups in enumerate(own)
            for number in sorted(every - groups)
        ]
        rule = (
            f"leaves stage {lacking[0][0]} without the optimizer group {lacking[0][1]!r}, and"
            " DeepSpeed adds up norms group by group over the stages"
        )
        raise refuse(
            f"{len(own)} pipeline stages",
            rule,
            "use --pp 1, or lr_scale and matrices with names that every stage has, without"
            " layer_decay",
        )


class Away(nn.Module):
    """Stands in the module list where a layer was taken out."""

    def __init__(self, layer: nn.Module, does: Callable[[Any], Any]):
        super().__init__()
        self._does = does
        # some models read an attribute of the layer, such as its attention type
        for name, value in vars(layer).items():
            if isinstance(value, str | int | float | bool) and not name.startswith("_"):
                setattr(self, name, value)
        self.training = layer.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._does(
            next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value))
        )


def hollow(
    module: nn.Module,
    dtype: torch.dtype,
    forward: Callable[..., Any],
    kept: nn.Module | None = None,
) -> None:
    """Takes the parameters out of a module, in place, and gives it another `forward`; models read
    attributes of what lies on another stage.

    `kept`, if it lies in there, stays: BERT's embeddings hold the one that is its head. ViT asks
    for the dtype of a weight of its embeddings, for example: an empty tensor that is no parameter
    has it.
    """
    for inner in module.modules():
        if inner is kept:
            continue
        for key in [key for key, parameter in inner._parameters.items() if parameter is not None]:
            del inner._parameters[key]
            # goes to the device with the others
            inner.register_buffer(key, torch.empty(0, dtype=dtype), persistent=False)
        for key, buffer in inner.named_buffers(recurse=False):
            # a checkpoint has it from the stage that it belongs to
            inner.register_buffer(key, buffer, persistent=False)
        if isinstance(inner, _BatchNorm):
            # else torch 2.13 puts num_batches_tracked into the state that it loads (_NormBase, of
            # version 1)
            inner.track_running_stats = False
    module.forward = forward  # type: ignore[method-assign]


class _Left(Exception):
    """Carries the hidden states out of the model's forward."""


class Stage:
    """The forward pass of one pipeline stage: the model's own forward, entered at the stage's first
    block and left after its last block.

        first     inputs -> embedding ---------------> blocks -> `send` -> (hidden states, inputs)
        others    inputs -> `embed` -> `receive` -> blocks -> `send` -> (hidden states, inputs)
        last      inputs -> `embed` -> `receive` -> blocks -> head -> logits

    `embed` replaces the embedding, `receive` each block before the stage, and `send` the block
    after it. `send` leaves the model's forward with an exception, because only the model knows
    what its forward still calls.
    """

    def __init__(self, model: Any, first: bool, last: bool, dtype: torch.dtype, facts: Facts):
        self.first, self.last = first, last
        self._model = model
        self._whole_forward = model.forward
        self._dtype = dtype
        self._facts = facts
        self._travel = [name for name in facts.inputs if name not in facts.floats]
        self._received: Any = None  # the output of the last block of the stage before
        self._returned: Any = None  # the output of the last block of this stage
        # which places of `_received` hold tensors, the same for every micro-batch
        self._form: list[int] | None = None

    def receive(self, hidden: torch.Tensor) -> Any:
        """Return the output of the stage before, as the output of a block that is not here."""
        return self._received

    def send(self, hidden: torch.Tensor) -> Any:
        """Leave the model's forward with the output of this stage."""
        raise _Left(hidden, self._returned)

    def keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Keep the output of the last block: a forward hook."""
        self._returned = output

    def embed(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return zeros of the embedding's true shape, from which masks are made; `receive` then
        replaces what the model makes of them.
        """
        received = self._received
        hidden = received[0] if isinstance(received, tuple) else received
        # one element of memory
        return hidden.new_zeros(()).expand(_embedded(hidden, self._facts.of_tokens))

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        """Run the model's forward on this stage's part; `inputs` end with the tensors of
        `hand_over`.
        """
        names: tuple[str, ...] = self._model.handed
        count = len(inputs) - len(names)
        handed = dict(zip(names, inputs[count:], strict=True))
        given = self._inputs(inputs[:count], handed)
        try:
            output = self._whole_forward(**given, **self._facts.constants)
        except _Left as left:
            return *_pack(*left.args), *(given[name] for name in self._travel)
        return output.logits

    def _inputs(
        self, inputs: tuple[torch.Tensor, ...], handed: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the arguments of the model's forward, and keep the output of the stage before."""
        facts = self._facts
        if self.first:
            given = dict(zip(facts.inputs, inputs, strict=True)) | handed
            return given | {name: given[name].to(self._dtype) for name in facts.floats}

        states = list(inputs[: len(inputs) - len(self._travel)])
        given = dict(zip(self._travel, inputs[len(states) :], strict=True)) | handed
        if len(states) > 1 and self._form is None:
            self._form = states[-1].tolist()
        self._received = states[0] if self._form is None else _unpack(states, self._form)
        # The forward needs a float input, but does nothing with its values here.
        return given | {name: states[0].new_zeros(len(states[0]), 1, 1, 1) for name in facts.floats}


def cut(model: Any, split: Split, stage: int, dtype: torch.dtype, facts: Facts) -> list[str]:
    """Make `model` one stage, in place; return the names of the modules that were taken out in
    addition to blocks.

    Its forward takes the inputs of the task on the first stage and (hidden_states, ..., integer
    inputs) on the others, and returns the latter, or logits on the last stage: ids int64 (B, T),
    hidden states (B, T, D) of `dtype`. Where a block returns more than hidden states, the rest
    travels between stages: tensors, and which of its places are None. Floats among the inputs stay
    on the first stage: DeepSpeed 0.19.8 wants a gradient for every float that it sends. The tensors
    of `hand_over` come last.
    """
    first, last = stage == 0, stage == split.num_stages - 1
    own = Stage(model, first, last, dtype, facts)
    modules = dict(model.named_modules())

    start, stop = split.bounds[stage], split.bounds[stage + 1]
    for number, name in enumerate(split.blocks):
        if number < start:
            model.set_submodule(name, Away(modules[name], own.receive))
        elif number >= stop:
            model.set_submodule(name, Away(modules[name], own.send))
        elif number == stop - 1:
            modules[name].register_forward_hook(own.keep)

    # A tied head is the embedding, so the last stage keeps its weight.
    kept = ends_of(model)[0] if last and split.tied else None
    absent = [] if first else [name for name in split.first if modules[name] is not kept]
    for name in absent:
        hollow(modules[name], dtype, own.embed, kept)
    for name in () if last else split.last:
        model.set_submodule(name, nn.Identity())

    model.forward, model.last_stage, model.handed = own.forward, last, ()
    return absent if last else [*absent, *split.last]


def _embedded(hidden: torch.Tensor, of_tokens: bool) -> tuple[int, ...]:
    """Returns the shape of what an embedding gave a layer that returned `hidden`: it may have made
    streams of each token.
    """
    return (*hidden.shape[:2], hidden.shape[-1]) if of_tokens else tuple(hidden.shape)


def _pack(hidden: torch.Tensor, output: Any) -> tuple[torch.Tensor, ...]:
    """(hidden states,), or for a layer that returns a tuple (hidden states, its other tensors, 1 or
    0 for each of its places).
    """
    hidden = hidden.contiguous()  # torch 2.13 sends nothing else (SigLIP's is transposed)
    if not isinstance(output, tuple):
        return (hidden,)
    there = torch.tensor([int(torch.is_tensor(value)) for value in output], device=hidden.device)
    return hidden, *(value.contiguous() for value in output[1:] if torch.is_tensor(value)), there


def _unpack(states: list[torch.Tensor], there: list[int]) -> tuple[torch.Tensor | None, ...]:
    values = iter(states)
    return tuple(next(values) if present else None for present in there)


def assemble(
    models: Sequence[nn.Module],
    groups: Groups,
    loss_fn: Callable[..., torch.Tensor],
    schedule: str,
    num_stages: int,
) -> Any:
    """DeepSpeed's module of this rank's stages, whose parameters have the model's own names (a
    collective).
    """
    mesh = groups.mesh
    stages = stages_of(groups.coords["pp"], mesh.pp, schedule)
    layers: list[Any] = [nn.Identity() for _ in range(num_stages)]
    for stage, model in zip(stages, models, strict=True):
        layers[stage] = model
    kind = DualPipeVModule if schedule == "dualpipev" else PipelineModule
    with contextlib.redirect_stdout(None):  # it prints every layer's class
        net: Any = kind(
            layers=layers,
            topology=PipeModelDataParallelTopology(num_pp=mesh.pp, num_mp=mesh.tp, num_dp=mesh.dp),
            loss_fn=loss_fn,
            partition_method="uniform",
        )
    net.named_parameters = lambda *args, **kwargs: _named_parameters(models, *args, **kwargs)
    net.stages, net.waiting = list(models), [deque() for _ in models]
    net.register_forward_pre_hook(_with_handed)
    return net


def hand_over(
    net: Any, handed: Callable[[bool], list[dict[str, torch.Tensor]]], device: torch.device
) -> None:
    """Gives this rank's stages what does not travel between stages, for all micro-batches of the
    schedule that runs next.

    `handed(last)` lists, for the last stage or for another one, the further arguments of the
    model's forward by name: one dict a micro-batch, all with the same names. DeepSpeed 0.19.8 sends
    every stage's forwards through the micro-batches in order (TrainSchedule, InferenceSchedule;
    each phase of DualPipeVSchedule), so each forward takes the next one.
    """
    for model, waiting in zip(net.stages, net.waiting, strict=True):
        assert not waiting, "a pipeline stage did not consume its previous inputs"
        batches = handed(model.last_stage)
        model.handed = tuple(batches[0])
        waiting.extend(
            tuple(tensor.to(device, non_blocking=True) for tensor in batch.values())
            for batch in batches
        )


def _with_handed(net: Any, args: tuple[Any]) -> tuple[tuple[torch.Tensor, ...]]:
    """Puts the next micro-batch's handed tensors behind the inputs of a stage, where they are
    arguments: what is recomputed later has the same ones.
    """
    (inputs,) = args
    # DeepSpeed 0.19.8 unpacks a tuple of one under tensor parallelism
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    return ((*inputs, *net.waiting[getattr(net, "active_phase", 0)].popleft()),)


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


def share(net: Any, groups: Groups) -> None:
    """Keeps parameters that lie on several pipeline ranks equal: their gradients are summed (a
    collective).

    Those are tied embeddings and whatever the split leaves on every stage. DeepSpeed counts in the
    gradient norm only the copy on the lowest rank.
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
            group = dist.new_group([fiber[rank] for rank in ranks], groups.limit)
            if groups.rank in fiber:
                made[ranks] = group
    held = [(mine[name], made[ranks]) for name, ranks in sorted(shared.items()) if name in mine]
    for name, ranks in shared.items():
        if name in mine and groups.coords["pp"] != ranks[0]:
            mine[name].ds_pipe_replicated = True  # pyright: ignore[reportAttributeAccessIssue]

    def weights_and_groups() -> list[tuple[nn.Parameter, Any]]:
        for parameter, _ in held:
            if parameter.grad is None and not hasattr(parameter, "_hp_grad"):
                # unused on this stage; its peers wait for it
                parameter.grad = torch.zeros_like(parameter)
        return held

    net.get_tied_weights_and_groups = weights_and_groups
