"""Complete DeepSpeed files as found in public repositories, grouped by the projects that post them.

The values are small and were chosen for these tests.
"""

from typing import Any

from ds_json import ADAM, ADAMW, BATCH, BF16, Case, plain, zero

NO_FP16 = {
    "enabled": False,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
AUTO_FP16 = NO_FP16 | {"enabled": "auto"}
FP16 = NO_FP16 | {"enabled": True}
AUTO_BATCH = dict.fromkeys(
    (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ),
    "auto",
)
AUTO_ADAMW = {
    "type": "AdamW",
    "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
}
CPU = {"device": "cpu", "pin_memory": True}
BUCKETS = {
    "allgather_bucket_size": 2e6,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e6,
    "contiguous_gradients": True,
}
LEFT_TO_TRAINER = dict.fromkeys(
    (
        "sub_group_size",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size",
    ),
    "auto",
)
STAGE3 = {
    "stage3_max_live_parameters": 3e7,
    "stage3_prefetch_bucket_size": 3e7,
    "stage3_param_persistence_threshold": 1e4,
}
CHECKPOINTING = {
    "partition_activations": False,
    "cpu_checkpointing": False,
    "contiguous_memory_optimization": False,
    "synchronize_checkpoint_boundary": False,
}
HYBRID = {
    "enabled": False,
    "max_out_tokens": 512,
    "inference_tp_size": 1,
    "release_inference_cache": False,
    "pin_parameters": True,
    "tp_gather_partition_size": 8,
}
PROFILER = {
    "enabled": False,
    "profile_step": 1,
    "module_depth": -1,
    "top_modules": 1,
    "detailed": True,
    "output_file": None,
}
WARMUP = {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}


def auto(more: dict[str, Any], **top: Any) -> dict[str, Any]:
    """Return a file that contains values for Trainer to fill in, but is passed directly to
    DeepSpeed.
    """
    return {**AUTO_BATCH, "zero_optimization": more, **top}


TRAINER = {
    "LLaMA-Factory, stage 0": Case(
        "LLaMA-Factory",
        auto(
            {"stage": 0, **BUCKETS, "round_robin_gradients": True},
            fp16=AUTO_FP16,
            bf16={"enabled": "auto"},
        ),
    ),
    "LLaMA-Factory, stage 2, numbers": Case(
        "LLaMA-Factory",
        zero(
            2,
            BUCKETS | {"allgather_partitions": True, "round_robin_gradients": True},
            zero_allow_untested_optimizer=True,
            fp16=NO_FP16,
            bf16=BF16,
        ),
    ),
    "LLaMA-Factory, stage 3 offloaded, numbers": Case(
        "LLaMA-Factory",
        zero(
            3,
            {
                "offload_optimizer": CPU,
                "offload_param": CPU,
                "overlap_comm": False,
                "sub_group_size": 1e9,
            }
            | STAGE3,
            bf16=BF16,
        ),
    ),
    "axolotl, stage 1": Case(
        "axolotl",
        auto({"stage": 1, "overlap_comm": True}, bf16=BF16, fp16=AUTO_FP16 | {"auto_cast": False}),
    ),
    "axolotl, parameters offloaded, numbers": Case(
        "axolotl",
        zero(
            3,
            {
                "offload_param": CPU,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 0,
                **STAGE3,
            },
            bf16=BF16,
            wall_clock_breakdown=False,
        ),
    ),
    "FastChat, stage 2": Case(
        "FastChat",
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "fp16": {"enabled": "auto"},
            "gradient_accumulation_steps": "auto",
        },
    ),
    "Alpaca, everything offloaded": Case(
        "Alpaca",
        auto(
            {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, **LEFT_TO_TRAINER},
            optimizer=AUTO_ADAMW,
            scheduler={
                "type": "WarmupDecayLR",
                "params": dict.fromkeys(
                    ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"),
                    "auto",
                ),
            },
            steps_per_print=5,
        ),
    ),
    "FLAN-T5, batch filled": Case(
        "FLAN-T5 tutorials",
        {
            **BATCH,
            "bf16": {"enabled": "auto"},
            "optimizer": ADAMW,
            "zero_optimization": {"stage": 3, **LEFT_TO_TRAINER},
        },
    ),
    "LLaVA, stage 2, batch filled": Case(
        "LLaVA",
        {
            **BATCH,
            "fp16": AUTO_FP16,
            "bf16": {"enabled": "auto"},
            "optimizer": ADAMW,
            "zero_optimization": {"stage": 2, "sub_group_size": 1e9} | BUCKETS,
        },
    ),
    "InternVL, stage 1": Case(
        "InternVL",
        zero(
            1,
            BUCKETS | {"allgather_partitions": True},
            fp16=NO_FP16 | {"auto_cast": True},
            bf16=BF16,
            gradient_clipping=1.0,
            steps_per_print=2000,
        ),
    ),
    "OpenRLHF, stage 2": Case(
        "OpenRLHF",
        zero(
            2,
            {
                "offload_param": {"device": "none"},
                "offload_optimizer": {"device": "none", "pin_memory": True},
                "zero_hpz_partition_size": 1,
            },
            bf16=BF16,
            prescale_gradients=False,
            data_types={"grad_accum_dtype": "fp32"},
        ),
    ),
    "OpenRLHF, stage 3": Case(
        "OpenRLHF",
        zero(
            3,
            {
                **LEFT_TO_TRAINER,
                "zero_hpz_partition_size": 1,
                "zero_quantized_weights": False,
                "zero_quantized_gradients": False,
                "reduce_scatter": True,
            },
            bf16=BF16,
        ),
    ),
    "OpenRLHF, no trace": Case(
        "OpenRLHF",
        zero(
            3,
            {
                "stage3_prefetch_bucket_size": 0,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
            },
            gradient_clipping=1.0,
        ),
    ),
    "accelerate's YAML as JSON": Case(
        "accelerate",
        {
            "zero_stage": 2,
            "gradient_accumulation_steps": 1,
            "offload_optimizer_device": "none",
            "zero3_init_flag": False,
        },
    ),
    "a deepspeed_config block": Case(
        "accelerate",
        {
            "compute_environment": "LOCAL_MACHINE",
            "deepspeed_config": plain(2),
            "mixed_precision": "bf16",
        },
    ),
    "Qwen, parameters on none": Case(
        "Qwen",
        zero(
            3,
            {
                "offload_optimizer": {"device": "none", "pin_memory": True},
                "offload_param": {"device": "none", "pin_memory": True},
                **STAGE3,
            },
        ),
    ),
    "ChatGLM, P-tuning": Case(
        "ChatGLM",
        {
            "train_micro_batch_size_per_gpu": "auto",
            "zero_allow_untested_optimizer": True,
            "fp16": AUTO_FP16,
            "zero_optimization": {"stage": 2, **BUCKETS},
        },
    ),
    "wav2vec2, unused parameters": Case(
        "transformers' research projects", zero(2, BUCKETS | {"find_unused_parameters": True})
    ),
    "T0, hooks on gradients": Case("T0 fine-tuning", zero(2, BUCKETS | {"grad_hooks": True})),
    "offload_parameters": Case(
        "Lightning users",
        zero(
            2,
            {"offload_parameters": False, "round_robin_gradients": True},
            zero_allow_untested_optimizer=True,
        ),
    ),
    "threshold 0.94e6": Case(
        "Trainer users",
        zero(
            3, {"stage3_prefetch_bucket_size": 0.94e6, "sub_group_size": 1e9, "offload_param": CPU}
        ),
    ),
    "threshold with a fraction": Case(
        "Trainer before 4.35", zero(3, {"stage3_prefetch_bucket_size": 943718.4})
    ),
    "gather left to the plugin": Case(
        "accelerate", zero(3, {"stage3_gather_16bit_weights_on_model_save": "auto"})
    ),
    "device left to the plugin": Case(
        "accelerate", zero(2, {"offload_optimizer": {"device": "auto"}})
    ),
    "stage left to the plugin": Case(
        "accelerate", {**BATCH, "optimizer": ADAMW, "zero_optimization": {"stage": "auto"}}
    ),
    "overlap left to Trainer": Case(
        "copied templates", zero(2, {"overlap_comm": "auto", "contiguous_gradients": "auto"})
    ),
    "prints left to Trainer": Case("copied templates", plain(1, steps_per_print="auto")),
    "prints never": Case("transformers' logs", plain(1, steps_per_print=1e12)),
    "weight decay left to Trainer": Case(
        "copied templates",
        {**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": "auto"}}},
    ),
    "micro batch a number, batch left": Case(
        "copied templates",
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 1, "optimizer": ADAMW},
    ),
    "buckets left at stage 2": Case(
        "copied templates",
        {
            **BATCH,
            "optimizer": ADAMW,
            "zero_optimization": {
                "stage": 2,
                "reduce_bucket_size": "auto",
                "allgather_bucket_size": "auto",
            },
        },
    ),
    "TRL's trainer keys": Case(
        "TRL users", plain(2, learning_rate=1e-5, max_grad_norm=1.0, num_train_epochs=3)
    ),
    "gradient checkpointing at the top": Case(
        "Trainer users", plain(2, gradient_checkpointing=True, seed=42)
    ),
    "loss scale of Trainer in bf16": Case(
        "axolotl users", plain(1, bf16={"enabled": True, "loss_scale": 0})
    ),
    "bf16 with auto_cast": Case("LHRS-Bot", plain(2, bf16={"enabled": True, "auto_cast": False})),
    "bf16 enable": Case("hand-written files", plain(1, bf16={"enable": True})),
    "fp16_enabled": Case("hand-written files", plain(1, fp16={"fp16_enabled": True})),
    "fp16 of Apex": Case(
        "files with Apex's words", plain(1, fp16={"enabled": False, "opt_level": "O2"})
    ),
    "switched by a number": Case("templates", plain(1, bf16={"enabled": 0}, fp16={"enabled": 0})),
    "bf16 as a word": Case("templates", plain(1, bf16={"enabled": "True"})),
    "bf16 is true": Case("hand-written files", plain(1, bf16=True)),
    "bf16 is empty": Case("hand-written files", plain(1, bf16={})),
    "bf16 is null": Case("templates", plain(1, bf16=None)),
    "enabled is null": Case("templates", plain(1, fp16={"enabled": None})),
}

DEEPSPEED = {
    "DeepSpeed-Chat, stage 2": Case(
        "DeepSpeedExamples",
        zero(
            2,
            {
                "offload_param": {"device": "none"},
                "offload_optimizer": {"device": "none"},
                **STAGE3,
                "memory_efficient_linear": False,
            },
            fp16={"enabled": False, "loss_scale_window": 100},
            prescale_gradients=False,
            hybrid_engine=HYBRID,
            tensorboard={"enabled": False, "output_path": "logs", "job_name": "step1"},
        ),
    ),
    "DeepSpeed-Chat, stage 3": Case(
        "DeepSpeedExamples",
        zero(
            3,
            {**STAGE3, "memory_efficient_linear": False},
            gradient_clipping=1.0,
            hybrid_engine=HYBRID,
        ),
    ),
    "DeepSpeed-Chat, evaluation": Case(
        "DeepSpeedExamples",
        {
            "train_batch_size": 4,
            "steps_per_print": 10,
            "zero_optimization": {
                "stage": 0,
                "stage3_param_persistence_threshold": 1e4,
                "memory_efficient_linear": False,
            },
        },
    ),
    "CIFAR": Case(
        "DeepSpeedExamples",
        {
            "train_batch_size": 4,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {"type": "WarmupLR", "params": WARMUP},
            "wall_clock_breakdown": False,
        },
    ),
    "CIFAR, ZeRO from arguments": Case(
        "DeepSpeedExamples",
        zero(
            0,
            {
                "allgather_partitions": True,
                "reduce_scatter": True,
                "allgather_bucket_size": 1e6,
                "overlap_comm": True,
                "cpu_offload": False,
            },
            prescale_gradients=False,
        ),
    ),
    "HelloDeepSpeed": Case(
        "DeepSpeedExamples",
        {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": ADAM,
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        },
    ),
    "BERT of Bing": Case(
        "DeepSpeedExamples",
        {
            **BATCH,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 4e-4, "weight_decay": 0.01, "bias_correction": False},
            },
            "prescale_gradients": False,
            "gradient_clipping": 1.0,
        },
    ),
    "SQuAD of Bing": Case(
        "DeepSpeedExamples",
        {
            **BATCH,
            "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "max_grad_norm": 1.0}},
            "gradient_clipping": 1.0,
        },
    ),
    "AlexNet in a pipeline": Case(
        "DeepSpeedExamples",
        {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": ADAM,
            "steps_per_print": 10,
        },
        world=2,
        pp=2,
    ),
    "AutoTP training": Case(
        "DeepSpeedExamples",
        zero(1, {}, bf16=BF16, tensor_parallel={"autotp_size": 2, "tp_overlap_comm": False}),
        world=2,
    ),
    "AutoTP at stage 3": Case(
        "DeepSpeedExamples", zero(3, {}, tensor_parallel={"autotp_size": 2}), world=2
    ),
    "AutoTP block of inference": Case(
        "DeepSpeed-MII users",
        plain(1, tensor_parallel={"tp_size": 2, "tp_grain_size": 128}),
        world=2,
    ),
    "sequence parallelism, no script for it": Case(
        "Arctic's tutorials", plain(1, sequence_parallel_size=2), world=2
    ),
    "experts where there are none": Case(
        "AutoEP's tutorial", plain(1, expert_parallel={"enabled": True, "autoep_size": 2}), world=2
    ),
    "experts, degree 1": Case(
        "AutoEP's tutorial", plain(1, expert_parallel={"enabled": False, "autoep_size": 1})
    ),
    "ZeRO++, switched off": Case(
        "DeepSpeed's ZeRO++ tutorial",
        zero(
            3,
            {
                "zero_quantized_weights": False,
                "zero_hpz_partition_size": 1,
                "zero_quantized_gradients": False,
            },
        ),
    ),
    "hpZ of one rank": Case("DeepSpeed's ZeRO++ tutorial", zero(3, {"zero_hpz_partition_size": 8})),
    "hpZ of two ranks": Case(
        "DeepSpeed's ZeRO++ tutorial", zero(3, {"zero_hpz_partition_size": 2}), world=2
    ),
    "hpZ at stage 2": Case("DeepSpeed's ZeRO++ tutorial", zero(2, {"zero_hpz_partition_size": 8})),
    "MiCS, switched off": Case(
        "AWS's examples", zero(3, {"mics_shard_size": -1, "mics_hierarchical_params_gather": False})
    ),
    "LoCo": Case(
        "DeepSpeed's ZeRO++ tutorial",
        zero(3, {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}),
    ),
    "ZenFlow": Case(
        "DeepSpeed's ZenFlow tutorial",
        zero(
            2,
            {
                "offload_optimizer": CPU,
                "zenflow": {
                    "topk_ratio": 0.1,
                    "select_strategy": "auto",
                    "select_interval": "auto",
                    "update_interval": 4,
                },
            },
        ),
    ),
    "ZenFlow without offload": Case(
        "DeepSpeed's ZenFlow tutorial", zero(2, {"zenflow": {"topk_ratio": 0.1}})
    ),
    "leaf modules": Case(
        "DeepSpeed's docs",
        zero(3, {"leaf_module": {"classes": ["LlamaMLP"], "names": [], "name_suffixes": []}}),
    ),
    "leaf modules of another model": Case(
        "DeepSpeed's docs", zero(3, {"leaf_module": {"classes": ["MixtralSparseMoeBlock"]}})
    ),
    "part of the optimizer offloaded": Case(
        "DeepSpeed's Twin-Flow blog",
        zero(3, {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}),
    ),
    "nothing but the optimizer on a drive": Case(
        "ZeRO-Infinity users",
        zero(
            3,
            {
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "swap",
                    "buffer_count": 4,
                    "fast_init": False,
                }
            },
        ),
    ),
    "drive without a folder": Case(
        "ZeRO-Infinity users", zero(3, {"offload_optimizer": {"device": "nvme"}})
    ),
    "drive settings inside ZeRO": Case(
        "translated docs",
        zero(3, {"offload_param": CPU, "aio": {"block_size": 262144, "queue_depth": 32}}),
    ),
    "drive settings with threads": Case(
        "transformers' docs",
        zero(
            3,
            {"offload_param": CPU},
            aio={"block_size": 262144, "queue_depth": 32, "thread_count": 1},
        ),
    ),
    "max_in_cpu null": Case(
        "BLOOM scripts", zero(3, {"offload_param": {"device": "cpu", "max_in_cpu": None}})
    ),
    "parameters without the optimizer": Case(
        "BLOOM scripts", zero(3, {"offload_param": CPU, "contiguous_gradients": True})
    ),
    "parameters offloaded to cuda": Case("typos", zero(3, {"offload_param": {"device": "cuda"}})),
    "an index with the device": Case("typos", zero(2, {"offload_optimizer": {"device": "cpu:0"}})),
    "offload as true": Case("hand-written files", zero(2, {"offload_optimizer": True})),
    "offload as a word": Case("hand-written files", zero(2, {"offload_optimizer": "cpu"})),
    "offload as null": Case(
        "templates", zero(2, {"offload_optimizer": None, "offload_param": None})
    ),
    "offload as an empty block": Case("templates", zero(2, {"offload_optimizer": {}})),
    "pinned by a word": Case(
        "templates", zero(2, {"offload_optimizer": {"device": "cpu", "pin_memory": "true"}})
    ),
    "device null": Case("templates", zero(2, {"offload_optimizer": {"device": None}})),
    "CPU_OFFLOAD's other key": Case("files of 2021", zero(3, {"cpu_offload_params": True})),
    "pinned as in 2021": Case(
        "files of 2021", zero(2, {"cpu_offload": True, "cpu_offload_use_pin_memory": True})
    ),
    "offloaded parameters as in 2021": Case(
        "files of 2021", zero(3, {"cpu_offload": True, "cpu_offload_param": True})
    ),
    "names without stage3_": Case(
        "files of 2021",
        zero(
            3,
            {
                "prefetch_bucket_size": 1e6,
                "max_live_parameters": 1e9,
                "gather_16bit_weights_on_model_save": True,
            },
        ),
    ),
    "elastic checkpoint": Case("files of 2021", zero(1, {"elastic_checkpoint": True})),
    "elastic checkpoint at stage 3": Case("files of 2021", zero(3, {"elastic_checkpoint": False})),
    "fp32 weights not loaded": Case("files of 2021", zero(1, {"load_from_fp32_weights": False})),
    "legacy stage 1": Case("files of 2021", zero(1, {"legacy_stage1": True})),
    "gather size of 2019": Case("files of 2020", plain(0, allgather_size=200000)),
    "gather size beside the old switch": Case(
        "files of 2020",
        {
            "train_batch_size": 4,
            "optimizer": ADAM,
            "allgather_size": 200000,
            "zero_optimization": True,
        },
    ),
    "ZeRO is false": Case(
        "files of 2020", {"train_batch_size": 4, "optimizer": ADAM, "zero_optimization": False}
    ),
    "micro batch of 2019": Case(
        "files of 2019", {"train_batch_size": 4, "train_step_batch_size": 2, "optimizer": ADAM}
    ),
    "apex switched off": Case("files of 2020", plain(0, amp={"enabled": False})),
    "gradients allreduced in fp32": Case(
        "files of 2020", plain(1, fp32_allreduce=False, communication_data_type="fp32")
    ),
}

MEGATRON = {
    "Megatron, stage 1, prescaled": Case(
        "Megatron-DeepSpeed",
        plain(1, prescale_gradients=True, gradient_predivide_factor=2.0, bf16=BF16),
        world=2,
    ),
    "Megatron, stage 2, predivided": Case(
        "Megatron-DeepSpeed", plain(2, gradient_predivide_factor=2.0), world=2
    ),
    "Megatron, hooks": Case(
        "Habana's Megatron",
        plain(
            1, bf16={"enabled": True, "accumulate_grads_via_hooks": True}, memory_breakdown=False
        ),
    ),
    "Megatron, immediate gradients": Case(
        "Habana's Megatron",
        plain(
            1,
            bf16={"enabled": True, "immediate_grad_update": True},
            data_types={"grad_accum_dtype": "fp32"},
        ),
    ),
    "Megatron, compile": Case(
        "Habana's Megatron", plain(1, compile={"enabled": False, "backend": "inductor"})
    ),
    "Megatron, pieces": Case(
        "Habana's Megatron",
        plain(1, pipeline={"pipe_partitioned": False, "grad_partitioned": False}),
        world=2,
        pp=2,
    ),
    "Megatron, pieces left open": Case(
        "Habana's Megatron",
        plain(1, pipeline={"pipe_partitioned": "auto", "grad_partitioned": "auto"}),
        world=2,
        pp=2,
    ),
    "Megatron, pieces without a pipeline": Case(
        "Habana's Megatron", plain(1, pipeline={"pipe_partitioned": True, "grad_partitioned": True})
    ),
    "pipeline_parallel block": Case(
        "generated files",
        plain(1, pipeline_parallel={"stages": 2, "activation_checkpoint_interval": 4}),
    ),
    "pipeline stages auto": Case(
        "DeepSpeed's docs",
        plain(1, pipeline={"stages": "auto", "partition": "best", "seed_layers": False}),
    ),
    "curriculum by length": Case(
        "Megatron-DeepSpeed",
        plain(
            0,
            curriculum_learning={
                "enabled": True,
                "curriculum_type": "seqlen",
                "min_difficulty": 8,
                "max_difficulty": 64,
                "schedule_type": "fixed_linear",
                "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
            },
        ),
    ),
    "curriculum off": Case("Megatron-DeepSpeed", plain(1, curriculum_learning={"enabled": False})),
    "data efficiency off": Case(
        "Megatron-DeepSpeed",
        plain(
            1, data_efficiency={"enabled": False, "seed": 1234, "data_sampling": {"enabled": False}}
        ),
    ),
    "data efficiency, nothing in it": Case(
        "Megatron-DeepSpeed",
        plain(
            1,
            data_efficiency={
                "enabled": True,
                "data_sampling": {"enabled": False, "num_workers": 0},
                "data_routing": {"enabled": False},
            },
        ),
    ),
    "data efficiency, curriculum": Case(
        "DeepSpeed's data efficiency tutorial",
        plain(
            1,
            data_efficiency={
                "enabled": True,
                "seed": 7,
                "data_sampling": {
                    "enabled": True,
                    "num_epochs": 1,
                    "curriculum_learning": {"enabled": False},
                },
            },
        ),
    ),
    "random-LTD off": Case(
        "DeepSpeed's data efficiency tutorial",
        plain(
            1,
            data_efficiency={
                "enabled": True,
                "data_routing": {
                    "enabled": True,
                    "random_ltd": {"enabled": False, "total_layer_num": 2},
                },
            },
        ),
    ),
    "blended data": Case(
        "posts on mixing data",
        plain(1, data_efficiency={"enabled": True, "dataset_type": "blendable"}),
    ),
    "compressed weights": Case(
        "DeepSpeed's compression tutorial",
        plain(
            1,
            compression_training={
                "weight_quantization": {
                    "shared_parameters": {
                        "enabled": True,
                        "quantize_groups": 1,
                        "quantization_type": "symmetric",
                    },
                    "different_groups": {},
                }
            },
        ),
    ),
    "layers left out": Case(
        "DeepSpeed's compression tutorial",
        plain(1, compression_training={"layer_reduction": {"enabled": False}}),
    ),
    "compression null": Case("Ludwig", plain(1, compression_training=None)),
    "eigenvalues": Case(
        "DeepSpeed's MoQ tutorial",
        plain(1, eigenvalue={"enabled": False, "verbose": False, "max_iter": 100}),
    ),
    "MoQ": Case(
        "DeepSpeed's MoQ tutorial",
        plain(
            1,
            quantize_training={
                "enabled": False,
                "quantize_bits": {"start_bits": 16, "target_bits": 8},
            },
        ),
    ),
    "layers dropped": Case(
        "DeepSpeed's PLD tutorial",
        plain(1, progressive_layer_drop={"enabled": False, "theta": 0.5, "gamma": 0.001}),
    ),
    "sparse attention": Case(
        "fine-tuning scripts",
        plain(
            1,
            sparse_attention={
                "mode": "fixed",
                "block": 16,
                "num_local_blocks": 4,
                "attention": "bidirectional",
            },
        ),
    ),
    "Nebula": Case(
        "Azure's examples", plain(1, nebula={"enabled": False, "persistent_time_interval": 100})
    ),
    "graph harvesting": Case("DeepSpeed's docs of 2023", plain(1, graph_harvesting=False)),
    "elasticity off": Case(
        "posted logs",
        plain(1, elasticity={"enabled": False, "max_train_batch_size": 16, "micro_batch_size": 1}),
    ),
    "elasticity in full": Case(
        "DeepSpeed's elasticity docs",
        {
            "train_batch_size": 16,
            "optimizer": ADAM,
            "elasticity": {
                "enabled": True,
                "max_train_batch_size": 200,
                "micro_batch_sizes": [16, 32],
                "min_gpus": 1,
                "max_gpus": 2,
                "version": 0.1,
                "ignore_non_elastic_batch_info": True,
            },
        },
    ),
    "experts as a block": Case(
        "generated files", plain(1, moe={"enabled": True, "ep_size": 2, "use_residual": False})
    ),
    "GPT-NeoX's words": Case(
        "GPT-NeoX",
        plain(
            1,
            optimizer={
                "type": "Adam",
                "params": {"lr": 6e-4, "max_grad_norm": 1.0, "betas": [0.9, 0.95]},
            },
        ),
    ),
    "checkpointing of Megatron": Case(
        "Megatron-DeepSpeed",
        plain(
            1, activation_checkpointing=CHECKPOINTING | {"number_checkpoints": 4, "profile": False}
        ),
    ),
    "number_checkpoints false": Case(
        "hana", plain(1, activation_checkpointing=CHECKPOINTING | {"number_checkpoints": False})
    ),
    "number_checkpoints null": Case(
        "posts on memory",
        plain(1, activation_checkpointing=CHECKPOINTING | {"number_checkpoints": None}),
    ),
    "number_checkpoints true": Case(
        "hand-written files", plain(1, activation_checkpointing={"number_checkpoints": True})
    ),
    "number_checkpoints 0": Case(
        "scripts that compute it",
        plain(1, activation_checkpointing={"partition_activations": True, "number_checkpoints": 0}),
    ),
    "number_checkpoints in quotes": Case(
        "templates",
        plain(
            1, activation_checkpointing={"partition_activations": True, "number_checkpoints": "4"}
        ),
    ),
    "contiguous checkpoints, not partitioned": Case(
        "posts on memory",
        plain(
            1,
            activation_checkpointing={
                "contiguous_memory_optimization": True,
                "number_checkpoints": 2,
            },
        ),
    ),
    "contiguous checkpoints, not counted": Case(
        "posts on memory",
        plain(
            1,
            activation_checkpointing={
                "partition_activations": True,
                "contiguous_memory_optimization": True,
            },
        ),
    ),
    "checkpoints on the CPU": Case(
        "Yuan",
        plain(
            2,
            activation_checkpointing={
                "partition_activations": True,
                "cpu_checkpointing": True,
                "contiguous_memory_optimization": True,
                "number_checkpoints": 2,
            },
        ),
    ),
    "checkpointing enabled": Case(
        "hand-written files", plain(1, activation_checkpointing={"enabled": True})
    ),
    "checkpointing by words": Case(
        "templates", plain(1, activation_checkpointing={"profile": "false"})
    ),
    "checkpointing is true": Case("hand-written files", plain(1, activation_checkpointing=True)),
    "checkpointing is empty": Case(
        "posted outlines",
        plain(1, activation_checkpointing={}, flops_profiler={}, data_efficiency={}),
    ),
    "autotuning off": Case("posted outlines", plain(1, autotuning={"enabled": False})),
    "autotuning": Case(
        "DeepSpeed's autotuning tutorial",
        plain(
            1,
            autotuning={
                "enabled": True,
                "fast": False,
                "metric": "throughput",
                "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"},
            },
        ),
    ),
    "autotuning by another metric": Case(
        "typos", plain(1, autotuning={"enabled": False, "metric": "memory"})
    ),
}
