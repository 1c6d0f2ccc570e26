"""How the rows of each file format are read: text and JSON lines, Parquet, Arrow, what `datasets`
streams, and pictures.
"""

import contextlib
import functools
import itertools
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from ..spec.refusal import Refusal, refuse
from . import csv_rows
from .compression import compression_of, decompressed
from .csv_rows import Record, separator_of
from .digests import digests, digests_of_classes, fingerprint
from .packing import permutation
from .remote import Patience, RemoteFile, Unreachable
from .rows import decoded, not_utf8, row_of, unreadable
from .source import UNREADABLE, Document, Source, Wanted, holds_tokens

TOKEN_ROWS = 1024  # rows of ready tokens taken at a time
TEXT_PARTS = 256  # many small text files are read in about so many parts
# characters; a longer text file is cut, at a line end, into documents of at most this length
PIECE = 32 * 1024
# parts and documents are of so many bytes and characters for each token of a row at least, so that
# what fits a row stays whole
TOKEN_LENGTH = 8
PICTURES_OF_A_PART = 256  # of a folder
DRAWN_PARTS = 8
# bytes of a Parquet column read at a time: a large row group needs no more than its first rows do
BUFFER, REMOTE_BUFFER = 1 << 18, 4 << 20

# Text and lines: runs of bytes
# ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Names the lines of a file that begin in bytes `start` to `stop`."""

    file: Path | RemoteFile
    open: Callable[[], BinaryIO]
    start: int
    stop: int
    compression: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}, from byte {self.start}" if self.start else str(self.file)


def spans_of(
    file: Path | RemoteFile, size: int, opened: Callable[[], BinaryIO], length: int
) -> list[Span]:
    """Cuts a file into runs of `length` bytes, each of which can be reached at once: datasets' text
    builder resumes by reading a file from its start.
    """
    if compression := compression_of(file):
        return [Span(file, opened, 0, 1 << 62 if size else 0, compression)]
    return [
        Span(file, opened, start, min(start + length, size))
        for start in range(0, max(1, size), length)
    ]


def _raw_lines(span: Span) -> Iterator[bytes]:
    """Yields the span's lines, with their ends.

    Raises OSError, EOFError or zlib.error for a broken file.
    """
    with contextlib.ExitStack() as closing:
        stream: Any = closing.enter_context(span.open())
        if span.compression:
            stream = closing.enter_context(decompressed(stream, span.compression))
        position = 0
        if span.start:
            stream.seek(span.start - 1)
            # the end of a line that began before
            position = span.start - 1 + len(stream.readline())
        while position < span.stop and (line := stream.readline()):
            position += len(line)
            yield line


def lines_source(spans: list[Span], wanted: Wanted, mark: str, **more: Any) -> Source:
    def read(part: int, group: int, row: int) -> Iterator[list[bytes]]:
        return _lines(spans[part], row, wanted.read_rows)

    return Source(
        tuple(span.name for span in spans),
        lambda part: 1,
        read,
        partial(_from_line, wanted),
        mark,
        **more,
    )


def _lines(span: Span, row: int, read_rows: int) -> Iterator[list[bytes]]:
    if span.stop == 0:
        raise refuse(
            str(span.file), "is empty", "download it again, or leave it out (--bad_rows skip)"
        )
    lines: list[bytes] = []
    try:
        for number, line in enumerate(_raw_lines(span)):
            if number < row:
                continue
            lines.append(line)
            if len(lines) == read_rows:
                yield lines
                lines = []
    except (OSError, EOFError, zlib.error):
        if lines:
            yield lines  # what lies before the damage, so that it is told where that is
        raise
    if lines:
        yield lines


def text_source(
    files: list[Path],
    seq_len: int,
    part_bytes: int,
    *more: str,
    documents: Callable[[Any, str], list[Document]] | None = None,
    whole: bool = False,
    errors: str = "strict",
) -> Source:
    """Makes a corpus of text files.

    Each span of bytes is a row: `documents` makes documents of its text, or the text is cut.

    With `whole` a file is never cut into spans. `more` goes into the fingerprint.
    """
    of_files, stats = digests(files), [file.stat() for file in files]
    sizes, piece = [stat.st_size for stat in stats], max(PIECE, TOKEN_LENGTH * seq_len)
    documents = documents or partial(_pieces, piece)
    length, target = (
        max(part_bytes, TOKEN_LENGTH * seq_len),
        min(part_bytes, sum(sizes) // TEXT_PARTS),
    )
    runs = _runs_of_spans(files, sizes, length, target, whole)

    def read(part: int, group: int, row: int) -> Iterator[list[bytes]]:
        for span in runs[part][row:]:
            yield [b"".join(_raw_lines(span))]

    def of_span(value: bytes, place: str) -> list[Document]:
        try:
            text = decoded(value, errors)
        except UnicodeDecodeError as error:
            raise refuse(place, *not_utf8(error)) from error
        return documents(text, place)

    names = tuple(
        run[0].name if len(run) == 1 else f"{run[0].name} and the {len(run) - 1} after it"
        for run in runs
    )
    return Source(
        names,
        lambda part: 1,
        read,
        of_span,
        fingerprint(of_files, *more),
        files=of_files,
        size=sum(sizes),
        times=tuple(stat.st_mtime_ns for stat in stats),
        piece=piece,
    )


def _runs_of_spans(
    files: list[Path], sizes: list[int], length: int, target: int, whole: bool
) -> list[list[Span]]:
    """Cut text files into spans of `length` bytes, and group neighbouring spans until a group has
    `target` bytes.

    With `whole` each file is one span.
    """
    runs: list[list[Span]] = [[]]
    held = 0
    for file, size in zip(files, sizes, strict=True):
        opened = partial(open, file, "rb")
        spans = [Span(file, opened, 0, 1 << 62)] if whole else spans_of(file, size, opened, length)
        for span in spans:
            if runs[-1] and held >= target:
                runs.append([])
                held = 0
            runs[-1].append(span)
            held += min(span.stop, size) - span.start
    return runs


def _pieces(most: int, text: str, place: str) -> list[Document]:
    pieces, start = [], 0
    while start < len(text):
        end = start + most
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
            end = end if end > start else start + most
        pieces.append((text[start:end], place))
        start = end
    return pieces


def csv_source(tables: list[Path], wanted: Wanted, mark: str, **more: Any) -> Source:
    """Make a corpus of CSV and TSV files.

    A file is read from its start, since a line end may be part of a field.
    """

    def read(part: int, group: int, row: int) -> Iterator[list[Record]]:
        file = tables[part]
        with contextlib.ExitStack() as closing:
            stream = closing.enter_context(file.open("rb"))
            stream = closing.enter_context(decompressed(stream, compression_of(file)))
            header, rows = csv_rows.read(stream, separator_of(file), str(file))
            wanted.check(header, str(file))
            rows = itertools.islice(rows, row, None)
            while some := list(itertools.islice(rows, wanted.read_rows)):
                yield some

    def documents(record: Record, place: str) -> list[Document] | None:
        row = csv_rows.row_of(record, place)
        return wanted.documents(wanted.of_row(row), place)

    return Source(tuple(map(str, tables)), lambda part: 1, read, documents, mark, **more)


def _from_line(wanted: Wanted, line: bytes, place: str) -> list[Document] | None:
    if not line.removeprefix(BOM_UTF8).strip():
        return None
    row = row_of(line, place)
    wanted.check(list(row), place)
    return wanted.documents(wanted.of_row(row), place, padded=False)


# Tables: Parquet, Arrow, what `datasets` streams
# ------------------------------------------------------------------


def parquet_source(
    names: tuple[str, ...], opened: Callable[[int], Any], wanted: Wanted, mark: str, **more: Any
) -> Source:
    """Makes a corpus of Parquet files; `opened(part)` is a path or a Python file.

    Reads only the pages of the wanted columns, one after the other.
    """

    buffer = BUFFER if more.get("local", True) else REMOTE_BUFFER

    @functools.lru_cache(maxsize=4)
    def footer(part: int) -> pq.FileMetaData:
        try:
            with pq.ParquetFile(opened(part)) as parquet:
                return parquet.metadata
        except UNREADABLE as error:
            raise error if isinstance(error, Refusal) else unreadable(names[part], error) from error

    def read(part: int, group: int, row: int) -> Iterator[pa.Array]:
        found = schema(part)
        wanted.check(found.names, f"{names[part]}, row group {group}")
        rows = TOKEN_ROWS if wanted.are_tokens(found) else wanted.read_rows
        with pq.ParquetFile(
            opened(part), metadata=footer(part), pre_buffer=False, buffer_size=buffer
        ) as parquet:
            yield from _cut(
                parquet.iter_batches(
                    rows, [group], list(wanted.read(found.names)), use_threads=False
                ),
                wanted,
                row,
            )

    def schema(part: int) -> pa.Schema:
        return footer(part).schema.to_arrow_schema()

    return Source(
        names,
        lambda part: footer(part).num_row_groups,
        read,
        wanted.documents,
        mark,
        ready=_are_tokens(names, schema, wanted),
        **more,
    )


def arrow_source(names: tuple[str, ...], wanted: Wanted, mark: str, **more: Any) -> Source:
    """Makes a corpus of Arrow files, in the format for streams (which `datasets` writes) or for
    files, mapped into memory.
    """

    def batches(part: int) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        try:
            stream = pa.ipc.open_stream(pa.memory_map(names[part]))
            return stream.schema, iter(stream)
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(pa.memory_map(names[part]))
            return file.schema, map(file.get_batch, range(file.num_record_batches))

    def read(part: int, group: int, row: int) -> Iterator[pa.Array]:
        schema, tables = batches(part)
        wanted.check(schema.names, names[part])
        yield from _cut(tables, wanted, row, validate=True)

    return Source(
        names,
        lambda part: 1,
        read,
        wanted.documents,
        mark,
        ready=_are_tokens(names, lambda part: batches(part)[0], wanted),
        **more,
    )


def _are_tokens(names: tuple[str, ...], schema: Callable[[int], pa.Schema], wanted: Wanted) -> bool:
    """Finds out whether the first file that can be read holds documents of ready tokens."""
    for part in range(len(names)):
        try:
            found = schema(part)
        except Unreachable:
            raise
        except UNREADABLE:
            continue  # told when its turn comes
        return wanted.are_tokens(found)
    return False


def _cut(
    tables: Iterator[Any], wanted: Wanted, row: int, validate: bool = False
) -> Iterator[pa.Array]:
    """Yields the wanted values from `row` on, some at a time.

    Raises pa.ArrowInvalid for offsets that point nowhere.
    """
    at = 0
    for table in tables:
        skipped = min(max(0, row - at), table.num_rows)
        at += table.num_rows
        values = wanted.of_table(table).slice(skipped)
        if validate:
            values.validate(full=True)
        size = TOKEN_ROWS if holds_tokens(values.type) else wanted.read_rows
        for first in range(0, len(values), size):
            yield values.slice(first, size)


def streamed_source(
    dataset: datasets.IterableDataset,
    names: tuple[str, ...],
    wanted: Wanted,
    mark: str,
    patience: Patience,
) -> Source:
    """Makes a corpus of whatever `datasets` streams.

    A fault of the network opens the group again, at the row that was reached.
    """

    @functools.lru_cache(maxsize=4)
    def opened(part: int) -> datasets.IterableDataset:
        try:
            return patience(names[part], lambda: dataset.shard(len(names), part).reshard())
        except UNREADABLE as error:
            raise error if isinstance(error, Refusal) else unreadable(names[part], error) from error

    def read(part: int, group: int, row: int) -> Iterator[pa.Array]:
        values: Iterator[pa.Array] | None = None

        def more() -> pa.Array | None:
            nonlocal values
            try:
                if values is None:
                    values = _cut(
                        opened(part)
                        .shard(opened(part).num_shards, group)
                        .with_format("arrow")
                        .iter(TOKEN_ROWS),
                        wanted,
                        row,
                    )
                return next(values, None)
            except KeyError:
                wanted.check(list(dataset.column_names or []), f"{names[part]}, row group {group}")
                raise
            except UNREADABLE as error:
                values = None
                raise error

        while (some := patience(names[part], more)) is not None:
            yield some
            row += len(some)

    ready = dataset.features is not None and wanted.are_tokens(dataset.features.arrow_schema)
    return Source(
        names,
        lambda part: opened(part).num_shards,
        read,
        wanted.documents,
        mark,
        local=False,
        ready=ready,
    )


# Samples one by one: pictures of a folder, and those that are drawn
# ---------------------------------------------------


def picture_source(files: list[Path], wanted: Wanted) -> Source:
    """Makes a corpus of pictures that lie in a folder for each class; classes are numbered in the
    order of their names.

    Each part has pictures of all classes, as blocks of parts that lie near each other are shuffled.
    A picture is read when a micro-batch is made of it.
    """
    of_classes = digests_of_classes(files)
    numbers = {name: number for number, name in enumerate(sorted(of_classes))}
    order = permutation(len(files), "pictures")

    def read(part: int, group: int, row: int) -> Iterator[list[Path]]:
        mine = order[part * PICTURES_OF_A_PART :][:PICTURES_OF_A_PART]
        for first in range(row, len(mine), wanted.read_rows):
            yield [files[number] for number in mine[first : first + wanted.read_rows]]

    def documents(file: Path, place: str) -> list[Document]:
        return [
            (dict(zip(wanted.names, (file, numbers[file.parent.name]), strict=True)), str(file))
        ]

    names = tuple(
        f"pictures, part {number}" for number in range(-(-len(files) // PICTURES_OF_A_PART))
    )
    return Source(
        names,
        lambda part: 1,
        read,
        documents,
        fingerprint(of_classes, wanted.task, "pictures"),
        files=of_classes,
    )


def drawn_source(drawn: Callable[[int], dict[str, Any]], count: int, wanted: Wanted) -> Source:
    """Makes the corpus `builtin` of samples, of which `drawn` makes each from its number."""
    length = -(-count // DRAWN_PARTS)

    def read(part: int, group: int, row: int) -> Iterator[list[int]]:
        mine = range(part * length, min((part + 1) * length, count))
        for first in range(row, len(mine), wanted.read_rows):
            yield list(mine[first : first + wanted.read_rows])

    names = tuple(f"builtin, part {number}" for number in range(DRAWN_PARTS))
    return Source(
        names,
        lambda part: 1,
        read,
        lambda number, place: [(drawn(number), place)],
        f"builtin {wanted.task} {count}",
    )
