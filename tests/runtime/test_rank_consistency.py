"""Ranks that compiled other code than their peers are named after the first step."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from parity import accumulating, recipe_for, train_in_layout
from pool import Pool
from recipekit.kernels.compiled import CompilerCounts
from recipekit.runtime.rank_consistency import compilation_problems
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe
from shipped_jsons import strategy

GOOD, OTHER, BROKEN = CompilerCounts(5, 0, 0), CompilerCounts(6, 1, 0), CompilerCounts(2, 0, 3)


@pytest.mark.parametrize(
    ("mesh", "everyone", "named"),
    [
        (Mesh(tp=2), [GOOD, GOOD], ""),
        (Mesh(tp=2), [GOOD, BROKEN], "rank 1"),
        (Mesh(tp=2), [BROKEN, GOOD], "rank 0"),
        (Mesh(tp=2), [GOOD, OTHER], "rank 1"),
        # Sequence-parallel ranks see documents of other lengths.
        (Mesh(sp=2), [GOOD, OTHER], ""),
        (Mesh(sp=2), [GOOD, BROKEN], "rank 1"),
        (Mesh(tp=4), [GOOD, BROKEN, GOOD, BROKEN], "rank 1 (and 1 more)"),
        # Stages have different code, but no failures.
        (Mesh(pp=2), [GOOD, OTHER], ""),
        (Mesh(pp=2), [BROKEN, OTHER], "rank 0"),
        # Data-parallel ranks see documents of other lengths.
        (Mesh(dp=2), [GOOD, BROKEN], ""),
        (Mesh(dp=2, tp=2), [GOOD, GOOD, OTHER, OTHER], ""),
        (Mesh(dp=2, tp=2), [GOOD, GOOD, OTHER, GOOD], "rank 2"),
    ],
    ids=str,
)
def test_a_rank_with_other_code_than_its_model_is_named(
    mesh: Mesh, everyone: list[CompilerCounts], named: str
) -> None:
    where = [problem.where for problem in compilation_problems(mesh, everyone)]
    assert where == ([f"torch.compile on {named}"] if named else [])


def train_with_a_broken_compiler(recipe: Recipe, config: dict[str, Any], out: str) -> Any:
    """Run the loop with `--compile auto`, as on a GPU. Return its exit code or its config error.

    Rank 1's compiler fails after the check at the start.
    """
    import torch._inductor.config as inductor
    from recipekit.runtime import engine, resolution

    check, target = engine.check_torch_compile, resolution.target_here

    def check_then_break(cuda: bool) -> Any:
        problems = check(cuda)
        if os.environ["RANK"] == "1":
            inductor.cpp.cxx = "false"
            inductor.force_disable_caches = True
        return problems

    engine.check_torch_compile = check_then_break
    resolution.target_here = lambda device: replace(target(device), compiles=True)
    try:
        code = train_in_layout(recipe, config, out)
    except ConfigError as error:
        return str(error)
    return code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"), [("llama", {"tp": 2}), ("llama", {}), ("gemma", {})], ids=str
)
def test_a_compiler_that_fails_on_one_rank_is_named_in_the_first_step(
    ops: Any, tmp_path: Path, model: str, layout: dict[str, int]
) -> None:
    """Only parts of Gemma are compiled, so its gradients arrive in the same order in eager code.

    The pool is separate, because its ranks keep the broken compiler.
    """
    pool = Pool(2)
    try:
        found = pool.run(
            train_with_a_broken_compiler,
            timeout=400,
            recipe=recipe_for(model, **accumulating(2, **layout), compile="auto"),
            config=strategy("zero1"),
            out=str(tmp_path / "run"),
        )
        log = (pool.folder / "rank0.log").read_text()
    finally:
        pool.close()

    if model == "gemma":
        assert found == [0, 0]
        assert log.count("warning: rank 1: torch.compile failed there (") == 1
    else:
        rule = "has compiled other code than rank 0" if layout else "failed there ("
        for error in found:
            assert error.startswith(f"torch.compile on rank 1: {rule}")
            assert error.endswith("or use --compile off")
        assert not (tmp_path / "run" / "metrics.jsonl").read_text()
