"""The first values of the parameters: drawn, or read from files, and cut for their rank."""

import contextlib
import ctypes
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import deepspeed
import torch
import transformers
from deepspeed.utils import groups as zero_groups
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.initialization import TORCH_INIT_FUNCTIONS, guard_torch_init_functions

from ..parallel import tensor as tensor_parallel
from ..parallel.groups import Groups
from ..parallel.scalars import broadcasting_scalars
from ..parallel.tensor import Cut
from ..spec.refusal import refuse
from .weights import Weights


@dataclass(frozen=True)
class FirstValues:
    """Where the first values come from: `weights`, or the model's own initialiser with `seed`.

    Random values need `whole`, the complete model on the meta device (`initialised_from_outside`).
    """

    seed: int
    weights: Weights | None = None
    whole: PreTrainedModel | None = None

    def stored(self, name: str) -> Weights | None:
        """Return the files if they hold this parameter; None if it is sampled."""
        return None if self.weights is None or name in self.weights.drawn else self.weights


@dataclass(frozen=True)
class Target:
    """Where the values go: the training device and dtype, partitioned over the ranks if `ds_config`
    asks for ZeRO-3.
    """

    device: torch.device
    dtype: torch.dtype
    groups: Groups | None
    ds_config: dict[str, Any]

    def partition(self, parameter: nn.Parameter, swapper: Any) -> Any:
        """Partition a parameter if `ds_config` asks for it; return ZeRO-3's NVMe swapper."""
        if self.groups is None or self.ds_config["zero_optimization"]["stage"] != 3:
            return None
        return partition(parameter, self.ds_config, self.groups, swapper)


def fill(
    model: PreTrainedModel,
    values: FirstValues,
    target: Target,
    cuts: dict[str, Cut],
    divide: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Give every parameter that is still on the meta device its value, part by part.

    `divide` is called with each layer that is filled, and with the model at the end.
    """
    outside = initialised_from_outside(values.whole) if values.whole is not None else {}
    tp_mesh = target.groups.tp_mesh if target.groups else None
    names = {id(module): name for name, module in model.named_modules()}
    swapper = None
    layers = layers_of(model) if divide else []

    _return_freed_blocks(True)
    for part, deep in parts(model):
        prefix = names[id(part)]
        unfilled = [
            (name, parameter)
            for name, parameter in own_parameters(part, deep, prefix)
            if parameter.device.type == "meta"
        ]
        if not unfilled:
            continue  # tied to a parameter that an earlier part filled

        read = all(values.stored(name) is not None for name, _ in unfilled)
        drawn = {} if read else draw(model, part, deep, prefix, cuts, values.seed)
        for name, parameter in unfilled:
            value = _value_here(name, drawn, values, outside, cuts.get(name), tp_mesh)
            filled = _filled(model, parameter, value, target)
            if (weights := values.stored(name)) is not None:
                weights.check_finite(name, value, filled)
            # The full value goes before the next one comes; under ZeRO-3 only the partition stays.
            del value, parameter
            swapper = target.partition(filled, swapper)
            del filled

        if divide and any(part is layer for layer in layers):
            divide(part)
    _return_freed_blocks(False)

    _fill_buffers(model, values.weights, target.device)
    if divide:
        divide(model)


def _value_here(
    name: str,
    drawn: dict[str, torch.Tensor],
    values: FirstValues,
    outside: dict[str, list[tuple[Any, nn.Module]]],
    cut: Cut | None,
    tp_mesh: DeviceMesh | None,
) -> torch.Tensor:
    """Return this rank's shard of a parameter's value, from the files or out of `drawn`."""
    if (weights := values.stored(name)) is not None:
        return weights.part(name, cut, tp_mesh)
    value, whole = drawn.pop(name), values.whole
    if whole is not None and name in outside:
        value = draw_from_outside(whole, name, outside[name], value, values.seed)
    if tp_mesh and cut is not None:
        value = tensor_parallel.shard(value, cut, tp_mesh)
    return value


def _filled(
    model: PreTrainedModel, meta: nn.Parameter, value: torch.Tensor, target: Target
) -> nn.Parameter:
    """Put a parameter with this value in the place of a meta parameter, with its marks."""
    # A copy: safetensors' tensors are views of the mapped file, which training must not write to.
    filled = nn.Parameter(
        value.to(target.device, target.dtype, copy=True), requires_grad=meta.requires_grad
    )
    for mark, kept in vars(meta).items():
        setattr(filled, mark, kept)
    replace_parameter(model, meta, filled)
    return filled


def _fill_buffers(model: nn.Module, weights: Weights | None, device: torch.device) -> None:
    """Move the buffers to `device`, with the values of the files if these have them."""
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if weights is not None and name in persistent and name in weights.stored:
            value = weights.whole(name)
            buffer.data = value.to(buffer.dtype)
            weights.check_finite(name, value, buffer)
        buffer.data = buffer.data.to(device)


def parts(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Cuts the model into (module, deep): each element of an outermost ModuleList, and whatever
    holds no such list.

    `deep` False means the module's own parameters only. Every parameter is in one part; the order
    is the model's.
    """
    if not any(isinstance(module, nn.ModuleList) for module in model.modules()):
        yield model, True
        return
    yield model, False
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            for element in child:
                yield element, True
        else:
            yield from parts(child)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Lists the elements of the outermost ModuleLists that have parameters, and share none with the
    rest of the model.
    """
    owners = Counter(
        id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)
    )
    lists = [
        child
        for part, deep in parts(model)
        if not deep
        for child in part.children()
        if isinstance(child, nn.ModuleList)
    ]
    listed = [element for elements in lists for element in elements]
    own = [
        Counter(id(parameter) for _, parameter in layer.named_parameters(remove_duplicate=False))
        for layer in listed
    ]
    return [
        layer
        for layer, found in zip(listed, own, strict=True)
        if found and all(owners[key] == count for key, count in found.items())
    ]


def own_parameters(part: nn.Module, deep: bool, prefix: str) -> list[tuple[str, nn.Parameter]]:
    """Lists (full name, parameter) of one part."""
    return [
        (f"{prefix}.{name}" if prefix else name, parameter)
        for name, parameter in part.named_parameters(recurse=deep)
    ]


class Slot(NamedTuple):
    """A place for a parameter in a module, and the parameter that it held."""

    module: nn.Module
    key: str
    name: str  # in the model
    held: nn.Parameter


def draw(
    model: PreTrainedModel,
    part: nn.Module,
    deep: bool,
    prefix: str,
    cuts: dict[str, Cut],
    seed: int,
) -> dict[str, torch.Tensor]:
    """Sample the initial values of one part, full, fp32, on the CPU, by the model's own
    initialiser.

    Each module samples with a generator seeded by (seed, name of its first parameter), so the
    values depend on nothing else: not on the layout, the order of modules, or earlier samples.
    """
    modules = (
        [(_path(prefix, name), module) for name, module in part.named_modules()]
        if deep
        else [(prefix, part)]
    )
    unfilled, filled = _make_room(modules, cuts)
    _initialise(model, modules, seed)
    for slot in filled:
        slot.module._parameters[slot.key] = slot.held
    return _take_values(model, unfilled)


def _path(*names: str) -> str:
    return ".".join(filter(None, names))


def _make_room(
    modules: list[tuple[str, nn.Module]], cuts: dict[str, Cut]
) -> tuple[list[Slot], list[Slot]]:
    """Prepare modules for their initialiser; return the slots of meta and of filled parameters.

    Full fp32 tensors of NaN take the place of meta parameters, which may be sharded. Meta tensors
    take the place of filled ones, so that the initialiser does not sample them again: they are tied
    to a parameter of an earlier part, as BERT's head is.
    """
    unfilled, filled = list[Slot](), list[Slot]()
    for name, module in modules:
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            slot = Slot(module, key, _path(name, key), parameter)
            if parameter.device.type == "meta":
                shape = cuts[slot.name].shape if slot.name in cuts else parameter.shape
                room = torch.full(shape, math.nan)
            else:
                room = torch.empty(getattr(parameter, "ds_shape", parameter.shape), device="meta")
            (unfilled if parameter.device.type == "meta" else filled).append(slot)
            module._parameters[key] = nn.Parameter(room)
    return unfilled, filled


def _initialise(model: PreTrainedModel, modules: list[tuple[str, nn.Module]], seed: int) -> None:
    """Call the initialiser of each module with its own seed."""
    owner = {id(module): nearest for nearest, module in _init_owners(model)}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), guard_torch_init_functions():
        # Children before parents: a parent may sample a child's weight again (GPT-2's c_proj).
        for name, module in reversed(modules):
            first = next((_path(name, key) for key, _ in module.named_parameters()), None)
            if first is not None:
                torch.manual_seed(seed_of(seed, first))
                owner[id(module)]._init_weights(module)
                _draw_the_rest(module)


def _take_values(model: PreTrainedModel, slots: list[Slot]) -> dict[str, torch.Tensor]:
    """Take the sampled values out of their slots, which hold their meta parameters again.

    Raises `Refusal` for a parameter that neither the initialiser nor the constructor has set.
    """
    values, made = {}, cast(dict[str, torch.Tensor], model.made)
    for module, key, name, meta in slots:
        drawn = module._parameters[key].detach()  # type: ignore[union-attr]
        # No initialiser set it, so the constructor did.
        if drawn.isnan().any():
            if name not in made:
                raise refuse(
                    "--init random",
                    f"{type(model).__name__} has no initialiser for {name}",
                    "give pretrained weights with --model",
                )
            drawn = made[name].float()
        values[name] = drawn
        module._parameters[key] = meta
    return values


def seed_of(seed: int, name: str) -> int:
    """Return the seed for the values of one parameter.

    It depends on the run's seed and on the name only.
    """
    return (
        int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")
        >> 1
    )


def initialised_from_outside(whole: PreTrainedModel) -> dict[str, list[tuple[Any, nn.Module]]]:
    """Map parameters whose first values come from the initialiser of a module outside their part to
    its calls.

    A call is (owner, module), for `owner._init_weights(module)`. The calls are in the order in
    which transformers makes them. A parent may set weights far below it: Whisper's encoder sets its
    positions, CLIP's classifier its head. A tied parameter has the values of the module that it is
    tied to, even if it comes first.
    """
    owners = {id(module): owner for owner, module in _init_owners(whole)}
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    found: dict[str, list[tuple[Any, nn.Module]]] = {}
    for source in set(whole.all_tied_weights_keys.values()):
        module = whole.get_submodule(source.rpartition(".")[0])
        name = names[id(whole.get_parameter(source))]
        if name != source:
            found[name] = [(owners[id(module)], module)]
    above = [part for part, deep in parts(whole) if not deep]
    for part in reversed(above):  # The innermost first.
        own = {id(parameter) for parameter in part.parameters(recurse=False)}
        inner = {
            id(parameter): parameter for parameter in part.parameters() if id(parameter) not in own
        }
        versions = {key: parameter._version for key, parameter in inner.items()}
        with torch.no_grad(), guard_torch_init_functions(), _seen_on_meta(), _untied(whole):
            owners[id(part)]._init_weights(part)
        for key, parameter in inner.items():
            if parameter._version != versions[key]:
                found.setdefault(names[key], []).append((owners[id(part)], part))
    return found


@contextlib.contextmanager
def _seen_on_meta() -> Iterator[None]:
    """Let `trunc_normal_` write to a meta tensor, so that its version shows the call.

    In torch 2.13 it returns early.
    """
    own = TORCH_INIT_FUNCTIONS["trunc_normal_"]
    TORCH_INIT_FUNCTIONS["trunc_normal_"] = lambda tensor, *_, **__: tensor.zero_()
    try:
        yield
    finally:
        TORCH_INIT_FUNCTIONS["trunc_normal_"] = own


def draw_from_outside(
    whole: PreTrainedModel,
    name: str,
    calls: list[tuple[Any, nn.Module]],
    value: torch.Tensor,
    seed: int,
) -> torch.Tensor:
    """Sample a parameter again with calls of `initialised_from_outside`; `value` is the value from
    its own part.
    """
    meta, real = whole.get_parameter(name), nn.Parameter(value.clone())
    with _untied(whole):
        replace_parameter(whole, meta, real)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), guard_torch_init_functions():
            for owner, module in calls:
                torch.manual_seed(seed_of(seed, name))
                owner._init_weights(module)
        replace_parameter(whole, real, meta)
    return real.detach()


@contextlib.contextmanager
def _untied(model: PreTrainedModel) -> Iterator[None]:
    """Give each weight that is tied to another one a tensor that is not used: transformers ties
    weights after all are drawn.
    """
    tied = {alias: model.get_parameter(alias) for alias in model.all_tied_weights_keys}
    places = {
        alias: (model.get_submodule(alias.rpartition(".")[0]), alias.rpartition(".")[2])
        for alias in tied
    }
    for alias, (module, key) in places.items():
        module._parameters[key] = nn.Parameter(torch.empty_like(tied[alias], device="meta"))
    try:
        yield
    finally:
        for alias, (module, key) in places.items():
            module._parameters[key] = tied[alias]


def _draw_the_rest(module: nn.Module) -> None:
    """Draws what transformers' initialiser leaves of a module of torch's own as its constructor
    does: the biases of RegNet's convolutions.
    """
    own = dict(module.named_parameters(recurse=False))
    # on the meta device: tied to an earlier part, and drawn
    left = [key for key, value in own.items() if not value.is_meta and value.isnan().any()]
    reset = getattr(module, "reset_parameters", None)
    if left and reset is not None and type(module).__module__.startswith("torch.nn."):
        drawn = {key: value.clone() for key, value in own.items() if key not in left}
        reset()
        for key, value in drawn.items():
            own[key].copy_(value)


def _init_owners(model: PreTrainedModel) -> Iterator[tuple[Any, nn.Module]]:
    """Yields (owner, module) of every module: the innermost PreTrainedModel around it, which has
    the right `_init_weights`.
    """

    def walk(module: nn.Module, owner: Any) -> Iterator[tuple[Any, nn.Module]]:
        owner = module if isinstance(module, transformers.PreTrainedModel) else owner
        yield owner, module
        for child in module.children():
            yield from walk(child, owner)

    return walk(model, model)


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Puts `new` wherever the model holds `old`, so that tied parameters stay one."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[key] = new


def partition(
    parameter: nn.Parameter, ds_config: dict[str, Any], groups: Groups, swapper: Any
) -> Any:
    """Partitions one parameter over the data-parallel ranks as ZeRO-3 does (a collective).

    Returns the NVMe swapper to pass on to the next one (None without NVMe), since each new swapper
    pins buffers.
    """
    holder = nn.Module()
    holder.weight = parameter
    # DeepSpeed's own linear does not know DTensors; autograd's is right and as small with
    # checkpointing
    if groups.mpu:
        ds_config = ds_config | {
            "zero_optimization": ds_config["zero_optimization"] | {"memory_efficient_linear": False}
        }
    hpz = ds_config["zero_optimization"].get("zero_hpz_partition_size", 1) > 1
    with broadcasting_scalars():
        init = deepspeed.zero.Init(
            module=holder,
            config_dict_or_path=ds_config,
            mpu=groups.mpu,
            data_parallel_group=groups.dp_group if groups.mpu else None,
            param_swapper=swapper,
            # the first one makes it, another would, too
            zero_param_parallel_group=zero_groups._get_zero_param_intra_parallel_group()
            if hpz
            else None,
        )
    return init.param_swapper


def _return_freed_blocks(at_once: bool) -> None:
    """Tells glibc to give freed blocks of 1 MiB and more back to the system at once, or (False) to
    keep up to 32 MiB for reuse.

    By itself it starts with the one and drifts to the other, and then holes that whole parameters
    leave between their partitions cost half as much memory again (1.0 GB in ZeRO-3 on 2 ranks: 0.8
    to 1.1 GB a rank instead of 0.65).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; man 3 mallopt
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 2**20 if at_once else 2**25)
        mallopt(m_trim_threshold, 2**17 if at_once else 2**26)
