"""Detection of unsharded parameters whose gradient is only partial on each tensor-parallel rank.

After a column-wise layer, each rank computes with only some of the heads or columns, until a
row-wise layer sums the activations. An unsharded parameter in between receives a partial gradient
on each rank, and these gradients must be summed. The parameters of Apertus' activation are an
example. Everywhere else the gradient is the same on all ranks.

The detection walks the autograd graph back from the logits, where the gradient is complete. The
gradient is partial before the output of a row-wise layer. It is complete again before the input of
a column-wise layer, because that layer's backward pass sums the gradient.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from transformers.distributed import tensor_parallel as styles
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from ..compat.transformers import only_hands_out_shards, style_of, without_layer_numbers
from ..spec.errors import config_error
from .tensor import SharedExperts


class _PartContext(Protocol):
    """The value that the forward pass keeps for the backward pass."""

    part: bool


class _PartialGradMark(torch.autograd.Function):
    """Copy of x that marks whether the gradient before this point in the graph is partial."""

    @staticmethod
    def forward(ctx: _PartContext, x: torch.Tensor, is_partial: bool) -> torch.Tensor:
        ctx.part = is_partial
        return x.clone()  # a copy instead of a view, because Llama 4 writes into it

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def _marks_of_style(style: object) -> tuple[bool | None, bool | None]:
    """Return (before the inputs, before the output): True where the gradient is partial.

    Both positions belong to the module with this style. None means the same as after the module.
    """
    if isinstance(style, styles.RowwiseParallel):
        return (None, True) if style.input_layouts.is_shard() else (False, None)
    if isinstance(style, SharedExperts):
        return False, True
    if isinstance(style, styles.AllReduceParallel):
        return None, True
    # This style sums the gradient of the input that bypasses the next column-wise layer.
    if isinstance(style, styles.MlaKvAProjParallel):
        return None, False
    if (
        isinstance(style, styles.ReplicatedWithGradAllReduce | styles.MoeIdentityParallel)
        or type(style) is styles.TensorParallelLayer
        or only_hands_out_shards(style)
    ):
        return None, None
    return False, None


def partial_gradients(
    model: nn.Module, plan: Mapping[str, str], forward: Callable[[nn.Module], torch.Tensor]
) -> frozenset[str]:
    """Return the unsharded parameters whose gradients must be summed over the tensor ranks.

    In the returned names, layer numbers are replaced by `*`. `model` is a small unsharded copy with
    real weights on one process; this function adds hooks to it. `forward` computes its logits.
    Raises `ConfigError` for a parameter that is used on both sides of a sum over the ranks, because
    summing would count one of its gradients twice.
    """
    rules = dict(plan)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    _mark_modules(model, rules)
    found = _params_in_graph(forward(model).grad_fn, names)

    # Styles that leave a parameter unsharded. The first style sums gradients itself.
    by_plan = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate")
    whole = {name for name in names.values() if style_of(name, rules) in (None, *by_plan[1:])}
    if both := sorted(found[True] & found[False] & whole):
        rule = (
            f"the plan uses {both[0]} both before and behind a sum over the ranks, so its gradient"
            " cannot be put together"
        )
        raise config_error(f"tp > 1 with {type(model).__name__}", rule, "use --tp 1")
    return frozenset(without_layer_numbers(name) for name in found[True] & whole)


def _mark_modules(model: nn.Module, rules: dict[str, str]) -> None:
    """Add hooks that mark the graph before the inputs and the output of each module in a plan."""
    for name, module in model.named_modules():
        style = style_of(name, rules, is_weight=False)
        before, after = (
            _marks_of_style(ALL_PARALLEL_STYLES[style]) if style is not None else (None, None)
        )
        if before is not None:
            module.register_forward_pre_hook(
                lambda _, args, kwargs, part=before: (
                    _mark_tensor(args, part),
                    {key: _mark_tensor(value, part) for key, value in kwargs.items()},
                ),
                with_kwargs=True,
            )
        if after is not None:
            module.register_forward_hook(
                lambda _, args, output, part=after: _mark_tensor(output, part)
            )


def _params_in_graph(logits: object, names: dict[int, str]) -> dict[bool, set[str]]:
    """Walk the autograd graph back from the logits' node and return its parameters.

    The result is {True: parameters with a partial gradient, False: parameters with a complete one}.
    """
    found: dict[bool, set[str]] = {True: set(), False: set()}
    seen: set[tuple[Any, bool]] = set()
    ahead: list[tuple[Any, bool]] = [(logits, False)]
    while ahead:
        node, part = ahead.pop()
        if node is None or (node, part) in seen:
            continue
        seen.add((node, part))
        part = getattr(node, "part", part)
        if hasattr(node, "variable"):
            found[part].add(names[id(node.variable)])
        ahead += [(other, part) for other, _ in node.next_functions]
    return found


def _mark_tensor(value: object, is_partial: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(_mark_tensor(inner, is_partial) for inner in value)
    return (
        _PartialGradMark.apply(value, is_partial)
        if torch.is_tensor(value) and value.requires_grad
        else value
    )
