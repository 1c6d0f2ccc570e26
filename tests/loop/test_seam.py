"""A task's hooks: before the first forward pass, after the optimizer, and on gradients."""

import contextlib
import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from built_models import build_model
from parity import STEPS, Case, accumulating, each, pinned, recipe_for, train_in_layout
from recipekit.data.batching import DataRank
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import request_from_recipe
from recipekit.data.stream import open_stream
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from reference import num_labels, summed_cross_entropy
from safetensors.torch import load_file
from shipped_jsons import strategy

BIAS = "e_score_correction_bias"  # a DeepSeek-V3 buffer that is updated manually once per step
MOVED = 0.25
WATCHED = "model.layers.3.input_layernorm.weight"
HIDDEN = 128  # of the tiny Llama


def train_with_hooks(recipe: Recipe, config: dict[str, Any], out: str) -> list[int]:
    """Run the real loop on a rank, with hooks before and after each step.

    The hooks count the micro-batches and change a buffer.
    """
    from recipekit import train
    from recipekit.tasks.find import load_task

    counts: list[int] = []

    def move(engine: Any) -> None:
        for name, buffer in engine.module.named_buffers():
            if name.endswith(BIAS):
                buffer += MOVED * len(counts[-1:])

    train.load_task = lambda name: replace(
        load_task(name),
        before_step=lambda engine, batches: counts.append(len(batches)),
        after_step=move,
    )  # type: ignore
    try:
        assert train_in_layout(recipe, config, out) == 0
    finally:
        train.load_task = load_task  # type: ignore[attr-defined]
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
    """The run stops after step 4 and resumes, so the buffer must change ten times in total."""
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
    """Run the real loop on a rank, with a hook between the last backward pass and the step.

    The hook records [norm of a gradient, sum of its weights].
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
                # DeepSpeed's helpers return no gradient for a plain optimizer.
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
    """Return the watched gradient's norm in the first step of plain PyTorch."""
    os.environ.pop("WORLD_SIZE", None)
    recipe = replace(recipe_for("untied"), ds_config=strategy("zero0"), out="/nonexistent")
    plan = resolve_run(parse(recipe, Path("seam.py"), ["--tiny", *pinned(recipe)]))
    assert plan.model_config is not None
    model = build_model(plan.recipe, plan.model_config, None, {}, torch.device("cpu")).model
    with contextlib.closing(
        open_stream(request_from_recipe(plan.recipe), byte_tokenizer(), rank=DataRank(1, 0))
    ) as stream:
        batches = next(stream)[0]
    for batch in batches:
        (summed_cross_entropy(model, batch) / num_labels(batches)).backward()
    gradient = model.get_parameter(WATCHED).grad
    assert gradient is not None
    return gradient.double().norm().item()


@each(LAYOUTS)
def test_what_watches_sees_the_summed_gradient_before_the_weights_change(pools, tmp_path, case):
    """The hook must run once per step, before gradient clipping."""
    recipe = recipe_for(case.model, **accumulating(case.world, **case.layout))
    ranks = pools.run(
        case.world,
        train_and_look,
        recipe=recipe,
        config=strategy(case.file) if case.file else {},
        out=str(tmp_path / "run"),
    )
    holders = [rank for rank in ranks if rank]  # of a pipeline only one stage
    assert len(holders) == (1 if "pp" in case.layout else 2)
    for seen in holders:
        assert len(seen) == STEPS and seen[0][0] == pytest.approx(plain_gradient(), rel=1e-5)
        weights = [weight for _, weight in seen]
        assert weights[0] == HIDDEN and len(set(weights)) == STEPS, (
            "a norm's weights begin at 1, and step 1 has not changed them yet"
        )
