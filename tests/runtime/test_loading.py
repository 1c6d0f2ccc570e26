"""Checks before a checkpoint is loaded: the resumed run's adapter, and non-finite weights."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from recipekit.runtime import engine
from recipekit.runtime.engine import check_finite_weights, check_resume
from recipekit.spec.errors import ConfigError, Problem
from recipekit.spec.recipe import Recipe
from recipekit.spec.run_folder import ADAPTER_KEY, RUN_JSON
from tiny_models import ds_config, tiny_config


def wrapped(model: Any, **fields: Any) -> Any:
    return get_peft_model(model, LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | fields))


def plan_of(folder: Path, resume_from: Path | None, adapt: Any, task: str = "sft") -> Any:
    recipe = Recipe(
        model="none", init="random", task=task, adapt=adapt, resume="auto", out=str(folder)
    )
    return SimpleNamespace(resume_from=resume_from, recipe=recipe, ds_config=ds_config(0))


@pytest.mark.parametrize("task", ["sft", "reward"])
def test_the_adapter_of_a_run_is_made_again_and_compared(tmp_path: Path, task: str) -> None:
    """The adapter is created for the task's model class.

    A reward model has a score module that must be saved, and a causal model does not.
    """
    more = {"modules_to_save": ["score"]} if task == "reward" else {}
    adapt, config = (
        partial(wrapped, **more),
        tiny_config("llama") | ({"num_labels": 1} if task == "reward" else {}),
    )
    (tmp_path / RUN_JSON).write_text(json.dumps({"identity": {ADAPTER_KEY: None}}))
    check_resume(plan_of(tmp_path, tmp_path, None, task), config)
    check_resume(plan_of(tmp_path, None, adapt, task), config)  # a new run
    with pytest.raises(
        ConfigError, match=r"adapt makes one: the run in .* has no adapter of peft"
    ) as refused:
        check_resume(plan_of(tmp_path, tmp_path, adapt, task), config)
    assert "Restore it, start a new run with --out NEW" in str(refused.value)
    saved = {"peft_type": "LORA", "r": 2}
    (tmp_path / RUN_JSON).write_text(json.dumps({"identity": {ADAPTER_KEY: saved}}))
    with pytest.raises(
        ConfigError, match=r"adapt makes no adapter of peft: the run in .* has an adapter of peft"
    ):
        check_resume(plan_of(tmp_path, tmp_path, None, task), config)
    with pytest.raises(
        ConfigError, match=r"adapt: target_modules = \['q_proj'\]: the run in .* has None"
    ):
        check_resume(plan_of(tmp_path, tmp_path, adapt, task), config)


@pytest.mark.parametrize("own", [[], [Problem("a.weight", "holds NaN", "repair it")]])
@pytest.mark.parametrize("others", [[], [Problem("b.weight", "holds NaN", "repair it")]])
def test_a_value_that_one_rank_read_is_refused_on_all(
    monkeypatch: pytest.MonkeyPatch, own: list[Problem], others: list[Problem]
) -> None:
    monkeypatch.setattr(
        engine, "shared_problems", lambda problem: [*(problem.problems if problem else []), *others]
    )
    for weights in (SimpleNamespace(not_finite=own), *([None] if not own else [])):
        built: Any = SimpleNamespace(weights=weights)
        if not own and not others:
            check_finite_weights(built)
            continue
        with pytest.raises(ConfigError) as refused:
            check_finite_weights(built)
        assert refused.value.problems == [*own, *others]
