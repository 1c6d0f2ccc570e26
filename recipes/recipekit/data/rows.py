"""One row of a file: its columns, its value, and what is wrong with either."""

import json
from collections.abc import Collection, Iterable
from typing import Any

from ..refusal import Refusal, refuse
from ..tasks.facts import TASKS
from .chat_rows import TOOLS, form_of

SKIP = "leave it out (--bad_rows skip)"


def decoded(value: bytes, errors: str = "strict") -> str:
    """Decodes text of a file. Raises UnicodeDecodeError, which `not_utf8` puts into words."""
    return value.decode("utf-8", errors).removeprefix("\ufeff").replace("\r\n", "\n")


def not_utf8(error: UnicodeDecodeError) -> tuple[str, str]:
    """Says what is wrong with text of another encoding: rule and fix of a refusal."""
    if error.object[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "is UTF-16, not UTF-8", f"convert the file (iconv -f utf-16 -t utf-8), or {SKIP}"
    if error.object[:2] == b"\x1f\x8b":
        return "is compressed (gzip), and its address does not say so", "let the name end in .gz"
    rule = f"is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
    return rule, f"convert the file (iconv -f latin1 -t utf-8), or {SKIP}"


def row_of(line: bytes, place: str) -> dict[str, Any]:
    """Parses a line of JSON. Raises `Refusal` if it is no object."""
    try:
        text = decoded(line)
    except UnicodeDecodeError as error:
        raise refuse(place, *not_utf8(error)) from error
    try:
        row = json.loads(text)
        if "\\ud" in text.lower():  # half of a surrogate pair is legal JSON but cannot be encoded
            row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:  # ValueError of its own for a number of more than 4300 digits
        what = "is not JSON" if isinstance(error, json.JSONDecodeError) else "cannot be read as JSON"
        raise refuse(place, f"{what}: {error}", f"write one JSON object per line, or {SKIP}") from error
    if not isinstance(row, dict):
        raise refuse(place, f"is not a JSON object but a {type(row).__name__}", f"write one JSON object per line, or {SKIP}")
    is_suspect = any(text.count(f'"{name}"') > 1 for name in row)  # perhaps a key of an object inside
    if is_suspect and (found := named_twice(_keys(text))):
        raise refuse(place, *found)
    return row


def _keys(text: str) -> list[str]:
    """Return the keys of a JSON object as they are written; a parsed object keeps the last of two that are equal."""
    found: list[str] = []

    def keep(pairs: list[tuple[str, Any]]) -> None:
        found[:] = [name for name, _ in pairs]  # the outermost object comes last

    json.loads(text, object_pairs_hook=keep)
    return found


def named_twice(names: list[str]) -> tuple[str, str] | None:
    """Return the rule and fix of a refusal if two columns have one name."""
    if len(names) == len(set(names)):
        return None
    twice = next(name for name in names if names.count(name) > 1)
    return f"has {names.count(twice)} columns named {twice!r}", "rename or drop all but one of them"


def columns_read(task: str, columns: tuple[str, ...], names: Collection[str]) -> tuple[str, ...]:
    """List the columns that a task reads of rows with columns of these names: chats have several forms, and pairs may have tools."""
    if TASKS[task].pairs and TOOLS in names and TOOLS not in columns:
        return (*columns, TOOLS)
    form = form_of(names, columns[0]) if TASKS[task].chats else None
    return tuple(form.present(names)) if form else columns


def absent_column(task: str, columns: tuple[str, ...], names: Iterable[str]) -> tuple[str, str] | None:
    """Finds a column of the task that is not among `names`: rule and fix of a refusal; None if all are there."""
    facts, names = TASKS[task], list(names)
    if facts.chats and form_of(names, columns[0]):
        return None
    for flag, column in zip(facts.columns[len(facts.columns) - len(columns) :], columns, strict=True):
        if column not in names:
            without = f", or --{flag} '' where both answers begin with it" if flag == facts.optional else ""
            fix = f"name the column with --{flag}{without}; a single odd row: mend it, or {SKIP}"
            if "text_field" in facts.columns and (form := form_of(names)):
                fix = f"use --task sft, which reads such rows ({form.name}), or name a column of text with --{flag}"
            return f"has no column {column!r}, only {', '.join(map(repr, names))}", fix
    return None


def is_empty(value: Any) -> bool:
    """Return True for null, text that is empty or blank, empty lists and bytes, and files without bytes and path."""
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:  # how `datasets` stores a file
        return not (value["bytes"] or value["path"])
    return value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, list | bytes) and not value)


def check_value(value: Any, chats: bool, place: str, tokens: bool = False) -> None:
    """Raises `Refusal` for a value that is no text or, where `chats` are wanted, no list of messages. With `tokens` it may be ready tokens."""
    if not chats and isinstance(value, list) and value and all(type(token) is int for token in value):
        if tokens:
            return
        rule = "holds token ids, which are read from Parquet and Arrow files only"
        raise refuse(place, rule, "make such a file: datasets.load_dataset('json', data_files=FILE, split='train').to_parquet('tokens.parquet')")
    if value is not None and not isinstance(value, list if chats else str):
        expected = "a list of messages (--messages_field)" if chats else "text (--text_field)"
        rule = f"holds {type(value).__name__} {str(value)[:40]!r} where {expected} should be"
        raise refuse(place, rule, f"name another column, mend the row, or {SKIP}")


def unreadable(place: str, error: Exception) -> Refusal:
    return refuse(place, f"cannot be read: {(str(error).strip() or type(error).__name__).splitlines()[0]}", "replace the file, or leave it out")
