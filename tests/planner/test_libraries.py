"""Estimated memory of a GPU outside of PyTorch: its terms in a plan, and the communicators."""

from pathlib import Path

import pytest
from parity import recipe_for
from recipekit.plan import resolve_run
from recipekit.planner.dry_run import print_dry_run
from recipekit.planner.libraries import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    library_terms,
)
from recipekit.spec.command import parse
from recipekit.spec.memory_terms import ACCELERATOR, memory_problems
from recipekit.spec.mesh import make_mesh
from recipekit.spec.recipe import Recipe
from shipped_jsons import strategy


def lines_about_libraries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str
) -> list[str]:
    """Return the lines of a dry run that contain estimates."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = {"ds_config": strategy("zero2"), "out": "/nonexistent"}
    recipe = Recipe(**(vars(recipe_for("llama")) | config))
    print_dry_run(resolve_run(parse(recipe, Path("plan.py"), ["--tiny", "--dry_run", *flags])))
    return [line.strip() for line in capsys.readouterr().out.splitlines() if "estimated" in line]


def test_a_dry_run_for_gpus_estimates_the_context_and_the_buffers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lines_about_libraries(monkeypatch, capsys, "--world", "4") == []  # on a CPU
    assert lines_about_libraries(monkeypatch, capsys, "--device", "H200", "--world", "1") == [
        "memory   outside of PyTorch, each rank: about 512.00 MiB, estimated and not measured",
        "512.00 MiB  context of the GPU, estimated",
    ]
    assert lines_about_libraries(monkeypatch, capsys, "--device", "H200", "--world", "4") == [
        "memory   outside of PyTorch, each rank: about 1.25 GiB, estimated and not measured",
        "512.00 MiB  context of the GPU, estimated",
        "768.00 MiB  NCCL buffers of 3 communicators, estimated",
    ]


def test_an_estimate_refuses_no_run() -> None:
    terms = library_terms(make_mesh(4), "deepspeed")
    assert [term.size for term in terms] == [CONTEXT_BYTES, 3 * COMMUNICATOR_BYTES]
    assert not memory_problems(terms, ACCELERATOR, 0)
