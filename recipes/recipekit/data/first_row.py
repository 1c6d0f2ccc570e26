"""The first row of local files, which is read when a run is planned."""

import codecs
import contextlib
import json
import re
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..spec.hub import POINTER_BYTES, check_pointer
from ..spec.refusal import Refusal, refuse
from ..spec.task_specs import TASKS
from . import csv_rows
from .chat_rows import JSON_CHAT, form_of, forms, is_json_chat
from .columns import absent_column, columns_read
from .compression import check_text, compression_of, decompressed
from .files import local_files, picture_classes
from .kinds import kind_of
from .request import Request
from .rows import SKIP, check_value, is_empty, named_twice, not_utf8, row_of, unreadable

# of a file that are looked at before a run: a longer row is judged by its beginning
FIRST_BYTES = 1 << 20

# the plan checks as many files for pointers of Git LFS, and one picture; `digests` checks all
POINTERS = 256


class FirstRow(NamedTuple):
    """The first row of a file, as far as a task reads it."""

    place: str
    names: list[str]  # of all columns; empty if the file is text
    values: dict[str, Any]  # empty if there is no row, or the row is longer than `FIRST_BYTES`


def check_first_row(files: list[Path], dataset: str, request: Request) -> None:
    """Raises `Refusal` for local files whose first row the task cannot read.

    No row is looked at where bad rows are to be left out.
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
        _check_row(_first_row(files[0], kind, request), kind, request)


def _check_pointers(files: list[Path], kind: str) -> None:
    """Raise `Refusal` for a pointer of Git LFS instead of a file."""
    for file in files[: 1 if kind == "pictures" else POINTERS]:
        if file.stat().st_size < POINTER_BYTES:
            check_pointer(file, file.read_bytes())


def _check_any_document(files: list[Path], kind: str, dataset: str, request: Request) -> None:
    """Raise `Refusal` for small files of text or lines without a document."""
    if kind not in ("text", "lines") or sum(file.stat().st_size for file in files) > FIRST_BYTES:
        return
    if _all_empty(files, kind, request):
        column = f", or name the column with --{request.fields[0]}" if kind == "lines" else ""
        raise refuse(
            f"--dataset {dataset}",
            "contains no document: every row is empty (null, no text or blank)",
            f"use other data{column}",
        )


def _first_row(file: Path, kind: str, request: Request) -> FirstRow:
    """Read the first row of a file. Raise `Refusal` if it cannot be read."""
    place, columns = f"{file}, row 1", request.columns
    try:
        if kind in ("text", "lines", "csv"):
            check_text(file)
        if kind == "text":
            codecs.getincrementaldecoder("utf-8")().decode(_head(file))
            return FirstRow(place, [], {})
        if kind == "pictures":
            return FirstRow(str(file), list(columns), {columns[0]: file})
        if kind == "lines":
            number, values = _first_of_lines(file, columns)
            return FirstRow(f"{file}, row {number}", list(values), values)
        if kind == "csv":
            return FirstRow(place, *_first_of_csv(file))
        wanted = partial(columns_read, request.task, columns)
        return FirstRow(place, *_first_of_table(file, kind, wanted))
    except UnicodeDecodeError as error:
        raise refuse(place, *not_utf8(error)) from error
    except (OSError, ValueError, EOFError, NotImplementedError, zlib.error) as error:
        raise error if isinstance(error, Refusal) else unreadable(place, error) from error


def _check_row(row: FirstRow, kind: str, request: Request) -> None:
    """Raise `Refusal` for a row that the task cannot use."""
    place, names, values = row
    columns = request.columns
    if not names:
        return
    if absent := absent_column(request.task, columns, names):
        raise refuse(place, *absent)

    if request.as_rows:
        renamed = zip(request.names, columns, strict=True)
        sample = {name: values[column] for name, column in renamed if column in values}
        _check_sample(sample, place)
    elif request.chats and (form := form_of(names, columns[0])):
        if values:
            form.content(values, place, padded=kind != "lines")
    elif not is_empty(values.get(columns[0])):
        check_value(values[columns[0]], request.chats, place, tokens=kind != "lines")


def _all_empty(files: list[Path], kind: str, request: Request) -> bool:
    """Return True if small files hold no document.

    A larger corpus is checked when the run opens it.
    """
    column, is_blank = request.columns[0], False
    try:
        for file in files:
            content = _head(file).removeprefix(codecs.BOM_UTF8)
            is_blank |= bool(content)
            for number, line in enumerate(
                content.split(b"\n") if kind == "lines" else [content], 1
            ):
                if not line.strip():
                    continue
                row = row_of(line, f"{file}, row {number}") if kind == "lines" else {column: "text"}
                if column not in row or not is_empty(row[column]):
                    return False
    except (Refusal, OSError, EOFError, zlib.error):
        return False  # a broken file is refused by another check
    # `_first_of_lines` names a file without content
    return is_blank or kind == "text" or request.skip


def check_kind(kind: str, files: list[Path], dataset: str, request: Request) -> None:
    """Raises `Refusal` if the task cannot take files of this kind, or pictures that lie otherwise
    than in a folder for each class.
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
        raise refuse(
            where,
            f"contains images, which task {request.task} does not support",
            f"use --task {' or '.join(fixing)}, or use other data",
        )
    if kind == "pictures":
        picture_classes(files, dataset)


def no_table(dataset: str, request: Request) -> Refusal:
    rule = (
        f"is text, but task {request.task} requires rows with the columns"
        f" {', '.join(request.columns)}"
    )
    return refuse(
        f"--dataset {dataset}",
        rule,
        "use Parquet, Arrow or JSON"
        f" lines{', or images in one folder per class' * ('image' in request.names)}",
    )


def _check_sample(row: dict[str, Any], place: str) -> None:
    """Raises `Refusal` for a picture that cannot be decoded, a class that is no number, and a chat
    of a pair that is a text.
    """
    for name in row.keys() & {"prompt", "chosen", "rejected"}:
        if is_json_chat(row[name]):
            raise refuse(place, f"its {name} contains {JSON_CHAT[0]}", f"{JSON_CHAT[1]}, or {SKIP}")
    if not row.keys() & {"image", "label"} or ("image" in row and is_empty(row["image"])):
        return
    from .pictures import class_number, opened  # which nothing but a sample needs

    for name, check in (("image", opened), ("label", class_number)):
        try:
            if name in row:
                check(row[name])
        except (TypeError, ValueError) as error:
            raise refuse(
                place,
                f"its {name} {error}",
                f"name another column with --{name}_field, correct the row, or {SKIP}",
            ) from error


def _head(file: Path) -> bytes:
    with file.open("rb") as stream, decompressed(stream, compression_of(file)) as content:
        return content.read(FIRST_BYTES)


def _first_of_lines(file: Path, columns: tuple[str, ...]) -> tuple[int, dict[str, Any]]:
    """Reads the first row that is not blank: (number, content).

    The content is empty if the row is longer than `FIRST_BYTES`.
    """
    head = _head(file).removeprefix(codecs.BOM_UTF8)
    if not head:
        raise refuse(str(file), "is empty", f"download it again, or {SKIP}")
    lines = head.split(b"\n")
    if len(head) == FIRST_BYTES:
        lines.pop()  # it goes on
    number, line = next(
        ((number, line) for number, line in enumerate(lines, 1) if line.strip()), (1, b"")
    )
    _check_document(
        file, line or head, alone=line.strip() == head.strip() or not line, columns=columns
    )
    return number, row_of(line, f"{file}, row {number}") if line else {}


# an object whose first value is a list of objects
_ROWS = re.compile(r'\{\s*"([^"]+)"\s*:\s*\[\s*\{')


def _check_document(file: Path, line: bytes, alone: bool, columns: tuple[str, ...]) -> None:
    """Raise `Refusal` for a file that is one JSON document instead of an object in each line.

    `line` is the first row, or the beginning of the file if that row is long; `alone`: the file has
    no other.
    """
    text = line.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if row is None and text.rstrip() == "{":  # a document over several lines
        text = _head(file).decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    read = {
        *columns,
        *(name for form in forms(columns[0]) for name in (*form.columns, *form.optional)),
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
    raise refuse(str(file), rule, f"convert it with {convert}, and name rows.jsonl")


def _first_of_csv(file: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the columns of a file, and its first row; {} if it has no row."""
    with file.open("rb") as stream, decompressed(stream, compression_of(file)) as content:
        header, rows = csv_rows.read(content, csv_rows.separator_of(file), str(file))
        first = next(rows, None)
        return header, {} if first is None else csv_rows.row_of(first, f"{file}, row 1")


def _first_of_table(
    file: Path, kind: str, wanted: Callable[[list[str]], tuple[str, ...]]
) -> tuple[list[str], dict[str, Any]]:
    """Return the names of all columns, and the first value of each `wanted` column.

    There are no values if a wanted column is missing, or if there is no row.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as closing:
        if kind == "parquet":
            table = closing.enter_context(pq.ParquetFile(file))
            names = table.schema_arrow.names
            if found := named_twice(names):
                raise refuse(str(file), *found)
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
            if found := named_twice(names):
                raise refuse(str(file), *found)
            columns = wanted(names)
        first = next(
            (batch for batch in batches if {*columns} <= {*names} and batch.num_rows), None
        )
        return names, (
            {} if first is None else {column: first.column(column)[0].as_py() for column in columns}
        )


def no_chats(dataset: str) -> Refusal:
    return refuse(
        f"--dataset {dataset}",
        "task sft requires chats, but these are text files",
        "use JSONL or Parquet, and name the column of the chats with --messages_field",
    )
