"""Every decision about a model is made once, with the same result in a dry run and in a start."""

import copy
import dataclasses
import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from built_models import plan_of
from peft import LoraConfig, get_peft_model
from pool import ROOT, environment
from recipekit.architectures.families import tiny_config
from recipekit.model.describe import draft_blueprint
from recipekit.model.model_plan import changed_choices, planned_memory
from recipekit.planner.memory import rank_terms
from recipekit.planner.resolve import TargetDevice, resolve_model
from recipekit.runtime import resolution
from recipekit.spec.errors import ConfigError
from recipekit.spec.memory_terms import ACCELERATOR, total_bytes
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe

CPU = TargetDevice(torch.device("cpu"), "", compiles=False)
H100 = TargetDevice(torch.device("cuda"), "NVIDIA H100 80GB HBM3", compiles=True)
ZERO1 = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
RECIPE = Recipe(model="none", init="random", seq_len=64, micro_batch=1, global_batch=4)


def resolved(target: TargetDevice = CPU, **changes: Any) -> Any:
    """Return the model plan of a small Llama, and the model."""
    config = tiny_config("llama", 264)
    recipe = dataclasses.replace(RECIPE, **changes)
    return resolve_model(plan_of(recipe, config, ZERO1, Mesh(pp=recipe.pp)), config, target)


def test_one_start_makes_each_decision_once() -> None:
    """Small copies show how the full model behaves, and the full model is created only once."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "support" / "trace_start.py"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    calls = dict(re.findall(r"^(.+): (\d+) calls$", done.stdout, re.MULTILINE))
    once = (
        "attention",
        "loss path",
        "tp and pp plans",
        "blueprint",
        "memory terms",
        "full empty model",
    )
    assert {choice: calls[choice] for choice in once} == dict.fromkeys(once, "1")


def test_the_model_of_the_plan_is_whole_and_unchanged() -> None:
    """The builder fills this model, so neither an adapter nor the loss may have changed it."""

    def adapt(model: Any) -> Any:
        return get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))

    plain, whole = resolved()
    with_adapter, base = resolved(adapt=adapt)
    for model in (whole, base):
        assert draft_blueprint(model, plain.plans) == plain.blueprint
        assert all(parameter.is_meta for parameter in model.parameters())
        assert "forward" not in vars(model)
    trained = with_adapter.blueprint.trained
    assert trained and all("lora" in name for name in trained) and with_adapter.blueprint.adapter


def test_run_json_has_the_decisions_in_a_few_lines() -> None:
    model_plan, _ = resolved(pp=2)
    stored = json.loads(json.dumps(model_plan.as_json()))
    assert stored["architecture"] == "LlamaForCausalLM"
    assert stored["attention"] == "varlen" and not stored["attention_note"]
    assert stored["loss_path"] == {"in_chunks": True, "why_full": ""}
    assert stored["compile"]["scope"] == "off"
    assert stored["split"] == stored["layout"]["bounds"] == [0, 2, 4]
    parameters = [tensor for tensor in model_plan.blueprint.tensors if not tensor.buffer]
    assert stored["blueprint"]["parameters"] == len(parameters)
    assert stored["blueprint"]["elements"] == sum(tensor.numel for tensor in parameters)
    assert len(stored["memory"]) == 2 and stored["load"]["chunked"]
    assert len(json.dumps(stored)) < 5000


def test_the_terms_are_of_each_stage_and_the_fullest_counts() -> None:
    model_plan, _ = resolved(pp=2)
    expected = [
        rank_terms(model_plan.blueprint, model_plan.layout, ZERO1, model_plan.load, stage)
        for stage in range(2)
    ]
    assert [list(terms) for terms in model_plan.terms] == expected
    most = max(total_bytes(terms, ACCELERATOR) for terms in expected)
    assert planned_memory(model_plan) == {"states": most}
    assert planned_memory(resolved()[0]).keys() == {"states", "with_activations"}


@pytest.mark.parametrize(
    ("target", "changes", "scope", "why"),
    [
        (CPU, {}, "off", "NVIDIA GPUs only"),
        (H100, {}, "layers", "no hooks or collectives"),
        (CPU, {"compile": "on"}, "layers", "no hooks or collectives"),
        (H100, {"compile": "off"}, "off", "--compile off"),
        (H100, {"tp": 2}, "parts", "does not allow whole layers"),
    ],
)
def test_the_compile_choice_has_a_reason(
    target: TargetDevice, changes: dict[str, Any], scope: str, why: str
) -> None:
    model_plan, _ = resolved(target, **changes)
    assert model_plan.compile.scope == scope and why in model_plan.compile.why


@pytest.mark.parametrize(
    ("changes", "why", "fix"),
    [
        ({}, "--compile auto compiles on NVIDIA GPUs only", "Use --compile on"),
        ({"compile": "on", "tp": 2}, "does not allow whole layers", "--recompute_every N"),
    ],
)
def test_a_budget_needs_whole_layers(changes: dict[str, Any], why: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolved(CPU, activation_budget=0.5, **changes)
    (problem,) = refused.value.problems
    assert problem.where == "activation_budget = 0.5" and refused.value.exit_code == 2
    assert why in str(problem) and fix in str(problem) and "\n" not in str(problem)


def test_a_budget_is_in_the_plan() -> None:
    full, half, least = (
        planned_memory(resolved(H100, activation_budget=budget)[0])["with_activations"]
        for budget in (1.0, 0.5, 0.0)
    )
    assert full > half > least


def test_flops_are_counted_for_a_device_with_a_known_peak() -> None:
    assert resolved(CPU)[0].flops is None
    flops = resolved(H100)[0].flops
    assert flops is not None and flops.per_unit > 0 and not flops.bidirectional


def test_each_changed_choice_is_named() -> None:
    before = resolved(H100)[0].as_json()
    now = resolved(CPU, attention="eager", loss="whole")[0].as_json()
    assert changed_choices(before, now) == [
        "resume: attention was varlen and is now eager",
        "resume: the loss was computed in chunks and is now computed from full logits",
        "resume: compile was layers and is now off",
    ]
    assert changed_choices(before, copy.deepcopy(before)) == []


@pytest.mark.parametrize("stored", [{}, {"attention": 3, "loss_path": [], "compile": {}}])
def test_what_an_older_run_did_not_store_is_not_compared(stored: dict[str, Any]) -> None:
    assert changed_choices(stored, resolved()[0].as_json()) == []


def test_a_model_whose_config_was_not_on_this_machine_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check must run after the model's config.json has been downloaded."""
    monkeypatch.setattr(resolution, "free_memory", lambda: 1)
    monkeypatch.setattr(
        resolution, "shared_problems", lambda refusal: refusal.problems if refusal else []
    )
    config = tiny_config("llama", 264)
    plan = plan_of(RECIPE, None, ZERO1, Mesh())
    with pytest.raises(ConfigError, match="activations not counted"):
        resolution.resolve_together(plan, config, torch.device("cpu"))
    monkeypatch.setattr(resolution, "free_memory", lambda: 1 << 40)
    assert resolution.resolve_together(plan, config, torch.device("cpu"))[0].model_config == config
