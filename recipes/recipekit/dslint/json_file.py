"""Search for a strategy's JSON, and a strict reader: no duplicate keys, comments or NaN."""

import copy
import difflib
import json
import re
from json import decoder, scanner
from pathlib import Path
from typing import Any

from ..spec.errors import ConfigError, Problem, config_error
from ..spec.shipped import STRATEGIES, strategies
from .values import format_json_value


def load_ds_config(name: str | dict[str, Any], folder: Path) -> tuple[dict[str, Any], Path | None]:
    """Return the JSON called `name` and its path. A dict is copied, and its path is None.

    A name is looked up as a path, then in `folder` (the recipe's folder), then among the shipped
    files (ds_configs/). Raises `ConfigError` if no such file exists or if its text is not strict
    JSON.
    """
    if isinstance(name, dict):
        return copy.deepcopy(name), None
    places = [Path(name).expanduser(), folder / name, STRATEGIES / name]
    for path in places:
        if path.is_file():
            return _read_strict_json(path), path
    beside = {path.name for path in folder.glob("*.json")} if folder.is_dir() else set()
    known = sorted(beside | strategies().keys())
    near = difflib.get_close_matches(Path(name).name, known, 1)
    fix = (
        f"did you mean {near[0]}?"
        if near
        else f"use one of {', '.join(known)}"
        if known
        else "use the path of a DeepSpeed JSON"
    )
    looked = ", ".join(str(path) for path in dict.fromkeys(places))
    raise config_error(
        f"deepspeed_config = {name}", f"the file does not exist (searched for {looked})", fix
    )


def is_shipped(path: Path | None) -> bool:
    """Return True if a JSON is one of the files in ds_configs/."""
    return path is not None and any(path.samefile(file) for file in strategies().values())


def describe_differences(config: dict[str, Any], path: Path | None) -> list[str]:
    """Return a line with the keys in which a JSON differs from the shipped file of the same name.

    The result is [] if there is no difference.
    """
    shipped = STRATEGIES / path.name if path else None
    if path is None or shipped is None or not shipped.is_file() or shipped.samefile(path):
        return []
    before, now = flatten_config(_read_strict_json(shipped)), flatten_config(config)
    listed = []
    for key in dict.fromkeys([*before, *now]):
        if key not in now:
            listed.append(f"without {key} = {format_json_value(before[key])}")
        elif key not in before:
            listed.append(f"with {key} = {format_json_value(now[key])}")
        elif format_json_value(now[key]) != format_json_value(before[key]):
            listed.append(
                f"{key} = {format_json_value(now[key])} instead of {format_json_value(before[key])}"
            )
    return [f"{path} differs from the shipped {path.name}: {', '.join(listed)}"] if listed else []


def flatten_config(config: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of a JSON by dotted keys. An empty block counts as a value."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= (
            flatten_config(value, f"{above}{key}.")
            if isinstance(value, dict) and value
            else {f"{above}{key}": value}
        )
    return found


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, without the byte order mark that Windows editors add."""
    return path.read_text(encoding="utf-8-sig")


def _read_strict_json(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise config_error(
            str(path), f"cannot be read: {error}", "use a readable JSON file in UTF-8"
        ) from None
    try:
        config = _StrictDecoder(text).decode(text)
    except json.JSONDecodeError as error:
        raise ConfigError(_syntax_problems(path, text, error)) from None
    except RecursionError:
        raise config_error(
            str(path),
            "is nested too deeply to be a DeepSpeed configuration",
            "see ds_configs/README.md",
        ) from None
    except ValueError as error:  # an integer with thousands of digits
        raise config_error(
            str(path), f"is not usable JSON: {error}", "write smaller numbers"
        ) from None
    if not isinstance(config, dict):
        raise config_error(
            str(path),
            f"contains {format_json_value(config)}, not an object",
            'start from a file in ds_configs/, such as {"zero_optimization": {"stage": 2}, ...}',
        )
    return config


def _syntax_problems(path: Path, text: str, error: json.JSONDecodeError) -> list[Problem]:
    """Return every comment and trailing comma, and the first error that remains without them."""
    found: dict[int, tuple[str, str]] = {}  # position of an error -> (its name, the fix)
    for pattern, what in (
        (r"(//[^\n]*|#[^\n]*|/\*.*?\*/)", "comments"),
        (r"(,)(?=\s*[}\]])", "comma before a closing bracket"),
    ):
        for match in list(re.finditer(r'"(?:\\.|[^"\\])*"|' + pattern, text, re.DOTALL)):
            if remark := match[1]:
                found[match.start()] = (
                    what,
                    "delete all from /* to */" if "\n" in remark else f"delete {remark.rstrip()}",
                )
                # everything else keeps its position
                text = text[: match.start()] + re.sub(r"\S", " ", remark) + text[match.end() :]

    def where(spot: int) -> str:
        return (
            f"{path}, line {text.count(chr(10), 0, spot) + 1}, column"
            f" {spot - text.rfind(chr(10), 0, spot)}"
        )

    problems = [
        Problem(where(spot), f"is not strict JSON, which allows no {what}", fix)
        for spot, (what, fix) in sorted(found.items())
    ]
    try:
        _StrictDecoder(text).decode(text)
    except json.JSONDecodeError as other:
        error = other
    else:
        if problems:
            return problems
    fix = "use double quotes, a comma between keys, no NaN, and each key only once"
    return [*problems, Problem(where(error.pos), f"is not strict JSON: {error.msg}", fix)]


class _StrictDecoder(json.JSONDecoder):
    """Decoder that rejects duplicate keys, NaN and Infinity and reports their line and column.

    The hooks of json receive no position. This class uses json's Python scanner, because the
    scanner's parse functions do receive one.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.parse_object = self._object
        self.parse_constant = self._constant
        self.scan_once = scanner.py_make_scanner(self)  # pyright: ignore[reportAttributeAccessIssue]

    def _constant(self, name: str) -> Any:
        strings_or_name = re.finditer(rf'"(?:\\.|[^"\\])*"|({re.escape(name)})', self.text)
        start = next(match.start() for match in strings_or_name if match.group(1))
        raise json.JSONDecodeError(f"{name} is not a JSON number", self.text, start)

    def _object(
        self,
        s_and_end: tuple[str, int],
        strict: bool,
        scan_once: object,
        _hook: object,
        _pairs_hook: object,
        memo: object,
    ) -> Any:
        pairs: list[tuple[str, Any]] = []
        _, end = decoder.JSONObject(s_and_end, strict, scan_once, None, pairs.extend, memo)  # pyright: ignore
        names = [name for name, _ in pairs]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise json.JSONDecodeError(
                f'"{twice[0]}" is written twice in the block that starts here',
                self.text,
                s_and_end[1] - 1,
            )
        return dict(pairs), end
