"""Values of tables, as Python objects or as tokens."""

import itertools
from typing import Any

import numpy as np
import pyarrow as pa


def as_python(values: pa.Array) -> list[Any]:
    """Return the values as Python objects; a value that is not UTF-8 becomes its error."""
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


def wrong_tokens(lists: pa.Array, vocabulary: int) -> list[tuple[int, int | None]]:
    """Return the rows with a number that is no token of the vocabulary: (row, the first such
    number).

    One pass if there is none.
    """
    flat = lists.flatten()
    if not flat.null_count:
        values = flat.to_numpy()
        values = values if values.itemsize >= 4 else values.astype(np.int32)
        # negative ones are high
        if not len(values) or int(values.view(f"u{values.itemsize}").max()) < vocabulary:
            return []
    wrong = (
        (row, token)
        for row, ids in enumerate(lists.to_pylist())
        for token in ids or ()
        if token is None or not 0 <= token < vocabulary
    )
    return [next(tokens) for _, tokens in itertools.groupby(wrong, lambda found: found[0])]
