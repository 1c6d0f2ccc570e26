"""The second computation of a step whose loss or gradient is not finite.

A fault of the hardware seldom comes twice. Such a step is computed again, from the same rows and
the same random numbers. If the result is finite, the run continues as if nothing had happened.
Otherwise, hooks of the second computation have seen which module was the first.
"""

import contextlib
import platform
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..checkpoints.load import restore_rng_states
from ..checkpoints.save import rng_states
from ..checkpoints.state import TrainState
from ..kernels.compiled import fusion_enabled
from ..spec.engine import Engine
from ..watch.blame import BadValue, first_of_ranks


@dataclass(frozen=True)
class StepStart:
    """The state before a step that changes even if the engine does not take the step.

    It consists of the random generators, the engine's counters and the run's number of skipped
    steps. Recording them takes tens of microseconds and does not wait for the device.
    """

    engine: Engine
    state: TrainState
    generators: dict[str, Any]
    restore_counters: Callable[[], None]
    skipped: int

    @classmethod
    def record(cls, engine: Engine, state: TrainState) -> "StepStart":
        return cls(engine, state, rng_states(), engine.record_counters(), state.get("skipped", 0))

    @property
    def taken(self) -> bool:
        """Return True if the step that followed has changed the weights."""
        return self.state.get("skipped", 0) == self.skipped

    def restore(self) -> None:
        """Return to the start of a step that was not taken."""
        restore_rng_states(self.generators)
        self.restore_counters()
        if self.skipped:
            self.state["skipped"] = self.skipped
        else:
            self.state.pop("skipped", None)


Result = TypeVar("Result")


def compute_again(
    start: StepStart, take: Callable[[], Result], is_finite: Callable[[Result], bool]
) -> tuple[Result, BadValue | None]:
    """Compute a step that was not taken once more (a collective operation).

    Return (its result, the first value on all ranks that was not finite, or None). If the result is
    finite, the engine has taken the step. Compiled code ignores new hooks. If there is any, the
    step is computed a third time without it to find the value.
    """
    result, found = try_again(start, take, contextlib.nullcontext())
    if not is_finite(result) and fusion_enabled():
        result, found = try_again(start, take, torch.compiler.set_stance("force_eager"))
    return result, None if is_finite(result) else find_first(found)


def try_again(
    start: StepStart, take: Callable[[], Result], mode: contextlib.AbstractContextManager[object]
) -> tuple[Result, list[BadValue]]:
    """Compute a step from its start in a mode. Return (its result, this rank's bad values)."""
    start.restore()
    with mode, FiniteChecks(start.engine.module, start.engine.device) as checks:
        result = take()
    return result, checks.found


def find_first(own: list[BadValue]) -> BadValue | None:
    """Return the first of all ranks' bad values (a collective operation)."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return first_of_ranks([value for values in everyone for value in values])


def describe_rank(device: torch.device) -> tuple[str, str]:
    """Return (this rank's host, its device)."""
    if device.type == "cpu":
        return socket.gethostname(), platform.machine()
    return socket.gethostname(), f"{device}, {torch.get_device_module(device).get_device_name()}"


def where_ranks_are(device: torch.device) -> list[tuple[str, str]]:
    """Return (host, device) of each rank (a collective operation)."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, describe_rank(device))
    return everyone


@dataclass
class FiniteChecks:
    """Hooks that look for values that are not finite, within a `with` block around one step.

    They see the output of each module, the gradient of each output, and the gradient of each
    parameter before it is summed over the ranks. Under FSDP2, gradients of parameters are not seen,
    because autograd computes them for other tensors. `found` has the first value of the forward
    passes and the first value of the backward passes.
    """

    root: nn.Module
    device: torch.device
    found: list[BadValue] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.undo = contextlib.ExitStack()
        self.place = (dist.get_rank(), *describe_rank(self.device))
        self.order = 0
        self.passes: Counter[object] = Counter()  # micro-batches seen by a module or parameter
        self.inputs_clean = False  # of the forward value in `found`

    def __enter__(self) -> "FiniteChecks":
        hooked: set[int] = set()  # ids of parameters
        for name, module in self.root.named_modules():
            look = self._output_hook(name or type(module).__name__)
            self._keep(module.register_forward_hook(look, with_kwargs=True))
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and id(parameter) not in hooked:  # it may be shared
                    hooked.add(id(parameter))
                    hook = self._gradient_hook(f"{name}.{own}".lstrip("."), "gradient")
                    self._keep(parameter.register_hook(hook))
        self._keep(self.root.register_forward_pre_hook(self._count_micro_batch))
        return self

    def __exit__(self, *_: object) -> None:
        self.undo.close()

    def _keep(self, handle: RemovableHandle) -> None:
        self.undo.callback(handle.remove)

    def _count_micro_batch(self, root: nn.Module, inputs: object) -> None:
        self.passes[self._phase()] += 1

    def _phase(self) -> tuple[str, int]:
        return "phase", getattr(self.root, "active_phase", 0)

    def _output_hook(self, name: str) -> Callable[..., None]:
        def look(module: object, inputs: object, named: object, output: object) -> None:
            recomputed = torch._C._current_graph_task_id() != -1
            if recomputed:  # activation checkpointing, in a backward pass
                self.passes[name] += 1
            micro_batch = self.passes[name if recomputed else self._phase()]
            self._look_forward(name, micro_batch, (inputs, named), output)
            for value in plain_tensors(output):
                if value.requires_grad:
                    gradient = "gradient of the output"
                    value.register_hook(self._gradient_hook(name, gradient, micro_batch))

        return look

    def _look_forward(self, name: str, micro_batch: int, inputs: object, output: object) -> None:
        """Note an output that is not finite.

        A module with finite inputs is to blame. It comes after the modules inside it whose inputs
        it has made itself.
        """
        self.order += 1
        if self.inputs_clean or not is_bad(output):
            return
        self.inputs_clean = not is_bad(inputs, masks=True)
        if self.inputs_clean or not any(not value.backward for value in self.found):
            self.found = [value for value in self.found if value.backward]
            self.found.append(self._value(name, "output", False, micro_batch))

    def _gradient_hook(
        self, name: str, what: str, micro_batch: int | None = None
    ) -> Callable[[torch.Tensor], None]:
        """Return a hook of a gradient. Without a micro-batch, it counts its own calls."""
        calls = 0

        def look(gradient: torch.Tensor) -> None:
            nonlocal calls
            calls += 1
            self.order += 1
            if not any(value.backward for value in self.found) and is_bad(gradient):
                self.found.append(self._value(name, what, True, micro_batch or calls))

        return look

    def _value(self, name: str, what: str, backward: bool, micro_batch: int) -> BadValue:
        """Return a bad value. A pipeline's modules have the number of their stage in front."""
        stage, _, rest = name.partition(".")
        number, name = (int(stage), rest or "the stage") if stage.isdecimal() else (0, name)
        rank, host, device = self.place
        return BadValue(rank, host, device, name, what, backward, micro_batch, number, self.order)


def plain_tensors(values: object) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors in nested lists, dicts and dataclasses of values.

    Subclasses are left out: logits have one that rejects other operations if their loss is computed
    in chunks.
    """
    for value in tree_leaves(values):
        if type(value) in (torch.Tensor, nn.Parameter) and value.is_floating_point():
            yield value


def is_bad(values: object, masks: bool = False) -> bool:
    """Return True if any tensor in `values` has a NaN or an infinity. This waits for the device.

    With `masks`, minus infinity is allowed, because attention masks contain it.
    """
    for value in tree_leaves(values):
        if not torch.is_tensor(value) or not value.is_floating_point() or not value.numel():
            continue
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            local = value.to_local() if isinstance(value, DTensor) else value
            bad = local.isnan() | local.isposinf() if masks else local.isfinite().logical_not()
            if bool(bad.any()):
                return True
    return False
