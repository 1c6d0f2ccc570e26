"""Rows of CSV and TSV files (RFC 4180): a header line, quoted fields with commas, line ends and
doubled quotes.

Values are texts.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..spec.refusal import refuse
from .kinds import suffix
from .rows import SKIP, named_twice

FIELD = 64 << 20  # bytes of a field: a quote that is never closed would take the rest of the file
SEPARATORS = {".csv": ",", ".tsv": "\t"}


class Record(NamedTuple):
    """A row below the header, with the number of the line where it ends."""

    header: list[str]
    fields: list[str]
    line: int
    fault: str = ""  # of the row, which has no fields then


def read(stream: BinaryIO, separator: str, place: str) -> tuple[list[str], Iterator[Record]]:
    """Return the header of a file and its rows. Raises `Refusal` for a header that cannot be
    used.
    """
    csv.field_size_limit(FIELD)
    # The codec drops a byte order mark before the quotes of the header are read. Bytes of another
    # encoding are kept for `row_of`.
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(text, delimiter=separator, strict=True)
    try:
        header = next((fields for fields in rows if fields), [])
    except csv.Error as error:
        raise refuse(
            place, f"its header cannot be read: {error}", "correct the first line"
        ) from error
    if not header:
        raise refuse(place, "is empty", f"download it again, or {SKIP}")
    _check_header(header, separator, place)
    return header, _records(rows, header)


def _records(rows: Any, header: list[str]) -> Iterator[Record]:
    while True:
        try:
            fields = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield Record(header, [], rows.line_num, f"cannot be read: {error}")
            continue
        if fields and len(fields) != len(header):
            yield Record(
                header,
                [],
                rows.line_num,
                f"has {len(fields)} fields, but the header has {len(header)}",
            )
        elif fields:  # not an empty line
            yield Record(header, fields, rows.line_num)


def _check_header(header: list[str], separator: str, place: str) -> None:
    if any("\udc80" <= sign <= "\udcff" for name in header for sign in name):
        utf16 = header[0].startswith(("\udcff\udcfe", "\udcfe\udcff"))
        kind = "utf-16" if utf16 else "latin1"
        raise refuse(
            place,
            f"its header is {'UTF-16, ' if utf16 else ''}not UTF-8",
            f"convert the file (iconv -f {kind} -t utf-8), or {SKIP}",
        )
    if found := named_twice(header):
        raise refuse(place, *found)
    other = next((sign for sign in ";\t|," if sign != separator and sign in header[0]), "")
    if len(header) == 1 and other:
        rule = (
            f"its header has one column, {header[0]!r}. Files with this ending must separate"
            f" columns by {separator!r}"
        )
        raise refuse(
            place,
            rule,
            f"separate the columns by {separator!r}"
            + (", or rename it to end in .tsv" if other == "\t" else ""),
        )


def row_of(record: Record, place: str) -> dict[str, Any]:
    """Return a row by its columns. Raises `Refusal` for a row that cannot be read."""
    if record.fault:
        raise refuse(f"{place} (line {record.line})", record.fault, f"correct the row, or {SKIP}")
    row = dict(zip(record.header, record.fields, strict=True))
    for name, value in row.items():
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                rule = (
                    f"its column {name!r} is not UTF-8: byte"
                    f" {ord(value[error.start]) - 0xDC00:#04x}"
                )
                raise refuse(
                    f"{place} (line {record.line})",
                    rule,
                    f"convert the file (iconv -f latin1 -t utf-8), or {SKIP}",
                ) from error
    return row


def separator_of(file: Path) -> str:
    return SEPARATORS[suffix(file)]
