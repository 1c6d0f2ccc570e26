"""Predictions, by formulas, of the activations that autograd keeps for a micro-batch.

tests/planner/test_activations.py compares each formula with saved tensors. The formulas apply to
decoders with RMSNorm, rotary positions and a gated MLP, as transformers 5.22.2 computes them one
operation at a time. The attention must keep no T x T tensor. It attends either by documents or
causally within one document. The activations of other models are not predicted.
"""

import math
from dataclasses import dataclass
from typing import Any

from ..spec.memory_terms import ACCELERATOR, BACKWARD, LOSS, Term

# model_type -> True if queries and keys are normalised
HAS_QK_NORM = {"llama": False, "mistral": False, "qwen2": False, "qwen3": True}


@dataclass(frozen=True)
class LayerShape:
    """A layer's sizes on one rank, in elements per token.

    The sizes are the residual stream, the queries and keys of all heads on the rank, and the MLP's
    inner width.
    """

    hidden: int
    queries: int
    keys: int
    heads: int
    inner: int
    normed: bool
    # parts that kernels/compiled.py compiles: nothing (""), norms ("parts") or full layers
    # ("layers")
    compiled: str
    # True if rows are sharded over several ranks. The attention result then exists twice: as some
    # heads of full rows, and as this rank's part of the rows with all heads.
    sequence_sharded: bool


def layer_shape(
    config: dict[str, Any], tp: int = 1, sp: int = 1, compiled: str = ""
) -> LayerShape | None:
    """Return the shape of a layer from config.json, or None for a different kind of layer."""
    if config.get("model_type") not in HAS_QK_NORM:
        return None
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    shared = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or hidden // heads
    # parallel/sequence.py: if there are too few key-value heads, ranks share a head
    repeated = sp // math.gcd(shared // tp or 1, sp)
    normed, inner = HAS_QK_NORM[config["model_type"]], config["intermediate_size"]
    return LayerShape(
        hidden,
        heads * dim // tp,
        shared * dim * repeated // tp,
        heads // tp,
        inner // tp,
        normed,
        compiled,
        sp > 1,
    )


def layer_bytes(shape: LayerShape, width: int) -> dict[str, int]:
    """Count the bytes per token that a layer's backward needs, by part of the layer.

    `width` is the number of bytes per element in the layer. A norm keeps three tensors: its input
    in fp32, the normalised input in `width`, and its result, which the following products read. A
    compiled norm keeps its input in `width` and its result. A gated MLP keeps the gate, its
    activation, the other factor and their product. A compiled layer recomputes the activation.
    Attention keeps queries, keys, values, its result and one fp32 number for each head.
    """
    norm = lambda elements: (width if shape.compiled else 4 + width) * elements  # noqa: E731  (without the result)
    attention = width * (2 * shape.queries + 2 * shape.keys) + 4 * shape.heads
    attention += width * shape.queries if shape.sequence_sharded else 0
    return {
        "norms": (
            2 * (norm(shape.hidden) + width * shape.hidden)
            + (norm(shape.queries) + norm(shape.keys) if shape.normed else 0)
        ),
        "attention": attention,
        "MLP": (3 if shape.compiled == "layers" else 4) * width * shape.inner,
    }


def activation_terms(
    shape: LayerShape,
    tokens: int,
    width: int,
    layers: int,
    recompute_every: int,
    budget: float = 1,
) -> list[Term]:
    """Return the activations that this rank keeps for a micro-batch of `tokens` tokens.

    Every `recompute_every`-th layer (0: no layer) keeps only its input and is recomputed in its
    backward. If `budget` is less than 1, each layer keeps its input and at most this fraction of
    the rest. The compiler keeps full tensors only, so it usually keeps less.
    """
    # the last norm, and the input of the head
    last = tokens * (2 * width if shape.compiled else 4 + 2 * width) * shape.hidden
    terms = (
        _budget_terms(shape, tokens, width, (layers, budget))
        if budget < 1
        else _recompute_terms(shape, tokens, width, (layers, recompute_every))
    )
    terms += [
        Term(ACCELERATOR, "the last norm and its result", last, (LOSS, BACKWARD)),
        Term(
            ACCELERATOR,
            "gradients within the MLP",
            3 * tokens * width * shape.inner,
            (BACKWARD,),
            bound=True,
        ),
    ]
    return [term for term in terms if term.size]


def _recompute_terms(
    shape: LayerShape, tokens: int, width: int, chosen: tuple[int, int]
) -> list[Term]:
    """Count what layers keep if every N-th layer is recomputed. `chosen` is (layers, N or 0)."""
    layers, recompute_every = chosen
    recomputed = -(-layers // recompute_every) if recompute_every else 0
    of_layer = {what: tokens * size for what, size in layer_bytes(shape, width).items()}
    one = sum(of_layer.values())
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
    ]
    if recomputed:
        terms += [
            Term(ACCELERATOR, f"a recomputed layer's {what}", size, (BACKWARD,))
            for what, size in of_layer.items()
        ]
    return terms


def _budget_terms(
    shape: LayerShape, tokens: int, width: int, chosen: tuple[int, float]
) -> list[Term]:
    """Count what layers keep within an activation budget. `chosen` is (layers, budget below 1).

    Each layer keeps its input. The rest is an upper bound, because the compiler keeps full tensors
    and stays below the budget.
    """
    layers, budget = chosen
    kept = tokens * width * shape.hidden
    rest = tokens * sum(layer_bytes(shape, width).values()) - kept
    return [
        Term(
            ACCELERATOR,
            f"inputs of {layers} layers: layers x tokens x {shape.hidden} x {width} B",
            layers * kept,
        ),
        Term(
            ACCELERATOR,
            f"other activations of layers, at most {budget:g} of {rest / tokens:,.0f} B a token and"
            " layer",
            layers * int(budget * rest),
            bound=True,
        ),
        Term(
            ACCELERATOR,
            "recomputed activations of a layer, at most",
            rest - int(budget * rest),
            (BACKWARD,),
            bound=True,
        ),
    ]
