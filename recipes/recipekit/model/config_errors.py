"""Config errors for config.json values that a constructor in transformers rejects."""

import contextlib
import linecache
import re
import traceback
from collections.abc import Iterator
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError

from ..spec.errors import ConfigError, config_error

# Errors that a transformers model raises for an invalid value in its config.json or for an invalid
# input.
CONSTRUCTOR_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError, StrictDataclassError),
)
KEY_ALIASES = {"padding_idx": "pad_token_id"}  # name in a torch module -> config.json key
# Keys that appear in almost every line of model code, or are already checked.
UNINFORMATIVE_KEYS = ("model_type", "dtype", "torch_dtype")
QUOTES = ("'([^']+)'", '"([^"]+)"', "`([^`]+)`")
SIZE_KEYS = re.compile(
    r".*(size|sizes|head|heads|dim|embd|model|layers?|depths|experts|factor|scalar|channels)"
)


@contextlib.contextmanager
def wrong_values(given: dict[str, Any], where: str) -> Iterator[None]:
    """Raise `ConfigError` if a transformers constructor fails on the config.json `given`.

    `where` is the model's name. Typical causes are a typing error, a zero or a missing number.
    """
    try:
        yield
    except ConfigError:
        raise
    except CONSTRUCTOR_ERRORS as error:
        kind = "" if isinstance(error, StrictDataclassError) else f"{type(error).__name__}: "
        suspects = suspects_of(error, dict(_flatten_config(given)))
        probably = f" (probably {' or '.join(suspects)})" if suspects else ""
        said = " ".join(str(error).split())[:400]
        rule = (
            f"transformers {transformers.__version__} does not take its config.json:"
            f" {kind}{said}{probably}"
        )
        raise config_error(where, rule, "correct the value in config.json") from None


def suspects_of(error: BaseException, values: dict[str, Any]) -> list[str]:
    """Return the config.json keys that probably caused a constructor's error.

    The result contains at most three strings "key = value". They come from the first of these
    groups that is not empty:

    - keys whose value the message quotes
    - numbers of zero or less that the model's code read before the error
    - any zero, if the error is a division
    - keys that appear in the message or the statement
    """
    said = str(error)
    quoted = {word for quote in QUOTES for word in re.findall(quote, said)}
    found = [
        key
        for key, value in values.items()
        if isinstance(value, str) and value in quoted and key != "model_type"
    ]
    if not found and not isinstance(error, StrictDataclassError):
        named = [_keys_named_in(words, values) for words in (said, *_statements(error))]
        numbers = {
            key: value
            for key, value in values.items()
            if type(value) in (int, float) and value <= 0
        }
        low = {key for key, value in numbers.items() if value < 0 or SIZE_KEYS.fullmatch(key)}
        divisors = [key for key in values if key in low]
        candidates = [[key for key in keys if key in low] for keys in named]
        candidates += [divisors] if isinstance(error, ArithmeticError) else []
        found = next(filter(None, [*candidates, *named]), [])
    return [f"{key} = {values[key]}" for key in found[:3]]


def _keys_named_in(text: str, values: dict[str, Any]) -> list[str]:
    """Return the keys whose last component appears as a word in the text."""
    named = {KEY_ALIASES.get(word.lower(), word) for word in re.findall(r"[A-Za-z_]\w*", text)}
    return [key for key in values if key.rpartition(".")[2] in named.difference(UNINFORMATIVE_KEYS)]


def _statements(error: BaseException) -> Iterator[str]:
    """Yield the statements in model classes that were running when the error was raised.

    The innermost statement comes first.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/transformers/models/" in frame.filename:
            first, last = frame.lineno or 0, frame.end_lineno or 0
            yield "".join(
                linecache.getline(frame.filename, line) for line in range(first, last + 1)
            )


def _flatten_config(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) pairs of a config.json."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flatten_config(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
