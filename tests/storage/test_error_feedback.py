"""Error-feedback buffers of ranks that send signs: their size, and which resumes can use them.

Ranks have such buffers only after freeze_step.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recipekit.parallel.blueprint import Blueprint, Layout, Tensor
from recipekit.parallel.param_groups import DEFAULT_GROUPS, ParamGroup
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.spec.optimizer_specs import error_sizes
from recipekit.storage import error_feedback

TENSORS = (
    Tensor("a", (3, 5), 0),
    Tensor("b", (7,), 1),
    Tensor("frozen", (9, 9), None),
    Tensor("c", (2, 2), 0),
)
MADE = Blueprint(TENSORS, {}, 0, False)


def layout(dp: int, algorithm: str = "OneBitAdam") -> Layout:
    return Layout(Mesh(dp=dp), 0, "torch", "float32", algorithm=algorithm)


@pytest.mark.parametrize(
    ("numel", "ranks", "sizes"),
    [
        (26, 1, (32, 32)),
        (26, 2, (32, 16)),
        (26, 3, (48, 16)),
        (24, 3, (24, 8)),
        (25, 3, (48, 16)),
        (1, 5, (40, 8)),
    ],
)
def test_an_error_has_whole_bytes_of_signs_for_each_rank(
    numel: int, ranks: int, sizes: tuple[int, int]
) -> None:
    assert error_sizes(numel, ranks) == sizes
    if numel == 26:
        assert error_feedback.expected_error_bytes(MADE, layout(ranks)) == 4 * ranks * sum(sizes)
        assert error_feedback.expected_error_bytes(MADE, layout(ranks, "Adam")) == 0


@pytest.mark.parametrize(
    ("freeze", "step", "refused"), [(3, 2, True), (3, 3, True), (3, 4, False), (1, 100, False)]
)
def test_a_step_with_errors_lies_behind_the_freeze(freeze: int, step: int, refused: bool) -> None:
    if refused:
        with pytest.raises(
            ConfigError,
            match=(
                f"freeze_step = {freeze}: the checkpoint of step {step} has already sent compressed"
                " signs"
            ),
        ):
            error_feedback.check_freeze_step(freeze, step)
    else:
        error_feedback.check_freeze_step(freeze, step)


def test_a_rank_gets_its_own_errors_back_or_none(tmp_path: Path) -> None:
    held: Any = SimpleNamespace(
        errors=None,
        new_errors=lambda: SimpleNamespace(worker=torch.zeros(3), server=torch.zeros(2)),
    )
    assert (
        error_feedback.errors_to_save(held, tmp_path, 2) == []
        and error_feedback.errors_to_save(SimpleNamespace(), tmp_path, 2) == []
    )
    error_feedback.restore_errors(
        held, {"server": torch.tensor([1.0, 2.0]), "worker": torch.tensor([3.0, 4.0, 5.0])}
    )
    assert held.errors.worker.tolist() == [3, 4, 5] and held.errors.server.tolist() == [1, 2]
    [(content, file)] = error_feedback.errors_to_save(held, tmp_path, 2)
    assert (
        content.keys() == {"worker", "server"}
        and content["worker"] is held.errors.worker
        and file == tmp_path / "errors_rank_2.pt"
    )
    error_feedback.restore_errors(held, None)
    assert held.errors is None
    other = SimpleNamespace()
    error_feedback.restore_errors(other, None)
    assert not hasattr(other, "errors")


def test_other_ranks_and_weights_in_another_order_do_not_go_on(tmp_path: Path) -> None:
    scaled = Blueprint(
        (TENSORS[0], TENSORS[1], TENSORS[2], Tensor("c", (2, 2), 2)),
        {},
        0,
        False,
        groups=(*DEFAULT_GROUPS, ParamGroup(lr_scale=0.5)),
    )
    error_feedback.check_saved_errors(tmp_path, layout(3), MADE, scaled)  # no files exist
    for rank in range(2):
        (tmp_path / error_feedback.error_file_name(rank)).write_bytes(b"")
    error_feedback.check_saved_errors(tmp_path, layout(2), MADE, MADE)
    for dp in (1, 3):
        with pytest.raises(
            ConfigError,
            match=f"contains compression errors of 2 ranks, which cannot continue on {dp}",
        ):
            error_feedback.check_saved_errors(tmp_path, layout(dp), MADE, MADE)
    with pytest.raises(ConfigError, match="of weights in another order"):
        error_feedback.check_saved_errors(tmp_path, layout(2), MADE, scaled)
    reordered = Blueprint((TENSORS[3], *TENSORS[:3]), {}, 0, False)
    with pytest.raises(ConfigError, match="of weights in another order"):
        error_feedback.check_saved_errors(tmp_path, layout(2), MADE, reordered)


def test_only_data_ranks_without_zero_send_signs() -> None:
    alone = {"tp": 1, "pp": 1, "ep": 1}
    assert (
        error_feedback.check_degrees(layout(2), alone, 0)
        == []
        == error_feedback.check_degrees(layout(2, "Adam"), {"tp": 2, "pp": 2, "ep": 2}, 3)
    )
    for name in alone:
        [problem] = error_feedback.check_degrees(layout(2), alone | {name: 2}, 0)
        assert (problem.where, problem.fix) == (f"{name} = 2", f"use --{name} 1")
    [problem] = error_feedback.check_degrees(layout(2), alone, 1)
    assert (problem.where, problem.fix) == ("zero = 1", "use --zero 0")
