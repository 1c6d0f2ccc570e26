"""Types what a check of a host finds: rows of a table, and problems."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..spec.refusal import Problem


class Row(NamedTuple):
    """Holds one line of the table: what was looked at, and what was found."""

    check: str
    value: str


Findings = Iterator[Row | Problem]


def existing(path: Path) -> Path:
    """Returns the path, or the nearest folder above it that exists."""
    return next(
        folder for folder in (path.absolute(), *path.absolute().parents) if os.path.exists(folder)
    )  # not Path.exists(), which raises without permission


def amount(size: float) -> str:
    """Writes bytes as a person reads them."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def to_json(findings: Findings) -> list[Any]:
    """Writes rows as two, problems as three strings."""
    return json.loads(
        json.dumps(
            [
                list(item) if isinstance(item, Row) else [item.where, item.rule, item.fix]
                for item in findings
            ]
        )
    )


def from_json(items: list[Any]) -> list[Row | Problem]:
    return [Row(*item) if len(item) == 2 else Problem(*item) for item in items]
