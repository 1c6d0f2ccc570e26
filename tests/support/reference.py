"""The reference run for every layout: plain PyTorch, one process, and the unmodified Hugging Face
model.

The loss and the learning rate are written here from their definitions. This module shares no code
with recipekit's training step, because it is used to judge that step.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from built_models import build_model
from recipekit.data.batching import DataRank
from recipekit.data.held_out import eval_rows
from recipekit.data.processors import load_tokenizer
from recipekit.data.request import request_from_recipe
from recipekit.data.stream import open_stream
from recipekit.spec.recipe import Recipe


@dataclass
class Trained:
    losses: list[float]
    grad_norms: list[float]
    lrs: list[float]
    tokens: list[int]  # tokens with a label, up to each step
    eval_loss: float | None
    weights: dict[str, torch.Tensor]
    right: list[float]  # means over the evaluated rows
    right_of_steps: list[list[float]]  # for each step, if requested


def summed_cross_entropy(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum -log p(label) over the positions that have a label, in fp32."""
    # (B, T, V)
    logits = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
    ).logits.float()
    labels = batch["labels"]
    chosen = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)  # (B, T)
    return (logits.logsumexp(-1) - chosen)[labels != -100].sum()


def num_labels(batches: list[dict[str, torch.Tensor]]) -> int:
    return sum(int((batch["labels"] >= 0).sum()) for batch in batches)


def num_right(scores: torch.Tensor, labels: torch.Tensor, most: int = 1) -> int:
    """Count the rows whose label is among the `most` largest scores, using scikit-learn.

    `scores` has the shape (N, classes) and the labels have the shape (N,). A label below 0 means
    that the row has no label.
    """
    # These imports take a second, and no rank needs them.
    from sklearn.metrics import accuracy_score, top_k_accuracy_score

    scores, labels = scores[labels >= 0].float(), labels[labels >= 0]  # numpy has no bf16
    if not len(labels):
        return 0
    if most == 1:
        return int(accuracy_score(labels.numpy(), scores.argmax(-1).numpy(), normalize=False))
    return int(
        top_k_accuracy_score(
            labels.numpy(), scores.numpy(), k=most, normalize=False, labels=range(scores.shape[1])
        )
    )


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a step; the first step is 1.

    The rate rises linearly to lr at step `warmup_steps`, and then falls to min_lr at the last step.
    A wsd schedule falls only during its last `decay_steps`, with the square root of the elapsed
    share.
    """
    if step < recipe.warmup_steps:
        return step * (recipe.lr / recipe.warmup_steps)
    gone = (step - recipe.warmup_steps) / (recipe.steps - recipe.warmup_steps)
    if recipe.schedule == "wsd":
        gone = max(0.0, step + recipe.decay_steps - recipe.steps) / recipe.decay_steps
    left = {
        "constant": 1.0,
        "linear": 1.0 - gone,
        "cosine": math.cos(math.pi / 2 * gone) ** 2,
        "wsd": 1.0 - gone**0.5,
    }[recipe.schedule]
    return recipe.lr * left + recipe.min_lr * (1.0 - left)


def adamw(groups: list[dict[str, Any]], recipe: Recipe) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        groups, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps
    )


@dataclass(frozen=True)
class Plain:
    """The components of a training task, and its optimizer.

    `stream` yields the rows, `loss` returns the sum of a micro-batch's losses, and `right` returns
    the number of correct predictions. `decays` is called with a parameter's name and values.
    `optimizer` is called with parameter groups, each with a weight_decay.
    """

    stream: Callable[[Recipe, dict[str, Any]], Any]
    held_out: Callable[[Recipe, dict[str, Any]], list[dict[str, torch.Tensor]]]
    loss: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]
    decays: Callable[[str, torch.Tensor], bool] = lambda name, value: value.ndim >= 2
    scale: Callable[[str], float] = lambda name: 1.0  # factor of the learning rate
    # matrices of a decoder, for Muon
    matrix: Callable[[str, torch.Tensor], bool] = lambda name, value: (
        value.ndim == 2 and (".layers." in name or ".h." in name)
    )
    right: Callable[[Any, dict[str, torch.Tensor]], list[float]] = lambda model, batch: []
    every_step: bool = False  # call `right` for the rows of each step as well
    # the number of items over which the loss is averaged
    count: Callable[[list[dict[str, torch.Tensor]]], int] = num_labels
    # A function that is called with the model before training. It returns a function that is called
    # after each step.
    watch: Callable[[Any], Callable[[], None]] = lambda model: lambda: None
    optimizer: Callable[[list[dict[str, Any]], Recipe], torch.optim.Optimizer] = adamw


def tokenizer_of(recipe: Recipe) -> Any:
    return load_tokenizer(recipe.model, recipe.tokenizer)


TEXT = Plain(
    stream=lambda recipe, _: open_stream(
        request_from_recipe(recipe), tokenizer_of(recipe), rank=DataRank(1, 0)
    ),
    held_out=lambda recipe, _: eval_rows(
        request_from_recipe(recipe), tokenizer_of(recipe), rank=DataRank(1, 0)
    ),
    loss=summed_cross_entropy,
)


def train_plain(
    recipe: Recipe,
    model_config: dict[str, Any],
    steps: int,
    bf16: bool = False,
    plain: Plain = TEXT,
    whole_masters: bool = False,
) -> Trained:
    """Train `steps` optimizer steps, with torch.optim.AdamW unless `plain` names a different
    optimizer.

    The loss and the gradients are means over the labels of the global batch. With bf16, the model
    is bf16, but the master weights and the accumulated gradients are fp32 (standard mixed
    precision). The master weights start with the values of the bf16 model, as in DeepSpeed. With
    `whole_masters` they start with the random fp32 values, as in FSDP2.
    """
    torch.manual_seed(0)
    model = build_model(
        recipe, model_config, None, {"bf16": {"enabled": bf16}}, torch.device("cpu")
    ).model
    after_step = plain.watch(model)
    masters = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    if bf16:
        drawn = (
            build_model(recipe, model_config, None, {}, torch.device("cpu")).model
            if whole_masters
            else model
        )
        masters = {
            name: parameter.detach().float().clone().requires_grad_()
            for name, parameter in drawn.named_parameters()
        }
    groups: dict[Any, list[torch.Tensor]] = {}
    for name, value in masters.items():
        groups.setdefault(
            (plain.decays(name, value), plain.scale(name), plain.matrix(name, value)), []
        ).append(value)
    optimizer = plain.optimizer(
        [
            {
                "params": own,
                "weight_decay": recipe.weight_decay if decays else 0.0,
                "scale": scale,
                "matrix": matrix,
            }
            for (decays, scale, matrix), own in groups.items()
        ],
        recipe,
    )
    trained = Trained([], [], [], [], None, {}, [], [])
    with contextlib.closing(plain.stream(recipe, model_config)) as stream:
        for step in range(1, steps + 1):
            batches, _ = next(stream)
            tokens = plain.count(batches)
            trained.lrs.append(learning_rate(recipe, step))
            trained.tokens.append(tokens + sum(trained.tokens[-1:]))
            for group in optimizer.param_groups:
                group["lr"] = trained.lrs[-1] * group["scale"]
            optimizer.zero_grad()
            for value in masters.values():
                value.grad = torch.zeros_like(value)
            total = 0.0
            if plain.every_step:
                with torch.no_grad():
                    trained.right_of_steps.append(
                        [
                            sum(sums) / tokens
                            for sums in zip(
                                *(plain.right(model, batch) for batch in batches), strict=True
                            )
                        ]
                    )
            for batch in batches:
                loss = plain.loss(model, batch) / tokens
                loss.backward()
                total += loss.item()
                if bf16:
                    for name, parameter in model.named_parameters():
                        masters[name].grad += parameter.grad.float()
                        parameter.grad = None
            norm = torch.nn.utils.clip_grad_norm_(
                masters.values(), recipe.gradient_clipping or float("inf")
            )
            optimizer.step()
            if bf16:
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter.copy_(masters[name])
            after_step()
            trained.losses.append(total)
            trained.grad_norms.append(norm.item())
    if recipe.eval_every:
        held_out = plain.held_out(recipe, model_config)
        model.eval()
        with torch.no_grad():
            trained.eval_loss = sum(
                plain.loss(model, batch).item() for batch in held_out
            ) / plain.count(held_out)
            trained.right = [
                sum(counts) / plain.count(held_out)
                for counts in zip(*(plain.right(model, batch) for batch in held_out), strict=True)
            ]
    saved_buffers = {
        name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()
    }
    trained.weights = {
        name: value.detach().clone()
        for name, value in {**dict(model.named_parameters()), **masters, **saved_buffers}.items()
    }
    return trained
