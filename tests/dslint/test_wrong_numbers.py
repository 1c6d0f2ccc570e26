"""JSONs with which DeepSpeed 0.19.8 trains with wrong numbers and without a warning.

Each JSON is rejected with the reason, and the suggested fixes pass lint.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from recipekit.commands import lint
from recipekit.dslint import check
from recipekit.spec.errors import WRONG, Problem
from recipekit.spec.mesh import make_mesh
from shipped_jsons import FILES, put, shipped, without

ZERO = "zero_optimization"
FP16 = {"bf16.enabled": False, "fp16": {"enabled": True}}
QGZ = {f"{ZERO}.zero_quantized_gradients": True}
AUTOCAST = {"bf16.enabled": False, "torch_autocast": {"enabled": True, "dtype": "float16"}}
WHOLE = {f"{ZERO}.reduce_scatter": False, f"{ZERO}.overlap_comm": True}


@dataclass(frozen=True)
class WrongNumbers:
    """Changes to a shipped JSON, the key and a part of the rule that reject them, and the fix."""

    file: str
    changes: dict[str, Any]
    key: str
    rule: str
    fix: dict[str, Any]


CASES: dict[str, WrongNumbers] = {
    "fp16 without ZeRO": WrongNumbers(
        file="zero0", changes=FP16, key="fp16.enabled", rule="loss scale", fix={f"{ZERO}.stage": 1}
    ),
    "fp16 of a scale that stays": WrongNumbers(
        file="zero0",
        changes=FP16 | {"fp16.loss_scale": 128},
        key="fp16.enabled",
        rule="loss scale",
        fix={"fp16.loss_scale": 1},
    ),
    "fp16 of a small first scale": WrongNumbers(
        file="zero0",
        changes=FP16 | {"fp16.initial_scale_power": 0},
        key="fp16.enabled",
        rule="loss scale",
        fix={"fp16.enabled": False},
    ),
    "fp16 under a pipeline": WrongNumbers(
        file="zero0",
        changes=FP16 | {"pipeline.stages": 2},
        key="fp16.enabled",
        rule="loss scale",
        fix={f"{ZERO}.stage": 1},
    ),
    "qgZ in bf16": WrongNumbers(
        file="zero3",
        changes=QGZ,
        key=f"{ZERO}.zero_quantized_gradients",
        rule="as fp16",
        fix={"communication_data_type": "fp16"},
    ),
    "qgZ in fp32": WrongNumbers(
        file="zero3",
        changes=QGZ | {"bf16.enabled": False},
        key=f"{ZERO}.zero_quantized_gradients",
        rule="as fp16",
        fix={"communication_data_type": "fp16"},
    ),
    "qgZ sent in bf16": WrongNumbers(
        file="zero3_hosts",
        changes=QGZ | FP16 | {"communication_data_type": "bf16"},
        key=f"{ZERO}.zero_quantized_gradients",
        rule="as fp16",
        fix={"communication_data_type": "fp16"},
    ),
    "qgZ with autocast": WrongNumbers(
        file="zero3",
        changes=QGZ
        | {
            "bf16.enabled": False,
            "communication_data_type": "fp16",
            "torch_autocast": {"enabled": True, "dtype": "bf16"},
        },
        key=f"{ZERO}.zero_quantized_gradients",
        rule="torch_autocast sends",
        fix={"torch_autocast.enabled": False},
    ),
    "autocast in fp16 at stage 1": WrongNumbers(
        file="zero1_sgd",
        changes=AUTOCAST,
        key="torch_autocast.dtype",
        rule="clips the gradients",
        fix={"torch_autocast.dtype": "bfloat16"},
    ),
    "autocast in fp16 at stage 2": WrongNumbers(
        file="zero2",
        changes=AUTOCAST | {"torch_autocast.dtype": "half"},
        key="torch_autocast.dtype",
        rule="clips the gradients",
        fix={"torch_autocast.dtype": "bf16"},
    ),
    "autocast in fp16 at stage 3": WrongNumbers(
        file="zero3",
        changes=AUTOCAST | {"torch_autocast.dtype": "torch.float16"},
        key="torch_autocast.dtype",
        rule="clips the gradients",
        fix={"torch_autocast.enabled": False},
    ),
    "overlap without scatter": WrongNumbers(
        file="zero2",
        changes=WHOLE,
        key=f"{ZERO}.reduce_scatter",
        rule="frees a gradient",
        fix={f"{ZERO}.overlap_comm": False},
    ),
    "overlap without scatter, Adafactor": WrongNumbers(
        file="zero2_adafactor",
        changes=WHOLE,
        key=f"{ZERO}.reduce_scatter",
        rule="frees a gradient",
        fix={f"{ZERO}.reduce_scatter": True},
    ),
    "overlap without scatter, offload": WrongNumbers(
        file="zero2_cpu",
        changes=WHOLE,
        key=f"{ZERO}.reduce_scatter",
        rule="frees a gradient",
        fix={f"{ZERO}.overlap_comm": False},
    ),
}


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for path, value in changes.items():
        config = put(config, path, value)
    return config


def found(config: dict[str, Any], json_only: bool) -> list[Problem]:
    if "pipeline" in config and not json_only:
        return check.lint_config(check.LintInput(config, mesh=make_mesh(4, pp=2)))
    layout = {"pp": 2} if "pipeline" in config else {}
    script = check.OtherScript("trainer", layout) if json_only else None
    return check.lint_config(check.LintInput(without(config, "pipeline"), world=4, script=script))


@pytest.mark.parametrize("json_only", [False, True], ids=["recipe", "script"])
@pytest.mark.parametrize("name", CASES)
def test_wrong_numbers_are_refused_with_the_reason_and_the_fix_is_clean(
    name: str, json_only: bool
) -> None:
    case = CASES[name]
    config = changed(shipped(case.file), case.changes)
    if (
        config.get(ZERO, {}).get("stage") == 1 or "zero1" in case.file
    ):  # avoid BF16_Optimizer's rules
        config = without(without(config, "bf16.immediate_grad_update"), "data_types")
    (problem,) = [problem for problem in found(config, json_only) if problem.outcome == WRONG]
    assert problem.where.startswith(f"{case.key} = ") and case.rule in problem.rule
    after = found(changed(config, case.fix), json_only)
    assert not [
        problem
        for problem in after
        if problem.where.startswith(case.key) or problem.outcome == WRONG
    ], after


@pytest.mark.parametrize("file", [file.stem for file in FILES])
def test_no_shipped_file_trains_with_wrong_numbers(file: str) -> None:
    assert not [
        problem
        for problem in check.lint_config(check.LintInput(shipped(file)))
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
        for problem in check.lint_config(check.LintInput(changed(shipped(file), changes)))
        if problem.outcome == WRONG
    ] == []


def test_the_tool_exits_1_and_says_that_numbers_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(changed(shipped("zero0"), FP16)))
    problems, lines = lint.lint(str(file), json_only=True, filled_by="trainer")
    assert lint.verdict(problems) == "fails" and not any("clean" in line for line in lines)
    assert any(
        lint.format_problem(problem).endswith("(DeepSpeed 0.19.8 trains with wrong numbers)")
        for problem in problems
    )


def test_a_recipe_refuses_autocast_in_fp16_without_zero_too() -> None:
    config = changed(shipped("zero0"), AUTOCAST)
    assert any(
        "clip and report scaled gradients" in problem.rule
        for problem in check.lint_config(check.LintInput(config))
    )
    assert not any(
        "scaled gradients" in problem.rule
        for problem in check.lint_config(check.LintInput(config, script=check.OtherScript()))
    )


def test_fp16_by_auto_is_what_it_becomes() -> None:
    """A recipe resolves it to true if bf16 is off. Trainer's value is unknown before Trainer
    starts.
    """
    config = changed(shipped("zero0"), {"fp16.enabled": "auto", "bf16.enabled": False})
    assert [problem.outcome for problem in check.lint_config(check.LintInput(config))].count(
        WRONG
    ) == 1
    assert not found(config, json_only=True)
