"""Parameters without dimensions, such as CLIP's logit_scale.

Every engine must train them as plain PyTorch does, and they keep their shape.
"""

from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from recipekit.compat.deepspeed import broadcasting_scalars
from recipekit.engine import torch_engine
from recipekit.engine.deepspeed_engine import apply_workarounds
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


class Scaled(torch.nn.Module):
    """Two layers with a scale and a frozen shift, both of shape (). The model's first parameter is
    the scale.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = torch.nn.Parameter(torch.tensor(0.7))
        self.first, self.second = torch.nn.Linear(6, 10), torch.nn.Linear(10, 3)
        self.shift = torch.nn.Parameter(torch.tensor(-0.2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()) * self.logit_scale.exp() + self.shift


def scaled() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


def rows_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def engine_of(kind: str) -> Any:
    """Return an engine of `kind` for the model.

    If DeepSpeed broadcasts the weights, rank 1 starts with different values.
    """
    model = scaled()
    if kind in ("ddp", "fsdp2"):
        group: Any = dist.group.WORLD
        if kind == "fsdp2":
            divide = torch_engine.fsdp2_sharder(SimpleNamespace(dp_group=group), "fp32", "cpu")  # pyright: ignore[reportArgumentType]
            divide(model.first)
            divide(model)
            model.set_force_sum_reduction_for_comms(True)  # pyright: ignore[reportCallIssue]
        called = DistributedDataParallel(model) if kind == "ddp" else model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        counts = {
            "global_steps": 0,
            "skipped_steps": 0,
            "global_samples": 0,
            "ds_config": {"train_batch_size": 8, "gradient_accumulation_steps": 1},
        }
        optimizer, scaler = (
            torch.optim.AdamW(trained, lr=0.05, eps=1e-6),
            torch.amp.GradScaler("cpu", enabled=False),
        )
        return torch_engine.TorchEngine(
            model, called, optimizer, torch.device("cpu"), group, 1, 0.5, None, scaler, counts
        )
    with torch.no_grad():
        model.logit_scale.add_(dist.get_rank() * (kind != "zero3"))
    zero = (
        {"stage": int(kind[4]), "stage3_param_persistence_threshold": 0}
        if kind == "zero3"
        else {"stage": int(kind[4])}
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
    }
    config["optimizer"] = {
        "type": "AdamW",
        "params": {"lr": 0.05, "eps": 1e-6, "weight_decay": 0.01, "torch_adam": True},
    }
    with broadcasting_scalars():
        trained: Any = list(model.parameters())
        return apply_workarounds(
            deepspeed.initialize(
                model=model, model_parameters=trained, config=config, dist_init_required=False
            )[0]
        )


def train_scaled(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train; return this rank's losses and the final full weights."""
    engine, losses = engine_of(kind), []
    for step in range(STEPS):
        loss = engine(rows_of(dist.get_rank(), step)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=kind == "zero3"):
            weights[name] = (
                (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
                .detach()
                .clone()
            )
    return losses, weights


def plain_scaled() -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    model, losses = scaled(), [[], []]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, eps=1e-6, weight_decay=0.01)
    for step in range(STEPS):
        for rank in range(2):
            loss = model(rows_of(rank, step)).square().mean()
            (loss / 2).backward()
            losses[rank].append(loss.item())
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["zero0", "zero1", "zero2", "zero3", "ddp", "fsdp2"])
def test_a_parameter_without_dimension_trains_as_in_plain_pytorch(pools, kind):
    losses, weights = plain_scaled()
    for got, (own, trained) in zip(
        losses, pools.run(2, train_scaled, timeout=60, kind=kind), strict=True
    ):
        assert own == pytest.approx(got, rel=1e-5)
        for name, weight in weights.items():
            assert trained[name].shape == weight.shape
            torch.testing.assert_close(trained[name], weight, rtol=1e-5, atol=1e-6)
    assert abs(weights["logit_scale"].item() - 0.7) > 0.05 and weights[
        "shift"
    ].item() == pytest.approx(-0.2)
