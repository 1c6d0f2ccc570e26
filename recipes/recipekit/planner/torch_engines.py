"""Terms of torch's own engines: DDP and FSDP2."""

import re
from math import prod
from typing import Any

from ..parallel.blueprint import Tensor
from .groups import Group
from .load import Load, gradient_moments, state_bytes, temporaries
from .terms import ACCELERATOR, BACKWARD, LOSS, REDUCE, Term

# the beginning of a parameter's name, up to the number of the outermost list's element
LAYER = re.compile(r"(?:[a-z_]\w*\.)*?\d+\.")


def ddp_terms(
    groups: list[Group], frozen: list[int], ds_config: dict[str, Any], load: Load
) -> list[Term]:
    """DDP of torch: whole fp32 weights, and gradients that are views of its buckets from the end of
    the first step on.

    In the first step autograd's own gradients lie beside the buckets. Autocast makes 2-byte copies
    of the matrices, which autograd keeps until their backward.
    """
    numels = [numel for group in groups for numel in group.numels]
    own = sum(numels) if load.accumulation > 1 else max(numels, default=0)
    return [
        Term(ACCELERATOR, "parameters, fp32", 4 * (sum(numels) + sum(frozen))),
        Term(ACCELERATOR, "gradients, fp32, in the buckets", 4 * sum(numels)),
        Term(
            ACCELERATOR,
            "optimizer states, fp32",
            state_bytes(ds_config, groups, [group.numel for group in groups]),
        ),
        Term(
            ACCELERATOR,
            "gradients of the first step, beside the buckets, fp32",
            4 * own,
            (BACKWARD, REDUCE),
        ),
        Term(
            ACCELERATOR,
            "copies of the matrices, bf16",
            2 * (sum(numels) + sum(frozen)) if load.half else 0,
            (LOSS, BACKWARD),
            bound=True,
        ),
        temporaries(ds_config, [group.numel for group in groups]),
    ]


def fsdp2_terms(
    tensors: list[Tensor], groups: list[Group], ranks: int, ds_config: dict[str, Any], load: Load
) -> list[Term]:
    """FSDP2 of torch (fsdp/_fully_shard): each parameter's rows divided over the ranks, of which
    the first has the most.

    A layer is gathered whole while it computes; what lies outside of the layers stays so from the
    forward pass to the end of the backward pass, and its gradients with it. Gradients are summed in
    fp32, from a copy in a row of all of a layer.
    """
    kept = [tensor for tensor in tensors if not tensor.buffer]
    part = {
        tensor.name: -(-tensor.shape[0] // ranks) * prod(tensor.shape[1:]) if tensor.shape else 1
        for tensor in kept
    }
    trained = [tensor for tensor in kept if tensor.group is not None]
    by_group = [
        sum(part[tensor.name] for tensor in trained if tensor.group == group)
        for group in sorted({tensor.group or 0 for tensor in trained})
    ]
    return [
        Term(ACCELERATOR, "parameters, fp32", 4 * sum(part.values())),
        Term(ACCELERATOR, "gradients, fp32", 4 * sum(by_group), gradient_moments(load)),
        Term(ACCELERATOR, "optimizer states, fp32", state_bytes(ds_config, groups, by_group)),
        *_fsdp2_gathered(kept, 2 if load.half else 4),
        temporaries(ds_config, by_group),
    ]


def _fsdp2_gathered(kept: list[Tensor], width: int) -> list[Term]:
    """Count what FSDP2 gathers, `width` bytes an element, with the gradients that belong to it."""
    layers: dict[str, int] = {}
    for tensor in kept:
        found = LAYER.match(tensor.name)
        layers[found[0] if found else ""] = layers.get(found[0] if found else "", 0) + tensor.numel
    root, layer = layers.pop("", 0), max(layers.values(), default=0)

    return [
        Term(
            ACCELERATOR,
            "weights outside of the layers, gathered",
            width * root,
            (LOSS, BACKWARD, REDUCE),
        ),
        Term(ACCELERATOR, "their gradients", width * root, (BACKWARD, REDUCE)),
        Term(ACCELERATOR, "copy of these that is summed, fp32", 4 * root, (REDUCE,)),
        Term(
            ACCELERATOR,
            "the largest layer, gathered, its gradients, and their copy in fp32",
            (2 * width + 4) * layer,
            (BACKWARD,),
        ),
        Term(
            ACCELERATOR, "a further layer, gathered ahead", width * layer, (BACKWARD,), bound=True
        ),
    ]
