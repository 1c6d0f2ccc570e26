"""One row of a file: its text, its value, and the errors of either."""

import json
from typing import Any

from ..spec.refusal import Refusal, refuse
from .compression import SIGN_BYTES, compressed_as

SKIP = "leave it out (--bad_rows skip)"


def decoded(value: bytes, errors: str = "strict") -> str:
    """Decodes text of a file. Raises UnicodeDecodeError, which `not_utf8` puts into words."""
    return value.decode("utf-8", errors).removeprefix("\ufeff").replace("\r\n", "\n")


def not_utf8(error: UnicodeDecodeError) -> tuple[str, str]:
    """Says what is wrong with text of another encoding: rule and fix of a refusal."""
    if error.object[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "is UTF-16, not UTF-8", f"convert the file (iconv -f utf-16 -t utf-8), or {SKIP}"
    if name := compressed_as(error.object[:SIGN_BYTES]):
        return (
            f"must be text, but is compressed ({name})",
            (
                "give an address that ends in .gz or another compression ending. If a file is"
                " compressed twice, decompress it once"
            ),
        )
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
    except (ValueError, RecursionError) as error:
        # A number of more than 4300 digits raises a ValueError that is no JSONDecodeError.
        what = (
            "is not JSON" if isinstance(error, json.JSONDecodeError) else "cannot be read as JSON"
        )
        raise refuse(
            place, f"{what}: {error}", f"write one JSON object per line, or {SKIP}"
        ) from error
    if not isinstance(row, dict):
        raise refuse(
            place,
            f"must be a JSON object, not a {type(row).__name__}",
            f"write one JSON object per line, or {SKIP}",
        )
    # perhaps a key of an object inside
    is_suspect = any(text.count(f'"{name}"') > 1 for name in row)
    if is_suspect and (found := named_twice(_keys(text))):
        raise refuse(place, *found)
    return row


def _keys(text: str) -> list[str]:
    """Return the keys of a JSON object as they are written; a parsed object keeps the last of two
    that are equal.
    """
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
    return (
        f"has {names.count(twice)} columns named {twice!r}",
        "rename or delete all but one of them",
    )


def is_empty(value: Any) -> bool:
    """Return True for null, text that is empty or blank, empty lists and bytes, and files without
    bytes and path.
    """
    # how `datasets` stores a file
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        return not (value["bytes"] or value["path"])
    return (
        value is None
        or (isinstance(value, str) and not value.strip())
        or (isinstance(value, list | bytes) and not value)
    )


def check_value(value: Any, chats: bool, place: str, tokens: bool = False) -> None:
    """Raises `Refusal` for a value that is not empty and is no text or, where `chats` are wanted,
    no list of messages.

    With `tokens` it may be ready tokens.
    """
    if (
        not chats
        and isinstance(value, list)
        and value
        and all(type(token) is int for token in value)
    ):
        if tokens:
            return
        rule = "contains token ids, which require a Parquet or Arrow file"
        raise refuse(
            place,
            rule,
            "convert the file: datasets.load_dataset('json', data_files=FILE,"
            " split='train').to_parquet('tokens.parquet')",
        )
    if not isinstance(value, list if chats else str):
        expected = "a list of messages (--messages_field)" if chats else "text (--text_field)"
        rule = f"must be {expected}, not {type(value).__name__} {str(value)[:40]!r}"
        raise refuse(place, rule, f"name another column, correct the row, or {SKIP}")


def unreadable(place: str, error: Exception) -> Refusal:
    return refuse(
        place,
        f"cannot be read: {(str(error).strip() or type(error).__name__).splitlines()[0]}",
        "replace the file, or leave it out of --dataset",
    )
