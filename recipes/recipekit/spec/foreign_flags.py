"""Flags that users know from other programs, mapped to the flag or field to use here.

The programs are transformers' Trainer and its example scripts, TRL, peft, axolotl, LLaMA-Factory,
Megatron-LM and accelerate. A test checks every field of TrainingArguments, LoraConfig, SFTConfig,
DPOConfig and RewardConfig: each must be a flag here or be listed in `ADVICE` or
`WITHOUT_EQUIVALENT`.
"""

import re
from collections.abc import Iterable

_LORA = (
    "set it in LoraConfig in the recipe's file, in adapt() as in recipes/qwen3_0_6b_lora_zero3.py"
)
_PRECISION = (
    "the JSON sets the precision: use --deepspeed_config with a JSON that has a bf16 or fp16 block"
)
_OPTIMIZER = "the optimizer block of the JSON sets it: use --deepspeed_config with your own JSON"
_FSDP = "use --engine fsdp2"
_LAUNCHER = "it is a flag of the launcher: write it before the recipe's file"
_PACKED = "leave it out: rows are always packed, and documents never attend to each other"
_TOKENIZER = "set it in the tokenizer's files, and use --tokenizer with their folder"
_EVERY_STEP = "leave it out: OUT/metrics.jsonl has every step"
_UPLOAD = "leave it out, and upload the folder OUT/hf after the run: hf upload"
_WANDB = (
    "use the environment variables of Weights & Biases, for example WANDB_NAME and WANDB_ENTITY"
)
_HELD_OUT = "leave it out: about one row in 100 is held out for --eval_every"
_FILE = "it is a field: set {0}=... in the recipe's file"

ADVICE = {
    # Model and tokenizer
    **dict.fromkeys(
        ("model_name_or_path", "model_name", "base_model", "model_path", "pretrained_model"),
        "use --model",
    ),
    **dict.fromkeys(("base_model_name_or_path", "base_model_config", "config_name"), "use --model"),
    **dict.fromkeys(("revision", "revision_of_model"), "use --model_revision"),
    **dict.fromkeys(
        ("tokenizer_name", "tokenizer_name_or_path", "tokenizer_config", "processing_class"),
        "use --tokenizer",
    ),
    **dict.fromkeys(("attn_implementation", "attn_impl", "flash_attn"), "use --attention"),
    **dict.fromkeys(("flash_attention", "sdp_attention", "eager_attention"), "use --attention"),
    **dict.fromkeys(
        ("dtype", "torch_dtype", "mixed_precision", "bf16", "fp16", "bfloat16", "float16"),
        _PRECISION,
    ),
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"),
        "leave it out: evaluations use the same precision as training",
    ),
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode", "compile_model"),
        "use --compile on or off",
    ),
    **dict.fromkeys(
        ("use_liger_kernel", "liger_kernel_config", "liger", "enable_liger_kernel"),
        "use --loss chunked, which never holds all logits",
    ),
    **dict.fromkeys(
        (
            "gradient_checkpointing",
            "gradient_checkpointing_kwargs",
            "activation_checkpointing_kwargs",
            "recompute_activations",
        ),
        "use --activation_checkpointing",
    ),
    **dict.fromkeys(
        ("recompute_granularity", "recompute_num_layers"),
        "use --recompute_every N to recompute every N-th layer",
    ),
    # A flag of this project until November 2026
    "checkpoint_every": (
        "to save checkpoints use --save_every N. To recompute every N-th layer use"
        " --recompute_every N"
    ),
    "use_cache": "leave it out: training uses no cache of keys and values",
    **dict.fromkeys(
        ("chat_template", "chat_template_path", "chat_template_jinja", "template"), _TOKENIZER
    ),
    **dict.fromkeys(
        (
            "eos_token",
            "pad_token",
            "special_tokens",
            "tokens",
            "eot_tokens",
            "added_tokens_overrides",
        ),
        _TOKENIZER,
    ),
    # Data
    **dict.fromkeys(
        (
            "dataset_name",
            "datasets",
            "pretraining_dataset",
            "dataset_path",
            "data_path",
            "train_file",
        ),
        "use --dataset",
    ),
    **dict.fromkeys(
        ("train_files", "dataset_name_or_path", "dataset_dir", "dataset_mixer", "dataset_mixture"),
        "use --dataset",
    ),
    **dict.fromkeys(("dataset_config", "dataset_config_name"), "use --subset"),
    **dict.fromkeys(("dataset_train_split", "train_split"), "use --split"),
    **dict.fromkeys(
        ("validation_file", "test_datasets", "dataset_test_split", "eval_dataset"), _HELD_OUT
    ),
    **dict.fromkeys(("val_set_size", "val_size", "validation_split_percentage"), _HELD_OUT),
    **dict.fromkeys(("dataset_text_field", "text_column", "text_column_name"), "use --text_field"),
    **dict.fromkeys(("image_column_name", "image_column"), "use --image_field"),
    **dict.fromkeys(("label_column_name", "label_names"), "use --label_field for images"),
    **dict.fromkeys(
        (
            "max_length",
            "max_seq_length",
            "max_seq_len",
            "sequence_len",
            "sequence_length",
            "block_size",
        ),
        "use --seq_len",
    ),
    **dict.fromkeys(
        ("cutoff_len", "model_max_length", "max_position_embeddings", "context_length"),
        "use --seq_len",
    ),
    **dict.fromkeys(
        ("max_prompt_length", "max_completion_length", "max_prompt_len"),
        "use --seq_len: it limits the total length of prompt and answer",
    ),
    **dict.fromkeys(
        (
            "packing",
            "packing_strategy",
            "eval_packing",
            "padding_free",
            "sample_packing",
            "eval_sample_packing",
        ),
        _PACKED,
    ),
    **dict.fromkeys(
        (
            "pad_to_sequence_len",
            "pad_to_multiple_of",
            "pad_to_max_length",
            "neat_packing",
            "batch_flattening",
        ),
        _PACKED,
    ),
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss", "train_on_inputs", "train_on_prompt"),
        "use --task sft, which learns the answers only",
    ),
    **dict.fromkeys(("mlm_probability", "mlm_prob"), "use --mask_rate"),
    **dict.fromkeys(
        ("dataloader_num_workers", "num_workers"),
        "use --threads for images. Texts have no such number",
    ),
    **dict.fromkeys(("dataset_prepared_path", "cache_dir", "tokenized_path"), "use --token_cache"),
    **dict.fromkeys(
        ("shuffle_dataset", "data_seed", "shuffle", "shuffle_merged_datasets"),
        "use --seed, which sets the order of the data",
    ),
    **dict.fromkeys(
        ("ignore_data_skip", "restore_callback_states_from_checkpoint"),
        "leave it out: a resume continues the data exactly",
    ),
    # Task
    **dict.fromkeys(("rl", "finetuning_type", "training_type"), "use --task"),
    "reward_model": "use --task reward",
    **dict.fromkeys(("dpo_beta", "rl_beta", "pref_beta"), "use --beta"),
    **dict.fromkeys(
        ("precompute_ref_log_probs", "precompute_ref_batch_size"),
        "leave it out: they are always computed before step 1",
    ),
    **dict.fromkeys(
        ("do_train", "do_predict", "prediction_loss_only"), "leave it out: a recipe always trains"
    ),
    **dict.fromkeys(("do_eval", "eval_on_start"), "use --eval_every"),
    # Batch and layout
    "dp": "leave it out: the ranks that --tp, --pp, --sp and --ep leave are data-parallel",
    **dict.fromkeys(
        ("data_parallel_size", "dp_degree", "dp_replicate_size"),
        "leave it out: the ranks that --tp, --pp and --sp leave are data-parallel",
    ),
    **dict.fromkeys(
        ("tensor_parallel_size", "tensor_model_parallel_size", "tp_size", "tp_degree"), "use --tp"
    ),
    **dict.fromkeys(
        ("pipeline_parallel_size", "pipeline_model_parallel_size", "pp_size", "pp_degree"),
        "use --pp",
    ),
    **dict.fromkeys(
        ("sequence_parallel_degree", "sequence_parallel_size", "context_parallel_size"), "use --sp"
    ),
    **dict.fromkeys(("cp", "cp_size", "sp_size", "ulysses_sp_size"), "use --sp"),
    **dict.fromkeys(("expert_parallel_size", "expert_model_parallel_size", "ep_size"), "use --ep"),
    "parallelism_config": "use --tp, --pp, --sp and --ep",
    **dict.fromkeys(
        ("batch_size", "batch"),
        "use --global_batch (rows of a step) or --micro_batch (rows of a forward pass)",
    ),
    "train_batch_size": "use --global_batch",
    "global_batch_size": "use --global_batch",
    **dict.fromkeys(
        ("bs", "per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch_size"),
        "use --micro_batch",
    ),
    "train_micro_batch_size_per_gpu": "use --micro_batch",
    **dict.fromkeys(
        ("per_device_eval_batch_size", "eval_batch_size"),
        "use --micro_batch for the memory and --eval_rows for the number of rows",
    ),
    "gradient_accumulation_steps": (
        "use --global_batch: a step has global_batch / (micro_batch x data-parallel ranks)"
        " micro-batches"
    ),
    **dict.fromkeys(("eval_accumulation_steps", "auto_find_batch_size"), "use --micro_batch"),
    **dict.fromkeys(
        ("deepspeed", "ds_config", "deepspeed_config", "deepspeed_config_file", "deepspeed_plugin"),
        "use --deepspeed_config",
    ),
    **dict.fromkeys(
        ("stage", "zero", "zero_stage"),
        "the JSON sets the ZeRO stage: use --deepspeed_config zero3.json",
    ),
    **dict.fromkeys(
        ("offload_optimizer_device", "offload_param_device"),
        "the JSON sets it: use --deepspeed_config zero3_cpu.json or zero3_nvme.json",
    ),
    **dict.fromkeys(("fsdp", "fsdp_config", "use_fsdp", "fsdp_version"), _FSDP),
    "ddp": "use --engine ddp",
    **dict.fromkeys(
        ("distributed_backend", "ddp_backend", "backend"),
        "leave it out: NCCL on GPUs, Gloo on CPUs",
    ),
    **dict.fromkeys(
        ("use_cpu", "no_cuda"), "leave it out: a machine without GPUs trains on its CPU"
    ),
    **dict.fromkeys(
        ("gpus", "nodes", "num_gpus", "num_nodes", "nproc_per_node", "nnodes", "num_processes"),
        _LAUNCHER,
    ),
    **dict.fromkeys(
        (
            "hostfile",
            "master_port",
            "master_addr",
            "node_rank",
            "include",
            "exclude",
            "max_restarts",
        ),
        _LAUNCHER,
    ),
    # Schedule and optimizer
    **dict.fromkeys(("learning_rate", "peak_lr", "base_lr"), "use --lr"),
    **dict.fromkeys(
        (
            "max_steps",
            "train_steps",
            "num_steps",
            "total_steps",
            "max_train_steps",
            "train_iters",
            "max_iters",
        ),
        "use --steps",
    ),
    **dict.fromkeys(("num_epochs", "num_train_epochs", "max_epochs"), "use --epochs"),
    **dict.fromkeys(
        ("lr_scheduler", "lr_scheduler_type", "scheduler", "lr_schedule", "lr_decay_style"),
        "use --schedule",
    ),
    **dict.fromkeys(
        ("lr_scheduler_kwargs", "cosine_min_lr_ratio"), "use --schedule, --min_lr and --decay_steps"
    ),
    **dict.fromkeys(
        (
            "warmup_ratio",
            "warmup",
            "num_warmup_steps",
            "lr_warmup_steps",
            "warmup_iters",
            "lr_warmup_iters",
        ),
        "use --warmup_steps",
    ),
    **dict.fromkeys(
        ("optim", "optimizer", "optim_args", "optimizer_type", "optim_target_modules"), _OPTIMIZER
    ),
    "lr_groups": "set lr_scale in the recipe's file",
    **dict.fromkeys(
        ("max_grad_norm", "grad_clip", "clip_grad", "gradient_clip_val", "clip_grad_norm"),
        "use --gradient_clipping",
    ),
    "adam_beta1": "use --beta1",
    "adam_beta2": "use --beta2",
    **dict.fromkeys(("adam_epsilon", "adam_eps", "epsilon"), "use --eps"),
    "wd": "use --weight_decay",
    "average_tokens_across_devices": (
        "leave it out: the loss is always a mean over the tokens of all ranks"
    ),
    # Evaluation, checkpoints, export
    **dict.fromkeys(
        (
            "eval_steps",
            "eval_strategy",
            "evaluation_strategy",
            "evals_per_epoch",
            "eval_interval",
            "eval_delay",
        ),
        "use --eval_every",
    ),
    **dict.fromkeys(("max_eval_samples", "eval_iters"), "use --eval_rows"),
    **dict.fromkeys(
        ("save_steps", "save_strategy", "saves_per_epoch", "save_interval", "checkpointing_steps"),
        "use --save_every",
    ),
    **dict.fromkeys(("save_total_limit", "keep_last", "keep_last_n"), "use --keep"),
    **dict.fromkeys(
        ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        "use --keep_best: the lowest eval_loss is best",
    ),
    **dict.fromkeys(
        ("save_only_model", "save_safetensors"),
        "leave it out: OUT/hf contains only the model, in safetensors",
    ),
    "enable_jit_checkpoint": "leave it out: a signal to stop saves a checkpoint",
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_token", "hub_strategy", "hub_private_repo"), _UPLOAD
    ),
    **dict.fromkeys(("hub_always_push", "hub_revision"), _UPLOAD),
    **dict.fromkeys(("merge_lora", "merge_and_unload", "merge_weights"), "use --merge"),
    # Run and tracking
    **dict.fromkeys(
        ("output_dir", "output_path", "save_dir", "run_dir", "logging_dir", "default_root_dir"),
        "use --out",
    ),
    "overwrite_output_dir": "use --resume never",
    **dict.fromkeys(("resume_from_checkpoint", "auto_resume_from_checkpoints"), "use --resume"),
    "full_determinism": "use --deterministic",
    **dict.fromkeys(("random_seed", "manual_seed", "train_seed"), "use --seed"),
    **dict.fromkeys(("report_to", "use_wandb", "log_with"), "use --wandb or --no-wandb"),
    **dict.fromkeys(("wandb_project", "project_name"), "use --project"),
    **dict.fromkeys(
        ("run_name", "wandb_name", "wandb_run_id", "wandb_entity", "wandb_mode"), _WANDB
    ),
    **dict.fromkeys(
        ("logging_steps", "logging_strategy", "logging_first_step", "log_interval", "log_every"),
        _EVERY_STEP,
    ),
    **dict.fromkeys(
        (
            "logging_nan_inf_filter",
            "include_num_input_tokens_seen",
            "include_tokens_per_second",
            "plot_loss",
        ),
        _EVERY_STEP,
    ),
    "skip_memory_metrics": _EVERY_STEP,
    **dict.fromkeys(
        (
            "include_for_metrics",
            "batch_eval_metrics",
            "eval_do_concat_batches",
            "eval_use_gather_object",
        ),
        "leave it out: recipes/METRICS.md lists all metrics",
    ),
    # Adapters: fields of peft's LoraConfig, as peft, TRL, axolotl and LLaMA-Factory name them
    **dict.fromkeys(
        ("use_peft", "adapter", "peft", "lora", "use_lora", "peft_config"),
        "start from recipes/qwen3_0_6b_lora_zero3.py",
    ),
    **dict.fromkeys(
        (
            "r",
            "lora_r",
            "lora_rank",
            "lora_alpha",
            "lora_dropout",
            "target_modules",
            "lora_target_modules",
        ),
        _LORA,
    ),
    **dict.fromkeys(
        (
            "lora_target",
            "lora_target_linear",
            "lora_targets",
            "lora_target_parameters",
            "target_parameters",
        ),
        _LORA,
    ),
    **dict.fromkeys(
        (
            "lora_modules_to_save",
            "modules_to_save",
            "lora_task_type",
            "task_type",
            "peft_type",
            "bias",
        ),
        _LORA,
    ),
    **dict.fromkeys(
        (
            "lora_bias",
            "use_rslora",
            "peft_use_rslora",
            "use_dora",
            "peft_use_dora",
            "init_lora_weights",
        ),
        _LORA,
    ),
    **dict.fromkeys(
        (
            "peft_init_lora_weights",
            "exclude_modules",
            "layers_to_transform",
            "peft_layers_to_transform",
        ),
        _LORA,
    ),
    **dict.fromkeys(
        (
            "layers_pattern",
            "peft_layers_pattern",
            "rank_pattern",
            "alpha_pattern",
            "fan_in_fan_out",
        ),
        _LORA,
    ),
    **dict.fromkeys(
        ("lora_fan_in_fan_out", "ensure_weight_tying", "trainable_token_indices", "lora_config"),
        _LORA,
    ),
    # Fields of a recipe that are not plain values
    **{
        name: _FILE.format(name)
        for name in ("adapt", "pp_plan", "tp_plan", "tp_local", "no_decay", "lr_scale", "matrices")
    },
}

# Names from these programs that have no equivalent here.
WITHOUT_EQUIVALENT = frozenset(
    {
        # Trainer
        *(
            "label_smoothing_factor",
            "tf32",
            "neftune_noise_alpha",
            "torch_empty_cache_steps",
            "log_on_each_node",
            "log_level",
        ),
        *(
            "log_level_replica",
            "disable_tqdm",
            "trackio_space_id",
            "trackio_bucket_id",
            "trackio_static_space_id",
        ),
        *(
            "save_on_each_node",
            "accelerator_config",
            "dataloader_drop_last",
            "dataloader_pin_memory",
            "dataloader_in_order",
        ),
        *(
            "dataloader_persistent_workers",
            "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context",
        ),
        *(
            "remove_unused_columns",
            "train_sampling_strategy",
            "group_by_length",
            "length_column_name",
            "ddp_bucket_cap_mb",
        ),
        *(
            "ddp_find_unused_parameters",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
            "ddp_timeout",
            "debug",
        ),
        # TRL
        *(
            "model_init_kwargs",
            "trust_remote_code",
            "router_aux_loss_coef",
            "dataset_kwargs",
            "dataset_num_proc",
        ),
        *(
            "preprocessing_num_workers",
            "dataset_streaming",
            "streaming",
            "truncation_mode",
            "loss_type",
            "loss_weights",
        ),
        *(
            "activation_offloading",
            "disable_dropout",
            "ld_alpha",
            "f_divergence_type",
            "f_alpha_divergence_coef",
        ),
        *(
            "label_smoothing",
            "use_weighting",
            "discopop_tau",
            "sync_ref_model",
            "ref_model_mixup_alpha",
            "rpo_alpha",
        ),
        *(
            "ref_model_sync_steps",
            "reference_free",
            "ref_model",
            "center_rewards_coefficient",
            "load_in_8bit",
            "load_in_4bit",
        ),
        *(
            "bnb_4bit_quant_type",
            "use_bnb_nested_quant",
            "bnb_4bit_quant_storage",
            "quantization_bit",
            "ignore_bias_buffers",
        ),
        # axolotl and others
        *(
            "early_stopping_patience",
            "max_samples",
            "unfrozen_parameters",
            "freeze_parameters",
            "embedding_lr",
            "fp8",
        ),
        *(
            "loraplus_lr_ratio",
            "relora",
            "gptq",
            "qlora",
            "plugins",
            "strict",
            "xformers_attention",
            "flex_attention",
        ),
        # peft
        *(
            "auto_mapping",
            "peft_version",
            "inference_mode",
            "megatron_config",
            "megatron_core",
            "loftq_config",
            "eva_config",
        ),
        *(
            "corda_config",
            "lora_ga_config",
            "velora_config",
            "alora_invocation_tokens",
            "use_qalora",
            "qalora_group_size",
        ),
        *(
            "monteclora_config",
            "layer_replication",
            "runtime_config",
            "use_bdlora",
            "arrow_config",
            "kasa_config",
        ),
    }
)
# Flags that are not fields of a recipe.
COMMAND_ONLY = ("tiny", "dry_run", "show", "show_row", "world", "device")
NO_EQUIVALENT_FIX = "leave it out: recipes have no such setting"


def foreign_flag_advice(name: str) -> str:
    """Return advice on the flag to use instead of another program's `name`, or "" if unknown."""
    return ADVICE.get(name, NO_EQUIVALENT_FIX if name in WITHOUT_EQUIVALENT else "")


def as_fields(text: str) -> str:
    """Rewrite advice about flags as advice about fields in the recipe's file.

    For example, --no-wandb becomes wandb=False, and --keep N becomes keep=N.
    """
    text = re.sub(r"--no-(\w+)", r"\1=False", text.replace("--deepspeed_config", "ds_config"))
    return re.sub(r"--(\w+)", r"\1", re.sub(r"--(\w+) N\b", r"\1=N", text))


def nearest_name(typed: str, names: Iterable[str]) -> str:
    """Return the name that the user probably misspelt, or "" if no name is close.

    If exactly one name starts with `typed`, return it. Otherwise a name is close if it needs at
    most one edit per three letters, and at most three edits. Among equally close names, one with
    the same first letter wins.
    """
    names = list(names)
    longer = [name for name in names if len(typed) > 2 and name.startswith(typed)]
    if len(longer) == 1:
        return longer[0]
    distances = {name: _edits(typed, name) for name in names}
    close = [name for name in names if distances[name] <= _max_edits(max(len(typed), len(name)))]
    return min(close, key=lambda name: (distances[name], name[:1] != typed[:1]), default="")


def _max_edits(letters: int) -> int:
    return 0 if letters < 3 else min(3, (letters + 1) // 3)


def _edits(one: str, other: str) -> int:
    """Return the number of edits that turn `one` into `other`.

    An edit inserts, deletes or replaces a letter, or swaps two neighbouring letters.
    """
    before, row = list[int](), list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        older, before, row = before, row, [i]
        for j, wanted in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and (letter, one[i - 2]) == (other[j - 2], wanted):
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
    return row[-1]
