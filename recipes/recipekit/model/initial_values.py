"""Initial parameter values, either sampled or read from files, and sharded for their rank."""

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
from transformers.initialization import guard_torch_init_functions

from ..compat.deepspeed import broadcasting_scalars
from ..compat.torch import copy_marks, set_parameters
from ..compat.transformers import seen_on_meta
from ..parallel import tensor as tensor_parallel
from ..parallel.groups import ProcessGroups
from ..parallel.tensor import ShardSpec
from ..spec.errors import config_error
from .weights import Weights


@dataclass(frozen=True)
class InitialValues:
    """The source of initial values: `weights`, or the model's own initialiser with `seed`.

    Sampling requires `full_model`, the complete model on the meta device
    (`initialised_from_outside`).
    """

    seed: int
    weights: Weights | None = None
    full_model: PreTrainedModel | None = None

    def stored(self, name: str) -> Weights | None:
        """Return the files if they contain this parameter, or None if it must be sampled."""
        return None if self.weights is None or name in self.weights.sampled else self.weights


@dataclass(frozen=True)
class Target:
    """The destination of the values: training device, dtype and optional ZeRO-3 partitioning.

    `ds_config` enables ZeRO-3, which partitions the values over the ranks. `fp32` names the
    parameters that stay in fp32.
    """

    device: torch.device
    dtype: torch.dtype
    groups: ProcessGroups | None
    ds_config: dict[str, Any]
    fp32: frozenset[str] = frozenset()

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter."""
        return torch.float32 if name in self.fp32 else self.dtype

    def partition(self, parameter: nn.Parameter, swapper: object) -> Any:
        """Partition a parameter if `ds_config` enables ZeRO-3. Return ZeRO-3's NVMe swapper."""
        if self.groups is None or self.ds_config["zero_optimization"]["stage"] != 3:
            return None
        return partition(parameter, self.ds_config, self.groups, swapper)


def fill_parameters(
    model: PreTrainedModel,
    values: InitialValues,
    target: Target,
    cuts: dict[str, ShardSpec],
    shard_fn: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Fill in every parameter that is still on the meta device, part by part.

    `shard_fn` is called with each filled layer, and finally with the model.
    """
    outside = initialised_from_outside(values.full_model) if values.full_model is not None else {}
    tp_mesh = target.groups.tp_mesh if target.groups else None
    names = {id(module): name for name, module in model.named_modules()}
    swapper = None
    layers = layers_of(model) if shard_fn else []

    _return_freed_blocks(True)
    for part, deep in parts(model):
        prefix = names[id(part)]
        unfilled = [
            (name, parameter)
            for name, parameter in part_parameters(part, deep, prefix)
            if parameter.device.type == "meta"
        ]
        if not unfilled:
            continue  # tied to a parameter in an earlier part

        read = all(values.stored(name) is not None for name, _ in unfilled)
        drawn = {} if read else sample_values(model, part, deep, prefix, cuts, values.seed)
        for name, parameter in unfilled:
            value = _local_value(name, drawn, values, outside, cuts.get(name), tp_mesh)
            filled = _fill_parameter(
                model, parameter, value, (target.device, target.dtype_of(name))
            )
            if (weights := values.stored(name)) is not None:
                weights.check_finite(name, value, filled)
            # Free the full value before the next one is created. Under ZeRO-3 only the partition
            # remains.
            del value, parameter
            swapper = target.partition(filled, swapper)
            del filled

        if shard_fn and any(part is layer for layer in layers):
            shard_fn(part)
    _return_freed_blocks(False)

    _fill_buffers(model, values.weights, target.device)
    if shard_fn:
        shard_fn(model)


def _local_value(
    name: str,
    sampled: dict[str, torch.Tensor],
    values: InitialValues,
    outside: dict[str, list[tuple[Any, nn.Module]]],
    cut: ShardSpec | None,
    tp_mesh: DeviceMesh | None,
) -> torch.Tensor:
    """Return this rank's shard of a parameter's value, from the files or from `sampled`."""
    if (weights := values.stored(name)) is not None:
        return weights.local_shard(name, cut, tp_mesh)
    value, whole = sampled.pop(name), values.full_model
    if whole is not None and name in outside:
        value = resample_from_outside(whole, name, outside[name], value, values.seed)
    if tp_mesh and cut is not None:
        value = tensor_parallel.shard_tensor(value, cut, tp_mesh)
    return value


def _fill_parameter(
    model: PreTrainedModel,
    meta: nn.Parameter,
    value: torch.Tensor,
    where: tuple[torch.device, torch.dtype],
) -> nn.Parameter:
    """Replace a meta parameter with one that has this value and the same attributes."""
    # Copy the value, because safetensors' tensors are views of the mapped file, which training must
    # not change.
    filled = nn.Parameter(value.to(*where, copy=True), requires_grad=meta.requires_grad)
    copy_marks(meta, filled)
    replace_parameter(model, meta, filled)
    return filled


def _fill_buffers(model: nn.Module, weights: Weights | None, device: torch.device) -> None:
    """Move the buffers to `device`, with values from the files if the files contain the buffers."""
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if weights is not None and name in persistent and name in weights.stored:
            value = weights.full_tensor(name)
            buffer.data = value.to(buffer.dtype)
            weights.check_finite(name, value, buffer)
        buffer.data = buffer.data.to(device)


def parts(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Split the model into parts: its outermost ModuleLists' elements, and the rest.

    Yield (module, deep). If `deep` is False, the part consists of only the module's own parameters.
    Every parameter is in exactly one part. The order is the model's order.
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
    """Return the outermost ModuleLists' elements that share no parameters with other modules.

    Elements without parameters are left out.
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


def part_parameters(part: nn.Module, deep: bool, prefix: str) -> list[tuple[str, nn.Parameter]]:
    """Return (full name, parameter) for each parameter in a part."""
    return [
        (f"{prefix}.{name}" if prefix else name, parameter)
        for name, parameter in part.named_parameters(recurse=deep)
    ]


class ParameterSlot(NamedTuple):
    """A parameter's slot in a module, and the parameter that was in the slot."""

    module: nn.Module
    key: str
    name: str  # in the model
    original: nn.Parameter


def sample_values(
    model: PreTrainedModel,
    part: nn.Module,
    deep: bool,
    prefix: str,
    cuts: dict[str, ShardSpec],
    seed: int,
) -> dict[str, torch.Tensor]:
    """Sample the initial values of one part with the model's own initialiser.

    The values are full fp32 tensors on the CPU. Each module uses a generator seeded with (seed,
    name of its first parameter). The values therefore depend on nothing else, such as the layout,
    the order of modules, or earlier samples.
    """
    modules = (
        [(_dotted_name(prefix, name), module) for name, module in part.named_modules()]
        if deep
        else [(prefix, part)]
    )
    unfilled, filled = _make_room(modules, cuts)
    _initialise(model, modules, seed)
    for slot in filled:
        set_parameters(slot.module, {slot.key: slot.original})
    return _take_values(model, unfilled)


def _dotted_name(*names: str) -> str:
    return ".".join(filter(None, names))


def _make_room(
    modules: list[tuple[str, nn.Module]], cuts: dict[str, ShardSpec]
) -> tuple[list[ParameterSlot], list[ParameterSlot]]:
    """Prepare modules for their initialiser. Return the slots of meta and filled parameters.

    Meta parameters, which may be sharded, are replaced with full fp32 tensors of NaN. Filled
    parameters are tied to a parameter in an earlier part, as in BERT's head. They are replaced with
    meta tensors, so that the initialiser does not sample them again.
    """
    unfilled, filled = list[ParameterSlot](), list[ParameterSlot]()
    for name, module in modules:
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            slot = ParameterSlot(module, key, _dotted_name(name, key), parameter)
            if parameter.device.type == "meta":
                shape = cuts[slot.name].shape if slot.name in cuts else parameter.shape
                room = torch.full(shape, math.nan)
            else:
                room = torch.empty(getattr(parameter, "ds_shape", parameter.shape), device="meta")
            (unfilled if parameter.device.type == "meta" else filled).append(slot)
            set_parameters(module, {key: nn.Parameter(room)})
    return unfilled, filled


def _initialise(model: PreTrainedModel, modules: list[tuple[str, nn.Module]], seed: int) -> None:
    """Call each module's initialiser with a separate seed."""
    owner = {id(module): nearest for nearest, module in _init_owners(model)}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), guard_torch_init_functions():
        # Initialise children before parents, because a parent may sample a child's weight again
        # (GPT-2's c_proj).
        for name, module in reversed(modules):
            first = next((_dotted_name(name, key) for key, _ in module.named_parameters()), None)
            if first is not None:
                torch.manual_seed(seed_of(seed, first))
                owner[id(module)]._init_weights(module)
                _sample_remaining(module)


def _take_values(model: PreTrainedModel, slots: list[ParameterSlot]) -> dict[str, torch.Tensor]:
    """Return the slots' sampled values, and restore the slots' meta parameters.

    Raise `ConfigError` for a parameter that neither the initialiser nor the constructor has set.
    """
    values, made = {}, cast(dict[str, torch.Tensor], model.made)
    for module, key, name, meta in slots:
        drawn = module._parameters[key].detach()  # type: ignore[union-attr]
        # The parameter was not set by an initialiser, so use the constructor's value.
        if drawn.isnan().any():
            if name not in made:
                raise config_error(
                    "--init random",
                    f"{type(model).__name__} has no initialiser for {name}",
                    "give pretrained weights with --model",
                )
            drawn = made[name].float()
        values[name] = drawn
        set_parameters(module, {key: meta})
    return values


def seed_of(seed: int, name: str) -> int:
    """Return the seed for a parameter's values.

    The seed depends only on the run's seed and the parameter's name.
    """
    return (
        int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")
        >> 1
    )


def initialised_from_outside(whole: PreTrainedModel) -> dict[str, list[tuple[Any, nn.Module]]]:
    """Return the parameters whose initial values come from a module outside their part.

    The result maps each parameter to its calls, in the order in which transformers makes them. A
    call is (owner, module), for `owner._init_weights(module)`.

    A parent may set weights far below it. For example, Whisper's encoder sets its positions, and
    CLIP's classifier sets its head. A tied parameter is initialised with the module to which it is
    tied, even if the parameter comes first.
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
    for part in reversed(above):  # innermost first
        own = {id(parameter) for parameter in part.parameters(recurse=False)}
        inner = {
            id(parameter): parameter for parameter in part.parameters() if id(parameter) not in own
        }
        versions = {key: parameter._version for key, parameter in inner.items()}
        with torch.no_grad(), guard_torch_init_functions(), seen_on_meta(), _untied(whole):
            owners[id(part)]._init_weights(part)
        for key, parameter in inner.items():
            if parameter._version != versions[key]:
                found.setdefault(names[key], []).append((owners[id(part)], part))
    return found


def resample_from_outside(
    full_model: PreTrainedModel,
    name: str,
    calls: list[tuple[Any, nn.Module]],
    value: torch.Tensor,
    seed: int,
) -> torch.Tensor:
    """Sample a parameter again with its calls from `initialised_from_outside`.

    `value` is the value that the parameter's own part sampled.
    """
    meta, real = full_model.get_parameter(name), nn.Parameter(value.clone())
    with _untied(full_model):
        replace_parameter(full_model, meta, real)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), guard_torch_init_functions():
            for owner, module in calls:
                torch.manual_seed(seed_of(seed, name))
                owner._init_weights(module)
        replace_parameter(full_model, real, meta)
    return real.detach()


@contextlib.contextmanager
def _untied(model: PreTrainedModel) -> Iterator[None]:
    """Temporarily replace each tied weight with an unused tensor.

    This is necessary because transformers ties weights only after all of them are sampled.
    """
    tied = {alias: model.get_parameter(alias) for alias in model.all_tied_weights_keys}
    places = {
        alias: (model.get_submodule(alias.rpartition(".")[0]), alias.rpartition(".")[2])
        for alias in tied
    }
    for alias, (module, key) in places.items():
        unused = nn.Parameter(torch.empty_like(tied[alias], device="meta"))
        set_parameters(module, {key: unused})
    try:
        yield
    finally:
        for alias, (module, key) in places.items():
            set_parameters(module, {key: tied[alias]})


def _sample_remaining(module: nn.Module) -> None:
    """Sample the parameters in a torch module that transformers' initialiser did not set.

    They are sampled as in the module's constructor. RegNet's convolution biases are an example.
    """
    own = dict(module.named_parameters(recurse=False))
    # A meta parameter is tied to an earlier part and is already sampled.
    left = [key for key, value in own.items() if not value.is_meta and value.isnan().any()]
    reset = getattr(module, "reset_parameters", None)
    if left and reset is not None and type(module).__module__.startswith("torch.nn."):
        drawn = {key: value.clone() for key, value in own.items() if key not in left}
        reset()
        for key, value in drawn.items():
            own[key].copy_(value)


def _init_owners(model: PreTrainedModel) -> Iterator[tuple[Any, nn.Module]]:
    """Yield (owner, module) for every module.

    The owner is the innermost PreTrainedModel that contains the module, because that model has the
    right `_init_weights`.
    """

    def walk(module: nn.Module, owner: object) -> Iterator[tuple[Any, nn.Module]]:
        owner = module if isinstance(module, transformers.PreTrainedModel) else owner
        yield owner, module
        for child in module.children():
            yield from walk(child, owner)

    return walk(model, model)


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace `old` with `new` in every slot in the model, so that tied parameters stay tied."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is old:
                set_parameters(module, {key: new})


def partition(
    parameter: nn.Parameter, ds_config: dict[str, Any], groups: ProcessGroups, swapper: object
) -> Any:
    """Partition a parameter over the data-parallel ranks as ZeRO-3 does (a collective).

    Return the NVMe swapper to pass to the next call, or None without NVMe. Each new swapper would
    pin additional buffers.
    """
    holder = nn.Module()
    holder.weight = parameter
    # DeepSpeed's own linear layer does not support DTensors. Autograd's linear layer is correct
    # and, with activation checkpointing, needs no more memory.
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
            # The value is None at the first call, which creates the group. Later calls must pass
            # the group, or Init would create a different one.
            zero_param_parallel_group=zero_groups._get_zero_param_intra_parallel_group()
            if hpz
            else None,
        )
    return init.param_swapper


def _return_freed_blocks(at_once: bool) -> None:
    """Configure how glibc handles freed blocks of 1 MiB and more.

    If `at_once` is True, return these blocks to the system immediately; otherwise keep up to 32 MiB
    for reuse.

    By default glibc starts in the first mode and drifts to the second. Full parameters then leave
    holes between their partitions, which cost half as much memory again. Measured with 1.0 GB in
    ZeRO-3 on 2 ranks: 0.8 to 1.1 GB per rank instead of 0.65.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # a glibc function; see man 3 mallopt
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 2**20 if at_once else 2**25)
        mallopt(m_trim_threshold, 2**17 if at_once else 2**26)
