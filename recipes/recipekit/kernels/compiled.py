"""Fusion of element-wise operations into a few kernels, with torch.compile.

Both the model's own code and parts of our code are compiled. Eager PyTorch reads and writes each
intermediate result, which takes half of a 1.3B model's step time on an H200.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..compat.torch import set_activation_budget, set_compiler, set_forward
from ..compat.transformers import (
    forward_of_layer,
    set_layer_forward,
    without_early_stop,
    without_old_names,
)

ROTARY = "apply_rotary_pos_emb"  # transformers' function that rotates queries and keys by position
COMPILER_FIX = "repair the compiler there (torch logged its error), or use --compile off"
_switched = {"on": False, "deterministic": False}


def set_fusion(on: bool, deterministic: bool = False, asked: bool = True) -> None:
    """Switch the `fused` functions to their compiled or plain versions.

    If `deterministic` is True, no kernel is selected by measured speed. If `asked` is False, code
    that cannot be compiled runs uncompiled, and torch prints a warning.
    """
    _switched.update(on=on, deterministic=deterministic)
    if on:
        set_compiler(asked)


def set_budget(budget: float, seq_len: int) -> None:
    """Set the fraction of the activations that compiled layers keep, from 0 to 1.

    Packed attention counts as if each document filled a row of `seq_len` tokens. All ranks then
    choose the same values to keep, whatever documents they see first.
    """

    def flops(query: torch.Tensor, *_: object, **named: object) -> int:
        return 2 * query.numel() * seq_len  # (tokens, heads, d); a causal row has half the scores

    attention = torch.ops.recipekit.attention_by_document, torch.ops.torch_attn._varlen_attn
    set_activation_budget(budget, dict.fromkeys(attention, flops) if budget < 1 else {})


def fusion_enabled() -> bool:
    """Return True while `set_fusion` is on."""
    return _switched["on"]


@dataclass(frozen=True)
class CompilerCounts:
    """The number of graphs, graph breaks and failed frames of torch.compile in this process.

    A frame is one call of a Python function. A frame that fails runs uncompiled.
    """

    graphs: int
    breaks: int
    failed: int

    def __str__(self) -> str:
        counted = ((self.graphs, "graph"), (self.breaks, "graph break"), (self.failed, "failure"))
        return ", ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in counted)


def compiler_counts() -> CompilerCounts:
    """Return this process's counts since torch was imported."""
    from torch._dynamo.utils import counters

    frames = counters["frames"]
    return CompilerCounts(
        graphs=counters["stats"]["unique_graphs"],
        breaks=sum(counters["graph_break"].values()),
        failed=frames["total"] - frames["ok"],
    )


def failed_ranks(everyone: Sequence[CompilerCounts]) -> list[int]:
    """Return the ranks on which torch.compile failed more often than on another rank."""
    least = min(counts.failed for counts in everyone)
    return [rank for rank, counts in enumerate(everyone) if counts.failed > least]


def _compile(function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    """Return a function that compiles `function` at its first call."""
    # The option holds for each compilation. A value in torch._inductor.config would be lost after
    # the first one, because torch 2.13 then calls use_deterministic_algorithms, which sets it too.
    options: dict[str, str | int | bool | Callable[..., Any]] = {}
    if _switched["deterministic"]:
        options["deterministic"] = True
    return torch.compile(function, dynamic=dynamic, options=options or None)


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of a tensor function that is compiled while `set_fusion` is on.

    The function is compiled separately for each new shape.
    """
    # Do not compile before the first call, because importing the compiler takes a second.
    compiled = cache(partial(_compile, function, dynamic=False))

    @wraps(function)
    def chosen(*arguments: object) -> Any:
        return (compiled() if _switched["on"] else function)(*arguments)

    return chosen


def compile_layers(models: Iterable[nn.Module], full_layers: bool) -> tuple[int, int, int]:
    """Make layers, norms and rotary embeddings compile when they are first used, in place.

    Return the number of full layers, of norms, and of attentions with rotary embeddings. The last
    two numbers count only modules outside the compiled layers.

    Set `full_layers` only if the layers contain no hooks or collectives. Norms and rotary
    embeddings are pure functions of tensors, so hooks, collectives and partitioned weights are
    unaffected by their compilation. The values are equal up to rounding, because a fused kernel
    keeps intermediate results in fp32 that separate kernels would round.

    The modules' classes are not changed, and neither are other models that use these classes.
    """
    made: dict[Any, Callable[..., Any]] = {}
    found, inside = [0, 0, 0], set[int]()
    for module in (module for model in models for module in model.modules()):
        forward = without_old_names(forward_of_layer(module))
        if id(module) in inside or "forward" in vars(module):
            continue
        if full_layers and isinstance(module, GradientCheckpointingLayer):
            inside |= {id(part) for part in module.modules()}
            compiled = MethodType(_compile_cached(made, forward, _compile), module)
            set_layer_forward(module, compiled)
            if module.gradient_checkpointing:
                without_early_stop(module)
            found[0] += 1
        elif is_norm(module):
            set_forward(module, MethodType(_compile_cached(made, forward, _compile), module))
            found[1] += 1
        elif applies_rotary(forward):
            set_forward(
                module, MethodType(_compile_cached(made, forward, _with_rotary_compiled), module)
            )
            found[2] += 1
    return found[0], found[1], found[2]


def is_norm(module: nn.Module) -> bool:
    """Return True if `module` is a norm that consists of several operations.

    torch's own norms are excluded because they already are a single kernel.
    """
    cls = type(module)
    return (
        cls.__name__.endswith("Norm")
        and not cls.__module__.startswith("torch.")
        and not any(module.children())
    )


def applies_rotary(forward: object) -> bool:
    """Return True if an attention's forward calls `ROTARY`, a function in its module."""
    return (
        isinstance(forward, FunctionType)
        and ROTARY in forward.__code__.co_names
        and isinstance(forward.__globals__.get(ROTARY), FunctionType)
    )


def _compile_cached(
    made: dict[Any, Callable[..., Any]], function: object, make: Callable[[Any], Any]
) -> Callable[..., Any]:
    if function not in made:
        made[function] = make(function)
    return made[function]


def _with_rotary_compiled(forward: FunctionType) -> Callable[..., Any]:
    """Return a copy of a forward in which the global name `ROTARY` is the compiled function."""
    found = forward.__globals__ | {ROTARY: _compile(forward.__globals__[ROTARY])}
    copy = FunctionType(
        forward.__code__, found, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy
