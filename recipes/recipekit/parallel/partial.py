"""Which whole parameters get only a part of their gradient on each tensor-parallel rank: told by
the graph of a forward pass.

Behind a column-wise layer each rank computes with activations of its own heads or columns, until a
row-wise layer sums them. A parameter in between that every rank holds whole, such as the parameters
of Apertus' activation, gets a part of its gradient on each rank, and the parts have to be summed;
everywhere else the gradient is the same on all ranks. Walking the autograd graph from the logits
back, the gradient is whole at first, a part before the output of a row-wise layer, and whole again
before the input of a column-wise one, whose backward pass sums it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.distributed import tensor_parallel as styles

from ..spec.refusal import refuse


class _Mark(torch.autograd.Function):
    """A copy of x. From here back the gradient is whole, or `part` of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: bool) -> torch.Tensor:
        ctx.part = part
        return x.clone()  # not a view: Llama 4 writes into it

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def _marks_of(style: Any) -> tuple[bool | None, bool | None]:
    """Looks up (before the inputs, before the output) of a module of that style: is the gradient a
    part there? None: as behind it.
    """
    known: Any = styles
    if isinstance(style, known.RowwiseParallel):
        return (None, True) if style.input_layouts.is_shard() else (False, None)
    if isinstance(style, known.AllReduceParallel):
        return None, True
    # sums the gradient of what goes round the column-wise layer after it
    if isinstance(style, known.MlaKvAProjParallel):
        return None, False
    if (
        isinstance(style, known.ReplicatedWithGradAllReduce | known.MoeIdentityParallel)
        or type(style) is known.TensorParallelLayer
    ):
        return None, None
    return False, None


def partial_gradients(
    model: nn.Module, plan: Mapping[str, str], run: Callable[[nn.Module], torch.Tensor]
) -> frozenset[str]:
    """Return the whole parameters, layer numbers as `*`, whose gradients have to be summed over the
    tensor ranks.

    `model` is a small whole copy, real weights on one process, which gets hooks; `run` computes its
    logits. Raises `Refusal` for a parameter that is used on both sides of a cut: the sum of its
    gradients would count one of them twice.
    """
    rules = dict(plan)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    _mark_modules(model, rules)
    found = _found_in_graph(run(model).grad_fn, names)

    # styles that leave a parameter whole; the first sums by itself
    by_plan = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate")
    whole = {
        name
        for name in names.values()
        if styles._get_parameter_plan(name, rules) in (None, *by_plan[1:])
    }
    if both := sorted(found[True] & found[False] & whole):
        rule = (
            f"the plan uses {both[0]} both before and behind a sum over the ranks, so its gradient"
            " cannot be put together"
        )
        raise refuse(f"tp > 1 with {type(model).__name__}", rule, "use --tp 1")
    return frozenset(styles.replace_layer_number_by_wildcard(name) for name in found[True] & whole)


def _mark_modules(model: nn.Module, rules: dict[str, str]) -> None:
    """Give each module of a plan hooks that mark the graph before its inputs and its output."""
    known: Any = styles
    for name, module in model.named_modules():
        style = styles._get_parameter_plan(name, rules, is_weight=False)
        before, after = (
            _marks_of(known.ALL_PARALLEL_STYLES[style]) if style is not None else (None, None)
        )
        if before is not None:
            module.register_forward_pre_hook(
                lambda _, args, kwargs, part=before: (
                    _marked(args, part),
                    {key: _marked(value, part) for key, value in kwargs.items()},
                ),
                with_kwargs=True,
            )
        if after is not None:
            module.register_forward_hook(lambda _, args, output, part=after: _marked(output, part))


def _found_in_graph(logits: Any, names: dict[int, str]) -> dict[bool, set[str]]:
    """Walk the autograd graph back from the node of the logits; return {True: the parameters that
    get a part of their gradient, False: those that get all of it}.
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


def _marked(value: Any, part: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(_marked(inner, part) for inner in value)
    return _Mark.apply(value, part) if torch.is_tensor(value) and value.requires_grad else value
