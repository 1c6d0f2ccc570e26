"""What a task may do around a step: before its first forward pass, after the optimizer, and in
between what watches the gradients.
"""

import contextlib
import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipekit.data.lanes import DataRank
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import request_of
from recipekit.data.stream import open_stream
from recipekit.model.build import build_model
from recipekit.plan import make_plan
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from reference import num_labels, summed_cross_entropy
from safetensors.torch import load_file
from test_parity import (
    STEPS,
    Case,
    accumulating,
    each,
    pinned,
    recipe_for,
    strategy,
    train_in_layout,
)

BIAS = "e_score_correction_bias"  # DeepSeek-V3's: no parameter, and moved by hand once a step
MOVED = 0.25
WATCHED = "model.layers.3.input_layernorm.weight"
HIDDEN = 128  # of the tiny Llama


def train_with_hooks(recipe: Recipe, config: dict[str, Any], out: str) -> list[int]:
    """Runs on every rank: the real loop, with a task that counts micro-batches before a step and
    moves a buffer after it.
    """
    from recipekit import train
    from recipekit.tasks.find import task_called

    counts: list[int] = []

    def move(engine: Any) -> None:
        for name, buffer in engine.module.named_buffers():
            if name.endswith(BIAS):
                buffer += MOVED * len(counts[-1:])

    train.task_called = lambda name: replace(
        task_called(name), before=lambda engine, batches: counts.append(len(batches)), after=move
    )  # type: ignore
    try:
        assert train_in_layout(recipe, config, out) == 0
    finally:
        train.task_called = task_called  # type: ignore[attr-defined]
    return counts


@pytest.mark.parametrize(
    ("file", "layout"),
    [
        pytest.param("zero1", {}, id="zero1 dp2"),
        pytest.param("zero3", {}, id="zero3 dp2", marks=pytest.mark.slow),
        pytest.param("zero1", {"pp": 2}, id="zero1 pp2", marks=pytest.mark.slow),
    ],
)
def test_what_a_task_keeps_in_buffers_is_saved_and_exported(pools, tmp_path, file, layout):
    """Stopped after step 4 and gone on with: the buffer has moved ten times in all."""
    recipe = recipe_for("deepseek_v3", **accumulating(2, **layout), stop_at=4)
    first = pools.run(
        2, train_with_hooks, recipe=recipe, config=strategy(file), out=str(tmp_path / "run")
    )
    second = pools.run(
        2,
        train_with_hooks,
        recipe=replace(recipe, stop_at=0),
        config=strategy(file),
        out=str(tmp_path / "run"),
    )
    micro_batches = recipe.global_batch // recipe.micro_batch * recipe.pp // 2
    assert first == [[micro_batches] * 4] * 2 and second == [[micro_batches] * (STEPS - 4)] * 2
    exported = {
        name: value
        for shard in (tmp_path / "run" / "hf").glob("*.safetensors")
        for name, value in load_file(shard).items()
    }
    biases = [value for name, value in exported.items() if name.endswith(BIAS)]
    assert biases and all((value == MOVED * STEPS).all() for value in biases)


def train_and_look(recipe: Recipe, config: dict[str, Any], out: str) -> list[list[float]]:
    """Runs on every rank: the real loop; what lies between the last backward pass and the step
    reads [norm of a gradient, sum of its weights].
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
    from recipekit.runtime import engine as module
    from torch.distributed.tensor import DTensor

    seen: list[list[float]] = []
    make_engine = module.make_engine

    def making(*args: Any) -> Any:
        engine = make_engine(*args)
        watched: Any = dict(engine.module.named_parameters()).get(WATCHED)

        def look() -> None:
            if watched is not None:
                gradient, weight = safe_get_full_grad(watched), safe_get_full_fp32_param(watched)
                # DeepSpeed knows no gradients of a plain optimizer
                plain = watched.grad if gradient is None else gradient
                plain = plain.full_tensor() if isinstance(plain, DTensor) else plain
                weight = watched.full_tensor() if isinstance(watched, DTensor) else weight
                seen.append(
                    [
                        plain.double().norm().item(),
                        (watched if weight is None else weight).double().sum().item(),
                    ]
                )

        engine.before_step(look)
        return engine

    module.make_engine = making
    try:
        assert train_in_layout(recipe, config, out) == 0
    finally:
        module.make_engine = make_engine
    return seen


LAYOUTS = [
    Case("zero0 dp2", 2, "zero0", slow=True),
    Case("zero1 dp2", 2, "zero1"),
    Case("zero2 dp2", 2, "zero2", slow=True),
    Case("zero3 dp2", 2, "zero3", slow=True),
    Case("zero1 pp2", 2, "zero1", {"pp": 2}, slow=True),
    Case("zero0 pp2", 2, "zero0", {"pp": 2}, slow=True),
    Case("ddp dp2", 2, "", {"engine": "ddp", "precision": "fp32"}, slow=True),
    Case("fsdp2 dp2", 2, "", {"engine": "fsdp2", "precision": "fp32"}, slow=True),
]


@functools.cache
def plain_gradient() -> float:
    """The norm of the watched gradient in the first step of plain PyTorch."""
    os.environ.pop("WORLD_SIZE", None)
    recipe = replace(recipe_for("untied"), ds_config=strategy("zero0"), out="/nonexistent")
    plan = make_plan(parse(recipe, Path("seam.py"), ["--tiny", *pinned(recipe)]))
    assert plan.model_config is not None
    model = build_model(plan.recipe, plan.model_config, None, {}, torch.device("cpu")).model
    with contextlib.closing(
        open_stream(request_of(plan.recipe), byte_tokenizer(), rank=DataRank(1, 0))
    ) as stream:
        batches = next(stream)[0]
    for batch in batches:
        (summed_cross_entropy(model, batch) / num_labels(batches)).backward()
    gradient = model.get_parameter(WATCHED).grad
    assert gradient is not None
    return gradient.double().norm().item()


@each(LAYOUTS)
def test_what_watches_sees_the_summed_gradient_before_the_weights_change(pools, tmp_path, case):
    """Once a step, and before it is clipped."""
    recipe = recipe_for(case.model, **accumulating(case.world, **case.layout))
    ranks = pools.run(
        case.world,
        train_and_look,
        recipe=recipe,
        config=strategy(case.file) if case.file else {},
        out=str(tmp_path / "run"),
    )
    holders = [rank for rank in ranks if rank]  # of a pipeline one stage
    assert len(holders) == (1 if "pp" in case.layout else 2)
    for seen in holders:
        assert len(seen) == STEPS and seen[0][0] == pytest.approx(plain_gradient(), rel=1e-5)
        weights = [weight for _, weight in seen]
        assert weights[0] == HIDDEN and len(set(weights)) == STEPS, (
            "a norm's weights begin at 1, and step 1 has not changed them yet"
        )
