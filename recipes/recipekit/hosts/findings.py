"""Types for a host check's results: rows of a table, and problems."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..spec.errors import Problem


class ReportRow(NamedTuple):
    """One line of the table: the checked item and its value."""

    label: str
    value: str


Findings = Iterator[ReportRow | Problem]


def existing_ancestor(path: Path) -> Path:
    """Return the path, or its nearest parent folder that exists."""
    return next(
        folder for folder in (path.absolute(), *path.absolute().parents) if os.path.exists(folder)
    )  # Path.exists() would raise without permission


def format_bytes(size: float) -> str:
    """Format a number of bytes as human-readable text."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def to_json(findings: Findings) -> list[Any]:
    """Return rows as lists of two strings, and problems as lists of three strings."""
    return json.loads(
        json.dumps(
            [
                list(item) if isinstance(item, ReportRow) else [item.where, item.rule, item.fix]
                for item in findings
            ]
        )
    )


def from_json(items: list[Any]) -> list[ReportRow | Problem]:
    return [ReportRow(*item) if len(item) == 2 else Problem(*item) for item in items]
