"""Rows of CSV and TSV files (RFC 4180).

A file must begin with a header line. Quoted fields may contain commas, line ends and doubled
quotes. All values are strings.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ..spec.errors import config_error
from .kinds import suffix
from .rows import SKIP_FIX, duplicate_column

if TYPE_CHECKING:
    from _csv import Reader

MAX_FIELD_BYTES = 64 << 20  # bytes: an unclosed quote would include the rest of the file
SEPARATORS = {".csv": ",", ".tsv": "\t"}


class CsvRecord(NamedTuple):
    """A row below the header, with the number of its last line."""

    header: list[str]
    fields: list[str]
    line: int
    fault: str = ""  # error message of a malformed row, which has no fields


def read_csv(stream: BinaryIO, separator: str, place: str) -> tuple[list[str], Iterator[CsvRecord]]:
    """Return (header, rows) of a file; raise `ConfigError` for an unusable header."""
    csv.field_size_limit(MAX_FIELD_BYTES)
    # The codec drops a byte order mark, which would otherwise precede the header's first quote.
    # Bytes in a different encoding are kept for `parse_csv_record`.
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(text, delimiter=separator, strict=True)
    try:
        header = next((fields for fields in rows if fields), [])
    except csv.Error as error:
        raise config_error(
            place, f"its header cannot be read: {error}", "correct the first line"
        ) from error
    if not header:
        raise config_error(place, "is empty", f"download it again, or {SKIP_FIX}")
    _check_header(header, separator, place)
    return header, _records(rows, header)


def _records(rows: "Reader", header: list[str]) -> Iterator[CsvRecord]:
    while True:
        try:
            fields = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield CsvRecord(header, [], rows.line_num, f"cannot be read: {error}")
            continue
        if fields and len(fields) != len(header):
            yield CsvRecord(
                header,
                [],
                rows.line_num,
                f"has {len(fields)} fields, but the header has {len(header)}",
            )
        elif fields:  # not an empty line
            yield CsvRecord(header, fields, rows.line_num)


def _check_header(header: list[str], separator: str, place: str) -> None:
    if any("\udc80" <= sign <= "\udcff" for name in header for sign in name):
        utf16 = header[0].startswith(("\udcff\udcfe", "\udcfe\udcff"))
        kind = "utf-16" if utf16 else "latin1"
        raise config_error(
            place,
            f"its header is {'UTF-16, ' if utf16 else ''}not UTF-8",
            f"convert the file (iconv -f {kind} -t utf-8), or {SKIP_FIX}",
        )
    if found := duplicate_column(header):
        raise config_error(place, *found)
    other = next((sign for sign in ";\t|," if sign != separator and sign in header[0]), "")
    if len(header) == 1 and other:
        rule = (
            f"its header has one column, {header[0]!r}. Files with this ending must separate"
            f" columns by {separator!r}"
        )
        raise config_error(
            place,
            rule,
            f"separate the columns by {separator!r}"
            + (", or rename it to end in .tsv" if other == "\t" else ""),
        )


def parse_csv_record(record: CsvRecord, place: str) -> dict[str, Any]:
    """Return a row as {column: value}; raise `ConfigError` for a row that cannot be read."""
    if record.fault:
        raise config_error(
            f"{place} (line {record.line})", record.fault, f"correct the row, or {SKIP_FIX}"
        )
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
                raise config_error(
                    f"{place} (line {record.line})",
                    rule,
                    f"convert the file (iconv -f latin1 -t utf-8), or {SKIP_FIX}",
                ) from error
    return row


def separator_of(file: Path) -> str:
    return SEPARATORS[suffix(file)]
