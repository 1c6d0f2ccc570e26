"""Predicts what autograd keeps of a micro-batch, by formulas; tests/planner/test_activations.py
holds each against saved tensors.

The formulas are of decoders with RMSNorm, rotary positions and a gated MLP, as transformers 5.22.2
computes them operation by operation, and of an attention that keeps no T x T (by documents, or
causal within one). Others are not predicted.
"""

import math
from dataclasses import dataclass
from typing import Any

from .terms import ACCELERATOR, BACKWARD, LOSS, Term

# model_type -> whether queries and keys are normed
GATED = {"llama": False, "mistral": False, "qwen2": False, "qwen3": True}


@dataclass(frozen=True)
class Shape:
    """Describes a layer on one rank, in elements of a token: the residual stream, queries and keys
    of all heads there, the MLP's inner width.
    """

    hidden: int
    queries: int
    keys: int
    heads: int
    inner: int
    normed: bool
    # by kernels/compiled.py: nothing (""), norms ("parts") or layers as a whole ("layers")
    compiled: str
    # rows lie on several ranks: attention's result is there twice, as heads of whole rows and as
    # own rows of all heads
    divided: bool


def shape_of(config: dict[str, Any], tp: int = 1, sp: int = 1, compiled: str = "") -> Shape | None:
    """Reads a config.json; None for a layer of another kind."""
    if config.get("model_type") not in GATED:
        return None
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    shared = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or hidden // heads
    # parallel/sequence.py: ranks with too few key-value heads get the same one
    repeated = sp // math.gcd(shared // tp or 1, sp)
    normed, inner = GATED[config["model_type"]], config["intermediate_size"]
    return Shape(
        hidden,
        heads * dim // tp,
        shared * dim * repeated // tp,
        heads // tp,
        inner // tp,
        normed,
        compiled,
        sp > 1,
    )


def layer_bytes(shape: Shape, width: int) -> dict[str, int]:
    """Counts the bytes of a token that a layer's backward needs, by what they are of; `width`:
    bytes of an element in the layer.

    A norm keeps its input in fp32, the normed one in `width` and its own result, which the products
    after it take; compiled its input in `width` and its result. A gated MLP keeps the gate, its
    activation, which a compiled layer computes again, the other factor and their product. Attention
    keeps queries, keys, values, its result and a fp32 number for each head.
    """
    norm = lambda elements: (width if shape.compiled else 4 + width) * elements  # noqa: E731  (without the result)
    attention = width * (2 * shape.queries + 2 * shape.keys) + 4 * shape.heads
    attention += width * shape.queries if shape.divided else 0
    return {
        "norms": (
            2 * (norm(shape.hidden) + width * shape.hidden)
            + (norm(shape.queries) + norm(shape.keys) if shape.normed else 0)
        ),
        "attention": attention,
        "MLP": (3 if shape.compiled == "layers" else 4) * width * shape.inner,
    }


def activation_terms(
    shape: Shape, tokens: int, width: int, layers: int, recompute_every: int
) -> list[Term]:
    """Lists what a rank keeps of a micro-batch of so many tokens of its own.

    Every `recompute_every`-th layer (0: none) keeps its input only, and is computed again in its
    backward.
    """
    recomputed = -(-layers // recompute_every) if recompute_every else 0
    of_layer = {what: tokens * size for what, size in layer_bytes(shape, width).items()}
    one = sum(of_layer.values())
    # the last norm, and what the head takes
    last = tokens * (2 * width if shape.compiled else 4 + 2 * width) * shape.hidden
    terms = [
        Term(
            ACCELERATOR,
            f"inputs of {recomputed} layers that are recomputed: layers x tokens x {shape.hidden} x"
            f" {width} B",
            recomputed * tokens * width * shape.hidden,
        ),
        Term(
            ACCELERATOR,
            f"all that {layers - recomputed} other layers keep: {one / tokens:,.0f} B a token and"
            " layer",
            (layers - recomputed) * one,
        ),
        Term(ACCELERATOR, "the last norm and its result", last, (LOSS, BACKWARD)),
    ]
    if recomputed:
        terms += [
            Term(ACCELERATOR, f"a recomputed layer's {what}", size, (BACKWARD,))
            for what, size in of_layer.items()
        ]
    terms.append(
        Term(
            ACCELERATOR,
            "gradients within the MLP",
            3 * tokens * width * shape.inner,
            (BACKWARD,),
            bound=True,
        )
    )
    return [term for term in terms if term.size]
