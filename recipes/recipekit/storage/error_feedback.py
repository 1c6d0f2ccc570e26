"""Files with the error-feedback buffers of an optimizer that sends signs (optim/one_bit.py).

An error-feedback buffer contains the residual that a rank still has to send. Each rank stores its
buffers in one file. A run with a different number of ranks cannot use these files.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..parallel.blueprint import Blueprint, Layout
from ..spec.errors import Problem, config_error
from ..spec.optimizer_specs import GRADIENT, OPTIMIZERS, error_sizes
from ..spec.run_folder import STRATEGY
from . import manifest

if TYPE_CHECKING:
    import torch

ERROR_FILE_PATTERN = "errors_rank_*.pt"


def error_file_name(rank: int) -> str:
    return ERROR_FILE_PATTERN.replace("*", str(rank))


def sends_signs(layout: Layout) -> bool:
    """Return True if a layout's optimizer receives each rank's gradients and sends their signs."""
    return layout.algorithm in OPTIMIZERS and OPTIMIZERS[layout.algorithm].acts_on == GRADIENT


def expected_error_bytes(blueprint: Blueprint, layout: Layout) -> int:
    """Return the bytes of all ranks' error-feedback buffers once signs are sent.

    The names in the files are not counted.
    """
    trained = sum(tensor.numel for tensor in blueprint.tensors if tensor.group is not None)
    return (
        4 * layout.partitions * sum(error_sizes(trained, layout.partitions))
        if sends_signs(layout)
        else 0
    )


def errors_to_save(
    optimizer: "torch.optim.Optimizer", step: Path, rank: int
) -> list[tuple[Any, Path]]:
    """Return [(content, path)] that a rank should write.

    Return [] as long as no signs have been sent.
    """
    errors = getattr(optimizer, "errors", None)
    return [] if errors is None else [(dict(vars(errors)), step / error_file_name(rank))]


def check_freeze_step(freeze_step: int, step: int) -> None:
    """Raise `ConfigError` if the optimizer would not yet send signs at a checkpoint's step.

    Call this for a checkpoint with error-feedback buffers, whose run has already sent signs.
    """
    if freeze_step >= step:
        rule = (
            f"the checkpoint of step {step} has already sent compressed signs, so its second moment"
            " cannot be continued"
        )
        fix = f'write the number of the run\'s {STRATEGY} into the JSON: "auto" follows from steps'
        raise config_error(f"optimizer.params.freeze_step = {freeze_step}", rule, fix)


def restore_errors(optimizer: Any, saved: dict[str, Any] | None) -> None:
    """Restore the error-feedback buffers of this rank's optimizer.

    `saved` is None if no signs have been sent.
    """
    if hasattr(optimizer, "errors"):
        optimizer.errors = None if saved is None else optimizer.new_errors()
    if saved is not None:
        for name, value in vars(optimizer.errors).items():
            value.copy_(saved[name])


def check_saved_errors(step: Path, layout: Layout, saved: Blueprint, current: Blueprint) -> None:
    """Raise `ConfigError` if saved error-feedback buffers do not fit the layout or the optimizer.

    The number of ranks and the order of the weights must be the same as in the saved run.
    """
    if not (ranks := len(manifest.listed_files(step, ERROR_FILE_PATTERN))):
        return
    if _trained_order(saved) != _trained_order(current):
        rule = (
            "contains compression errors of weights in another order: the order of the optimizer's"
            " groups has changed"
        )
        raise config_error(
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
        raise config_error(str(step), rule, fix)


def _trained_order(blueprint: Blueprint) -> list[str]:
    """Return the trained weights in the optimizer's order, group by group."""
    return [
        name
        for name, _ in sorted(
            blueprint.trained.items(), key=lambda item: blueprint.groups.index(item[1])
        )
    ]


def check_degrees(layout: Layout, degrees: dict[str, int], zero: int) -> list[Problem]:
    """Return problems for a layout that a checkpoint's optimizer does not support."""
    if not sends_signs(layout):
        return []
    asked = degrees | {"zero": zero}
    rule = (
        f"the checkpoint uses {layout.algorithm}, which requires data-parallel ranks that each hold"
        " the full model"
    )
    return [
        Problem(f"{name} = {asked[name]}", rule, f"use --{name} {least}")
        for name, least in (("tp", 1), ("pp", 1), ("ep", 1), ("zero", 0))
        if asked[name] != least
    ]
