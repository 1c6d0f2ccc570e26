"""A parametrised test's cases as frozen dataclasses, so that each value has a name."""

import dataclasses
from typing import Any


def rows(*cases: Any) -> list[Any]:
    """Return the values of each case in the order of its fields, for pytest.mark.parametrize.

    A `pytest.param` and a tuple are returned unchanged.
    """
    return [
        tuple(getattr(case, field.name) for field in dataclasses.fields(case))
        if dataclasses.is_dataclass(case)
        else case
        for case in cases
    ]
