"""A dry run and a start must reject the same degrees, before a rank builds a model."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from recipekit.architectures.families import tiny_config
from recipekit.model.describe import draft_blueprint
from recipekit.model.empty import empty_model
from recipekit.plan import RunPlan, resolve_run
from recipekit.planner.dry_run import print_dry_run
from recipekit.planner.resolve import num_stages, planned_layout, resolve_model
from recipekit.runtime.resolution import check_memory, target_here
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe

BASE = Recipe(
    init="random",
    tokenizer="bytes",
    seq_len=64,
    micro_batch=1,
    global_batch=8,
    steps=2,
    warmup_steps=0,
    ds_config="zero1.json",
)


@pytest.mark.parametrize("schedule, stages", [("1f1b", 2), ("dualpipev", 4)])
def test_a_layout_has_the_stages_of_its_schedule(schedule, stages):
    """A DualPipeV rank has two stages, one for each direction."""
    mesh, blueprint = Mesh(pp=2), draft_blueprint(empty_model(tiny_config("llama", 264), "eager"))
    assert (
        num_stages(mesh, schedule) == stages
        and len(planned_layout(mesh, blueprint, schedule).bounds) == stages + 1
    )


def with_lora(model):
    return get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))


@dataclass(frozen=True)
class RefusedDegree:
    """A model type, the flags of its run, and the error message."""

    kind: str
    task: str
    flags: str
    says: str


REFUSED = {
    "pp without a plan": RefusedDegree(
        kind="gpt2",
        task="pretrain",
        flags="--pp 2",
        says="pp > 1 with GPT2LMHeadModel: this model publishes no pipeline plan",
    ),
    "pp without a plan, gpt_neo": RefusedDegree(
        kind="gpt_neo",
        task="pretrain",
        flags="--pp 2 --attention eager",
        says="pp > 1 with GPTNeoForCausalLM: this model publishes no pipeline plan",
    ),
    "pp without a plan, xglm": RefusedDegree(
        kind="xglm",
        task="pretrain",
        flags="--pp 2 --attention eager",
        says="this model publishes no pipeline plan",
    ),
    "tp without a plan": RefusedDegree(
        kind="gpt2",
        task="pretrain",
        flags="--tp 2",
        says="tp > 1 with GPT2LMHeadModel: this model publishes no base_model_tp_plan",
    ),
    "experts without a preset": RefusedDegree(
        kind="dots1",
        task="pretrain",
        flags="--ep 2",
        says="DeepSpeed's AutoEP does not take it apart",
    ),
    "sinks under sp": RefusedDegree(
        kind="gpt_oss",
        task="pretrain",
        flags="--sp 2 --attention eager",
        says="sp > 1 with GptOssForCausalLM: model.layers.0.self_attn.sinks",
    ),
    "state space under sp": RefusedDegree(
        kind="mamba2",
        task="pretrain",
        flags="--sp 2 --attention eager",
        says="its layers carry information along the row",
    ),
    "adapter under tp": RefusedDegree(
        kind="llama",
        task="pretrain",
        flags="--tp 2",
        says="tp > 1: peft's adapters do not support tensor-parallel shards",
    ),
}


def plan_of(folder: Path, kind: str, task: str, words: str) -> RunPlan:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config(kind, 264, task)))
    recipe = dataclasses.replace(BASE, model=str(folder), task=task)
    return resolve_run(
        parse(
            recipe,
            Path("mine.py"),
            ["--dry_run", "--world", "2", *words.split(), "--out", str(folder.with_name("run"))],
        )
    )


def config_of(plan: RunPlan) -> dict[str, Any]:
    assert plan.model_config is not None
    return plan.model_config


@pytest.mark.parametrize("case", REFUSED)
def test_a_start_refuses_a_degree_as_the_dry_run_does(tmp_path: Path, case: str) -> None:
    refused = REFUSED[case]
    plan = plan_of(tmp_path / "model", refused.kind, refused.task, refused.flags)
    if case.startswith("adapter"):
        plan = dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, adapt=with_lora))
    with pytest.raises(ConfigError) as shown:
        print_dry_run(plan)
    with pytest.raises(ConfigError) as started:
        resolve_model(plan, config_of(plan), target_here(torch.device("cpu")))
    assert refused.says in str(shown.value) and str(started.value) == str(shown.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("llama", "--pp 2"), ("llama", "--tp 2"), ("gpt2", "--sp 2"), ("qwen3_moe", "--ep 2")],
)
def test_a_degree_that_fits_is_shown_and_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, words: str
) -> None:
    plan = plan_of(tmp_path / "model", kind, "pretrain", words)
    print_dry_run(plan)
    device = torch.device("cpu")
    model_plan, _ = resolve_model(plan, config_of(plan), target_here(device))
    check_memory(plan, model_plan.terms, device)
    assert f"_{words[2:4]}2" in capsys.readouterr().out
