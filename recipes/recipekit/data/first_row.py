"""The first row of local files, which is read when a run is planned."""

import codecs
import contextlib
import gzip
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..refusal import Refusal, refuse
from ..tasks.facts import TASKS
from .chat_rows import form_of
from .files import local_files, picture_classes
from .kinds import kind_of
from .request import Request
from .rows import SKIP, absent_column, check_value, columns_read, not_utf8, row_of, unreadable

FIRST_BYTES = 1 << 20  # of a file that are looked at before a run: a longer row is judged by its beginning


def check_first_row(files: list[Path], dataset: str, request: Request) -> None:
    """Raises `Refusal` for local files whose first row the task cannot read.

    No row is looked at where bad rows are to be left out.
    """
    files = ("image" in request.names and local_files(dataset, True, request.split, request.subset)) or files
    kind = kind_of(files, dataset)
    check_kind(kind, files, dataset, request)
    if request.skip or not files:
        return
    columns, place = request.columns, f"{files[0]}, row 1"
    try:
        if kind == "text":
            codecs.getincrementaldecoder("utf-8")().decode(_head(files[0]))
            return
        if kind == "pictures":
            names, values, place = list(columns), {columns[0]: files[0]}, str(files[0])
        elif kind == "lines":
            number, values = _first_of_lines(files[0])
            names, place = list(values), f"{files[0]}, row {number}"
        else:
            names, values = _first_of_table(files[0], kind, partial(columns_read, request.task, columns))
    except UnicodeDecodeError as error:
        raise refuse(place, *not_utf8(error)) from error
    except (OSError, ValueError, EOFError, NotImplementedError, zlib.error) as error:
        raise error if isinstance(error, Refusal) else unreadable(place, error) from error
    if names:
        if absent := absent_column(request.task, columns, names):
            raise refuse(place, *absent)
        if request.as_rows:
            _check_sample({name: values[column] for name, column in zip(request.names, columns, strict=True) if column in values}, place)
        elif request.chats and (form := form_of(names, columns[0])):
            if values:
                form.content(values, place, padded=kind != "lines")
        else:
            check_value(values.get(columns[0]), request.chats, place, tokens=kind != "lines")


def check_kind(kind: str, files: list[Path], dataset: str, request: Request) -> None:
    """Raises `Refusal` if the task cannot take files of this kind, or pictures that lie otherwise than in a folder for each class."""
    where = f"--dataset {dataset}"
    if kind == "text" and request.chats:
        raise no_chats(dataset)
    if kind == "text" and request.as_rows:
        raise no_table(dataset, request)
    if kind == "pictures" and request.names != ("image", "label"):
        fixing = [task for task, facts in TASKS.items() if facts.columns == ("image_field", "label_field")]
        raise refuse(where, f"holds pictures, which task {request.task} does not take", f"use --task {' or '.join(fixing)}, or give other data")
    if kind == "pictures":
        picture_classes(files, dataset)


def no_table(dataset: str, request: Request) -> Refusal:
    rule = f"is text, and task {request.task} needs rows with the columns {', '.join(request.columns)}"
    return refuse(f"--dataset {dataset}", rule, f"give Parquet, Arrow or JSON lines{', or pictures in a folder for each class' * ('image' in request.names)}")


def _check_sample(row: dict[str, Any], place: str) -> None:
    """Raises `Refusal` for a picture that cannot be decoded and for a class that is no number."""
    from .pictures import class_number, opened  # which nothing but a sample needs

    for name, check in (("image", opened), ("label", class_number)):
        try:
            if name in row:
                check(row[name])
        except (TypeError, ValueError) as error:
            raise refuse(place, f"its {name} {error}", f"name another column with --{name}_field, mend the row, or {SKIP}") from error


def _head(file: Path) -> bytes:
    with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as stream:
        return stream.read(FIRST_BYTES)


def _first_of_lines(file: Path) -> tuple[int, dict[str, Any]]:
    """Reads the first row that is not blank: (number, content). The content is empty if the row is longer than `FIRST_BYTES`."""
    head = _head(file)
    if not head:
        raise refuse(str(file), "is empty", f"fetch it again, or {SKIP}")
    lines = head.split(b"\n")
    if len(head) == FIRST_BYTES:
        lines.pop()  # it goes on
    return next(((number, row_of(line, f"{file}, row {number}")) for number, line in enumerate(lines, 1) if line.strip()), (1, {}))


def _first_of_table(file: Path, kind: str, wanted: Callable[[list[str]], tuple[str, ...]]) -> tuple[list[str], dict[str, Any]]:
    """Return the names of all columns, and the first value of each `wanted` column.

    There are no values if a wanted column is missing, or if there is no row.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as closing:
        if kind == "parquet":
            table = closing.enter_context(pq.ParquetFile(file))
            names = table.schema_arrow.names
            columns = wanted(names)
            batches = table.iter_batches(1, columns=list(columns), use_threads=False) if {*columns} <= {*names} else iter(())
        else:
            opened = closing.enter_context(pa.memory_map(str(file)))
            try:
                table = pa.ipc.open_stream(opened)
                batches = iter(table)
            except pa.ArrowInvalid:
                table = pa.ipc.open_file(opened)
                batches = map(table.get_batch, range(table.num_record_batches))
            names = table.schema.names
            columns = wanted(names)
        first = next((batch for batch in batches if {*columns} <= {*names} and batch.num_rows), None)
        return names, {} if first is None else {column: first.column(column)[0].as_py() for column in columns}


def no_chats(dataset: str) -> Refusal:
    return refuse(f"--dataset {dataset}", "task sft needs chats, these are text files", "give JSONL or Parquet with --messages_field")
