"""What a start compares and refuses before it loads a checkpoint: the adapter of the run to resume,
and weights that are not finite.
"""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from recipekit.runtime import engine
from recipekit.runtime.engine import check_resume, refuse_values
from recipekit.spec.recipe import Recipe
from recipekit.spec.refusal import Problem, Refusal
from recipekit.spec.run_folder import ADAPTER, FACTS
from test_model import ds_config, tiny_config


def wrapped(model: Any, **fields: Any) -> Any:
    return get_peft_model(model, LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | fields))


def plan_of(folder: Path, resume_from: Path | None, adapt: Any, task: str = "sft") -> Any:
    recipe = Recipe(
        model="none", init="random", task=task, adapt=adapt, resume="auto", out=str(folder)
    )
    return SimpleNamespace(resume_from=resume_from, recipe=recipe, ds_config=ds_config(0))


@pytest.mark.parametrize("task", ["sft", "reward"])
def test_the_adapter_of_a_run_is_made_again_and_compared(tmp_path: Path, task: str) -> None:
    """Of the task's own model: the score of a reward model is a module to save, which a causal
    model does not have.
    """
    more = {"modules_to_save": ["score"]} if task == "reward" else {}
    adapt, config = (
        partial(wrapped, **more),
        tiny_config("llama") | ({"num_labels": 1} if task == "reward" else {}),
    )
    (tmp_path / FACTS).write_text(json.dumps({"identity": {ADAPTER: None}}))
    check_resume(plan_of(tmp_path, tmp_path, None, task), config)
    check_resume(plan_of(tmp_path, None, adapt, task), config)  # a new run
    with pytest.raises(
        Refusal, match=r"adapt makes one: the run in .* has no adapter of peft"
    ) as refused:
        check_resume(plan_of(tmp_path, tmp_path, adapt, task), config)
    assert "Restore it, start a new run with --out NEW" in str(refused.value)
    saved = {"peft_type": "LORA", "r": 2}
    (tmp_path / FACTS).write_text(json.dumps({"identity": {ADAPTER: saved}}))
    with pytest.raises(
        Refusal, match=r"adapt makes no adapter of peft: the run in .* has an adapter of peft"
    ):
        check_resume(plan_of(tmp_path, tmp_path, None, task), config)
    with pytest.raises(
        Refusal, match=r"adapt: target_modules = \['q_proj'\]: the run in .* has None"
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
            refuse_values(built)
            continue
        with pytest.raises(Refusal) as refused:
            refuse_values(built)
        assert refused.value.problems == [*own, *others]
