"""Attention within concatenated documents, causal or bidirectional, without a mask.

Memory use does not grow with the square of the length. On CUDA this is torch's own attention
(torch.nn.attention.varlen), with FlashAttention 2 or the kernels of `activate_kernels`. On a CPU,
torch's flash attention for CPUs is called for each document. It uses the same amount of memory as
FlashAttention, so GPU memory use can be determined without a GPU.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from ..compat.torch import takes_argument
from ..spec.errors import config_error
from ..spec.recipe import FLASH_KERNELS

# Without the argument (torch 2.11), the kernel accepts fewer key-value heads. The signature is read
# here, because a compiler does not trace `inspect`.
NAMES_GQA = takes_argument(varlen_attn, "enable_gqa")
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
WINDOW_BLOCK_QUERIES = 256  # queries per block for a windowed document on a CPU
# On a CPU, documents of up to this many tokens are padded to a common length so that a single call
# computes all of them.
MAX_PADDED_TOKENS = 64
# For documents of up to this many tokens, torch 2.13 is slower in bf16 than in fp32. The factor is
# 2 to 10 in the backward pass.
MAX_FP32_TOKENS = 256


class Scoring(NamedTuple):
    """Rules for the scores between a document's tokens. Scores are multiplied by `scale`.

    A token attends to the last `window` tokens of its document, including itself; 0 means all of
    them. If `causal` is False, it also attends to as many later tokens.
    """

    scale: float
    window: int = 0
    causal: bool = True

    def covers(self, length: int) -> bool:
        """Return True if the window masks nothing in a document of this length."""
        return not self.window or length <= self.window


def activate_kernels(attention: str) -> None:
    """Replace the FlashAttention kernels below `varlen` on CUDA, if `attention` names other ones.

    The replacement applies to the whole process. Raise `ConfigError` if torch cannot use the
    installed package.
    """
    if attention not in FLASH_KERNELS:
        return
    try:
        activate_flash_attention_impl(FLASH_KERNELS[attention])
    except (ImportError, AttributeError, RuntimeError, ValueError) as error:
        rule = f"cannot be activated in torch {torch.__version__}: {error}"
        raise config_error(f"attention = {attention}", rule, "use --attention varlen") from error


def varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scoring: Scoring
) -> Tensor:
    """Compute the attention within documents, (tokens, heads, d).

    Queries are (tokens, heads, d); keys and values are (tokens, key-value heads, d). `cu_seqlens`,
    (documents + 1,) int32, contains the number of tokens before each document, and the total.
    `max_seqlen` is the number of tokens in the longest document.
    """
    scale, window, causal = scoring
    window = 0 if window >= max_seqlen else window
    if query.is_cuda:
        sides = (window - 1, 0 if causal else window - 1)
        gqa: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if NAMES_GQA else {}
        found: Any = varlen_attn(
            query,
            key,
            value,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            scale=scale,
            window_size=sides,
            **gqa,
        )
        return found
    if type(query) is Tensor and query.device.type == "cpu" and not torch.compiler.is_compiling():
        return _ByDocument.apply(query, key, value, cu_seqlens, Scoring(scale, window, causal))  # type: ignore[no-any-return]
    return attention_by_document(query, key, value, cu_seqlens, scale, window, causal)[0]


class DocumentBatch(NamedTuple):
    """Documents that a single call computes, in the order of their first tokens.

    Each document has at most `length` tokens.
    """

    first: int  # first token in the first document
    num_documents: int
    length: int
    # (tokens in the batch,) int64: their indices among all tokens. None if all documents have
    # `length` tokens and are consecutive.
    tokens: Tensor | None
    # (tokens in the batch,) int64: their indices in (documents, length). None if no document is
    # shorter than `length`.
    padded: Tensor | None


@lru_cache(maxsize=256)
def _batches(bounds: tuple[int, ...], window: int) -> list[DocumentBatch]:
    """Return batches of documents with equal lengths. Short documents share a batch.

    A document that is longer than the window forms its own batch.
    """
    spans = [(start, stop - start) for start, stop in pairwise(bounds) if stop > start]
    sizes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for start, length in spans:
        alone = start if window and length > window else -1
        sizes.setdefault((max(MAX_PADDED_TOKENS, length), alone), []).append((start, length))
    found = []
    for held in sizes.values():
        length, first = max(own for _, own in held), held[0][0]
        if all(place == (first + number * length, length) for number, place in enumerate(held)):
            found.append(DocumentBatch(first, len(held), length, None, None))
            continue
        tokens = torch.cat([torch.arange(start, start + own) for start, own in held])
        padded = torch.cat(
            [
                torch.arange(number * length, number * length + own)
                for number, (_, own) in enumerate(held)
            ]
        )
        found.append(
            DocumentBatch(
                first,
                len(held),
                length,
                tokens,
                None if len(tokens) == len(held) * length else padded,
            )
        )
    return found


def _gather_batch(tensor: Tensor, batch: DocumentBatch) -> Tensor:
    """Gather a batch of documents, (documents, length, ...), from (tokens, ...).

    Positions after a document's end are zero, and the document's tokens do not attend to them.
    """
    if batch.tokens is None:
        return tensor[batch.first : batch.first + batch.num_documents * batch.length].unflatten(
            0, (batch.num_documents, batch.length)
        )
    taken = tensor.index_select(0, batch.tokens)
    if batch.padded is not None:
        taken = tensor.new_zeros(batch.num_documents * batch.length, *tensor.shape[1:]).index_copy_(
            0, batch.padded, taken
        )
    return taken.unflatten(0, (batch.num_documents, batch.length))


def _scatter_batch(into: Tensor, tensor: Tensor, batch: DocumentBatch) -> Tensor:
    """Write a batch of documents back into `into`, (tokens, ...), and return the result.

    This is the inverse of `_gather_batch`. If the batch contains all tokens, `tensor` itself is
    returned.
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


def _in_faster_dtype(batch: DocumentBatch, *tensors: Tensor) -> Iterator[Tensor]:
    """Yield the tensors in the dtype in which torch computes fastest."""
    return (
        tensor.to(_accumulation_dtype(tensor)) if batch.length <= MAX_FP32_TOKENS else tensor
        for tensor in tensors
    )


class QueryBlock(NamedTuple):
    """A block of one document's queries, the keys they attend to, and the bias that masks keys."""

    queries: slice
    keys: slice
    bias: Tensor  # (queries, keys)


def _query_blocks(length: int, window: int, like: Tensor, causal: bool) -> Iterator[QueryBlock]:
    """Yield blocks of `WINDOW_BLOCK_QUERIES` queries from a document.

    All blocks share one bias, or a part of it. The bias is as wide as the number of keys that a
    full block attends to.
    """
    behind = 0 if causal else window - 1  # keys after its own position that a query attends to
    # A key's position relative to the first key that the query attends to.
    place = torch.arange(WINDOW_BLOCK_QUERIES + window - 1 + behind) - torch.arange(
        WINDOW_BLOCK_QUERIES
    ).unsqueeze(1)
    bias = like.new_zeros(place.shape).masked_fill_(
        (place < 0) | (place >= window + behind), -torch.inf
    )
    for first in range(0, length, WINDOW_BLOCK_QUERIES):
        stop, begin = min(first + WINDOW_BLOCK_QUERIES, length), first - window + 1
        end = min(stop + behind, length)
        yield QueryBlock(
            slice(first, stop),
            slice(max(begin, 0), end),
            bias[: stop - first, max(-begin, 0) : end - begin],
        )


def _padding_bias(batch: DocumentBatch, like: Tensor, causal: bool) -> dict[str, Tensor]:
    """Return the bias that masks padding in bidirectional attention, as an argument for FLASH.

    The bias has the shape (documents, 1, length, length). Causal attention needs no such bias.
    """
    if causal or batch.padded is None:
        return {}
    hidden = (
        torch.ones(batch.num_documents * batch.length, dtype=torch.bool)
        .index_fill_(0, batch.padded, False)
        .view(batch.num_documents, 1, 1, batch.length)
    )
    return {
        "attn_mask": like.new_zeros(hidden.shape)
        .masked_fill_(hidden, -torch.inf)
        .expand(-1, -1, batch.length, -1)
    }


def _forward_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Return the result of `varlen` on a CPU, and the logsumexp of each query's scores.

    The logsumexp has the shape (tokens, heads).
    """
    scale, causal = scoring.scale, scoring.causal
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    sums = torch.empty(query.shape[:2], dtype=_accumulation_dtype(query))
    for batch in _batches(tuple(cu_seqlens.tolist()), scoring.window):
        q, k, v = _batch_heads(batch, query, key, value)
        if scoring.covers(batch.length):
            q, k, v = _in_faster_dtype(batch, q, k, v)
            o, s = FLASH(q, k, v, 0.0, causal, scale=scale, **_padding_bias(batch, q, causal))
            out, sums = (
                _scatter_batch(out, o.transpose(1, 2), batch),
                _scatter_batch(sums, s.transpose(1, 2), batch),
            )
            continue
        for span in _query_blocks(batch.length, scoring.window, query, causal):
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


def _batch_heads(batch: DocumentBatch, *tensors: Tensor) -> Iterator[Tensor]:
    """Yield each tensor's part in a batch, (documents, heads, length, ...)."""
    return (_gather_batch(tensor, batch).transpose(1, 2) for tensor in tensors)


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class _Forward(NamedTuple):
    """The inputs and results of a forward pass that the backward pass needs."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    sums: Tensor
    cu_seqlens: Tensor


def _backward_on_cpu(
    grad: Tensor, forward: _Forward, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    of_query, of_key, of_value = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in forward[:3]
    )
    for batch in _batches(tuple(forward.cu_seqlens.tolist()), scoring.window):
        if scoring.covers(batch.length):
            dq, dk, dv = _full_attention_gradients(grad, forward, batch, scoring)
            of_query = _scatter_batch(of_query, dq.transpose(1, 2), batch)
        else:
            place = of_query[batch.first :]
            dk, dv = _windowed_gradients(grad, forward, batch, scoring, place)
        of_key = _scatter_batch(of_key, dk.transpose(1, 2), batch)
        of_value = _scatter_batch(of_value, dv.transpose(1, 2), batch)
    return of_query, of_key, of_value


def _full_attention_gradients(
    grad: Tensor, forward: _Forward, batch: DocumentBatch, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients for a batch of documents that no window restricts."""
    g, q, k, v, o, s = _batch_heads(batch, grad, *forward[:5])
    g, q, k, v, o = _in_faster_dtype(batch, g, q, k, v, o)
    bias = _padding_bias(batch, q, scoring.causal)
    made: tuple[Tensor, Tensor, Tensor] = FLASH_BACKWARD(
        g, q, k, v, o, s, 0.0, scoring.causal, scale=scoring.scale, **bias
    )
    return made


def _windowed_gradients(
    grad: Tensor, forward: _Forward, batch: DocumentBatch, scoring: Scoring, of_query: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of one document's keys and values.

    The gradients of the queries are written into `of_query`, (tokens, heads, d).
    """
    g, q, k, v, o, s = _batch_heads(batch, grad, *forward[:5])
    # Several query blocks contribute to the gradient of the same key.
    of_key, of_value = (
        torch.zeros_like(tensor, dtype=_accumulation_dtype(tensor)) for tensor in (k, v)
    )
    for span in _query_blocks(batch.length, scoring.window, forward.query, scoring.causal):
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


def _forward_flat(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *scoring: Any
) -> tuple[Tensor, Tensor]:
    return _forward_on_cpu(query, key, value, cu_seqlens, Scoring(*scoring))


def _backward_flat(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _backward_on_cpu(grad, _Forward(*given[:6]), Scoring(*given[6:]))


# Compilers and fake tensors use this op. A schema can contain only the values in `Scoring`.
attention_by_document = torch.library.custom_op(
    "recipekit::attention_by_document",
    _forward_flat,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor documents, float scale, SymInt window,"
    " bool causal=True) -> (Tensor, Tensor)",
)
_by_document_backward: Any = torch.library.custom_op(
    "recipekit::attention_by_document_backward",
    _backward_flat,
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums,"
    " Tensor documents, float scale, SymInt window, bool causal) -> (Tensor, Tensor, Tensor)",
)


@attention_by_document.register_fake
def _(query: Tensor, *more: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(
        query.shape[:2], dtype=_accumulation_dtype(query)
    )


@_by_document_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: object) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in (query, key, value)
    )


class _DocumentContext(Protocol):
    """The values that the forward pass keeps for the backward pass."""

    scoring: list[Any]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def _save_for_backward(
    ctx: _DocumentContext, inputs: Sequence[Any], output: tuple[Tensor, Tensor]
) -> None:
    query, key, value, documents, *ctx.scoring = inputs
    out, sums = output
    ctx.save_for_backward(*_Forward(query, key, value, out, sums, documents))


def _autograd_backward(ctx: _DocumentContext, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = _by_document_backward(grad, *ctx.saved_tensors, *ctx.scoring)
    return (*found, None, None, None, None)


attention_by_document.register_autograd(_autograd_backward, setup_context=_save_for_backward)


class _ByDocument(torch.autograd.Function):
    """`attention_by_document` without the overhead of a custom op.

    In torch 2.13, this overhead was 3 % of a tiny model's step at 256 tokens.
    """

    @staticmethod
    def forward(ctx: _DocumentContext, *inputs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        output = _forward_on_cpu(*inputs)
        _save_for_backward(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: _DocumentContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = _backward_on_cpu(grad, _Forward(*ctx.saved_tensors), *ctx.scoring)
        return (*found, None, None)
