"""One row of a file: its text, its value, and the errors of both."""

import json
from typing import Any

from ..spec.errors import ConfigError, config_error
from .compression import SIGNATURE_BYTES, detect_compression

SKIP_FIX = "leave it out (--bad_rows skip)"


def decode_text(value: bytes, errors: str = "strict") -> str:
    """Decode the text of a file; `encoding_problem` explains a UnicodeDecodeError raised here."""
    return value.decode("utf-8", errors).removeprefix("\ufeff").replace("\r\n", "\n")


def encoding_problem(error: UnicodeDecodeError) -> tuple[str, str]:
    """Return the rule and fix of a config error for text in a different encoding."""
    if error.object[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "is UTF-16, not UTF-8", f"convert the file (iconv -f utf-16 -t utf-8), or {SKIP_FIX}"
    if name := detect_compression(error.object[:SIGNATURE_BYTES]):
        return (
            f"must be text, but is compressed ({name})",
            (
                "give an address that ends in .gz or another compression ending. If a file is"
                " compressed twice, decompress it once"
            ),
        )
    rule = f"is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
    return rule, f"convert the file (iconv -f latin1 -t utf-8), or {SKIP_FIX}"


def parse_json_row(line: bytes, place: str) -> dict[str, Any]:
    """Parse a line of JSON; raise `ConfigError` if the line is not an object."""
    try:
        text = decode_text(line)
    except UnicodeDecodeError as error:
        raise config_error(place, *encoding_problem(error)) from error
    try:
        row = json.loads(text)
        if "\\ud" in text.lower():  # half of a surrogate pair is valid JSON but cannot be encoded
            row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        # A number with more than 4300 digits raises a ValueError that is not a JSONDecodeError.
        what = (
            "is not JSON" if isinstance(error, json.JSONDecodeError) else "cannot be read as JSON"
        )
        raise config_error(
            place, f"{what}: {error}", f"write one JSON object per line, or {SKIP_FIX}"
        ) from error
    if not isinstance(row, dict):
        raise config_error(
            place,
            f"must be a JSON object, not a {type(row).__name__}",
            f"write one JSON object per line, or {SKIP_FIX}",
        )
    # the second occurrence may be a key of a nested object
    is_suspect = any(text.count(f'"{name}"') > 1 for name in row)
    if is_suspect and (found := duplicate_column(_json_keys(text))):
        raise config_error(place, *found)
    return row


def _json_keys(text: str) -> list[str]:
    """Return the keys of a JSON object as written in the text.

    If a key occurs several times, the parsed object contains only the last occurrence.
    """
    found: list[str] = []

    def keep(pairs: list[tuple[str, Any]]) -> None:
        found[:] = [name for name, _ in pairs]  # the outermost object comes last

    json.loads(text, object_pairs_hook=keep)
    return found


def duplicate_column(names: list[str]) -> tuple[str, str] | None:
    """Return the rule and fix of a config error if two columns have the same name.

    Return None if all names are different.
    """
    if len(names) == len(set(names)):
        return None
    twice = next(name for name in names if names.count(name) > 1)
    return (
        f"has {names.count(twice)} columns named {twice!r}",
        "rename or delete all but one of them",
    )


def is_empty(value: object) -> bool:
    """Return True for an empty value.

    The following values are empty: null, blank text, empty lists and bytes, and files without bytes
    and path.
    """
    # the form in which `datasets` stores a file
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        return not (value["bytes"] or value["path"])
    return (
        value is None
        or (isinstance(value, str) and not value.strip())
        or (isinstance(value, list | bytes) and not value)
    )


def check_value(value: object, chats: bool, place: str, tokens: bool = False) -> None:
    """Raise `ConfigError` for a value of the wrong type.

    A non-empty value must be a string or, with `chats`, a list of messages. With `tokens`, the
    value may also be a list of token ids.
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
        raise config_error(
            place,
            rule,
            "convert the file: datasets.load_dataset('json', data_files=FILE,"
            " split='train').to_parquet('tokens.parquet')",
        )
    if not isinstance(value, list if chats else str):
        expected = "a list of messages (--messages_field)" if chats else "text (--text_field)"
        rule = f"must be {expected}, not {type(value).__name__} {str(value)[:40]!r}"
        raise config_error(place, rule, f"name another column, correct the row, or {SKIP_FIX}")


def unreadable_error(place: str, error: Exception) -> ConfigError:
    return config_error(
        place,
        f"cannot be read: {(str(error).strip() or type(error).__name__).splitlines()[0]}",
        "replace the file, or leave it out of --dataset",
    )
