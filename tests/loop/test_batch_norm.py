"""ResNet, whose pictures are normalised together: any layout trains like one process that takes the same micro-batches one after the other.

Its running statistics move once a step, by the mean over all micro-batches and ranks: here from their definition.
"""

import functools
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import test_images
import torch
from recipekit.architectures.families import default_config
from recipekit.recipe import Recipe
from reference import Trained, train_plain
from test_images import PICTURES, TASK, exported, plan_of, train_images
from test_parity import STEPS, Case, compare, each, strategy
from torch import nn
from torch.nn.functional import batch_norm

BATCH = {"micro_batch": 4, "global_batch": 16}
MOMENTUM = 0.1  # of ResNet's norms


@functools.cache
def small() -> str:
    """A folder with a ResNet of two stages, whose last norms see 64 values a channel of a micro-batch: of few values rounding is amplified.

    In four stages, whose last ones see 16 and 4 values, plain PyTorch differs from itself by 6e-3 after ten steps, with and without oneDNN.
    """
    config = default_config("resnet", TASK).to_dict() | {"depths": [2, 2], "hidden_sizes": [64, 128], "embedding_size": 64}
    folder = Path(tempfile.mkdtemp(prefix="resnet_"))
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return str(folder)


def recipe_for(**changes: Any) -> Recipe:
    return replace(test_images.recipe_for("resnet", **(BATCH | changes)), model=small())


def by_definition(model: nn.Module) -> Callable[[], None]:
    """Takes over the norms of a plain model: each micro-batch is normalised by its mean and variance, the running ones move when the step is done."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    seen: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {norm: [] for norm in norms}

    def compute(norm: Any, x: torch.Tensor) -> torch.Tensor:
        own = norm.weight.float(), norm.bias.float()  # torch takes no bf16 weights beside statistics in fp32
        if not norm.training:
            return batch_norm(x, norm.running_mean, norm.running_var, *own, False, 0.0, norm.eps)
        values = x.detach().double().transpose(0, 1).flatten(1)  # (C, B H W)
        seen[norm].append((values.mean(1), values.var(1)))
        return batch_norm(x, None, None, *own, True, 0.0, norm.eps)

    def move() -> None:
        for norm, pairs in seen.items():
            for running, values in zip((norm.running_mean, norm.running_var), zip(*pairs, strict=True), strict=True):
                running += MOMENTUM * (torch.stack(values).mean(0) - running)
            norm.num_batches_tracked += 1
            pairs.clear()

    for norm in norms:
        norm.forward = functools.partial(compute, norm)
    return move


NORMED = replace(PICTURES, watch=by_definition)


@functools.cache
def reference(bf16: bool = False, **changes: Any) -> Trained:
    os.environ.pop("WORLD_SIZE", None)
    plan = plan_of(replace(recipe_for(**changes), ds_config=strategy("zero0", bf16), out="/nonexistent"))
    return train_plain(plan.recipe, plan.model_config, STEPS, bf16, NORMED)


PP2 = {"pp": 2}
CASES = [
    Case("zero0 dp2", 2, "zero0"),
    Case("zero1 dp4", 4, "zero1", slow=True),
    Case("zero2 dp2, checkpointing", 2, "zero2", {"activation_checkpointing": True}, slow=True),
    Case("zero3 dp2", 2, "zero3"),
    Case("zero1 pp2", 2, "zero1", PP2),
    Case("zero1 pp4", 4, "zero1", {"pp": 4}, slow=True),
    Case("zero0 pp2 dp2, checkpointing", 4, "zero0", PP2 | {"activation_checkpointing": True}, slow=True),
    Case("zero1 pp2, dualpipev", 2, "zero1", PP2 | {"pipeline_schedule": "dualpipev"}, slow=True),
]


@each(CASES)
def test_resnet_trains_like_plain_pytorch(pools, tmp_path, case):
    """Losses, norms, every weight, every running statistic, and the share of held-out pictures that are right."""
    codes = pools.run(case.world, train_images, recipe=recipe_for(**case.layout, **case.numbers), config=strategy(case.file), out=str(tmp_path / "run"))
    assert codes == [0] * case.world
    compare(tmp_path / "run", reference(**case.numbers))
    assert any(name.endswith("running_var") for name in exported(tmp_path / "run" / "hf"))
