"""The first row of local files, which is checked when a run is planned."""

import codecs
import contextlib
import json
import re
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..spec.errors import ConfigError, config_error
from ..spec.hub import MAX_POINTER_BYTES, check_lfs_pointer
from ..spec.task_specs import TASKS
from . import csv_rows
from .chat_rows import JSON_CHAT, chat_forms, is_json_chat, match_chat_form
from .columns import columns_to_read, missing_column
from .compression import check_text, compression_of, open_decompressed
from .files import image_classes, local_files
from .kinds import kind_of
from .request import Request
from .rows import (
    SKIP_FIX,
    check_value,
    duplicate_column,
    encoding_problem,
    is_empty,
    parse_json_row,
    unreadable_error,
)

# number of bytes at the start of a file that are checked before a run; if the first row is longer,
# only its beginning is checked
FIRST_BYTES = 1 << 20

# The plan checks up to this many files for Git LFS pointers, but only one image. `file_digests`
# checks all files.
MAX_CHECKED_POINTERS = 256


class FirstRow(NamedTuple):
    """The first row of a file, with only the columns that a task reads."""

    place: str
    names: list[str]  # names of all columns; empty for a text file
    values: dict[str, Any]  # empty if there is no row, or if the row is longer than `FIRST_BYTES`


def check_first_row(files: list[Path], dataset: str, request: Request) -> None:
    """Raise `ConfigError` for local files whose first row the task cannot read.

    If bad rows are skipped, no row is checked.
    """
    files = (
        "image" in request.names and local_files(dataset, True, request.split, request.subset)
    ) or files
    kind = kind_of(files, dataset)
    check_kind(kind, files, dataset, request)
    if not files:
        return
    _check_pointers(files, kind)
    _check_any_document(files, kind, dataset, request)
    if not request.skip:
        _check_first_values(_first_row(files[0], kind, request), kind, request)


def _check_pointers(files: list[Path], kind: str) -> None:
    """Raise `ConfigError` if a file is a Git LFS pointer."""
    for file in files[: 1 if kind == "pictures" else MAX_CHECKED_POINTERS]:
        if file.stat().st_size < MAX_POINTER_BYTES:
            check_lfs_pointer(file, file.read_bytes())


def _check_any_document(files: list[Path], kind: str, dataset: str, request: Request) -> None:
    """Raise `ConfigError` if small text or line files contain no document."""
    if kind not in ("text", "lines") or sum(file.stat().st_size for file in files) > FIRST_BYTES:
        return
    if _all_empty(files, kind, request):
        column = f", or name the column with --{request.fields[0]}" if kind == "lines" else ""
        raise config_error(
            f"--dataset {dataset}",
            "contains no document: every row is empty (null, no text or blank)",
            f"use other data{column}",
        )


def _first_row(file: Path, kind: str, request: Request) -> FirstRow:
    """Read the first row of a file; raise `ConfigError` if it cannot be read."""
    place, columns = f"{file}, row 1", request.columns
    try:
        if kind in ("text", "lines", "csv"):
            check_text(file)
        if kind == "text":
            codecs.getincrementaldecoder("utf-8")().decode(_first_bytes(file))
            return FirstRow(place, [], {})
        if kind == "pictures":
            return FirstRow(str(file), list(columns), {columns[0]: file})
        if kind == "lines":
            number, values = _first_json_row(file, columns)
            return FirstRow(f"{file}, row {number}", list(values), values)
        if kind == "csv":
            return FirstRow(place, *_first_csv_row(file))
        wanted = partial(columns_to_read, request.task, columns)
        return FirstRow(place, *_first_table_row(file, kind, wanted))
    except UnicodeDecodeError as error:
        raise config_error(place, *encoding_problem(error)) from error
    except (OSError, ValueError, EOFError, NotImplementedError, zlib.error) as error:
        raise error if isinstance(error, ConfigError) else unreadable_error(place, error) from error


def _check_first_values(row: FirstRow, kind: str, request: Request) -> None:
    """Raise `ConfigError` for a row that the task cannot use."""
    place, names, values = row
    columns = request.columns
    if not names:
        return
    if absent := missing_column(request.task, columns, names):
        raise config_error(place, *absent)

    if request.as_rows:
        renamed = zip(request.names, columns, strict=True)
        sample = {name: values[column] for name, column in renamed if column in values}
        _check_sample(sample, place, is_image="image" in request.names)
    elif request.chats and (form := match_chat_form(names, columns[0])):
        if values:
            form.content(values, place, padded=kind != "lines")
    elif not is_empty(values.get(columns[0])):
        check_value(values[columns[0]], request.chats, place, tokens=kind != "lines")


def _all_empty(files: list[Path], kind: str, request: Request) -> bool:
    """Return True if small files contain no document.

    A larger corpus is checked when the run opens it.
    """
    column, is_blank = request.columns[0], False
    try:
        for file in files:
            content = _first_bytes(file).removeprefix(codecs.BOM_UTF8)
            is_blank |= bool(content)
            for number, line in enumerate(
                content.split(b"\n") if kind == "lines" else [content], 1
            ):
                if not line.strip():
                    continue
                row = (
                    parse_json_row(line, f"{file}, row {number}")
                    if kind == "lines"
                    else {column: "text"}
                )
                if column not in row or not is_empty(row[column]):
                    return False
    except (ConfigError, OSError, EOFError, zlib.error):
        return False  # another check rejects a broken file
    # `_first_json_row` reports a file without content
    return is_blank or kind == "text" or request.skip


def check_kind(kind: str, files: list[Path], dataset: str, request: Request) -> None:
    """Raise `ConfigError` if the task does not support this kind of file.

    Each class of images must have its own folder.
    """
    where = f"--dataset {dataset}"
    if kind == "text" and request.chats:
        raise no_chats(dataset)
    if kind == "text" and request.as_rows:
        raise no_table(dataset, request)
    if kind == "pictures" and request.names != ("image", "label"):
        fixing = [
            task for task, facts in TASKS.items() if facts.columns == ("image_field", "label_field")
        ]
        raise config_error(
            where,
            f"contains images, which task {request.task} does not support",
            f"use --task {' or '.join(fixing)}, or use other data",
        )
    if kind == "pictures":
        image_classes(files, dataset)


def no_table(dataset: str, request: Request) -> ConfigError:
    rule = (
        f"is text, but task {request.task} requires rows with the columns"
        f" {', '.join(request.columns)}"
    )
    return config_error(
        f"--dataset {dataset}",
        rule,
        "use Parquet, Arrow or JSON"
        f" lines{', or images in one folder per class' * ('image' in request.names)}",
    )


def _check_sample(row: dict[str, Any], place: str, is_image: bool) -> None:
    """Raise `ConfigError` for an invalid image, class number or pair.

    A pair's prompt and answers must not be chats stored as JSON strings.
    """
    for name in row.keys() & {"prompt", "chosen", "rejected"}:
        if is_json_chat(row[name]):
            raise config_error(
                place, f"its {name} contains {JSON_CHAT[0]}", f"{JSON_CHAT[1]}, or {SKIP_FIX}"
            )
    if not is_image or ("image" in row and is_empty(row["image"])):
        return
    from .images import class_number, open_image  # only samples need this import

    for name, check in (("image", open_image), ("label", class_number)):
        try:
            if name in row:
                check(row[name])
        except (TypeError, ValueError) as error:
            raise config_error(
                place,
                f"its {name} {error}",
                f"name another column with --{name}_field, correct the row, or {SKIP_FIX}",
            ) from error


def _first_bytes(file: Path) -> bytes:
    with file.open("rb") as stream, open_decompressed(stream, compression_of(file)) as content:
        return content.read(FIRST_BYTES)


def _first_json_row(file: Path, columns: tuple[str, ...]) -> tuple[int, dict[str, Any]]:
    """Return (row number, content) of the first row that is not blank.

    The content is empty if the row is longer than `FIRST_BYTES`.
    """
    head = _first_bytes(file).removeprefix(codecs.BOM_UTF8)
    if not head:
        raise config_error(str(file), "is empty", f"download it again, or {SKIP_FIX}")
    lines = head.split(b"\n")
    if len(head) == FIRST_BYTES:
        lines.pop()  # the last line is incomplete
    number, line = next(
        ((number, line) for number, line in enumerate(lines, 1) if line.strip()), (1, b"")
    )
    _check_document(
        file, line or head, alone=line.strip() == head.strip() or not line, columns=columns
    )
    return number, parse_json_row(line, f"{file}, row {number}") if line else {}


# an object whose first value is a list of objects
_ROWS = re.compile(r'\{\s*"([^"]+)"\s*:\s*\[\s*\{')


def _check_document(file: Path, line: bytes, alone: bool, columns: tuple[str, ...]) -> None:
    """Raise `ConfigError` if a file is one JSON document instead of one object per line.

    `line` is the first row, or the row's beginning if the row is long. `alone` is True if the file
    has no other row.
    """
    text = line.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if row is None and text.rstrip() == "{":  # a document over several lines
        text = _first_bytes(file).decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    read = {
        *columns,
        *(name for form in chat_forms(columns[0]) for name in (*form.columns, *form.optional)),
    }
    if isinstance(row, dict):
        listed = [
            name
            for name, value in row.items()
            if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        rows = "" if read & row.keys() else next(iter(listed), "")
    else:
        rows = found[1] if (found := _ROWS.match(text)) and found[1] not in read else ""

    if text.startswith("[") and (row is None or alone):
        rule, field = "must have one JSON object per line, but is a single JSON list", ""
    elif rows and (row is None or alone):
        rule, field = (
            f"must have one JSON object per line, but is a single object with its rows in {rows!r}",
            f", field={rows!r}",
        )
    elif row is None and line.strip() == b"{":
        rule, field = "must have one JSON object per line, but its objects span several lines", ""
    else:
        return
    convert = (
        f"datasets.load_dataset('json', data_files={str(file)!r}{field},"
        " split='train').to_json('rows.jsonl')"
    )
    raise config_error(str(file), rule, f"convert it with {convert}, and name rows.jsonl")


def _first_csv_row(file: Path) -> tuple[list[str], dict[str, Any]]:
    """Return (columns, first row) of a file; the row is {} if the file has no row."""
    with file.open("rb") as stream, open_decompressed(stream, compression_of(file)) as content:
        header, rows = csv_rows.read_csv(content, csv_rows.separator_of(file), str(file))
        first = next(rows, None)
        return header, {} if first is None else csv_rows.parse_csv_record(first, f"{file}, row 1")


def _first_table_row(
    file: Path, kind: str, wanted: Callable[[list[str]], tuple[str, ...]]
) -> tuple[list[str], dict[str, Any]]:
    """Return (the names of all columns, the first value in each `wanted` column).

    The values are {} if a wanted column is missing or if the table has no row.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as closing:
        if kind == "parquet":
            table = closing.enter_context(pq.ParquetFile(file))
            names = table.schema_arrow.names
            if found := duplicate_column(names):
                raise config_error(str(file), *found)
            columns = wanted(names)
            batches = (
                table.iter_batches(1, columns=list(columns), use_threads=False)
                if {*columns} <= {*names}
                else iter(())
            )
        else:
            opened = closing.enter_context(pa.memory_map(str(file)))
            try:
                table = pa.ipc.open_stream(opened)
                batches = iter(table)
            except pa.ArrowInvalid:
                table = pa.ipc.open_file(opened)
                batches = map(table.get_batch, range(table.num_record_batches))
            names = table.schema.names
            if found := duplicate_column(names):
                raise config_error(str(file), *found)
            columns = wanted(names)
        first = next(
            (batch for batch in batches if {*columns} <= {*names} and batch.num_rows), None
        )
        return names, (
            {} if first is None else {column: first.column(column)[0].as_py() for column in columns}
        )


def no_chats(dataset: str) -> ConfigError:
    return config_error(
        f"--dataset {dataset}",
        "task sft requires chats, but these are text files",
        "use JSONL or Parquet, and name the column of the chats with --messages_field",
    )
