"""Cross-entropy of a head's logits in blocks of columns, which the backward pass recomputes.

The full logits exist only if a single block contains all of them. They are then computed once and
stored, which requires fewer operations.

A block contains some columns of all rows. The gradient of a block's weights is therefore complete
after the block, without a sum over blocks in a different dtype. Tensor parallelism, which also
splits the columns, adds only two all-reduces in total.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..spec.task import IGNORE
from .blocks import BLOCK_LOGITS, CPU_BLOCK_LOGITS, columns_per_block
from .compiled import fused, fusion_enabled


@dataclass(frozen=True)
class VocabShard:
    """The logit columns that a tensor-parallel rank computes.

    The columns begin at `start`, and their number equals the number of rows in the rank's weight.
    """

    start: int
    group: dist.ProcessGroup


Chain = Callable[[torch.Tensor], torch.Tensor]  # a model's operations on each separate logit


@dataclass(frozen=True)
class Head:
    """A linear head, and the operations that convert its output into logits.

    `weight` (V, D) and `bias` (V,) are arguments of `nn.functional.linear`. `chain` applies the
    model's element-wise operations to the head's output. With `vocab_shard`, weight and bias cover
    only the logit columns that this rank computes. With `fp32`, autocast does not apply.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    chain: Chain | None = None
    vocab_shard: VocabShard | None = None
    fp32: bool = False


def token_losses(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, block: int | None = None
) -> torch.Tensor:
    """Return each token's loss in the shape of `labels`, and 0 where the label is IGNORE.

    `hidden` is (..., D), and `labels` is (...) int64. The losses are
    cross_entropy(chain(linear(hidden, weight, bias)).float(), labels). They are fp32, or fp64 for
    fp64 inputs. Under autocast, the computation uses autocast's dtype, except for a head in fp32.

    The inputs and one number per token are stored for the backward pass, or the logits if a single
    block contains all of them. With a vocab shard, the call is a collective operation, and `hidden`
    and the losses are the same on all ranks. A label that is not a column produces an infinite
    loss. `block` is the number of logits that exist at a time.
    """
    return _losses_and_argmax(hidden, head, labels, block, return_argmax=False)[0]


def token_losses_and_argmax(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, block: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `token_losses`, and the column of each token's largest logit, int64.

    If several logits are equal, the first column is returned, as in torch's argmax.
    """
    losses, tokens = _losses_and_argmax(hidden, head, labels, block, return_argmax=True)
    return losses, tokens


def _losses_and_argmax(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, block: int | None, return_argmax: bool
) -> Any:
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.float32 if head.fp32 else torch.get_autocast_dtype(device))
    num_columns = len(head.weight)
    block = block or (CPU_BLOCK_LOGITS if device == "cpu" else BLOCK_LOGITS)
    if (
        head.vocab_shard is None
        and columns_per_block(labels.numel(), num_columns, block) == num_columns
    ):
        return _from_full_logits(hidden, head, labels, return_argmax)
    plan = _Plan(head.chain, head.vocab_shard, block, return_argmax)
    losses, tokens = _TokenLosses.apply(
        hidden.flatten(0, -2), head.weight, head.bias, labels.flatten(), plan
    )  # type: ignore[misc]
    return losses.view(labels.shape), tokens.view(labels.shape) if return_argmax else tokens


def _from_full_logits(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, return_argmax: bool
) -> Any:
    weight, bias, chain = head.weight, head.bias, head.chain
    with torch.autocast(hidden.device.type, enabled=False):
        # Use functional.linear, because ZeRO-3 (DeepSpeed 0.19.8) replaces it with a version that
        # does not retain the gathered weight.
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
        tokens = (
            logits.detach().argmax(1).view(labels.shape) if return_argmax else labels.new_empty(0)
        )
        return losses.masked_fill(~inside & (words != IGNORE), torch.inf).view(labels.shape), tokens


@dataclass(frozen=True)
class _Plan:
    """Settings of `_TokenLosses`: operations, columns and block size.

    The logits pass through `chain`, `block` logits at a time. `vocab_shard` describes this rank's
    columns. With `return_argmax`, the columns of the largest logits are also returned.
    """

    chain: Chain | None
    vocab_shard: VocabShard | None
    block: int
    return_argmax: bool


class _RunningSoftmax(NamedTuple):
    """Each token's running values, (N,), over the blocks of columns.

    `peak` is the largest logit. It stays finite even if a block contains only -inf. `target` is the
    label's logit, and `total` is the sum of exp(logit - peak).
    """

    peak: torch.Tensor
    target: torch.Tensor
    total: torch.Tensor

    @classmethod
    def start(cls, hidden: torch.Tensor, labels: torch.Tensor) -> "_RunningSoftmax":
        exact = torch.promote_types(hidden.dtype, torch.float32)
        peak = hidden.new_full(labels.shape, torch.finfo(exact).min, dtype=exact)
        return cls(peak, torch.full_like(peak, -torch.inf), torch.zeros_like(peak))


class _LossContext(Protocol):
    """The values that the forward pass keeps for the backward pass."""

    plan: _Plan
    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...


class _TokenLosses(torch.autograd.Function):
    """The losses, (N,), and the most likely columns, (N,) or (0,), as an autograd function.

    The tensor inputs are hidden (N, D), weight (V, D), bias (V,) and labels (N,).
    """

    @staticmethod
    def forward(
        ctx: _LossContext,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        plan: _Plan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        part, running = plan.vocab_shard, _RunningSoftmax.start(hidden, labels)
        chosen = torch.zeros_like(labels) if plan.return_argmax else labels.new_empty(0)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns in _column_blocks(hidden, weight, plan.block):
                logits = _block_logits(hidden, weight, bias, columns)
                logits = plan.chain(logits) if plan.chain else logits  # (N, columns)
                # Compiled code converts the logits itself, without storing them in the second
                # dtype.
                logits = logits if fusion_enabled() else logits.to(running.peak.dtype)
                place, inside = _labels_in_block(labels, columns, part)
                largest: torch.Tensor | None = None
                if plan.return_argmax:
                    largest, column = logits.max(1)
                    chosen = torch.where(largest > running.peak, column + columns.start, chosen)
                running = _RunningSoftmax(
                    *_accumulate(logits, largest, place, inside, tuple(running))
                )
                del logits  # before the next block's logits are computed
        if part:
            own, running = running, _combine_over_ranks(running, part.group)
            if plan.return_argmax:
                largest = own.peak == running.peak
                chosen = _lowest_over_ranks(chosen + part.start, largest, part.group)

        norm = running.peak + running.total.log()  # (N,) log of the sum of exp
        ctx.save_for_backward(hidden, weight, bias, labels, norm)
        ctx.plan = plan
        ctx.mark_non_differentiable(chosen)
        return (norm - running.target).masked_fill_(labels == IGNORE, 0.0), chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: _LossContext, *gradients: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, labels, norm = ctx.saved_tensors
        plan: _Plan = ctx.plan
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        each = gradients[0].masked_fill(labels == IGNORE, 0.0).unsqueeze(1)  # (N, 1)
        grad_hidden = torch.zeros_like(hidden, dtype=norm.dtype) if of_hidden else None
        grad_weight = torch.empty_like(weight) if of_weight else None
        grad_bias = torch.empty_like(bias) if of_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for columns in _column_blocks(hidden, weight, plan.block):
                logits = _block_logits(hidden, weight, bias, columns)
                gradient = _block_gradient(
                    logits,
                    norm,
                    each,
                    plan.chain,
                    *_labels_in_block(labels, columns, plan.vocab_shard),
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
            if plan.vocab_shard:
                dist.all_reduce(grad_hidden, group=plan.vocab_shard.group)
        return grad_hidden, grad_weight, grad_bias, None, None


def _column_blocks(hidden: torch.Tensor, weight: torch.Tensor, block: int) -> Iterator[slice]:
    at_once = columns_per_block(len(hidden), len(weight), block)
    for start in range(0, len(weight), at_once):
        yield slice(start, min(start + at_once, len(weight)))


def _block_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, columns: slice
) -> torch.Tensor:
    """Return the logits for a block of columns, (N, columns), in the dtype of `hidden`."""
    rows = weight[columns].to(hidden.dtype).t()
    return (
        hidden @ rows if bias is None else torch.addmm(bias[columns].to(hidden.dtype), hidden, rows)
    )


def _labels_in_block(
    labels: torch.Tensor, columns: slice, vocab_shard: VocabShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each label's position in a block, and whether the label is in the block.

    The position is a column of the block, (N, 1) int64, or 0 if the label is not in the block. The
    second tensor is (N,) bool.
    """
    place = labels - (columns.start + (vocab_shard.start if vocab_shard else 0))
    inside = (place >= 0) & (place < columns.stop - columns.start)
    return place.where(inside, 0).unsqueeze(1), inside


@fused
def _accumulate(
    logits: torch.Tensor,
    largest: torch.Tensor | None,
    place: torch.Tensor,
    inside: torch.Tensor,
    running: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...]:
    """Add a block's logits, (N, columns), to the running values.

    The values are passed as a plain tuple, as compilers require.
    """
    peak, target, total = running
    logits = logits.to(peak.dtype)
    target = torch.where(inside, logits.gather(1, place).squeeze(1), target)
    before, peak = peak, torch.maximum(peak, logits.amax(1) if largest is None else largest)
    return peak, target, total * (before - peak).exp() + (logits - peak.unsqueeze(1)).exp_().sum(1)


def _block_gradient(
    logits: torch.Tensor,
    norm: torch.Tensor,
    each: torch.Tensor,
    chain: Chain | None,
    place: torch.Tensor,
    inside: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of a block's logits, in the logits' dtype.

    The gradient is (probability - 1 at the label) times the gradient of the token's loss, passed
    back through the chain.
    """
    if chain is None:
        changed = logits
    else:
        with torch.enable_grad():
            changed = chain(logits.requires_grad_())
    gradient = _softmax_gradient(changed.detach(), norm, each, place, inside)
    return gradient if chain is None else torch.autograd.grad(changed, logits, gradient)[0]


@fused
def _softmax_gradient(
    changed: torch.Tensor,
    norm: torch.Tensor,
    each: torch.Tensor,
    place: torch.Tensor,
    inside: torch.Tensor,
) -> torch.Tensor:
    gradient = (changed - norm.unsqueeze(1)).exp_()  # dtype of `norm`
    if torch.compiler.is_compiling():  # a scatter would be a separate kernel
        label = (torch.arange(changed.shape[1], device=changed.device) == place) & inside.unsqueeze(
            1
        )
        gradient = (gradient - label.to(gradient.dtype)) * each
    else:
        # Do not use scatter_add_, because torch 2.13 has no deterministic version for 2D CUDA
        # tensors.
        gradient.scatter_(
            1, place, gradient.gather(1, place) - inside.unsqueeze(1).to(gradient.dtype)
        ).mul_(each)
    return gradient.to(changed.dtype)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to `total`, in the dtype of `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _combine_over_ranks(local: _RunningSoftmax, group: dist.ProcessGroup) -> _RunningSoftmax:
    """Combine the tensor-parallel ranks' columns (two all-reduces of N numbers)."""
    # The label is a column on only one rank. On the other ranks its logit is -inf.
    largest = torch.stack([local.peak, local.target])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    total = local.total * (local.peak - largest[0]).exp()
    dist.all_reduce(total, group=group)
    return _RunningSoftmax(largest[0], largest[1], total)


def _lowest_over_ranks(
    columns: torch.Tensor, largest: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the lowest column with the largest logit on any rank (a collective operation).

    This requires one all-reduce of N numbers.
    """
    columns = columns.masked_fill(~largest, torch.iinfo(columns.dtype).max)
    dist.all_reduce(columns, dist.ReduceOp.MIN, group=group)
    return columns
