"""torch: module attributes that we replace, settings in variables, and release differences."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.parallel import DistributedDataParallel


def set_forward(module: "nn.Module", forward: Callable[..., Any]) -> None:
    """Replace a module's forward, in place.

    Why: A different class would change the module's type and repr, and every other module of its
        class. A forward on the instance keeps hooks, names and parameters unchanged.
    Version: torch 2.13
    Test: tests/compat/test_torch.py::test_a_module_has_another_forward_and_keeps_its_hooks
    Until: torch.nn.Module has a method that wraps its forward.
    """
    module.forward = forward


@contextlib.contextmanager
def forward_replaced(module: "nn.Module", forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward within the `with` block.

    The module's hooks stay. The tensor-parallel wrapper around the original forward is bypassed.

    Why: A forward hook could replace the output only after the module has computed full logits.
    Version: torch 2.13
    Test: tests/compat/test_torch.py::test_a_module_has_another_forward_and_keeps_its_hooks
    Until: torch.nn.Module has a method that replaces its forward temporarily.
    """
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def set_class(module: "nn.Module", kind: type) -> None:
    """Make a module an instance of a subclass of its class, in place.

    Why: A new module would lose the old module's hooks and all references to it.
    Version: torch 2.13
    Test: tests/model/test_norms.py::test_a_step_of_several_micro_batches_moves_by_their_mean
    Until: torch's BatchNorm accepts a function that returns its statistics.
    """
    module.__class__ = kind


def set_parameters(module: "nn.Module", tensors: Mapping[str, "torch.Tensor | None"]) -> None:
    """Replace a module's own parameters with tensors.

    Why: `setattr` does not accept a tensor that is not an `nn.Parameter`, for example a DTensor in
        a forward pass.
    Version: torch 2.13
    Test: tests/compat/test_torch.py::test_a_tensor_takes_the_place_of_a_parameter
    Until: torch.nn.Module accepts any tensor under a parameter's name.
    """
    module._parameters.update(tensors)  # type: ignore[arg-type]


def remove_parameter(module: "nn.Module", key: str) -> None:
    """Remove a module's own parameter, so that a buffer can use its name.

    Why: register_buffer does not accept a name that the module already uses.
    Version: torch 2.13
    Test: tests/compat/test_torch.py::test_a_buffer_takes_the_name_of_a_parameter
    Until: torch.nn.Module has a method that removes a parameter.
    """
    del module._parameters[key]


def set_buffer(module: "nn.Module", key: str, value: "torch.Tensor") -> None:
    """Replace a module's own buffer with a tensor. Whether it is persistent does not change.

    Why: register_buffer would make a non-persistent buffer persistent.
    Version: torch 2.13
    Test: tests/compat/test_torch.py::test_a_buffer_has_another_value_and_stays_out_of_the_state
    Until: torch.nn.Module has a method that replaces a buffer.
    """
    module._buffers[key] = value


def copy_marks(source: object, target: object) -> None:
    """Copy the attributes that other libraries have set from one parameter to another.

    Why: A copy of a parameter lacks these attributes. DeepSpeed reads several of them, for example
        ds_pipe_replicated and model_parallel.
    Version: torch 2.13
    Test: tests/compat/test_torch.py::test_a_parameter_takes_over_the_marks_of_another
    Until: torch copies the attributes of a parameter.
    """
    for mark, kept in vars(source).items():
        setattr(target, mark, kept)


def set_gradient_sync(module: "DistributedDataParallel", on: bool) -> None:
    """Make DDP sum gradients in the next backward pass, or keep them local.

    Why: `no_sync` must enclose the forward pass, but our loop runs the forward pass elsewhere.
    Version: torch 2.13
    Test: tests/compat/test_torch.py::test_ddp_sums_only_when_it_is_told
    Until: DDP has a method for this, like FSDP2's `set_requires_gradient_sync`.
    """
    module.require_backward_grad_sync = on


def stop_tracking(norm: "_BatchNorm") -> None:
    """Let a BatchNorm without statistics load a state without num_batches_tracked.

    Why: torch adds num_batches_tracked to a state that lacks it (_NormBase, version 1).
    Version: torch 2.13
    Test: tests/compat/test_torch.py::test_a_norm_without_statistics_adds_nothing_to_a_state
    Until: _NormBase._load_from_state_dict does not change a state.
    """
    norm.track_running_stats = False


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[dict[tuple[int, str], "torch.Tensor"]]:
    """Create every new parameter on the meta device, and yield copies of the small parameters.

    The keys of the copies are (id of the module, parameter key).

    Why: `torch.device("meta")` would also create buffers there, and no file contains their values.
    Version: torch 2.13
    Test: tests/compat/test_torch.py::test_parameters_are_made_on_meta_and_buffers_are_not
    Until: torch has a context that creates parameters, but not buffers, on a device.
    """
    from torch import nn

    small: dict[tuple[int, str], torch.Tensor] = {}
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            if parameter.numel() <= 4096:
                small[id(module), name] = parameter.detach().clone()
            module._parameters[name] = nn.Parameter(
                parameter.detach().to("meta"), requires_grad=parameter.requires_grad
            )

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield small
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def set_compiler(asked: bool) -> None:
    """Set up torch.compile for this process.

    Unless `asked`, code that cannot be compiled runs uncompiled, and torch logs a warning.

    Why: These settings are variables in three modules, and torch.compile has no argument for them.
        During a forward pass of DDP, torch also splits each graph at DDP's buckets (optimize_ddp),
        so that sums of gradients overlap with the backward pass of one graph of the full model.
        Layers that are compiled one by one overlap anyway. The split only costs fusions.
    Version: torch 2.13
    Test: tests/compat/test_torch.py::test_the_compiler_has_its_settings
    Until: torch.compile accepts the settings as arguments.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    dynamo.suppress_errors = not asked
    # Otherwise a backward pass is compiled when it first runs, where errors are not suppressed.
    functorch.force_non_lazy_backward_lowering = not asked
    # A pool of compiler processes would outlive a killed rank, and only a few small kernels are
    # compiled.
    inductor.compile_threads = 1
    dynamo.optimize_ddp = False


def set_activation_budget(budget: float, flops: Mapping[Any, Callable[..., int]]) -> None:
    """Set the fraction of its activations that each compiled function keeps, from 0 to 1.

    `flops` maps an operation to the function that counts its FLOPs from its arguments. The compiler
    compares them to choose the values that it recomputes.

    Why: The budget is a variable of a module. torch counts FLOPs only for the operations in its
        registry, and without an entry an operation counts as free. For packed attention, torch 2.13
        counts by the number of documents in the first micro-batch, which differs between ranks.
    Version: torch 2.13; 2.11 has no entry for its packed attention
    Test: tests/compat/test_torch.py::test_the_compiler_has_a_budget
    Until: torch.compile accepts the budget and the costs as arguments.
    """
    import torch._functorch.config as functorch
    from torch.utils.flop_counter import flop_registry

    functorch.activation_memory_budget = budget
    flop_registry.update(flops)


def set_deterministic() -> None:
    """Choose the same cuDNN kernels in every run, and do not fill new memory.

    Why: torch has no functions for these variables. `use_deterministic_algorithms` would fill every
        torch.empty with NaN. This would cost one more write per buffer. It would also turn the
        padding of ZeRO's partitions, which nothing ever sets, into NaN.
    Version: torch 2.13
    Test: tests/compat/test_torch.py::test_deterministic_settings_are_in_force
    Until: torch has functions that set these variables.
    """
    import torch

    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def keep_flash_for_documents() -> None:
    """Keep FlashAttention for packed documents, also in a torch that would choose cuDNN.

    Why: A torch after 2.13 prefers cuDNN in varlen_attn if both are enabled (pytorch pull request
        193631). cuDNN plans each shape again, and the documents of each micro-batch differ. A user
        reported a drop from 280 to 60 thousand tokens/s (issue 187770); not measured here.
    Version: torch 2.13 has no such choice, so nothing is changed
    Test: tests/compat/test_torch.py::test_documents_keep_flash_attention
    Until: varlen_attn has an argument that selects the backend.
    """
    import torch
    from torch.nn.attention import varlen

    if hasattr(varlen, "_select_backend"):
        torch.backends.cuda.enable_cudnn_sdp(False)


def pins_exactly() -> bool:
    """Return True if this torch's pinned allocator has a setting for exact sizes.

    This function does not import torch.

    Why: torch 2.11 fails with an error if a setting is unknown.
    Version: torch 2.13 has the setting
    Test: tests/compat/test_torch.py::test_an_exact_allocator_is_found_in_the_headers_of_torch
    Until: requirements.txt allows no torch without `pinned_max_round_threshold_mb`.
    """
    spec = find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        header = Path(folder) / "include" / "c10" / "core" / "AllocatorConfig.h"
        if header.is_file():
            return "pinned_max_round_threshold" in header.read_text(errors="replace")
    return False


def gather_in_fp32(module: "FSDPModule", parameters: "list[nn.Parameter]") -> None:
    """Add parameters of a module, which `fully_shard` left out, as a group that stays in fp32.

    The module must own at least one other parameter.

    Why: FSDP2 gathers all parameters of a module in the one dtype of its policy. A second policy
        requires a second module, but a module may own parameters of both kinds.
    Version: torch 2.13
    Test: tests/model/test_fp32_parameters.py::test_a_run_keeps_the_parameters_in_fp32
    Until: `fully_shard` accepts a policy for each parameter.
    """
    if not parameters:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    groups = module._get_fsdp_state()._fsdp_param_groups
    first = groups[0]
    groups.append(
        FSDPParamGroup(
            parameters,
            first.modules,
            first.mesh_info,
            first.post_forward_mesh_info,
            first.device,
            None,
            MixedPrecisionPolicy(cast_forward_inputs=False),
            first.offload_policy,
        )
    )


def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """Return True if a function or class of the installed torch accepts the keyword `name`.

    Why: torch 2.11's `varlen_attn` has no `enable_gqa`; it accepts fewer key-value heads without
        it. torch 2.11's DDP has `broadcast_buffers` instead of `forward_sync_buffers`.
    Version: torch 2.11 lacks both; torch 2.13 has both
    Test: tests/compat/test_torch.py::test_our_calls_fit_the_signatures_of_torch_2_11
    Until: requirements.txt allows no torch without them, and no GPU machine has an older torch.
    """
    parameters = signature(function).parameters.values()
    return any(each.name == name or each.kind is Parameter.VAR_KEYWORD for each in parameters)


def keep_own_buffers(ddp: Callable[..., Any]) -> dict[str, Any]:
    """Return the argument with which DDP leaves buffers alone in forward passes.

    With torch 2.11 the argument also skips the broadcast at DDP's start. The ranks' buffers are
    then those that each rank built.

    Why: A task owns its buffers, as in the DeepSpeed engine.
    Version: torch 2.11 has `broadcast_buffers`; torch 2.13 has `forward_sync_buffers`
    Test: tests/compat/test_torch.py::test_our_calls_fit_the_signatures_of_torch_2_11
    Until: requirements.txt allows no torch without `forward_sync_buffers`, and no GPU machine has
        an older torch.
    """
    name = "forward_sync_buffers"
    return {name if takes_argument(ddp, name) else "broadcast_buffers": False}


def reduce_unused_parameters(module: "FSDPModule") -> bool:
    """Let a rank that does not use a parameter contribute a zero gradient, in place.

    Return False if this torch cannot. A model whose ranks use different parameters then hangs.

    Why: Without a gradient, FSDP2 leaves the parameter out of the rank's reduce-scatter.
    Version: torch 2.13 has the method; torch 2.11 does not
    Test: tests/compat/test_torch.py::test_fsdp2_of_torch_2_11_cannot_reduce_unused_parameters
    Until: requirements.txt allows no torch without `set_reduce_scatter_unused_params`, and no GPU
        machine has an older torch.
    """
    act = getattr(module, "set_reduce_scatter_unused_params", None)
    if act is not None:
        act(True)
    return act is not None


BLOCKING_CALLS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor"),
    *("all_gather_object", "broadcast_object_list", "gather", "scatter", "reduce_scatter"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv", "barrier"),
    # not isend and irecv, which P2POp compares with its own; the wait for their results is replaced
    "batch_isend_irecv",
)


@contextlib.contextmanager
def collectives_replaced(around: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    """Replace the functions of torch.distributed, and the wait for their results.

    `around` receives each function and returns its replacement.

    Why: The time in which a rank waits for other ranks is not recorded anywhere for gloo. Its
        flight recorder has no end times.
    Version: torch 2.13
    Test: tests/compat/test_torch.py::test_collectives_are_replaced_and_put_back
    Until: torch's flight recorder has the durations of gloo's collectives.
    """
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch._C._distributed_c10d import Work

    places = [(dist, name) for name in BLOCKING_CALLS]
    places += [(Work, "wait"), (functional, "wait_tensor")]
    before = [(place, name, getattr(place, name)) for place, name in places]
    for place, name, function in before:
        setattr(place, name, around(function))
    try:
        yield
    finally:
        for place, name, function in before:
            setattr(place, name, function)


@contextlib.contextmanager
def own_keys_per_restart() -> Iterator[None]:
    """Separate the store keys of torchrun's restarts, for groups made in the `with` block.

    Why: `torchrun --max_restarts` keeps its store, and torch joins each start under the same keys.
        A rank may then read the address of a process that has ended ("Gloo connectFullMesh failed
        with ... Connection refused"). In a script of 15 lines, all of 3 restarts failed.
    Version: torch 2.13
    Test: tests/compat/test_torch.py::test_torchrun_starts_killed_ranks_again
    Until: `_create_c10d_store` adds a prefix for each restart again, as it did before.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    # torch.distributed has a function of the same name as this module.
    module = vars(import_module("torch.distributed.rendezvous"))
    plain = module["_create_c10d_store"]

    def create(*args: object, **named: object) -> object:
        store = plain(*args, **named)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return store
        return PrefixStore(f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    module["_create_c10d_store"] = create
    try:
        yield
    finally:
        module["_create_c10d_store"] = plain
