"""What DeepSpeed 0.19.8 cannot combine, and what it would ignore, as one table. `ds_config.check` reads it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .ds_schema import at

ZERO = "zero_optimization"
OPTIMIZER = f"{ZERO}.offload_optimizer"
PARAM = f"{ZERO}.offload_param"


@dataclass(frozen=True)
class Facts:
    """A configuration whose keys and types are right, with what else is known about the run."""

    config: dict[str, Any]
    optimizer: str | None = None  # the name as the schema spells it
    degrees: dict[str, int] | None = None  # tp, pp, sp, ep
    world: int | None = None
    steps: int | None = None

    def get(self, path: str, default: Any = None) -> Any:
        return at(self.config, path, default)

    def degree(self, axis: str) -> int:
        return (self.degrees or {}).get(axis, 1)

    @property
    def stage(self) -> int:
        return self.get(f"{ZERO}.stage", 0)

    @property
    def dtype(self) -> str:
        return "fp16" if self.get("fp16.enabled") else "bf16" if self.get("bf16.enabled") else "fp32"

    @property
    def offload(self) -> str:
        return self.get(f"{OPTIMIZER}.device", "none")

    @property
    def param_offload(self) -> str:
        return self.get(f"{PARAM}.device", "none")

    @property
    def cpu_adam(self) -> bool:
        return self.offload != "none" and self.optimizer in ("Adam", "AdamW") and not self.get("optimizer.params.torch_adam", False)


class Rule(NamedTuple):
    """Broken when the configuration mentions `key` and `broken` says so."""

    key: str
    broken: Callable[[Facts], bool]
    rule: str
    fix: str


def canonical_dtype(name: str | None, default: str) -> str:
    """fp16, bf16 or fp32, of the several names DeepSpeed knows each by."""
    names = {"fp16": "fp16 float16 half", "bf16": "bf16 bfloat16", "fp32": "fp32 float32 float"}
    short = (name or default).removeprefix("torch.")
    return next(dtype for dtype, known in names.items() if short in known.split())


def _stages(stages: set[int], keys: str) -> list[Rule]:
    """Rules for keys that are read at some ZeRO stages only."""
    listed = " and ".join(str(stage) for stage in sorted(stages)) if len(stages) < 3 else "1, 2 and 3"
    rule = f"is read at ZeRO stage {listed} only, and ignored otherwise"
    fix = f"delete it or use a JSON of stage {listed}"
    return [Rule(f"{ZERO}.{key}", lambda facts: facts.stage not in stages, rule, fix) for key in keys.split()]


def _nvme_only(block: str, keys: str) -> list[Rule]:
    """Rules for keys of an offload block that only a swap file uses."""

    def broken(facts: Facts) -> bool:
        return facts.get(f"{block}.device", "none") != "nvme"

    return [Rule(f"{block}.{key}", broken, "is read with device nvme only, and ignored otherwise", 'delete it or set "device": "nvme"') for key in keys.split()]


def _unused(key: str, why: str, fix: str) -> Rule:
    return Rule(key, lambda facts: True, why, fix)


RULES: tuple[Rule, ...] = (
    # numbers and their types
    Rule(
        "bf16.enabled",
        lambda f: bool(f.get("bf16.enabled") and f.get("fp16.enabled")),
        "bf16 and fp16 cannot both be on",
        'set one of them to "enabled": false',
    ),
    Rule(
        "data_types.grad_accum_dtype",
        lambda f: f.stage == 0 and canonical_dtype(f.get("data_types.grad_accum_dtype"), f.dtype) != f.dtype,
        "ZeRO stage 0 accumulates gradients in the model's dtype only",
        "delete it, or use ZeRO stage 1, 2 or 3",
    ),
    Rule(
        "data_types.param_dtype",
        lambda f: canonical_dtype(f.get("data_types.param_dtype"), f.dtype) != f.dtype,
        "contradicts the dtype that the bf16 and fp16 blocks set",
        "delete it",
    ),
    Rule(
        "bf16.bf16_master_weights_and_grads",
        lambda f: f.get("bf16.bf16_master_weights_and_grads") and f.stage == 0,
        "needs ZeRO stage 1, 2 or 3",
        "set it to false",
    ),
    Rule(
        "bf16.bf16_optimizer_states",
        lambda f: f.get("bf16.bf16_optimizer_states") and not f.get("bf16.bf16_master_weights_and_grads"),
        "needs bf16.bf16_master_weights_and_grads",
        "set that to true, or this to false",
    ),
    Rule(
        "bf16.immediate_grad_update",
        lambda f: not (f.stage == 1 and f.offload == "none" and canonical_dtype(f.get("data_types.grad_accum_dtype"), f.dtype) == "fp32"),
        "is read at ZeRO stage 1 with grad_accum_dtype fp32 and no offload only, and ignored otherwise",
        "delete it",
    ),
    Rule(
        "fp16.fp16_master_weights_and_grads",
        lambda f: f.get("fp16.fp16_master_weights_and_grads") and not (f.stage > 0 and f.cpu_adam),
        "needs ZeRO stage 1, 2 or 3 with offload_optimizer and DeepSpeed's CPU Adam",
        "set it to false",
    ),
    Rule(
        "gradient_predivide_factor", lambda f: f.get("gradient_predivide_factor") != 1 and _scatters(f), "cannot be combined with reduce_scatter", "delete it"
    ),
    Rule("prescale_gradients", lambda f: f.get("prescale_gradients") and _scatters(f), "cannot be combined with reduce_scatter", "delete it"),
    Rule(
        "gradient_allreduce_op",
        lambda f: f.get("gradient_allreduce_op").lower() == "sum" and bool(f.stage == 3 or f.get(f"{ZERO}.zenflow") or f.get("compile.deepcompile")),
        "sum does not work with ZeRO stage 3, ZenFlow or DeepCompile",
        'write "mean" or delete it',
    ),
    Rule(
        f"{ZERO}.compute_grad_norm",
        lambda f: f.get(f"{ZERO}.compute_grad_norm") is False and f.get("gradient_clipping", 1.0) != 0,
        "false leaves no norm to clip by",
        'set it to true, or "gradient_clipping": 0',
    ),
    # ZeRO
    *_stages({1, 2, 3}, "contiguous_gradients reduce_scatter reduce_bucket_size overlap_comm load_from_fp32_weights zenflow"),
    Rule(
        f"{ZERO}.allgather_bucket_size",
        lambda f: f.stage in (1, 2) and isinstance(size := f.get(f"{ZERO}.allgather_bucket_size"), int) and size % 2 == 1,
        "must be even: DeepSpeed aligns its buckets to 2 elements",
        "add 1",
    ),
    *_stages({1, 2}, "allgather_bucket_size allgather_partitions use_multi_rank_bucket_allreduce compute_grad_norm"),
    *_stages({1, 2}, "round_robin_gradients parameter_alignment elastic_checkpoint"),
    *_stages({1}, "legacy_stage1"),
    *_stages({2}, "ignore_unused_parameters"),
    *_stages({3}, "sub_group_size zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients"),
    *_stages({3}, "memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks leaf_module"),
    *_stages({3}, "stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold"),
    *_stages({3}, "stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params"),
    *_stages({3}, "stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save save_muon_momentum_buffer_in_memory"),
    Rule(
        f"{ZERO}.zero_hpz_partition_size",
        lambda f: bool(f.world and f.world % (f.get(f"{ZERO}.zero_hpz_partition_size") or 1)),
        "does not divide the number of ranks",
        "write the number of GPUs of one host",
    ),
    Rule(
        f"{ZERO}.zero_quantized_gradients",
        lambda f: f.get(f"{ZERO}.zero_quantized_gradients") and f.get(f"{ZERO}.reduce_scatter") is False,
        "needs reduce_scatter",
        f'set "{ZERO}.reduce_scatter": true',
    ),
    # offload
    Rule(OPTIMIZER, lambda f: f.offload != "none" and f.stage == 0, "needs ZeRO stage 1, 2 or 3", "delete the block or use a JSON of stage 1, 2 or 3"),
    Rule(PARAM, lambda f: f.param_offload != "none" and f.stage != 3, "needs ZeRO stage 3", "delete the block or use a JSON of stage 3"),
    Rule(
        f"{OPTIMIZER}.device",
        lambda f: f.offload == "nvme" and f.stage in (1, 2),
        "ZeRO stage 1 and 2 keep it in CPU memory and ignore nvme",
        'write "cpu", or use stage 3',
    ),
    *_nvme_only(OPTIMIZER, "nvme_path buffer_count pipeline_read pipeline_write fast_init"),
    *_nvme_only(PARAM, "nvme_path buffer_count buffer_size max_in_cpu"),
    *(
        Rule(
            f"{block}.pin_memory",
            lambda f, block=block: f.get(f"{block}.device", "none") == "none",
            "nothing is offloaded, so it is ignored",
            'set "device": "cpu" or delete it',
        )
        for block in (OPTIMIZER, PARAM)
    ),
    *(
        Rule(
            f"{block}.device",
            lambda f, block=block: f.get(f"{block}.device") == "nvme" and not f.get(f"{block}.nvme_path"),
            "nvme needs a folder",
            f'set "{block}.nvme_path"',
        )
        for block in (OPTIMIZER, PARAM)
    ),
    Rule(
        f"{OPTIMIZER}.ratio",
        lambda f: f.stage != 3 or not f.cpu_adam,
        "is read at ZeRO stage 3 with DeepSpeed's CPU Adam only, and ignored otherwise",
        "delete it",
    ),
    Rule(f"{OPTIMIZER}.super_offload", lambda f: f.stage != 3 or f.offload != "cpu", "is read at ZeRO stage 3 with device cpu only", "delete it"),
    Rule(
        f"{OPTIMIZER}.cpuadam_cores_perc",
        lambda f: not f.get(f"{OPTIMIZER}.super_offload"),
        "is read with super_offload only, and ignored otherwise",
        'delete it or set "super_offload": true',
    ),
    Rule(
        f"{ZERO}.zenflow",
        lambda f: f.get(f"{ZERO}.zenflow") is not None and f.offload != "cpu",
        "needs offload_optimizer with device cpu",
        f'set "{OPTIMIZER}.device": "cpu"',
    ),
    Rule(
        "aio",
        lambda f: "nvme" not in (f.offload, f.param_offload) and f.get("checkpoint.writer") is None,
        "is read by NVMe offload and checkpoint.writer only, and ignored otherwise",
        "delete the block or offload to nvme",
    ),
    # optimizers and schedules
    Rule(
        "optimizer.type",
        lambda f: f.stage > 0 and f.optimizer not in (None, "Adam", "AdamW", "Adagrad", "Lion", "Muon") and not f.get("zero_allow_untested_optimizer"),
        "DeepSpeed has not tested this optimizer under ZeRO",
        'add "zero_allow_untested_optimizer": true at the top level, or use AdamW',
    ),
    Rule(
        "optimizer.type",
        lambda f: f.optimizer == "Lamb" and f.offload != "none",
        "has no CPU implementation, so it cannot be offloaded",
        f"delete {OPTIMIZER} or use AdamW",
    ),
    Rule("optimizer.type", lambda f: f.optimizer == "Lamb" and f.get("fp16.loss_scale", 0) != 0, "needs dynamic loss scaling", 'set "fp16.loss_scale": 0'),
    Rule(
        "optimizer.type",
        lambda f: f.optimizer == "Muon" and f.get(f"{ZERO}.reduce_scatter", True) and (f.stage == 3 or (f.stage > 0 and f.offload != "none")),
        "Muon cannot be combined with reduce_scatter at ZeRO stage 3 or with offload",
        f'set "{ZERO}.reduce_scatter": false',
    ),
    Rule(
        "scheduler.params.warmup_num_steps",
        lambda f: f.get("scheduler.params.warmup_num_steps") > f.get("scheduler.params.total_num_steps", float("inf")),
        "the warm-up is longer than total_num_steps",
        "write a smaller number",
    ),
    Rule(
        "scheduler.type",
        lambda f: f.get("scheduler.type") == "WarmupDecayLR" and f.get("scheduler.params.warmup_max_lr") is None,
        "without warmup_max_lr it peaks at 0.001, whatever the learning rate is",
        'add "warmup_max_lr" to scheduler.params',
    ),
    Rule(
        "scheduler.params.total_num_steps",
        lambda f: f.steps is not None and f.get("scheduler.params.total_num_steps") != f.steps,
        "differs from the steps of the run",
        "write the same number, or delete the scheduler block and use --schedule",
    ),
    # parallelism
    Rule(
        f"{ZERO}.stage",
        lambda f: f.degree("pp") > 1 and f.stage > 1,
        "ZeRO stages 2 and 3 do not work with pipeline parallelism",
        "use --pp 1, or a JSON of stage 0 or 1",
    ),
    Rule(f"{OPTIMIZER}.device", lambda f: f.degree("pp") > 1 and f.offload == "nvme", "NVMe offload does not work with pipeline parallelism", "use --pp 1"),
    Rule(
        "expert_parallel.enabled",
        lambda f: f.get("expert_parallel.enabled") and f.get("expert_parallel.autoep_size") is None,
        "without autoep_size it is a degree of 1, which changes nothing",
        'add "autoep_size"',
    ),
    Rule("compile.deepcompile", lambda f: f.get("compile.deepcompile") and f.stage == 0, "DeepCompile needs ZeRO stage 1, 2 or 3", "set it to false"),
    Rule(
        "compile.deepcompile",
        lambda f: f.get("compile.deepcompile") and f.degree("pp") > 1,
        "DeepCompile does not work with pipeline parallelism",
        "set it to false, or use --pp 1",
    ),
    # read by DeepSpeed, but nothing comes of it
    _unused("vocabulary_size", "DeepSpeed only warns about it, and ignores it", "delete it"),
    _unused("disable_allgather", "DeepSpeed 0.19.8 reads it and ignores it", "delete it"),
)

OURS = "the recipes"

# Keys that work in a script that leaves more to DeepSpeed, but have no effect (or a wrong one) in a recipe.
RECIPE_RULES: tuple[Rule, ...] = (
    _unused("data_efficiency", f"{OURS} stream their own data and ignore it", "delete the block"),
    _unused("dataloader_drop_last", f"{OURS} stream their own data and ignore it", "delete it"),
    _unused(
        "activation_checkpointing",
        f"{OURS} checkpoint activations with the model's own method and ignore it",
        "delete the block and use --activation_checkpointing",
    ),
    _unused("wandb", f"{OURS} record their own W&B run, this would be a second one", "delete the block and use --wandb --project NAME"),
    _unused("hybrid_engine", "serves generation during reinforcement learning", "delete the block"),
    _unused("autotuning", "is read by `deepspeed --autotuning` only, which does not start recipes", "delete the block"),
    _unused("weight_quantization", "serves inference", "delete the block"),
    _unused("datastates_ckpt", "needs the package datastates, and falls back to torch.save without a word", "delete the block"),
    _unused("use_data_before_expert_parallelism", f"{OURS} lay out the ranks themselves", "delete it"),
    _unused("seq_parallel_communication_data_type", f"{OURS} reduce gradients in communication_data_type, over sequence ranks too", "delete it"),
    Rule(
        "managed_gradient_accumulation",
        lambda f: not f.get("managed_gradient_accumulation"),
        "the training loop lets DeepSpeed count micro-batches",
        "set it to true or delete it",
    ),
    Rule(
        "gradient_allreduce_op",
        lambda f: f.get("gradient_allreduce_op").lower() != "mean",
        "the loss is averaged over tokens, which takes the mean",
        'write "mean" or delete it',
    ),
    Rule(
        f"{ZERO}.compute_grad_norm", lambda f: f.get(f"{ZERO}.compute_grad_norm") is False, "grad_norm is logged at every step", "set it to true or delete it"
    ),
)

# Of these blocks a recipe honours some keys, and does the rest itself.
RECIPE_HONOURS = {
    "tensor_parallel": {"autotp_size"},
    "expert_parallel": {"autoep_size", "enabled"},
    "pipeline": {"stages"},
}


def _scatters(facts: Facts) -> bool:
    """True where DeepSpeed averages gradients by reduce-scatter, which takes no other scaling."""
    return facts.stage >= 2 and facts.get(f"{ZERO}.reduce_scatter", True)
