"""What a model computes element by element, in few kernels: torch.compile of the model's own code,
and of parts of ours.

Eager PyTorch reads and writes each intermediate result: half of the time of a 1.3B model's step on
an H200.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

ROTARY = "apply_rotary_pos_emb"  # transformers' name of what turns queries and keys by their places
_switched = {"on": False}


def switch(on: bool, deterministic: bool = False, asked: bool = True) -> None:
    """Makes the functions that are `fused` compiled ones, or plain ones.

    `deterministic`: no kernel is chosen by how fast it was. Unless `asked` for, what cannot be
    compiled is computed as it is, which torch tells in a warning.
    """
    _switched["on"] = on
    if not on:
        return
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    dynamo.suppress_errors = not asked
    # else a backward pass is compiled when it is first run, where no error is suppressed
    functorch.force_non_lazy_backward_lowering = not asked
    # a pool of compilers in each rank would outlive a killed one, for a few small kernels
    inductor.compile_threads = 1
    inductor.deterministic = deterministic


def compiles() -> bool:
    """Returns True while `switch` is on."""
    return _switched["on"]


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function of tensors, which is compiled where it is called while `switch` is on,
    anew for each shape.
    """
    # not before it is called: the compiler takes a second to import
    compiled = cache(partial(torch.compile, function, dynamic=False))

    @wraps(function)
    def chosen(*arguments: Any) -> Any:
        return (compiled() if _switched["on"] else function)(*arguments)

    return chosen


def compile_layers(models: Iterable[nn.Module], whole: bool) -> tuple[int, int, int]:
    """Compiles in place, at their first use; returns how many layers as a whole, norms and
    attentions' rotary embeddings outside of these.

    `whole` is for layers without hooks and collectives inside. Norms and rotary embeddings are
    functions of tensors alone, so hooks, collectives and partitioned weights see the model that
    they would see without it. The values are those of the code as it is, to rounding: one kernel
    keeps in fp32 what several round in between. The modules' classes, and other models of theirs,
    stay as they are.
    """
    made: dict[Any, Callable[..., Any]] = {}
    found, inside = [0, 0, 0], set[int]()
    for module in (module for model in models for module in model.modules()):
        forward = type(module).forward
        if id(module) in inside or "forward" in vars(module):
            continue
        if whole and isinstance(module, GradientCheckpointingLayer):
            inside |= {id(part) for part in module.modules()}
            module.forward = MethodType(_once(made, forward, torch.compile), module)
            if module.gradient_checkpointing:
                # To stop early torch raises an error where the last tensor is saved, here inside
                # what was compiled: a SystemError in torch 2.11. Not so where ZeRO-3 works inside:
                # past the early stop its hooks release weights that the backward pass has gathered.
                layer: Any = module
                layer._gradient_checkpointing_func = partial(
                    layer._gradient_checkpointing_func, early_stop=False
                )
            found[0] += 1
        elif is_norm(module):
            module.forward = MethodType(_once(made, forward, torch.compile), module)
            found[1] += 1
        elif turns(forward):
            module.forward = MethodType(_once(made, forward, _with_rotary_compiled), module)
            found[2] += 1
    return found[0], found[1], found[2]


def is_norm(module: nn.Module) -> bool:
    """Returns True for a norm that is written in several operations: torch's own are one kernel
    already.
    """
    cls = type(module)
    return (
        cls.__name__.endswith("Norm")
        and not cls.__module__.startswith("torch.")
        and not any(module.children())
    )


def turns(forward: Any) -> bool:
    """Returns True for the forward of an attention that calls `ROTARY`, a plain function beside
    it.
    """
    return (
        isinstance(forward, FunctionType)
        and ROTARY in forward.__code__.co_names
        and isinstance(forward.__globals__.get(ROTARY), FunctionType)
    )


def _once(
    made: dict[Any, Callable[..., Any]], function: Any, make: Callable[[Any], Any]
) -> Callable[..., Any]:
    if function not in made:
        made[function] = make(function)
    return made[function]


def _with_rotary_compiled(forward: Any) -> Callable[..., Any]:
    """Makes a copy of a forward that finds `ROTARY` compiled, and else what the forward finds."""
    found = forward.__globals__ | {ROTARY: torch.compile(forward.__globals__[ROTARY])}
    copy = FunctionType(
        forward.__code__, found, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy
