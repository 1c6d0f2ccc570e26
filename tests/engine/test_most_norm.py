"""Steps that an engine does not take: a gradient norm above `most_norm`, or one without a value."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_states import digest_of
from recipekit.spec.recipe import Recipe
from shipped_jsons import strategy
from short_runs import BASE, train

LIMITED, NOT_FINITE = 3, 4  # steps
SHORT = replace(BASE, steps=4, eval_every=0, lr=1e-3)

# name -> (strategy or engine, bf16, flags)
LAYOUTS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "zero0 fp32 dp2": ("zero0", False, {}),
    "zero0 fp32 pp2": ("zero0", False, {"pp": 2}),
    "zero0 bf16 dp2": ("zero0", True, {}),
    "zero1 bf16 pp2": ("zero1", True, {"pp": 2}),
    "zero1 fp32 tp2": ("zero1", False, {"tp": 2}),
    "zero2 fp32 dp2": ("zero2", False, {}),
    "zero2 bf16 dp2": ("zero2", True, {}),
    "zero3 fp32 dp2": ("zero3", False, {}),
    "zero3 bf16 dp2": ("zero3", True, {}),
    "ddp fp32 dp2": ("ddp", False, {}),
    "ddp bf16 dp2": ("ddp", True, {}),
    "fsdp2 fp32 dp2": ("fsdp2", False, {}),
    "fsdp2 bf16 dp2": ("fsdp2", True, {}),
}
FAST = ("zero0 fp32 dp2", "zero3 bf16 dp2")


def recipe_of(layout: str, out: Path) -> Recipe:
    """Return a short run in a layout of LAYOUTS."""
    name, bf16, flags = LAYOUTS[layout]
    if name in ("ddp", "fsdp2"):
        flags = flags | {"ds_config": {}, "engine": name, "precision": "bf16" if bf16 else "fp32"}
    else:
        flags = flags | {"ds_config": strategy(name, bf16)}
    return replace(SHORT, **flags, out=str(out))


def refused_steps(recipe: Recipe) -> list[dict[str, Any]]:
    """Train on a rank of a pool; return each step's norm and whether it changed anything.

    Step LIMITED has a norm above the limit. In step NOT_FINITE, rank 1's loss is not a number.
    """
    import recipekit.train as loop
    import torch.distributed as dist

    steps, train_step = [], loop.train_step

    def watched(engine: Any, *rest: Any) -> Any:
        number = len(steps) + 1
        before, handle = digest_of(engine), None
        if not steps:
            engine.after_step(lambda changed: steps[-1].update(applied=changed))
        steps.append({})
        engine.most_norm = 1e-3 if number == LIMITED else math.inf
        if number >= NOT_FINITE and dist.get_rank() == 1:
            inner = [m for m in engine.module.modules() if type(m).__name__ == "LlamaMLP"][-1]
            handle = inner.register_forward_hook(lambda module, inputs, output: output * math.nan)
        result = train_step(engine, *rest)
        if handle:
            handle.remove()
        steps[-1] |= {"norm": result["grad_norm"], "changed": digest_of(engine) != before}
        return result

    loop.train_step = watched
    try:
        code, printed = train(recipe, [])
        assert code == 1, (code, printed)  # ended by step NOT_FINITE
    finally:
        loop.train_step = train_step
    return steps


@pytest.mark.parametrize(
    "layout",
    [
        layout if layout in FAST else pytest.param(layout, marks=pytest.mark.slow)
        for layout in LAYOUTS
    ],
)
def test_a_step_above_the_limit_changes_nothing(pools: Any, tmp_path: Path, layout: str) -> None:
    for steps in pools.run(2, refused_steps, recipe=recipe_of(layout, tmp_path / "run")):
        good, limited, bad = steps[: LIMITED - 1], steps[LIMITED - 1], steps[NOT_FINITE - 1 :]
        assert all(step["changed"] and step["applied"] for step in good), steps
        # The reported norm is the true one, so the finder of spikes can judge it.
        assert not limited["changed"] and not limited["applied"]
        assert 0.5 < limited["norm"] / good[-1]["norm"] < 2, steps
        assert bad and not any(step["changed"] or step["applied"] for step in bad), steps
        assert not any(math.isfinite(step["norm"]) for step in bad), steps
