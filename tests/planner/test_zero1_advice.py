"""The dry run recommends ZeRO-1 where it moves fewer bytes than ZeRO-2 and fits the device."""

from dataclasses import replace
from typing import Any

import pytest
from recipe_files import FILES, load
from recipekit.plan import RunPlan, resolve_run
from recipekit.planner.dry_run import print_dry_run
from recipekit.planner.resolve import resolve_here
from recipekit.planner.zero1_advice import zero1_advice
from recipekit.spec.command import parse
from recipekit.spec.mesh import Mesh

NAME = "qwen3_0_6b_zero2"
GIB = 2**30


def plan_of(*argv: str) -> RunPlan:
    flags = ["--dry_run", "--device", "H200", *argv]
    return resolve_run(parse(load(NAME).RECIPE, FILES[NAME], flags))


@pytest.fixture(scope="module")
def resolved() -> tuple[RunPlan, Any]:
    plan = plan_of("--world", "2")
    return plan, resolve_here(plan)[0]


def on_ranks(resolved: tuple[RunPlan, Any], dp: int, accumulation: int) -> tuple[RunPlan, Any]:
    plan, model_plan = resolved
    load = replace(model_plan.load, accumulation=accumulation)
    layout = replace(model_plan.layout, mesh=Mesh(dp=dp))
    return replace(plan, mesh=Mesh(dp=dp)), replace(model_plan, load=load, layout=layout)


@pytest.mark.parametrize(
    ("dp", "accumulation", "advised"), [(2, 3, False), (2, 4, True), (1, 1, True), (8, 64, True)]
)
def test_it_takes_four_micro_batches_or_a_single_rank(
    resolved: tuple[RunPlan, Any], dp: int, accumulation: int, advised: bool
) -> None:
    assert bool(zero1_advice(*on_ranks(resolved, dp, accumulation), 141 * GIB)) is advised


def test_zero_1_must_fit_with_its_activations(resolved: tuple[RunPlan, Any]) -> None:
    """The limit is 93 % of the device's memory: 6 + 12 / dp bytes per parameter, and more."""
    plan, model_plan = on_ranks(resolved, 2, 4)
    line = zero1_advice(plan, model_plan, 141 * GIB)
    most = float(line.split("at most ")[1].split(" GiB")[0])
    states = model_plan.as_json()["blueprint"]["trained"] * (6 + 12 / 2) / GIB
    assert states < most
    assert zero1_advice(plan, model_plan, int((most + 0.02) / 0.93 * GIB)) == line
    assert zero1_advice(plan, model_plan, int((most - 0.02) / 0.93 * GIB)) == ""
    assert zero1_advice(plan, replace(model_plan, activations=()), 141 * GIB) == ""


@pytest.mark.parametrize(
    "changed",
    [
        {"zero_optimization": {"stage": 1}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {"optimizer": {"type": "Lion", "params": {}}},
        {"bf16": {"enabled": False}},
    ],
    ids=str,
)
def test_other_strategies_get_no_advice(
    resolved: tuple[RunPlan, Any], changed: dict[str, Any]
) -> None:
    plan, model_plan = on_ranks(resolved, 1, 8)
    assert zero1_advice(plan, model_plan, 141 * GIB)
    other = replace(plan, ds_config=plan.ds_config | changed)
    assert zero1_advice(other, model_plan, 141 * GIB) == ""


def test_a_dry_run_prints_the_advice_once(capsys: pytest.CaptureFixture[str]) -> None:
    print_dry_run(plan_of("--world", "1"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("advice")]
    assert len(lines) == 1 and lines[0].endswith("--deepspeed_config zero1.json"), lines
    assert "moves 10 bytes per parameter and micro-batch instead of 26" in lines[0]

    print_dry_run(plan_of("--world", "1", "--deepspeed_config", "zero1.json"))
    assert "advice" not in capsys.readouterr().out
