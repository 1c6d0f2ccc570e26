"""DeepSpeed: attributes of its engine, optimizers, pipeline and modules that we replace."""

import contextlib
import errno
import functools
import importlib
import math
import shutil
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import torch
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid
    from torch import nn


class DeepSpeedEngine(Protocol):
    """The members of DeepSpeed 0.19.8's engine that our workarounds use.

    Some members are private, because the engine has no public equivalent.
    """

    device: "torch.device"
    module: "nn.Module"
    optimizer: Any  # torch's, or DeepSpeed's wrapper around it
    basic_optimizer: Any  # the inner one, which computes the update
    mpu: Any  # model-parallel groups, or None if DeepSpeed's own are right
    micro_batches: int  # micro-batches per step, under a pipeline
    micro_steps: int  # micro-batches so far
    most_norm: float  # ours: the largest gradient norm of a step that is taken
    _config: Any
    _global_grad_norm: Any
    enable_backward_allreduce: bool
    _take_model_step: Callable[..., None]
    clip_fp32_gradients: Callable[[], None]
    global_steps: int
    skipped_steps: int
    checkpoint_engine: "CheckpointEngine"
    _copy_recovery_script: Callable[[str], None]
    save_checkpoint: Callable[..., object]
    load_checkpoint: Callable[..., tuple[str | None, object]]
    _get_zero_ckpt_name: Callable[[str, str], str]

    def train_batch_size(self) -> int: ...
    def gradient_accumulation_steps(self) -> int: ...
    def gradient_clipping(self) -> float: ...
    def was_step_applied(self) -> bool: ...


class ZeroOptimizer(Protocol):
    """The members of DeepSpeed 0.19.8's wrappers around an optimizer that we use.

    Those with `partitioned` in their name exist under ZeRO-3 only, and those about reducing
    gradients under ZeRO-1 and ZeRO-2 only.
    """

    optimizer: "torch.optim.Optimizer"  # the inner one
    step: Callable[..., object]
    _global_grad_norm: object
    param_groups: list[dict[str, Any]]
    fp32_partitioned_groups_flat: "list[torch.Tensor]"
    fp16_partitioned_groups_flat_numel: list[int]
    clip_grad: float
    loss_scaler: "LossScalerBase"
    dynamic_loss_scale: bool
    reduction_stream: "torch.Stream | None"  # None if the device has no streams
    overlap_comm: bool
    clear_grad_attribute: "Callable[[nn.Parameter], None]"
    get_gradient_for_reduction: "Callable[[nn.Parameter], torch.Tensor | None]"


class Bf16Optimizer(Protocol):
    """The members of DeepSpeed 0.19.8's optimizer for ZeRO-1 in bf16 that we use."""

    fp32_groups_gradients: "list[list[torch.Tensor]]"
    fp32_groups_has_gradients: list[list[bool]]
    autoep_folding_tp_group: object
    _update_hp_grad: Callable[..., None]


class PartitionOptimizer(Protocol):
    """The members of DeepSpeed 0.19.8's optimizer for ZeRO-2 that we use."""

    _add_to_grad_partition_buffer: Callable[..., None]


class PipelineEngine(Protocol):
    """The members of DeepSpeed 0.19.8's pipeline engine that we use."""

    module: "nn.Module"
    num_stages: int
    grid: "PipelineParallelGrid"
    _INSTRUCTION_MAP: dict[Any, Callable[..., None]]


# The optimizer step
# --------------------------------------------------------------------------------------------------


def undo_hidden_step(engine: DeepSpeedEngine) -> None:
    """Make step 1 the first step that the optimizer takes.

    Why: DeepSpeed allocates the states of its ZeRO-0 mixed-precision optimizer by a step with zero
        gradients (unfused_optimizer.py, initialize_optimizer_states). This step decays the weights
        once. It also moves Adam's bias correction one step ahead, so the first update would be a
        quarter too small.
    Version: DeepSpeed 0.19.8
    Test: tests/optim/test_repairs.py::test_the_first_step_is_the_first
    Until: initialize_optimizer_states takes no step.
    """
    import torch
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        engine.basic_optimizer.state.clear()
        with torch.no_grad():
            for masters, weights in zip(
                engine.optimizer.fp32_groups, engine.optimizer.fp16_groups, strict=True
            ):
                for master, weight in zip(masters, weights, strict=True):
                    master.copy_(weight)


def set_micro_batches(engine: DeepSpeedEngine, micro_batches: int) -> None:
    """Set the number of micro-batches that each following step consumes on this rank.

    Call this function between two steps.

    Why: DeepSpeed ends a step when the total number of micro-batches is a multiple of a step's
        micro-batches (engine.py, is_gradient_accumulation_boundary). After DeepSpeed's own
        set_train_batch_size, a first step may therefore end early. For example, after three steps
        of two micro-batches, a step of four would end after two. This function restarts the count.
    Version: DeepSpeed 0.19.8
    Test: tests/optim/test_repairs.py::test_a_step_takes_another_number_of_micro_batches
    Until: set_train_batch_size restarts the count of micro-batches.
    """
    if (before := engine.gradient_accumulation_steps()) == micro_batches:
        return
    engine._config.train_batch_size = engine.train_batch_size() // before * micro_batches
    engine._config.gradient_accumulation_steps = engine.micro_batches = micro_batches
    engine.micro_steps = 0


def leave_gradients(engine: DeepSpeedEngine, compresses: bool) -> None:
    """Leave the next step's gradients unreduced and unclipped if its optimizer sends signs.

    Why: DeepSpeed sums and clips the gradients of an optimizer that it does not know.
    Version: DeepSpeed 0.19.8
    Test: tests/optim/test_repairs.py::test_gradients_are_left_to_an_optimizer_that_sends_signs
    Until: A client optimizer can ask for unreduced gradients.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    # If this is False, DeepSpeed reports one rank's overflow to all ranks.
    engine.enable_backward_allreduce = not compresses
    if compresses:
        engine._config.gradient_clipping = 0.0
        if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
            engine.optimizer.clip_grad = 0.0


def set_grad_norm(engine: DeepSpeedEngine, norm: object) -> None:
    """Make `get_global_grad_norm` return our own norm.

    Why: DeepSpeed computes no norm with a plain optimizer, and it never computes the norm of a
        momentum.
    Version: DeepSpeed 0.19.8
    Test: tests/optim/test_repairs.py::test_the_norm_of_a_step_of_signs_is_the_momentums
    Until: A client optimizer can report its norm.
    """
    engine._global_grad_norm = norm


def disable_clipping(engine: DeepSpeedEngine) -> None:
    """Prevent an engine with a plain optimizer from clipping.

    Why: Under a pipeline, clipping is wrong in every stage after the first: it counts only the
        parameters that tensor parallelism sharded (runtime/utils.py, clip_grad_norm_).
    Version: DeepSpeed 0.19.8
    Test: tests/optim/test_repairs.py::test_gradients_are_scaled_to_the_limit_and_never_up
    Until: clip_grad_norm_ counts every parameter of a pipeline stage.
    """
    engine.clip_fp32_gradients = lambda: None


def discard_steps(optimizer: "torch.optim.Optimizer", discards: Callable[[], bool]) -> None:
    """Make an optimizer of torch skip a step for which `discards()` returns True.

    The engine then counts the step as skipped.

    Why: DeepSpeed checks the norm only in its own optimizers, so with a plain optimizer it takes a
        step whose gradients are not finite.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_a_plain_optimizer_discards_a_step
    Until: The engine checks the norm of every optimizer.
    """

    def step(take_step: Callable[..., object], *given: object, **named: object) -> object:
        discarded = discards()
        vars(optimizer)["overflow"] = discarded  # the engine reads this after the step
        return None if discarded else take_step(*given, **named)

    wrap_step(optimizer, step)


def limit_norm(optimizer: ZeroOptimizer, limit: Callable[[], float]) -> None:
    """Make one of DeepSpeed's optimizers skip a step whose gradient norm is above `limit()`.

    `limit()` has the unit of `_global_grad_norm`, which remains the true norm. In fp16, the loss
    scale of such a step does not change.

    Why: DeepSpeed skips only steps whose norm is not finite.
    Version: DeepSpeed 0.19.8
    Test: tests/engine/test_most_norm.py::test_a_step_above_the_limit_changes_nothing
    Until: DeepSpeed can skip a step by its norm.
    """
    owner = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
    module = cast("Any", sys.modules[owner.__module__])
    # The unfused optimizer reports the norm of the scaled gradients.
    unscales = not hasattr(optimizer, "fp32_groups")
    scaler = _scaler_of(optimizer)
    take_step = optimizer.step

    def step(*given: object, **named: object) -> object:
        if (most := limit()) == math.inf:
            return take_step(*given, **named)
        scale = float(getattr(scaler, "cur_scale", 1.0)) if unscales else 1.0
        above: list[float] = []
        plain, before = module.is_invalid_grad_norm, dict(vars(scaler) if scaler else {})

        def invalid(norm: "torch.Tensor | float") -> bool:
            if plain(norm):
                return True
            if (value := float(norm) / scale) > most:
                above.append(value)
            return bool(above)

        module.is_invalid_grad_norm = invalid
        try:
            result = take_step(*given, **named)
        finally:
            module.is_invalid_grad_norm = plain
        if above:
            optimizer._global_grad_norm = above[0]
            if scaler:
                vars(scaler).update(before)
        return result

    optimizer.step = step


def _scaler_of(optimizer: object) -> Any:
    """Return the object with an optimizer's loss scale, or None."""
    return getattr(optimizer, "loss_scale_config", getattr(optimizer, "loss_scaler", None))


def record_counters(engine: DeepSpeedEngine) -> Callable[[], None]:
    """Return a function that sets an engine's counters and loss scale back to their present values.

    Why: DeepSpeed counts a step that it does not take, and the step is computed once more.
    Version: DeepSpeed 0.19.8
    Test: tests/runtime/test_replay.py::test_a_fault_that_does_not_return_changes_nothing
    Until: DeepSpeed has a function that forgets a step.
    """
    names = ("global_steps", "skipped_steps", "global_samples", "micro_steps")
    counters = {name: getattr(engine, name) for name in names}
    scaler = _scaler_of(engine.optimizer)
    scaling = dict(vars(scaler)) if scaler else {}

    def restore() -> None:
        for name, value in counters.items():
            setattr(engine, name, value)
        if scaler:
            vars(scaler).update(scaling)

    return restore


def record_cleared_gradients(optimizer: ZeroOptimizer) -> None:
    """Keep a cleared gradient's memory until ZeRO's reduction stream has finished with it.

    This has an effect only under ZeRO-1 or ZeRO-2 with overlap_comm, on a device with streams.

    Why: DeepSpeed reduces a gradient larger than the bucket from the gradient's own memory, on a
        second stream, and clears the gradient at once (stage_1_and_2.py, reduce_ipg_grads). If the
        reduction reads a copy of the gradient, only the copy is recorded on that stream. The
        backward pass may then overwrite the gradient before it is read, without an error. This
        concerns a parameter that crosses the border between two other ranks, a parameter whose
        gradient is reduced in another dtype, and every such parameter without reduce_scatter.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_a_gradient_is_not_freed_while_it_is_reduced
    Until: reduce_ipg_grads records the gradients that it clears.
    """
    from deepspeed.accelerator import get_accelerator

    stream = getattr(optimizer, "reduction_stream", None)
    accelerator = cast("Any", get_accelerator())
    if stream is None or not optimizer.overlap_comm or accelerator.resolves_data_dependency():
        return
    clear = optimizer.clear_grad_attribute

    def record_and_clear(parameter: "nn.Parameter") -> None:
        gradient = optimizer.get_gradient_for_reduction(parameter)
        if gradient is not None:
            gradient.record_stream(stream)
        clear(parameter)

    optimizer.clear_grad_attribute = record_and_clear


def before_step(engine: DeepSpeedEngine, act: Callable[[], None]) -> None:
    """Call `act` once per step, between the last backward pass and the optimizer.

    At that point every gradient is complete and summed over the ranks (except for 1-bit Adam's
    signs), and the weights have not changed. A function that is added later runs earlier.

    Why: DeepSpeed has no other hook of this kind for every ZeRO stage and for a pipeline.
    Version: DeepSpeed 0.19.8
    Test:
        tests/optim/test_repairs.py::test_what_watches_acts_before_the_step_and_what_follows_after_it
    Until: The engine has a hook before its step.
    """
    take_step = engine._take_model_step

    def acting(*args: object) -> None:
        act()
        take_step(*args)

    engine._take_model_step = acting


def after_step(engine: DeepSpeedEngine, act: Callable[[bool], None]) -> None:
    """Call `act` once per step, after the optimizer.

    The argument is True if the weights have changed. DeepSpeed skips the optimizer step if a
    gradient overflows.

    Why: DeepSpeed has no other hook of this kind for every ZeRO stage and for a pipeline.
    Version: DeepSpeed 0.19.8
    Test:
        tests/optim/test_repairs.py::test_what_watches_acts_before_the_step_and_what_follows_after_it
    Until: The engine has a hook after its step.
    """
    take_step = engine._take_model_step

    def acting(*args: object) -> None:
        take_step(*args)
        act(engine.was_step_applied())

    engine._take_model_step = acting


def sum_gradients_without_copy(optimizer: Bf16Optimizer) -> None:
    """Let ZeRO-1's bf16 optimizer add each gradient to its fp32 sum without an fp32 copy.

    The sums have the same bits, because the addition itself widens the gradient.

    Why: DeepSpeed converts each gradient to fp32 before it adds the gradient (bf16_optimizer.py,
        _update_hp_grad). The copy moves 8 more bytes per parameter and micro-batch.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_a_gradient_is_added_without_a_copy
    Until: _update_hp_grad adds the gradient in its own dtype.
    """
    plain = optimizer._update_hp_grad

    def add(weight: "nn.Parameter", group: int, index: int, clear_lp_grads: bool) -> None:
        sums = optimizer.fp32_groups_gradients[group][index]
        # AutoEP corrects gradients first. A wider gradient must be rounded before the addition.
        if (
            weight.grad is None
            or optimizer.autoep_folding_tp_group is not None
            or not _widens(weight.grad, sums)
        ):
            plain(weight, group, index, clear_lp_grads)
            return
        sums.data.add_(weight.grad.data.view(sums.shape))
        vars(weight)["_hp_grad"] = sums
        optimizer.fp32_groups_has_gradients[group][index] = True
        if clear_lp_grads:
            weight.grad.data.zero_()

    optimizer._update_hp_grad = add


def sum_partition_without_copy(optimizer: PartitionOptimizer) -> None:
    """Let ZeRO-2 add reduced gradients to a rank's fp32 sums without an fp32 copy.

    The sums have the same bits, because the addition itself widens the gradients.

    Why: DeepSpeed converts the gradients to fp32 before it adds them (zero/stage_1_and_2.py,
        _add_to_grad_partition_buffer). The copy moves 8 more bytes per parameter and micro-batch.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_a_partition_is_added_without_a_copy
    Until: _add_to_grad_partition_buffer adds the gradients in their own dtype.
    """
    plain = optimizer._add_to_grad_partition_buffer

    def add(output: "torch.Tensor | None", source: "torch.Tensor") -> None:
        if output is not None and _widens(source, output):
            output.add_(source)
        else:
            plain(output, source)

    optimizer._add_to_grad_partition_buffer = add


def _widens(source: "torch.Tensor", sums: "torch.Tensor") -> bool:
    """Return True if each value of `source` is a value of the dtype of `sums`."""
    import torch

    return torch.promote_types(source.dtype, sums.dtype) == sums.dtype


def wrap_step(optimizer: "torch.optim.Optimizer", wrap: Callable[..., Any]) -> None:
    """Make each step of an optimizer call `wrap` with the step function and its arguments.

    Why: If gradients overflow at the smallest loss scale, DeepSpeed raises a bare Exception
        (runtime/fp16/loss_scaler.py) in the middle of its engine.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_a_step_is_wrapped
    Until: DeepSpeed raises a specific error class.
    """
    optimizer.step = functools.partial(wrap, optimizer.step)


@contextlib.contextmanager
def backward_replaced(made: object, backward: Callable[..., Any]) -> Iterator[None]:
    """Replace an engine's `backward` within the `with` block.

    Why: The ranks are compared between the forward and the backward pass, where the engine has no
        hook.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_the_class_shows_again_after_a_replaced_method
    Until: The engine has a hook before its backward pass.
    """
    vars(made)["backward"] = backward
    try:
        yield
    finally:
        vars(made).pop("backward")


# A pipeline
# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def instructions_replaced(
    pipeline: PipelineEngine, replaced: dict[Any, Callable[..., None]]
) -> Iterator[None]:
    """Replace how a pipeline engine executes certain instructions within the `with` block.

    Why: A schedule has no hooks, but the engine looks up instructions in this table.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_the_class_shows_again_after_a_replaced_method
    Until: A pipeline engine has hooks around its instructions.
    """
    pipeline._INSTRUCTION_MAP = pipeline._INSTRUCTION_MAP | replaced
    try:
        yield
    finally:
        vars(pipeline).pop("_INSTRUCTION_MAP", None)  # restores the class's own attribute


def set_named_parameters(net: "nn.Module", named_parameters: Callable[..., Any]) -> None:
    """Rename the parameters of a pipeline's module.

    Why: PipelineModule names parameters by their layer's number, and it has no option for using the
        model's names.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_parameters_of_a_pipeline_have_the_models_names
    Until: PipelineModule keeps the names of its layers.
    """
    net.named_parameters = named_parameters


def set_tied_weights(net: Any, weights_and_groups: Callable[[], list[Any]]) -> None:
    """Set the weights whose gradients a pipeline sums, each with its group of ranks.

    Why: DeepSpeed ties only layers that are declared as TiedLayerSpec, but here a stage is the
        model itself.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_a_pipeline_sums_the_gradients_that_it_is_told_of
    Until: PipelineModule accepts tied weights by name.
    """
    net.get_tied_weights_and_groups = weights_and_groups


# Marks of a parameter
# --------------------------------------------------------------------------------------------------


def mark_shard(parameter: Any, sharded: bool) -> None:
    """Mark, for the clipping norm, whether tensor parallelism shards a parameter.

    The norm sums marked parameters over the tensor group and counts other parameters once.

    Why: DeepSpeed reads these attributes of a parameter but has no function that sets them.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_deepspeed_reads_the_marks_of_a_parameter
    Until: DeepSpeed has a function that sets these attributes.
    """
    parameter.model_parallel = parameter.tensor_model_parallel = sharded


def mark_copy(parameter: Any) -> None:
    """Mark a parameter as a copy of a lower pipeline rank's parameter, so that norms omit it.

    Why: DeepSpeed reads this attribute, but sets it only for TiedLayerSpec.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_deepspeed_reads_the_marks_of_a_parameter
    Until: DeepSpeed has a function that sets this attribute.
    """
    parameter.ds_pipe_replicated = True


# Initialisation
# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def broadcasting_scalars() -> Iterator[None]:
    """Let DeepSpeed broadcast parameters of shape () in the `with` block.

    An example is CLIP's logit_scale.
    Why: DeepSpeed views each parameter as bytes when it creates an engine or partitions a parameter
        (engine.py, _broadcast_model; partition_parameters.py, _zero_init_param). torch does not
        allow this view for a tensor without dimensions, so such a parameter has shape (1,) during
        the broadcast.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_a_parameter_without_dimension_is_broadcast
    Until: DeepSpeed broadcasts a parameter without dimensions.
    """
    import torch
    from deepspeed.runtime import engine as deepspeed_engine
    from deepspeed.runtime.zero import partition_parameters

    engines: Any = deepspeed_engine.DeepSpeedEngine
    inits: Any = partition_parameters.Init
    plain, plain_init = engines._broadcast_model, inits._zero_init_param

    def broadcast(made: DeepSpeedEngine) -> None:
        scalars = [parameter for parameter in made.module.parameters() if parameter.dim() == 0]
        for parameter in scalars:
            parameter.data = parameter.data.view(1)
        plain(made)
        for parameter in scalars:
            parameter.data = parameter.data.view(())

    def init(zero: object, parameter: Any) -> None:
        scalar = parameter.dim() == 0
        if scalar:
            parameter.data = parameter.data.view(1)
        plain_init(zero, parameter)
        if scalar:
            parameter.ds_shape = torch.Size()  # the shape of the gathered parameter

    engines._broadcast_model, inits._zero_init_param = broadcast, init
    try:
        yield
    finally:
        engines._broadcast_model, inits._zero_init_param = plain, plain_init


@contextlib.contextmanager
def parameters_kept(parameters: "Iterable[nn.Parameter]") -> Iterator[None]:
    """Let an engine that is created in the `with` block keep the dtype of these parameters.

    Why: DeepSpeed converts every parameter to the training dtype (engine.py,
        _cast_module_mixed_precision). Its setting `data_types.keep_in_fp32_modules` keeps only
        buffers.
    Version: DeepSpeed 0.19.8
    Test: tests/model/test_fp32_parameters.py::test_a_run_keeps_the_parameters_in_fp32
    Until: `keep_in_fp32_modules` keeps parameters.
    """
    engines = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
    plain = engines._cast_module_mixed_precision

    def cast(made: object, *given: object, **named: object) -> None:
        values = [(parameter, parameter.data) for parameter in parameters]
        plain(made, *given, **named)
        for parameter, value in values:
            parameter.data = value

    engines._cast_module_mixed_precision = cast
    try:
        yield
    finally:
        engines._cast_module_mixed_precision = plain


def skip_shm_op_build() -> None:
    """Prevent `init_distributed` from building an op that no run calls.

    Without this op, `inference_all_reduce` is torch's `all_reduce`.

    Why: DeepSpeed builds and opens the op on every CPU (comm/torch.py, build_shm_op), only for
        `inference_all_reduce`. The op takes half a minute to compile and allocates 66 MiB of
        /dev/shm per rank, which are never freed (csrc/cpu/comm/shm.cpp). If this memory is not
        available, the rank ends with a SIGBUS.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_the_op_of_shared_memory_is_not_built
    Until: init_distributed builds the op when it is first called.
    """
    # The attribute `torch` of deepspeed.comm is torch itself.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def silence_memory_logs() -> None:
    """Prevent the bf16 optimizer from printing the memory in use.

    Why: DeepSpeed prints six lines for each group (bf16_optimizer.py, see_memory_usage with force).
        The call also resets the device's peak memory.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_the_bf16_optimizer_prints_no_memory
    Until: bf16_optimizer.py calls see_memory_usage without force.
    """
    from deepspeed.runtime import bf16_optimizer

    bf16_optimizer.see_memory_usage = lambda *_, **__: None


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Disable DeepSpeed's log within the `with` block.

    Why: AutoEP warns about modules that it would not shard, although here it only describes the
        model.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_deepspeed_logs_nothing_for_a_while
    Until: AutoEP describes a model without warnings.
    """
    from deepspeed.utils import logger

    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


# Compiled ops
# --------------------------------------------------------------------------------------------------


def cache_cpu_info() -> None:
    """Read the CPU's properties only once.

    Why: The call takes a second. DeepSpeed makes the call twice for each of these ops and once for
        each CPU Adam.
    Version: DeepSpeed 0.19.8, py-cpuinfo 9.0
    Test: tests/compat/test_deepspeed.py::test_the_facts_of_the_cpu_are_read_once
    Until: DeepSpeed caches the result.
    """
    import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def keep_op(part: str, module: object) -> None:
    """Register a compiled op that we have loaded, so that DeepSpeed finds it.

    Why: DeepSpeed's own loader acquires torch's lock and checks the sources, which fails in a
        different user's folder. DeepSpeed loads an op once and keeps it in `_loaded_ops`.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_an_op_that_is_loaded_is_found
    Until: An op builder accepts a compiled file.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    OpBuilder._loaded_ops[part] = module


# Checkpoints
# --------------------------------------------------------------------------------------------------


def set_checkpoint_engine(made: DeepSpeedEngine, files: "CheckpointEngine") -> None:
    """Make an engine write and read its files through `files`.

    Why: `deepspeed.initialize` creates a built-in checkpoint engine, which the JSON selects.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_an_engine_writes_through_our_files
    Until: `deepspeed.initialize` accepts a checkpoint engine.
    """
    made.checkpoint_engine = files


def skip_recovery_script(made: DeepSpeedEngine) -> None:
    """Prevent a save from copying zero_to_fp32.py.

    Why: The save would copy a script into the staging folder, which is removed later. If the disk
        is full, the copy would end rank 0 in the middle of collectives.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_a_save_copies_no_script
    Until: save_checkpoint has a switch that disables the copy.
    """
    made._copy_recovery_script = lambda _: None


@contextlib.contextmanager
def copies_kept(step: Path, keep: Callable[[OSError], None]) -> Iterator[None]:
    """Pass errors from copying swap files into a step folder to `keep` in the `with` block.

    Why: DeepSpeed copies these files in the middle of a save (engine.py, save_checkpoint). If one
        rank's disk were full, the other ranks would wait forever in the collectives after the copy.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_a_copy_into_a_step_folder_fails_later
    Until: A checkpoint engine copies the swap files.
    """
    copytree = shutil.copytree

    def copy(source: Any, target: Any, *arguments: Any, **more: Any) -> Any:
        try:
            return copytree(source, target, *arguments, **more)
        except OSError as error:
            if not Path(target).is_relative_to(step):
                raise
            # the error of the first file
            reason = (
                str(error.args[0][0][-1]) if isinstance(error, shutil.Error) else error.strerror
            )
            keep(OSError(error.errno or errno.EIO, reason, str(target)))
            return target

    shutil.copytree = copy
    try:
        yield
    finally:
        shutil.copytree = copytree


def find_listed_files(made: Any, listed: Container[str]) -> None:
    """Let DeepSpeed find only files whose names are in `listed`.

    Why: DeepSpeed searches for files by a pattern. It would therefore read a stray
        mp_rank_99_model_states.pt as a different rank's file.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_a_file_that_is_not_listed_is_not_found
    Until: DeepSpeed records the names of a checkpoint's files.
    """

    def only_listed(find: Callable[..., list[str]]) -> Callable[..., list[str]]:
        return lambda *place: [path for path in find(*place) if Path(path).name in listed]

    made._get_all_ckpt_names = only_listed(type(made)._get_all_ckpt_names.__get__(made))
    if hasattr(module := made.module, "ckpt_layer_path_list"):  # a pipeline's module
        module.ckpt_layer_path_list = only_listed(type(module).ckpt_layer_path_list.__get__(module))


def set_clipping(optimizer: ZeroOptimizer, clipping: float) -> None:
    """Restore this start's clipping limit after a load.

    Why: The load restored the saved limit, but the user may have changed the limit since.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_a_load_keeps_the_settings_of_this_start
    Until: An optimizer's load_state_dict does not change its clipping.
    """
    optimizer.clip_grad = clipping


# counters of DeepSpeed's DynamicLossScaler
COUNTED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def with_counts(scaler: Any, saved: Any) -> Any:
    """Return this start's loss scaler with the saved scaler's scale and counters.

    The window, the hysteresis, the smallest scale and a constant scale keep the values from this
    start's JSON.

    Why: DeepSpeed replaces the scaler with the saved scaler, including all settings.
    Version: DeepSpeed 0.19.8
    Test: tests/optim/test_fp16.py::test_a_resume_keeps_the_scale_and_takes_the_users_window
    Until: DeepSpeed saves only the counters of a scaler.
    """
    if scaler.dynamic and saved.dynamic:
        vars(scaler).update({name: vars(saved)[name] for name in COUNTED})
        scaler.cur_hysteresis = min(scaler.cur_hysteresis, scaler.delayed_shift)
    return scaler


def set_scaler(optimizer: ZeroOptimizer, scaler: "LossScalerBase") -> None:
    """Restore an optimizer's loss scaler after a load.

    Why: The load restored the saved scaler, with the settings from the earlier start.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_a_load_keeps_the_settings_of_this_start
    Until: DeepSpeed saves only the counters of a scaler.
    """
    optimizer.loss_scaler = scaler
    optimizer.dynamic_loss_scale = scaler.dynamic


def rebuilt(kind: Any, attributes: Mapping[str, Any]) -> Any:
    """Create an object of a DeepSpeed class from its attributes, as pickle does.

    Why: The classes that DeepSpeed pickles have constructors whose arguments differ from the stored
        attributes.
    Version: DeepSpeed 0.19.8
    Test: tests/compat/test_deepspeed.py::test_an_object_is_rebuilt_without_its_constructor
    Until: DeepSpeed's checkpoints contain only tensors and numbers.
    """
    made = kind.__new__(kind)
    made.__dict__.update(attributes)
    return made


def let_auto_ep_read_outputs() -> None:
    """Let AutoEP look up by class name which outputs transformers can record for a model.

    Why: transformers 5.23 made its registry accept models as keys, without a default. AutoEP reads
        and writes the registry by the name of a class, with a default.
    Version: deepspeed 0.19.8, transformers 5.23.0
    Test: tests/compat/test_deepspeed.py::test_auto_ep_reads_the_outputs_that_can_be_recorded
    Until: AutoEP passes models to the registry.
    """
    from transformers.utils import output_capturing

    registry = output_capturing._CAN_RECORD_REGISTRY
    kind = cast("type[dict[object, object]]", type(registry))
    if kind is dict or getattr(kind, "accepts_names", False):
        return

    class Registry(kind):
        accepts_names = True

        def get(self, key: object, default: object = None) -> object:
            return dict.get(self, key, default) if isinstance(key, str) else super().get(key)

        def __setitem__(self, key: object, value: object) -> None:
            if isinstance(key, str):
                dict.__setitem__(self, key, value)
            else:
                super().__setitem__(key, value)

    cast("object", registry).__class__ = Registry
