"""Attention of documents that lie one after another, causal or both ways, without a mask and
without a square of their length.

On CUDA it is torch's own (torch.nn.attention.varlen, FlashAttention 2). On a CPU it is made here of
torch's flash attention for CPUs, called for each document: FlashAttention's memory, so that what a
GPU would hold can be counted without one.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
BLOCK = 256  # queries that a window takes at a time on a CPU
# tokens: documents of up to so many are padded to a common length on a CPU, so that one call
# computes them
PADDED = 64
# tokens: of a document of up to so many torch 2.13 takes longer in bf16 than in fp32, 2 to 10 times
# in the backward pass
SHORT = 256


class Scoring(NamedTuple):
    """How the tokens of a document see each other: scores are multiplied by `scale`.

    A token sees the `window` last tokens of its document, itself included; 0: all of them. Without
    `causal` it sees as many of the tokens after it.
    """

    scale: float
    window: int = 0
    causal: bool = True

    def whole(self, length: int) -> bool:
        """Return True if the window hides nothing in a document of this length."""
        return not self.window or length <= self.window


def varlen(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, longest: int, scoring: Scoring
) -> Tensor:
    """Compute attention within documents: (tokens, heads, d) of queries and (tokens, key-value
    heads, d) of keys and values -> (tokens, heads, d).

    `documents`: (documents + 1,) int32, the number of tokens before each document, and of all;
    `longest`: tokens of the longest document.
    """
    scale, window, causal = scoring
    window = 0 if window >= longest else window
    if query.is_cuda:
        gqa, sides = query.shape[1] != key.shape[1], (window - 1, 0 if causal else window - 1)
        found: Any = varlen_attn(
            query,
            key,
            value,
            documents,
            documents,
            longest,
            longest,
            scale=scale,
            window_size=sides,
            enable_gqa=gqa,
        )
        return found
    if type(query) is Tensor and query.device.type == "cpu" and not torch.compiler.is_compiling():
        return _ByDocument.apply(query, key, value, documents, Scoring(scale, window, causal))  # type: ignore[no-any-return]
    return by_document(query, key, value, documents, scale, window, causal)[0]


class Batch(NamedTuple):
    """Names documents that one call computes: so many, of up to `length` tokens, in the order of
    their first tokens.
    """

    first: int  # token of the first one
    documents: int
    length: int
    # (tokens of all,) int64, their places among all tokens; None if all are of `length` and lie one
    # behind another
    tokens: Tensor | None
    # (tokens of all,) int64, their places in (documents, length); None if no document is shorter
    # than `length`
    padded: Tensor | None


@lru_cache(maxsize=256)
def _batches(bounds: tuple[int, ...], window: int) -> list[Batch]:
    """Sorts documents into batches: those of one length, and short ones together.

    A document longer than the window is alone.
    """
    spans = [(start, stop - start) for start, stop in pairwise(bounds) if stop > start]
    sizes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for start, length in spans:
        alone = start if window and length > window else -1
        sizes.setdefault((max(PADDED, length), alone), []).append((start, length))
    found = []
    for held in sizes.values():
        length, first = max(own for _, own in held), held[0][0]
        if all(place == (first + number * length, length) for number, place in enumerate(held)):
            found.append(Batch(first, len(held), length, None, None))
            continue
        tokens = torch.cat([torch.arange(start, start + own) for start, own in held])
        padded = torch.cat(
            [
                torch.arange(number * length, number * length + own)
                for number, (_, own) in enumerate(held)
            ]
        )
        found.append(
            Batch(
                first,
                len(held),
                length,
                tokens,
                None if len(tokens) == len(held) * length else padded,
            )
        )
    return found


def _take(tensor: Tensor, batch: Batch) -> Tensor:
    """(tokens, ...) -> (documents, length, ...); a document's place behind its tokens is zero,
    which no token of it sees.
    """
    if batch.tokens is None:
        return tensor[batch.first : batch.first + batch.documents * batch.length].unflatten(
            0, (batch.documents, batch.length)
        )
    taken = tensor.index_select(0, batch.tokens)
    if batch.padded is not None:
        taken = tensor.new_zeros(batch.documents * batch.length, *tensor.shape[1:]).index_copy_(
            0, batch.padded, taken
        )
    return taken.unflatten(0, (batch.documents, batch.length))


def _put(into: Tensor, tensor: Tensor, batch: Batch) -> Tensor:
    """The way back of `_take`, into (tokens, ...); returns that, or `tensor` itself where the batch
    is of all tokens.
    """
    tensor = tensor.flatten(0, 1).to(into.dtype)
    if batch.tokens is None and len(tensor) == len(into):
        return tensor.contiguous()
    if batch.tokens is None:
        into[batch.first : batch.first + len(tensor)] = tensor
    else:
        into.index_copy_(
            0,
            batch.tokens,
            tensor if batch.padded is None else tensor.index_select(0, batch.padded),
        )
    return into


def _faster(batch: Batch, *tensors: Tensor) -> Iterator[Tensor]:
    """Yields tensors in the dtype in which torch takes least time for them."""
    return (tensor.to(_exact(tensor)) if batch.length <= SHORT else tensor for tensor in tensors)


class Span(NamedTuple):
    """Names a block of queries of one document, the keys that it sees through the window, and the
    bias that hides the others.
    """

    queries: slice
    keys: slice
    bias: Tensor  # (queries, keys)


def _spans(length: int, window: int, like: Tensor, causal: bool) -> Iterator[Span]:
    """Cuts a document into blocks of `BLOCK` queries.

    All blocks share one bias, of as many keys as one sees, or a part of it.
    """
    behind = 0 if causal else window - 1  # keys that a query sees behind its own
    # of a key behind the first that the query sees
    place = torch.arange(BLOCK + window - 1 + behind) - torch.arange(BLOCK).unsqueeze(1)
    bias = like.new_zeros(place.shape).masked_fill_(
        (place < 0) | (place >= window + behind), -torch.inf
    )
    for first in range(0, length, BLOCK):
        stop, begin = min(first + BLOCK, length), first - window + 1
        end = min(stop + behind, length)
        yield Span(
            slice(first, stop),
            slice(max(begin, 0), end),
            bias[: stop - first, max(-begin, 0) : end - begin],
        )


def _bias(batch: Batch, like: Tensor, causal: bool) -> dict[str, Tensor]:
    """Hides from the queries that look both ways what is behind the tokens of their document,
    (documents, 1, length, length), as an argument of FLASH.
    """
    if causal or batch.padded is None:
        return {}
    hidden = (
        torch.ones(batch.documents * batch.length, dtype=torch.bool)
        .index_fill_(0, batch.padded, False)
        .view(batch.documents, 1, 1, batch.length)
    )
    return {
        "attn_mask": like.new_zeros(hidden.shape)
        .masked_fill_(hidden, -torch.inf)
        .expand(-1, -1, batch.length, -1)
    }


def _computed(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Compute `varlen` on a CPU; return (its result, the logsumexp of each query's scores,
    (tokens, heads)).
    """
    scale, causal = scoring.scale, scoring.causal
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    sums = torch.empty(query.shape[:2], dtype=_exact(query))
    for batch in _batches(tuple(documents.tolist()), scoring.window):
        q, k, v = _heads_of(batch, query, key, value)
        if scoring.whole(batch.length):
            q, k, v = _faster(batch, q, k, v)
            o, s = FLASH(q, k, v, 0.0, causal, scale=scale, **_bias(batch, q, causal))
            out, sums = _put(out, o.transpose(1, 2), batch), _put(sums, s.transpose(1, 2), batch)
            continue
        for span in _spans(batch.length, scoring.window, query, causal):
            o, s = FLASH(
                q[:, :, span.queries],
                k[:, :, span.keys],
                v[:, :, span.keys],
                0.0,
                False,
                attn_mask=span.bias,
                scale=scale,
            )
            out[batch.first :][span.queries] = o[0].transpose(0, 1)
            sums[batch.first :][span.queries] = s[0].transpose(0, 1)
    return out, sums


def _heads_of(batch: Batch, *tensors: Tensor) -> Iterator[Tensor]:
    """Yield a batch's part of each tensor, (documents, heads, length, ...)."""
    return (_take(tensor, batch).transpose(1, 2) for tensor in tensors)


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class _Forward(NamedTuple):
    """The inputs and results of a forward pass, as the backward pass needs them."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    sums: Tensor
    documents: Tensor


def _gradients(grad: Tensor, forward: _Forward, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys and values."""
    of_query, of_key, of_value = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in forward[:3]
    )
    for batch in _batches(tuple(forward.documents.tolist()), scoring.window):
        if scoring.whole(batch.length):
            dq, dk, dv = _gradients_of_whole(grad, forward, batch, scoring)
            of_query = _put(of_query, dq.transpose(1, 2), batch)
        else:
            place = of_query[batch.first :]
            dk, dv = _gradients_through_window(grad, forward, batch, scoring, place)
        of_key = _put(of_key, dk.transpose(1, 2), batch)
        of_value = _put(of_value, dv.transpose(1, 2), batch)
    return of_query, of_key, of_value


def _gradients_of_whole(
    grad: Tensor, forward: _Forward, batch: Batch, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of a batch of documents that no window cuts."""
    g, q, k, v, o, s = _heads_of(batch, grad, *forward[:5])
    g, q, k, v, o = _faster(batch, g, q, k, v, o)
    bias = _bias(batch, q, scoring.causal)
    made: tuple[Tensor, Tensor, Tensor] = FLASH_BACKWARD(
        g, q, k, v, o, s, 0.0, scoring.causal, scale=scoring.scale, **bias
    )
    return made


def _gradients_through_window(
    grad: Tensor, forward: _Forward, batch: Batch, scoring: Scoring, of_query: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of one document's keys and values, and write the queries' gradients
    into `of_query`, (tokens, heads, d).
    """
    g, q, k, v, o, s = _heads_of(batch, grad, *forward[:5])
    # Several blocks of queries add to the gradient of a key.
    of_key, of_value = (torch.zeros_like(tensor, dtype=_exact(tensor)) for tensor in (k, v))
    for span in _spans(batch.length, scoring.window, forward.query, scoring.causal):
        mine = (tensor[:, :, span.queries] for tensor in (g, q))
        seen = (tensor[:, :, span.keys] for tensor in (k, v))
        given = (tensor[:, :, span.queries] for tensor in (o, s))
        dq, dk, dv = FLASH_BACKWARD(
            *mine, *seen, *given, 0.0, False, attn_mask=span.bias, scale=scoring.scale
        )
        of_query[span.queries] = dq[0].transpose(0, 1)
        of_key[:, :, span.keys] += dk
        of_value[:, :, span.keys] += dv
    return of_key, of_value


def _computed_flat(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, *scoring: Any
) -> tuple[Tensor, Tensor]:
    return _computed(query, key, value, documents, Scoring(*scoring))


def _gradients_flat(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(grad, _Forward(*given[:6]), Scoring(*given[6:]))


# For compilers and tensors without memory. A schema has no `Scoring`, only its numbers.
by_document = torch.library.custom_op(
    "recipekit::attention_by_document",
    _computed_flat,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor documents, float scale, SymInt window,"
    " bool causal=True) -> (Tensor, Tensor)",
)
_by_document_backward: Any = torch.library.custom_op(
    "recipekit::attention_by_document_backward",
    _gradients_flat,
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums,"
    " Tensor documents, float scale, SymInt window, bool causal) -> (Tensor, Tensor, Tensor)",
)


@by_document.register_fake
def _(query: Tensor, *more: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(
        query.shape[:2], dtype=_exact(query)
    )


@_by_document_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: object) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in (query, key, value)
    )


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, documents, *ctx.scoring = inputs
    out, sums = output
    ctx.save_for_backward(*_Forward(query, key, value, out, sums, documents))


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = _by_document_backward(grad, *ctx.saved_tensors, *ctx.scoring)
    return (*found, None, None, None, None)


by_document.register_autograd(_backward, setup_context=_keep)


class _ByDocument(torch.autograd.Function):
    """`by_document` without what torch 2.13 does around a custom op, which was 3 % of a tiny
    model's step at 256 tokens.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        output = _computed(*inputs)
        _keep(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = _gradients(grad, _Forward(*ctx.saved_tensors), *ctx.scoring)
        return (*found, None, None)
