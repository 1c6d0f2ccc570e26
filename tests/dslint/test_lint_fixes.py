"""If lint's fixes are applied literally to typical JSONs, the JSONs are clean and keep their
meaning.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from job import metrics
from recipekit.commands import lint
from recipekit.dslint import numbers as numbers_module
from recipekit.dslint import resolve
from recipekit.spec.errors import Problem
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe

RECIPE = Recipe(
    model="meta-llama/Llama-3.2-1B",
    global_batch=64,
    micro_batch=4,
    lr=1e-4,
    beta1=0.85,
    beta2=0.96,
    eps=3e-8,
    weight_decay=0.07,
    steps=800,
    warmup_steps=40,
)
WORLD = 8
FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
BATCH = {
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
CLIPPING = {"gradient_clipping": "auto", "steps_per_print": 2000, "wall_clock_breakdown": False}
ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
    },
}
TRANSFORMERS = {
    "fp16": FP16 | {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": ADAMW,
    "scheduler": WARMUP,
    **BATCH,
    **CLIPPING,
}
ACCELERATE = {
    "fp16": FP16,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
    },
    "scheduler": DECAY,
    **BATCH,
    "gradient_accumulation_steps": 1,
    **CLIPPING,
}
ZERO2 = {
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "contiguous_gradients": True,
}
ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}
CPU = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}


@dataclass(frozen=True)
class Case:
    """A JSON (or its text) that users copy from the source `after`, and the training that they
    expect.

    The expectations are relative to the recipe's numbers.
    """

    after: str
    config: dict[str, Any] | str
    dtype: str
    stage: int
    offload: str = "none"  # device of the optimizer
    numbers: dict[str, Any] | None = None  # field of Recipe -> number that the JSON sets
    schedule: str = "cosine"  # the recipe's schedule, or a scheduler that stays in the JSON

    @property
    def text(self) -> str:
        return self.config if isinstance(self.config, str) else json.dumps(self.config, indent=2)


CASES = {
    "transformers, ZeRO-2": Case(
        "transformers' documentation",
        TRANSFORMERS
        | {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": CPU,
                **ZERO2,
                "reduce_bucket_size": 2e8,
            }
        },
        "bf16",
        2,
        "cpu",
        schedule="constant",
    ),
    "transformers, ZeRO-3": Case(
        "transformers' documentation",
        TRANSFORMERS
        | {
            "zero_optimization": {
                **ZERO3,
                "offload_optimizer": CPU,
                "offload_param": CPU,
                "stage3_gather_16bit_weights_on_model_save": True,
            }
        },
        "bf16",
        3,
        "cpu",
        schedule="constant",
    ),
    "transformers, NVMe": Case(
        "transformers' documentation",
        {key: value for key, value in TRANSFORMERS.items() if key != "fp16"}
        | {
            "zero_optimization": {
                **ZERO3,
                "offload_optimizer": NVME | {"buffer_count": 4, "fast_init": False},
                "offload_param": NVME | {"buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "aio": {
                "block_size": 262144,
                "queue_depth": 32,
                "thread_count": 1,
                "single_submit": False,
                "overlap_events": True,
            },
        },
        "bf16",
        3,
        "nvme",
        schedule="constant",
    ),
    "transformers before 4.10, fp16": Case(
        "its tests' first ZeRO-3 file",
        {
            "fp16": FP16,
            "zero_optimization": {
                **ZERO3,
                "offload_optimizer": CPU,
                "offload_param": CPU,
                "sub_group_size": 1e14,
                "reduce_bucket_size": 0,
                "stage3_prefetch_bucket_size": 0,
                "stage3_param_persistence_threshold": 0,
                "stage3_gather_fp16_weights_on_model_save": True,
            },
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500},
            },
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        "fp16",
        3,
        "cpu",
        {"lr": 3e-5, "beta1": 0.8, "beta2": 0.999, "eps": 1e-8, "weight_decay": 3e-7},
        "WarmupLR",
    ),
    "accelerate, ZeRO-1": Case(
        "accelerate's templates",
        ACCELERATE | {"zero_optimization": {"stage": 1, **ZERO2, "reduce_bucket_size": "auto"}},
        "fp16",
        1,
        schedule="linear",
    ),
    "accelerate, ZeRO-2 offload": Case(
        "accelerate's templates",
        ACCELERATE
        | {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": CPU,
                **ZERO2,
                "reduce_bucket_size": "auto",
            }
        },
        "fp16",
        2,
        "cpu",
        schedule="linear",
    ),
    "accelerate, ZeRO-3 offload": Case(
        "accelerate's templates",
        ACCELERATE
        | {
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
            "zero_optimization": {
                **ZERO3,
                "offload_optimizer": CPU,
                "offload_param": CPU,
                "stage3_gather_16bit_weights_on_model_save": "auto",
            },
        },
        "fp16",
        3,
        "cpu",
        schedule="linear",
    ),
    "LLaMA-Factory, ZeRO-2": Case(
        "fine-tuning tools",
        {
            **BATCH,
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
            "fp16": FP16 | {"enabled": "auto"},
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": 2,
                **ZERO2,
                "overlap_comm": False,
                "reduce_bucket_size": 5e8,
                "round_robin_gradients": True,
            },
        },
        "bf16",
        2,
    ),
    "DeepSpeed, getting started": Case(
        "DeepSpeed's getting started",
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
            "fp16": {"enabled": True},
            "zero_optimization": True,
        },
        "fp16",
        1,
        numbers={"global_batch": 8, "micro_batch": 1, "lr": 0.00015},
    ),
    "DeepSpeed, CIFAR": Case(
        "DeepSpeed's CIFAR tutorial",
        {
            "train_batch_size": 16,
            "steps_per_print": 2000,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
            },
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "fp16": (
                FP16
                | {
                    "fp16_master_weights_and_grads": True,
                    "loss_scale_window": 500,
                    "initial_scale_power": 15,
                }
            ),
            "wall_clock_breakdown": False,
            "zero_optimization": {
                "stage": 2,
                **ZERO2,
                "reduce_bucket_size": 5e7,
                "cpu_offload": True,
            },
        },
        "fp16",
        2,
        "cpu",
        {
            "global_batch": 16,
            "micro_batch": 2,
            "lr": 0.001,
            "beta1": 0.8,
            "beta2": 0.999,
            "eps": 1e-8,
            "weight_decay": 3e-7,
        },
        "WarmupLR",
    ),
    "DeepSpeed, BERT": Case(
        "DeepSpeed's BERT tutorial",
        {
            "train_batch_size": 4096,
            "train_micro_batch_size_per_gpu": 64,
            "steps_per_print": 1000,
            "prescale_gradients": False,
            "optimizer": {
                "type": "Adam",
                "params": {
                    "lr": 2e-4,
                    "max_grad_norm": 1.0,
                    "weight_decay": 0.01,
                    "bias_correction": False,
                },
            },
            "gradient_clipping": 1.0,
            "wall_clock_breakdown": False,
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
        },
        "fp16",
        1,  # fp16 needs it
        numbers={"global_batch": 4096, "micro_batch": 64, "lr": 2e-4, "weight_decay": 0.01},
    ),
    "DeepSpeed, ZeRO-Infinity": Case(
        "DeepSpeed's ZeRO-3 tutorial with Megatron",
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "steps_per_print": 1,
            "zero_optimization": {
                "stage": 3,
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e8,
                "stage3_param_persitance_threshold": 1e5,
                "stage3_prefetch_bucket_size": 5e7,
                "contiguous_gradients": True,
                "overlap_comm": True,
                "reduce_bucket_size": 90000000,
                "sub_group_size": 1e8,
                "offload_optimizer": (
                    NVME | {"buffer_count": 4, "pipeline_read": False, "pipeline_write": False}
                ),
                "offload_param": NVME | {"max_in_cpu": 1},
            },
            "gradient_clipping": 1.0,
            "fp16": {
                "enabled": True,
                "loss_scale": 1024,
                "loss_scale_window": 1000,
                "hysteresis": 2,
                "min_loss_scale": 1,
            },
            "wall_clock_breakdown": True,
            "zero_allow_untested_optimizer": False,
            "aio": {
                "block_size": 1048576,
                "queue_depth": 16,
                "single_submit": False,
                "overlap_events": True,
                "thread_count": 2,
            },
        },
        "fp16",
        3,
        "nvme",
        {"global_batch": 32, "micro_batch": 4},
    ),
    "DeepSpeed, ZeRO-Offload": Case(
        "DeepSpeed's ZeRO-Offload tutorial with Megatron",
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 5,
            "steps_per_print": 100,
            "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "weight_decay": 1e-2}},
            "zero_optimization": {
                "stage": 2,
                "cpu_offload": True,
                "contiguous_gradients": True,
                "overlap_comm": True,
                "reduce_bucket_size": 50000000,
            },
            "gradient_clipping": 1.0,
            "fp16": {
                "enabled": True,
                "loss_scale": 0,
                "loss_scale_window": 1000,
                "hysteresis": 2,
                "min_loss_scale": 1,
            },
            "activation_checkpointing": {
                "partition_activations": True,
                "contiguous_memory_optimization": True,
                "cpu_checkpointing": True,
            },
            "wall_clock_breakdown": False,
        },
        "fp16",
        2,
        "cpu",
        {"global_batch": 160, "micro_batch": 4, "lr": 0.00015, "weight_decay": 1e-2},
    ),
    "a team's file with notes": Case(
        "a project that has grown: comments, spare commas, a scheduler with numbers, names"
        " misspelt",
        """{
  // 8 x H100; see https://example.com/wiki for why
  "bf16": {"enabled": "auto"},  # never fp16 with this model
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_acumulation_steps": "auto",
  "gradient_clipping": 0.5, /* was 1.0,
                               until May */
  "optimizer": \
{"type": "adamw", "params": {"lr": 2e-5, "betas": [0.9, 0.98], "eps": "auto", "weight_decay": 0.0}},
  "scheduler": {
    "type": "WarmupDecayLR",
    "params": \
{"warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 30, "total_num_steps": 1000,},
  },
  "zero_optimisation": {"stage": 3, "overlap_comm": true},
}
""",
        "bf16",
        3,
        numbers={
            "lr": 2e-5,
            "beta1": 0.9,
            "beta2": 0.98,
            "weight_decay": 0.0,
            "gradient_clipping": 0.5,
        },
        schedule="WarmupDecayLR",
    ),
}


# A user who applies a fix literally


def apply(problems: list[Problem], text: str, recipe: Recipe) -> tuple[str, Recipe]:
    """Apply each fix literally to the text and the recipe; return both.

    If a fix offers several options, the first option is used.
    """
    notes = [problem for problem in problems if ", line " in problem.where]
    lines = text.split("\n")
    for problem in reversed(notes):  # applied from the end, so that earlier columns stay valid
        found = re.fullmatch(r".*, line (\d+), column (\d+)", problem.where)
        told = re.match(r"delete (.+)", problem.fix, re.DOTALL)
        assert found and told, problem
        at, start = int(found[1]) - 1, int(found[2]) - 1
        rest = "\n".join(lines[at:])
        end = (
            rest.index("*/", start) + 2 if told[1] == "all from /* to */" else start + len(told[1])
        )
        assert told[1] in (rest[start:end], "all from /* to */"), (problem, rest[start:end])
        lines[at:] = (rest[:start] + rest[end:]).split("\n")
    config = json.loads("\n".join(lines))
    for problem in problems:
        if problem not in notes:
            recipe = apply_one(problem, config, recipe)
    return json.dumps(config, indent=2), recipe


def apply_one(problem: Problem, config: dict[str, Any], recipe: Recipe) -> Recipe:
    path, fix = problem.where.partition(" = ")[0], problem.fix
    path = re.sub(r".* \((.*)\)", r"\1", path)
    block, _, key = path.rpartition(".")
    here = at(config, block)
    for name, value in re.findall(r"--(\w+) ([\w.-]+)", fix) if fix.startswith("delete") else []:
        recipe = changed(recipe, name, value)
    if fix.startswith("delete"):
        del here[key]
    elif told := re.match(r'(?:write|set|add) "([\w.]+)": ', fix):
        value = json.JSONDecoder().raw_decode(fix[told.end() :])[0]
        if fix.endswith(" instead"):
            del here[key]
        block, _, key = told[1].rpartition(".")
        at(config, block)[key] = value
    elif told := re.match(rf"write |set (?:it|{re.escape(key)}) to ", fix):
        here[key] = json.JSONDecoder().raw_decode(fix[told.end() :])[0]
    elif told := re.match(r"did you mean (\w+)\?", fix):
        if "must be one of" in problem.rule or key == "type":
            here[key] = told[1]
        else:
            here[told[1]] = here.pop(key)
        # The number is either in the JSON or in the recipe.
    elif told := re.match(r"use (global_batch|micro_batch) (\d+)", fix):
        if isinstance(config.get(numbers_module.SHARED_FIELD_PATHS[told[1]]), int):
            config[numbers_module.SHARED_FIELD_PATHS[told[1]]] = int(told[2])
        else:
            recipe = changed(recipe, told[1], told[2])
    else:
        raise AssertionError(f"nobody can do this literally: {problem}")
    return recipe


def at(config: dict[str, Any], path: str) -> dict[str, Any]:
    for key in path.split(".") if path else []:
        config = config.setdefault(key, {})
    return config


def changed(recipe: Recipe, name: str, value: str) -> Recipe:
    return replace(recipe, **{name: type(getattr(recipe, name))(value)})


def linted(text: str, recipe: Recipe, folder: Path) -> list[Problem]:
    """Return the problems of `python tools/lint.py ds.json --recipe mine.py --world 8`."""
    (folder / "ds.json").write_text(text)
    (folder / "mine.py").write_text(f"from recipekit import Recipe\nRECIPE = {recipe!r}\n")
    return lint.lint(str(folder / "ds.json"), folder / "mine.py", WORLD)[0]


def stock(text: str, folder: Path, filled_by: str) -> list[Problem]:
    """Return the problems of a script that is no recipe, with `--json-only` or `--filled-by`."""
    (folder / "ds.json").write_text(text)
    return lint.lint(str(folder / "ds.json"), json_only=True, filled_by=filled_by)[0]


def test_there_are_files_of_all_who_write_them() -> None:
    assert len(CASES) >= 12
    for words in ("transformers", "accelerate", "DeepSpeed, "):
        assert sum(name.startswith(words) for name in CASES) >= 3


@pytest.mark.parametrize("name", CASES)
def test_each_fix_done_literally_gives_what_the_reader_expects(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    problems = linted(case.text, RECIPE, tmp_path)
    assert problems, "each of these has something to mend"
    text, recipe = apply(problems, case.text, RECIPE)
    assert linted(text, recipe, tmp_path) == [], (text, [str(problem) for problem in problems])

    config = json.loads(text)
    # A start does the same.
    recipe = replace(
        recipe, **{name: value for name, value in numbers_module.read_literals(config).items()}
    )
    mesh = Mesh(dp=WORLD)
    resolved, _ = resolve.resolve_ds_config(config, recipe, mesh, {"hidden_size": 2048})
    expected = replace(RECIPE, **(case.numbers or {}))
    dtype = [name for name in ("fp16", "bf16") if resolved.get(name, {}).get("enabled")]
    zero, params = resolved["zero_optimization"], resolved["optimizer"]["params"]
    assert dtype == ([case.dtype] if case.dtype != "fp32" else [])
    assert (zero["stage"], zero.get("offload_optimizer", {}).get("device", "none")) == (
        case.stage,
        case.offload,
    )
    numbers = {name: getattr(expected, name) for name in numbers_module.SHARED_FIELD_PATHS}
    given = {name: getattr(recipe, name) for name in numbers_module.SHARED_FIELD_PATHS}
    assert given == numbers
    assert (
        resolved["train_batch_size"] == numbers["global_batch"]
        and resolved["gradient_clipping"] == numbers["gradient_clipping"]
    )
    assert (params["lr"], params["weight_decay"], params["betas"], params["eps"]) == (
        numbers["lr"],
        numbers["weight_decay"],
        [numbers["beta1"], numbers["beta2"]],
        numbers["eps"],
    )
    assert case.schedule == (
        resolved["scheduler"]["type"] if "scheduler" in resolved else recipe.schedule
    )
    assert recipe.warmup_steps == RECIPE.warmup_steps


def test_the_same_holds_for_a_script_that_is_no_recipe(tmp_path: Path) -> None:
    """Two kinds of cases are excluded.

    The first kind is Hjson text. The second is a schedule whose length only Trainer knows, because
    a file for DeepSpeed itself must state the length.
    """
    count = 0
    for filled_by in ("", "trainer", "accelerate"):
        for name, case in CASES.items():
            config = case.config
            if isinstance(config, str) or (not filled_by and "total_num_steps" in case.text):
                continue
            problems = stock(case.text, tmp_path, filled_by)
            text, _ = apply(problems, case.text, RECIPE)
            assert stock(text, tmp_path, filled_by) == [], (name, filled_by, text)
            fixed = json.loads(text)
            filled = filled_by and config.get("bf16", {}).get("enabled") == "auto"
            on = [
                dtype for dtype in ("fp16", "bf16") if fixed.get(dtype, {}).get("enabled") is True
            ]
            assert filled or on == [case.dtype], (name, filled_by, on)
            assert not isinstance(
                fixed.get("scheduler", {}).get("params", {}).get("warmup_max_lr"), list
            )
            count += bool(problems)
    assert count > 15


PRECISION = [  # fp16.enabled, bf16.enabled -> enabled precision
    (("auto", "auto"), "bf16"),
    ((None, "auto"), "bf16"),
    ((False, "auto"), "bf16"),
    ((True, "auto"), "fp16"),
    (("auto", None), "fp16"),
    (("auto", False), "fp16"),
    (("auto", True), "bf16"),
]


@pytest.mark.parametrize(("written", "means"), PRECISION)
def test_one_precision_is_on_where_auto_asked_for_one(
    written: tuple[Any, Any], means: str, tmp_path: Path
) -> None:
    blocks = {
        name: {"enabled": value}
        for name, value in zip(("fp16", "bf16"), written, strict=True)
        if value is not None
    }
    text = json.dumps({**blocks, **BATCH, "zero_optimization": {"stage": 2}})
    text, _ = apply(linted(text, RECIPE, tmp_path), text, RECIPE)
    config = json.loads(text)
    assert linted(text, RECIPE, tmp_path) == []
    assert [name for name in ("fp16", "bf16") if config.get(name, {}).get("enabled") is True] == [
        means
    ]


def test_numbers_of_a_half_filled_schedule_are_kept(tmp_path: Path) -> None:
    """The numbers in the JSON's schedule appear in the flags that replace the schedule."""
    schedule = {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": 2e-4, "warmup_num_steps": 7},
    }
    text = json.dumps(
        {
            **BATCH,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "scheduler": schedule,
        }
    )
    falling = replace(RECIPE, min_lr=1e-5)
    (problem,) = linted(text, falling, tmp_path)
    assert (
        problem.fix
        == "delete the block and use --schedule constant --min_lr 0 --warmup_steps 7 --lr 0.0002"
    )
    text, recipe = apply([problem], text, falling)
    assert linted(text, recipe, tmp_path) == [] and "scheduler" not in json.loads(text)
    assert (recipe.schedule, recipe.min_lr, recipe.warmup_steps, recipe.lr) == (
        "constant",
        0,
        7,
        2e-4,
    )


def trains(name: str, pools: Any, folder: Path) -> None:
    """Train two steps with the fixed JSON on two ranks, in bf16.

    The optimizer must use the recipe's numbers.
    """
    from short_runs import (
        BASE,  # imports torch, which the rest of this file does not need
        train,
    )

    problems = linted(CASES[name].text, RECIPE, folder)
    text, recipe = apply(problems, CASES[name].text, RECIPE)
    (folder / "ds.json").write_text(text)
    numbers = ("lr", "beta1", "beta2", "eps", "weight_decay", "schedule")
    flags = [
        word
        for field in numbers
        for word in (f"--{field}", str(getattr(recipe, field)))
        if field not in numbers_module.read_literals(json.loads(text))
    ]
    argv = [
        "--deepspeed_config",
        str(folder / "ds.json"),
        "--steps",
        "2",
        "--eval_every",
        "0",
        "--export",
        "--no-wandb",
        "--out",
        str(folder / "run"),
        *flags,
    ]
    results = pools.run(2, train, recipe=BASE, argv=argv)
    assert [code for code, _ in results] == [0, 0], results
    lines = metrics(folder / "run")
    assert [line["step"] for line in lines] == [1, 2] and all(
        math.isfinite(line["loss"]) for line in lines
    )
    given = json.loads((folder / "run" / "ds_config.json").read_text())
    assert given["bf16"]["enabled"] and given["optimizer"]["params"]["betas"] == [
        RECIPE.beta1,
        RECIPE.beta2,
    ]
    (file,) = (folder / "run" / "hf").glob("*.safetensors")
    assert '"BF16"' in file.read_bytes()[8:4096].decode(errors="replace")


def test_the_most_copied_file_trains_in_bf16(
    pools: Any, ops: Callable[[str], None], tmp_path: Path
) -> None:
    ops("cpu_adam")
    trains("transformers, ZeRO-3", pools, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers, ZeRO-2", "LLaMA-Factory, ZeRO-2"])
def test_others_train_in_bf16(
    name: str, pools: Any, ops: Callable[[str], None], tmp_path: Path
) -> None:
    ops("cpu_adam")
    trains(name, pools, tmp_path)
