"""Edge cases of a training step with PyTorch's engines, on two ranks with a small model.

The tests cover norm limits, dtypes of sums, micro-batches, ranks without a gradient, and gradient
signs.
"""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import papers
import pytest
import torch
from recipekit.engine import torch_engine
from recipekit.parallel.param_groups import ParamGroup
from torch import nn

# These are not torch's defaults. With this eps, a scaled gradient changes AdamW's step.
BETAS, EPS, DECAY = (0.6, 0.8), 1e-2, 0.3
LR, RANKS, STEPS = 0.05, 2, 3


class Net(nn.Module):
    """A model with unusual parameters.

    - A matrix has a number of rows that is not divisible by two ranks.
    - A vector has no weight decay.
    - One weight is used only on the first rank, one is never used, and one is frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.rare, self.unused, self.frozen = (
            nn.Parameter(torch.empty(size)) for size in ((3,), (3, 5), (3,))
        )
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, uses_rare: bool) -> torch.Tensor:
        found = self.second(self.first(x).tanh()) * self.frozen
        return found + self.rare if uses_rare else found


def data(rank: int, step: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    return (1 + rank) * torch.randn(4, 5, generator=generator)  # (B, 5)


def loss_of(model: Any, rank: int, step: int, number: int) -> torch.Tensor:
    return model(data(rank, step, number), rank == 0).square().sum()


def micro_batches(step: int) -> int:
    return 3 if step < STEPS else 2  # the number changes before the last step


def groups_of(model: nn.Module) -> dict[str, ParamGroup]:
    return {
        name: ParamGroup(decays=value.dim() > 1)
        for name, value in model.named_parameters()
        if value.requires_grad
    }


def engine_of(
    model: Any,
    kind: str,
    precision: str,
    clipping: float,
    optimizer: dict[str, Any] | None = None,
    accumulation: int = 3,
) -> Any:
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.spec.mesh import Mesh

    groups = ProcessGroups(Mesh(dp=RANKS), "cpu")
    if kind == "fsdp2":
        divide = torch_engine.fsdp2_sharder(groups, precision, "cpu")
        for child in model.children():
            divide(child)
        divide(model)
    params = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "torch_adam": True}
    config = {
        "optimizer": optimizer or {"type": "AdamW", "params": params},
        "gradient_clipping": clipping,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": 8 * accumulation,
    }
    built: Any = SimpleNamespace(
        model=model, blueprint=SimpleNamespace(trained=groups_of(model)), fp32_parameters=[]
    )
    return torch_engine.make_torch_engine(
        built, groups, kind, precision, config, torch.device("cpu")
    )


def take(engine: Any, rank: int, step: int) -> float:
    engine.accumulate(micro_batches(step))
    for number in range(micro_batches(step)):
        engine.backward(loss_of(engine, rank, step, number))
        engine.step()
    return float(engine.get_global_grad_norm())


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: getattr(value, "full_tensor", value.detach().clone)().detach()
        for name, value in model.named_parameters()
    }


def trained(
    kind: str, clippings: list[float]
) -> list[tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]]:
    """Return, for each limit, the norms, the final weights and the engine's counts, on a rank."""
    found, rank = [], torch.distributed.get_rank()
    for clipping in clippings:
        model = Net()
        engine = engine_of(model, kind, "fp32", clipping)
        norms = [take(engine, rank, step) for step in range(1, STEPS + 1)]
        counts = {
            name: engine.counts[name]
            for name in ("global_steps", "global_samples", "skipped_steps")
        }
        found.append((norms, whole(model), counts))
    return found


def plain(clipping: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the norms and weights of one process that uses torch's optimizer and clipping."""
    model, norms = Net(), []
    wanted = {name: value for name, value in model.named_parameters() if value.requires_grad}
    groups = [
        {
            "params": [value for value in wanted.values() if (value.dim() > 1) == decays],
            "weight_decay": DECAY * decays,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        losses = [
            loss_of(model, rank, step, number)
            for rank in range(RANKS)
            for number in range(micro_batches(step))
        ]
        torch.stack(losses).mean().backward()
        model.unused.grad = torch.zeros_like(model.unused)  # as under ZeRO, it has weight decay
        norms.append(nn.utils.clip_grad_norm_(wanted.values(), clipping or math.inf).item())
        optimizer.step()
    return norms, {name: value.detach() for name, value in model.named_parameters()}


LIMITS = [0.0, 2.0, 1e9]  # no limit, a limit below every norm, and a limit above every norm


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_step_is_plain_pytorchs_whatever_the_limit_of_the_norm(pools: Any, kind: str) -> None:
    """The steps have three micro-batches, and the last step has two.

    If the norm has no limit, or a limit above every norm, gradients are not scaled.
    """
    results = pools.run(RANKS, trained, kind=kind, clippings=LIMITS)
    for number, clipping in enumerate(LIMITS):
        norms, weights = plain(clipping)
        assert min(norms) > 3 * LIMITS[1] and max(norms) < 1e6
        for found in results:
            assert found[number][0] == pytest.approx(norms, rel=1e-5)
            assert found[number][1].keys() == weights.keys()
            for name, value in weights.items():
                assert torch.allclose(found[number][1][name], value, rtol=1e-5, atol=1e-6), (
                    clipping,
                    name,
                )
            assert found[number][2] == {
                "global_steps": 3,
                "global_samples": 8 * (3 + 3 + 2),
                "skipped_steps": 0,
            }
    unlimited, limited, above = (results[0][number][1]["first.weight"] for number in range(3))
    assert torch.equal(unlimited, above) and not torch.allclose(unlimited, limited, rtol=1e-3)


WHOLE = {  # optimizers with sums over full tensors, and values that differ from all defaults
    "Lamb": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY},
    "Adafactor": {
        "lr": LR,
        "beta2_decay": -0.5,
        "eps": (0.02, 0.03),
        "d": 0.7,
        "weight_decay": DECAY,
    },
}


def moved_by(kind: str, name: str) -> dict[str, torch.Tensor]:
    """Return the weights after three steps.

    This function runs on a rank, or with "alone" in one process that has the batches of all ranks.
    """
    from recipekit.optim.factory import own_optimizer_class

    model, optimizer = Net(), {"type": name, "params": WHOLE[name]}
    if kind == "alone":
        wanted = [value for value in model.parameters() if value.requires_grad]
        groups = [
            {
                "params": [value for value in wanted if (value.dim() > 1) == decays],
                "weight_decay": DECAY * decays,
            }
            for decays in (True, False)
        ]
        own = own_optimizer_class(name)(groups, **WHOLE[name])
        for step in range(1, STEPS + 1):
            own.zero_grad()
            torch.stack(
                [
                    loss_of(model, rank, step, number)
                    for rank in range(RANKS)
                    for number in range(micro_batches(step))
                ]
            ).mean().backward()
            model.unused.grad = torch.zeros_like(model.unused)
            own.step()
        return whole(model)
    engine = engine_of(model, kind, "fp32", 0.0, optimizer)
    for step in range(1, STEPS + 1):
        take(engine, torch.distributed.get_rank(), step)
    return whole(model)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", WHOLE)
def test_sums_over_whole_tensors_are_those_of_one_process(pools: Any, name: str, kind: str) -> None:
    """FSDP2 splits seven rows into four and three, and three rows into two and one."""
    expected = moved_by("alone", name)
    for found in pools.run(RANKS, moved_by, kind=kind, name=name):
        for key, value in expected.items():
            assert torch.allclose(found[key], value, rtol=1e-4, atol=1e-5), key


# Dtypes
# --------------------------------------------------------------------------------------------------


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()  # the gradient is x


# Gradients of two ranks: bf16 can represent each gradient, but not their sum.
FINE = 1 + 2.0**-7, 2.0**-8


def summed(kind: str, precision: str) -> dict[str, Any]:
    """Return the dtypes of the forward pass and the weights, and gradient norms, on a rank.

    The norms are measured for a mean of `FINE` gradients and for large gradients, both also in
    small chunks.
    """
    rank, found = torch.distributed.get_rank(), {}
    for name, piece in (("norm", torch_engine.NORM_CHUNK_ELEMENTS), ("norm in pieces", 2)):
        before, torch_engine.NORM_CHUNK_ELEMENTS = torch_engine.NORM_CHUNK_ELEMENTS, piece
        try:
            engine = engine_of(Product(), kind, precision, 0.0, accumulation=1)
            seen = []
            handle = engine.module.register_forward_hook(
                lambda module, inputs, output, seen=seen: seen.append(str(output.dtype))
            )
            engine.backward(engine(torch.full((3, 2), FINE[rank])).float())
            engine.step()
            handle.remove()
            found[name] = float(engine.get_global_grad_norm())
            for value in engine.module.parameters():
                value.grad = torch.full_like(value, 1e25)
            found[f"{name} of large gradients"] = float(engine._grad_norm())
        finally:
            torch_engine.NORM_CHUNK_ELEMENTS = before
    found |= {
        "computed": seen,
        "weights": {str(value.dtype) for value in engine.module.parameters()},
    }
    found["autocast"] = str(engine.autocast)
    return found


@pytest.mark.parametrize(
    ("kind", "precision"), [("ddp", "fp32"), ("ddp", "bf16"), ("fsdp2", "fp32"), ("fsdp2", "bf16")]
)
def test_gradients_are_added_up_in_fp32_and_squared_in_any_pieces(
    pools: Any, kind: str, precision: str
) -> None:
    """In bf16 the mean of both ranks would equal the value on the first rank."""
    exact = math.sqrt(6) * sum(FINE) / 2
    rounded = math.sqrt(6) * float(torch.tensor(FINE[0]).add(FINE[1]).bfloat16()) / 2
    assert abs(exact / rounded - 1) > 1e-3
    for found in pools.run(RANKS, summed, kind=kind, precision=precision):
        assert found["norm"] == pytest.approx(exact, rel=1e-7) and found[
            "norm in pieces"
        ] == pytest.approx(found["norm"], rel=1e-14)
        for name in ("norm", "norm in pieces"):  # fp32 cannot represent their squares
            assert found[f"{name} of large gradients"] == pytest.approx(
                1e25 * math.sqrt(6), rel=1e-6
            )
        assert found["weights"] == {"torch.float32"}
        assert found["autocast"] == (
            "torch.bfloat16" if (kind, precision) == ("ddp", "bf16") else "None"
        )
        assert found["computed"] == [
            "torch.bfloat16" if (kind, precision) == ("fsdp2", "bf16") else "torch.float32"
        ]


def test_a_precision_is_a_dtype() -> None:
    assert [torch_engine.compute_dtype(name) for name in ("bf16", "fp16", "fp32")] == [
        torch.bfloat16,
        torch.float16,
        None,
    ]


# Modes
# --------------------------------------------------------------------------------------------------


def modes() -> dict[str, Any]:
    """Return the modes and the sharding of modules, and the order of hooks, on a rank.

    The states are recorded after `eval` with a forward pass, and after `train`.
    """
    from torch.distributed.tensor import DTensor

    engine, said = engine_of(Net(), "fsdp2", "fp32", 0.0), []
    engine.before_step(lambda: said.append("first added"))
    engine.before_step(lambda: said.append("added later"))
    engine.after_step(lambda changed: said.append(("changed", changed)))
    engine.after_step(lambda changed: said.append("followed"))
    state: list[Any] = []
    engine.eval()
    with torch.no_grad():
        engine(data(0, 1, 0), True)
    state.append(
        (
            engine.module.first.training,
            all(isinstance(value, DTensor) for value in engine.module.parameters()),
        )
    )
    engine.train()
    state.append(
        (
            engine.module.first.training,
            all(isinstance(value, DTensor) for value in engine.module.parameters()),
        )
    )
    take(engine, torch.distributed.get_rank(), 1)
    return {"state": state, "said": said}


def test_an_evaluation_ends_with_divided_weights_and_watchers_act_last_added_first(
    pools: Any,
) -> None:
    for found in pools.run(RANKS, modes):
        assert found["state"][0][0] is False and found["state"][1] == (True, True)
        assert found["said"] == ["added later", "first added", ("changed", True), "followed"]


# Compression to signs
# --------------------------------------------------------------------------------------------------

FREEZE, SIGNED = 2, 6
ONE_BIT = {
    "type": "OneBitAdam",
    "params": {"freeze_step": FREEZE, "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY},
}


def signed(folder: str) -> dict[str, Any]:
    """Return the norms and weights of an unbroken run and of a resumed run under DDP, on a rank.

    The resumed run stops after each step and continues from its files.
    """
    from recipekit.storage import error_feedback

    rank, found = torch.distributed.get_rank(), {}
    engine = engine_of(model := Net(), "ddp", "fp32", 2.0, ONE_BIT)
    norms = [take(engine, rank, step) for step in range(1, SIGNED + 1)]
    found["unbroken"] = norms, whole(model)
    found["errors"] = {name: value.clone() for name, value in vars(engine.optimizer.errors).items()}
    model, norms, files = Net(), [], []
    kept = copy.deepcopy(model.state_dict()), None
    for step in range(1, SIGNED + 1):
        model = Net()
        model.load_state_dict(kept[0])
        engine = engine_of(model, "ddp", "fp32", 2.0, ONE_BIT)
        if kept[1] is not None:
            engine.optimizer.load_state_dict(kept[1])
            written = Path(folder) / f"{step - 1}_{error_feedback.error_file_name(rank)}"
            error_feedback.restore_errors(
                engine.optimizer,
                torch.load(written, weights_only=True) if written.exists() else None,
            )
        norms.append(take(engine, rank, step))
        kept = copy.deepcopy(model.state_dict()), copy.deepcopy(engine.optimizer.state_dict())
        for value, file in error_feedback.errors_to_save(engine.optimizer, Path(folder), rank):
            torch.save(value, file.with_name(f"{step}_{file.name}"))
            files.append(step)
    found["broken"] = norms, whole(model)
    found["files"] = files
    return found


def test_signs_under_ddp_are_the_papers_and_go_on_after_every_step(
    pools: Any, tmp_path: Path
) -> None:
    """Gradients are averaged and clipped up to the freeze, and are neither averaged nor clipped
    after it.

    A resume before, at or after the freeze must not change any bit.
    """
    results = pools.run(RANKS, signed, folder=str(tmp_path))
    model = Net()
    wanted = [value for value in model.parameters() if value.requires_grad]
    groups = [
        {
            "params": [value for value in wanted if (value.dim() > 1) == decays],
            "weight_decay": DECAY * decays,
            "lr": LR,
        }
        for decays in (True, False)
    ]
    simulated = papers.OneBitAdam(groups, RANKS, FREEZE, BETAS, EPS)
    norms = []
    for step in range(1, SIGNED + 1):
        gradients = []
        for rank in range(RANKS):
            model.zero_grad()
            torch.stack(
                [loss_of(model, rank, step, number) for number in range(micro_batches(step))]
            ).mean().backward()
            gradients.append(
                [
                    torch.zeros_like(value) if value.grad is None else value.grad.clone()
                    for value, _ in simulated.tensors
                ]
            )
        norms.append(simulated.step(gradients, 2.0))
    for found in results:
        assert found["unbroken"][0] == pytest.approx(norms, rel=1e-5)
        for name, value in model.named_parameters():
            assert torch.allclose(found["unbroken"][1][name], value, rtol=1e-5, atol=1e-5), name
        assert found["broken"][0] == found["unbroken"][0] and found["files"] == list(
            range(FREEZE + 1, SIGNED + 1)
        )
        assert all(
            torch.equal(value, found["unbroken"][1][name])
            for name, value in found["broken"][1].items()
        )
        assert found["errors"]["worker"].any() and found["errors"]["server"].any()
    assert not torch.equal(results[0]["errors"]["worker"], results[1]["errors"]["worker"])
