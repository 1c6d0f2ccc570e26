"""fp16 under DeepSpeed on CPU ranks whose accelerator claims to support it.

The tests cover one step compared with plain PyTorch, saves before the first applied step, and exact
resumes.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from parity import accumulating, recipe_for, train_in_layout
from recipekit.engine.deepspeed_engine import apply_workarounds
from recipekit.parallel.blueprint import Blueprint, Layout, Tensor, default_optimizer
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import read_metrics
from recipekit.storage import step_files
from shipped_jsons import strategy

slow = pytest.mark.slow
SCALE = {
    "enabled": True,
    "initial_scale_power": 24,
    "loss_scale_window": 2,
    "hysteresis": 2,
    "min_loss_scale": 1,
}


@contextlib.contextmanager
def claimed() -> Iterator[None]:
    """Let DeepSpeed train in fp16 on this CPU, although fp16 is slow here."""
    kind: Any = type(get_accelerator())
    asked, kind.is_fp16_supported = kind.is_fp16_supported, lambda self: True
    try:
        yield
    finally:
        kind.is_fp16_supported = asked


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    ).half()


def rows_of(rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def step_in_fp16(stage: int, fp16: dict[str, Any]) -> tuple[list[torch.Tensor], float]:
    """Return the fp32 weights after one SGD step on this rank's rows, and the gradient norm."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "fp16": {"enabled": True} | fp16,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    config |= {
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    with claimed():
        model: Any = network()
        trained: Any = list(model.parameters())
        engine = apply_workarounds(
            deepspeed.initialize(
                model=model, model_parameters=trained, config=config, dist_init_required=False
            )[0]
        )
        engine.backward(engine(rows_of(dist.get_rank()).half()).float().square().mean())
        engine.step()
        weights: list[Any] = [
            safe_get_full_fp32_param(parameter) if stage else parameter.detach()
            for parameter in engine.parameters()
        ]
        return [weight.float().clone() for weight in weights], float(engine.get_global_grad_norm())


@pytest.mark.parametrize(
    ("stage", "fp16"),
    [
        (1, {"initial_scale_power": 12}),
        (2, {"initial_scale_power": 5}),
        (3, {"loss_scale": 128}),
        (0, {"loss_scale": 1}),
    ],
)
def test_one_step_of_sgd_is_plain_pytorchs(pools, stage, fp16):
    """Without ZeRO, only an unscaled loss is tested, because dslint/rules.py rejects the other
    cases.
    """
    plain = network().float()
    start = [weight.detach().clone() for weight in plain.parameters()]
    torch.stack([plain(rows_of(rank)).square().mean() / 2 for rank in range(2)]).sum().backward()
    grads: list[Any] = [weight.grad for weight in plain.parameters()]
    moves = [-0.5 * grad for grad in grads]
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt().item()
    for weights, grad_norm in pools.run(2, step_in_fp16, timeout=60, stage=stage, fp16=fp16):
        for weight, begun, move in zip(weights, start, moves, strict=True):
            # Without ZeRO the weights are fp16.
            assert (weight - begun - move).norm() <= (1e-3 if stage else 2e-2) * move.norm()
        assert grad_norm == pytest.approx(norm, rel=1e-3)


def refused_step(stage: int, fp16: dict[str, Any]) -> str:
    try:
        step_in_fp16(stage, fp16)
    except ConfigError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("stage", [2, pytest.param(1, marks=slow), pytest.param(3, marks=slow)])
def test_an_overflow_at_the_smallest_scale_is_refused_on_every_rank(pools, stage):
    fp16 = {"initial_scale_power": 24, "min_loss_scale": 2.0**24, "hysteresis": 1}
    results = pools.run(2, refused_step, timeout=60, stage=stage, fp16=fp16)
    assert results[0] == results[1]
    assert results[0].startswith(
        "fp16.min_loss_scale: gradients overflow in fp16 at the smallest loss scale. Train in bf16"
    ), results[0]
    assert (
        pools.run(2, refused_step, timeout=60, stage=stage, fp16=fp16 | {"min_loss_scale": 1.0})
        == ["trained"] * 2
    )


def train(recipe: Recipe, config: dict[str, Any], out: str) -> int:
    """Run the real loop in fp16 on a rank."""
    with claimed():
        return train_in_layout(recipe, config, out)


def in_fp16(file: str, **scale: Any) -> dict[str, Any]:
    config = {
        key: value
        for key, value in strategy(file).items()
        if key not in ("bf16", "data_types", "communication_data_type")
    }
    return config | {"fp16": SCALE | scale}


def run(
    pools: Any,
    out: Path,
    file: str,
    stops: tuple[int, ...],
    world: int = 2,
    scale: dict[str, Any] | None = None,
    **fields: Any,
) -> None:
    """Train to each step in `stops` in turn (0: to the end); each start resumes the last one."""
    for stop_at in stops:
        recipe = recipe_for(
            "untied", **accumulating(world, **fields), lr=1e-3, stop_at=stop_at, eval_every=0
        )
        assert (
            pools.run(
                world, train, recipe=recipe, config=in_fp16(file, **(scale or {})), out=str(out)
            )
            == [0] * world
        )


def scaler_of(folder: Path) -> dict[str, Any]:
    """Return the loss scaler's state and the skipped steps in a run's newest checkpoint."""
    step = max((folder / "checkpoints").glob("step_*"))
    model = torch.load(next(step.glob("*model_states.pt")), weights_only=False)
    optimizer = torch.load(next(step.glob("*optim_states.pt")), weights_only=False)[
        "optimizer_state_dict"
    ]
    return vars(optimizer["loss_scaler"]) | {
        name: model[name] for name in ("skipped_steps", "global_steps")
    }


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("zero2", {}),
        pytest.param("zero1", {}, marks=slow),
        pytest.param("zero3", {}, marks=slow),
        pytest.param("zero1_sgd", {}, marks=slow),
        pytest.param("zero1", {"pp": 2}, marks=slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "dp2",
)
def test_a_save_before_the_first_applied_step_and_the_scale_resume_exactly(
    pools, tmp_path, file, fields
):
    """The loss scale 2^24 overflows, so the first steps are skipped, and saved.

    The window is 2 steps, so the scale rises again within the run.
    """
    run(pools, tmp_path / "run", file, (0,), **fields)
    run(pools, tmp_path / "stopped", file, (1, 4, 0), **fields)
    whole, parts = (
        [(line["loss"], line["grad_norm"]) for line in read_metrics(tmp_path / name)]
        for name in ("run", "stopped")
    )
    assert str(whole) == str(parts) and len(whole) == 10
    scaler = scaler_of(tmp_path / "run")
    assert scaler == scaler_of(tmp_path / "stopped")
    assert (
        1 < scaler["skipped_steps"] < 10 == scaler["cur_iter"] and 1 < scaler["cur_scale"] < 2.0**24
    )
    manifests = [
        json.loads(
            (max((tmp_path / name / "checkpoints").glob("step_*")) / "manifest.json").read_text()
        )
        for name in ("run", "stopped")
    ]
    assert manifests[0]["tensors"] == manifests[1]["tensors"] != {}


def test_the_metrics_have_the_scale_and_the_skipped_steps(pools, tmp_path):
    """Both are the checkpoint's, also after a resume."""
    run(pools, tmp_path / "run", "zero2", (4, 5))
    scaler, lines = scaler_of(tmp_path / "run"), read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[-1]["skipped"] == scaler["skipped_steps"] > 1
    assert [line["loss_scale"] for line in lines][-1] == scaler["cur_scale"] < 2.0**24


@slow
def test_the_scale_goes_to_another_number_of_ranks(pools, tmp_path):
    run(pools, tmp_path / "run", "zero2", (4,))
    before = scaler_of(tmp_path / "run")
    run(pools, tmp_path / "run", "zero2", (5,), world=1)
    after = scaler_of(tmp_path / "run")
    assert (
        before["dynamic"] and after["dynamic"] and after["cur_iter"] == before["cur_iter"] + 1 == 5
    )
    assert (
        after["cur_scale"]
        in (before["cur_scale"], before["cur_scale"] / 2, before["cur_scale"] * 2)
        and before["cur_scale"] < 2.0**24
    )


@pytest.mark.parametrize("stages", [(0, 2, 0), (0, 3, 1, 0), (0, 1, 2, 3, 0)], ids=str)
def test_the_scale_goes_from_torchs_engines_to_zero_and_back(tmp_path, stages):
    """GradScaler counts the steps since the last overflow. DeepSpeed stores the step that
    overflowed.
    """
    blueprint = Blueprint((Tensor("weight", (4, 3), 0, None, "0"),), {}, 1, True)
    scale = {
        "scale": 2.0**9,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 3,
    }
    counts = {
        "global_steps": 11,
        "skipped_steps": 4,
        "global_samples": 88,
        "lr_scheduler": None,
        "ds_config": {},
        "loss_scale": scale,
    }
    carried = step_files.CommonState({0: {"lr": 0.1}}, {"step": 7.0}, counts)
    for number, stage in enumerate(stages):
        layout = Layout(Mesh(), stage, default_optimizer(stage, "float32"), "float32", ())
        folder = tmp_path / str(number)
        folder.mkdir()
        step_files.create_step_files(folder, blueprint, layout, carried)
        carried = step_files.read_common_state(folder, blueprint, layout)
        if stage:
            scaler = torch.load(next(folder.glob("*optim_states.pt")), weights_only=False)[
                "optimizer_state_dict"
            ]["loss_scaler"]
            assert (
                scaler.cur_scale,
                scaler.cur_iter,
                scaler.last_overflow_iter,
                scaler.dynamic,
            ) == (2.0**9, 11, 7, True)
            assert "loss_scale" not in torch.load(
                next(folder.glob("*model_states.pt")), weights_only=False
            )
            scaler.scale_window = 3  # As many steps have not overflowed.
            scaler.update_scale(False)
            assert scaler.cur_scale == 2.0**10
    assert carried.counts["loss_scale"] == scale


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_without_fp16_has_no_scale(tmp_path, stage):
    counts = {
        "global_steps": 11,
        "skipped_steps": 0,
        "global_samples": 88,
        "lr_scheduler": None,
        "ds_config": {},
    }
    blueprint = Blueprint((Tensor("weight", (4, 3), 0, None, "0"),), {}, 1, True)
    layout = Layout(Mesh(), stage, default_optimizer(stage, "float32"), "float32", ())
    step_files.create_step_files(
        tmp_path, blueprint, layout, step_files.CommonState({0: {"lr": 0.1}}, {"step": 7.0}, counts)
    )
    saved = torch.load(next(tmp_path.glob("*optim_states.pt")), weights_only=False)[
        "optimizer_state_dict"
    ]
    assert (saved["loss_scaler"].cur_scale, saved["loss_scaler"].dynamic) == (1, False)
    assert (saved["dynamic_loss_scale"], saved["overflow"]) == (False, False)
    assert step_files.read_common_state(tmp_path, blueprint, layout).counts == counts


def test_a_resume_keeps_the_scale_and_takes_the_users_window():
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
    from recipekit.compat.deepspeed import with_counts

    def scaler(**changes: Any) -> Any:
        numbers = {
            "init_scale": 2.0**16,
            "scale_window": 1000,
            "min_scale": 1,
            "delayed_shift": 2,
            "consecutive_hysteresis": False,
        }
        return CreateLossScaler(torch.half, 128.0, "static" not in changes, numbers | changes)

    saved, counts = (
        scaler(),
        {"cur_scale": 2.0**14, "cur_iter": 5, "last_overflow_iter": 2, "cur_hysteresis": 1},
    )
    vars(saved).update(counts)
    got = with_counts(scaler(scale_window=7, min_scale=4, consecutive_hysteresis=True), saved)
    assert {name: vars(got)[name] for name in counts} == counts and (
        got.scale_window,
        got.min_scale,
        got.consecutive_hysteresis,
    ) == (7, 4, True)
    assert with_counts(scaler(delayed_shift=1), scaler()).cur_hysteresis == 1
    static = CreateLossScaler(torch.half, 128.0, False, None)
    assert with_counts(static, saved).cur_scale == 128.0
    assert with_counts(scaler(), static).cur_scale == 2.0**16
