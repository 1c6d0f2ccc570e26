"""`accelerate launch` settings that a recipe rejects."""

import os
from collections.abc import Mapping
from pathlib import Path

from .errors import Problem, sentences

# `accelerate launch` (1.15, utils/launch.py) sets these variables. Each maps to its flag, the
# values that have no effect, and the advice.
ACCELERATE = {
    "ACCELERATE_MIXED_PRECISION": (
        "mixed_precision",
        ("no", "bf16"),
        "the JSON sets the precision (bf16 in ds_configs/): give another with --deepspeed_config",
    ),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "gradient_accumulation_steps",
        ("1", "auto"),
        "it follows from --global_batch and --micro_batch",
    ),
    "ACCELERATE_GRADIENT_CLIPPING": (
        "gradient_clipping",
        ("auto",),
        "add --gradient_clipping after the recipe's file",
    ),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": (
        "zero_stage",
        (),
        "the JSON sets the stage: --deepspeed_config zero2.json or zero3.json",
    ),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": (
        "deepspeed_config_file",
        (),
        "add --deepspeed_config FILE after the recipe's file",
    ),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (
        "offload_optimizer_device",
        ("none",),
        "add --deepspeed_config zero2_cpu.json or zero3_nvme.json",
    ),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (
        "offload_param_device",
        ("none",),
        "add --deepspeed_config zero3_cpu.json or zero3_nvme.json",
    ),
    "ACCELERATE_USE_FSDP": (
        "use_fsdp",
        ("false",),
        (
            "add --engine fsdp2 after the recipe's file, or --deepspeed_config zero3.json, which"
            " shards the model in the same way"
        ),
    ),
    "ACCELERATE_USE_MEGATRON_LM": (
        "use_megatron_lm",
        ("false",),
        "add --tp and --pp after the recipe's file",
    ),
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo_backend", ("no",), "recipes do not use it"),
}


def check_accelerate(variables: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each `accelerate launch` flag that a recipe does not read.

    Only scripts that create an Accelerator read these flags. --use_deepspeed alone is accepted
    because it changes nothing.
    """
    rule = "applies to scripts that use an Accelerator, but a recipe starts DeepSpeed itself"
    return [
        Problem(
            f"accelerate launch --{flag}{f' {value}' if value != 'true' else ''}",
            rule,
            sentences("leave it out", fix),
        )
        for name, (flag, idle, fix) in ACCELERATE.items()
        if (value := variables.get(name, "")) and value.lower() not in idle
    ]


def check_launcher(variables: Mapping[str, str]) -> list[Problem]:
    """Return a problem if `accelerate launch --num_processes 2` started one process without RANK.

    accelerate starts a single process if it sees fewer than two GPUs. Its simple_launcher (1.15)
    sets MASTER_PORT for that process, but not for itself.
    """
    if "RANK" in variables or not {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= variables.keys():
        return []
    try:
        above = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
    if any(entry.startswith(b"MASTER_PORT=") for entry in above):
        return []
    fix = (
        "write accelerate launch --multi_gpu --num_processes N (also on a CPU), or deepspeed"
        " --num_gpus N"
    )
    return [
        Problem(
            "accelerate launch",
            "has started 1 of several processes, as it does where it sees fewer than two GPUs",
            fix,
        )
    ]
