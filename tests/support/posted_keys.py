"""DeepSpeed files that differ from a plain file in one key or block, as found in public
repositories and forums.
"""

from typing import Any

from ds_json import ADAM, ADAMW, BATCH, BF16, Case, adamw, plain, schedule, zero
from posted_runs import FP16, WARMUP


def optimizer(name: Any, stage: int = 1, **params: Any) -> dict[str, Any]:
    return plain(stage, optimizer={"type": name, "params": {"lr": 1e-3, **params}})


OPTIMIZERS = {
    "1-bit Adam in full": Case(
        "DeepSpeed's 1-bit tutorial",
        optimizer("OneBitAdam", 0, freeze_step=400, cuda_aware=False, comm_backend_name="nccl"),
    ),
    "0/1 Adam": Case(
        "DeepSpeed's 0/1 tutorial",
        optimizer("ZeroOneAdam", 0, var_freeze_step=1000, var_update_scaler=16, cuda_aware=False),
    ),
    "1-bit LAMB": Case(
        "DeepSpeed's 1-bit tutorial", optimizer("OneBitLamb", 0, freeze_step=1000, coeff_beta=0.9)
    ),
    "small letters": Case("hand-written files", optimizer("adamw")),
    "FusedAdam": Case("class names", optimizer("FusedAdam")),
    "DeepSpeedCPUAdam": Case(
        "class names", plain(2, optimizer={"type": "DeepSpeedCPUAdam", "params": {"lr": 1e-3}})
    ),
    "adamw_torch": Case("Trainer's names", optimizer("adamw_torch")),
    "AdamW8bit": Case("bitsandbytes users", optimizer("AdamW8bit")),
    "PagedAdamW at stage 0": Case("bitsandbytes users", optimizer("paged_adamw_32bit", 0)),
    "Adafactor with Hugging Face's options": Case(
        "T5 users",
        plain(
            0,
            optimizer={
                "type": "Adafactor",
                "params": {
                    "lr": 1e-3,
                    "scale_parameter": False,
                    "relative_step": False,
                    "warmup_init": False,
                },
            },
        ),
    ),
    "MuAdam": Case("muP users", optimizer("MuAdam", 0)),
    "Muon": Case("Muon users", optimizer("Muon", 1, momentum=0.95, weight_decay=0.1)),
    "Adagrad": Case("recommenders", optimizer("Adagrad", 1, eps=1e-10)),
    "RMSprop without ZeRO": Case(
        "vision scripts", optimizer("RMSprop", 0, alpha=0.95, momentum=0.9)
    ),
    "RMSprop under ZeRO": Case("vision scripts", optimizer("RMSprop", 1)),
    "NAdam, allowed": Case(
        "vision scripts",
        plain(
            2,
            optimizer={"type": "NAdam", "params": {"lr": 1e-3}},
            zero_allow_untested_optimizer=True,
        ),
    ),
    "SGD with Nesterov": Case(
        "vision scripts",
        plain(
            0,
            optimizer={
                "type": "SGD",
                "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
            },
        ),
    ),
    "Nesterov without momentum": Case(
        "vision scripts",
        plain(0, optimizer={"type": "SGD", "params": {"lr": 0.1, "nesterov": True}}),
    ),
    "sgd in small letters": Case(
        "vision scripts", plain(0, optimizer={"type": "sgd", "params": {"lr": 0.1}})
    ),
    "no params": Case("short posts", plain(1, optimizer={"type": "AdamW"})),
    "params null": Case("templates", plain(1, optimizer={"type": "AdamW", "params": None})),
    "params empty": Case("short posts", plain(1, optimizer={"type": "AdamW", "params": {}})),
    "optimizer as text": Case("hand-written files", plain(1, optimizer="AdamW")),
    "optimizer null": Case("templates", plain(1, optimizer=None)),
    "rate beside the type": Case(
        "hand-written files", plain(1, optimizer={"type": "AdamW", "lr": 1e-3})
    ),
    "rate misspelt": Case(
        "hand-written files",
        plain(1, optimizer={"type": "AdamW", "params": {"learning_rate": 1e-3}}),
    ),
    "rate in quotes": Case(
        "YAML users, where 1e-3 is a string",
        plain(1, optimizer={"type": "AdamW", "params": {"lr": "1e-3"}}),
    ),
    "rate null": Case("templates", plain(1, optimizer={"type": "AdamW", "params": {"lr": None}})),
    "rate 0": Case("probing scripts", plain(1, optimizer=adamw(lr=0))),
    "rate below 0": Case("typos", plain(0, optimizer=adamw(lr=-1e-3, torch_adam=True))),
    "one beta": Case("hand-written files", plain(1, optimizer=adamw(betas=[0.9]))),
    "betas as one number": Case(
        "hand-written files", plain(0, optimizer=adamw(betas=0.9, torch_adam=True))
    ),
    "betas in quotes": Case("YAML users", plain(1, optimizer=adamw(betas=["0.9", "0.95"]))),
    "betas by name": Case("PyTorch's words", plain(1, optimizer=adamw(beta1=0.9, beta2=0.95))),
    "beta of 1": Case("typos", plain(0, optimizer=adamw(betas=[0.9, 1.0], torch_adam=True))),
    "eps in quotes": Case("YAML users", plain(1, optimizer=adamw(eps="1e-8"))),
    "decay below 0": Case("typos", plain(0, optimizer=adamw(weight_decay=-0.1, torch_adam=True))),
    "AMSGrad of torch": Case(
        "PyTorch's words", plain(1, optimizer=adamw(amsgrad=True, torch_adam=True))
    ),
    "AMSGrad of DeepSpeed": Case("PyTorch's words", plain(1, optimizer=adamw(amsgrad=True))),
    "correct_bias": Case("transformers' old AdamW", plain(1, optimizer=adamw(correct_bias=True))),
    "bias correction": Case("files of 2020", plain(1, optimizer=adamw(bias_correction=True))),
    "torch's fused step": Case(
        "PyTorch's words", plain(1, optimizer=adamw(torch_adam=True, fused=True))
    ),
    "fused step of DeepSpeed": Case("PyTorch's words", plain(1, optimizer=adamw(fused=True))),
    "torch_adam by a word": Case("templates", plain(1, optimizer=adamw(torch_adam="true"))),
    "legacy fusion": Case("DeepSpeed's docs", plain(0, optimizer={**ADAMW, "legacy_fusion": True})),
    "adam_w_mode false for AdamW": Case(
        "hand-written files", plain(1, optimizer=adamw(adam_w_mode=False))
    ),
    "an optimizer of the CPU forced": Case(
        "offload users",
        zero(
            2,
            {"offload_optimizer": {"device": "cpu"}},
            optimizer=adamw(torch_adam=True),
            zero_force_ds_cpu_optimizer=False,
        ),
    ),
    "permission inside ZeRO": Case(
        "bitsandbytes users", zero(2, {"zero_allow_untested_optimizer": True})
    ),
}

SCHEDULERS = {
    "schedule inside the optimizer": Case(
        "hand-written files",
        plain(0, optimizer={**ADAMW, "scheduler": {"type": "WarmupLR", "params": WARMUP}}),
    ),
    "WarmupLR with a length": Case(
        "posts in Chinese", schedule("WarmupLR", **WARMUP, total_num_steps=500)
    ),
    "WarmupLR with last_batch_iteration": Case(
        "Lightning users", schedule("WarmupLR", **WARMUP, last_batch_iteration=-1)
    ),
    "WarmupLR, linear": Case(
        "Databricks' examples", schedule("WarmupLR", **WARMUP, warmup_type="linear")
    ),
    "WarmupLR by ratio": Case(
        "Trainer's words", schedule("WarmupLR", warmup_ratio=0.03, warmup_max_lr=1e-3)
    ),
    "warm-up as 10.0": Case(
        "generated files", schedule("WarmupLR", warmup_max_lr=1e-3, warmup_num_steps=10.0)
    ),
    "warm-up as 10.5": Case(
        "scripts that compute it", schedule("WarmupLR", warmup_max_lr=1e-3, warmup_num_steps=10.5)
    ),
    "warm-up in quotes": Case(
        "YAML users", schedule("WarmupLR", warmup_max_lr=1e-3, warmup_num_steps="10")
    ),
    "warm-up longer than all": Case(
        "short tests",
        schedule("WarmupDecayLR", total_num_steps=10, warmup_num_steps=100, warmup_max_lr=1e-3),
    ),
    "warm-up downwards": Case(
        "typos", schedule("WarmupLR", warmup_min_lr=1e-2, warmup_max_lr=1e-3, warmup_num_steps=10)
    ),
    "rates as a list": Case(
        "two groups of parameters",
        schedule("WarmupLR", warmup_min_lr=[0.0], warmup_max_lr=[1e-3], warmup_num_steps=10),
    ),
    "rate of the schedule in quotes": Case(
        "YAML users",
        schedule("WarmupLR", warmup_min_lr="0", warmup_max_lr="1e-3", warmup_num_steps=10),
    ),
    "cosine with ratios": Case(
        "DeepSpeed's docs",
        schedule(
            "WarmupCosineLR",
            total_num_steps=100,
            warmup_min_ratio=0.1,
            cos_min_ratio=0.01,
            warmup_num_steps=5,
        ),
    ),
    "cosine with rates": Case(
        "Trainer users",
        schedule(
            "WarmupCosineLR",
            total_num_steps=100,
            warmup_min_lr=0,
            warmup_max_lr=1e-3,
            warmup_num_steps=5,
        ),
    ),
    "1Cycle in full": Case(
        "DeepSpeed's 1Cycle tutorial",
        plain(
            1,
            optimizer=ADAM,
            scheduler={
                "type": "OneCycle",
                "params": {
                    "cycle_min_lr": 1e-4,
                    "cycle_max_lr": 1e-3,
                    "cycle_first_step_size": 4,
                    "cycle_second_step_size": 4,
                    "decay_lr_rate": 0.001,
                    "cycle_min_mom": 0.85,
                    "cycle_max_mom": 0.99,
                    "decay_mom_rate": 0.0,
                },
            },
        ),
    ),
    "range test": Case(
        "DeepSpeed's LRRT tutorial",
        schedule(
            "LRRangeTest",
            lr_range_test_min_lr=1e-4,
            lr_range_test_step_size=200,
            lr_range_test_step_rate=5,
            lr_range_test_staircase=False,
        ),
    ),
    "range test with a longest rate": Case(
        "DeepSpeed's old docs",
        schedule("LRRangeTest", lr_range_test_min_lr=1e-4, lr_range_test_max_lr=1e-2),
    ),
    "schedule null": Case("templates", plain(1, scheduler=None)),
    "schedule as text": Case("hand-written files", plain(1, scheduler="WarmupLR")),
    "schedule without type": Case("hand-written files", plain(1, scheduler={"params": WARMUP})),
    "schedule without params": Case("hand-written files", plain(1, scheduler={"type": "WarmupLR"})),
    "WarmupLinear": Case("older names", schedule("WarmupLinear", warmup_num_steps=5)),
    "small letters of a schedule": Case(
        "hand-written files", schedule("warmuplr", warmup_num_steps=5)
    ),
    "lr_scheduler": Case(
        "hand-written files", plain(1, lr_scheduler={"type": "WarmupLR", "params": WARMUP})
    ),
    "two rates, one schedule": Case("hand-written files", schedule("WarmupLR", **WARMUP, lr=1e-3)),
    "StepLR without ZeRO": Case(
        "vision scripts",
        {
            **BATCH,
            "optimizer": adamw(torch_adam=True),
            "scheduler": {"type": "StepLR", "params": {"step_size": 30, "gamma": 0.1}},
        },
    ),
}

NUMBERS = {
    "batch as a float": Case("generated files", {"train_batch_size": 4.0, "optimizer": ADAMW}),
    "batch with a fraction": Case(
        "scripts that divide", {"train_batch_size": 4.5, "optimizer": ADAMW}
    ),
    "batch 0": Case("templates", {"train_batch_size": 0, "optimizer": ADAMW}),
    "batch below 0": Case("typos", {"train_batch_size": -4, "optimizer": ADAMW}),
    "batch null": Case(
        "templates",
        {"train_batch_size": None, "train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW},
    ),
    "batch true": Case("typos", {"train_batch_size": True, "optimizer": ADAMW}),
    "batch as a list": Case("typos", {"train_batch_size": [4], "optimizer": ADAMW}),
    "micro batch misspelt": Case(
        "hand-written files", {"train_micro_batch_size": 2, "optimizer": ADAMW}
    ),
    "micro batch of another program": Case(
        "Trainer's words",
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "optimizer": ADAMW},
    ),
    "batch_size": Case(
        "hand-written files",
        {"batch_size": 4, "train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW},
    ),
    "accumulation 0": Case(
        "typos",
        {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 0, "optimizer": ADAMW},
    ),
    "accumulation null": Case(
        "templates",
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": None,
            "optimizer": ADAMW,
        },
    ),
    "accumulation as a float": Case(
        "generated files",
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2.0,
            "optimizer": ADAMW,
        },
    ),
    "3 is not 2 * n": Case(
        "first tries",
        {"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW},
    ),
    "micro above batch": Case(
        "first tries",
        {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW},
    ),
    "clipping 0": Case("users who switch it off", plain(1, gradient_clipping=0)),
    "clipping null": Case("templates", plain(1, gradient_clipping=None)),
    "clipping true": Case("hand-written files", plain(1, gradient_clipping=True)),
    "prints in quotes": Case("templates", plain(1, steps_per_print="100")),
    "prints null": Case("templates", plain(1, steps_per_print=None)),
    "prints 0": Case("users who switch it off", plain(1, steps_per_print=0)),
    "prints as 1e5": Case("generated files", plain(1, steps_per_print=1e5)),
    "stage in quotes": Case(
        "templates", {**BATCH, "optimizer": ADAMW, "zero_optimization": {"stage": "2"}}
    ),
    "stage 2.0": Case(
        "generated files",
        {
            **BATCH,
            "optimizer": ADAMW,
            "zero_optimization": {"stage": 2.0, "reduce_bucket_size": 1e6},
        },
    ),
    "stage true": Case(
        "typos",
        {
            **BATCH,
            "optimizer": ADAMW,
            "zero_optimization": {"stage": True, "reduce_bucket_size": 1e6},
        },
    ),
    "stage null": Case(
        "templates", {**BATCH, "optimizer": ADAMW, "zero_optimization": {"stage": None}}
    ),
    "ZeRO null": Case("templates", {**BATCH, "optimizer": ADAMW, "zero_optimization": None}),
    "ZeRO empty": Case("templates", {**BATCH, "optimizer": ADAMW, "zero_optimization": {}}),
    "ZeRO as a number": Case(
        "hand-written files", {**BATCH, "optimizer": ADAMW, "zero_optimization": 2}
    ),
    "ZeRO as a word": Case(
        "hand-written files", {**BATCH, "optimizer": ADAMW, "zero_optimization": "stage2"}
    ),
    "ZeRO as a list": Case(
        "hand-written files", {**BATCH, "optimizer": ADAMW, "zero_optimization": [2]}
    ),
    "bucket in quotes": Case(
        "YAML users",
        {
            **BATCH,
            "optimizer": ADAMW,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"},
        },
    ),
    "bucket of digits in quotes": Case("YAML users", zero(2, {"reduce_bucket_size": "1000000"})),
    "bucket 0": Case("users who save memory", zero(2, {"reduce_bucket_size": 0})),
    "bucket below 0": Case("typos", zero(2, {"allgather_bucket_size": -1})),
    "threshold in quotes": Case(
        "YAML users", zero(3, {"stage3_param_persistence_threshold": "1e4"})
    ),
    "sub groups of 1e14": Case("transformers' tests", zero(3, {"sub_group_size": 1e14})),
    "overlap null": Case("templates", zero(2, {"overlap_comm": None})),
    "overlap 1": Case(
        "hand-written files", zero(2, {"overlap_comm": 1, "contiguous_gradients": "yes"})
    ),
    "overlap maybe": Case("typos", zero(2, {"overlap_comm": "maybe"})),
    "no scatter, no overlap": Case(
        "debugging posts",
        zero(2, {"reduce_scatter": False, "overlap_comm": False, "contiguous_gradients": False}),
    ),
    "fp16 at stage 1": Case("fine-tuning scripts", plain(1, fp16=FP16)),
    "fp16 at stage 2, static": Case(
        "fine-tuning scripts", plain(2, fp16=FP16 | {"loss_scale": 128})
    ),
    "fp16 at stage 3": Case(
        "fine-tuning scripts",
        plain(3, fp16={"enabled": True, "auto_cast": False, "initial_scale_power": 12}),
    ),
    "fp16, half a scale": Case("GPT trainers", plain(2, fp16=FP16 | {"loss_scale": 0.5})),
    "fp16, dynamic by name": Case(
        "Apex's words", plain(2, fp16={"enabled": True, "loss_scale": "dynamic"})
    ),
    "fp16 by a word": Case("templates", plain(1, fp16={"enabled": "true"})),
    "fp16 is true": Case("hand-written files", plain(1, fp16=True)),
    "fp16, no window": Case("typos", plain(1, fp16={"enabled": True, "loss_scale_window": 0})),
    "fp16, hysteresis kept": Case(
        "DeepSpeed's docs",
        plain(2, fp16=FP16 | {"consecutive_hysteresis": True, "min_loss_scale": 0.5}),
    ),
    "fp16 masters without offload": Case(
        "memory savers", plain(2, fp16={"enabled": True, "fp16_master_weights_and_grads": True})
    ),
    "fp16 with sums in bf16": Case(
        "mixed files", plain(1, fp16={"enabled": True}, data_types={"grad_accum_dtype": "bf16"})
    ),
    "sums in fp8": Case("typos", plain(1, bf16=BF16, data_types={"grad_accum_dtype": "fp8"})),
    "sums in bfloat16": Case(
        "PyTorch's words", plain(2, bf16=BF16, data_types={"grad_accum_dtype": "bfloat16"})
    ),
    "parameters' dtype": Case(
        "files of newer DeepSpeeds", plain(1, bf16=BF16, data_types={"param_dtype": "fp32"})
    ),
    "autocast": Case(
        "DeepSpeed's docs", plain(1, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    ),
    "autocast, safe modules": Case(
        "DeepSpeed's docs",
        plain(
            2,
            torch_autocast={
                "enabled": True,
                "dtype": "bfloat16",
                "lower_precision_safe_modules": ["torch.nn.Linear"],
            },
        ),
    ),
    "autocast beside bf16": Case(
        "DeepSpeed's docs",
        plain(1, bf16=BF16, torch_autocast={"enabled": True, "dtype": "bfloat16"}),
    ),
    "communication in bf16": Case(
        "fine-tuning scripts", plain(1, bf16=BF16, communication_data_type="bf16")
    ),
    "communication in bfloat16": Case(
        "PyTorch's words",
        plain(1, communication_data_type="bfloat16", communication_buffer_size=1048576),
    ),
    "communication in fp32": Case(
        "fine-tuning scripts", zero(2, {}, bf16=BF16, communication_data_type="fp32")
    ),
    "sequence communication": Case(
        "Megatron-DeepSpeed", plain(1, seq_parallel_communication_data_type="bf16")
    ),
}

MONITORS = {
    "TensorBoard": Case(
        "DeepSpeed's monitor tutorial",
        plain(1, tensorboard={"enabled": True, "output_path": "logs", "job_name": "train"}),
    ),
    "TensorBoard by a word": Case("templates", plain(1, tensorboard={"enabled": "true"})),
    "TensorBoard off": Case(
        "DeepSpeed's monitor tutorial",
        plain(1, tensorboard={"enabled": False, "output_path": "logs", "job_name": "train"}),
    ),
    "TensorBoard, older key": Case(
        "files of 2022", plain(1, tensorboard={"enabled": False, "log_dir": "logs"})
    ),
    "Comet": Case(
        "DeepSpeed's monitor tutorial",
        plain(1, comet={"enabled": True, "project": "p", "samples_log_interval": 10}),
    ),
    "Comet off": Case(
        "DeepSpeed's monitor tutorial", plain(1, comet={"enabled": False, "workspace": "w"})
    ),
    "W&B off": Case(
        "DeepSpeed's monitor tutorial",
        plain(1, wandb={"enabled": False, "team": "t", "group": "g", "project": "p"}),
    ),
    "monitor around monitors": Case(
        "hand-written files", plain(1, monitor={"tensorboard": {"enabled": True}})
    ),
    "CSV": Case(
        "DeepSpeed's monitor tutorial",
        plain(1, csv_monitor={"enabled": True, "output_path": "logs"}, steps_per_print=1),
    ),
    "CSV misspelt": Case(
        "hand-written files", plain(1, csv={"enabled": True, "output_path": "logs"})
    ),
    "communication logged, off": Case(
        "DeepSpeed's logging tutorial",
        plain(
            1, comms_logger={"enabled": False, "verbose": False, "prof_all": False, "debug": False}
        ),
    ),
    "communication logged by name": Case(
        "DeepSpeed's logging tutorial",
        plain(1, comms_logger={"enabled": False, "prof_ops": ["all_reduce", "all_gather"]}),
    ),
    "communication logged, one name": Case(
        "hand-written files", plain(1, comms_logger={"enabled": False, "prof_ops": "all_reduce"})
    ),
    "profiler off, step -1": Case(
        "Habana's Megatron",
        plain(
            1,
            flops_profiler={
                "enabled": False,
                "profile_step": -1,
                "module_depth": -1,
                "top_modules": 1,
            },
        ),
    ),
    "profiler before the first step": Case(
        "DeepSpeed-Chat", plain(1, flops_profiler={"enabled": True, "profile_step": 0})
    ),
    "profiler into a file": Case(
        "profiling posts",
        plain(0, flops_profiler={"enabled": True, "profile_step": 1, "output_file": "profile.txt"}),
    ),
    "profiler by a word": Case("templates", plain(1, flops_profiler={"enabled": "false"})),
    "state dumped": Case("debugging posts", plain(1, dump_state=True)),
    "memory broken down": Case("debugging posts", plain(1, memory_breakdown=True)),
    "log level": Case("debugging posts", plain(1, log_level="error")),
    "verbose": Case("hand-written files", plain(1, verbose=True)),
    "timers off": Case(
        "Megatron-DeepSpeed",
        plain(1, timers={"throughput": {"enabled": False, "synchronized": False}}),
    ),
    "breakdown off by a word": Case("templates", plain(1, wall_clock_breakdown="false")),
    "tags by a switch": Case("Korean posts", plain(2, checkpoint={"tag_validation_enabled": True})),
    "tags sometimes": Case("typos", plain(1, checkpoint={"tag_validation": "Sometimes"})),
    "checkpoint in full": Case(
        "DeepSpeed's docs",
        plain(
            1,
            checkpoint={
                "tag_validation": "Warn",
                "load_universal": False,
                "use_node_local_storage": False,
                "parallel_write": {"pipeline_stage": False},
            },
        ),
    ),
    "universal checkpoint": Case(
        "Megatron-DeepSpeed", plain(1, checkpoint={"load_universal": True})
    ),
    "DataStates": Case(
        "DataStates' tutorial",
        plain(1, datastates_ckpt={"host_cache_size": 1, "parser_threads": 2}),
    ),
    "last batch dropped": Case("vision scripts", plain(1, dataloader_drop_last=True)),
    "experts laid out first": Case(
        "Megatron-DeepSpeed", plain(1, use_data_before_expert_parallelism=True)
    ),
    "garbage collection": Case("profiling posts", plain(1, disable_python_gc=True)),
    "memory-efficient attention": Case(
        "generated files",
        plain(1, memory_efficient_attention={"enabled": True, "algorithm": "flash"}),
    ),
    "buckets at the top": Case(
        "posts in Chinese",
        plain(2, bucket_cap_mb=10, allgather_bucket_size=5e7, reduce_scatter_bucket_size=5e7),
    ),
    "local rank": Case("launch scripts", plain(1, local_rank=-1, steps_per_print=10)),
    "model in the file": Case("generated files", plain(1, model="meta/llama", train_steps=1000)),
    "comment key": Case("files with notes in them", {"_comment": "for 8 GPUs", **plain(1)}),
    "weights quantised for inference": Case(
        "inference files",
        plain(1, weight_quantization={"quantized_initialization": {"num_bits": 8}}),
    ),
    "inference words": Case(
        "inference files", plain(1, replace_with_kernel_inject=True, mp_size=1)
    ),
    "keys with blanks": Case("hand-written files", {"train_batch_size ": 8, **plain(1)}),
    "keys in capitals": Case("hand-written files", {"Train_Batch_Size": 8, "optimizer": ADAMW}),
    "DeepCompile": Case(
        "DeepSpeed's DeepCompile blog", plain(1, compile={"deepcompile": False, "passes": None})
    ),
    "compile is true": Case("hand-written files", plain(1, compile=True)),
}
