"""A dry run and a start refuse the same degrees, before a rank builds anything."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from recipekit.architectures.families import tiny_config
from recipekit.model.describe import draft
from recipekit.model.empty import empty_model
from recipekit.plan import Plan, make_plan
from recipekit.planner.show import layout_of, show, stages_in
from recipekit.runtime.start import check_memory
from recipekit.spec.command import parse
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe
from recipekit.spec.refusal import Refusal

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
    """A rank of DualPipeV has two: one on the way there, and one on the way back."""
    mesh, blueprint = Mesh(pp=2), draft(empty_model(tiny_config("llama", 264), "eager"))
    assert (
        stages_in(mesh, schedule) == stages
        and len(layout_of(mesh, blueprint, schedule).bounds) == stages + 1
    )


def with_lora(model):
    return get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))


# case -> (model type, task, degree and ranks, what is refused)
REFUSED = {
    "pp without a plan": (
        "gpt2",
        "pretrain",
        "--pp 2",
        "pp > 1 with GPT2LMHeadModel: this model publishes no pipeline plan",
    ),
    "pp without a plan, gpt_neo": (
        "gpt_neo",
        "pretrain",
        "--pp 2 --attention eager",
        "pp > 1 with GPTNeoForCausalLM: this model publishes no pipeline plan",
    ),
    "pp without a plan, codegen": (
        "codegen",
        "pretrain",
        "--pp 2 --attention eager",
        "this model publishes no pipeline plan",
    ),
    "tp without a plan": (
        "gpt2",
        "pretrain",
        "--tp 2",
        "tp > 1 with GPT2LMHeadModel: this model publishes no base_model_tp_plan",
    ),
    "experts without a preset": (
        "dots1",
        "pretrain",
        "--ep 2",
        "DeepSpeed's AutoEP does not take it apart",
    ),
    "sinks under sp": (
        "gpt_oss",
        "pretrain",
        "--sp 2 --attention eager",
        "sp > 1 with GptOssForCausalLM: model.layers.0.self_attn.sinks",
    ),
    "state space under sp": (
        "mamba2",
        "pretrain",
        "--sp 2 --attention eager",
        "its layers carry information along the row",
    ),
    "adapter under tp": (
        "llama",
        "pretrain",
        "--tp 2",
        "tp > 1: peft's adapters do not support tensor-parallel shards",
    ),
}


def plan_of(folder: Path, kind: str, task: str, words: str) -> Plan:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config(kind, 264, task)))
    recipe = dataclasses.replace(BASE, model=str(folder), task=task)
    return make_plan(
        parse(
            recipe,
            Path("mine.py"),
            ["--dry_run", "--world", "2", *words.split(), "--out", str(folder.with_name("run"))],
        )
    )


@pytest.mark.parametrize("case", REFUSED)
def test_a_start_refuses_a_degree_as_the_dry_run_does(tmp_path: Path, case: str) -> None:
    kind, task, words, says = REFUSED[case]
    plan = plan_of(tmp_path / "model", kind, task, words)
    if case.startswith("adapter"):
        plan = dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, adapt=with_lora))
    with pytest.raises(Refusal) as shown:
        show(plan)
    with pytest.raises(Refusal) as started:
        check_memory(plan, torch.device("cpu"))
    assert says in str(shown.value) and str(started.value) == str(shown.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("llama", "--pp 2"), ("llama", "--tp 2"), ("gpt2", "--sp 2"), ("qwen3_moe", "--ep 2")],
)
def test_a_degree_that_fits_is_shown_and_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, words: str
) -> None:
    plan = plan_of(tmp_path / "model", kind, "pretrain", words)
    show(plan)
    check_memory(plan, torch.device("cpu"))
    assert f"_{words[2:4]}2" in capsys.readouterr().out
