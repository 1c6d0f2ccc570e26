"""The numbers that replace "auto" in a DeepSpeed JSON."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import recipe_files
from pool import ROOT
from recipekit.architectures.lookup import model_config
from recipekit.dslint import check, json_file, numbers, resolve
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.mesh import Mesh
from recipekit.spec.shipped import STRATEGIES
from shipped_jsons import FILES, LLAMA, RECIPE, put, shipped, without

LLAMA_8B = "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_is_clean_and_resolves_to_what_deepspeed_accepts(file: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config, _ = json_file.load_ds_config(str(file), ROOT)
    world, recipe = (
        (16, dataclasses.replace(RECIPE, global_batch=96)) if "hosts" in file.stem else (4, RECIPE)
    )
    assert (
        check.lint_config(check.LintInput(config, world=world, recipe=recipe, model_config=LLAMA))
        == []
    )
    resolved, lines = resolve.resolve_ds_config(config, RECIPE, Mesh(dp=4), LLAMA)
    rounded = [
        "gradients: ZeRO-0 sums the 2 micro-batches of a step in bf16; zero1.json sums them in fp32"
    ]
    assert "auto" not in json.dumps(resolved) and lines == (
        rounded if file.stem.startswith("zero0") else []
    )
    kind, params = resolved["optimizer"]["type"], resolved["optimizer"]["params"]
    # Optimizers without the usual betas and eps.
    whole = {
        "SGD": {"momentum": 0.9, "dampening": 0, "nesterov": True, "fused": True},
        "Adafactor": {},
    }
    numbers = {"lr": 7e-4, "weight_decay": 0.07} | whole.get(
        kind, {"betas": [0.8, 0.97], "eps": 3e-7}
    )
    assert (params if kind in whole else {key: params[key] for key in numbers}) == numbers
    assert (
        resolved["train_batch_size"],
        resolved["train_micro_batch_size_per_gpu"],
        resolved["gradient_accumulation_steps"],
    ) == (24, 3, 2)
    parsed = DeepSpeedConfig(resolve.resolve_ds_config(config, RECIPE, Mesh(), LLAMA)[0])
    assert (
        parsed.gradient_clipping == 0.7
        and parsed.bfloat16_config.enabled
        and parsed.bfloat16_config.check_grad_overflow
    )
    assert f"zero{int(parsed.zero_optimization_stage)}" == file.stem.split("_")[0]


def test_a_literal_beats_the_recipe_and_says_so() -> None:
    config = put(
        put(shipped("zero2"), "optimizer.params.lr", 1e-4), "train_micro_batch_size_per_gpu", 4
    )
    resolved, lines = resolve.resolve_ds_config(config, RECIPE, Mesh(dp=2), LLAMA)
    assert (
        resolved["optimizer"]["params"]["lr"] == 1e-4
        and resolved["gradient_accumulation_steps"] == 3
    )
    assert lines == [
        "micro_batch: the JSON's 4 overrides the recipe's 3",
        "lr: the JSON's 0.0001 overrides the recipe's 0.0007",
    ]


def test_a_typed_flag_that_equals_the_literal_is_fine() -> None:
    config = put(
        put(shipped("zero2"), "optimizer.params.lr", RECIPE.lr),
        "optimizer.params.betas",
        [RECIPE.beta1, 0.9],
    )
    assert (
        check.lint_config(check.LintInput(config, recipe=RECIPE, typed=frozenset({"lr", "beta1"})))
        == []
    )


def test_degrees_are_read_and_taken_out() -> None:
    config = put(
        put(shipped("zero1"), "tensor_parallel.autotp_size", 2), "sequence_parallel_size", 1
    )
    assert numbers.read_degrees(config) == {"tp": 2, "sp": 1}
    resolved, lines = resolve.resolve_ds_config(config, RECIPE, Mesh(dp=2, tp=2), LLAMA)
    assert not {"tensor_parallel", "sequence_parallel_size"} & set(resolved)
    assert lines == ["tp: the JSON's 2 overrides the recipe's 1"]


def test_micro_batches_are_counted_of_data_parallel_ranks_only() -> None:
    recipe = dataclasses.replace(RECIPE, global_batch=48, micro_batch=3)
    for mesh, steps in (
        (Mesh(dp=2), 8),
        (Mesh(dp=2, tp=4), 8),
        (Mesh(dp=4, pp=2), 4),
        (Mesh(dp=1, sp=2), 16),
    ):
        resolved, _ = resolve.resolve_ds_config(shipped("zero1"), recipe, mesh, LLAMA)
        assert (
            resolved["train_batch_size"],
            resolved["train_micro_batch_size_per_gpu"],
            resolved["gradient_accumulation_steps"],
        ) == (48, 3, steps)


@pytest.mark.parametrize(
    ("file", "tp", "adapt", "reduce", "prefetch"),
    [
        ("zero3", 1, None, 200_000_000, 218_103_808),
        ("zero3", 2, None, 109_051_904, 109_051_904),
        ("zero3", 1, lambda model: model, 4096**2, 218_103_808),
        ("zero3_cpu", 1, None, 4096**2, int(0.9 * 4096**2)),
    ],
)
def test_buckets_of_zero3_hold_a_layer(
    file: str, tp: int, adapt: Any, reduce: int, prefetch: int
) -> None:
    recipe = dataclasses.replace(RECIPE, adapt=adapt)
    zero = resolve.resolve_ds_config(shipped(file), recipe, Mesh(tp=tp), model_config(LLAMA_8B))[0][
        "zero_optimization"
    ]
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (reduce, prefetch)


def test_two_layers_of_a_large_model_may_be_gathered() -> None:
    key = "zero_optimization.stage3_max_live_parameters"
    for size, limit in ((8192, 1_711_276_032), (4096, 1_000_000_000)):
        config = {"model_type": "llama", "hidden_size": size, "num_attention_heads": size // 128}
        config |= {"num_key_value_heads": 8, "intermediate_size": 7 * size // 2}
        for literal, expected in ((None, limit), (5, 5)):
            given = without(shipped("zero3"), key)
            given = given if literal is None else put(given, key, literal)
            zero = resolve.resolve_ds_config(given, RECIPE, Mesh(), config)[0]["zero_optimization"]
            assert zero["stage3_max_live_parameters"] == expected


def test_whole_numbers_may_be_written_as_floats() -> None:
    config = put(shipped("zero2"), "zero_optimization.reduce_bucket_size", 5e8)
    assert check.lint_config(check.LintInput(config)) == []
    size = resolve.resolve_ds_config(config, RECIPE, Mesh(), LLAMA)[0]["zero_optimization"][
        "reduce_bucket_size"
    ]
    assert size == 500_000_000 and isinstance(size, int)


def test_a_json_without_an_optimizer_gets_adamw() -> None:
    resolved, lines = resolve.resolve_ds_config({}, RECIPE, Mesh(), LLAMA)
    assert resolved["optimizer"] == {
        "type": "AdamW",
        "params": {
            "torch_adam": True,
            "fused": True,
            "lr": 7e-4,
            "weight_decay": 0.07,
            "betas": [0.8, 0.97],
            "eps": 3e-7,
        },
    }
    assert resolved["zero_optimization"] == {"stage": 0} and lines == [
        "optimizer: the JSON names no optimizer, so the run uses AdamW"
    ]


@pytest.mark.parametrize(
    ("mesh", "off"),
    [
        (Mesh(), True),
        (Mesh(tp=2), True),
        (Mesh(dp=2), False),
        (Mesh(sp=2), False),  # the ranks of a row sum their gradients
    ],
    ids=str,
)
def test_one_rank_overlaps_nothing(mesh: Mesh, off: bool) -> None:
    """A shipped file is fitted to the ranks. In another JSON, the value stays, and a line says why
    false is better.
    """
    for is_shipped in (True, False):
        resolved, _ = resolve.resolve_ds_config(shipped("zero2"), RECIPE, mesh, LLAMA)
        lines = resolve.fit_overlap(resolved, mesh, is_shipped)
        assert resolved["zero_optimization"]["overlap_comm"] is not (off and is_shipped)
        assert [line.split(": ")[0] for line in lines] == (
            ["zero_optimization.overlap_comm"] if off and not is_shipped else []
        )


@pytest.mark.parametrize("name", ["zero2_cpu", "zero3", "zero3_cpu", "zero1", "zero0"])
def test_other_stages_and_offload_keep_their_overlap(name: str) -> None:
    """Without a second stream, ZeRO-3 would not copy from the host during computation."""
    resolved, _ = resolve.resolve_ds_config(shipped(name), RECIPE, Mesh(), LLAMA)
    before = copy.deepcopy(resolved)
    assert resolve.fit_overlap(resolved, Mesh(), True) == []
    assert resolve.fit_overlap(resolved, Mesh(), False) == [] and resolved == before


def test_a_run_on_one_rank_uses_one_bucket(tmp_path: Path) -> None:
    """The same text is fitted as a shipped file, and kept as a file of the user."""
    own = tmp_path / "zero2.json"
    own.write_text((STRATEGIES / "zero2.json").read_text())
    nano, found = "llama_nano_zero2", []
    for name in ("zero2.json", str(own)):
        flags = ["--dry_run", "--deepspeed_config", name, "--world", "1"]
        command = parse(recipe_files.load(nano).RECIPE, recipe_files.FILES[nano], flags)
        plan = resolve_run(command)
        said = any(note.startswith("zero_optimization.overlap_comm") for note in plan.notes)
        found.append((plan.ds_config["zero_optimization"]["overlap_comm"], said))
    assert found == [(False, False), (True, True)]
