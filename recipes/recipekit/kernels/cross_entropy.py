"""Computes the cross-entropy of a head's logits, which are never there as a whole: made block by
block, and again in the backward.

Where one block would hold them all, they are made at once and kept, which takes fewer operations.

A block holds some columns of all rows, so that the gradient of a block's weights is complete when
the block is done, without a sum over blocks in another dtype, and so that tensor parallelism, which
cuts the columns too, adds two all-reduces in all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..spec.task import IGNORE
from .blocks import BLOCK, CPU_BLOCK, columns_at_once
from .compiled import compiles, fused


@dataclass(frozen=True)
class Part:
    """Says which columns of the logits a tensor-parallel rank computes: as many as its weight has
    rows, from `start` on.
    """

    start: int
    group: dist.ProcessGroup


Chain = Callable[[torch.Tensor], torch.Tensor]  # what a model does to each logit by itself


@dataclass(frozen=True)
class Head:
    """A linear head, and the rest of the way from hidden states to logits.

    `weight` (V, D) and `bias` (V,) as for `nn.functional.linear`. `chain` is what the model does to
    the head's output, each logit by itself. With `part`, the weight and the bias are those columns
    of the logits that this rank computes.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    chain: Chain | None = None
    part: Part | None = None


def token_losses(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, block: int | None = None
) -> torch.Tensor:
    """Compute the loss of each token, of the shape of `labels` and in fp32 (fp64 for fp64), 0
    where the label is IGNORE.

    `hidden` (..., D), `labels` (...) int64. The losses are
    cross_entropy(chain(linear(hidden, weight, bias)).float(), labels). Keeps for the backward pass
    its inputs and a number for each token, or the logits if one block holds them all. Under
    autocast it computes in autocast's dtype. With a part (a collective), `hidden` and the losses
    are the same on all ranks. A label that is no column gives an infinite loss. `block` is how many
    logits exist at a time.
    """
    return _computed(hidden, head, labels, block, likeliest=False)[0]


def losses_and_tokens(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, block: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `token_losses`, and for each token the column of the largest logit, int64: the first
    of equal ones, as torch's argmax.
    """
    losses, tokens = _computed(hidden, head, labels, block, likeliest=True)
    return losses, tokens


def _computed(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, block: int | None, likeliest: bool
) -> Any:
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    num_columns = len(head.weight)
    block = block or (CPU_BLOCK if device == "cpu" else BLOCK)
    if head.part is None and columns_at_once(labels.numel(), num_columns, block) == num_columns:
        return _of_whole_logits(hidden, head, labels, likeliest)
    plan = _Plan(head.chain, head.part, block, likeliest)
    losses, tokens = _TokenLosses.apply(
        hidden.flatten(0, -2), head.weight, head.bias, labels.flatten(), plan
    )  # type: ignore[misc]
    return losses.view(labels.shape), tokens.view(labels.shape) if likeliest else tokens


def _of_whole_logits(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, likeliest: bool
) -> Any:
    weight, bias, chain = head.weight, head.bias, head.chain
    with torch.autocast(hidden.device.type, enabled=False):
        # functional.linear, since ZeRO-3 (DeepSpeed 0.19.8) puts one there that keeps no gathered
        # weight
        logits = functional.linear(
            hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        ).flatten(0, -2)
        logits = (chain(logits) if chain else logits).to(
            torch.promote_types(hidden.dtype, torch.float32)
        )
        words, inside = labels.flatten(), (labels >= 0).logical_and_(labels < len(weight)).flatten()
        losses = functional.cross_entropy(
            logits, words.where(inside, IGNORE), ignore_index=IGNORE, reduction="none"
        )
        tokens = logits.detach().argmax(1).view(labels.shape) if likeliest else labels.new_empty(0)
        return losses.masked_fill(~inside & (words != IGNORE), torch.inf).view(labels.shape), tokens


@dataclass(frozen=True)
class _Plan:
    """How `_TokenLosses` computes: through `chain`, this rank's `part` of the columns, `block`
    logits at a time; `likeliest` asks for the columns of the largest logits.
    """

    chain: Chain | None
    part: Part | None
    block: int
    likeliest: bool


class _Running(NamedTuple):
    """Running values of each token, (N,), over the blocks of columns.

    `peak` is the largest logit, finite because a block may hold -inf only. `target` is the label's
    logit, `total` the sum of exp(logit - peak).
    """

    peak: torch.Tensor
    target: torch.Tensor
    total: torch.Tensor

    @classmethod
    def start(cls, hidden: torch.Tensor, labels: torch.Tensor) -> "_Running":
        exact = torch.promote_types(hidden.dtype, torch.float32)
        peak = hidden.new_full(labels.shape, torch.finfo(exact).min, dtype=exact)
        return cls(peak, torch.full_like(peak, -torch.inf), torch.zeros_like(peak))


class _TokenLosses(torch.autograd.Function):
    """(N, D), (V, D), (V,), (N,) -> (N,), and (N,) of the likeliest columns, or (0,)"""

    @staticmethod
    def forward(
        ctx: Any, hidden: Any, weight: Any, bias: Any, labels: Any, plan: _Plan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        part, running = plan.part, _Running.start(hidden, labels)
        chosen = torch.zeros_like(labels) if plan.likeliest else labels.new_empty(0)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns in _blocks(hidden, weight, plan.block):
                logits = _logits(hidden, weight, bias, columns)
                logits = plan.chain(logits) if plan.chain else logits  # (N, columns)
                # Compiled code converts the logits itself, and stores none in the other dtype.
                logits = logits if compiles() else logits.to(running.peak.dtype)
                place, inside = _places(labels, columns, part)
                largest: torch.Tensor | None = None
                if plan.likeliest:
                    largest, column = logits.max(1)
                    chosen = torch.where(largest > running.peak, column + columns.start, chosen)
                running = _Running(*_seen(logits, largest, place, inside, tuple(running)))
                del logits  # before the next block's are made
        if part:
            own, running = running, _over_ranks(running, part.group)
            if plan.likeliest:
                largest = own.peak == running.peak
                chosen = _first_over_ranks(chosen + part.start, largest, part.group)

        norm = running.peak + running.total.log()  # (N,) log of the sum of exp
        ctx.save_for_backward(hidden, weight, bias, labels, norm)
        ctx.plan = plan
        ctx.mark_non_differentiable(chosen)
        return (norm - running.target).masked_fill_(labels == IGNORE, 0.0), chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, labels, norm = ctx.saved_tensors
        plan: _Plan = ctx.plan
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        each = gradients[0].masked_fill(labels == IGNORE, 0.0).unsqueeze(1)  # (N, 1)
        grad_hidden = torch.zeros_like(hidden, dtype=norm.dtype) if of_hidden else None
        grad_weight = torch.empty_like(weight) if of_weight else None
        grad_bias = torch.empty_like(bias) if of_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for columns in _blocks(hidden, weight, plan.block):
                logits = _logits(hidden, weight, bias, columns)
                gradient = _gradient(
                    logits, norm, each, plan.chain, *_places(labels, columns, plan.part)
                )
                if grad_hidden is not None:
                    _add_product(grad_hidden, gradient, weight[columns].to(hidden.dtype))
                if grad_weight is not None:
                    grad_weight[columns] = gradient.t() @ hidden
                if grad_bias is not None:
                    grad_bias[columns] = gradient.sum(0)
                del logits, gradient
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
            if plan.part:
                dist.all_reduce(grad_hidden, group=plan.part.group)
        return grad_hidden, grad_weight, grad_bias, None, None


def _blocks(hidden: torch.Tensor, weight: torch.Tensor, block: int) -> Iterator[slice]:
    at_once = columns_at_once(len(hidden), len(weight), block)
    for start in range(0, len(weight), at_once):
        yield slice(start, min(start + at_once, len(weight)))


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, columns: slice
) -> torch.Tensor:
    """Computes some columns of the logits, (N, columns), in the dtype of `hidden`."""
    rows = weight[columns].to(hidden.dtype).t()
    return (
        hidden @ rows if bias is None else torch.addmm(bias[columns].to(hidden.dtype), hidden, rows)
    )


def _places(
    labels: torch.Tensor, columns: slice, part: Part | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the labels in a block: (column of the block, (N, 1) int64, 0 where it is in none;
    whether it is in the block, (N,) bool).
    """
    place = labels - (columns.start + (part.start if part else 0))
    inside = (place >= 0) & (place < columns.stop - columns.start)
    return place.where(inside, 0).unsqueeze(1), inside


@fused
def _seen(
    logits: torch.Tensor,
    largest: Any,
    place: Any,
    inside: Any,
    running: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...]:
    """Add a block's logits, (N, columns), to the running values, which are a plain tuple for
    compilers.
    """
    peak, target, total = running
    logits = logits.to(peak.dtype)
    target = torch.where(inside, logits.gather(1, place).squeeze(1), target)
    before, peak = peak, torch.maximum(peak, logits.amax(1) if largest is None else largest)
    return peak, target, total * (before - peak).exp() + (logits - peak.unsqueeze(1)).exp_().sum(1)


def _gradient(
    logits: torch.Tensor,
    norm: torch.Tensor,
    each: torch.Tensor,
    chain: Chain | None,
    place: torch.Tensor,
    inside: torch.Tensor,
) -> torch.Tensor:
    """Computes the gradient of a block's logits, of their dtype: (probability - 1 at the label)
    times the gradient of the token's loss, through the chain.
    """
    if chain is None:
        changed = logits
    else:
        with torch.enable_grad():
            changed = chain(logits.requires_grad_())
    gradient = _of_changed(changed.detach(), norm, each, place, inside)
    return gradient if chain is None else torch.autograd.grad(changed, logits, gradient)[0]


@fused
def _of_changed(
    changed: torch.Tensor,
    norm: torch.Tensor,
    each: torch.Tensor,
    place: torch.Tensor,
    inside: torch.Tensor,
) -> torch.Tensor:
    gradient = (changed - norm.unsqueeze(1)).exp_()  # of the dtype of `norm`
    if torch.compiler.is_compiling():  # a scatter would be a kernel of its own
        label = (torch.arange(changed.shape[1], device=changed.device) == place) & inside.unsqueeze(
            1
        )
        gradient = (gradient - label.to(gradient.dtype)) * each
    else:
        # no scatter_add_: of a CUDA tensor of two dimensions torch 2.13 has no deterministic one
        gradient.scatter_(
            1, place, gradient.gather(1, place) - inside.unsqueeze(1).to(gradient.dtype)
        ).mul_(each)
    return gradient.to(changed.dtype)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds left @ right to `total`, in its dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _over_ranks(own: _Running, group: dist.ProcessGroup) -> _Running:
    """Combine the columns of the tensor-parallel ranks (two all-reduces of N numbers)."""
    # The label is a column of one rank, and -inf on the others.
    largest = torch.stack([own.peak, own.target])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    total = own.total * (own.peak - largest[0]).exp()
    dist.all_reduce(total, group=group)
    return _Running(largest[0], largest[1], total)


def _first_over_ranks(
    columns: torch.Tensor, largest: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Finds the lowest of the ranks' columns that hold the largest logit (an all-reduce of N
    numbers).
    """
    columns = columns.masked_fill(~largest, torch.iinfo(columns.dtype).max)
    dist.all_reduce(columns, dist.ReduceOp.MIN, group=group)
    return columns
