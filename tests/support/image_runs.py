"""Training of image classifiers, and a comparison with plain PyTorch."""

import functools
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from parity import STEPS
from recipekit.architectures.families import default_config
from recipekit.data.batching import DataRank
from recipekit.data.held_out import eval_samples
from recipekit.data.request import request_from_recipe
from recipekit.data.samples import open_samples
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from recipekit.tasks import image_classification
from reference import Plain, num_right
from safetensors.torch import load_file

TASK = "image_classification"
NUMBERS = dict(
    lr=3e-4,
    eps=1e-6,
    steps=STEPS,
    global_batch=8,
    warmup_steps=2,
    weight_decay=0.1,
    eval_every=STEPS,
    eval_rows=20,
    wandb=False,
    seed=3,
)
FLAGS = (
    "dataset",
    "micro_batch",
    "global_batch",
    "eval_rows",
    "warmup_steps",
    "tp",
    "pp",
    "sp",
    "ep",
)


@functools.cache
def family(model_type: str) -> str:
    """Return a folder with the default config of a family of image classifiers, without dropout."""
    config = default_config(model_type, TASK).to_dict()
    config |= {key: 0.0 for key in config if key.endswith(("dropout_prob", "drop_path_rate"))}
    folder = Path(tempfile.mkdtemp(prefix="images_"))
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return str(folder)


def recipe_for(model: str, **changes: Any) -> Recipe:
    return Recipe(
        task=TASK, model=family(model), ds_config={}, **(NUMBERS | {"micro_batch": 2} | changes)
    )


def plan_of(recipe: Recipe) -> Any:
    """Return a run's plan, with flags for the values that --tiny would otherwise change."""
    return resolve_run(
        parse(
            recipe,
            Path("images.py"),
            [
                "--tiny",
                *(word for name in FLAGS for word in (f"--{name}", str(getattr(recipe, name)))),
            ],
        )
    )


def train_images(recipe: Recipe, config: dict[str, Any], out: str) -> int:
    """Run the real loop on a rank of a pool, in the same way as `run` does."""
    from recipekit.train import main

    sys.argv = ["images.py"]
    return main(plan_of(replace(recipe, ds_config=config, out=out)))


def summed_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum of -log p(class) over the images that have a class, in fp32."""
    logits, labels = (
        model(pixel_values=batch["pixel_values"].to(model.dtype)).logits.float(),
        batch["labels"],
    )
    return -logits.log_softmax(-1)[torch.arange(len(labels)), labels.clamp(min=0)][
        labels >= 0
    ].sum()


def right(model: Any, batch: dict[str, torch.Tensor]) -> list[int]:
    """Return how often the correct class has the top logit, and how often it is in the top five."""
    logits = model(pixel_values=batch["pixel_values"]).logits
    return [num_right(logits, batch["labels"], most) for most in (1, 5)]


def rows_of(opens: Any, recipe: Recipe, model_config: dict[str, Any]) -> Any:
    request = request_from_recipe(recipe)
    task = image_classification.TASK
    return opens(request, task.processor(request, model_config), task.samples, rank=DataRank(1, 0))


PICTURES = Plain(
    stream=functools.partial(rows_of, open_samples),
    held_out=functools.partial(rows_of, eval_samples),
    loss=summed_loss,
    decays=lambda name, value: (
        value.ndim >= 2
        and name.rpartition(".")[2]
        not in ("cls_token", "distillation_token", "position_embeddings")
    ),
    right=right,
)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }
