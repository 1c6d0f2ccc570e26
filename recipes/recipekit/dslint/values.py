"""Check of one JSON value against its node in schema.json: its type, its range, its name."""

import contextlib
import difflib
import json
import math
import operator
import re
from collections.abc import Callable, Collection
from typing import Any

from ..spec.errors import APPLIES, FAILS, IGNORES, REPLACES, Problem

Node = dict[str, Any]  # a node of schema.json, which tools/make/make_ds_schema.py writes
# switches that accept only true and false
STRICT_BOOLEAN_KEYS = (
    "wall_clock_breakdown",
    "flops_profiler.enabled",
    "checkpoint.parallel_write.pipeline_stage",
    "pipeline.pipe_partitioned",
    "pipeline.grad_partitioned",
)
# keys for which DeepSpeed treats null as missing
NULLABLE_KEYS = (
    "bf16",
    "optimizer.params",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
# words of pydantic's lax mode
YES, NO = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")


def check_json_value(
    node: Node, value: object, path: str, auto_keys: Collection[str], strict: bool
) -> Problem | None:
    """Return the problem of one value, or None.

    A problem is an unfilled "auto", or a wrong type, range or name. `strict` blocks are pydantic
    models. They drop "auto", convert words and numbers that can represent a different type, and
    reject all other values. Blocks that are not strict accept any value and fail when they use it.
    """
    if value == "auto" and path in auto_keys:
        return None
    if value == "auto" and (path == "pipeline.stages" or node.get("default") != "auto"):
        return _unfilled_auto(node, path, strict)
    if path == "zero_optimization" and isinstance(value, bool):
        return Problem(
            f"{path} = {format_json_value(value)}",
            "is the old format of 2020, which only switches between stage 0 and 1",
            f'set it to {{"stage": {int(value)}}}',
            APPLIES,
        )
    if not any(_has_json_type(value, name) for name in node["type"]):
        return _wrong_type(node, value, path, strict)
    find_wrong = CHECKERS.get(type(value))
    return find_wrong(node, value, path) if find_wrong is not None else None


def _unfilled_auto(node: Node, path: str, strict: bool) -> Problem:
    """Return the problem of an "auto" value that nothing fills."""
    where = f'{path} = "auto"'
    if path == "pipeline.stages":
        return Problem(where, '"auto" means the same as a missing key', "delete it", IGNORES)
    drops = strict and not path.startswith(("optimizer.", "scheduler."))
    word = "boolean" in node["type"] and path not in STRICT_BOOLEAN_KEYS  # any word counts as true
    return Problem(
        where,
        '"auto" is not supported, because nothing fills it in',
        f"set it to {example_value(node)}",
        REPLACES if drops or word else FAILS,
    )


# type in the schema -> its description, if "a TYPE" is wrong
TYPE_DESCRIPTIONS = {
    "object": "a block {...}",
    "array": "a list [...]",
    "integer": "a whole number",
    "number": "a number",
    "null": "null",
}


def _wrong_type(node: Node, value: object, path: str, strict: bool) -> Problem:
    """Return the problem of a value whose type the node does not accept."""
    names = " or ".join(TYPE_DESCRIPTIONS.get(name, f"a {name}") for name in node["type"])
    deleted = value is None and not node.get("required")
    fix = "delete it" if deleted else f"set it to {_guess_value(node, value)}"
    outcome = _wrong_type_outcome(node, value, path, strict)
    return Problem(f"{path} = {format_json_value(value)}", f"must be {names}", fix, outcome)


def _wrong_word(node: Node, value: str, path: str) -> Problem | None:
    """Return the problem of a word that is not among its key's allowed names, or None."""
    if "enum" not in node or value in node["enum"]:
        return None
    names = [str(name) for name in node["enum"]]
    if node.get("any_case") and value.lower() in [name.lower() for name in names]:
        return None
    near = difflib.get_close_matches(value, names, 1)
    return Problem(
        f"{path} = {format_json_value(value)}",
        f"must be one of {', '.join(names)}",
        f"did you mean {near[0]}?" if near else f"set it to {example_value(node)}",
        # DeepSpeed uses the default, with a warning
        REPLACES if path == "scheduler.params.warmup_type" else FAILS,
    )


# a node's bound -> the comparison for a number outside it, and words that describe the range
BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "min": (operator.lt, "at least"),
    "above": (operator.le, "more than"),
    "max": (operator.gt, "at most"),
    "below": (operator.ge, "less than"),
}
# path -> DeepSpeed's reaction to a number out of range, if DeepSpeed does not fail
OUT_OF_RANGE = {
    "activation_checkpointing.number_checkpoints": APPLIES,
    "flops_profiler.profile_step": IGNORES,
}


def _not_listed(node: Node, value: float, path: str) -> Problem | None:
    """Return the problem of a number or switch that its key does not allow, or None."""
    listed = [number for number in node.get("enum", []) if not isinstance(number, str)]
    if not listed or value in listed:
        return None
    names = " or ".join(json.dumps(number) for number in listed)
    fix = f"set it to {_nearest_number(listed, value)}"
    return Problem(f"{path} = {format_json_value(value)}", f"must be {names}", fix, FAILS)


def _wrong_number(node: Node, value: float, path: str) -> Problem | None:
    """Return the problem of a number that is not allowed or out of range, or None."""
    if problem := _not_listed(node, value, path):
        return problem
    where = f"{path} = {format_json_value(value)}"
    for name, (is_outside, words) in BOUNDS.items():
        if name not in node or not is_outside(value, node[name]):
            continue
        if path == "gradient_clipping":
            fix = "set it to 0, which also disables clipping"
            return Problem(where, "must be at least 0", fix, APPLIES)
        rule, fix = f"must be {words} {node[name]:g}", f"set it to {example_value(node)}"
        return Problem(where, rule, fix, OUT_OF_RANGE.get(path, FAILS))
    return None


def _wrong_list(node: Node, value: list[Any], path: str) -> Problem | None:
    """Return the problem of the items in a list, or None."""
    where = f"{path} = {format_json_value(value)}"
    if not all(_has_json_type(item, node.get("items", "any")) for item in value):
        return Problem(
            where,
            f"must contain only items of type {node['items']}",
            f"set it to {example_value(node)}",
            FAILS,
        )
    if "items_enum" in node and (odd := [item for item in value if item not in node["items_enum"]]):
        return Problem(
            where,
            f"{format_json_value(odd[0])} is not one of {', '.join(node['items_enum'])}",
            "use only these values",
            FAILS,
        )
    if "length" in node and len(value) != node["length"]:
        return Problem(
            where,
            f"must contain {node['length']} numbers",
            f"set it to {example_value(node)}",
            FAILS,
        )
    if path.endswith(".betas") and not all(0 <= item < 1 for item in value):
        fix = "set it to [0.9, 0.95]" if len(value) == 2 else f"set it to {example_value(node)}"
        return Problem(where, "each number must be at least 0 and less than 1", fix, FAILS)
    if path.endswith(".eps") and not all(
        _has_json_type(item, "number") and item >= 0
        for item in (0 if value[0] is None else value[0], value[1])
    ):
        return Problem(
            where,
            "each number must be at least 0, and the first may be null",
            "set it to [null, 0.001]",
            FAILS,
        )
    return None


# type of an accepted value -> the further check of the value
CHECKERS: dict[type, Callable[[Node, Any, str], Problem | None]] = {
    str: _wrong_word,
    bool: _not_listed,
    int: _wrong_number,
    float: _wrong_number,
    list: _wrong_list,
}


def _wrong_type_outcome(node: Node, value: object, path: str, strict: bool) -> str:
    """Return DeepSpeed's reaction to a value of the wrong type."""
    types, text = node["type"], value.strip().lower() if isinstance(value, str) else None
    if strict and not path.startswith(("optimizer.", "scheduler.")):  # pydantic's lax mode
        if "boolean" in types and (value in (0, 1) or text in YES + NO):
            return APPLIES
        number = r"[-+]?\d+" if "number" not in types else r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?"
        if {"integer", "number"} & set(types) and (
            isinstance(value, bool) or (text is not None and re.fullmatch(number, text))
        ):
            return APPLIES
        return FAILS
    if "boolean" in types and path not in STRICT_BOOLEAN_KEYS:
        # any word counts as true, like most values in Python
        return REPLACES if text is not None and text not in YES else APPLIES
    # stored unchanged, and read only for contiguous checkpoints
    if path == "activation_checkpointing.number_checkpoints":
        return REPLACES if text is not None else APPLIES
    # true is 1 in Python
    number = (
        isinstance(value, bool)
        and {"integer", "number"} & set(types)
        and value >= node.get("min", 0)
    )
    return APPLIES if number or (path in NULLABLE_KEYS and value is None) else FAILS


def convert_value(node: Node, value: Any) -> Any:
    """Convert a word or number to the right type as DeepSpeed does. Return None if unknown."""
    text = value.strip().lower() if isinstance(value, str) else None
    if "boolean" in node["type"] and (value in (0, 1) or text in YES + NO):
        return value == 1 or text in YES
    if "integer" in node["type"] and (
        isinstance(value, bool) or (text is not None and re.fullmatch(r"[-+]?\d+", text))
    ):
        return int(value)
    if "number" in node["type"] and isinstance(value, (bool, str)):
        with contextlib.suppress(ValueError):
            return float(value)
    return None


def _has_json_type(value: object, name: str) -> bool:
    if name == "boolean":
        return isinstance(value, bool)
    if name in ("integer", "number"):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        # some integers are too large for a float
        return isinstance(value, int) or (
            math.isfinite(value) and (name == "number" or value == int(value))
        )
    return {
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
        "null": value is None,
        "any": True,
    }[name]


def fits_node(node: Node, value: object) -> bool:
    """Return True if a value has a type that the node accepts, or can be converted to that type.

    The callers use this check to suggest the intended name of a misspelt key.
    """
    return (
        value == "auto"
        or any(_has_json_type(value, name) for name in node["type"])
        or convert_value(node, value) is not None
    )


def _guess_value(node: Node, value: object) -> str:
    """Guess the value that the user meant by a value with the wrong type."""
    if isinstance(value, str):
        text = value.strip().lower()
        if "boolean" in node["type"] and text in ("true", "false", "yes", "no", "on", "off"):
            return "true" if text in ("true", "yes", "on") else "false"
        if {"integer", "number"} & set(node["type"]) and re.fullmatch(
            r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?", text
        ):
            return f"{value.strip()} without quotes"
    if "boolean" in node["type"] and value in (0, 1):
        return "true" if value else "false"
    if "enabled" in node.get("keys", {}) and isinstance(value, bool):
        return json.dumps({"enabled": value})
    if "integer" in node["type"] and isinstance(value, float) and math.isfinite(value):
        return str(math.ceil(value))
    return example_value(node)


def _nearest_number(numbers: list[Any], value: object) -> str:
    return json.dumps(min(numbers, key=lambda number: abs(number - value)))


def example_value(node: Node) -> str:
    """Return a value that the node accepts, in the form in which a user would type it."""
    if node.get("default") is not None:
        return json.dumps(node["default"])
    if "enum" in node:
        return json.dumps(node["enum"][0])
    return {
        "boolean": "true or false",
        "integer": "a whole number",
        "number": "a number",
        "string": "a string in quotes",
        "object": "{...}",
        "array": '["NAME"]',
        "any": "a value",
    }.get(node["type"][0], "null")


def format_json_value(value: object) -> str:
    """Format a value as in the JSON, shortened if necessary."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
