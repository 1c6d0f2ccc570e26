"""Counts what optimizers of whole tensors keep and need: Adafactor's rows and columns, Muon's
matrices, 1-bit Adam's errors and signs.
"""

from dataclasses import replace
from typing import Any

from ..parallel.blueprint import Blueprint, Layout, Tensor
from ..parallel.factors import elements_of
from ..spec.optimizer_specs import AT_ONCE, FACTS, GATHERED, error_sizes, state_sizes
from .terms import ACCELERATOR, STEP, Term


def with_factors(
    terms: list[Term], tensors: list[Tensor], layout: Layout, zero: dict[str, Any], engine: str
) -> list[Term]:
    """Returns the terms of a rank that holds such tensors as they are with Adafactor, of the data
    rank that keeps most of its states.

    It adds up as many numbers as it keeps in fp64, twice, and computes its updates piece by piece.
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
                for most in elements_of(tensors, layout, tp_rank).values()
            ),
            default=0,
        )
    found = []
    for term in terms:
        if term.what.startswith("optimizer states"):
            term = replace(term, size=4 * elements)
        elif term.what.startswith("temporaries of the optimizer"):
            term = replace(
                term, size=min(term.size, 4 * FACTS["Adafactor"].copies * AT_ONCE) + 16 * elements
            )
        found.append(term)
    return found


def whole_matrices(blueprint: Blueprint, tensors: list[Tensor]) -> Term:
    """Counts what a step of Muon's makes of whole matrices: those that are gathered at a time, and
    four of the size of the largest while it is orthogonalised (optim/muon.py).
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
        4 * (max(largest, min(sum(numels), GATHERED)) + 4 * largest),
        (STEP,),
        bound=True,
    )


def signs(numels: list[int], ranks: int) -> list[Term]:
    """Counts what 1-bit Adam keeps from freeze_step on for groups of so many elements, and the
    signs that a step sends and is sent (optim/one_bit.py).
    """
    own, part = error_sizes(sum(numels), ranks)
    # of the elements of a piece: fp32 twice, their bits as bytes three times, and as truth values
    # twice
    made = 13 * min(own, AT_ONCE)
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
