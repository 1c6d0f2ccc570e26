"""Conversion and checks of table values."""

import itertools
from typing import Any

import numpy as np
import pyarrow as pa


def to_python_values(values: pa.Array) -> list[Any]:
    """Return the values as Python objects; a value that is not UTF-8 is replaced by its error."""
    try:
        return values.to_pylist()
    except UnicodeDecodeError:
        found: list[Any] = []
        for value in values:
            try:
                found.append(value.as_py())
            except UnicodeDecodeError as error:
                found.append(error)
        return found


def invalid_tokens(lists: pa.Array, vocabulary: int) -> list[tuple[int, int | None]]:
    """Return (row, first invalid number) for each row that contains an invalid token id.

    If all numbers are valid, one pass over the values is enough.
    """
    flat = lists.flatten()
    if not flat.null_count:
        values = flat.to_numpy()
        values = values if values.itemsize >= 4 else values.astype(np.int32)
        # viewed as unsigned, negative numbers are large
        if not len(values) or int(values.view(f"u{values.itemsize}").max()) < vocabulary:
            return []
    wrong = (
        (row, token)
        for row, ids in enumerate(lists.to_pylist())
        for token in ids or ()
        if token is None or not 0 <= token < vocabulary
    )
    return [next(tokens) for _, tokens in itertools.groupby(wrong, lambda found: found[0])]
