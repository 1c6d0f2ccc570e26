"""Memory terms of torch's own engines: DDP and FSDP2."""

import re
from math import prod
from typing import Any

from ..parallel.blueprint import Tensor
from ..spec.memory_terms import ACCELERATOR, BACKWARD, LOSS, REDUCE, MemoryRequest, Term
from .groups import GroupSizes
from .memory_request import gradient_moments, optimizer_temporaries, state_bytes

# the beginning of a parameter's name, up to the index in the outermost list
LAYER_PREFIX = re.compile(r"(?:[a-z_]\w*\.)*?\d+\.")


def ddp_terms(
    groups: list[GroupSizes], frozen: list[int], ds_config: dict[str, Any], request: MemoryRequest
) -> list[Term]:
    """Return the memory terms of torch's DDP: unsharded fp32 weights and gradients.

    From the end of the first step, gradients are views of DDP's buckets. During the first step,
    autograd's own gradients exist in addition to the buckets. Autocast creates 2-byte copies of the
    matrices, which autograd keeps until their backward pass.
    """
    numels = [numel for group in groups for numel in group.numels]
    own = sum(numels) if request.accumulation > 1 else max(numels, default=0)
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
            2 * (sum(numels) + sum(frozen)) if request.half else 0,
            (LOSS, BACKWARD),
            bound=True,
        ),
        optimizer_temporaries(ds_config, [group.numel for group in groups]),
    ]


def fsdp2_terms(
    tensors: list[Tensor],
    groups: list[GroupSizes],
    ranks: int,
    ds_config: dict[str, Any],
    request: MemoryRequest,
) -> list[Term]:
    """Return the memory terms of torch's FSDP2 (fsdp/_fully_shard).

    Each parameter's rows are sharded over the ranks, and the first rank has the most rows. A layer
    is gathered while it computes. Parameters outside of the layers, and their gradients, stay
    gathered from the forward pass to the end of the backward pass. Gradients are summed in fp32,
    from a contiguous copy of all gradients in a layer.
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
        Term(ACCELERATOR, "gradients, fp32", 4 * sum(by_group), gradient_moments(request)),
        Term(ACCELERATOR, "optimizer states, fp32", state_bytes(ds_config, groups, by_group)),
        *_fsdp2_gather_terms(kept, 2 if request.half else 4),
        optimizer_temporaries(ds_config, by_group),
    ]


def _fsdp2_gather_terms(tensors: list[Tensor], width: int) -> list[Term]:
    """Count the weights that FSDP2 gathers and their gradients, at `width` bytes per element.

    Parameters that stay in fp32 have four bytes.
    """
    layers: dict[str, int] = {}  # elements
    gathered: dict[str, int] = {}  # bytes
    for tensor in tensors:
        found = LAYER_PREFIX.match(tensor.name)
        layer = found[0] if found else ""
        layers[layer] = layers.get(layer, 0) + tensor.numel
        gathered[layer] = gathered.get(layer, 0) + (4 if tensor.dtype else width) * tensor.numel
    root, root_bytes = layers.pop("", 0), gathered.pop("", 0)
    largest = max(layers, key=lambda layer: gathered[layer], default="")
    layer_numel, layer_bytes = layers.get(largest, 0), gathered.get(largest, 0)

    return [
        Term(
            ACCELERATOR,
            "weights outside of the layers, gathered",
            root_bytes,
            (LOSS, BACKWARD, REDUCE),
        ),
        Term(ACCELERATOR, "their gradients", root_bytes, (BACKWARD, REDUCE)),
        Term(ACCELERATOR, "copy of these that is summed, fp32", 4 * root, (REDUCE,)),
        Term(
            ACCELERATOR,
            "the largest layer, gathered, its gradients, and their copy in fp32",
            2 * layer_bytes + 4 * layer_numel,
            (BACKWARD,),
        ),
        Term(ACCELERATOR, "a further layer, gathered ahead", layer_bytes, (BACKWARD,), bound=True),
    ]
