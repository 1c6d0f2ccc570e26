"""AdEMAMix on one process: its update, the two warm-ups, and the options of the JSON.

tests/optim/test_factory.py compares layouts with the paper, and tests/optim/test_optimizers.py
tests save, resume and conversion.
"""

import inspect
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import papers
import pytest
import torch
from pool import ROOT
from recipekit.optim.ademamix import AdEMAMix, alpha_at, beta3_at
from recipekit.plan import RunPlan, resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.optimizer_specs import OPTIMIZERS
from recipekit.spec.recipe import Recipe

WARMUP = "alpha_beta3_warmup_steps"
OPTIONS = {"betas": [0.9, 0.99, 0.999], "alpha": 4.0, WARMUP: 5}


def config_of(params: dict[str, Any]) -> dict[str, Any]:
    config = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    return config | {"optimizer": {"type": "AdEMAMix", "params": params}}


# The update
# --------------------------------------------------------------------------------------------------


def trained(kind: Any, steps: int, **numbers: Any) -> list[torch.Tensor]:
    """Return two tensors after some steps; the first has weight decay."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(7, 5, generator=generator), torch.randn(5, generator=generator)]
    weights = [torch.nn.Parameter(value.clone()) for value in start]
    groups = [
        {"params": weights[:1], "weight_decay": 0.5},
        {"params": weights[1:], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, lr=0.01, eps=1e-6, **numbers)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return [weight.detach() for weight in weights]


# within the warm-up, at its end, and after it
@pytest.mark.parametrize("steps", [3, 5, 12])
def test_a_step_is_the_papers(steps: int) -> None:
    for ours, theirs in zip(
        trained(AdEMAMix, steps, **OPTIONS), trained(papers.AdEMAMix, steps, **OPTIONS), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_without_warm_up_the_final_values_apply_from_the_first_step() -> None:
    for ours, theirs in zip(
        trained(AdEMAMix, 4, **OPTIONS | {WARMUP: 0}),
        trained(papers.AdEMAMix, 4, **OPTIONS | {WARMUP: 1}),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_without_the_slow_average_it_is_torchs_adamw() -> None:
    for ours, theirs in zip(
        trained(AdEMAMix, 6, **OPTIONS | {"alpha": 0.0}),
        trained(torch.optim.AdamW, 6, betas=(0.9, 0.99)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_parameter_without_a_gradient_stays() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    AdEMAMix([weight], **OPTIONS).step()
    assert torch.equal(weight, torch.ones(3))


# The warm-ups
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta1", "beta3"), [(0.9, 0.9999), (0.5, 0.99), (0.95, 0.999)])
def test_the_half_life_rises_linearly(beta1: float, beta3: float) -> None:
    half_lives = [
        math.log(0.5) / math.log(beta3_at(step, 8, beta1, beta3)) for step in range(1, 11)
    ]
    first, last = (math.log(0.5) / math.log(beta) for beta in (beta1, beta3))
    assert half_lives == pytest.approx(
        [first + min(1.0, step / 8) * (last - first) for step in range(1, 11)], rel=1e-9
    )
    assert [beta3_at(step, 8, beta1, beta3) for step in (8, 9)] == [beta3, beta3]


def test_alpha_rises_linearly() -> None:
    assert [alpha_at(step, 4, 8.0) for step in range(1, 7)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert alpha_at(1, 0, 8.0) == 8.0


def test_the_ends_of_the_ranges_are_numbers() -> None:
    """A beta of 0 has no logarithm, and beta3 may be smaller than beta1."""
    assert beta3_at(1, 0, 0.9, 0.999) == 0.999
    assert beta3_at(4, 8, 0.0, 0.0) == beta3_at(4, 8, 0.9, 0.0) == 0.0
    assert beta3_at(4, 8, 0.0, 0.99) == pytest.approx(beta3_at(4, 8, 1e-300, 0.99), abs=1e-4)
    assert beta3_at(4, 8, 0.95, 0.9) == 0.9


# The JSON
# --------------------------------------------------------------------------------------------------


def plan_of(monkeypatch: pytest.MonkeyPatch, out: Path, params: Any, *argv: str) -> RunPlan:
    """Return the plan of a run of 40 steps on two ranks."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    recipe = Recipe(model="meta-llama/Llama-3.1-8B", ds_config=config_of(params), steps=40)
    flags = ["--tiny", "--steps", "40", "--out", str(out / "run"), *argv]
    return resolve_run(parse(recipe, Path("ademamix.py"), flags))


def test_the_defaults_of_the_row_are_those_of_the_class() -> None:
    params, takes = OPTIMIZERS["AdEMAMix"].params, inspect.signature(AdEMAMix).parameters
    assert params is not None and params.keys() == takes.keys() - {"params"}
    for key in ("alpha", "betas", "eps", "lr"):  # the recipe always fills in weight_decay
        default = takes[key].default
        assert params[key]["default"] == (list(default) if key == "betas" else default)
    assert takes[WARMUP].default is inspect.Parameter.empty and params[WARMUP]["required"]


@pytest.mark.parametrize(
    ("stated", "argv", "expected"),
    [("auto", [], 40), ("auto", ["--steps", "300"], 300), (7, [], 7), (0, [], 0)],
    ids=str,
)
def test_auto_is_the_steps_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stated: Any, argv: list[str], expected: int
) -> None:
    plan = plan_of(monkeypatch, tmp_path, {WARMUP: stated, "lr": "auto"}, *argv)
    params = plan.ds_config["optimizer"]["params"]
    assert params[WARMUP] == expected
    assert params["lr"] == plan.recipe.lr and params["eps"] == plan.recipe.eps
    assert "betas" not in params, "a pair of the recipe"


@pytest.mark.parametrize(
    ("params", "argv", "said"),
    [
        ({}, [], f"{WARMUP} = (missing): AdEMAMix requires it"),
        ({WARMUP: -1}, [], f"{WARMUP} = -1: must be at least 0"),
        ({WARMUP: 2.5}, [], f"{WARMUP} = 2.5: must be a whole number"),
        ({"alpha": -0.1}, [], "alpha = -0.1: must be at least 0"),
        ({"alpha": "auto"}, [], 'alpha = "auto": "auto" is not supported'),
        ({"betas": [0.9, 0.999]}, [], "must contain 3 numbers"),
        ({"betas": [0.9, 0.999, 1.0]}, [], "each number must be at least 0 and less than 1"),
        ({"betas": [-0.1, 0.999, 0.9999]}, [], "each number must be at least 0 and less than 1"),
        ({"eps": -1e-8}, [], "eps = -1e-08: must be at least 0"),
        ({"lr": -1e-3}, [], "lr = -0.001: must be at least 0"),
        ({"weight_decay": -0.1}, [], "weight_decay = -0.1: must be at least 0"),
        ({"amsgrad": True}, [], "AdEMAMix does not take this key"),
        ({}, ["--beta2", "0.98"], "AdEMAMix takes 3 numbers as betas"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    params: dict[str, Any],
    argv: list[str],
    said: str,
) -> None:
    if params or argv:
        params = {WARMUP: 10} | params
    with pytest.raises(ConfigError) as refused:
        plan_of(monkeypatch, tmp_path, params, *argv)
    assert said in str(refused.value)


def test_lint_accepts_it_for_recipes_only(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config_of({"lr": "auto", WARMUP: "auto"})))
    for words, code, said in (
        (("--recipe", str(ROOT / "recipes" / "llama_nano_zero2.py")), 0, ""),
        (("--json-only",), 1, "is implemented only by recipes"),
    ):
        done = subprocess.run(
            [sys.executable, "tools/lint.py", str(file), "--world", "2", *words],
            cwd=ROOT,
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code and said in done.stdout, done.stdout + done.stderr
