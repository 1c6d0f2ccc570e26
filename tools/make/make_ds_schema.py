"""Write recipes/recipekit/dslint/schema.json: every key that the installed DeepSpeed reads from its
JSON, with type, default and range.

    # rewrite the file after a change of the DeepSpeed pin
    python tools/make/make_ds_schema.py
    # exit 1 if the file differs from what the installed DeepSpeed reads
    python tools/make/make_ds_schema.py --check

Blocks that are pydantic models are read from their fields. The keys of all other blocks are found
with a dict that records which keys `DeepSpeedConfig` reads from it. Neither way shows the type
behind a default of None, or the names behind a string. Such facts are declared below. The script
stops at a key that is neither found nor declared.
"""

import argparse
import contextlib
import difflib
import inspect
import json
import os
import re
import sys
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

# The defaults must not depend on the machine that runs this program.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import config as ds
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

SCHEMA = Path(__file__).resolve().parents[2] / "recipes" / "recipekit" / "dslint" / "schema.json"

# {"type": [...], "default", "min", "above", "max", "below", "enum", "any_case", "items", "keys",
# "required"} or {"use_instead"}
Node = dict[str, Any]

MODELS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "csv_monitor": CSVConfig,
    "comet": CometConfig,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
    "tensor_parallel": TPTrainingConfig,
    "hybrid_engine": ds.HybridEngineConfig,
    "weight_quantization": WeightQuantConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
}

DTYPES = [name for dtype in ds.DtypeEnum for name in vars(dtype)["_all_values"][1:]]
FLOAT_DTYPES = [name for name in DTYPES if "int8" not in name]
COUNT = {"type": ["integer"], "min": 1}
PATH = {"type": ["string", "null"]}

# Facts that the defaults do not show. DeepSpeed must read each path.
DECLARED: dict[str, Node] = {
    "train_batch_size": COUNT,
    "train_micro_batch_size_per_gpu": COUNT,
    "gradient_accumulation_steps": COUNT,
    "steps_per_print": {"type": ["integer", "null"], "min": 1},
    "gradient_clipping": {"min": 0},
    "gradient_predivide_factor": {"above": 0},
    "gradient_allreduce_op": {"enum": ["mean", "sum"], "any_case": True},
    "communication_data_type": {
        "type": ["string", "null"],
        "enum": ["fp16", "bf16", "fp32"],
        "any_case": True,
    },
    "seq_parallel_communication_data_type": {"enum": ["fp16", "bf16", "fp32"], "any_case": True},
    "sequence_parallel_size": COUNT,
    "vocabulary_size": COUNT,
    "log_level": {
        "type": ["string", "null"],
        "enum": ["debug", "info", "warning", "error", "critical"],
        "any_case": True,
    },
    "datastates_ckpt": {"type": ["object", "boolean"]},
    "optimizer.type": {"type": ["string"]},
    "optimizer.legacy_fusion": {"type": ["boolean"], "default": False},
    "optimizer.params": {"type": ["object"]},
    "scheduler.type": {"type": ["string"]},
    "scheduler.params": {"type": ["object"]},
    "torch_autocast.dtype": {"type": ["string"], "enum": FLOAT_DTYPES},
    "torch_autocast.lower_precision_safe_modules": {"type": ["array"], "items": "string"},
    "data_types.grad_accum_dtype": {"type": ["string", "null"], "enum": FLOAT_DTYPES},
    "data_types.param_dtype": {"type": ["string", "null"], "enum": FLOAT_DTYPES},
    "data_types.buffer_dtype": {"type": ["string", "null"], "enum": FLOAT_DTYPES},
    "data_types.keep_in_fp32_modules": {
        "type": ["string", "array"],
        "enum": ["auto"],
        "items": "string",
    },
    "activation_checkpointing.number_checkpoints": {"type": ["integer", "null"], "min": 1},
    "flops_profiler.output_file": PATH,
    "flops_profiler.profile_step": {"min": 1},
    "flops_profiler.top_modules": {"min": 1},
    "fp16.loss_scale": {"min": 0},
    "fp16.loss_scale_window": {"min": 1},
    "fp16.min_loss_scale": {"min": 1},
    "fp16.hysteresis": {"min": 1},
    "fp16.initial_scale_power": {"min": 0},
    "tensor_parallel.autotp_size": {"min": 0},
    "comms_logger.prof_ops": {"items": "string"},
    "aio.block_size": {"min": 1},
    "aio.queue_depth": {"min": 1},
    "aio.intra_op_parallelism": {"min": 1},
    "checkpoint.tag_validation": {"enum": ["Warn", "Ignore", "Fail"], "any_case": True},
    "checkpoint.writer.type": {"enum": ["mock", "python", "fast"], "any_case": True},
    "checkpoint.writer.data_parallel": {
        "type": ["string", "null"],
        "enum": ["replica", "socket", "machine"],
        "any_case": True,
    },
    "autotuning.metric_path": PATH,
    "autotuning.model_info_path": PATH,
    "autotuning.arg_mappings": {"type": ["object", "null"]},
    "autotuning.max_train_batch_size": {"type": ["integer", "null"], "min": 1},
    "autotuning.metric": {"enum": ["latency", "throughput", "flops"]},
    "autotuning.tuner_type": {"enum": ["gridsearch", "random", "model_based"]},
    "autotuning.model_info.num_params": {"type": ["integer", "null"], "min": 1},
    "autotuning.model_info.hidden_size": {"type": ["integer", "null"], "min": 1},
    "autotuning.model_info.num_layers": {"type": ["integer", "null"], "min": 1},
    "autotuning.model_info.profile": {"type": ["boolean"], "default": False},
    "data_efficiency.data_sampling.curriculum_learning": {"type": ["object"]},
    "data_efficiency.data_sampling.dynamic_batching": {"type": ["object"]},
    "data_efficiency.data_routing.random_ltd": {"type": ["object"]},
    "expert_parallel.autoep_size": {"min": 1},
    "expert_parallel.expert_tensor_parallel_size": {"min": 1},
    "expert_parallel.route_norm": {"type": ["boolean", "null"]},
    "expert_parallel.num_expert_groups": {"type": ["integer", "null"], "min": 1},
    "expert_parallel.num_limited_groups": {"type": ["integer", "null"], "min": 1},
    "expert_parallel.top_k": {"type": ["string", "integer"], "enum": ["auto"], "min": 1},
    "expert_parallel.routed_scaling_factor": {"type": ["string", "number"], "enum": ["auto"]},
    "expert_parallel.load_balance_coeff": {"type": ["null"]},
    "expert_parallel.has_shared_experts": {"type": ["boolean", "null"]},
    "expert_parallel.expert_w3": PATH,
    "zero_optimization.zenflow.select_strategy": {"enum": ["auto", "step", "epoch"]},
    "zero_optimization.zenflow.select_interval": {"enum": ["auto"], "min": 1},
    "zero_optimization.zenflow.update_interval": {"enum": ["auto"], "min": 1},
    "zero_optimization.zenflow.full_warm_up_rounds": {"min": 0},
    "zero_optimization.legacy_stage1": {"enum": [False]},
    "pipeline.stages": {"type": ["integer"], "min": 1},
    "pipeline.use_reentrant": {"type": ["boolean"], "default": True},
    "pipeline.activation_checkpoint_interval": {"min": 0},
}
for _name in (
    "preset_model",
    "moe_layer_pattern",
    "expert_pattern",
    "router_pattern",
    "expert_w1",
    "expert_w2",
    "num_experts_attr",
    "top_k_attr",
):
    DECLARED[f"expert_parallel.{_name}"] = PATH
for _name in ("shared_experts_pattern", "shared_experts_gate_pattern", "expert_activation"):
    DECLARED[f"expert_parallel.{_name}"] = PATH

SECOND_SPELLING = {"bfloat16": "bf16", "allgather_size": "zero_optimization.allgather_bucket_size"}

# DeepSpeed reads some keys of these blocks only if the block contains these values.
SEEDS: dict[str, dict[str, Any]] = {
    "optimizer": {"type": "AdamW"},
    "scheduler": {"type": "WarmupLR"},
    "expert_parallel": {"enabled": False},
    "torch_autocast": {"dtype": "bf16", "lower_precision_safe_modules": []},
}


class Asked(dict):
    """A dict that records each key that is read from it, with the default of the call."""

    def __init__(self, values: dict[str, Any]):
        super().__init__(values)
        self.asked: dict[str, Any] = {}

    def _note(self, key: Any, default: Any = None) -> None:
        if isinstance(key, str) and self.asked.get(key) is None:
            self.asked[key] = default

    def get(self, key: Any, default: Any = None) -> Any:
        self._note(key, default)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> "Asked":
        return self


def asked_keys(path: list[str]) -> dict[str, Any]:
    """Return the keys that `DeepSpeedConfig` reads in the block at `path`, with their defaults."""
    block = Asked(SEEDS.get(".".join(path), {}))
    config: dict[str, Any] = block
    for depth in range(len(path) - 1, -1, -1):
        config = {**SEEDS.get(".".join(path[:depth]), {}), path[depth]: config}
    config.setdefault("train_batch_size", 1)
    with contextlib.suppress(Exception):  # a value of a wrong type, inserted on purpose
        ds.DeepSpeedConfig(config)
    return block.asked


def type_of(default: Any) -> list[str]:
    """Return a default value's JSON type; [] for None."""
    for python, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        ((list, tuple), "array"),
        (dict, "object"),
    ):
        if isinstance(default, python):
            return [name]
    return []


def recorded(path: list[str]) -> Node:
    """Build the node of a block that is not a pydantic model, from the keys that DeepSpeed reads.

    Inner blocks are included.
    """
    keys: dict[str, Node] = {}
    for key, default in sorted(asked_keys(path).items()):
        here = [*path, key]
        dotted = ".".join(here)
        if dotted in ds._REMOVED_TOP_LEVEL_CONFIG_KEYS or dotted in SECOND_SPELLING:
            continue
        if dotted in MODELS:
            keys[key] = model(MODELS[dotted], dotted)
        elif dotted == "pipeline":
            keys[key] = pipeline()
        elif dotted in DECLARED or type_of(default) not in ([], ["object"]):
            node: Node = {"type": type_of(default)}
            if default is not None:
                node["default"] = default
            keys[key] = node | DECLARED.get(dotted, {})
        else:
            keys[key] = recorded(here)
            if not keys[key]["keys"]:
                raise SystemExit(
                    f"{dotted}: DeepSpeed reads this key with no default to tell its type. Add it"
                    f" to DECLARED in {__file__}"
                )
    return {"type": ["object"], "keys": keys}


def pipeline() -> Node:
    """Build the node of the pipeline block.

    DeepSpeed copies all keys of that block over its defaults.
    """
    keys: dict[str, Node] = {
        key: {"type": type_of(value), "default": value}
        for key, value in ds.get_pipeline_config({}).items()
    }
    keys["stages"] = {}  # its default "auto" has another type
    keys["use_reentrant"] = {}  # only the pipeline engine reads it
    return {
        "type": ["object"],
        "keys": {
            key: node | DECLARED.get(f"pipeline.{key}", {}) for key, node in sorted(keys.items())
        },
    }


def annotated(annotation: Any, dotted: str) -> Node | None:
    """Build the node for a pydantic field's annotation.

    Return None if no JSON value is valid for the field, as for process groups and torch dtypes.
    """
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return union(inner, dotted)
    if origin is typing.Literal:
        return {"type": type_of(inner[0]), "enum": list(inner)}
    if origin in (list, tuple) or annotation in (list, tuple):
        node: Node = {"type": ["array"]}
        item = annotated(inner[0], dotted) if inner and inner[0] is not Any else None
        if item:
            node["items"] = item["type"][0]
            if "enum" in item:
                node["items_enum"] = item["enum"]
        return node
    if origin is dict or annotation is dict:
        return {"type": ["object"]}
    return of_class(annotation, dotted) if isinstance(annotation, type) else None


def union(parts: tuple[Any, ...], dotted: str) -> Node | None:
    """Build a union's node from the members that accept a JSON value."""
    nodes = [node for part in parts if part is not type(None) and (node := annotated(part, dotted))]
    if not nodes:
        return None
    node = {key: value for part in nodes for key, value in part.items()}
    node["type"] = [name for part in nodes for name in part["type"]]
    if type(None) in parts:
        node["type"] += ["null"]
    return node


def of_class(cls: type, dotted: str) -> Node | None:
    """Build the node for a pydantic block, an enumeration or a plain Python type."""
    if issubclass(cls, BaseModel):
        return model(cls, dotted)
    if issubclass(cls, Enum):
        return {
            "type": ["integer" if issubclass(cls, int) else "string"],
            "enum": [member.value for member in cls],
        }
    for python, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        ((str, Path), "string"),
    ):
        if issubclass(cls, python):
            return {"type": [name]}
    return None


def model(cls: type[BaseModel], dotted: str) -> Node:
    """Build the node of a pydantic block."""
    keys: dict[str, Node] = {}
    for name, field in cls.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        if extra.get("deprecated"):
            keys[name] = deprecated(extra, cls, dotted)
            continue

        key = field.alias or name
        node = annotated(field.annotation, f"{dotted}.{key}")
        if node is None:
            continue
        default = field.get_default(call_default_factory=True)
        default = default.value if isinstance(default, Enum) else default
        if default is not PydanticUndefined and default is not None and "keys" not in node:
            whole = isinstance(default, int) and not isinstance(default, bool)
            node["default"] = int(default) if whole else default
        for bound, word in (("ge", "min"), ("gt", "above"), ("le", "max"), ("lt", "below")):
            node.update(
                (word, getattr(item, bound)) for item in field.metadata if hasattr(item, bound)
            )

        keys[key] = node | DECLARED.get(f"{dotted}.{key}", {})
        if key != name:
            keys[name] = {"use_instead": f"{dotted}.{key}"}
    return {"type": ["object"], "strict": True, "keys": dict(sorted(keys.items()))}


def deprecated(extra: Mapping[str, Any], cls: type[BaseModel], dotted: str) -> Node:
    """Build a deprecated field's node, which names the field to use instead."""
    by_name = {item: other.alias or item for item, other in cls.model_fields.items()}
    parts = str(extra["new_param"]).split(" or ")
    node: Node = {
        "use_instead": " or ".join(f"{dotted}.{by_name.get(part, part)}" for part in parts)
    }
    return node if extra.get("set_new_param", True) else node | {"works": False}


# options of a recipe's Muon (recipekit/optim/muon.py), which DeepSpeed's Muon does not read
OF_RECIPES: dict[str, Node] = {
    "nesterov": {"type": ["boolean"], "default": True},
    "adjust_lr_fn": {
        "type": ["string"],
        "enum": ["original", "match_rms_adamw"],
        "default": "original",
    },
    "ns_coefficients": {"type": ["array"], "items": "number", "length": 3},
    "ns_steps": {"type": ["integer"], "min": 1, "max": 99, "default": 5},
    "ns_eps": {"type": ["number"], "above": 0, "default": 1e-7},
    "ns_dtype": {"type": ["string"], "enum": ["bf16", "fp32"], "default": "bf16"},
}
RANGES: dict[str, Node] = {
    "lr": {"type": ["number"], "min": 0},
    "muon_lr": {"type": ["number"], "min": 0},
    "adam_lr": {"type": ["number"], "min": 0},
    "betas": {"type": ["array"], "items": "number", "length": 2},
    "etas": {"type": ["array"], "items": "number", "length": 2},
    "step_sizes": {"type": ["array"], "items": "number", "length": 2},
    "eps": {"min": 0},
    "weight_decay": {"type": ["number"], "min": 0},
    "momentum": {"type": ["number"], "min": 0},
    "dampening": {"type": ["number"]},
    "rho": {"min": 0, "max": 1},
    "alpha": {"min": 0},
    "momentum_decay": {"min": 0},
    "lr_decay": {"type": ["number"], "min": 0},
    "initial_accumulator_value": {"type": ["number"], "min": 0},
    "foreach": {"type": ["boolean", "null"]},
    "fused": {"type": ["boolean", "null"]},
    "beta2_decay": {"max": 0},
    "d": {"min": 1},
    "ns_method": {"type": ["string"], "enum": ["gram", "standard"], "default": "gram"},
    "per_head_muon": {"type": ["boolean"], "default": False},
    "warmup_type": {"enum": ["log", "linear"]},
    "warmup_num_steps": {"min": 1},
    "total_num_steps": {"type": ["integer"], "min": 1},
    "warmup_min_lr": {"type": ["number", "array"], "items": "number"},
    "warmup_max_lr": {"type": ["number", "array", "null"], "items": "number"},
    "lr_range_test_min_lr": {"type": ["number", "array"], "items": "number"},
    "cycle_min_lr": {"type": ["number", "array"], "items": "number"},
    "cycle_max_lr": {"type": ["number", "array"], "items": "number"},
    "cycle_second_step_size": {"type": ["integer", "null"], "min": 1},
    "cycle_second_stair_count": {"type": ["integer", "null"], "min": 0},
}


def parameters(function: Any, without: str = "") -> dict[str, Node]:
    """Return the JSON keys for an optimizer's or a scheduler's keyword arguments, except those in
    `without`.
    """
    keys: dict[str, Node] = {}
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        if name in without.split():
            continue
        node: Node = {"type": type_of(parameter.default)}
        if parameter.default is parameter.empty:
            node["required"] = True
        elif parameter.default is not None:
            node["default"] = (
                list(parameter.default)
                if isinstance(parameter.default, tuple)
                else parameter.default
            )
        keys[name] = node | RANGES.get(name, {})
        if not keys[name]["type"]:
            raise SystemExit(
                f"{function.__name__}: no type is known for {name}. Add it to RANGES in {__file__}"
            )
    return dict(sorted(keys.items()))


def optimizers() -> dict[str, Node]:
    """Describe how each optimizer's name is compared, and which keys each of its implementations
    accepts.

    DeepSpeed chooses the implementation: `torch` for "torch_adam": true, `cpu` for optimizer
    offload, and `device` otherwise.
    """
    switch = {"type": ["boolean"], "default": False}
    torch_adam = {"torch_adam": switch, **parameters(torch.optim.AdamW)}
    found = own_optimizers(torch_adam)
    for name in found:
        found[name]["any_case"] = True
    for name in ("MuAdam", "MuAdamW", "MuSGD"):
        found[name] = {"any_case": True, "needs_package": "mup"}
    if {name.lower() for name in found} != set(ds.DEEPSPEED_OPTIMIZERS):
        raise SystemExit(
            f"DeepSpeed's optimizers are now {ds.DEEPSPEED_OPTIMIZERS}. Adapt optimizers() in"
            f" {__file__}"
        )

    for name in ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"):
        found[name] = {"torch_name": True, "device": parameters(getattr(torch.optim, name))}
    adafactor = parameters(torch.optim.Adafactor) | {
        "eps": {"type": ["array"], "default": [None, 0.001], "items": "any", "length": 2}
    }
    found["Adafactor"] = {"torch_name": True, "device": adafactor}
    return found


def own_optimizers(torch_adam: dict[str, Node]) -> dict[str, Node]:
    """Describe the optimizers that DeepSpeed implements.

    `torch_adam` contains the keys of torch's AdamW.
    """
    on = {"type": ["boolean"], "default": True}
    switch = {"torch_adam": torch_adam["torch_adam"]}
    adamw = {
        "torch": torch_adam,
        "cpu": switch | parameters(DeepSpeedCPUAdam, without="adamw_mode amsgrad"),
        "device": switch | parameters(FusedAdam, without="adam_w_mode amsgrad"),
    }
    of_adam = ("lr", "betas", "eps", "weight_decay", "torch_adam")
    of_muon = ("muon_lr", "adam_lr", "momentum", "ns_method", "per_head_muon")
    muon = {name: torch_adam[name] for name in of_adam} | {"adam_w_mode": on}
    muon |= {name: RANGES[name] for name in of_muon} | OF_RECIPES
    return {
        "AdamW": adamw,
        "Adam": {chosen: {**keys, "adam_w_mode": on} for chosen, keys in adamw.items()},
        "Adagrad": {
            "cpu": parameters(DeepSpeedCPUAdagrad, without="amsgrad"),
            "device": parameters(torch.optim.Adagrad),
        },
        "Lamb": {"device": parameters(FusedLamb, without="amsgrad max_grad_norm")},
        "Lion": {"cpu": parameters(DeepSpeedCPULion), "device": parameters(FusedLion)},
        "Muon": {
            "torch": {**muon, "foreach": RANGES["foreach"]},
            "cpu": {**muon, "fp32_optimizer_states": on},
            "device": muon,
        },
    }


TORCH_SCHEDULERS = (
    "StepLR MultiStepLR ConstantLR LinearLR ExponentialLR PolynomialLR CosineAnnealingLR"
    " CosineAnnealingWarmRestarts CyclicLR OneCycleLR"
)


def torch_schedulers() -> dict[str, Node]:
    """Return the PyTorch schedulers that accept only JSON values, with their keys."""
    found: dict[str, Node] = {}
    for name in TORCH_SCHEDULERS.split():
        arguments = list(
            inspect.signature(getattr(torch.optim.lr_scheduler, name)).parameters.values()
        )[1:]
        found[name] = {
            argument.name: (
                {"type": ["any"]}
                | ({"required": True} if argument.default is argument.empty else {})
            )
            for argument in arguments
        }
    return found


def schema() -> dict[str, Any]:
    deepspeed.utils.logger.setLevel("ERROR")
    root = recorded([])
    # DeepSpeed reads this key from the caller's dict, before it copies the dict.
    root["keys"]["sequence_parallel_size"] = DECLARED["sequence_parallel_size"] | {"default": 1}
    root["keys"] |= {key: {"removed": True} for key in ds._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    root["keys"] |= {key: {"use_instead": new} for key, new in SECOND_SPELLING.items()}
    root["keys"]["allgather_size"]["works"] = False  # except for "zero_optimization": true
    root["keys"]["zero_optimization"]["keys"] |= {
        key: {"removed": True} for key in ds._REMOVED_ZERO_CONFIG_KEYS
    }
    root["keys"] = dict(sorted(root["keys"].items()))
    schedulers = {
        name: parameters(getattr(lr_schedules, name)) for name in lr_schedules.VALID_LR_SCHEDULES
    }
    found = {
        "deepspeed": deepspeed.__version__.split("+")[0],
        "config": root,
        "optimizers": optimizers(),
    }
    found |= {"schedulers": schedulers, "torch_schedulers": torch_schedulers()}
    stale = [path for path in DECLARED if not reaches(root, path.split("."))]
    if stale:
        raise SystemExit(
            f"DeepSpeed does not read {', '.join(stale)} (any more). Take it out of DECLARED in"
            f" {__file__}"
        )
    return found


def reaches(node: Node, path: list[str]) -> bool:
    for key in path:
        node = node.get("keys", {}).get(key, {})
    return bool(node)


def text() -> str:
    """Return the content of the file."""
    spread = json.dumps(schema(), indent=1)
    return (
        re.sub(
            r"\[[^\[\]{}]*\]|\{[^{}]*\}",
            lambda leaf: re.sub(
                r"(?<=[\[{])\s+|\s+(?=[\]}])", "", re.sub(r"\n\s+", " ", leaf.group())
            ),
            spread,
        )
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help=(
            "Compare the file instead of writing it. The exit code is 1 if the file is out of date."
        ),
    )
    arguments = parser.parse_args()
    new, old = text(), SCHEMA.read_text() if SCHEMA.exists() else ""
    if not arguments.check:
        SCHEMA.write_text(new)
        print(f"wrote {SCHEMA}")
    elif new != old:
        sys.stdout.writelines(
            difflib.unified_diff(
                old.splitlines(True), new.splitlines(True), "committed", "installed DeepSpeed", n=1
            )
        )
        raise SystemExit(1)


if __name__ == "__main__":
    main()
