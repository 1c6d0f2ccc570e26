"""Table of combined settings that DeepSpeed 0.19.8 supports, rejects or ignores.

`lint_config` applies the table, and `recipekit lint --table` prints it into ds_configs/README.md.
`source` is the place in DeepSpeed's code or documentation that determines the outcome. "run" means
that the outcome was observed in a run.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..spec.errors import APPLIES, FAILS, HANGS, IGNORES, REPLACES, WRONG
from ..spec.optimizer_specs import (
    ADAM,
    GRADIENT,
    OPTIMIZERS,
    SWAPPABLE_FAMILIES,
    TENSOR,
    optimizer_spec_of,
)
from ..spec.optimizer_specs import OptimizerSpec as Kept
from .schema import schema, value_at

ZERO_BLOCK = "zero_optimization"
OPTIMIZER_OFFLOAD_BLOCK = f"{ZERO_BLOCK}.offload_optimizer"
PARAM_OFFLOAD_BLOCK = f"{ZERO_BLOCK}.offload_param"


@dataclass(frozen=True)
class RuleContext:
    """A configuration whose keys and types are valid, with further known facts about the run."""

    config: dict[str, Any]
    optimizer: str | None = None  # the name as the schema spells it
    degrees: dict[str, int] | None = None  # tp, pp, sp, ep
    world: int | None = None
    local: int = 0  # ranks on this host, 0 if unknown
    stock: bool = False  # DeepSpeed alone reads the JSON: no recipe assigns the ranks

    def get(self, path: str, default: object = None) -> Any:
        return value_at(self.config, path, default)

    def degree(self, axis: str) -> int:
        return (self.degrees or {}).get(axis, 1)

    @property
    def stage(self) -> int:
        return self.get(f"{ZERO_BLOCK}.stage", 0)

    @property
    def dtype(self) -> str:
        return (
            "fp16" if self.get("fp16.enabled") else "bf16" if self.get("bf16.enabled") else "fp32"
        )

    @property
    def optimizer_offload(self) -> str:
        return self.get(f"{OPTIMIZER_OFFLOAD_BLOCK}.device", "none")

    @property
    def param_offload(self) -> str:
        return self.get(f"{PARAM_OFFLOAD_BLOCK}.device", "none")

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Return True if DeepSpeed's optimizer class is BF16_Optimizer (engine.py:2299).

        Otherwise it is the ZeRO optimizer.
        """
        accumulates = canonical_dtype(self.get("data_types.grad_accum_dtype"), self.dtype)
        return (
            self.stage == 1
            and self.dtype == "bf16"
            and accumulates == "fp32"
            and self.optimizer_offload == "none"
        )

    @property
    def uses_cpu_adam(self) -> bool:
        return (
            self.optimizer_offload != "none"
            and self.optimizer in ("Adam", "AdamW")
            and not self.get("optimizer.params.torch_adam", False)
        )


class Rule(NamedTuple):
    """One rule.

    A configuration breaks the rule if it contains `key` and `is_broken` returns True. `outcome` is
    DeepSpeed's reaction. `combination` names the combined settings for the support table.
    """

    key: str
    is_broken: Callable[[RuleContext], Any]
    rule: str
    fix: str
    outcome: str
    source: str
    combination: str = ""


def canonical_dtype(name: str | None, default: str) -> str:
    """Return fp16, bf16 or fp32 for any dtype name that DeepSpeed accepts."""
    names = {"fp16": "fp16 float16 half", "bf16": "bf16 bfloat16", "fp32": "fp32 float32 float"}
    short = (name or default).removeprefix("torch.")
    return next(dtype for dtype, known in names.items() if short in known.split())


def _stage_rules(stages: set[int], keys: str) -> list[Rule]:
    """Return rules for keys that DeepSpeed reads only at certain ZeRO stages."""
    listed = " or ".join(str(stage) for stage in sorted(stages)) if len(stages) < 3 else "1, 2 or 3"
    rule = f"is read only at ZeRO stage {listed} and ignored otherwise"
    fix = f"delete it, or use a JSON with stage {listed}"
    source = "engine.py, _configure_zero_optimizer; run"
    return [
        Rule(
            f"{ZERO_BLOCK}.{key}",
            lambda facts: facts.stage not in stages,
            rule,
            fix,
            IGNORES,
            source,
        )
        for key in keys.split()
    ]


def _nvme_rules(block: str, keys: str) -> list[Rule]:
    """Return rules for keys in an offload block that are used only with a swap file."""

    def broken(facts: RuleContext) -> bool:
        return facts.get(f"{block}.device", "none") != "nvme" or (
            block == OPTIMIZER_OFFLOAD_BLOCK and facts.stage != 3
        )

    rule, fix = (
        "is read only with NVMe offload at ZeRO stage 3 and ignored otherwise",
        'delete it, or set "device": "nvme" and use stage 3',
    )
    return [
        Rule(f"{block}.{key}", broken, rule, fix, IGNORES, "zero/offload_config.py; run")
        for key in keys.split()
    ]


def _unused_key_rule(
    key: str, why: str, fix: str, source: str = "", outcome: str = IGNORES
) -> Rule:
    return Rule(key, lambda facts: True, why, fix, outcome, source)


def _op_option_rule(key: str, name: str, why: str) -> Rule:
    """Return a rule for an optimizer option that a recipe's replacement of the optimizer lacks.

    Only DeepSpeed's or torch's own implementation has this option.
    """
    return Rule(
        f"optimizer.params.{key}",
        lambda f: _is_recipe_optimizer(f, name) and bool(f.get(f"optimizer.params.{key}")),
        why,
        "delete it",
        APPLIES,
        "",
    )


def _package_rule(
    key: str, package: str, on: Callable[[RuleContext], Any], without: str, source: str
) -> Rule:
    """Return the rule for a key that makes DeepSpeed import an optional package.

    Installing DeepSpeed does not install this package.
    """
    rule, fix = (
        f"requires the package {package}, which is not installed",
        f"{without}, or run pip install {package}",
    )
    return Rule(
        key,
        lambda facts: on(facts) and not is_package_importable(package),
        rule,
        fix,
        FAILS,
        source,
    )


def _table_only_rule(combination: str, outcome: str, rule: str, fix: str, source: str) -> Rule:
    """Return a row of the support table that no JSON can break.

    The script or the model determines whether the combination occurs.
    """
    return Rule("", lambda facts: False, rule, fix, outcome, source, combination)


def _is_untested_optimizer(context: RuleContext) -> bool:
    """Return True if DeepSpeed alone requires zero_allow_untested_optimizer for a safe optimizer.

    An optimizer is safe if its results do not depend on ZeRO's flat partitions.
    """
    if (
        context.stage == 0
        or context.optimizer is None
        or OPTIMIZERS[context.optimizer].acts_on == TENSOR
    ):
        return False
    return not (OPTIMIZERS[context.optimizer].tested or OPTIMIZERS[context.optimizer].host)


def _optimizer_spec(context: RuleContext) -> Kept:
    """Return the spec of a recipe's optimizer."""
    return ADAM if context.optimizer is None else optimizer_spec_of(context.config)


def _is_recipe_optimizer(context: RuleContext, *names: str) -> bool:
    """Return True if a recipe's optimizer is one of `names` and uses this project's class."""
    return context.optimizer in names and _optimizer_spec(context).is_own_class


def _hpz_partition_size(context: RuleContext) -> int:
    """Return the number of ranks in ZeRO-3's secondary weight partition, or 1 without one."""
    return context.get(f"{ZERO_BLOCK}.zero_hpz_partition_size", 1) if context.stage == 3 else 1


def _autocasts_to(context: RuleContext, *dtypes: str) -> bool:
    """Return True if torch.autocast, enabled in the JSON, computes in one of `dtypes`."""
    dtype = context.get("torch_autocast.dtype")
    return bool(context.get("torch_autocast.enabled")) and canonical_dtype(dtype, "bf16") in dtypes


def _reads_as_fp16(context: RuleContext) -> bool:
    """Return True if qgZ's kernel receives gradients in a format other than fp16.

    The kernel interprets all bits as fp16.
    """
    sent = canonical_dtype(context.get("communication_data_type"), context.dtype)
    return (
        context.stage == 3
        and bool(context.get(f"{ZERO_BLOCK}.zero_quantized_gradients"))
        and sent != "fp16"
    )


def _has_flat_masters(context: RuleContext) -> bool:
    """Return True if DeepSpeed's own Adam, without ZeRO, flattens all master weights of a group."""
    own = (
        context.optimizer in ("Adam", "AdamW")
        and context.get("optimizer.params.torch_adam") is not True
    )
    return own and context.stage == 0 and context.dtype != "fp32"


# package, under its pip name -> module that DeepSpeed imports
IMPORT_NAMES = {
    "comet_ml": "comet_ml",
    "datastates": "datastates",
    "deep_ep": "deep_ep",
    "liger-kernel": "liger_kernel",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}


def is_package_importable(package: str) -> bool:
    """Return True if this Python installation can import the package."""
    spec = importlib.util.find_spec(IMPORT_NAMES[package])
    return spec is not None and spec.origin is not None  # a folder alone is not a package


DEEPSPEED_RULES: tuple[Rule, ...] = (
    # packages that DeepSpeed imports for a block but does not install
    *(
        _package_rule(
            f"{block}.enabled",
            package,
            lambda f, block=block: f.get(f"{block}.enabled"),
            f'set "{block}.enabled": false',
            source,
        )
        for block, package, source in (
            ("tensorboard", "tensorboard", "monitor/utils.py:13; run"),
            ("wandb", "wandb", "monitor/utils.py:21"),
            ("comet", "comet_ml", "monitor/utils.py:31; run"),
        )
    ),
    _package_rule(
        "expert_parallel.comm_backend",
        "deep_ep",
        lambda f: (
            f.get("expert_parallel.comm_backend") == "deepep" and f.get("expert_parallel.enabled")
        ),
        'set it to "comm"',
        "module_inject/auto_ep_comm.py:166",
    ),
    _package_rule(
        "tensor_parallel.vocab_parallel_ce_backend",
        "liger-kernel",
        lambda f: f.get("tensor_parallel.vocab_parallel_ce_backend") == "liger",
        'set it to "torch"',
        "sequence/cross_entropy.py:19",
    ),
    # numbers and their types
    Rule(
        "bf16.enabled",
        lambda f: f.get("bf16.enabled") and f.get("fp16.enabled"),
        "bf16 and fp16 cannot both be enabled",
        'set one of them to "enabled": false',
        FAILS,
        "config.py:511; run",
        "bf16 + fp16",
    ),
    Rule(
        "data_types.grad_accum_dtype",
        lambda f: (
            f.stage == 0
            and canonical_dtype(f.get("data_types.grad_accum_dtype"), f.dtype) != f.dtype
        ),
        "ZeRO stage 0 can accumulate gradients only in the model's dtype",
        "delete it, or use ZeRO stage 1, 2 or 3",
        FAILS,
        "engine.py:2323; run",
        "ZeRO-0 + a grad_accum_dtype that is not the model's dtype",
    ),
    Rule(
        "data_types.param_dtype",
        lambda f: canonical_dtype(f.get("data_types.param_dtype"), f.dtype) != f.dtype,
        "contradicts the dtype set by the bf16 and fp16 blocks",
        "delete it",
        FAILS,
        "engine.py:1827",
    ),
    Rule(
        "bf16.bf16_master_weights_and_grads",
        lambda f: f.get("bf16.bf16_master_weights_and_grads") and f.stage == 0,
        "requires ZeRO stage 1, 2 or 3",
        "set it to false",
        FAILS,
        "config.py:706",
    ),
    Rule(
        "bf16.bf16_optimizer_states",
        lambda f: (
            f.get("bf16.bf16_optimizer_states") and not f.get("bf16.bf16_master_weights_and_grads")
        ),
        "requires bf16.bf16_master_weights_and_grads",
        "set that key to true, or set this key to false",
        FAILS,
        "config.py:710; run",
    ),
    Rule(
        "bf16.immediate_grad_update",
        lambda f: not f.uses_bf16_optimizer,
        "is read only at ZeRO stage 1 with grad_accum_dtype fp32 and without offload, and ignored"
        " otherwise",
        "delete it",
        IGNORES,
        "engine.py:2299",
    ),
    Rule(
        "fp16.fp16_master_weights_and_grads",
        lambda f: (
            f.get("fp16.fp16_master_weights_and_grads") and not (f.stage > 0 and f.uses_cpu_adam)
        ),
        "requires ZeRO stage 1, 2 or 3 with offload_optimizer and DeepSpeed's CPU Adam",
        "set it to false",
        FAILS,
        "config.py:702, zero/stage3.py:300",
    ),
    Rule(
        "fp16.enabled",
        lambda f: f.dtype == "fp16" and f.stage == 0 and f.get("fp16.loss_scale", 0) != 1,
        "DeepSpeed divides the gradients by a loss scale that the loss never had, so the weights"
        " hardly change",
        f'set "{ZERO_BLOCK}.stage": 1, or "fp16": {{"enabled": false}}, "bf16": {{"enabled":'
        " true}",
        WRONG,
        "engine.py:3417, fp16/unfused_optimizer.py:210; run",
        "fp16 + ZeRO-0, with or without a pipeline",
    ),
    Rule(
        "torch_autocast.dtype",
        lambda f: _autocasts_to(f, "fp16") and f.stage > 0,
        "under ZeRO DeepSpeed clips the gradients before it unscales them, and the loss scale never"
        " falls after an overflow",
        'set it to "bfloat16", or use the fp16 block',
        WRONG,
        "zero/stage_1_and_2.py:2976, zero/stage3.py:1240; run",
        "torch_autocast in fp16 + ZeRO-1, 2, 3",
    ),
    Rule(
        "gradient_predivide_factor",
        lambda f: f.get("gradient_predivide_factor") != 1 and _uses_reduce_scatter(f),
        "cannot be combined with reduce_scatter",
        "delete it",
        FAILS,
        "zero/stage3.py:395, zero/stage_1_and_2.py:350",
    ),
    Rule(
        "prescale_gradients",
        lambda f: f.get("prescale_gradients") and _uses_reduce_scatter(f),
        "cannot be combined with reduce_scatter",
        "delete it",
        FAILS,
        "zero/stage3.py:396, zero/stage_1_and_2.py:351; run",
        "ZeRO-2/3 with reduce_scatter + prescale_gradients",
    ),
    Rule(
        "gradient_allreduce_op",
        lambda f: (
            f.get("gradient_allreduce_op").lower() == "sum"
            and (f.stage == 3 or f.get(f"{ZERO_BLOCK}.zenflow") or f.get("compile.deepcompile"))
        ),
        "sum cannot be combined with ZeRO stage 3, ZenFlow or DeepCompile",
        'set it to "mean", or delete it',
        FAILS,
        "config.py:694; run",
        "gradient_allreduce_op sum + ZeRO-3, ZenFlow or DeepCompile",
    ),
    Rule(
        f"{ZERO_BLOCK}.compute_grad_norm",
        lambda f: (
            f.get(f"{ZERO_BLOCK}.compute_grad_norm") is False
            and f.stage in (1, 2)
            and f.get("gradient_clipping", 1.0) != 0
        ),
        "must be true with gradient clipping, which requires the norm",
        'set it to true, or set "gradient_clipping": 0',
        FAILS,
        "zero/stage_1_and_2.py:213",
    ),
    # ZeRO
    _table_only_rule(
        "ZeRO-0, 1, 2, 3 in fp32 and bf16",
        APPLIES,
        "the losses agree within 1e-6 on one to eight ranks",
        "",
        "run",
    ),
    *_stage_rules(
        {1, 2, 3},
        "contiguous_gradients reduce_scatter reduce_bucket_size overlap_comm load_from_fp32_weights"
        " zenflow",
    ),
    *(
        Rule(
            f"{ZERO_BLOCK}.{key}",
            lambda f: f.uses_bf16_optimizer,
            "is ignored at stage 1 in bf16 with grad_accum_dtype fp32, because BF16_Optimizer"
            " reduces gradients in a different way",
            "delete it",
            IGNORES,
            "engine.py, _configure_bf16_optimizer; run",
        )
        for key in [
            "contiguous_gradients",
            "reduce_scatter",
            "reduce_bucket_size",
            "overlap_comm",
            "round_robin_gradients",
            "use_multi_rank_bucket_allreduce",
            "parameter_alignment",
        ]
    ),
    Rule(
        f"{ZERO_BLOCK}.contiguous_gradients",
        lambda f: f.stage in (1, 2) and f.optimizer_offload != "none",
        "is ignored with optimizer offload at stages 1 and 2, where gradients are always"
        " contiguous",
        "delete it",
        IGNORES,
        "zero/stage_1_and_2.py:300; run",
    ),
    Rule(
        f"{ZERO_BLOCK}.allgather_bucket_size",
        lambda f: (
            f.stage in (1, 2)
            and isinstance(size := f.get(f"{ZERO_BLOCK}.allgather_bucket_size"), int)
            and size % 2 == 1
        ),
        "must be even, because DeepSpeed aligns its buckets to 2 elements",
        "add 1",
        FAILS,
        "zero/stage_1_and_2.py; run",
    ),
    *_stage_rules({1, 2}, "allgather_bucket_size use_multi_rank_bucket_allreduce"),
    *_stage_rules({1, 2}, "round_robin_gradients parameter_alignment elastic_checkpoint"),
    Rule(
        f"{ZERO_BLOCK}.compute_grad_norm",
        lambda f: f.stage not in (1, 2),
        "is allowed only at ZeRO stage 1 or 2",
        "delete it or use a JSON with stage 1 or 2",
        FAILS,
        "zero/config.py:391",
    ),
    *_stage_rules({1}, "legacy_stage1"),
    *_stage_rules({2}, "ignore_unused_parameters"),
    *_stage_rules(
        {3},
        "sub_group_size zero_hpz_partition_size zero_quantized_weights"
        " zero_quantized_nontrainable_weights zero_quantized_gradients",
    ),
    *_stage_rules(
        {3},
        "memory_efficient_linear pipeline_loading_checkpoint override_module_apply"
        " log_trace_cache_warnings enable_sanity_checks leaf_module",
    ),
    *_stage_rules(
        {3},
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size"
        " stage3_param_persistence_threshold",
    ),
    *_stage_rules(
        {3},
        "stage3_model_persistence_threshold stage3_module_granularity_threshold"
        " stage3_use_all_reduce_for_fetch_params",
    ),
    *_stage_rules(
        {3},
        "stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save"
        " save_muon_momentum_buffer_in_memory",
    ),
    Rule(
        f"{ZERO_BLOCK}.zero_hpz_partition_size",
        lambda f: (
            _hpz_partition_size(f) > 1
            and f.world
            and f.world % min(_hpz_partition_size(f), f.world)
        ),
        "must divide the number of ranks",
        "set it to the number of GPUs per host",
        FAILS,
        "utils/groups.py:925",
        "ZeRO-3 with hpZ + a number of ranks that its groups do not divide",
    ),
    Rule(
        f"{ZERO_BLOCK}.zero_hpz_partition_size",
        lambda f: _hpz_partition_size(f) > 1 and f.world and _hpz_partition_size(f) >= f.world,
        "must be smaller than the number of ranks, because otherwise each rank keeps its shard of"
        " the weights twice",
        "use zero3.json, or delete it",
        APPLIES,
        "utils/groups.py:925; run",
    ),
    Rule(
        f"{ZERO_BLOCK}.zero_hpz_partition_size",
        lambda f: (
            _hpz_partition_size(f) > 1
            and f.local
            and f.local % _hpz_partition_size(f)
            and f.world
            and f.world > f.local
        ),
        "must divide the number of ranks on this host, because otherwise weights are gathered from"
        " other hosts",
        "set it to the number of GPUs per host",
        APPLIES,
        "utils/groups.py:925",
    ),
    Rule(
        f"{ZERO_BLOCK}.zero_hpz_partition_size",
        lambda f: _hpz_partition_size(f) > 1 and (f.degree("tp") > 1 or f.degree("ep") > 1),
        "cannot be combined with tensor or expert parallelism, where the neighbouring ranks of a"
        " group hold different weights",
        "delete it, or use --tp 1 and --ep 1",
        FAILS,
        "utils/groups.py:925, engine.py:2225",
        "ZeRO-3 with hpZ + tensor or expert parallelism",
    ),
    Rule(
        f"{ZERO_BLOCK}.zero_quantized_gradients",
        lambda f: (
            f.stage == 3
            and f.get(f"{ZERO_BLOCK}.zero_quantized_gradients")
            and f.get(f"{ZERO_BLOCK}.reduce_scatter") is False
        ),
        "requires reduce_scatter",
        f'set "{ZERO_BLOCK}.reduce_scatter": true',
        FAILS,
        "zero/stage3.py:390",
    ),
    Rule(
        f"{ZERO_BLOCK}.zero_quantized_gradients",
        _reads_as_fp16,
        "requires gradients in fp16, because its kernel reads the bits of every gradient as fp16",
        'set "communication_data_type": "fp16", or delete it',
        WRONG,
        "runtime/comm/coalesced_collectives.py:57, ops/csrc/quantization/pt_binding.cpp:153; run",
        "ZeRO-3 with quantised gradients (qgZ) + gradients in bf16 or fp32",
    ),
    Rule(
        f"{ZERO_BLOCK}.zero_quantized_gradients",
        lambda f: (
            f.stage == 3
            and f.get(f"{ZERO_BLOCK}.zero_quantized_gradients")
            and _autocasts_to(f, "fp16", "bf16")
            and not _reads_as_fp16(f)
        ),
        "requires gradients in fp16 for its kernel, but torch_autocast sends some in another dtype",
        'set "torch_autocast.enabled": false, or delete it',
        WRONG,
        "base_optimizer.py:394, runtime/comm/coalesced_collectives.py:57",
    ),
    Rule(
        f"{ZERO_BLOCK}.reduce_scatter",
        lambda f: (
            f.stage == 2
            and f.get(f"{ZERO_BLOCK}.reduce_scatter") is False
            and f.get(f"{ZERO_BLOCK}.overlap_comm") is True
        ),
        "cannot be combined with overlap_comm, which frees a gradient larger than the bucket while"
        " the other stream still reduces it",
        f'set "{ZERO_BLOCK}.reduce_scatter": true, or "{ZERO_BLOCK}.overlap_comm": false',
        WRONG,
        "zero/stage_1_and_2.py:1600, clear_grad_attribute",
        "ZeRO-2 with overlap_comm + reduce_scatter false",
    ),
    # offload
    Rule(
        OPTIMIZER_OFFLOAD_BLOCK,
        lambda f: f.optimizer_offload != "none" and f.stage == 0,
        "requires ZeRO stage 1, 2 or 3, because at stage 0 nothing is offloaded and AdamW becomes"
        " DeepSpeed's CPU Adam",
        "delete the block or use a JSON with stage 1, 2 or 3",
        IGNORES,
        "engine.py, zero_use_cpu_optimizer; run",
        "ZeRO-0 + optimizer offload",
    ),
    Rule(
        PARAM_OFFLOAD_BLOCK,
        lambda f: f.param_offload != "none" and f.stage != 3,
        "requires ZeRO stage 3",
        "delete the block or use a JSON with stage 3",
        IGNORES,
        "engine.py, _configure_zero_optimizer; run",
        "ZeRO-0, 1, 2 + parameter offload",
    ),
    Rule(
        f"{OPTIMIZER_OFFLOAD_BLOCK}.device",
        lambda f: f.optimizer_offload == "nvme" and f.stage in (1, 2),
        "requires ZeRO stage 3, because stages 1 and 2 ignore nvme and keep the optimizer states in"
        " CPU memory",
        'set it to "cpu", or use a JSON with stage 3',
        REPLACES,
        "zero/stage_1_and_2.py:220; run",
        "ZeRO-1, 2 + optimizer offload to NVMe",
    ),
    _table_only_rule(
        "ZeRO-2 with optimizer offload to CPU, ZeRO-3 with optimizer and parameter offload to CPU"
        " or NVMe",
        APPLIES,
        "the losses are the same as without offload",
        "",
        "run",
    ),
    *_nvme_rules(
        OPTIMIZER_OFFLOAD_BLOCK, "nvme_path buffer_count pipeline_read pipeline_write fast_init"
    ),
    *_nvme_rules(PARAM_OFFLOAD_BLOCK, "nvme_path buffer_count buffer_size max_in_cpu"),
    *(
        Rule(
            f"{block}.pin_memory",
            lambda f, block=block: f.get(f"{block}.device", "none") == "none",
            "is ignored, because nothing is offloaded",
            'set "device": "cpu" or delete it',
            IGNORES,
            "zero/offload_config.py",
        )
        for block in (OPTIMIZER_OFFLOAD_BLOCK, PARAM_OFFLOAD_BLOCK)
    ),
    *(
        Rule(
            f"{block}.device",
            lambda f, block=block: (
                f.get(f"{block}.device") == "nvme" and not f.get(f"{block}.nvme_path")
            ),
            "requires a folder in nvme_path",
            f'set "{block}.nvme_path" to a folder on a local drive',
            FAILS,
            "runtime/swap_tensor",
        )
        for block in (OPTIMIZER_OFFLOAD_BLOCK, PARAM_OFFLOAD_BLOCK)
    ),
    Rule(
        f"{OPTIMIZER_OFFLOAD_BLOCK}.ratio",
        lambda f: f.get(f"{OPTIMIZER_OFFLOAD_BLOCK}.ratio") < 1 and f.stage != 3,
        "requires ZeRO stage 3 and DeepSpeed's CPU Adam",
        "delete it",
        FAILS,
        "zero/config.py:399",
    ),
    Rule(
        f"{OPTIMIZER_OFFLOAD_BLOCK}.ratio",
        lambda f: (
            not (f.get(f"{OPTIMIZER_OFFLOAD_BLOCK}.ratio") < 1 and f.stage != 3)
            and (f.stage != 3 or not f.uses_cpu_adam)
        ),
        "is read only at ZeRO stage 3 with DeepSpeed's CPU Adam, and ignored otherwise",
        "delete it",
        IGNORES,
        "zero/stage3.py:316",
    ),
    Rule(
        f"{OPTIMIZER_OFFLOAD_BLOCK}.super_offload",
        lambda f: f.stage != 3 or f.optimizer_offload != "cpu",
        "is read only at ZeRO stage 3 with device cpu",
        "delete it",
        IGNORES,
        "engine.py, _configure_zero_optimizer",
    ),
    Rule(
        f"{OPTIMIZER_OFFLOAD_BLOCK}.cpuadam_cores_perc",
        lambda f: not f.get(f"{OPTIMIZER_OFFLOAD_BLOCK}.super_offload"),
        "is read only with super_offload, and ignored otherwise",
        'delete it or set "super_offload": true',
        IGNORES,
        "engine.py, _configure_zero_optimizer",
    ),
    Rule(
        f"{ZERO_BLOCK}.zenflow",
        lambda f: f.get(f"{ZERO_BLOCK}.zenflow") is not None and f.optimizer_offload != "cpu",
        "requires offload_optimizer with device cpu",
        f'set "{OPTIMIZER_OFFLOAD_BLOCK}.device": "cpu"',
        FAILS,
        "runtime/zenflow",
        "ZenFlow + no optimizer offload to CPU",
    ),
    Rule(
        "aio",
        lambda f: (
            "nvme" not in (f.optimizer_offload if f.stage == 3 else "none", f.param_offload)
            and f.get("checkpoint.writer") is None
        ),
        "is read only by NVMe offload and checkpoint.writer, and ignored otherwise",
        "delete the block or use NVMe offload",
        IGNORES,
        "runtime/swap_tensor; run",
    ),
    # optimizers and schedules
    Rule(
        "optimizer.type",
        lambda f: (
            f.stock and _is_untested_optimizer(f) and not f.get("zero_allow_untested_optimizer")
        ),
        "DeepSpeed has not tested this optimizer under ZeRO and requires your consent",
        'add "zero_allow_untested_optimizer": true at the top level (recipes add it themselves)',
        FAILS,
        "zero/utils.py:45; run",
        "ZeRO-1, 2, 3 + an optimizer of PyTorch other than Adam, AdamW, Adagrad",
    ),
    Rule(
        "optimizer.type",
        lambda f: f.stock and f.stage > 0 and f.optimizer in ("Lamb", "Adafactor"),
        "requires sums over full tensors, but ZeRO flattens the weights, so this would silently"
        " become another algorithm",
        "use AdamW, or a recipe, which computes LAMB and Adafactor over full tensors",
        REPLACES,
        "zero/stage_1_and_2.py, zero/stage3.py; run",
        "ZeRO-1, 2, 3 + LAMB or Adafactor",
    ),
    Rule(
        "optimizer.type",
        lambda f: f.stock and f.optimizer == "Lamb" and f.optimizer_offload != "none",
        "cannot be offloaded, because it has no CPU implementation",
        f"delete {OPTIMIZER_OFFLOAD_BLOCK} or use AdamW",
        FAILS,
        "ops/lamb",
        "LAMB + offload",
    ),
    Rule(
        "optimizer.type",
        lambda f: f.stock and f.optimizer == "Lamb" and f.get("fp16.loss_scale", 0) != 0,
        "requires dynamic loss scaling",
        'set "fp16.loss_scale": 0',
        FAILS,
        "engine.py:2022",
        "LAMB + static loss scaling",
    ),
    Rule(
        "optimizer.type",
        lambda f: (
            f.stock
            and f.optimizer == "Muon"
            and f.get(f"{ZERO_BLOCK}.reduce_scatter", True)
            and (f.stage == 3 or (f.stage > 0 and f.optimizer_offload != "none"))
        ),
        "Muon cannot be combined with reduce_scatter at ZeRO stage 3 or with offload",
        f'set "{ZERO_BLOCK}.reduce_scatter": false',
        FAILS,
        "zero/stage3.py:361, zero/stage_1_and_2.py; run",
        "Muon + reduce_scatter at ZeRO-3, or with offload",
    ),
    Rule(
        "optimizer.legacy_fusion",
        lambda f: f.get("optimizer.legacy_fusion") and not _has_flat_masters(f),
        "is read only by DeepSpeed's own Adam in fp16 or bf16 without ZeRO",
        "delete it",
        IGNORES,
        "engine.py:2589; run",
    ),
    Rule(
        "optimizer.params.nesterov",
        lambda f: (
            f.optimizer != "Muon"
            and f.get("optimizer.params.nesterov") is True
            and (not f.get("optimizer.params.momentum") or f.get("optimizer.params.dampening", 0))
        ),
        "requires a momentum and cannot be combined with dampening",
        'set "momentum": 0.9 and delete dampening, or delete nesterov',
        FAILS,
        "torch/optim/sgd.py; run",
    ),
    Rule(
        "optimizer.params.etas",
        lambda f: (
            not 0 < min(f.get("optimizer.params.etas")) < 1 < f.get("optimizer.params.etas")[1]
        ),
        "the first number must be between 0 and 1, and the second must be above 1",
        "write [0.5, 1.2]",
        FAILS,
        "torch/optim/rprop.py; run",
    ),
    Rule(
        "optimizer.params.foreach",
        lambda f: (
            f.get("optimizer.params.foreach") is True and f.get("optimizer.params.fused") is True
        ),
        "cannot be combined with fused, which is another implementation of the same step",
        "delete one of the two",
        FAILS,
        "torch/optim/optimizer.py; run",
    ),
    Rule(
        "optimizer.params.differentiable",
        lambda f: f.get("optimizer.params.differentiable") is True,
        "records the step for a second gradient, which torch refuses for model weights",
        "delete it",
        FAILS,
        "torch/optim/optimizer.py; run",
    ),
    Rule(
        "optimizer.params.capturable",
        lambda f: f.get("optimizer.params.capturable") is True and f.optimizer_offload != "none",
        "requires an optimizer step on a GPU, but offload moves the step to the CPU",
        "delete it",
        FAILS,
        "torch/optim/optimizer.py; run",
    ),
    Rule(
        "optimizer.type",
        lambda f: f.stock and f.optimizer == "OneBitAdam",
        "was removed from DeepSpeed together with 0/1 Adam and 1-bit LAMB, and older versions"
        " refuse all three under ZeRO",
        "use AdamW, or a DeepSpeed version below 0.19, or a recipe, which has its own 1-bit Adam"
        " without ZeRO",
        FAILS,
        "config.py, DEEPSPEED_OPTIMIZERS; run",
        "1-bit Adam, 0/1 Adam, 1-bit LAMB",
    ),
    _table_only_rule(
        "an optimizer of the script + ZeRO offload",
        FAILS,
        "must be DeepSpeed's CPU Adam or Lion",
        'name the optimizer in the JSON, or set "zero_force_ds_cpu_optimizer": false',
        "engine.py:2340",
    ),
    Rule(
        "scheduler.params.warmup_num_steps",
        lambda f: (
            f.get("scheduler.params.warmup_num_steps")
            > f.get("scheduler.params.total_num_steps", float("inf"))
        ),
        "must not exceed total_num_steps",
        "set it to a smaller number",
        APPLIES,
        "lr_schedules.py",
    ),
    Rule(
        "scheduler.type",
        lambda f: (
            f.get("scheduler.type") == "WarmupDecayLR"
            and f.get("scheduler.params.warmup_max_lr") is None
        ),
        "WarmupDecayLR without warmup_max_lr peaks at 0.001 for every learning rate",
        'add "warmup_max_lr" to scheduler.params',
        APPLIES,
        "lr_schedules.py; run",
    ),
    Rule(
        "scheduler.type",
        lambda f: (
            f.get("scheduler.type") in schema()["torch_schedulers"]
            and (f.stage > 0 or f.dtype != "fp32")
        ),
        "requires a PyTorch optimizer, but DeepSpeed wraps the optimizer under ZeRO, bf16 and fp16",
        f"set it to one of {', '.join(schema()['schedulers'])}, or create the schedule in the"
        " script",
        FAILS,
        "engine.py, _scheduler_from_config; run",
        "a PyTorch schedule + ZeRO-1, 2, 3, bf16 or fp16",
    ),
    # parallelism
    _table_only_rule(
        "pipeline + ZeRO-0, 1",
        APPLIES,
        "the losses are the same as without a pipeline",
        "",
        "pipe/engine.py:76; run",
    ),
    Rule(
        f"{ZERO_BLOCK}.stage",
        lambda f: f.degree("pp") > 1 and f.stage > 1,
        "ZeRO stages 2 and 3 cannot be combined with pipeline parallelism",
        "use --pp 1, or a JSON with stage 0 or 1",
        FAILS,
        "pipe/engine.py:76; run; DeepSpeed#823 #1629 #4164",
        "pipeline + ZeRO-2, 3",
    ),
    Rule(
        f"{OPTIMIZER_OFFLOAD_BLOCK}.device",
        lambda f: f.degree("pp") > 1 and f.optimizer_offload == "nvme",
        "NVMe offload cannot be combined with pipeline parallelism",
        "use --pp 1",
        REPLACES,
        "zero/stage_1_and_2.py:220",
        "pipeline + offload to NVMe",
    ),
    Rule(
        "managed_gradient_accumulation",
        lambda f: (
            f.get("managed_gradient_accumulation") is False
            and (f.degree("pp") > 1 or f.get("compile.deepcompile"))
        ),
        "false cannot be combined with pipeline parallelism or DeepCompile",
        "set it to true, or delete it",
        FAILS,
        "engine.py:2033",
        "pipeline or DeepCompile + managed_gradient_accumulation false",
    ),
    _table_only_rule(
        "pipeline + an mpu of the script",
        FAILS,
        "mpu must be None, because PipelineModule creates its own grid",
        "omit mpu",
        "deepspeed/__init__.py",
    ),
    _table_only_rule(
        "pipeline + coalesce_grad_reduction",
        FAILS,
        "a pipeline reduces its gradients itself",
        "do not call it",
        "engine.py:3261",
    ),
    _table_only_rule(
        "pipeline + Megatron-style tensor-parallel layers",
        APPLIES,
        "the script must use PipeModelDataParallelTopology(pp, mp, dp)",
        "",
        "pipe/topology.py:244; run",
    ),
    Rule(
        "tensor_parallel.autotp_size",
        lambda f: f.stock and f.get("tensor_parallel.autotp_size", 1) > 1 and f.degree("pp") > 1,
        "AutoTP cannot be combined with a pipeline, because it lays out (dp, tp) over all ranks and"
        " overwrites mpu",
        "set it to 1, or use --pp 1. The recipes have their own tensor-parallel layers",
        FAILS,
        "engine.py, _configure_tensor_parallel_states; run",
        "pipeline + AutoTP",
    ),
    _table_only_rule(
        "AutoTP + ZeRO-0, 1, 2, 3",
        APPLIES,
        "the losses agree within 1e-6, although the AutoTP tutorial still lists only 0, 1 and 2",
        "",
        "run",
    ),
    _table_only_rule(
        "AutoTP + a data loader by global rank",
        FAILS,
        "all ranks of a tensor group must receive the same batch, which the first forward pass"
        " checks",
        "shard the sampler by data-parallel rank",
        "engine.py:994; DeepSpeed#7199",
    ),
    _table_only_rule(
        "AutoTP + tied output layer",
        APPLIES,
        "both layers stay unsharded on every rank and save no memory",
        "untie them",
        "docs, autotp-training",
    ),
    _table_only_rule(
        "AutoTP degree above the key-value heads",
        APPLIES,
        "DeepSpeed warns, and the surplus ranks stay idle",
        "lower the degree",
        "docs, autotp-training",
    ),
    _table_only_rule(
        "AutoTP + transformers 5 weight conversions (fused experts) under ZeRO-3",
        FAILS,
        "transformers raises NotImplementedError while loading",
        "load at ZeRO-0, 1 or 2",
        "transformers, integrations/deepspeed.py",
    ),
    _table_only_rule(
        "AutoTP universal checkpoint + another tensor-parallel degree",
        FAILS,
        "not every DeepSpeed version supports this",
        "load it at the same degree, or convert it to the Hugging Face format first",
        "DeepSpeed#8474",
    ),
    _table_only_rule(
        "AutoEP + ZeRO-0, 1, 2",
        APPLIES,
        "the losses agree with the dense run within 1e-6",
        "",
        "run",
    ),
    Rule(
        "expert_parallel.autoep_size",
        lambda f: (
            f.stock
            and f.degree("ep") > 1
            and f.stage == 3
            and (
                f.degree("tp") > 1
                or f.degree("sp") > 1
                or f.get(f"{ZERO_BLOCK}.zero_hpz_partition_size", 1) > 1
                or f.get(f"{ZERO_BLOCK}.zero_quantized_gradients")
            )
        ),
        "with ZeRO stage 3 cannot be combined with AutoTP, sequence parallelism, hpZ or quantised"
        " gradients",
        "use ZeRO stage 0, 1 or 2, or remove the other feature",
        FAILS,
        "engine.py:2220",
        "AutoEP at ZeRO-3 + AutoTP, sequence parallelism, hpZ or quantised gradients",
    ),
    Rule(
        "expert_parallel.autoep_size",
        lambda f: (
            f.stock
            and f.degree("ep") > 1
            and f.degree("tp") > 1
            and (
                f.degree("pp") > 1
                or f.degree("sp") > 1
                or f.optimizer_offload != "none"
                or f.param_offload != "none"
                or f.get("compile.deepcompile")
            )
        ),
        "AutoEP with AutoTP cannot be combined with a pipeline, sequence parallelism, offload or"
        " DeepCompile",
        "remove the other feature, or set tensor_parallel.autotp_size to 1",
        FAILS,
        "module_inject/auto_ep_folding.py",
        "AutoEP + AutoTP + pipeline, sequence parallelism, offload or DeepCompile",
    ),
    Rule(
        "expert_parallel.expert_tensor_parallel_size",
        lambda f: f.get("expert_parallel.expert_tensor_parallel_size") > 1,
        "must be 1, because DeepSpeed does not split experts by tensor parallelism yet",
        "set it to 1",
        FAILS,
        "module_inject/auto_ep_folding.py",
    ),
    _table_only_rule(
        "deepspeed.moe.MoE + ZeRO-3",
        FAILS,
        "stage 3 has no placement for the experts of this layer",
        "use ZeRO-1 or 2, or AutoEP",
        "engine.py:2215",
    ),
    _table_only_rule(
        "ZeRO-3 + a mixture-of-experts model without leaf modules",
        HANGS,
        "an expert without tokens gathers no weights, and the other ranks wait for it",
        'name the expert block in "zero_optimization.leaf_module", or call set_z3_leaf_modules',
        "DeepSpeed#7461 #4808",
    ),
    _table_only_rule(
        "Ulysses sequence parallelism",
        APPLIES,
        "attention heads and row length must be divisible by the degree, and every batch requires"
        " position_ids",
        "reduce sequence_parallel_size and use UlyssesSPDataLoaderAdapter",
        "sequence_parallel/ulysses_sp.py",
    ),
    Rule(
        "expert_parallel.enabled",
        lambda f: f.get("expert_parallel.enabled") and f.get("expert_parallel.autoep_size") is None,
        "changes nothing without autoep_size, because the degree is then 1",
        'add "autoep_size"',
        APPLIES,
        "module_inject/auto_ep_config.py",
    ),
    Rule(
        "compile.deepcompile",
        lambda f: f.get("compile.deepcompile") and f.stage == 0,
        "DeepCompile requires ZeRO stage 1, 2 or 3",
        "set it to false",
        IGNORES,
        "engine.py, is_deepcompile_enabled",
        "DeepCompile + ZeRO-0",
    ),
    Rule(
        "compile.deepcompile",
        lambda f: f.get("compile.deepcompile") and f.degree("pp") > 1,
        "DeepCompile cannot be combined with pipeline parallelism",
        "set it to false, or use --pp 1",
        FAILS,
        "engine.py:5902",
        "DeepCompile + pipeline",
    ),
    Rule(
        "compile.passes",
        lambda f: "autotp" in (passes := f.get("compile.passes")) and len(set(passes)) > 1,
        "the autotp pass cannot be combined with another pass",
        "keep only autotp, or remove autotp",
        FAILS,
        "engine.py:5843",
        "DeepCompile's autotp pass + autosp or a ZeRO pass",
    ),
    # checkpoints
    _table_only_rule(
        "another number of ranks on resume",
        FAILS,
        "a ZeRO checkpoint holds one shard for each rank",
        "run ds_to_universal --inject_missing_state, then set checkpoint.load_universal",
        "engine.py:4749; run",
    ),
    _table_only_rule(
        "DataStates checkpoints + ZeRO-2, 3 or universal checkpoints",
        IGNORES,
        "DataStates was tested only with ZeRO-1",
        "use ZeRO-1",
        "docs, datastates",
    ),
    _table_only_rule(
        "AutoEP at ZeRO-3 + zero_to_fp32",
        FAILS,
        "zero_to_fp32 cannot merge the shards of experts",
        "export through Hugging Face",
        "docs, universal-checkpointing",
    ),
    # keys that DeepSpeed reads without any effect
    _unused_key_rule(
        f"{ZERO_BLOCK}.allgather_partitions",
        "DeepSpeed 0.19.8 reads this key and ignores it",
        "delete it",
        "engine.py:1745, which nothing calls; run",
    ),
    _unused_key_rule(
        "vocabulary_size",
        "DeepSpeed warns about this key and ignores it",
        "delete it",
        "config.py:717; run",
    ),
    _unused_key_rule(
        "disable_allgather",
        "DeepSpeed 0.19.8 reads this key and ignores it",
        "delete it",
        "config.py:491; run",
    ),
)

RECIPES_TEXT = "the recipes"

# Keys that work in a script that leaves more to DeepSpeed. In a recipe these keys have no effect or
# a wrong effect.
RECIPE_RULES: tuple[Rule, ...] = (
    Rule(
        "zero_allow_untested_optimizer",
        lambda f: (
            f.stage > 0
            and not _optimizer_spec(f).tested
            and f.get("zero_allow_untested_optimizer") is False
        ),
        "forbids this optimizer under ZeRO, although ZeRO does not change its results",
        "delete the key",
        FAILS,
        "",
    ),
    *(
        Rule(
            "optimizer.type",
            lambda f, name=name: f.optimizer == name,
            facts.unsupported_reason,
            "use AdamW",
            APPLIES,
            "",
        )
        for name, facts in OPTIMIZERS.items()
        if facts.unsupported_reason
    ),
    *(
        _op_option_rule(key, name, why)
        for key, name, why in (
            (
                "max_coeff",
                "Lamb",
                (
                    "clamps the trust ratio in DeepSpeed's LAMB, but a recipe's LAMB follows the"
                    " paper and does not clamp"
                ),
            ),
            (
                "min_coeff",
                "Lamb",
                (
                    "clamps the trust ratio in DeepSpeed's LAMB, but a recipe's LAMB follows the"
                    " paper and does not clamp"
                ),
            ),
            (
                "eps_inside_sqrt",
                "Lamb",
                (
                    "is an option of DeepSpeed's LAMB, but a recipe's LAMB follows the paper and"
                    " adds eps outside the root"
                ),
            ),
            (
                "set_grad_none",
                "Lion",
                (
                    "is an option of DeepSpeed's CUDA Lion, but a recipe's Lion leaves gradients to"
                    " the engine"
                ),
            ),
            (
                "fused",
                "Adagrad",
                (
                    "is an option of torch's Adagrad, which DeepSpeed recreates without its groups,"
                    " and a recipe's Adagrad has no fused step"
                ),
            ),
            (
                "foreach",
                "Adafactor",
                (
                    "is an option of torch's Adafactor, but a recipe's Adafactor updates a part of"
                    " one tensor at a time"
                ),
            ),
            (
                "differentiable",
                "Adagrad",
                "records the step for a second gradient, which model weights do not need",
            ),
            (
                "muon_lr",
                "Muon",
                (
                    "is an option of DeepSpeed's Muon, but a recipe's Muon has one rate, which"
                    " lr_scale changes by name"
                ),
            ),
            (
                "adam_lr",
                "Muon",
                (
                    "is an option of DeepSpeed's Muon, but a recipe's Muon has one rate, which"
                    " lr_scale changes by name"
                ),
            ),
            *(
                (key, "Muon", "is an option of DeepSpeed's Muon, but a recipe uses torch's Muon")
                for key in ("torch_adam", "ns_method", "per_head_muon", "foreach")
            ),
        )
    ),
    *(
        Rule(
            f"optimizer.params.{key}",
            lambda f, key=key: (
                _is_recipe_optimizer(f, "Muon") and f.get(f"optimizer.params.{key}") is False
            ),
            "is an option of DeepSpeed's Muon, but a recipe's Muon decays weights as AdamW does and"
            " keeps its states in fp32",
            "delete it",
            APPLIES,
            "",
        )
        for key in ("adam_w_mode", "fp32_optimizer_states")
    ),
    *(
        Rule(
            f"{ZERO_BLOCK}.{key}",
            lambda f, key=key: (
                f.get(f"{ZERO_BLOCK}.{key}")
                and f.stage > 0
                and _optimizer_spec(f).acts_on == TENSOR
                and _optimizer_spec(f).is_own_class
            ),
            "moves tensor boundaries inside ZeRO's flat partitions, but this optimizer sums over"
            " each tensor",
            "delete it",
            APPLIES,
            "",
        )
        for key in ("round_robin_gradients", "parameter_alignment")
    ),
    Rule(
        "optimizer.type",
        lambda f: f.stage > 0 and _optimizer_spec(f).acts_on == GRADIENT,
        "requires each rank's gradients before they are reduced, but ZeRO reduces gradients while"
        " it partitions them",
        "use a JSON with stage 0, or AdamW",
        APPLIES,
        "",
    ),
    *(
        Rule(
            "optimizer.type",
            lambda f, axis=axis: f.degree(axis) > 1 and _optimizer_spec(f).acts_on == GRADIENT,
            "requires data-parallel ranks that each hold the full model",
            f"use --{axis} 1, or AdamW",
            APPLIES,
            "",
        )
        for axis in ("tp", "pp", "sp", "ep")
    ),
    Rule(
        "fp16.enabled",
        lambda f: f.dtype == "fp16" and _optimizer_spec(f).acts_on == GRADIENT,
        "fp16 skips a step after an overflow, but with this optimizer the gradients differ between"
        " ranks",
        'set "fp16": {"enabled": false}, "bf16": {"enabled": true}',
        APPLIES,
        "",
    ),
    Rule(
        "torch_autocast.dtype",
        lambda f: _autocasts_to(f, "fp16") and f.stage == 0,
        f"with fp16 autocast {RECIPES_TEXT} would clip and report scaled gradients, and checkpoints"
        " would lack the loss scale",
        'set it to "bfloat16", or set "torch_autocast.enabled" to false',
        APPLIES,
        "",
    ),
    Rule(
        "gradient_allreduce_op",
        lambda f: (
            f.get("gradient_allreduce_op").lower() == "sum"
            and _optimizer_spec(f).acts_on == GRADIENT
        ),
        "this optimizer requires the mean over the ranks",
        'set it to "mean", or delete it',
        APPLIES,
        "",
    ),
    Rule(
        "optimizer.type",
        lambda f: (
            f.degree("ep") > 1
            and _optimizer_spec(f).acts_on == TENSOR
            and _optimizer_spec(f).is_own_class
        ),
        "requires sums over full tensors, but DeepSpeed splits the weights of sharded experts into"
        " other tensors",
        "use --ep 1, or AdamW",
        APPLIES,
        "",
    ),
    Rule(
        "optimizer.params.bias_correction",
        _has_flat_masters,
        "is an option of DeepSpeed's own Adam, but without ZeRO a recipe requires torch's Adam,"
        " which always corrects the bias",
        "delete it",
        FAILS,
        "",
    ),
    Rule(
        "optimizer.type",
        _has_flat_masters,
        "DeepSpeed's own Adam keeps the master weights of a group in one tensor here, which"
        " checkpoints cannot store",
        'add "optimizer.params.torch_adam": true',
        APPLIES,
        "",
    ),
    Rule(
        "optimizer.type",
        lambda f: (
            f.optimizer_offload == "nvme"
            and f.optimizer is not None
            and (
                OPTIMIZERS[f.optimizer].family not in SWAPPABLE_FAMILIES
                or f.get("optimizer.params.amsgrad")
            )
        ),
        "NVMe offload requires Adam, because the swap files here hold only Adam's two moments",
        f'use AdamW, or "{OPTIMIZER_OFFLOAD_BLOCK}.device": "cpu"',
        APPLIES,
        "",
    ),
    Rule(
        f"{ZERO_BLOCK}.zero_hpz_partition_size",
        lambda f: (
            _hpz_partition_size(f) > 1
            and (f.optimizer_offload != "none" or f.param_offload != "none")
        ),
        "was never tested with offload in a recipe",
        "delete it, or delete the offload blocks",
        APPLIES,
        "",
    ),
    _unused_key_rule(
        "data_efficiency",
        f"{RECIPES_TEXT} stream their own data and ignore this setting",
        "delete the block",
        outcome=APPLIES,
    ),
    _unused_key_rule(
        "dataloader_drop_last",
        f"{RECIPES_TEXT} stream their own data and ignore this setting",
        "delete it",
        outcome=APPLIES,
    ),
    _unused_key_rule(
        "activation_checkpointing",
        f"{RECIPES_TEXT} recompute activations with the model's own method and ignore this block",
        "delete the block and use --activation_checkpointing",
        outcome=APPLIES,
    ),
    Rule(
        "scheduler.type",
        lambda f: f.get("scheduler.type") in schema()["torch_schedulers"],
        f"{RECIPES_TEXT} accept only DeepSpeed's schedules",
        f"set it to one of {', '.join(schema()['schedulers'])}, or delete the block and use"
        " --schedule",
        APPLIES,
        "",
    ),
    _unused_key_rule(
        "wandb",
        f"{RECIPES_TEXT} record their own W&B run, and this block would start a second run",
        "delete the block and use --wandb --project NAME",
        outcome=APPLIES,
    ),
    _unused_key_rule(
        "hybrid_engine",
        "is used only for generation during reinforcement learning",
        "delete the block",
        outcome=APPLIES,
    ),
    _unused_key_rule(
        "autotuning",
        "is read only by `deepspeed --autotuning`, which does not start recipes",
        "delete the block",
    ),
    _unused_key_rule("weight_quantization", "is used only for inference", "delete the block"),
    _unused_key_rule(
        "datastates_ckpt",
        f"{RECIPES_TEXT} write their own checkpoints and ignore this block",
        "delete the block",
        outcome=APPLIES,
    ),
    _unused_key_rule(
        "use_data_before_expert_parallelism",
        f"{RECIPES_TEXT} lay out the ranks themselves",
        "delete it",
        outcome=APPLIES,
    ),
    _unused_key_rule(
        "seq_parallel_communication_data_type",
        f"{RECIPES_TEXT} also reduce gradients over sequence ranks in communication_data_type",
        "delete it",
        outcome=APPLIES,
    ),
    Rule(
        "managed_gradient_accumulation",
        lambda f: not f.get("managed_gradient_accumulation"),
        "must be true, because the training loop lets DeepSpeed count micro-batches",
        "set it to true, or delete it",
        APPLIES,
        "",
    ),
    Rule(
        "gradient_allreduce_op",
        lambda f: f.get("gradient_allreduce_op").lower() != "mean",
        "must be mean, because the loss is averaged over tokens",
        'set it to "mean", or delete it',
        APPLIES,
        "",
    ),
    Rule(
        f"{ZERO_BLOCK}.compute_grad_norm",
        lambda f: f.get(f"{ZERO_BLOCK}.compute_grad_norm") is False,
        "must be true, because grad_norm is logged at every step",
        "set it to true, or delete it",
        APPLIES,
        "",
    ),
)

# Keys that a recipe honours but DeepSpeed alone ignores.
STOCK_RULES: tuple[Rule, ...] = (
    _package_rule(
        "datastates_ckpt",
        "datastates",
        lambda f: f.get("datastates_ckpt") is not False,
        "delete the block",
        "datastates_checkpoint_engine.py:21; run",
    ),
    Rule(
        "weight_quantization",
        lambda f: f.get("weight_quantization") and f.stage != 3,
        "is read only by zero.Init, which requires ZeRO stage 3",
        "delete the block",
        IGNORES,
        "zero/partition_parameters.py:355; run",
    ),
    Rule(
        "activation_checkpointing.contiguous_memory_optimization",
        lambda f: (
            f.get("activation_checkpointing.contiguous_memory_optimization")
            and not f.get("activation_checkpointing.partition_activations")
        ),
        "requires partition_activations if the script calls deepspeed.checkpointing.configure",
        'set "partition_activations": true, or "contiguous_memory_optimization": false',
        FAILS,
        "activation_checkpointing/checkpointing.py, configure; run",
    ),
    Rule(
        "activation_checkpointing.contiguous_memory_optimization",
        lambda f: (
            f.get("activation_checkpointing.contiguous_memory_optimization")
            and f.get("activation_checkpointing.number_checkpoints") is None
        ),
        "requires number_checkpoints if the script calls deepspeed.checkpointing.configure",
        "set it to false, or set number_checkpoints to the model's number of layers",
        FAILS,
        "activation_checkpointing/checkpointing.py, configure; run",
    ),
    *(
        _unused_key_rule(
            f"pipeline.{key}",
            "is decided by the script's PipelineModule, so DeepSpeed reads this key and ignores it",
            "delete it",
            "pipe/engine.py:135; run",
        )
        for key in ("stages", "partition", "seed_layers")
    ),
    *(
        Rule(
            f"optimizer.params.{key}",
            lambda f: f.optimizer == "Muon",
            "is an option of a recipe's Muon, and DeepSpeed's Muon does not read it",
            "delete it",
            IGNORES,
            "engine.py, _muon_param_groups",
        )
        for key in ("nesterov", "adjust_lr_fn", "ns_coefficients", "ns_steps", "ns_eps", "ns_dtype")
    ),
    *(
        Rule(
            "optimizer.type",
            lambda f, name=name: f.optimizer == name,
            "is implemented only by recipes, and DeepSpeed does not have it",
            "use AdamW, or a recipe",
            FAILS,
            "",
        )
        for name, facts in OPTIMIZERS.items()
        if facts.params is not None and name != "OneBitAdam"  # which DeepSpeed has removed
    ),
)

# Block -> the keys that a recipe honours. The recipe controls the rest of the block itself.
RECIPE_HONOURS = {
    "tensor_parallel": {"autotp_size"},
    "expert_parallel": {"autoep_size", "enabled"},
    "pipeline": {"stages"},
}


def _uses_reduce_scatter(context: RuleContext) -> bool:
    """Return True if DeepSpeed averages gradients by reduce-scatter.

    Reduce-scatter does not support any other scaling.
    """
    return context.stage >= 2 and context.get(f"{ZERO_BLOCK}.reduce_scatter", True)
