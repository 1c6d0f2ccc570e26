"""One value of a DeepSpeed JSON against its node of schema.json: its type, its range, its name."""

import contextlib
import difflib
import json
import math
import operator
import re
from collections.abc import Callable, Collection
from typing import Any

from ..spec.refusal import APPLIES, FAILS, IGNORES, REPLACES, Problem

Node = dict[str, Any]  # of schema.json, which tools/make/make_ds_schema.py writes
# switches that take true and false only
CHECKED = (
    "wall_clock_breakdown",
    "flops_profiler.enabled",
    "checkpoint.parallel_write.pipeline_stage",
    "pipeline.pipe_partitioned",
    "pipeline.grad_partitioned",
)
# keys whose null DeepSpeed takes for a missing key
NULLS = (
    "bf16",
    "optimizer.params",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
# words of pydantic's lax mode
YES, NO = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")


def wrong(node: Node, value: Any, path: str, auto: Collection[str], strict: bool) -> Problem | None:
    """Finds what is wrong with one value: an "auto" that nobody fills, its type, its range, its
    name.

    `strict` blocks are pydantic models: they drop "auto", convert a word or number that can be
    meant for another type, and refuse the rest. All other blocks take any value, and fail when they
    use it.
    """
    if value == "auto" and path in auto:
        return None
    if value == "auto" and (path == "pipeline.stages" or node.get("default") != "auto"):
        return _unfilled(node, path, strict)
    if path == "zero_optimization" and isinstance(value, bool):
        return Problem(
            f"{path} = {shown(value)}",
            "is the old format of 2020, which only switches between stage 0 and 1",
            f'set it to {{"stage": {int(value)}}}',
            APPLIES,
        )
    if not any(_is(value, name) for name in node["type"]):
        return _wrong_type(node, value, path, strict)
    find_wrong = CHECKERS.get(type(value))
    return find_wrong(node, value, path) if find_wrong is not None else None


def _unfilled(node: Node, path: str, strict: bool) -> Problem:
    """Return the problem of an "auto" that nobody fills."""
    where = f'{path} = "auto"'
    if path == "pipeline.stages":
        return Problem(where, '"auto" means the same as a missing key', "delete it", IGNORES)
    drops = strict and not path.startswith(("optimizer.", "scheduler."))
    word = "boolean" in node["type"] and path not in CHECKED  # any word counts as true
    return Problem(
        where,
        '"auto" is not supported, because nothing fills it in',
        f"set it to {example(node)}",
        REPLACES if drops or word else FAILS,
    )


# Type of the schema -> the words for it, if "a TYPE" is not right.
WORDS = {
    "object": "a block {...}",
    "array": "a list [...]",
    "integer": "a whole number",
    "number": "a number",
    "null": "null",
}


def _wrong_type(node: Node, value: Any, path: str, strict: bool) -> Problem:
    """Return the problem of a value whose type the node does not take."""
    names = " or ".join(WORDS.get(name, f"a {name}") for name in node["type"])
    deleted = value is None and not node.get("required")
    fix = "delete it" if deleted else f"set it to {_meant(node, value)}"
    outcome = _converted(node, value, path, strict)
    return Problem(f"{path} = {shown(value)}", f"must be {names}", fix, outcome)


def _wrong_word(node: Node, value: str, path: str) -> Problem | None:
    """Find a word that is not among the names of its key."""
    if "enum" not in node or value in node["enum"]:
        return None
    names = [str(name) for name in node["enum"]]
    if node.get("any_case") and value.lower() in [name.lower() for name in names]:
        return None
    near = difflib.get_close_matches(value, names, 1)
    return Problem(
        f"{path} = {shown(value)}",
        f"must be one of {', '.join(names)}",
        f"did you mean {near[0]}?" if near else f"set it to {example(node)}",
        # by its default, with a warning
        REPLACES if path == "scheduler.params.warmup_type" else FAILS,
    )


# Key of a node with a bound -> the comparison of a number outside it, and the words for the range.
BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "min": (operator.lt, "at least"),
    "above": (operator.le, "more than"),
    "max": (operator.gt, "at most"),
    "below": (operator.ge, "less than"),
}
# Path -> what DeepSpeed does with a number out of range, if it does not fail.
OUT_OF_RANGE = {
    "activation_checkpointing.number_checkpoints": APPLIES,
    "flops_profiler.profile_step": IGNORES,
}


def _not_listed(node: Node, value: float, path: str) -> Problem | None:
    """Find a number or a switch that is not among the values of its key."""
    listed = [number for number in node.get("enum", []) if not isinstance(number, str)]
    if not listed or value in listed:
        return None
    names = " or ".join(json.dumps(number) for number in listed)
    fix = f"set it to {_nearest(listed, value)}"
    return Problem(f"{path} = {shown(value)}", f"must be {names}", fix, FAILS)


def _wrong_number(node: Node, value: float, path: str) -> Problem | None:
    """Find a number that is not among the numbers of its key, or out of its range."""
    if problem := _not_listed(node, value, path):
        return problem
    where = f"{path} = {shown(value)}"
    for name, (is_outside, words) in BOUNDS.items():
        if name not in node or not is_outside(value, node[name]):
            continue
        if path == "gradient_clipping":
            fix = "set it to 0, which also disables clipping"
            return Problem(where, "must be at least 0", fix, APPLIES)
        rule, fix = f"must be {words} {node[name]:g}", f"set it to {example(node)}"
        return Problem(where, rule, fix, OUT_OF_RANGE.get(path, FAILS))
    return None


def _wrong_list(node: Node, value: list[Any], path: str) -> Problem | None:
    """Find what is wrong with the items of a list."""
    where = f"{path} = {shown(value)}"
    if not all(_is(item, node.get("items", "any")) for item in value):
        return Problem(
            where,
            f"must contain only items of type {node['items']}",
            f"set it to {example(node)}",
            FAILS,
        )
    if "items_enum" in node and (odd := [item for item in value if item not in node["items_enum"]]):
        return Problem(
            where,
            f"{shown(odd[0])} is not one of {', '.join(node['items_enum'])}",
            "use only these values",
            FAILS,
        )
    if "length" in node and len(value) != node["length"]:
        return Problem(
            where, f"must contain {node['length']} numbers", f"set it to {example(node)}", FAILS
        )
    if path.endswith(".betas") and not all(0 <= item < 1 for item in value):
        return Problem(
            where, "each number must be at least 0 and less than 1", "set it to [0.9, 0.95]", FAILS
        )
    if path.endswith(".eps") and not all(
        _is(item, "number") and item >= 0
        for item in (0 if value[0] is None else value[0], value[1])
    ):
        return Problem(
            where,
            "each number must be at least 0, and the first may be null",
            "set it to [null, 0.001]",
            FAILS,
        )
    return None


# Type of a value, which the node takes -> what else is checked of it.
CHECKERS: dict[type, Callable[[Node, Any, str], Problem | None]] = {
    str: _wrong_word,
    bool: _not_listed,
    int: _wrong_number,
    float: _wrong_number,
    list: _wrong_list,
}


def _converted(node: Node, value: Any, path: str, strict: bool) -> str:
    """Returns what DeepSpeed does with a value of the wrong type."""
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
    if "boolean" in types and path not in CHECKED:
        # any word counts as true, as any other value in Python
        return REPLACES if text is not None and text not in YES else APPLIES
    # kept as it is, and read for contiguous checkpoints only
    if path == "activation_checkpointing.number_checkpoints":
        return REPLACES if text is not None else APPLIES
    # true is 1 in Python
    number = (
        isinstance(value, bool)
        and {"integer", "number"} & set(types)
        and value >= node.get("min", 0)
    )
    return APPLIES if number or (path in NULLS and value is None) else FAILS


def converted(node: Node, value: Any) -> Any:
    """Return the value of the right type that DeepSpeed takes a word or number for; None if that is
    not known.
    """
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


def _is(value: Any, name: str) -> bool:
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


def fits(node: Node, value: Any) -> bool:
    """Return True if a value is of a type that the node takes, or reads like one: a misspelt key
    has such a value.
    """
    return (
        value == "auto"
        or any(_is(value, name) for name in node["type"])
        or converted(node, value) is not None
    )


def _meant(node: Node, value: Any) -> str:
    """Guesses what a value of the wrong type was meant to be."""
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
    return example(node)


def _nearest(numbers: list[Any], value: Any) -> str:
    return json.dumps(min(numbers, key=lambda number: abs(number - value)))


def example(node: Node) -> str:
    """Returns a value that the node takes, as one would type it."""
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


def shown(value: Any) -> str:
    """Writes a value as it stands in the JSON, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
