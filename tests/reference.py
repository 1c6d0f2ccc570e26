"""The run every layout is compared with: plain PyTorch, one process, the unmodified Hugging Face model."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from recipekit import model as model_module
from recipekit.data import eval_rows, open_stream
from recipekit.recipe import Recipe
from recipekit.tokens import load_tokenizer
from recipekit.train import lr_at, token_loss


@dataclass
class Trained:
    losses: list[float]
    grad_norms: list[float]
    eval_loss: float | None
    weights: dict[str, torch.Tensor]


def train_plain(recipe: Recipe, model_config: dict[str, Any], steps: int, bf16: bool = False) -> Trained:
    """Trains `steps` optimizer steps with torch.optim.AdamW; loss and gradients are means over the global batch's tokens.

    bf16: fp32 master weights and fp32 gradient accumulation around a bf16 model, as mixed precision is defined.
    """
    torch.manual_seed(0)
    model = model_module.build_model(recipe, model_config, None, {"bf16": {"enabled": bf16}}, torch.device("cpu")).model
    masters = (
        {name: parameter.detach().float().clone().requires_grad_() for name, parameter in model.named_parameters()} if bf16 else dict(model.named_parameters())
    )
    matrices = [value for value in masters.values() if value.ndim >= 2]
    vectors = [value for value in masters.values() if value.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.lr,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
    )
    tokenizer = load_tokenizer(recipe)
    stream = open_stream(recipe, tokenizer, dp=1, dp_rank=0)
    trained = Trained([], [], None, {})
    with contextlib.closing(stream):
        for step in range(1, steps + 1):
            batches, _ = next(stream)
            tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
            for group in optimizer.param_groups:
                group["lr"] = lr_at(recipe, step)
            optimizer.zero_grad()
            for value in masters.values():
                value.grad = torch.zeros_like(value)
            total = 0.0
            for batch in batches:
                loss = token_loss(model, batch) / tokens
                loss.backward()
                total += loss.item()
                if bf16:
                    for name, parameter in model.named_parameters():
                        masters[name].grad += parameter.grad.float()
                        parameter.grad = None
            norm = torch.nn.utils.clip_grad_norm_(masters.values(), recipe.gradient_clipping or float("inf"))
            optimizer.step()
            if bf16:
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter.copy_(masters[name])
            trained.losses.append(total)
            trained.grad_norms.append(norm.item())
    if recipe.eval_every:
        held_out = eval_rows(recipe, tokenizer, dp=1, dp_rank=0)
        model.eval()
        with torch.no_grad():
            tokens = sum(int((batch["labels"] != -100).sum()) for batch in held_out)
            trained.eval_loss = sum(token_loss(model, batch).item() for batch in held_out) / tokens
    saved_buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    trained.weights = {name: value.detach().clone() for name, value in {**masters, **saved_buffers}.items()}
    return trained
