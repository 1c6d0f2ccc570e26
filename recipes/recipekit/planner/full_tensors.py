"""Memory of optimizers that work on full tensors: Adafactor, Muon and 1-bit Adam.

The counts cover Adafactor's row and column states, Muon's matrices, and 1-bit Adam's error-feedback
buffers and signs.
"""

from dataclasses import replace
from typing import Any

from ..parallel.adafactor_state_map import state_numel_by_rank
from ..parallel.blueprint import Blueprint, Layout, Tensor
from ..spec.memory_terms import ACCELERATOR, STEP, Term
from ..spec.optimizer_specs import (
    CHUNK_NUMEL,
    MUON_GATHER_NUMEL,
    OPTIMIZERS,
    error_sizes,
    state_sizes,
)


def with_adafactor_states(
    terms: list[Term], tensors: list[Tensor], layout: Layout, zero: dict[str, Any], engine: str
) -> list[Term]:
    """Return a rank's terms with Adafactor's states, for the data rank with the most states.

    Adafactor's sums need two fp64 numbers per state element. Adafactor computes its updates in
    chunks.
    """
    if engine == "fsdp2":
        trained = [tensor for tensor in tensors if tensor.group is not None]
        elements = sum(
            sum(state_sizes(tensor.shape, -(-tensor.numel // layout.mesh.dp)).values())
            for tensor in trained
        )
    else:
        layout = replace(
            layout,
            zero_stage=zero.get("stage", 0),
            sub_group_size=int(zero.get("sub_group_size", 1_000_000_000)),
        )
        elements = max(
            (
                most
                for tp_rank in range(layout.mesh.tp)
                for most in state_numel_by_rank(tensors, layout, tp_rank).values()
            ),
            default=0,
        )
    found = []
    for term in terms:
        if term.what.startswith("optimizer states"):
            term = replace(term, size=4 * elements)
        elif term.what.startswith("temporaries of the optimizer"):
            term = replace(
                term,
                size=min(term.size, 4 * OPTIMIZERS["Adafactor"].temporary_copies * CHUNK_NUMEL)
                + 16 * elements,
            )
        found.append(term)
    return found


def full_matrices(blueprint: Blueprint, tensors: list[Tensor]) -> Term:
    """Count the full matrices that a Muon step creates (optim/muon.py).

    These are the matrices that are gathered at the same time, and four temporary tensors. Each
    temporary tensor has the size of the largest matrix and exists while that matrix is
    orthogonalised.
    """
    numels = [
        tensor.numel
        for tensor in tensors
        if tensor.group is not None and blueprint.groups[tensor.group].matrix
    ]
    largest = max(numels, default=0)
    return Term(
        ACCELERATOR,
        "whole matrices, fp32",
        4 * (max(largest, min(sum(numels), MUON_GATHER_NUMEL)) + 4 * largest),
        (STEP,),
        bound=True,
    )


def one_bit_terms(numels: list[int], ranks: int) -> list[Term]:
    """Count the tensors that 1-bit Adam keeps from freeze_step on, and the signs in a step.

    The groups have `numels` elements. In each step, signs are sent and received (optim/one_bit.py).
    """
    own, part = error_sizes(sum(numels), ranks)
    # Bytes per element of a chunk: two fp32 numbers, three copies of its bit stored as a byte, two
    # booleans.
    made = 13 * min(own, CHUNK_NUMEL)
    return [
        Term(ACCELERATOR, "errors of signs, fp32", 4 * (own + part)),
        Term(
            ACCELERATOR,
            "signs that are sent, and their making",
            own // 4 + part // 8 + made,
            (STEP,),
            bound=True,
        ),
    ]
