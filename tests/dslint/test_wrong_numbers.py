"""JSONs that DeepSpeed 0.19.8 trains with wrong numbers and without a warning: refused with the
reason, and their fixes are clean.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from recipekit.commands import lint
from recipekit.dslint import check
from recipekit.spec.mesh import make_mesh
from recipekit.spec.refusal import WRONG, Problem
from test_ds_config import FILES, put, shipped, without

ZERO = "zero_optimization"
FP16 = {"bf16.enabled": False, "fp16": {"enabled": True}}
QGZ = {f"{ZERO}.zero_quantized_gradients": True}
AUTOCAST = {"bf16.enabled": False, "torch_autocast": {"enabled": True, "dtype": "float16"}}
WHOLE = {f"{ZERO}.reduce_scatter": False, f"{ZERO}.overlap_comm": True}

# name -> file, changes, the key that is refused, a part of the rule, changes after which the file
# is clean
CASES: dict[str, tuple[str, dict[str, Any], str, str, dict[str, Any]]] = {
    "fp16 without ZeRO": ("zero0", FP16, "fp16.enabled", "loss scale", {f"{ZERO}.stage": 1}),
    "fp16 of a scale that stays": (
        "zero0",
        FP16 | {"fp16.loss_scale": 128},
        "fp16.enabled",
        "loss scale",
        {"fp16.loss_scale": 1},
    ),
    "fp16 of a small first scale": (
        "zero0",
        FP16 | {"fp16.initial_scale_power": 0},
        "fp16.enabled",
        "loss scale",
        {"fp16.enabled": False},
    ),
    "fp16 under a pipeline": (
        "zero0",
        FP16 | {"pipeline.stages": 2},
        "fp16.enabled",
        "loss scale",
        {f"{ZERO}.stage": 1},
    ),
    "qgZ in bf16": (
        "zero3",
        QGZ,
        f"{ZERO}.zero_quantized_gradients",
        "as fp16",
        {"communication_data_type": "fp16"},
    ),
    "qgZ in fp32": (
        "zero3",
        QGZ | {"bf16.enabled": False},
        f"{ZERO}.zero_quantized_gradients",
        "as fp16",
        {"communication_data_type": "fp16"},
    ),
    "qgZ sent in bf16": (
        "zero3_hosts",
        QGZ | FP16 | {"communication_data_type": "bf16"},
        f"{ZERO}.zero_quantized_gradients",
        "as fp16",
        {"communication_data_type": "fp16"},
    ),
    "qgZ with autocast": (
        "zero3",
        QGZ
        | {
            "bf16.enabled": False,
            "communication_data_type": "fp16",
            "torch_autocast": {"enabled": True, "dtype": "bf16"},
        },
        f"{ZERO}.zero_quantized_gradients",
        "torch_autocast sends",
        {"torch_autocast.enabled": False},
    ),
    "autocast in fp16 at stage 1": (
        "zero1_sgd",
        AUTOCAST,
        "torch_autocast.dtype",
        "clips the gradients",
        {"torch_autocast.dtype": "bfloat16"},
    ),
    "autocast in fp16 at stage 2": (
        "zero2",
        AUTOCAST | {"torch_autocast.dtype": "half"},
        "torch_autocast.dtype",
        "clips the gradients",
        {"torch_autocast.dtype": "bf16"},
    ),
    "autocast in fp16 at stage 3": (
        "zero3",
        AUTOCAST | {"torch_autocast.dtype": "torch.float16"},
        "torch_autocast.dtype",
        "clips the gradients",
        {"torch_autocast.enabled": False},
    ),
    "overlap without scatter": (
        "zero2",
        WHOLE,
        f"{ZERO}.reduce_scatter",
        "frees a gradient",
        {f"{ZERO}.overlap_comm": False},
    ),
    "overlap without scatter, Adafactor": (
        "zero2_adafactor",
        WHOLE,
        f"{ZERO}.reduce_scatter",
        "frees a gradient",
        {f"{ZERO}.reduce_scatter": True},
    ),
    "overlap without scatter, offload": (
        "zero2_cpu",
        WHOLE,
        f"{ZERO}.reduce_scatter",
        "frees a gradient",
        {f"{ZERO}.overlap_comm": False},
    ),
}


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for path, value in changes.items():
        config = put(config, path, value)
    return config


def found(config: dict[str, Any], json_only: bool) -> list[Problem]:
    if "pipeline" in config and not json_only:
        return check.check(check.LintInput(config, mesh=make_mesh(4, pp=2)))
    layout = {"pp": 2} if "pipeline" in config else {}
    script = check.OtherScript("trainer", layout) if json_only else None
    return check.check(check.LintInput(without(config, "pipeline"), world=4, script=script))


@pytest.mark.parametrize("json_only", [False, True], ids=["recipe", "script"])
@pytest.mark.parametrize("name", CASES)
def test_wrong_numbers_are_refused_with_the_reason_and_the_fix_is_clean(
    name: str, json_only: bool
) -> None:
    file, changes, key, rule, fix = CASES[name]
    config = changed(shipped(file), changes)
    if config.get(ZERO, {}).get("stage") == 1 or "zero1" in file:  # not BF16_Optimizer's own rules
        config = without(without(config, "bf16.immediate_grad_update"), "data_types")
    (problem,) = [problem for problem in found(config, json_only) if problem.outcome == WRONG]
    assert problem.where.startswith(f"{key} = ") and rule in problem.rule
    after = found(changed(config, fix), json_only)
    assert not [
        problem for problem in after if problem.where.startswith(key) or problem.outcome == WRONG
    ], after


@pytest.mark.parametrize("file", [file.stem for file in FILES])
def test_no_shipped_file_trains_with_wrong_numbers(file: str) -> None:
    assert not [
        problem
        for problem in check.check(check.LintInput(shipped(file)))
        if problem.outcome == WRONG
    ]


RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "fp16 at stage 1": ("zero1", FP16 | {"data_types": {}, "bf16": {"enabled": False}}),
    "fp16 at stage 2": ("zero2", FP16),
    "fp16 at stage 3": ("zero3", FP16),
    "fp16 switched off without ZeRO": ("zero0", {"fp16": {"enabled": False}}),
    "qgZ in fp16": ("zero3", QGZ | FP16),
    "qgZ switched off": ("zero3", {f"{ZERO}.zero_quantized_gradients": False}),
    "qgZ of bf16 gradients that are sent in fp16": (
        "zero3",
        QGZ | {"communication_data_type": "fp16"},
    ),
    "overlap at stage 3 without scatter": ("zero3", WHOLE),
    "no overlap without scatter": ("zero2", WHOLE | {f"{ZERO}.overlap_comm": False}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_trains_right_is_clean(name: str) -> None:
    file, changes = RIGHT[name]
    assert [
        str(problem)
        for problem in check.check(check.LintInput(changed(shipped(file), changes)))
        if problem.outcome == WRONG
    ] == []


def test_the_tool_exits_1_and_says_that_numbers_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(changed(shipped("zero0"), FP16)))
    problems, lines = lint.lint(str(file), json_only=True, filled_by="trainer")
    assert lint.verdict(problems) == "fails" and not any("clean" in line for line in lines)
    assert any(
        lint.told(problem).endswith("(DeepSpeed 0.19.8 trains with wrong numbers)")
        for problem in problems
    )


def test_a_recipe_refuses_autocast_in_fp16_without_zero_too() -> None:
    config = changed(shipped("zero0"), AUTOCAST)
    assert any(
        "clip and report scaled gradients" in problem.rule
        for problem in check.check(check.LintInput(config))
    )
    assert not any(
        "scaled gradients" in problem.rule
        for problem in check.check(check.LintInput(config, script=check.OtherScript()))
    )


def test_fp16_by_auto_is_what_it_becomes() -> None:
    """A recipe writes true where bf16 is off; Trainer's number is not known before it starts."""
    config = changed(shipped("zero0"), {"fp16.enabled": "auto", "bf16.enabled": False})
    assert [problem.outcome for problem in check.check(check.LintInput(config))].count(WRONG) == 1
    assert not found(config, json_only=True)
