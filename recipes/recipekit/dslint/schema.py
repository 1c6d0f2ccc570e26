"""Check of single keys against schema.json: which keys DeepSpeed reads, and their valid values."""

import copy
import difflib
import functools
import json
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..spec.errors import APPLIES, FAILS, IGNORES, REPLACES, Problem
from ..spec.optimizer_specs import OPTIMIZERS
from .values import (
    Node,
    check_json_value,
    convert_value,
    example_value,
    fits_node,
    format_json_value,
)

# Keys of the recipes' own optimizers whose "auto" depends on the number of steps.
STEP_KEYS = tuple(
    f"optimizer.params.{key}" for spec in OPTIMIZERS.values() for key in spec.step_percents
)
# Keys that Trainer, accelerate and the recipes all fill. Anywhere else, DeepSpeed silently drops an
# "auto".
AUTO_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
    *STEP_KEYS,
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)


def value_at(config: dict[str, Any], path: str, default: object = None) -> Any:
    """Return the value at a dotted path, or `default` if the configuration lacks the path."""
    value: object = config
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return default
        value = value[key]
    return value


@functools.cache
def schema() -> Node:
    """Return schema.json, extended by the optimizers that only recipes support."""
    read = json.loads((Path(__file__).parent / "schema.json").read_text())
    read["optimizers"] |= {
        name: {"any_case": True, "device": dict(spec.params)}
        for name, spec in OPTIMIZERS.items()
        if spec.params is not None
    }
    return read


def optimizer_name(config: dict[str, Any]) -> str | None:
    """Return the optimizer's name as it is spelled in the schema.

    The result is None if there is no optimizer, or if its name is unknown.
    """
    name = value_at(config, "optimizer.type")
    if not isinstance(name, str):
        return None
    known = schema()["optimizers"]
    return next(
        (
            spelled
            for spelled in known
            if spelled == name
            or (known[spelled].get("any_case") and spelled.lower() == name.lower())
        ),
        None,
    )


def optimizer_params(config: dict[str, Any], name: str | None) -> dict[str, Node]:
    """Return the keys of optimizer.params for the implementation that DeepSpeed will choose.

    `name` is the optimizer's name.
    """
    if name is None:
        return {}
    variants = schema()["optimizers"][name]
    offload = value_at(config, "zero_optimization.offload_optimizer")
    # a block without a device is invalid
    offloaded = (
        isinstance(offload, dict) and offload.get("device", "cpu" if offload else "none") != "none"
    )
    params = value_at(config, "optimizer.params")
    switched_on = (
        [key for key, value in params.items() if value is True]
        if isinstance(params, dict) and "torch_adam" not in params
        else []
    )
    meant = resembles_any(
        "torch_adam", switched_on
    )  # problems caused by a misspelt key are not reported
    chosen = (
        "torch"
        if meant or value_at(config, "optimizer.params.torch_adam") is True
        else "cpu"
        if offloaded
        else "device"
    )
    return variants.get(chosen) or variants.get("device", {})


def takes_number(takes: dict[str, Node], key: str) -> bool:
    """Return True if a recipe's number can be used for `key` in optimizer.params.

    Only a JSON can set Adafactor's eps, because it is a pair. The same applies to betas whose
    length is not two.
    """
    return key in takes and takes[key].get("length", 1) == (2 if key == "betas" else 1)


# names of keys that an older DeepSpeed read and this version does not
RENAMED_KEYS = {"aio.thread_count": "intra_op_parallelism"}

# Keys in optimizer.params that DeepSpeed removes for optimizers that do not use them (engine.py,
# _configure_basic_optimizer).
DROPPED_PARAMS = {"adam_w_mode": ("AdamW",), "fp32_optimizer_states": ("Adam", "AdamW")}

# blocks whose keys DeepSpeed checks only while the block is enabled
LAZILY_CHECKED_BLOCKS = ("autotuning", "data_efficiency", "expert_parallel", "flops_profiler")

# Program -> the further keys that it fills. "" means that there is no program. (transformers 5.22
# integrations/deepspeed.py, accelerate 1.15 accelerator.py and dataclasses.py)
_BOTH = {*AUTO_KEYS, "fp16.enabled", "bf16.enabled"} - {*STEP_KEYS} | {
    f"scheduler.params.{key}"
    for key in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
}
_PLUGIN = {
    f"zero_optimization.offload_{what}.{key}"
    for what in ("optimizer", "param")
    for key in ("device", "nvme_path")
}
FILLED_BY: dict[str, frozenset[str]] = {
    "": frozenset(),
    "trainer": frozenset(_BOTH | {"optimizer.params.betas", "optimizer.params.eps"}),
    "accelerate": frozenset(
        _BOTH
        | _PLUGIN
        | {"zero_optimization.stage", "zero_optimization.stage3_gather_16bit_weights_on_model_save"}
    ),
}


def check_keys(
    config: dict[str, Any], auto_keys: Collection[str] = AUTO_KEYS, stock: bool = False
) -> tuple[list[Problem], dict[str, Any]]:
    """Return the mistakes in single keys, and the configuration without the invalid keys.

    `auto_keys` are the keys that some program fills. Integers written as 5e8 become ints, and a
    value that DeepSpeed would replace with a default becomes that default. With `stock`, words and
    numbers are converted as DeepSpeed converts them.
    """
    root = copy.copy(schema()["config"])
    root["keys"] = copy.deepcopy({key: node for key, node in root["keys"].items() if key in config})
    found = []
    for block in ("optimizer", "scheduler"):
        if isinstance(config.get(block), dict):
            found += _fill_in_params(root["keys"][block], block, config)
    root["keys"] |= {
        key: node for key, node in schema()["config"]["keys"].items() if key not in root["keys"]
    }

    in_blocks, clean = _check_block(root, config, "", auto_keys)
    found += in_blocks
    if stock:
        _convert_values(root, config, clean, found)

    # The type is invalid, so nothing is known about its parameters.
    for block in ("optimizer", "scheduler"):
        if "keys" not in root["keys"][block]["keys"]["params"]:
            clean.get(block, {}).pop("params", None)
    return _with_fixes(found, _fixes_from_config(config)), clean


def _fill_in_params(node: Node, block: str, config: dict[str, Any]) -> list[Problem]:
    """Add the keys of the named optimizer or scheduler to the `node` of its block.

    Return the problems of its name.
    """
    given = config[block].get("type")
    if block == "optimizer":
        names, name = schema()["optimizers"], optimizer_name(config)
    else:
        names = schema()["schedulers"] | schema()["torch_schedulers"]
        name = given if isinstance(given, str) and given in names else None

    if name is None:
        misspelt = resembles_any("type", config[block].keys() - node["keys"].keys())
        if isinstance(given, str) or (given is None and not misspelt):
            return [_unknown_name(block, given, list(names))]
        return []  # a value of the wrong type or a misspelt key is reported elsewhere
    if "needs_package" in names[name]:
        rule = f"requires the package {names[name]['needs_package']}, which is not installed"
        return [Problem(f"{block}.type = {given}", rule, "use AdamW", FAILS)]

    params = node["keys"]["params"]
    params["keys"] = optimizer_params(config, name) if block == "optimizer" else names[name]
    params["of"], params["strict"] = name, True

    needed = [key for key, known in params["keys"].items() if known.get("required")]
    if "params" in config[block] or (block == "optimizer" and not needed):
        return []
    fix = f'add "params" with {", ".join(needed) or "an object"}'
    return [Problem(f"{block}.params = (missing)", f"{name} requires it", fix, FAILS)]


def _with_fixes(problems: list[Problem], fixes: dict[tuple[str, bool], str]) -> list[Problem]:
    """Return the problems, with the fixes that depend on the rest of the file filled in."""
    fixed = []
    for problem in problems:
        place = (problem.where.partition(" = ")[0], problem.where.endswith(' = "auto"'))
        fixed.append(replace(problem, fix=fixes.get(place, problem.fix)))
    return fixed


def precision_of_auto(fp16: object, bf16: object) -> dict[str, bool]:
    """Return the values that replace "auto" in bf16.enabled and fp16.enabled.

    The arguments are the values of fp16.enabled and bf16.enabled. A user who writes "auto" is
    assumed to train in one of these two precisions.
    """
    return {"bf16.enabled": fp16 is not True, "fp16.enabled": bf16 not in (True, "auto")}


def _fixes_from_config(config: dict[str, Any]) -> dict[tuple[str, bool], str]:
    """Return fixes that depend on the rest of the file: (path, True if it is "auto") -> fix."""
    zero, lr = value_at(config, "zero_optimization"), value_at(config, "optimizer.params.lr")
    stage3 = isinstance(zero, dict) and any(
        key.startswith(("stage3_", "offload_param")) for key in zero
    )
    number = isinstance(lr, (int, float))
    meant = precision_of_auto(value_at(config, "fp16.enabled"), value_at(config, "bf16.enabled"))
    fixes = {path: f"set it to {json.dumps(value)}" for path, value in meant.items()}
    fixes |= dict.fromkeys(("optimizer.params.betas", "optimizer.params.eps"), "delete it")
    fixes |= {"zero_optimization.stage": f"set it to {3 if stage3 else 2}"}
    # With these keys, the number of rows in a step is known.
    fixes |= dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "write 1"
    )
    fixes |= {"train_batch_size": "delete it"} if "train_micro_batch_size_per_gpu" in config else {}
    # If this rate is missing, WarmupLR uses the optimizer's rate, but WarmupDecayLR would use
    # 0.001.
    fixes |= {
        "scheduler.params.warmup_max_lr": (
            f"set it to {lr}"
            if number
            else (
                "delete it"
                if value_at(config, "scheduler.type") == "WarmupLR"
                else "set it to 0.001"
            )
        )
    }
    clipping = (
        "delete it"
        if "gradient_clipping" in config
        else (
            'write "gradient_clipping":'
            f" {json.dumps(value_at(config, 'optimizer.params.max_grad_norm'))} instead"
        )
    )
    return {(path, True): fix for path, fix in fixes.items()} | {
        ("optimizer.params.max_grad_norm", False): clipping
    }


def _check_block(
    node: Node, config: dict[str, Any], path: str, auto_keys: Collection[str]
) -> tuple[list[Problem], dict[str, Any]]:
    """Return the problems of a block's keys, and the block without the invalid keys."""
    found: list[Problem] = []
    clean: dict[str, Any] = {}
    off = path in LAZILY_CHECKED_BLOCKS and not config.get("enabled")
    for key, value in config.items():
        here = f"{path}.{key}" if path else key
        known = node["keys"].get(key)
        if known is None:
            found.append(_unknown_key(node, key, value, path))
        elif "removed" in known or "use_instead" in known:
            problem, renamed = _former_key(known, here, value, config)
            found.append(problem)
            clean |= renamed
        elif problem := check_json_value(known, value, here, auto_keys, bool(node.get("strict"))):
            if off and key != "enabled":
                # DeepSpeed reads the value without checking it.
                problem = replace(problem, outcome=APPLIES)
            found.append(problem)
            if problem.outcome == REPLACES and value == "auto" and "default" in known:
                clean[key] = known["default"]
        elif "keys" in known and isinstance(value, dict):
            below, clean[key] = _check_block(known, value, here, auto_keys)
            found += below
        else:
            clean |= _valid_value(known, here, value)
    return [*found, *_missing_keys(node, config, path), *_never_enabled(node, config, path)], clean


def _former_key(
    known: Node, here: str, value: object, config: dict[str, Any]
) -> tuple[Problem, dict[str, Any]]:
    """Return the problem of a removed or renamed key, and the key as which DeepSpeed reads it."""
    where, key = f"{here} = {format_json_value(value)}", here.rpartition(".")[2]
    if "removed" in known:
        rule = f"was removed from DeepSpeed {schema()['deepspeed']}"
        return Problem(where, rule, "delete it", FAILS), {}

    works = known.get("works", True) or (
        key == "allgather_size" and config.get("zero_optimization") is True
    )
    fix, renamed = _fix_of_renamed_key(known["use_instead"], key, value, config)
    outcome = APPLIES if works else IGNORES
    problem = Problem(where, "is an old or alternative name", fix, outcome)
    return problem, renamed if works else {}


def _valid_value(known: Node, here: str, value: object) -> dict[str, Any]:
    """Return the key with a copy of its value, in which an integer written as 5e8 is an int.

    An "auto" that a program fills becomes the default, or {} if the key has no default.
    """
    key, types = here.rpartition(".")[2], known["type"]
    if value == "auto" and here not in AUTO_KEYS and known.get("default") != "auto":
        return {key: known["default"]} if "default" in known else {}
    if isinstance(value, float) and "integer" in types and "number" not in types:
        return {key: int(value)}
    return {key: copy.deepcopy(value)}


def _missing_keys(node: Node, config: dict[str, Any], path: str) -> list[Problem]:
    """Report a block that lacks a key that DeepSpeed requires."""
    rule = f"{node.get('of', path)} requires it"
    return [
        Problem(f"{path}.{key} = (missing)", rule, f'add "{key}": {example_value(known)}', FAILS)
        for key, known in node["keys"].items()
        if known.get("required") and key not in config
    ]


def _never_enabled(node: Node, config: dict[str, Any], path: str) -> list[Problem]:
    """Report a block whose keys DeepSpeed ignores because nothing enables the block."""
    default = node["keys"].get("enabled", {}).get("default")
    if not config or "enabled" in config or default is not False:
        return []
    if resembles_any("enabled", config.keys() - node["keys"].keys()):
        return []  # the misspelt key is the problem
    rule = 'has no "enabled", so DeepSpeed disables the block and ignores its other keys'
    fix = 'add "enabled": true or delete the block'
    return [Problem(f"{path} = {format_json_value(config)}", rule, fix, IGNORES)]


def _convert_values(
    node: Node,
    config: dict[str, Any],
    clean: dict[str, Any],
    problems: list[Problem],
    path: str = "",
) -> None:
    """Convert values of a different type as DeepSpeed does, and add them to `clean`."""
    works = {
        problem.where.partition(" = ")[0] for problem in problems if problem.outcome == APPLIES
    }
    for key, value in config.items():
        known, here = node["keys"].get(key, {}), f"{path}.{key}".lstrip(".")
        if isinstance(value, dict) and isinstance(clean.get(key), dict) and "keys" in known:
            _convert_values(known, value, clean[key], problems, here)
        elif (
            key not in clean
            and here in works
            and "type" in known
            and (meant := convert_value(known, value)) is not None
        ):
            clean[key] = meant


def _fix_of_renamed_key(
    new: str, key: str, value: object, config: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return the fix for an old name, and the key and value after the fix.

    `config` is the block that contains the key.
    """
    name = new.rpartition(".")[2]
    if " or " in new:
        return f"delete it, and write it as pin_memory in {new}", {}
    if name in config:
        return f"delete it. The key {new} is already set", {}
    if key in ("cpu_offload", "cpu_offload_param"):  # a switch became a block
        if not value or value == "false":
            return "delete it", {}
        value = {"device": "cpu"}
    return f'write "{new}": {json.dumps(value)} instead', {name: copy.deepcopy(value)}


def resembles_any(key: str, names: Iterable[str]) -> bool:
    """Return True if one of the names equals the key or is a likely misspelling of it."""
    return bool(difflib.get_close_matches(key, names, 1))


def _unknown_key(node: Node, key: str, value: object, path: str) -> Problem:
    here = f"{path}.{key}" if path else key
    rule = (
        f"{node['of']} does not take this key" if "of" in node else "DeepSpeed has no such key here"
    )
    fix = _fix_of_unknown_key(node, key, value, here)
    return Problem(
        f"{here} = {format_json_value(value)}", rule, fix, _unknown_outcome(node, key, value, path)
    )


def _fix_of_unknown_key(node: Node, key: str, value: object, here: str) -> str:
    """Return the fix for the likeliest mistake: an old name, a typo or the wrong block."""
    keys = node["keys"]
    elsewhere = [
        place
        for place in _key_paths()
        if place.rpartition(".")[2] == key and fits_node(_schema_node(place), value)
    ]
    close = difflib.get_close_matches(key, keys, 1, 0.9)
    if key not in elsewhere:
        for old in close:
            if "use_instead" in keys[old]:
                return _fix_of_renamed_key(keys[old]["use_instead"], old, value, {})[0]
    if here in RENAMED_KEYS:
        return f"did you mean {RENAMED_KEYS[here]}?"

    valid = [
        name
        for name, known in keys.items()
        if "removed" not in known and "use_instead" not in known
    ]
    fitting = [name for name in valid if fits_node(keys[name], value)]
    if near := difflib.get_close_matches(key, fitting, 1, 0.7):
        return f"did you mean {near[0]}?"
    if elsewhere:
        blocks = [place.rpartition(".")[0] or "the top level" for place in elsewhere]
        return f"it belongs in {' or '.join(blocks)}"
    if "of" in node:
        return f"delete it. {node['of']} takes {', '.join(valid)}"

    for far in difflib.get_close_matches(key, _key_path_by_name(), 1, 0.8):
        place = _key_path_by_name()[far]
        if fits_node(_schema_node(place), value):
            return f"did you mean {place}?"
    nearest = difflib.get_close_matches(key, valid, 1, 0.0)
    return f"delete it. The nearest key is {nearest[0]}" if nearest else "delete it"


def _unknown_outcome(node: Node, key: str, value: object, path: str) -> str:
    """Return DeepSpeed's reaction to a key that the block does not support."""
    if path == "optimizer.params":
        if node["of"] in DROPPED_PARAMS.get(key, ()):
            return IGNORES
        if key == "amsgrad" and value is False and node["of"] in ("Adam", "AdamW"):
            return APPLIES  # every Adam accepts this argument, but only PyTorch's supports it
    return FAILS if node.get("strict") else IGNORES


def _unknown_name(block: str, given: str | None, names: list[str]) -> Problem:
    if given is None:
        return Problem(
            f"{block}.type = (missing)",
            f"DeepSpeed ignores the {block} block without a type",
            f'add "type": "{"AdamW" if block == "optimizer" else "WarmupLR"}"',
            IGNORES,
        )
    by_lower = {name.lower(): name for name in names}
    inside = [name for name in by_lower if name in given.lower()]  # DeepSpeed_Adam, adamw_torch
    near = (
        [max(inside, key=len)]
        if inside
        else difflib.get_close_matches(given.lower(), by_lower, 1, 0.5)
    )
    fix = f"did you mean {by_lower[near[0]]}?" if near else f"set it to one of {', '.join(names)}"
    return Problem(
        f"{block}.type = {format_json_value(given)}",
        f"DeepSpeed {schema()['deepspeed']} supports no such {block} in a JSON",
        fix,
        FAILS,
    )


def _schema_node(path: str) -> Node:
    """Return the node at a dotted path from `_key_paths`."""
    node = schema()["config"]
    for key in path.split("."):
        node = node["keys"][key]
    return node


@functools.cache
def _key_paths() -> tuple[str, ...]:
    """Return the dotted path of every key."""

    def below(node: Node, path: str) -> list[str]:
        return [
            place
            for key, known in node["keys"].items()
            if known.get("type")
            for place in [path + key, *(below(known, f"{path}{key}.") if "keys" in known else [])]
        ]

    return tuple(below(schema()["config"], ""))


@functools.cache
def _key_path_by_name() -> dict[str, str]:
    return {place.rpartition(".")[2]: place for place in reversed(_key_paths())}
