"""Keeps what each rank has still to send of an optimizer that sends signs (optim/one_bit.py): a
file for each rank, which no other number of ranks can take over.
"""

from pathlib import Path
from typing import Any

from ..parallel.blueprint import Blueprint, Layout
from ..spec.optimizer_specs import FACTS, GRADIENT, error_sizes
from ..spec.refusal import Problem, refuse
from ..spec.run_folder import STRATEGY
from . import manifest

FILES = "errors_rank_*.pt"


def file_of(rank: int) -> str:
    return FILES.replace("*", str(rank))


def sends_signs(layout: Layout) -> bool:
    """Says whether the optimizer of a layout takes the gradients of each rank."""
    return layout.algorithm in FACTS and FACTS[layout.algorithm].acts_on == GRADIENT


def expected(blueprint: Blueprint, layout: Layout) -> int:
    """Counts the bytes of all ranks' files once signs are sent, without those that name them."""
    trained = sum(tensor.numel for tensor in blueprint.tensors if tensor.group is not None)
    return (
        4 * layout.partitions * sum(error_sizes(trained, layout.partitions))
        if sends_signs(layout)
        else 0
    )


def kept(optimizer: Any, step: Path, rank: int) -> list[tuple[Any, Path]]:
    """Returns [(what a rank is to write, where)]: nothing before signs are sent."""
    errors = getattr(optimizer, "errors", None)
    return [] if errors is None else [(dict(vars(errors)), step / file_of(rank))]


def check_frozen(freeze_step: int, step: int) -> None:
    """Raises `Refusal` if errors of a step are given to an optimizer that would not send signs
    before a later one.
    """
    if freeze_step >= step:
        rule = (
            f"the checkpoint of step {step} has already sent compressed signs, so its second moment"
            " cannot be continued"
        )
        fix = f'write the number of the run\'s {STRATEGY} into the JSON: "auto" follows from steps'
        raise refuse(f"optimizer.params.freeze_step = {freeze_step}", rule, fix)


def restore(optimizer: Any, saved: dict[str, Any] | None) -> None:
    """Gives an optimizer the errors of its rank, None where signs have not been sent."""
    if hasattr(optimizer, "errors"):
        optimizer.errors = None if saved is None else optimizer.new_errors()
    if saved is not None:
        for name, value in vars(optimizer.errors).items():
            value.copy_(saved[name])


def check(step: Path, layout: Layout, was: Blueprint, now: Blueprint) -> None:
    """Raises `Refusal` if a step folder holds errors, and the ranks of a layout are others, or the
    order of weights in the optimizer.
    """
    if not (ranks := len(manifest.listed_files(step, FILES))):
        return
    if _row(was) != _row(now):
        rule = (
            "contains compression errors of weights in another order: the order of the optimizer's"
            " groups has changed"
        )
        raise refuse(
            str(step),
            rule,
            "resume with the lr_scale, layer_decay and no_decay that the run started with",
        )
    if ranks != layout.mesh.world:
        rule = (
            f"contains compression errors of {ranks} ranks, which cannot continue on"
            f" {layout.mesh.world}"
        )
        fix = (
            f"resume with {ranks} ranks, or start a new run from its weights: recipekit convert"
            " to-hf, then --model"
        )
        raise refuse(str(step), rule, fix)


def _row(blueprint: Blueprint) -> list[str]:
    """Lists the trained weights as the optimizer has them, group by group."""
    return [
        name
        for name, _ in sorted(
            blueprint.trained.items(), key=lambda item: blueprint.groups.index(item[1])
        )
    ]


def check_degrees(was: Layout, degrees: dict[str, int], zero: int) -> list[Problem]:
    """Refuses a layout that the optimizer of a checkpoint does not have."""
    if not sends_signs(was):
        return []
    asked = degrees | {"zero": zero}
    rule = (
        f"the checkpoint uses {was.algorithm}, which requires data-parallel ranks that each hold"
        " the full model"
    )
    return [
        Problem(f"{name} = {asked[name]}", rule, f"use --{name} {least}")
        for name, least in (("tp", 1), ("pp", 1), ("ep", 1), ("zero", 0))
        if asked[name] != least
    ]
