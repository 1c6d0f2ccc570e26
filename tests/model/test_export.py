"""The export for transformers and peft must be the model that was trained."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from built_models import build_model
from peft_models import NUMBERS, add_lora
from recipekit.data.batching import DataRank
from recipekit.data.held_out import eval_rows
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import request_from_recipe
from recipekit.model.export import save_small_files
from recipekit.model.small_files import Origin, collect_small_files
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from recipekit.tasks import pretrain
from shipped_jsons import strategy
from tiny_models import ds_config, save_tiny, tiny_config
from transformers import AutoConfig


def run_recipe(recipe: Recipe, lora: bool) -> tuple[int, list[str]]:
    """Run a recipe on a rank of a pool.

    Return the exit code and the trained parameters' names.
    """
    import deepspeed
    from recipekit.train import main

    engines = []
    real = deepspeed.initialize

    def recorded(*args: Any, **options: Any) -> Any:
        engines.append(real(*args, **options))
        return engines[-1]

    deepspeed.initialize = recorded
    try:
        adapt = add_lora if lora else None
        code = main(
            resolve_run(parse(dataclasses.replace(recipe, adapt=adapt), Path("export.py"), []))
        )
    finally:
        deepspeed.initialize = real
    return code, [
        name
        for name, parameter in engines[0][0].module.named_parameters()
        if parameter.requires_grad
    ]


def held_out_loss(model: Any, recipe: Recipe) -> float:
    batches = eval_rows(request_from_recipe(recipe), byte_tokenizer(), rank=DataRank(1, 0))
    tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    with torch.no_grad():
        return (
            sum(
                pretrain.loss(pretrain.forward(model.eval(), batch), batch, by_row=False).item()
                for batch in batches
            )
            / tokens
        )


@pytest.mark.parametrize(
    "merge", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["merged", "adapter"]
)
def test_lora_exports_the_adapter_or_the_merged_model(pools, tmp_path, merge):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    save_tiny(tmp_path / "base", "qwen3")
    out = tmp_path / "run"
    # A high rate, so that four steps learn much from any text (each Python version has a different
    # library).
    numbers = NUMBERS | {"lr": 1e-2}
    recipe = Recipe(
        model=str(tmp_path / "base"),
        ds_config=strategy("zero3"),
        merge=merge,
        out=str(out),
        **numbers,
    )
    for code, trained in pools.run(2, run_recipe, recipe=recipe, lora=True):
        assert code == 0
        assert trained and all("lora_" in name for name in trained)
    (tmp_path / "plain").touch()
    # The file modes follow the umask.
    assert {file.stat().st_mode for file in out.rglob("*") if file.is_file()} == {
        (tmp_path / "plain").stat().st_mode
    }
    engine_loss = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"]
    card = (out / "hf" / "README.md").read_text()
    assert f"library_name: {'transformers' if merge else 'peft'}\n" in card
    assert f"| `eval_loss` | {engine_loss:.6g} |" in card and "| steps | 4 of 4 |" in card
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    before = held_out_loss(base, recipe)
    if merge:
        model = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)
    else:
        assert {file.name for file in (out / "hf").glob("*.safetensors")} == {
            "adapter_model.safetensors"
        }
        model = PeftModel.from_pretrained(base, out / "hf")
    loss = held_out_loss(model, recipe)
    assert abs(loss - engine_loss) < 1e-5 * engine_loss
    print(f"held-out loss {before:.4f} -> {loss:.4f}")
    assert loss < before - 0.01  # the adapter did learn


@pytest.mark.slow
def test_the_export_of_every_strategy_is_what_the_engine_evaluated(pools, tmp_path):
    """After bf16 training, the exported files have the engine's held-out loss in transformers."""
    from transformers import AutoModelForCausalLM

    for file, tp in (("zero0", 1), ("zero2", 1), ("zero3", 1), ("zero3", 2), ("zero1", 2)):
        out = tmp_path / f"{file}_{tp}"
        recipe = Recipe(
            model="Qwen/Qwen3-0.6B",
            ds_config=strategy(file, bf16=True),
            tp=tp,
            out=str(out),
            **NUMBERS,
        )
        assert pools.run(2, run_tiny, recipe=recipe) == [0, 0]
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        facts = json.loads((out / "run.json").read_text())["recipe"]
        ran = Recipe(
            **{name: value for name, value in facts.items() if name in Recipe.__dataclass_fields__}
        )
        loss = held_out_loss(AutoModelForCausalLM.from_pretrained(out / "hf"), ran)
        assert abs(loss - lines[-1]["eval_loss"]) < 2e-3 * loss, f"{file} tp{tp}"


@pytest.mark.slow
def test_a_model_published_in_fp32_is_exported_from_the_master_weights(pools, tmp_path):
    from safetensors.torch import load_file

    save_tiny(tmp_path / "base")
    for file, tp in (("zero1", 1), ("zero2", 1), ("zero3", 1), ("zero1", 2), ("zero3", 2)):
        out = tmp_path / f"{file}_{tp}"
        recipe = Recipe(
            model=str(tmp_path / "base"),
            ds_config=strategy(file, bf16=True),
            tp=tp,
            out=str(out),
            **NUMBERS,
        )
        assert [code for code, _ in pools.run(2, run_recipe, recipe=recipe, lora=False)] == [0, 0]
        weights = load_file(out / "hf" / "model.safetensors")
        assert all(value.dtype == torch.float32 for value in weights.values())
        matrix = weights["model.layers.0.mlp.up_proj.weight"]
        finer = (matrix != matrix.to(torch.bfloat16).float()).float().mean().item()
        assert finer > 0.9, f"{file} tp{tp}: only {finer:.0%} of the values need more than bf16"


def run_tiny(recipe: Recipe) -> int:
    from recipekit.train import main

    return main(resolve_run(parse(recipe, Path("export.py"), ["--tiny"])))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_config_beside_the_weights_names_their_dtype(tmp_path, dtype):
    """The dtype does not depend on the original config.

    Generation from the exported files uses the KV cache.
    """
    built = build_model(
        Recipe(model="none", init="random"),
        tiny_config("llama") | {"dtype": "float16"},
        None,
        ds_config(0),
        torch.device("cpu"),
    )
    own = tiny_config("llama") | {"dtype": "float16"}
    save_small_files(
        built,
        collect_small_files(built, own, byte_tokenizer(), getattr(torch, dtype), Origin(), ()),
        tmp_path,
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == (dtype, ["LlamaForCausalLM"])
    assert AutoConfig.from_pretrained(tmp_path).use_cache is True
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in tmp_path.iterdir()}
