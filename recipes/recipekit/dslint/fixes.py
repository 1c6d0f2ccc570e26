"""Automatic fixes of a DeepSpeed JSON, applied as their texts describe.

The text of a fix begins with one of the following forms. It may name alternatives after a comma, in
a separate sentence or after "or":

    delete it                      delete the block
    write JSON                     set it (or KEY) to JSON         add 1
    set "PATH": JSON, ...          add "PATH": JSON
    write "PATH": JSON instead     did you mean NAME?              it belongs in BLOCK

Every other fix (it names a flag, or leaves a choice) must be made by a person.
"""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..spec.errors import Problem
from .schema import schema, value_at
from .values import format_json_value

MAX_CHANGES = 200  # limit on the number of changes in one file
MISSING = object()


@dataclass(frozen=True)
class Change:
    """One fixed problem and its change to the JSON: "deleted", "= 3" or "PATH = 3"."""

    problem: Problem
    description: str

    def __str__(self) -> str:
        return f"{self.problem.where}: {self.description} ({self.problem.rule})"


def apply_fixes(
    config: dict[str, Any], check: Callable[[dict[str, Any]], list[Problem]]
) -> tuple[dict[str, Any], list[Change]]:
    """Return the JSON with every automatic fix applied, and one `Change` for each fix.

    `check` returns a JSON's problems. A fix is dropped if its problem remains or if the fix causes
    a new problem. Only renaming a key may cause new problems, because the key's value was not
    checked before.
    """
    changes: list[Change] = []
    dropped: set[Problem] = set()
    problems = check(config)
    while len(changes) < MAX_CHANGES and (
        todo := [problem for problem in problems if problem not in dropped]
    ):
        problem = todo[0]
        attempt = apply_fix(problem, config)
        after = check(attempt[0]) if attempt is not None else []
        if attempt is None or problem in after or (not attempt[2] and not {*after} <= {*problems}):
            dropped.add(problem)
            continue
        config, done, _ = attempt
        changes.append(Change(problem, done))
        problems = after
    return config, changes


def apply_fix(problem: Problem, config: dict[str, Any]) -> tuple[dict[str, Any], str, bool] | None:
    """Apply the first alternative that a fix names, or return None if a person must decide.

    Return (the new JSON, a description of the change, True if a key was renamed).
    """
    path = re.sub(r"^.* \((\S+)\)$", r"\1", problem.where.partition(" = ")[0])
    config, text = copy.deepcopy(config), problem.fix
    block, _, key = path.rpartition(".")
    here = value_at(config, block) if block else config
    if not isinstance(here, dict):
        return None

    if found := re.match(r"delete (?:it|the block)(.*)", text, re.DOTALL):
        if key not in here or not _ends_unambiguously(found[1]):
            return None
        del here[key]
        return config, "deleted", False
    if found := re.match(r"did you mean ([\w.]+)\?$", text):
        if "must be one of" in problem.rule or (key == "type" and "no such" in problem.rule):
            return _set_value(config, path, found[1])
        return _move_key(config, path, _suggested_path(found[1], block))
    if found := re.match(r"it belongs in ([\w.]+|the top level)$", text):
        return _move_key(config, path, key if found[1] == "the top level" else f"{found[1]}.{key}")
    if text == "add 1" and isinstance(here.get(key), int):
        return _set_value(config, path, here[key] + 1)

    return _apply_assignment(config, path, text)


def _apply_assignment(
    config: dict[str, Any], path: str, text: str
) -> tuple[dict[str, Any], str, bool] | None:
    """Apply a fix that begins with "write", "set" or "add"."""
    key = re.escape(path.rpartition(".")[2])
    if found := re.match(rf"(?:write|set (?:it|{key}) to) (?!\")", text):
        value, rest = _parse_json_prefix(text[found.end() :])
        if value is MISSING or not _ends_unambiguously(rest.removeprefix(" without quotes")):
            return None
        return _set_value(config, path, value)
    if found := re.match(rf"(?:write|set|add|set (?:it|{key}) to) (?=\")", text):
        return _apply_quoted_assignments(config, path, text[found.end() :])
    return None


def _set_value(
    config: dict[str, Any], path: str, value: object
) -> tuple[dict[str, Any], str, bool]:
    """Set a key to a different value. The key's block must exist."""
    block, _, key = path.rpartition(".")
    (value_at(config, block) if block else config)[key] = value
    return config, f"= {format_json_value(value)}", False


def _move_key(
    config: dict[str, Any], path: str, target: str
) -> tuple[dict[str, Any], str, bool] | None:
    """Move a key to a different path: a new name at the same position, or an existing block.

    No key is overwritten.
    """
    (block, _, key), (place, _, name) = path.rpartition("."), target.rpartition(".")
    here, there = (value_at(config, where) if where else config for where in (block, place))
    if not isinstance(there, dict) or key not in here or name in there:
        return None
    if there is here:
        renamed = {name if old == key else old: value for old, value in here.items()}
        here.clear()
        here.update(renamed)
        return config, f"renamed {name}", True
    there[name] = here.pop(key)
    return config, f"moved to {target}", True


def _suggested_path(name: str, block: str) -> str:
    """Return the path of the key that "did you mean" suggests.

    The suggested key is in the same block as the misspelt key, unless only the top level has such a
    key.
    """
    top = schema()["config"]["keys"]
    return (
        name
        if "." in name or (name in top and name not in _schema_keys(block))
        else f"{block}.{name}".lstrip(".")
    )


def _schema_keys(block: str) -> dict[str, Any]:
    node = schema()["config"]
    for key in block.split(".") if block else []:
        node = node.get("keys", {}).get(key, {})
    return node.get("keys", {})


def _apply_quoted_assignments(
    config: dict[str, Any], path: str, text: str
) -> tuple[dict[str, Any], str, bool] | None:
    """Apply `"PATH": JSON, "PATH": JSON`, `"PATH": JSON instead`, or `"VALUE"`."""
    if re.match(r'"[\w.]+": ', text) is None:
        value, rest = _parse_json_prefix(text)
        text = f'"{path}": {json.dumps(value)}{rest}' if value is not MISSING else text

    done, comma = [], ""
    while told := re.match(comma + r'"([\w.]+)": ', text):
        value, text = _parse_json_prefix(text[told.end() :])
        name, comma = _absolute_path(told[1], path, config), ", "
        block, _, key = name.rpartition(".")
        here = _ensure_block(config, block)
        if value is MISSING or here is None:
            return None
        here[key] = value
        done.append(
            f"= {format_json_value(value)}"
            if name == path
            else f"{name} = {format_json_value(value)}"
        )

    if text == " instead":
        block, _, key = path.rpartition(".")
        (value_at(config, block) if block else config).pop(key, None)
        return config, ", ".join(["deleted", *done]), False
    return (config, ", ".join(done), False) if done and _ends_unambiguously(text) else None


def _absolute_path(name: str, path: str, config: dict[str, Any]) -> str:
    """Return the full path of a key that a fix names.

    A name without a dot is in the same block as the invalid key, or inside the invalid block.
    """
    if "." in name or name in schema()["config"]["keys"]:
        return name
    block = path if isinstance(value_at(config, path), dict) else path.rpartition(".")[0]
    return f"{block}.{name}".lstrip(".")


def _ensure_block(config: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Return the block at a path, created if missing, or None if the path contains a value."""
    for key in path.split(".") if path else []:
        config = config.setdefault(key, {})
        if not isinstance(config, dict):
            return None
    return config


def _parse_json_prefix(text: str) -> tuple[Any, str]:
    """Return the JSON value at the start of a string (`MISSING` without a value), and the rest."""
    try:
        value, end = json.JSONDecoder(parse_constant=_reject_constant).raw_decode(text)
    except ValueError:
        return MISSING, text
    return value, text[end:]


def _reject_constant(name: str) -> Any:
    raise ValueError(name)


def _ends_unambiguously(rest: str) -> bool:
    """Return True if a fix ends before `rest`, and `rest` offers no second value.

    For example, "9 or 12" leaves a choice.
    """
    return (
        rest == ""
        or rest.startswith(". ")
        or re.match(r",? (or|which) (?![\d\"\[{]|true\b|false\b|more\b)", rest) is not None
    )
