"""The DeepSpeed JSON: what is refused and how it is said, what becomes of "auto", and that nothing
a user writes is ignored.
"""

import copy
import dataclasses
import json
import os
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recipekit.dslint import check, divisions, json_file, numbers, resolve, swap
from recipekit.dslint.schema import at, schema
from recipekit.plan import make_plan
from recipekit.spec.command import parse
from recipekit.spec.mesh import Mesh, make_mesh
from recipekit.spec.recipe import Recipe
from recipekit.spec.refusal import Problem, Refusal

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "ds_configs").glob("*.json"))
OF_RECIPES = ("zero0_onebit", "zero1_lamb", "zero2_adafactor", "zero2_muon")
RECIPE = Recipe(
    model="org/model",
    global_batch=24,
    micro_batch=3,
    lr=7e-4,
    weight_decay=0.07,
    beta1=0.8,
    beta2=0.97,
    eps=3e-7,
    gradient_clipping=0.7,
    steps=50,
)
LLAMA = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 261,
    "intermediate_size": 128,
}


def shipped(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())


def put(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`config` with `value` at a dotted path; blocks on the way are made."""
    config = copy.deepcopy(config)
    *blocks, key = path.split(".")
    block = config
    for name in blocks:
        if not isinstance(block.get(name), dict):
            block[name] = {}
        block = block[name]
    block[key] = value
    return config


def without(config: dict[str, Any], path: str) -> dict[str, Any]:
    config = copy.deepcopy(config)
    block, _, key = path.rpartition(".")
    (at(config, block) if block else config).pop(key, None)
    return config


# file, {path: value}, what check is told, where the problem is, what the fix says
BROKEN = {
    "typo at the top": (
        "zero2",
        {"gradient_cliping": 1.0},
        {},
        "gradient_cliping = 1.0",
        "did you mean gradient_clipping?",
    ),
    "typo in a block": (
        "zero3",
        {"zero_optimization.stage3_max_live_parameter": 1},
        {},
        "zero_optimization.stage3_max_live_parameter",
        "stage3_max_live_parameters",
    ),
    "typo in a nested block": (
        "zero2_cpu",
        {"zero_optimization.offload_optimizer.pinned_memory": True},
        {},
        "offload_optimizer.pinned_memory",
        "pin_memory",
    ),
    "typo in bf16": ("zero1", {"bf16.enable": True}, {}, "bf16.enable = true", "enabled"),
    "typo in a block that DeepSpeed does not check": (
        "zero2",
        {"flops_profiler": {"enabled": True, "profile_steps": 2}},
        {},
        "flops_profiler.profile_steps",
        "profile_step",
    ),
    "odd bucket": (
        "zero2",
        {"zero_optimization.allgather_bucket_size": 1000001},
        {},
        "allgather_bucket_size = 1000001",
        "add 1",
    ),
    "typo in the data types": (
        "zero2",
        {"data_types.grad_acum_dtype": "fp32"},
        {},
        "data_types.grad_acum_dtype",
        "grad_accum_dtype",
    ),
    "key at the wrong level": (
        "zero2",
        {"stage": 2},
        {},
        "stage = 2",
        "it belongs in zero_optimization",
    ),
    "top-level key in a block": (
        "zero2",
        {"zero_optimization.gradient_clipping": 1.0},
        {},
        "zero_optimization.gradient_clipping",
        "it belongs in the top level",
    ),
    "key that nothing resembles": ("zero2", {"zzqq": 1}, {}, "zzqq = 1", "delete it"),
    "removed feature": (
        "zero2",
        {"quantize_training": {"enabled": True}},
        {},
        "quantize_training",
        "delete it",
    ),
    "removed ZeRO feature": (
        "zero3",
        {"zero_optimization.mics_shard_size": 4},
        {},
        "zero_optimization.mics_shard_size",
        "delete it",
    ),
    "old name": (
        "zero2",
        {"zero_optimization.cpu_offload": True},
        {},
        "zero_optimization.cpu_offload",
        'write "zero_optimization.offload_optimizer": {"device": "cpu"} instead',
    ),
    "old dtype block": (
        "zero2",
        {"bfloat16": {"enabled": True}},
        {},
        "bfloat16",
        "delete it. The key bf16 is already set",
    ),
    "number in quotes": (
        "zero2",
        {"gradient_clipping": "1.0"},
        {},
        'gradient_clipping = "1.0"',
        "1.0 without quotes",
    ),
    "1 for true": ("zero2", {"bf16.enabled": 1}, {}, "bf16.enabled = 1", "set it to true"),
    "word for true": (
        "zero2",
        {"zero_optimization.overlap_comm": "True"},
        {},
        'zero_optimization.overlap_comm = "True"',
        "set it to true",
    ),
    "true for a number": (
        "zero2",
        {"zero_optimization.stage": True},
        {},
        "zero_optimization.stage = true",
        "set it to 0",
    ),
    "half a row": (
        "zero2",
        {"train_micro_batch_size_per_gpu": 1.5},
        {},
        "train_micro_batch_size_per_gpu = 1.5",
        "set it to 2",
    ),
    "number for a block": (
        "zero2",
        {"zero_optimization": 2},
        {},
        "zero_optimization = 2",
        "set it to {...}",
    ),
    "list for a block": ("zero2", {"optimizer": []}, {}, "optimizer = []", "set it to {...}"),
    "stage 4": (
        "zero2",
        {"zero_optimization.stage": 4},
        {},
        "zero_optimization.stage = 4",
        "set it to 3",
    ),
    "negative bucket": (
        "zero2",
        {"zero_optimization.reduce_bucket_size": -1},
        {},
        "zero_optimization.reduce_bucket_size = -1",
        "set it to 500000000",
    ),
    "unknown device": (
        "zero2_cpu",
        {"zero_optimization.offload_optimizer.device": "cpus"},
        {},
        "offload_optimizer.device",
        "did you mean cpu?",
    ),
    "unknown dtype": (
        "zero2",
        {"data_types.grad_accum_dtype": "fp64"},
        {},
        "data_types.grad_accum_dtype",
        "did you mean",
    ),
    "auto that nobody fills": (
        "zero2",
        {"bf16.enabled": "auto"},
        {},
        'bf16.enabled = "auto"',
        "set it to true",
    ),
    "auto in the optimizer": (
        "zero2",
        {"optimizer.params.betas": "auto"},
        {},
        'optimizer.params.betas = "auto"',
        "delete it",
    ),
    "auto in the schedule": (
        "zero2",
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
        {},
        'scheduler = {"type": "WarmupLR"',
        "delete the block and use --schedule constant",
    ),
    "unknown optimizer": (
        "zero2",
        {"optimizer.type": "AdmaW"},
        {},
        'optimizer.type = "AdmaW"',
        "did you mean AdamW?",
    ),
    "optimizer of another library": (
        "zero2",
        {"optimizer.type": "DeepSpeed_Adam"},
        {},
        'optimizer.type = "DeepSpeed_Adam"',
        "did you mean Adam?",
    ),
    "clipping of 2020": (
        "zero2",
        {"optimizer.params.max_grad_norm": 1.0},
        {},
        "optimizer.params.max_grad_norm = 1.0",
        "delete it",
    ),
    "1-bit LAMB, which is gone": (
        "zero0",
        {"optimizer.type": "OneBitLamb"},
        {},
        'optimizer.type = "OneBitLamb"',
        "Lamb",
    ),
    "1-bit Adam without its warm-up": (
        "zero0",
        {"optimizer": {"type": "OneBitAdam", "params": {}}},
        {},
        "optimizer.params.freeze_step",
        "a whole number",
    ),
    "torch's name in lower case": (
        "zero0",
        {"optimizer": {"type": "sgd", "params": {"lr": 0.1}}},
        {},
        'optimizer.type = "sgd"',
        "did you mean SGD?",
    ),
    "optimizer of a package that is not there": (
        "zero0",
        {"optimizer.type": "MuAdamW"},
        {},
        "optimizer.type = MuAdamW",
        "use AdamW",
    ),
    "optimizer without a type": (
        "zero2",
        {"optimizer": {"params": {"lr": 0.1}}},
        {},
        "optimizer.type",
        'add "type": "AdamW"',
    ),
    "key of another optimizer": (
        "zero2",
        {"optimizer.params.momentum": 0.9},
        {},
        "optimizer.params.momentum",
        "delete it. AdamW takes",
    ),
    "key of the CPU Adam with torch's": (
        "zero2",
        {"optimizer.params.fp32_optimizer_states": True},
        {},
        "optimizer.params.fp32_optimizer_states",
        "delete it. AdamW takes",
    ),
    "key of torch's Adam with DeepSpeed's": (
        "zero2_cpu",
        {"optimizer.params.foreach": True},
        {},
        "optimizer.params.foreach",
        "delete it. AdamW takes",
    ),
    "three betas": (
        "zero2",
        {"optimizer.params.betas": [0.9, 0.95, 0.99]},
        {},
        "optimizer.params.betas",
        "set it to [0.9, 0.999]",
    ),
    "beta of 1": (
        "zero2",
        {"optimizer.params.betas": [0.9, 1.0]},
        {},
        "optimizer.params.betas",
        "set it to [0.9, 0.95]",
    ),
    "unknown schedule": (
        "zero2",
        {"scheduler": {"type": "CosineLR", "params": {}}},
        {},
        'scheduler.type = "CosineLR"',
        "WarmupCosineLR",
    ),
    "params of a schedule without a type": (
        "zero2",
        {"scheduler": {"params": {"warmup_num_steps": ["x"]}}},
        {},
        "scheduler.type",
        'add "type": "WarmupLR"',
    ),
    "schedule without params": (
        "zero2",
        {"scheduler": {"type": "WarmupLR"}},
        {},
        "scheduler.params",
        'add "params"',
    ),
    "schedule without its length": (
        "zero2",
        {"scheduler": {"type": "WarmupCosineLR", "params": {}}},
        {},
        "scheduler.params.total_num_steps",
        "a whole number",
    ),
    "warm-up of 0 steps": (
        "zero2",
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
        {},
        "scheduler.params.warmup_num_steps = 0",
        "set it to 1000",
    ),
    "warm-up longer than the schedule": (
        "zero2",
        {
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"warmup_num_steps": 60, "total_num_steps": 50},
            }
        },
        {},
        "scheduler.params.warmup_num_steps = 60",
        "set it to a smaller number",
    ),
    "schedule of another length": (
        "zero2",
        {
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"warmup_num_steps": 5, "total_num_steps": 60},
            }
        },
        {"recipe": RECIPE},
        "scheduler.params.total_num_steps = 60",
        "set it to 50, or delete the scheduler block",
    ),
    "schedule that forgets the learning rate": (
        "zero2",
        {
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_num_steps": 5, "total_num_steps": 50},
            }
        },
        {},
        'scheduler.type = "WarmupDecayLR"',
        'add "warmup_max_lr"',
    ),
    "bf16 and fp16": (
        "zero2",
        {"fp16": {"enabled": True}},
        {},
        "bf16.enabled = true",
        'set one of them to "enabled": false',
    ),
    "block that is not switched on": (
        "zero2",
        {"tensorboard": {"output_path": "logs"}},
        {},
        "tensorboard",
        'add "enabled": true',
    ),
    "fp32 accumulation without ZeRO": (
        "zero0",
        {"data_types": {"grad_accum_dtype": "fp32"}},
        {},
        "data_types.grad_accum_dtype",
        "delete it",
    ),
    "parameter offload without ZeRO-3": (
        "zero2",
        {"zero_optimization.offload_param": {"device": "cpu"}},
        {},
        "zero_optimization.offload_param",
        "stage 3",
    ),
    "optimizer offload without ZeRO": (
        "zero0",
        {"zero_optimization.offload_optimizer": {"device": "cpu"}},
        {},
        "zero_optimization.offload_optimizer",
        "stage 1, 2 or 3",
    ),
    "NVMe with ZeRO-2": (
        "zero2_cpu",
        {"zero_optimization.offload_optimizer": {"device": "nvme", "nvme_path": "x"}},
        {},
        "offload_optimizer.device",
        'set it to "cpu"',
    ),
    "NVMe without a folder": (
        "zero3_cpu",
        {"zero_optimization.offload_param.device": "nvme"},
        {},
        "offload_param.device",
        "nvme_path",
    ),
    "NVMe folder with CPU offload": (
        "zero3_cpu",
        {"zero_optimization.offload_param.nvme_path": "/x"},
        {},
        "offload_param.nvme_path",
        '"device": "nvme"',
    ),
    "disk settings without a disk": (
        "zero3_cpu",
        {"aio": {"queue_depth": 16}},
        {},
        "aio",
        "delete the block",
    ),
    "key of stage 3 at stage 2": (
        "zero2",
        {"zero_optimization.stage3_max_reuse_distance": 1000},
        {},
        "zero_optimization.stage3_max_reuse_distance",
        "stage 3",
    ),
    "key of stage 2 at stage 3": (
        "zero3",
        {"zero_optimization.round_robin_gradients": True},
        {},
        "zero_optimization.round_robin_gradients",
        "stage 1 or 2",
    ),
    "second name of a stage 3 key": (
        "zero3",
        {"zero_optimization.max_live_parameters": 5},
        {},
        "zero_optimization.max_live_parameters",
        "stage3_max_live_parameters",
    ),
    "LAMB under ZeRO": (
        "zero1",
        {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}},
        {"script": check.OtherScript("trainer")},
        "optimizer.type",
        "use AdamW",
    ),
    "Adafactor under ZeRO": (
        "zero3",
        {"optimizer": {"type": "Adafactor", "params": {"lr": 0.1}}},
        {"script": check.OtherScript("trainer")},
        "optimizer.type",
        "use AdamW, or a recipe, which computes LAMB and Adafactor",
    ),
    "one number as Adafactor's eps": (
        "zero1",
        {"optimizer": {"type": "Adafactor", "params": {"eps": 1e-8}}},
        {},
        "optimizer.params.eps",
        "[null, 0.001]",
    ),
    "a negative eps of Adafactor": (
        "zero1",
        {"optimizer": {"type": "Adafactor", "params": {"eps": [-1, 0.1]}}},
        {},
        "optimizer.params.eps",
        "[null, 0.001]",
    ),
    "SGD under ZeRO": (
        "zero2",
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        {"script": check.OtherScript("trainer")},
        "optimizer.type",
        '"zero_allow_untested_optimizer": true',
    ),
    "Muon at ZeRO-3": (
        "zero3",
        {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}},
        {"script": check.OtherScript("trainer")},
        "optimizer.type",
        '"zero_optimization.reduce_scatter": false',
    ),
    "pre-scaled gradients": (
        "zero2",
        {"prescale_gradients": True},
        {},
        "prescale_gradients",
        "delete it",
    ),
    "hpZ on one host": (
        "zero3_hosts",
        {},
        {"world": 8},
        "zero_hpz_partition_size = 8",
        "use zero3.json",
    ),
    "hpZ that does not divide": (
        "zero3_hosts",
        {},
        {"world": 12},
        "zero_hpz_partition_size = 8",
        "GPUs per host",
    ),
    "hpZ across hosts": (
        "zero3_hosts",
        {},
        {"world": 16, "local": 4},
        "zero_hpz_partition_size = 8",
        "GPUs per host",
    ),
    "hpZ among tensor peers": (
        "zero3_hosts",
        {"tensor_parallel.autotp_size": 2},
        {"world": 16},
        "zero_hpz_partition_size = 8",
        "--tp 1",
    ),
    "hpZ with offload": (
        "zero3_hosts",
        {"zero_optimization.offload_param": {"device": "cpu"}},
        {"world": 16},
        "zero_hpz_partition_size = 8",
        "offload blocks",
    ),
    "summed gradients at ZeRO-3": (
        "zero3",
        {"gradient_allreduce_op": "sum"},
        {},
        "gradient_allreduce_op",
        'set it to "mean"',
    ),
    "no norm to clip by": (
        "zero2",
        {"zero_optimization.compute_grad_norm": False},
        {},
        "zero_optimization.compute_grad_norm",
        "gradient_clipping",
    ),
    "DeepCompile without ZeRO": (
        "zero0",
        {"compile.deepcompile": True},
        {},
        "compile.deepcompile",
        "set it to false",
    ),
    "pipeline with ZeRO-2": (
        "zero2",
        {"pipeline.stages": 2},
        {"world": 4},
        "zero_optimization.stage = 2",
        "--pp 1",
    ),
    "pipeline with sequence parallelism": (
        "zero1",
        {"pipeline.stages": 2, "sequence_parallel_size": 2},
        {"world": 4},
        "sp = 2",
        "--sp 1, or --pp 1",
    ),
    "pipeline with expert parallelism": (
        "zero1",
        {"pipeline.stages": 2, "expert_parallel": {"enabled": True, "autoep_size": 2}},
        {"world": 4},
        "ep = 2",
        "--ep 1, or --pp 1",
    ),
    "more stages than layers": (
        "zero1",
        {"pipeline.stages": 8},
        {"world": 8, "model_config": LLAMA | {"num_hidden_layers": 6}},
        "pp = 8",
        "use --pp 4",
    ),
    "second W&B run": ("zero2", {"wandb": {"enabled": True}}, {}, "wandb", "--wandb"),
    "data that DeepSpeed would load": (
        "zero2",
        {"data_efficiency": {"enabled": True}},
        {},
        "data_efficiency",
        "delete the block",
    ),
    "half a tensor parallelism": (
        "zero2",
        {"tensor_parallel": {"autotp_size": 1, "tp_overlap_comm": True}},
        {},
        "tensor_parallel.tp_overlap_comm",
        "delete it",
    ),
    "batch that does not divide": (
        "zero2",
        {},
        {"world": 5, "recipe": RECIPE},
        "global_batch (train_batch_size) = 24",
        "use global_batch 15 or 30",
    ),
    "batch of the JSON that does not divide": (
        "zero2",
        {"train_batch_size": 10},
        {"world": 2, "recipe": RECIPE},
        "train_batch_size) = 10",
        "use micro_batch 1, or global_batch 6 or 12",
    ),
    "accumulation that does not fit": (
        "zero2",
        {"gradient_accumulation_steps": 5},
        {"world": 2, "recipe": RECIPE},
        "gradient_accumulation_steps = 5",
        'set gradient_accumulation_steps to "auto" or 4',
    ),
    "ranks that do not divide": (
        "zero2",
        {"tensor_parallel.autotp_size": 2},
        {"world": 3},
        "tp(2)",
        "start a multiple of 2 ranks",
    ),
    "tp beyond the heads": (
        "zero2",
        {"tensor_parallel.autotp_size": 4},
        {"world": 4, "model_config": LLAMA},
        "tp = 4",
        "use --tp 1 or 2",
    ),
    "flag against the JSON": (
        "zero2",
        {"optimizer.params.lr": 1e-4},
        {"recipe": RECIPE, "typed": frozenset({"lr"})},
        "--lr 0.0007",
        '"auto"',
    ),
    "degree against the JSON": (
        "zero2",
        {"tensor_parallel.autotp_size": 2},
        {"recipe": RECIPE, "typed": frozenset({"tp"})},
        "--tp 1",
        "leave out the flag",
    ),
    "flag against the scheduler": (
        "zero2",
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
        {"recipe": RECIPE, "typed": frozenset({"schedule"})},
        "--schedule",
        "leave out the flag",
    ),
    "flag that the optimizer ignores": (
        "zero0",
        {"optimizer": {"type": "SGD", "params": {}}},
        {"recipe": RECIPE, "typed": frozenset({"eps"})},
        "--eps",
        "leave out the flag",
    ),
    "swap buffer too small": (
        "zero3_nvme",
        {"zero_optimization.offload_param.buffer_size": 1000},
        {"world": 2, "model_config": LLAMA},
        "zero_optimization.offload_param.buffer_size = 1000",
        "set it to 8352 or more",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_configuration_is_refused_with_its_path_and_a_fix(case: str) -> None:
    file, changes, told, where, fix = BROKEN[case]
    config = shipped(file)
    for path, value in changes.items():
        config = put(config, path, value)
    problems = check.check(check.LintInput(config, **told))
    hits = [problem for problem in problems if where in problem.where]
    assert hits, f"no problem at {where!r} among {[str(problem) for problem in problems]}"
    assert any(fix in problem.fix for problem in hits), [str(problem) for problem in hits]
    # one mistake is not told many times
    assert len(problems) <= 3, [str(problem) for problem in problems]


def test_all_problems_are_told_at_once() -> None:
    config = put(
        put(put(shipped("zero2"), "gradient_cliping", 1), "bf16.enabled", 1),
        "zero_optimization.stage",
        7,
    )
    assert {
        problem.where.split(" ")[0]
        for problem in check.check(check.LintInput(config, world=5, recipe=RECIPE))
    } == {
        "gradient_cliping",
        "bf16.enabled",
        "zero_optimization.stage",
        "global_batch",
    }


@pytest.mark.parametrize(
    ("file", "pivot"),
    [
        (file.stem, pivot)
        for file in FILES
        for pivot in check.PIVOTS
        if at(shipped(file.stem), pivot) is not None
    ],
)
def test_a_misspelt_key_that_others_hang_on_is_the_only_problem(file: str, pivot: str) -> None:
    config = shipped(file)
    block, _, key = pivot.rpartition(".")
    for typo in (key + key[-1], key[:1] + key[2:], key[:1] + key[2] + key[1] + key[3:]):
        (problem,) = check.check(
            check.LintInput(
                put(without(config, pivot), f"{block}.{typo}", at(config, pivot)),
                world=2,
                recipe=RECIPE,
            )
        )
        assert problem.fix == f"did you mean {key}?"


def test_a_misspelt_block_that_others_hang_on_is_the_only_problem() -> None:
    (problem,) = check.check(
        check.LintInput(
            put(
                without(shipped("zero1"), "zero_optimization"),
                "zero_optimisation",
                at(shipped("zero1"), "zero_optimization"),
            )
        )
    )
    assert problem.fix == "did you mean zero_optimization?"


def test_what_does_not_resemble_a_key_is_told_beside_what_lacks_it() -> None:
    config = put(
        put(without(shipped("zero3"), "zero_optimization.stage"), "zero_optimization.zzqq", 3),
        "flops_profiler",
        {"detailed": True},
    )
    told = [problem.where for problem in check.check(check.LintInput(config))]
    assert {"zero_optimization.zzqq = 3", 'flops_profiler = {"detailed": true}'} < set(
        told
    ) and any("overlap_comm" in where for where in told)


UNREADABLE = {
    "key twice": (
        b'{"a": 1,\n "zero_optimization": {"stage": 1, "stage": 2}}',
        "line 2, column 23",
        '"stage" is written twice',
    ),
    "comment": (
        b'{\n  // which stage\n  "zero_optimization": {"stage": 1}}',
        "line 2, column 3",
        "not strict JSON",
    ),
    "trailing comma": (b'{"zero_optimization": {"stage": 1},}', "line 1", "not strict JSON"),
    "NaN": (b'{"wandb": {"team": "NaN"},\n "gradient_clipping": NaN}', "line 2, column 23", "NaN"),
    "Infinity": (b'{"gradient_clipping": -Infinity}', "line 1, column 23", "-Infinity"),
    "list": (b"[1, 2]", "contains [1, 2]", "not an object"),
    "nothing": (b"", "line 1", "not strict JSON"),
    "latin-1": (b'{"wandb": {"team": "\xe9"}}', "cannot be read", "UTF-8"),
    "deep": (b'{"a":' * 100_000, "nested too deeply", "See ds_configs/README.md"),
    "long number": (b'{"a": ' + b"9" * 5000 + b"}", "not usable JSON", "smaller numbers"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_file_that_is_not_strict_json_is_refused(case: str, tmp_path: Path) -> None:
    content, *expected = UNREADABLE[case]
    (tmp_path / "broken.json").write_bytes(content)
    with pytest.raises(Refusal) as refused:
        json_file.load("broken.json", tmp_path)
    assert all(part in str(refused.value) for part in expected), str(refused.value)


def test_a_missing_file_is_refused_with_the_places_and_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        json_file.load("zero33.json", tmp_path)
    assert str(tmp_path / "zero33.json") in str(
        refused.value
    ) and "Did you mean zero3.json?" in str(refused.value)


def test_a_name_is_looked_up_as_typed_then_beside_the_recipe_then_in_ds_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, here = tmp_path / "beside", tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
    monkeypatch.chdir(here)
    assert json_file.load("zero3.json", beside)[1] == ROOT / "ds_configs" / "zero3.json"
    (beside / "zero3.json").write_text("{}")
    assert json_file.load("zero3.json", beside) == ({}, beside / "zero3.json")
    (here / "zero3.json").write_text('{"bf16": {"enabled": true}}')
    assert json_file.load("zero3.json", beside) == ({"bf16": {"enabled": True}}, Path("zero3.json"))
    assert json_file.load({"bf16": {}}, beside) == ({"bf16": {}}, None)


# The message a user sees


@pytest.mark.parametrize(
    "case",
    [
        "typo at the top",
        "number for a block",
        "auto that nobody fills",
        "fp32 accumulation without ZeRO",
        "key twice",
        "missing",
    ],
)
def test_the_tool_exits_1_with_every_problem_and_no_traceback(case: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    if case in UNREADABLE:
        file.write_bytes(UNREADABLE[case][0])
    elif case in BROKEN:
        base, changes, *_ = BROKEN[case]
        path, value = next(iter(changes.items()))
        file.write_text(json.dumps(put(shipped(base), path, value)))
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "lint.py", file],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, (
        done.stdout + done.stderr
    )
    assert "1 problem in" in done.stdout and "  1. " in done.stdout


def test_checking_imports_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys; from recipekit.dslint import check; check.check(check.LintInput({}));"
        " sys.exit(bool({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# Numbers


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_is_clean_and_resolves_to_what_deepspeed_accepts(file: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config, _ = json_file.load(str(file), ROOT)
    world, recipe = (
        (16, dataclasses.replace(RECIPE, global_batch=96)) if "hosts" in file.stem else (4, RECIPE)
    )
    assert (
        check.check(check.LintInput(config, world=world, recipe=recipe, model_config=LLAMA)) == []
    )
    resolved, lines = resolve.resolve(config, RECIPE, Mesh(dp=4), LLAMA)
    rounded = [
        "gradients: ZeRO-0 sums the 2 micro-batches of a step in bf16; zero1.json sums them in fp32"
    ]
    assert "auto" not in json.dumps(resolved) and lines == (
        rounded if file.stem.startswith("zero0") else []
    )
    kind, params = resolved["optimizer"]["type"], resolved["optimizer"]["params"]
    # those that take none of betas and one eps
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
    parsed = DeepSpeedConfig(resolve.resolve(config, RECIPE, Mesh(), LLAMA)[0])
    assert (
        parsed.gradient_clipping == 0.7
        and parsed.bfloat16_config.enabled
        and parsed.bfloat16_config.check_grad_overflow
    )
    assert f"zero{int(parsed.zero_optimization_stage)}" == file.stem.split("_")[0]


def test_hpz_fits_hosts_that_it_divides() -> None:
    for size, world, local in ((8, 16, 8), (8, 16, 0), (4, 16, 8), (2, 4, 2), (8, None, 0)):
        config = put(shipped("zero3_hosts"), "zero_optimization.zero_hpz_partition_size", size)
        assert check.check(check.LintInput(config, world=world, local=local)) == []


def test_a_plan_knows_the_ranks_of_its_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From what torchrun and `python -m launch` set, or deepspeed; a dry run is for other hosts."""
    monkeypatch.setattr("os.environ", {**os.environ, "WORLD_SIZE": "16", "LOCAL_SIZE": "4"})
    recipe = Recipe(
        model="meta-llama/Llama-3.2-1B", ds_config="zero3_hosts.json", out=str(tmp_path / "run")
    )
    with pytest.raises(Refusal, match="must divide the number of ranks on this host"):
        make_plan(parse(recipe, tmp_path / "x.py", ["--tiny"]))
    assert make_plan(parse(recipe, tmp_path / "x.py", ["--tiny", "--dry_run"])).mesh.dp == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert make_plan(parse(recipe, tmp_path / "x.py", ["--tiny"])).mesh.dp == 16


def test_a_literal_beats_the_recipe_and_says_so() -> None:
    config = put(
        put(shipped("zero2"), "optimizer.params.lr", 1e-4), "train_micro_batch_size_per_gpu", 4
    )
    resolved, lines = resolve.resolve(config, RECIPE, Mesh(dp=2), LLAMA)
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
        check.check(check.LintInput(config, recipe=RECIPE, typed=frozenset({"lr", "beta1"}))) == []
    )


def test_degrees_are_read_and_taken_out() -> None:
    config = put(
        put(shipped("zero1"), "tensor_parallel.autotp_size", 2), "sequence_parallel_size", 1
    )
    assert numbers.degrees(config) == {"tp": 2, "sp": 1}
    resolved, lines = resolve.resolve(config, RECIPE, Mesh(dp=2, tp=2), LLAMA)
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
        resolved, _ = resolve.resolve(shipped("zero1"), recipe, mesh, LLAMA)
        assert (
            resolved["train_batch_size"],
            resolved["train_micro_batch_size_per_gpu"],
            resolved["gradient_accumulation_steps"],
        ) == (48, 3, steps)


def test_whole_numbers_may_be_written_as_floats() -> None:
    config = put(shipped("zero2"), "zero_optimization.reduce_bucket_size", 5e8)
    assert check.check(check.LintInput(config)) == []
    size = resolve.resolve(config, RECIPE, Mesh(), LLAMA)[0]["zero_optimization"][
        "reduce_bucket_size"
    ]
    assert size == 500_000_000 and isinstance(size, int)


def test_a_json_without_an_optimizer_gets_adamw() -> None:
    resolved, lines = resolve.resolve({}, RECIPE, Mesh(), LLAMA)
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


def test_a_json_of_another_script_may_use_what_recipes_do_not() -> None:
    config = put(shipped("zero2"), "wandb", {"enabled": True})
    assert (
        check.check(check.LintInput(config))
        and check.check(check.LintInput(config, script=check.OtherScript("trainer"))) == []
    )


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 12))
def test_the_batch_that_the_fix_names_divides(total: int, micro: int, dp: int) -> None:
    recipe = Recipe(model="org/model", global_batch=total, micro_batch=micro)
    problems = check.check(check.LintInput({}, mesh=Mesh(dp=dp), recipe=recipe))
    assert bool(problems) == bool(total % (micro * dp))
    for problem in problems:
        words = problem.fix.replace(",", "").split()
        choices = [
            ("global_batch", int(word))
            for word in words[words.index("global_batch") + 1 :][:3:2]
            if word.isdigit()
        ]
        choices += (
            [("micro_batch", int(words[words.index("micro_batch") + 1]))]
            if "micro_batch" in words
            else []
        )
        for field, number in choices:
            better = Recipe(
                **{"model": "org/model", "global_batch": total, "micro_batch": micro, field: number}
            )
            assert check.check(check.LintInput({}, mesh=Mesh(dp=dp), recipe=better)) == [], problem


def test_the_tensor_parallel_degree_of_the_fix_fits_ranks_and_model() -> None:
    """3 divides the 6 heads, and not the 8 ranks: it was named, and refused in turn with 4."""
    model_config = {"num_attention_heads": 6, "intermediate_size": 48}
    told = [
        "tp = 4: does not divide the model's 6 attention heads, 6 key-value heads. Use --tp 1 or 2"
    ]
    for world, tp, pp in ((8, 4, 1), (16, 4, 2)):
        recipe = Recipe(
            model="org/model", ds_config="zero1.json", tp=tp, pp=pp, global_batch=64, micro_batch=1
        )
        given: Any = {"recipe": recipe, "model_config": model_config}
        assert [
            str(problem) for problem in check.check(check.LintInput({}, world=world, **given))
        ] == told
        assert [
            str(problem)
            for problem in check.check(
                check.LintInput({}, mesh=make_mesh(world, tp=tp, pp=pp), **given)
            )
        ] == told
    # any number of ranks
    assert [problem.fix for problem in divisions.check_tp(4, model_config)] == [
        "use --tp 1 or 2 or 3"
    ]


# The host


def test_fp16_is_refused_on_a_cpu_only() -> None:
    config = put(put(shipped("zero2"), "bf16.enabled", False), "fp16", {"enabled": True})
    assert check.check(check.LintInput(config)) == [] and check.check_device(config, "cuda") == []
    assert [problem.where for problem in check.check_device(config, "cpu")] == [
        "fp16.enabled = true"
    ]
    # some CPUs compute it, and DeepSpeed asks them
    assert check.check_device(config, "cpu", has_fp16=True) == []


def test_a_swap_folder_must_be_a_writable_drive(tmp_path: Path) -> None:
    def rules(folder: str) -> list[str]:
        config = put(shipped("zero3_nvme"), "zero_optimization.offload_optimizer.nvme_path", folder)
        return [
            problem.rule
            for problem in swap.check_swap(config, tmp_path)
            if "offload_optimizer" in problem.where
        ]

    assert rules("nvme_swap") == [] and rules(str(tmp_path)) == []
    assert "does not exist" in rules(str(tmp_path / "absent"))[0]
    assert "in memory" in rules("/dev/shm")[0]


# Nothing is ignored

ODD = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    0.5,
    1.0,
    1e30,
    "",
    "auto",
    "1.0",
    "true",
    "cpu",
    [],
    [1],
    ["x"],
    {},
    {"enabled": True},
]
SCHEDULES = [
    {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 50, "warmup_num_steps": 5, "warmup_max_lr": 1e-3},
    },
    {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5}},
    {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}},
]


def leaves(node: dict[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    """Path -> node of every key below, in an order that is always the same."""
    found: dict[str, dict[str, Any]] = {}
    for key, known in sorted(node["keys"].items()):
        found |= leaves(known, f"{path}{key}.") if "keys" in known else {path + key: known}
    return found


LEAVES = leaves(schema()["config"])
for _block, _names in (
    ("optimizer", schema()["optimizers"]["AdamW"]["torch"]),
    ("scheduler", schema()["schedulers"]["WarmupLR"]),
):
    LEAVES |= {f"{_block}.params.{key}": node for key, node in _names.items()}


def values(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Mostly values that the key takes, and odd ones."""
    fitting: list[st.SearchStrategy[Any]] = []
    for name in node.get("type", []):
        if "enum" in node and name in ("string", "integer"):
            fitting.append(st.sampled_from(node["enum"]))
        elif name == "boolean":
            fitting.append(st.booleans())
        elif name == "integer":
            fitting.append(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 24, 1000, 500_000_000, 5e8]))
        elif name == "number":
            fitting.append(st.sampled_from([0, 0.25, 0.5, 1, 1e-8, 2.0, 1000]))
        elif name == "string":
            fitting.append(st.sampled_from(["x", "a/b", "fp32"]))
        elif name == "array":
            fitting.append(st.sampled_from([[], ["x"], [0.8, 0.9], ["z1"]]))
        elif name == "object":
            fitting.append(st.sampled_from([{}, {"a": 1}]))
    return st.one_of(*fitting * 8, st.sampled_from(ODD)) if fitting else st.sampled_from(ODD)


@st.composite
def mutants(draw: st.DrawFn) -> tuple[dict[str, Any], str | None, Any]:
    """A shipped file with one key changed, added, misspelt or deleted; the key and its value if it
    was added or changed.

    Not of those of `OF_RECIPES`, which are zero1.json and zero2.json with an optimizer that
    DeepSpeed does not read from them.
    """
    config = shipped(
        draw(st.sampled_from([file.stem for file in FILES if file.stem not in OF_RECIPES]))
    )
    if draw(st.integers(0, 4)) == 0:
        config["scheduler"] = copy.deepcopy(draw(st.sampled_from(SCHEDULES)))
    there = [path for path in LEAVES if at(config, path, ...) is not ...]
    # A key of a block that is there is more interesting than one of the many blocks that are not.
    near = [
        path
        for path in LEAVES
        if path.rpartition(".")[0] == "" or at(config, path.rpartition(".")[0]) is not None
    ]
    path = draw(
        st.one_of(st.sampled_from(there), st.sampled_from(near), st.sampled_from(sorted(LEAVES)))
    )
    what = draw(st.sampled_from(["put"] * 8 + ["misspell", "delete"]))
    if what == "delete":
        return without(config, path) if path in there else config, None, None
    value = draw(values(LEAVES[path]))
    if what == "misspell":
        spot = draw(st.integers(path.rfind(".") + 1, len(path) - 1))
        return (
            put(config, path[:spot] + draw(st.sampled_from("xyz_")) + path[spot:], value),
            None,
            None,
        )
    block = path.rpartition(".")[0]
    config = put(config, path, value)
    if block and "enabled" in at(schema()["config"]["keys"], block.replace(".", ".keys."), {}).get(
        "keys", {}
    ):
        at(config, block).setdefault("enabled", True)
    return config, path, value


def tree(thing: Any) -> Any:
    """Everything a parsed configuration holds, but for the JSON it was made from."""
    if isinstance(thing, Enum):
        return thing.value
    if isinstance(thing, dict):
        return {str(key): tree(value) for key, value in thing.items() if key != "_param_dict"}
    if isinstance(thing, (list, tuple, set)):
        return [tree(value) for value in thing]
    if hasattr(thing, "__dict__") and not isinstance(thing, type):
        return {"type": type(thing).__name__, **tree(vars(thing))}
    return thing if isinstance(thing, (str, int, float, bool, type(None))) else repr(thing)


def test_no_mutated_file_is_silently_misread() -> None:
    """600 mutants: never a traceback, DeepSpeed takes every accepted one, and none of their keys is
    without effect.
    """
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.utils.logger.setLevel("ERROR")
    count = {"refused": 0, "accepted": 0, "compared": 0}

    def effect(config: dict[str, Any]) -> tuple[Any, Any, dict[str, int]]:
        resolved, _ = resolve.resolve(config, RECIPE, Mesh(), LLAMA)
        return resolved, tree(DeepSpeedConfig(copy.deepcopy(resolved))), numbers.degrees(config)

    @settings(
        max_examples=600,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(mutants())
    def run(mutant: tuple[dict[str, Any], str | None, Any]) -> None:
        config, path, value = mutant
        problems = check.check(
            check.LintInput(config, world=1, recipe=RECIPE, model_config=LLAMA)
        ) + check.check_device(config, "cpu")
        assert all(
            isinstance(problem, Problem) and problem.where and problem.rule and problem.fix
            for problem in problems
        )
        if problems:
            count["refused"] += 1
            return
        count["accepted"] += 1
        resolved, parsed, degrees = effect(config)
        assert '"auto"' not in json.dumps(
            {
                key: block
                for key, block in resolved.items()
                if key not in ("data_types", "zero_optimization")
            }
        )
        if path is None or is_default(LEAVES[path], value):
            return
        if path == "zero_optimization.overlap_comm" and value == (
            at(config, "zero_optimization.stage") == 3
        ):
            return  # this default depends on the stage
        less = without(config, path)
        if check.check(check.LintInput(less, world=1, recipe=RECIPE, model_config=LLAMA)):
            return  # the key is required
        bare, parsed_bare, degrees_bare = effect(less)
        if at(bare, path) == value:
            return  # what it would have been filled with
        count["compared"] += 1
        assert (parsed, degrees) != (
            parsed_bare,
            degrees_bare,
        ), f"{path} = {value!r} changes nothing"

    run()
    assert (
        count["refused"] + count["accepted"] >= 600
        and count["refused"] > 100
        and count["compared"] > 60
    ), count


def is_default(node: dict[str, Any], value: Any) -> bool:
    default = node.get("default")
    if node.get("any_case") and isinstance(value, str) and isinstance(default, str):
        return value.lower() == default.lower()
    return value in ("auto", {}) or value == default  # an empty block writes nothing


def test_the_schema_is_what_the_installed_deepspeed_reads() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "make" / "make_ds_schema.py", "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


MARKED = {  # a form of the file -> whether it is read
    "{}": True,
    "\r\n{\r\n}\r\n": True,
    '{"zero_optimization": {"stage": 1}, "wandb": {"enabled": false, "project": "\ufeff"}}': True,
    "\ufeff{}": False,
    "": False,
}


@pytest.mark.parametrize("text", MARKED)
def test_a_byte_order_mark_at_the_start_is_no_part_of_the_text(text: str, tmp_path: Path) -> None:
    """Windows' Notepad writes it. A second one, or one in a string, is text."""
    file = tmp_path / "ds.json"
    file.write_text(text, encoding="utf-8-sig", newline="")
    if MARKED[text]:
        assert json_file.load(str(file), tmp_path) == (json.loads(text), file)
        return
    with pytest.raises(Refusal) as refused:
        json_file.load(str(file), tmp_path)
    assert "line 1, column 1" in str(refused.value)
