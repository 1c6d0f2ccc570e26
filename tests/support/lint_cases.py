"""DeepSpeed JSONs as people post them, both good and bad. record_lint_verdicts.py runs them, and
test_lint_verdicts.py compares lint's reports with the results.

FIRST covers the lint rules. POSTED, in the files posted_*.py, covers the forms found in public
repositories. NOT_HERE lists the requirements that cannot be tested on a CPU.
"""

from ds_json import ADAM, ADAMW, BATCH, BF16, Case, adamw, plain, schedule, zero
from posted_keys import MONITORS, NUMBERS, OPTIMIZERS, SCHEDULERS
from posted_runs import DEEPSPEED, MEGATRON, TRAINER
from posted_texts import TEXTS

# Cases that cannot be recorded with CPU processes, with the reason. The cases that are recorded
# instead are in the other lists.
NOT_HERE = {
    "Lamb, Lion": "FusedLamb and FusedLion are not implemented on a CPU",
    "super_offload": "needs CUDA",
    "ZeRO++ quantized weights and gradients": "their CUDA kernels do not compile here",
    "comms_logger, wall_clock_breakdown": (
        "what they measure differs from one run to the next; only that they print is seen"
    ),
}

# Keys and blocks whose effect cannot be seen in a CPU process. The cases contain these keys, but
# observations about them do not count.
NOT_SEEN = {
    "zero_optimization.overlap_comm": "at stage 3 it chooses a CUDA stream, and a CPU has none",
    "zero_optimization.load_from_fp32_weights": "is read when a checkpoint is loaded",
    "zero_allow_untested_optimizer": "a permission, which shows where it is needed only",
    "zero_force_ds_cpu_optimizer": "a permission for optimizers that a script passes",
    "pipeline.pipe_partitioned": (
        "acts with tensor parallelism, which the recorder's pipeline has not"
    ),
    "pipeline.grad_partitioned": (
        "acts with tensor parallelism, which the recorder's pipeline has not"
    ),
    "torch_autocast.enabled": "on a CPU it changes nothing for a model in bf16",
    "dump_state": "prints the configuration, which the recorder does not look at",
    "checkpoint.load_universal": "is read when a checkpoint is loaded",
    "use_data_before_expert_parallelism": (
        "lays out the ranks of experts, which the recorder's model has not"
    ),
    "dataloader_drop_last": (
        "acts in DeepSpeed's own data loader, which the recorder's script does not use"
    ),
    "data_efficiency": (
        "acts in DeepSpeed's own data loader, which the recorder's script does not use"
    ),
    "autotuning": "is read by `deepspeed --autotuning`, which starts other runs",
}


def is_seen(path: str) -> bool:
    """Return True if a key's effect can be seen in a CPU process."""
    return not any(path == key or path.startswith(f"{key}.") for key in NOT_SEEN)


HF_ZERO2 = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e6,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e6,
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
HF_ZERO3 = HF_ZERO2 | {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
ZERO2_BUCKETS = {
    "allgather_bucket_size": 2e6,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e6,
    "contiguous_gradients": True,
}
ZERO3_NUMBERS = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": 1e6,
    "stage3_prefetch_bucket_size": 9e5,
    "stage3_param_persistence_threshold": 40960,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}

FIRST: dict[str, Case] = {
    # Working JSONs
    "the least": Case("DeepSpeed's getting started", {"train_batch_size": 8, "optimizer": ADAM}),
    "the old switch": Case(
        "DeepSpeed's getting started",
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "optimizer": ADAM,
            "zero_optimization": True,
        },
    ),
    "ZeRO-1 in bf16": Case(
        "DeepSpeed's bf16 tutorial",
        plain(1, bf16=BF16, data_types={"grad_accum_dtype": "fp32"}, gradient_clipping=1.0),
    ),
    "ZeRO-2 buckets": Case(
        "pretraining scripts", zero(2, ZERO2_BUCKETS, gradient_clipping=1.0, steps_per_print=1)
    ),
    "ZeRO-2 offload": Case(
        "Trainer users, numbers written out",
        zero(
            2,
            {"offload_optimizer": {"device": "cpu", "pin_memory": True}, "reduce_bucket_size": 2e6},
        ),
    ),
    "ZeRO-3 numbers": Case("Trainer users, numbers written out", zero(3, ZERO3_NUMBERS, bf16=BF16)),
    "ZeRO-3 offload": Case(
        "DeepSpeed's ZeRO-Offload tutorial",
        zero(
            3,
            {
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "cpu", "pin_memory": True},
                "contiguous_gradients": True,
            },
        ),
    ),
    "ZeRO-3 on a drive": Case(
        "DeepSpeed's ZeRO-Infinity example",
        zero(
            3,
            {
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "swap",
                    "pin_memory": True,
                    "buffer_count": 4,
                },
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": "swap",
                    "pin_memory": True,
                    "buffer_count": 5,
                    "buffer_size": 1e6,
                },
            },
            aio={
                "block_size": 262144,
                "queue_depth": 32,
                "single_submit": False,
                "overlap_events": True,
            },
        ),
    ),
    "accelerate's file": Case(
        "accelerate's zero2 template, numbers written out",
        {
            "bf16": BF16,
            "optimizer": ADAMW,
            "zero_optimization": {
                "stage": 2,
                "overlap_comm": False,
                "reduce_bucket_size": 2e6,
                "contiguous_gradients": True,
            },
            **BATCH,
            "gradient_clipping": 1.0,
            "steps_per_print": 1e9,
        },
    ),
    "three batch keys": Case(
        "pain 3",
        {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": ADAMW,
        },
        world=2,
    ),
    "WarmupLR": Case(
        "DeepSpeed's docs",
        schedule("WarmupLR", warmup_min_lr=0, warmup_max_lr=1e-3, warmup_num_steps=10),
    ),
    "WarmupDecayLR": Case(
        "LLaMA fine-tuning scripts",
        schedule(
            "WarmupDecayLR",
            total_num_steps=20,
            warmup_min_lr=0,
            warmup_max_lr=1e-3,
            warmup_num_steps=5,
        ),
    ),
    "WarmupCosineLR": Case(
        "DeepSpeed's docs", schedule("WarmupCosineLR", total_num_steps=20, warmup_num_steps=5)
    ),
    "OneCycle": Case(
        "DeepSpeed's 1Cycle tutorial",
        schedule("OneCycle", cycle_first_step_size=1000, cycle_min_lr=1e-4, cycle_max_lr=1e-3),
    ),
    "torch's cosine without ZeRO": Case(
        "users who name a schedule of PyTorch",
        {
            **BATCH,
            "optimizer": adamw(torch_adam=True),
            "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 20}},
        },
    ),
    "Adam that is Adam": Case(
        "DeepSpeed's docs",
        {
            **BATCH,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 1e-3, "adam_w_mode": False, "weight_decay": 0.1},
            },
        },
    ),
    "torch's SGD": Case(
        "CIFAR examples",
        {
            "train_batch_size": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
        },
    ),
    "SGD under ZeRO, allowed": Case(
        "composition table",
        {
            **BATCH,
            "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
    ),
    "the script's optimizer": Case(
        "scripts with an optimizer of their own",
        {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 0.5,
        },
    ),
    "CSV monitor": Case(
        "DeepSpeed's monitor tutorial",
        plain(1, csv_monitor={"enabled": True, "output_path": "logs", "job_name": "train"}),
    ),
    "FLOPS profiler": Case(
        "DeepSpeed's profiler tutorial",
        plain(
            1,
            flops_profiler={
                "enabled": True,
                "profile_step": 1,
                "module_depth": -1,
                "top_modules": 1,
                "detailed": False,
            },
        ),
    ),
    "activation checkpointing": Case(
        "Megatron's scripts",
        plain(1, activation_checkpointing={"partition_activations": True, "number_checkpoints": 2}),
    ),
    "summed gradients": Case(
        "scripts that average by themselves", plain(2, gradient_allreduce_op="sum"), world=2
    ),
    "old names of offload": Case("files of 2020", zero(2, {"cpu_offload": True})),
    "old name of the weights": Case(
        "files of 2022", zero(3, {"stage3_gather_fp16_weights_on_model_save": True}, bf16=BF16)
    ),
    "old name of bf16": Case("files of 2021", plain(1, bfloat16={"enabled": True})),
    "words for switches": Case(
        "files made by templates",
        {
            **BATCH,
            "optimizer": ADAMW,
            "zero_optimization": {"stage": 2, "overlap_comm": "true"},
            "bf16": {"enabled": 1},
        },
    ),
    "comments": Case(
        "files with notes in them, which DeepSpeed reads with hjson",
        '{\n  # two rows a GPU\n  "train_micro_batch_size_per_gpu": 2,\n  "optimizer": {"type":'
        ' "AdamW", "params": {"lr": 0.001}}, // the usual\n  "zero_optimization": {"stage":'
        " 1},\n}\n",
    ),
    "switched off": Case(
        "Trainer users, numbers written out",
        plain(
            2,
            fp16={"enabled": False, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
            bf16=BF16,
        ),
    ),
    "pipeline with ZeRO-1": Case(
        "composition table", plain(1, gradient_clipping=1.0), world=2, pp=2
    ),
    "tensor parallelism": Case(
        "DeepSpeed's AutoTP tutorial", plain(1, tensor_parallel={"autotp_size": 2}), world=2
    ),
    # JSONs that fail
    "torch's cosine under ZeRO": Case(
        "users who name a schedule of PyTorch", schedule("CosineAnnealingLR", T_max=20)
    ),
    "HF docs, ZeRO-2": Case("transformers' docs, given to DeepSpeed itself (pain 2)", HF_ZERO2),
    "HF docs, ZeRO-3": Case("transformers' docs, given to DeepSpeed itself (pain 2)", HF_ZERO3),
    "micro batch left to Trainer": Case(
        "pain 2",
        {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": 1,
            "optimizer": ADAMW,
        },
    ),
    "clipping left to Trainer": Case("pain 2", plain(1, gradient_clipping="auto")),
    "learning rate left to Trainer": Case("pain 2", {**BATCH, "optimizer": adamw(lr="auto")}),
    "betas left to Trainer": Case("accelerate users", {**BATCH, "optimizer": adamw(betas="auto")}),
    "warm-up left to Trainer": Case(
        "pain 2", schedule("WarmupLR", warmup_min_lr=0, warmup_max_lr=1e-3, warmup_num_steps="auto")
    ),
    "10 is not 3 * 3": Case(
        "validation truth table",
        {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3, "optimizer": ADAMW},
    ),
    "64 is not 4 * 8 * 1": Case(
        "pain 3",
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
            "optimizer": ADAMW,
        },
    ),
    "a batch for one GPU": Case(
        "pain 3",
        {
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": ADAMW,
        },
        world=2,
    ),
    "no batch at all": Case("pain 3", {"optimizer": ADAMW, "zero_optimization": {"stage": 2}}),
    "accumulation alone": Case("pain 3", {"gradient_accumulation_steps": 4, "optimizer": ADAMW}),
    "misspelt key of ZeRO": Case("pain 1", zero(3, {"stage3_max_live_parameter": 1e9})),
    "misspelt key of offload": Case(
        "pain 1", zero(2, {"offload_optimizer": {"device": "cpu", "pinned_memory": True}})
    ),
    "torch_compile block": Case(
        "axolotl's zero3_bf16_torch_compile",
        plain(1, compile={"disable": False, "backend": "inductor"}),
    ),
    "W&B run name": Case(
        "pain 30", plain(1, wandb={"enabled": False, "project": "p", "name": "run 1"})
    ),
    "Apex": Case("files of 2020", plain(0, amp={"enabled": True, "opt_level": "O1"})),
    "elasticity": Case(
        "files of 2021",
        plain(
            1, elasticity={"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4]}
        ),
    ),
    "sparse gradients": Case("files of 2021", plain(0, sparse_gradients=False)),
    "MiCS": Case("AWS's examples", zero(3, {"mics_shard_size": 1})),
    "both dtypes": Case("merged files", plain(1, bf16=BF16, fp16={"enabled": True})),
    "1-bit Adam": Case(
        "composition table, files of 2021",
        {**BATCH, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 10}}},
    ),
    "misspelt optimizer": Case(
        "pain 1", {**BATCH, "optimizer": {"type": "AdmaW", "params": {"lr": 1e-3}}}
    ),
    "schedule of transformers": Case(
        "users who name a schedule of transformers", schedule("cosine", warmup_num_steps=5)
    ),
    "warm-up of 0 steps": Case("composition table", schedule("WarmupLR", warmup_num_steps=0)),
    "schedule without its length": Case(
        "pain 29", schedule("WarmupDecayLR", warmup_num_steps=5, warmup_max_lr=1e-3)
    ),
    "SGD under ZeRO": Case(
        "composition table",
        {
            **BATCH,
            "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 2},
        },
    ),
    "max_grad_norm in the optimizer": Case(
        "files of 2020", {**BATCH, "optimizer": adamw(max_grad_norm=1.0)}
    ),
    "Muon under ZeRO-3": Case(
        "composition table",
        {
            **BATCH,
            "optimizer": {"type": "Muon", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3},
        },
    ),
    "pipeline with ZeRO-2": Case("pain 12", plain(2), world=2, pp=2),
    "pipeline with ZeRO-3": Case("pain 12", plain(3), world=2, pp=2),
    "pre-scaled gradients under ZeRO-3": Case(
        "Megatron's scripts", plain(3, prescale_gradients=True)
    ),
    "summed gradients under ZeRO-3": Case(
        "composition table", plain(3, gradient_allreduce_op="sum")
    ),
    "stage 4": Case("typos", plain(4)),
    "clipping in quotes": Case("files made by templates", plain(1, gradient_clipping="1.0")),
    "batch in quotes": Case(
        "files made by templates", {"train_batch_size": "8", "optimizer": ADAMW}
    ),
    "fp32 accumulation without ZeRO": Case(
        "validation by running", plain(0, bf16=BF16, data_types={"grad_accum_dtype": "fp32"})
    ),
    "unknown device": Case("typos", zero(2, {"offload_optimizer": {"device": "gpu"}})),
    "stage twice": Case(
        "merged files",
        '{"train_batch_size": 4, "zero_optimization": {"stage": 1, "stage": 2}, "optimizer":'
        ' {"type": "AdamW", "params": {"lr": 0.001}}}',
    ),
    "no gradient norm at stage 3": Case(
        "files cut from a ZeRO-2 one", zero(3, {"compute_grad_norm": False})
    ),
    "no gradient norm to clip by": Case(
        "validation by running", zero(2, {"compute_grad_norm": False}, gradient_clipping=1.0)
    ),
    "part of an offload at stage 2": Case(
        "files cut from a ZeRO-3 one",
        zero(2, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
    ),
    "breakdown in quotes": Case("files made by templates", plain(1, wall_clock_breakdown="true")),
    "odd bucket": Case("buckets computed from a size", zero(2, {"allgather_bucket_size": 1000001})),
    "bf16 states alone": Case(
        "low-precision states", plain(2, bf16={"enabled": True, "bf16_optimizer_states": True})
    ),
    # JSONs that DeepSpeed ignores or replaces in part
    "HF docs, ZeRO-2, batch filled": Case(
        "transformers' docs, the numbers that DeepSpeed asked for filled in",
        {
            **HF_ZERO2,
            **BATCH,
            "train_batch_size": 4,
            "gradient_clipping": 1.0,
            "optimizer": ADAMW,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}},
        },
    ),
    "HF docs, ZeRO-3, batch filled": Case(
        "transformers' docs, the numbers that DeepSpeed asked for filled in (pain 2)",
        {
            **BATCH,
            "bf16": {"enabled": "auto"},
            "optimizer": ADAMW,
            "zero_optimization": {
                key: value
                for key, value in HF_ZERO3["zero_optimization"].items()
                if "offload" not in key
            },
        },
    ),
    "misspelt accumulation": Case(
        "pain 1",
        {"train_micro_batch_size_per_gpu": 2, "gradient_acumulation_steps": 4, "optimizer": ADAMW},
    ),
    "misspelt clipping": Case("pain 1", plain(1, gradient_cliping=0.1)),
    "stage outside its block": Case("pain 1", {**BATCH, "optimizer": ADAMW, "stage": 2}),
    "ZeRO in British": Case(
        "pain 1", {**BATCH, "optimizer": ADAMW, "zero_optimisation": {"stage": 3}}
    ),
    "unknown checkpointing keys": Case(
        "validation truth table",
        plain(
            1, activation_checkpointing={"partition_activations": True, "checkpoint_in_cpu": True}
        ),
    ),
    "unknown profiler key": Case(
        "validation truth table", plain(1, flops_profiler={"enabled": True, "profile_steps": 2})
    ),
    "monitor_config": Case(
        "LLaMA-Factory's ds_z3_fp8_config",
        plain(3, monitor_config={"enabled": True, "tag": "run"}, comms_config={"verbose": True}),
    ),
    "visible devices": Case("DeepSpeedExamples", plain(1, cuda_visible_devices="0,1")),
    "bf16 left to Trainer": Case("pain 2", plain(2, bf16={"enabled": "auto"})),
    "keys of ZeRO-3 at stage 2": Case(
        "files cut from a ZeRO-3 one",
        zero(
            2,
            {
                "stage3_max_live_parameters": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
                "sub_group_size": 1e9,
            },
        ),
    ),
    "parameter offload at stage 2": Case(
        "files cut from a ZeRO-3 one",
        zero(2, {"offload_param": {"device": "cpu", "pin_memory": True}}),
    ),
    "optimizer on a drive at stage 2": Case(
        "pain 24", zero(2, {"offload_optimizer": {"device": "nvme", "nvme_path": "swap"}})
    ),
    "drive settings without a drive": Case(
        "pain 24",
        zero(
            2,
            {"offload_optimizer": {"device": "cpu", "nvme_path": "swap"}},
            aio={"queue_depth": 16},
        ),
    ),
    "old communication keys": Case(
        "Megatron's scripts of 2021",
        plain(1, fp32_allreduce=True, disable_allgather=True, vocabulary_size=50257),
    ),
    "monitor that is off": Case(
        "DeepSpeed's monitor tutorial, cut short", plain(1, csv_monitor={"output_path": "logs"})
    ),
    "AdamW that is AdamW": Case(
        "transformers' tests", {**BATCH, "optimizer": adamw(torch_adam=True, adam_w_mode=True)}
    ),
    "states of a CPU Adam": Case(
        "files cut from an offload one", {**BATCH, "optimizer": adamw(fp32_optimizer_states=True)}
    ),
    "optimizer without a type": Case("pain 1", {**BATCH, "optimizer": {"params": {"lr": 0.1}}}),
    "misspelt schedule": Case(
        "pain 1", plain(1, schedular={"type": "WarmupLR", "params": {"warmup_num_steps": 5}})
    ),
    "optimizer offload without ZeRO": Case(
        "files cut from a ZeRO-2 one",
        zero(0, {"offload_optimizer": {"device": "cpu", "pin_memory": True}}),
    ),
    "offload to nowhere": Case(
        "accelerate's questionnaire",
        zero(2, {"offload_optimizer": {"device": "none", "pin_memory": True}}),
    ),
    "DeepCompile without ZeRO": Case("composition table", plain(0, compile={"deepcompile": True})),
    "no in quotes": Case("files made by templates", plain(1, prescale_gradients="false"), world=2),
    "clipping below 0": Case("users who switch it off", plain(1, gradient_clipping=-1)),
    "ZeRO-1 in bf16, tuned": Case(
        "files cut from a ZeRO-2 one",
        zero(
            1,
            {"contiguous_gradients": False, "overlap_comm": True, "reduce_scatter": False},
            bf16=BF16,
            data_types={"grad_accum_dtype": "fp32"},
        ),
    ),
    "two learning rates": Case(
        "pain 29", schedule("WarmupDecayLR", total_num_steps=20, warmup_num_steps=5)
    ),
    "stages of a pipeline": Case(
        "validation truth table",
        plain(1, pipeline={"stages": 2, "partition": "uniform"}),
        world=2,
        pp=2,
    ),
    "unknown checkpoint key": Case(
        "validation truth table", plain(1, checkpoint={"async_save": True})
    ),
    "dtype at the top": Case("inference files", plain(1, dtype="bf16")),
}

# The forms of public repositories
POSTED = TRAINER | DEEPSPEED | MEGATRON | OPTIMIZERS | SCHEDULERS | NUMBERS | MONITORS | TEXTS
CASES = FIRST | POSTED
