"""Refusals of a config.json with a value that a constructor of transformers does not accept."""

import contextlib
import linecache
import re
import traceback
from collections.abc import Iterator
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError

from ..spec.refusal import Refusal, refuse

# Errors that a model of transformers raises for a wrong value in its config.json, or for a wrong
# input.
WRONG_VALUE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError, StrictDataclassError),
)
ALSO_CALLED = {"padding_idx": "pad_token_id"}  # name in a module of torch -> key of config.json
# words of almost every line, or already checked
SAY_NOTHING = ("model_type", "dtype", "torch_dtype")
QUOTES = ("'([^']+)'", '"([^"]+)"', "`([^`]+)`")
COUNTED = re.compile(
    r".*(size|sizes|head|heads|dim|embd|model|layers?|depths|experts|factor|scalar|channels)"
)


@contextlib.contextmanager
def wrong_values(given: dict[str, Any], where: str) -> Iterator[None]:
    """Refuse a config.json, `given`, if a constructor of transformers fails on it; `where` names
    the model.

    Typical causes are a typing error, a zero or a missing number.
    """
    try:
        yield
    except Refusal:
        raise
    except WRONG_VALUE as error:
        kind = "" if isinstance(error, StrictDataclassError) else f"{type(error).__name__}: "
        suspects = suspects_of(error, dict(_flat(given)))
        probably = f" (probably {' or '.join(suspects)})" if suspects else ""
        said = " ".join(str(error).split())[:400]
        rule = (
            f"transformers {transformers.__version__} does not take its config.json:"
            f" {kind}{said}{probably}"
        )
        raise refuse(where, rule, "correct the value in config.json") from None


def suspects_of(error: BaseException, values: dict[str, Any]) -> list[str]:
    """Return the keys of config.json that probably caused a constructor's error: "key = value", at
    most three.

    They are the first of these that exist: keys whose value the message quotes, numbers of zero or
    less that the model's code read before the error, any zero if the error is a division, keys that
    the message or the statement names.
    """
    said = str(error)
    quoted = {word for quote in QUOTES for word in re.findall(quote, said)}
    found = [
        key
        for key, value in values.items()
        if isinstance(value, str) and value in quoted and key != "model_type"
    ]
    if not found and not isinstance(error, StrictDataclassError):
        named = [_named(words, values) for words in (said, *_statements(error))]
        numbers = {
            key: value
            for key, value in values.items()
            if type(value) in (int, float) and value <= 0
        }
        low = {key for key, value in numbers.items() if value < 0 or COUNTED.fullmatch(key)}
        divisors = [key for key in values if key in low]
        candidates = [[key for key in keys if key in low] for keys in named]
        candidates += [divisors] if isinstance(error, ArithmeticError) else []
        found = next(filter(None, [*candidates, *named]), [])
    return [f"{key} = {values[key]}" for key in found[:3]]


def _named(words: str, values: dict[str, Any]) -> list[str]:
    """Return the keys whose last part is a word in a text."""
    named = {ALSO_CALLED.get(word.lower(), word) for word in re.findall(r"[A-Za-z_]\w*", words)}
    return [key for key in values if key.rpartition(".")[2] in named.difference(SAY_NOTHING)]


def _statements(error: BaseException) -> Iterator[str]:
    """Yield the statements of model classes that were running when an error was raised, innermost
    first.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/transformers/models/" in frame.filename:
            first, last = frame.lineno or 0, frame.end_lineno or 0
            yield "".join(
                linecache.getline(frame.filename, line) for line in range(first, last + 1)
            )


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a config.json."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
