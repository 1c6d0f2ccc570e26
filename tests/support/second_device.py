"""A second device on a machine that has only a CPU: `second`, torch's PrivateUse1 with a backend in
Python.

The device's tensors are in host memory, and the CPU computes every operation. All tensors therefore
have real values, and a run can be compared with a run on the CPU. The only difference is which
tensors an operation accepts. As on CUDA, all tensors must be on one device, with these rules:

- Copies accept tensors of both devices.
- Pointwise operations also accept numbers of the host (tensors without dimensions).
- Indices may be on the host.
- `numpy()` and a generator of the host are rejected.
- Collectives reject tensors of the host, as NCCL does.

FakeTensorMode over the same backend uses torch's own device check, but its tensors have no values.
Weights could not be compared with their files there, nor a checkpoint with the saved states.
`install` affects the whole process and cannot be undone.
"""

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from recipekit.parallel.groups import LONG_WAIT_DESC
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

NAME = "second"
CPU = torch.device("cpu")
COLLECTIVES = (
    *(
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_to_all_single",
        "broadcast",
        "reduce",
        "reduce_scatter_tensor",
    ),
    *("send", "recv", "batch_isend_irecv"),
)
aten: Any = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
_LIBRARY = torch.library.Library("aten", "IMPL")  # its registrations end with it
# `now` is True inside an operation, whose tensors are on the host. DeepSpeed's all-to-all is such
# an operation.
_LOWERED = threading.local()
_DATA: Any = torch._C.TensorBase.data  # type: ignore[attr-defined]


class OtherDevice(RuntimeError):
    """Raised if an operation combines tensors of two devices that must be on one device."""


class OnSecond(torch.Tensor):
    """A tensor on the second device.

    It is an ordinary tensor except for its device and its memory. Only `_on_host` reads the memory.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(host: torch.Tensor) -> "OnSecond":
        return torch.Tensor._make_subclass(
            OnSecond,
            host,
            host.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=torch.device(NAME, 0),
        )  # type: ignore

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return (
            torch.device(NAME, 0)
            if operation is torch.ops.prim.device.default
            else _run(operation, args, kwargs or {})
        )

    def tolist(self) -> Any:
        return _on_host(self).tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{_on_host(self)!r} on {NAME}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        if threading.current_thread().name == "checkpoint":
            raise OtherDevice(
                "a checkpoint that is written in the background holds a tensor of the device, which"
                " training changes"
            )
        return _on_host(self).__reduce_ex__(protocol)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a CPU tensor."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=tensor.dtype).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def _run(operation: Any, args: Any, kwargs: Any) -> Any:
    _check(operation, args, kwargs)
    to_second = isinstance(args[0], OnSecond) if operation in COPIES else True
    if kwargs.get("device") is not None:
        to_second, kwargs = torch.device(kwargs["device"]).type == NAME, kwargs | {"device": CPU}
    leaves, form = tree_flatten((args, kwargs))
    second: dict[int, OnSecond] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, OnSecond):
            leaves[number] = _on_host(leaf)
            second[id(leaves[number])] = leaf

    def lift(value: Any) -> Any:
        # DTensor's placeholder for a collective that has not finished.
        if isinstance(value, AsyncCollectiveTensor):
            value = value.trigger_wait()
        if not torch.is_tensor(value):
            return value
        if (tensor := second.get(id(value))) is not None:  # changed in place, maybe reshaped
            if (value.data_ptr(), value.shape, value.stride()) != (
                _on_host(tensor).data_ptr(),
                tensor.shape,
                tensor.stride(),
            ):
                tensor.data = OnSecond.of(value)
            return tensor
        return OnSecond.of(value) if to_second else value

    host_args, host_kwargs = tree_unflatten(leaves, form)
    # CUDA supports integers in this operation, but the CPU does not.
    if operation is aten.histc.default and not host_args[0].is_floating_point():
        return lift(
            operation(host_args[0].float(), *host_args[1:], **host_kwargs).to(host_args[0].dtype)
        )
    _LOWERED.now = True
    try:
        return tree_map(lift, operation(*host_args, **host_kwargs))
    finally:
        _LOWERED.now = False


def _check(operation: Any, args: Any, kwargs: Any) -> None:
    """Raise `OtherDevice` for arguments that CUDA would reject."""
    values = tree_leaves((args, kwargs))
    if any(isinstance(value, torch.Generator) and value.device.type != NAME for value in values):
        raise OtherDevice(f"{operation} on {NAME}: its generator is of the host")
    if operation in COPIES:
        return
    if operation in INDEXED and isinstance(args[0], OnSecond):
        values = tree_leaves((args[0], args[2:]))
    of_host = [
        value for value in values if torch.is_tensor(value) and not isinstance(value, OnSecond)
    ]
    if not of_host:
        return
    written = {id(tensor) for tensor in tree_leaves(kwargs.get("out"))}
    for argument, value in zip(operation._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {id(tensor) for tensor in tree_leaves(value)}
    pointwise = torch.Tag.pointwise in operation.tags or operation in INDEXED
    for tensor in of_host:
        if tensor.dim() > 0 or not pointwise or id(tensor) in written:
            raise OtherDevice(
                f"{operation}: expected all tensors to be on the same device, but found at least"
                f" two devices, {NAME}:0 and {tensor.device}!"
            )


class _Module:
    """The module `torch.second`, with the functions that torch expects in a device's module."""

    _is_in_bad_fork = staticmethod(lambda: False)
    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    synchronize = staticmethod(lambda *_: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    # Use the CPU's generator, so that random values are the same.
    manual_seed_all = staticmethod(lambda _: None)
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))
    device = staticmethod(lambda _: contextlib.nullcontext())


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    return OnSecond.of(
        torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
    )


def _empty_strided(
    size: Any,
    stride: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> torch.Tensor:
    return OnSecond.of(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy a tensor in the cases in which torch bypasses `__torch_dispatch__`, as in
    `torch.tensor`.
    """
    _on_host(to).copy_(_on_host(source))
    return to


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Assign `tensor.data = value` across devices.

    torch allows this for the CPU and CUDA, but not for PrivateUse1.
    """
    if isinstance(tensor, OnSecond) == isinstance(value, OnSecond):
        _DATA.__set__(tensor, value)
        return
    fresh: Any = value.detach().requires_grad_(tensor.requires_grad)
    fresh.__dict__ |= vars(tensor) | (
        {"_is_param": True} if isinstance(tensor, torch.nn.Parameter) else {}
    )
    torch.utils.swap_tensors(tensor, fresh)


def _without_host(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective with a check that rejects host tensors, as NCCL does.

    The group that always uses gloo is an exception. Collectives of Python objects are not checked
    here.
    """

    def checked(*args: Any, **kwargs: Any) -> Any:
        if getattr(kwargs.get("group"), "group_desc", "") == LONG_WAIT_DESC:
            return collective(*args, **kwargs)
        operations = [
            value for value in tree_leaves((args, kwargs)) if isinstance(value, dist.P2POp)
        ]
        for value in [
            *tree_leaves((args, kwargs)),
            *(operation.tensor for operation in operations),
        ]:
            if (
                torch.is_tensor(value)
                and not isinstance(value, OnSecond)
                and not getattr(_LOWERED, "now", False)
            ):
                raise OtherDevice(f"{name}: NCCL takes no tensor of the host")
        # This function would look for a backend for the tensors' device, but the groups use gloo.
        for operation in operations:
            operation.tensor = _on_host(operation.tensor)
        return collective(*args, **kwargs)

    return checked


def install() -> torch.device:
    """Create the device in this process, make it DeepSpeed's accelerator, and return it."""
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    for name, kernel in {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "_copy_from": _copy_from,
    }.items():
        _LIBRARY.impl(name, kernel, "PrivateUse1")
    torch.Tensor.data = property(_DATA.__get__, _set_data)  # type: ignore[method-assign,assignment]
    for name in COLLECTIVES:
        setattr(dist, name, _without_host(name, getattr(dist, name)))

    cpu: Any = CPU_Accelerator

    class Second(cpu):
        """The CPU accelerator, which needs no streams, but with tensors on the second device."""

        _name = NAME
        on_accelerator = staticmethod(lambda tensor: tensor.device.type == NAME)
        current_device = staticmethod(lambda: 0)
        current_device_name = staticmethod(lambda: f"{NAME}:0")
        device_count = staticmethod(lambda: 1)
        device_name = staticmethod(lambda index=None: NAME if index is None else f"{NAME}:{index}")

    for name, dtype in {
        "Float": torch.float32,
        "Double": torch.float64,
        "Long": torch.int64,
        "Int": torch.int32,
        "Byte": torch.uint8,
    }.items():
        setattr(Second, f"{name}Tensor", partial(torch.tensor, dtype=dtype, device=NAME))
    set_accelerator(Second())
    return torch.device(NAME, 0)
