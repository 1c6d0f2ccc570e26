"""Checks single keys against schema.json: which keys DeepSpeed reads, and what each may hold."""

import copy
import difflib
import functools
import json
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..spec.refusal import APPLIES, FAILS, IGNORES, REPLACES, Problem
from .values import Node, converted, example, fits, shown, wrong

# Keys that Trainer, accelerate and the recipes all fill; DeepSpeed drops an "auto" anywhere else
# without a word.
AUTO = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
    "optimizer.params.freeze_step",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)


def at(config: dict[str, Any], path: str, default: Any = None) -> Any:
    """Returns the value at a dotted path; `default` if the configuration does not mention the
    path.
    """
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return default
        value = value[key]
    return value


@functools.cache
def schema() -> Node:
    return json.loads((Path(__file__).parent / "schema.json").read_text())


def optimizer_name(config: dict[str, Any]) -> str | None:
    """Returns the optimizer's name as the schema spells it; None if there is no optimizer, or none
    of that name.
    """
    name = at(config, "optimizer.type")
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
    """Finds the keys of optimizer.params, for the implementation of the optimizer `name` that
    DeepSpeed will choose.
    """
    if name is None:
        return {}
    variants = schema()["optimizers"][name]
    offload = at(config, "zero_optimization.offload_optimizer")
    # a block without a device is at fault
    offloaded = (
        isinstance(offload, dict) and offload.get("device", "cpu" if offload else "none") != "none"
    )
    params = at(config, "optimizer.params")
    switched_on = (
        [key for key, value in params.items() if value is True]
        if isinstance(params, dict) and "torch_adam" not in params
        else []
    )
    meant = resembled("torch_adam", switched_on)  # what hangs on a misspelt key is not told as well
    chosen = (
        "torch"
        if meant or at(config, "optimizer.params.torch_adam") is True
        else "cpu"
        if offloaded
        else "device"
    )
    return variants.get(chosen) or variants.get("device", {})


def takes_number(takes: dict[str, Node], key: str) -> bool:
    """Returns True if a recipe's number goes into the key `key` of optimizer.params; Adafactor's
    eps is a pair, which only a JSON states.
    """
    return key in takes and (key != "eps" or "array" not in takes[key]["type"])


# Names of keys that an older DeepSpeed read and this one does not.
FORMER = {"aio.thread_count": "intra_op_parallelism"}

# Keys of optimizer.params that DeepSpeed removes for optimizers without a use for them (engine.py,
# _configure_basic_optimizer).
TAKEN_OUT = {"adam_w_mode": ("AdamW",), "fp32_optimizer_states": ("Adam", "AdamW")}

# Blocks whose keys DeepSpeed checks only while the block is switched on.
UNCHECKED = ("autotuning", "data_efficiency", "expert_parallel", "flops_profiler")

# Program -> the further keys that it fills; "": nobody fills anything.
# (transformers 5.22 integrations/deepspeed.py, accelerate 1.15 accelerator.py and dataclasses.py)
_BOTH = {*AUTO, "fp16.enabled", "bf16.enabled"} - {"optimizer.params.freeze_step"} | {
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


def walk(
    config: dict[str, Any], auto: Collection[str] = AUTO, stock: bool = False
) -> tuple[list[Problem], dict[str, Any]]:
    """Finds the mistakes that single keys show; returns them and the configuration without the keys
    at fault.

    `auto` holds the keys that somebody fills. Whole numbers written as 5e8 become integers, and a
    value that DeepSpeed would replace by a default becomes that default. With `stock`, a word or
    number that DeepSpeed converts is converted.
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

    in_blocks, clean = _block(root, config, "", auto)
    found += in_blocks
    if stock:
        _convert(root, config, clean, found)

    # its type is at fault, so nothing is known about its parameters
    for block in ("optimizer", "scheduler"):
        if "keys" not in root["keys"][block]["keys"]["params"]:
            clean.get(block, {}).pop("params", None)
    return _with_fixes(found, _fixes_by_the_file(config)), clean


def _fill_in_params(node: Node, block: str, config: dict[str, Any]) -> list[Problem]:
    """Put the keys of the named optimizer or scheduler into the `node` of its block; return the
    problems of its name.
    """
    given = config[block].get("type")
    if block == "optimizer":
        names, name = schema()["optimizers"], optimizer_name(config)
    else:
        names = schema()["schedulers"] | schema()["torch_schedulers"]
        name = given if isinstance(given, str) and given in names else None

    if name is None:
        misspelt = resembled("type", config[block].keys() - node["keys"].keys())
        if isinstance(given, str) or (given is None and not misspelt):
            return [_unknown_name(block, given, list(names))]
        return []  # of another type, or under another key: a problem of that key
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


def _with_fixes(found: list[Problem], fixes: dict[tuple[str, bool], str]) -> list[Problem]:
    """Return the problems with the fixes that depend on the rest of the file."""
    fixed = []
    for problem in found:
        place = (problem.where.partition(" = ")[0], problem.where.endswith(' = "auto"'))
        fixed.append(replace(problem, fix=fixes.get(place, problem.fix)))
    return fixed


def meant_by_auto(fp16: Any, bf16: Any) -> dict[str, bool]:
    """Return what "auto" stands for in bf16.enabled and fp16.enabled, from the values of
    fp16.enabled and bf16.enabled: whoever wrote it trains in one of the two.
    """
    return {"bf16.enabled": fp16 is not True, "fp16.enabled": bf16 not in (True, "auto")}


def _fixes_by_the_file(config: dict[str, Any]) -> dict[tuple[str, bool], str]:
    """Returns the fixes that depend on the rest of the file: (path, whether it holds "auto") ->
    fix.
    """
    zero, lr = at(config, "zero_optimization"), at(config, "optimizer.params.lr")
    stage3 = isinstance(zero, dict) and any(
        key.startswith(("stage3_", "offload_param")) for key in zero
    )
    number = isinstance(lr, (int, float))
    meant = meant_by_auto(at(config, "fp16.enabled"), at(config, "bf16.enabled"))
    fixes = {path: f"set it to {json.dumps(value)}" for path, value in meant.items()}
    fixes |= dict.fromkeys(("optimizer.params.betas", "optimizer.params.eps"), "delete it")
    fixes |= {"zero_optimization.stage": f"set it to {3 if stage3 else 2}"}
    # then the rows of a step are known
    fixes |= dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "write 1"
    )
    fixes |= {"train_batch_size": "delete it"} if "train_micro_batch_size_per_gpu" in config else {}
    # WarmupLR takes the optimizer's rate itself, WarmupDecayLR would take 0.001
    fixes |= {
        "scheduler.params.warmup_max_lr": (
            f"set it to {lr}"
            if number
            else "delete it"
            if at(config, "scheduler.type") == "WarmupLR"
            else "set it to 0.001"
        )
    }
    clipping = (
        "delete it"
        if "gradient_clipping" in config
        else (
            f'write "gradient_clipping": {json.dumps(at(config, "optimizer.params.max_grad_norm"))}'
            " instead"
        )
    )
    return {(path, True): fix for path, fix in fixes.items()} | {
        ("optimizer.params.max_grad_norm", False): clipping
    }


def _block(
    node: Node, config: dict[str, Any], path: str, auto: Collection[str]
) -> tuple[list[Problem], dict[str, Any]]:
    """Return the problems of a block's keys, and the block without the keys at fault."""
    found: list[Problem] = []
    clean: dict[str, Any] = {}
    off = path in UNCHECKED and not config.get("enabled")
    for key, value in config.items():
        here = f"{path}.{key}" if path else key
        known = node["keys"].get(key)
        if known is None:
            found.append(_unknown_key(node, key, value, path))
        elif "removed" in known or "use_instead" in known:
            problem, renamed = _former_key(known, here, value, config)
            found.append(problem)
            clean |= renamed
        elif problem := wrong(known, value, here, auto, bool(node.get("strict"))):
            if off and key != "enabled":
                # DeepSpeed reads it without a look at what it is
                problem = replace(problem, outcome=APPLIES)
            found.append(problem)
            if problem.outcome == REPLACES and value == "auto" and "default" in known:
                clean[key] = known["default"]
        elif "keys" in known and isinstance(value, dict):
            below, clean[key] = _block(known, value, here, auto)
            found += below
        else:
            clean |= _right_value(known, here, value)
    return [*found, *_missing_keys(node, config, path), *_never_enabled(node, config, path)], clean


def _former_key(
    known: Node, here: str, value: Any, config: dict[str, Any]
) -> tuple[Problem, dict[str, Any]]:
    """Return the problem of a key that was removed or renamed, and what DeepSpeed takes it for."""
    where, key = f"{here} = {shown(value)}", here.rpartition(".")[2]
    if "removed" in known:
        rule = f"was removed from DeepSpeed {schema()['deepspeed']}"
        return Problem(where, rule, "delete it", FAILS), {}

    works = known.get("works", True) or (
        key == "allgather_size" and config.get("zero_optimization") is True
    )
    fix, renamed = _renamed(known["use_instead"], key, value, config)
    outcome = APPLIES if works else IGNORES
    problem = Problem(where, "is an old or alternative name", fix, outcome)
    return problem, renamed if works else {}


def _right_value(known: Node, here: str, value: Any) -> dict[str, Any]:
    """Return the key with a copy of its value, where a whole number written as 5e8 is an integer.

    An "auto" that another program fills becomes the default; {} if the key has no default.
    """
    key, types = here.rpartition(".")[2], known["type"]
    if value == "auto" and here not in AUTO and known.get("default") != "auto":
        return {key: known["default"]} if "default" in known else {}
    if isinstance(value, float) and "integer" in types and "number" not in types:
        return {key: int(value)}
    return {key: copy.deepcopy(value)}


def _missing_keys(node: Node, config: dict[str, Any], path: str) -> list[Problem]:
    """Refuse a block that lacks a key which DeepSpeed requires."""
    rule = f"{node.get('of', path)} requires it"
    return [
        Problem(f"{path}.{key} = (missing)", rule, f'add "{key}": {example(known)}', FAILS)
        for key, known in node["keys"].items()
        if known.get("required") and key not in config
    ]


def _never_enabled(node: Node, config: dict[str, Any], path: str) -> list[Problem]:
    """Refuse a block whose keys DeepSpeed ignores, because nothing switches the block on."""
    default = node["keys"].get("enabled", {}).get("default")
    if not config or "enabled" in config or default is not False:
        return []
    if resembled("enabled", config.keys() - node["keys"].keys()):
        return []  # the misspelt key is the problem
    rule = 'has no "enabled", so DeepSpeed disables the block and ignores its other keys'
    fix = 'add "enabled": true or delete the block'
    return [Problem(f"{path} = {shown(config)}", rule, fix, IGNORES)]


def _convert(
    node: Node, config: dict[str, Any], clean: dict[str, Any], found: list[Problem], path: str = ""
) -> None:
    """Put values of another type into `clean`, as what DeepSpeed takes them for."""
    works = {problem.where.partition(" = ")[0] for problem in found if problem.outcome == APPLIES}
    for key, value in config.items():
        known, here = node["keys"].get(key, {}), f"{path}.{key}".lstrip(".")
        if isinstance(value, dict) and isinstance(clean.get(key), dict) and "keys" in known:
            _convert(known, value, clean[key], found, here)
        elif (
            key not in clean
            and here in works
            and "type" in known
            and (meant := converted(known, value)) is not None
        ):
            clean[key] = meant


def _renamed(new: str, key: str, value: Any, config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the fix for an old name, and the key and value after the fix; `config` is the
    block.
    """
    name = new.rpartition(".")[2]
    if " or " in new:
        return f"delete it, and write it as pin_memory in {new}", {}
    if name in config:
        return f"delete it. The key {new} is already set", {}
    if key in ("cpu_offload", "cpu_offload_param"):  # a switch has become a block
        if not value or value == "false":
            return "delete it", {}
        value = {"device": "cpu"}
    return f'write "{new}": {json.dumps(value)} instead', {name: copy.deepcopy(value)}


def resembled(key: str, names: Iterable[str]) -> bool:
    """Returns True if one of the names is the key, or a likely misspelling of it."""
    return bool(difflib.get_close_matches(key, names, 1))


def _unknown_key(node: Node, key: str, value: Any, path: str) -> Problem:
    here = f"{path}.{key}" if path else key
    rule = (
        f"{node['of']} does not take this key" if "of" in node else "DeepSpeed has no such key here"
    )
    fix = _fix_of_unknown_key(node, key, value, here)
    return Problem(f"{here} = {shown(value)}", rule, fix, _unknown_outcome(node, key, value, path))


def _fix_of_unknown_key(node: Node, key: str, value: Any, here: str) -> str:
    """Return the fix of the likeliest mistake: an old name, a typing error, another block."""
    keys = node["keys"]
    elsewhere = [
        place for place in _paths() if place.rpartition(".")[2] == key and fits(_node(place), value)
    ]
    close = difflib.get_close_matches(key, keys, 1, 0.9)
    if key not in elsewhere:
        for old in close:
            if "use_instead" in keys[old]:
                return _renamed(keys[old]["use_instead"], old, value, {})[0]
    if here in FORMER:
        return f"did you mean {FORMER[here]}?"

    valid = [
        name
        for name, known in keys.items()
        if "removed" not in known and "use_instead" not in known
    ]
    fitting = [name for name in valid if fits(keys[name], value)]
    if near := difflib.get_close_matches(key, fitting, 1, 0.7):
        return f"did you mean {near[0]}?"
    if elsewhere:
        blocks = [place.rpartition(".")[0] or "the top level" for place in elsewhere]
        return f"it belongs in {' or '.join(blocks)}"
    if "of" in node:
        return f"delete it. {node['of']} takes {', '.join(valid)}"

    for far in difflib.get_close_matches(key, _paths_by_name(), 1, 0.8):
        place = _paths_by_name()[far]
        if fits(_node(place), value):
            return f"did you mean {place}?"
    nearest = difflib.get_close_matches(key, valid, 1, 0.0)
    return f"delete it. The nearest key is {nearest[0]}" if nearest else "delete it"


def _unknown_outcome(node: Node, key: str, value: Any, path: str) -> str:
    """Return what DeepSpeed does with a key that the block does not have."""
    if path == "optimizer.params":
        if node["of"] in TAKEN_OUT.get(key, ()):
            return IGNORES
        if key == "amsgrad" and value is False and node["of"] in ("Adam", "AdamW"):
            return APPLIES  # every Adam takes this argument, but only PyTorch's can do it
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
        f"{block}.type = {shown(given)}",
        f"DeepSpeed {schema()['deepspeed']} supports no such {block} in a JSON",
        fix,
        FAILS,
    )


def _node(path: str) -> Node:
    """Return the node of a dotted path that `_paths` lists."""
    node = schema()["config"]
    for key in path.split("."):
        node = node["keys"][key]
    return node


@functools.cache
def _paths() -> tuple[str, ...]:
    """Lists the dotted path of every key."""

    def below(node: Node, path: str) -> list[str]:
        return [
            place
            for key, known in node["keys"].items()
            if known.get("type")
            for place in [path + key, *(below(known, f"{path}{key}.") if "keys" in known else [])]
        ]

    return tuple(below(schema()["config"], ""))


@functools.cache
def _paths_by_name() -> dict[str, str]:
    return {place.rpartition(".")[2]: place for place in reversed(_paths())}
