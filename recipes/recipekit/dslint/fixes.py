"""Fixes of a DeepSpeed JSON that can be carried out as they are written.

The text of a fix begins with one of these, and may name other ways behind a comma, in a further
sentence or behind "or":

    delete it                      delete the block
    write JSON                     set it (or KEY) to JSON         add 1
    set "PATH": JSON, ...          add "PATH": JSON
    write "PATH": JSON instead     did you mean NAME?              it belongs in BLOCK

Every other fix (one that names a flag, or leaves a choice) needs a person.
"""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..spec.refusal import Problem
from .schema import at, schema
from .values import shown

MOST = 200  # changes of one file
MISSING = object()


@dataclass(frozen=True)
class Change:
    """One fixed problem, and what was done to the JSON: "deleted", "= 3" or "PATH = 3"."""

    problem: Problem
    done: str

    def __str__(self) -> str:
        return f"{self.problem.where}: {self.done} ({self.problem.rule})"


def fix(
    config: dict[str, Any], check: Callable[[dict[str, Any]], list[Problem]]
) -> tuple[dict[str, Any], list[Change]]:
    """Return the JSON with every fix that can be carried out, and one `Change` for each.

    `check` returns the problems of a JSON. A fix is dropped if its problem is still there
    afterwards, or if it brings another problem. Only a new name of a key may do so, since what the
    key holds was not checked before.
    """
    changes: list[Change] = []
    dropped: set[Problem] = set()
    problems = check(config)
    while len(changes) < MOST and (
        todo := [problem for problem in problems if problem not in dropped]
    ):
        problem = todo[0]
        attempt = carried_out(problem, config)
        after = check(attempt[0]) if attempt is not None else []
        if attempt is None or problem in after or (not attempt[2] and not {*after} <= {*problems}):
            dropped.add(problem)
            continue
        config, done, _ = attempt
        changes.append(Change(problem, done))
        problems = after
    return config, changes


def carried_out(
    problem: Problem, config: dict[str, Any]
) -> tuple[dict[str, Any], str, bool] | None:
    """Return the JSON after the first way that a fix names, what was done, and True for a new name;
    None if a person has to do it.
    """
    path = re.sub(r"^.* \((\S+)\)$", r"\1", problem.where.partition(" = ")[0])
    config, text = copy.deepcopy(config), problem.fix
    block, _, key = path.rpartition(".")
    here = at(config, block) if block else config
    if not isinstance(here, dict):
        return None

    if found := re.match(r"delete (?:it|the block)(.*)", text, re.DOTALL):
        if key not in here or not _ends(found[1]):
            return None
        del here[key]
        return config, "deleted", False
    if found := re.match(r"did you mean ([\w.]+)\?$", text):
        if "must be one of" in problem.rule or (key == "type" and "no such" in problem.rule):
            return _put(config, path, found[1])
        return _moved(config, path, _full(found[1], block))
    if found := re.match(r"it belongs in ([\w.]+|the top level)$", text):
        return _moved(config, path, key if found[1] == "the top level" else f"{found[1]}.{key}")
    if text == "add 1" and isinstance(here.get(key), int):
        return _put(config, path, here[key] + 1)

    return _write(config, path, text)


def _write(config: dict[str, Any], path: str, text: str) -> tuple[dict[str, Any], str, bool] | None:
    """Carry out a fix that begins with "write", "set" or "add"."""
    key = re.escape(path.rpartition(".")[2])
    if found := re.match(rf"(?:write|set (?:it|{key}) to) (?!\")", text):
        value, rest = _json(text[found.end() :])
        if value is MISSING or not _ends(rest.removeprefix(" without quotes")):
            return None
        return _put(config, path, value)
    if found := re.match(rf"(?:write|set|add|set (?:it|{key}) to) (?=\")", text):
        return _set(config, path, text[found.end() :])
    return None


def _put(config: dict[str, Any], path: str, value: Any) -> tuple[dict[str, Any], str, bool]:
    """Give a key another value; its block is there."""
    block, _, key = path.rpartition(".")
    (at(config, block) if block else config)[key] = value
    return config, f"= {shown(value)}", False


def _moved(
    config: dict[str, Any], path: str, target: str
) -> tuple[dict[str, Any], str, bool] | None:
    """Give a key another path: in the same place of its block, or in a block that is there already.

    No key is overwritten.
    """
    (block, _, key), (place, _, name) = path.rpartition("."), target.rpartition(".")
    here, there = (at(config, where) if where else config for where in (block, place))
    if not isinstance(there, dict) or key not in here or name in there:
        return None
    if there is here:
        renamed = {name if old == key else old: value for old, value in here.items()}
        here.clear()
        here.update(renamed)
        return config, f"renamed {name}", True
    there[name] = here.pop(key)
    return config, f"moved to {target}", True


def _full(name: str, block: str) -> str:
    """Return the path of a key that "did you mean" names: beside the misspelt key, unless only the
    top level has it.
    """
    top = schema()["config"]["keys"]
    return (
        name
        if "." in name or (name in top and name not in _keys(block))
        else f"{block}.{name}".lstrip(".")
    )


def _keys(block: str) -> dict[str, Any]:
    node = schema()["config"]
    for key in block.split(".") if block else []:
        node = node.get("keys", {}).get(key, {})
    return node.get("keys", {})


def _set(config: dict[str, Any], path: str, text: str) -> tuple[dict[str, Any], str, bool] | None:
    """Carry out `"PATH": JSON, "PATH": JSON`, `"PATH": JSON instead`, or `"VALUE"`."""
    if re.match(r'"[\w.]+": ', text) is None:
        value, rest = _json(text)
        text = f'"{path}": {json.dumps(value)}{rest}' if value is not MISSING else text

    done, comma = [], ""
    while told := re.match(comma + r'"([\w.]+)": ', text):
        value, text = _json(text[told.end() :])
        name, comma = _absolute(told[1], path, config), ", "
        block, _, key = name.rpartition(".")
        here = _block(config, block)
        if value is MISSING or here is None:
            return None
        here[key] = value
        done.append(f"= {shown(value)}" if name == path else f"{name} = {shown(value)}")

    if text == " instead":
        block, _, key = path.rpartition(".")
        (at(config, block) if block else config).pop(key, None)
        return config, ", ".join(["deleted", *done]), False
    return (config, ", ".join(done), False) if done and _ends(text) else None


def _absolute(name: str, path: str, config: dict[str, Any]) -> str:
    """Return the full path of a key that a fix names: a key without a dot lies beside the one at
    fault, or in the block at fault.
    """
    if "." in name or name in schema()["config"]["keys"]:
        return name
    block = path if isinstance(at(config, path), dict) else path.rpartition(".")[0]
    return f"{block}.{name}".lstrip(".")


def _block(config: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Return the block at a path, made if it is missing; None if a value is in its place."""
    for key in path.split(".") if path else []:
        config = config.setdefault(key, {})
        if not isinstance(config, dict):
            return None
    return config


def _json(text: str) -> tuple[Any, str]:
    """Return the JSON value at the start of a text, and the rest; `MISSING` if there is none."""
    try:
        value, end = json.JSONDecoder(parse_constant=_refuse).raw_decode(text)
    except ValueError:
        return MISSING, text
    return value, text[end:]


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _ends(rest: str) -> bool:
    """Return True if a way ends before `rest`, and no second value is offered there: "9 or 12"
    leaves a choice.
    """
    return (
        rest == ""
        or rest.startswith(". ")
        or re.match(r",? (or|which) (?![\d\"\[{]|true\b|false\b|more\b)", rest) is not None
    )
