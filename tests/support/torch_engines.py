"""Training with DDP and FSDP2, and with plain PyTorch in the same precision."""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from parity import STEPS, accumulating, pinned, recipe_for, train_in_layout
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from reference import TEXT, Trained, adamw, summed_cross_entropy, train_plain
from safetensors.torch import load_file
from shipped_jsons import strategy

TORCH = ("ddp", "fsdp2")


def run_engine(
    pools: Any, out: Path, engine: str, world: int, model: str = "untied", **changes: Any
) -> Path:
    """Train with a PyTorch engine, or with DeepSpeed if `engine` is the name of a JSON.

    Return the run folder.
    """
    own = {"engine": engine, "precision": "fp32"} if engine in TORCH else {}
    recipe = recipe_for(model, **(accumulating(world) | own | changes))
    config = {} if engine in TORCH else strategy(engine)
    assert (
        pools.run(world, train_in_layout, recipe=recipe, config=config, out=str(out)) == [0] * world
    )
    return out


def exported(run: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in (run / "hf").glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def loss_under_autocast(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits
    return summed_cross_entropy(lambda **_: SimpleNamespace(logits=logits), batch)


@functools.cache
def plain_in_bf16(
    engine: str,
    micro_batch: int,
    optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    **changes: Any,
) -> Trained:
    """Train with plain PyTorch on one process.

    The reference for DDP has fp32 weights and runs its forward pass under autocast. The reference
    for FSDP2 has a bf16 model with fp32 master weights.
    """
    os.environ.pop("WORLD_SIZE", None)
    recipe = dataclasses.replace(
        recipe_for("untied", micro_batch=micro_batch, eval_every=0, **changes),
        ds_config=strategy("zero0"),
        out="/nonexistent",
    )
    plan = resolve_run(parse(recipe, Path("engines.py"), ["--tiny", *pinned(recipe)]))
    assert plan.model_config is not None
    plain = dataclasses.replace(TEXT, optimizer=optimizer)
    if engine == "ddp":
        return train_plain(
            plan.recipe,
            plan.model_config,
            STEPS,
            plain=dataclasses.replace(plain, loss=loss_under_autocast),
        )
    return train_plain(
        plan.recipe, plan.model_config, STEPS, bf16=True, plain=plain, whole_masters=True
    )
