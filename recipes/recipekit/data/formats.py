"""Readers of the supported file formats.

The formats are text, JSON lines, CSV, Parquet, Arrow, `datasets` streams, and images.
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
from typing import Any, BinaryIO, TypedDict, Unpack

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from ..spec.errors import ConfigError, config_error
from . import csv_rows
from .compression import compression_of, open_decompressed
from .csv_rows import CsvRecord, separator_of
from .digests import class_digests, file_digests, fingerprint
from .packing import permutation
from .remote import RemoteFile, RetryPolicy, Unreachable
from .rows import decode_text, encoding_problem, parse_json_row, unreadable_error
from .source import READ_ERRORS, ColumnSelection, Document, Source, holds_tokens

TOKEN_ROWS = 1024  # rows of pretokenized documents read at a time
TEXT_PARTS = 256  # approximate number of parts into which many small text files are grouped
# Maximum characters of a document. A longer text file is split at line ends into several documents.
MAX_DOCUMENT_CHARACTERS = 32 * 1024
# For each token of a row, a part has at least this many bytes, and a document at least this many
# characters. So a text that fits into a row is not split.
CHARACTERS_PER_TOKEN = 8
IMAGES_PER_PART = 256  # images of a folder
GENERATED_PARTS = 8
# Number of bytes of a Parquet column to read at a time. With this limit, reading a few rows of a
# large row group does not load the rest of the group.
BUFFER, REMOTE_BUFFER = 1 << 18, 4 << 20


class SourceOptions(TypedDict, total=False):
    """Fields of a `Source` that do not depend on the format."""

    files: dict[str, str]
    local: bool
    size: int
    times: tuple[int, ...]


# Text and lines: byte ranges
# ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByteSpan:
    """The lines of a file that begin in bytes `start` to `stop`."""

    file: Path | RemoteFile
    open: Callable[[], BinaryIO]
    start: int
    stop: int
    compression: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}, from byte {self.start}" if self.start else str(self.file)


def split_into_spans(
    file: Path | RemoteFile, size: int, open_file: Callable[[], BinaryIO], length: int
) -> list[ByteSpan]:
    """Split a file into ranges of `length` bytes that can be read independently.

    In contrast, the text builder of `datasets` resumes by rereading a file from its start.
    """
    if compression := compression_of(file):
        return [ByteSpan(file, open_file, 0, 1 << 62 if size else 0, compression)]
    return [
        ByteSpan(file, open_file, start, min(start + length, size))
        for start in range(0, max(1, size), length)
    ]


def _raw_lines(span: ByteSpan) -> Iterator[bytes]:
    """Yield the span's lines with their line ends.

    Raise OSError, EOFError or zlib.error for a broken file.
    """
    with contextlib.ExitStack() as closing:
        stream = closing.enter_context(span.open())
        if span.compression:
            stream = closing.enter_context(open_decompressed(stream, span.compression))
        position = 0
        if span.start:
            stream.seek(span.start - 1)
            # skip the rest of a line that began before the span
            position = span.start - 1 + len(stream.readline())
        while position < span.stop and (line := stream.readline()):
            position += len(line)
            yield line


def lines_source(
    spans: list[ByteSpan], wanted: ColumnSelection, mark: str, **more: Unpack[SourceOptions]
) -> Source:
    def read(part: int, group: int, row: int) -> Iterator[list[bytes]]:
        return _line_batches(spans[part], row, wanted.read_rows)

    return Source(
        tuple(span.name for span in spans),
        lambda part: 1,
        read,
        partial(_parse_line, wanted),
        mark,
        **more,
    )


def _line_batches(span: ByteSpan, row: int, read_rows: int) -> Iterator[list[bytes]]:
    if span.stop == 0:
        raise config_error(
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
            yield lines  # yield the rows before the damage, so that the error reports the right row
        raise
    if lines:
        yield lines


def text_source(
    files: list[Path],
    seq_len: int,
    part_bytes: int,
    *more: str,
    documents: Callable[[Any, str], list[Document]] | None = None,
    one_span_per_file: bool = False,
    errors: str = "strict",
) -> Source:
    """Return a corpus of text files.

    Each span of bytes is a row. `documents` converts a span's text to documents; by default, the
    text is split. With `one_span_per_file`, a file is never split into spans. `more` becomes part
    of the fingerprint.
    """
    of_files, stats = file_digests(files), [file.stat() for file in files]
    sizes, piece = (
        [stat.st_size for stat in stats],
        max(MAX_DOCUMENT_CHARACTERS, CHARACTERS_PER_TOKEN * seq_len),
    )
    documents = documents or partial(_split_text, piece)
    length, target = (
        max(part_bytes, CHARACTERS_PER_TOKEN * seq_len),
        min(part_bytes, sum(sizes) // TEXT_PARTS),
    )
    runs = _group_spans(files, sizes, length, target, one_span_per_file)

    def read(part: int, group: int, row: int) -> Iterator[list[bytes]]:
        for span in runs[part][row:]:
            yield [b"".join(_raw_lines(span))]

    def of_span(value: bytes, place: str) -> list[Document]:
        try:
            text = decode_text(value, errors)
        except UnicodeDecodeError as error:
            raise config_error(place, *encoding_problem(error)) from error
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


def _group_spans(
    files: list[Path], sizes: list[int], length: int, target: int, one_span_per_file: bool
) -> list[list[ByteSpan]]:
    """Split text files into spans of `length` bytes, and group adjacent spans up to `target` bytes.

    With `one_span_per_file`, each file is one span.
    """
    runs: list[list[ByteSpan]] = [[]]
    held = 0
    for file, size in zip(files, sizes, strict=True):
        opened = partial(open, file, "rb")
        spans = (
            [ByteSpan(file, opened, 0, 1 << 62)]
            if one_span_per_file
            else split_into_spans(file, size, opened, length)
        )
        for span in spans:
            if runs[-1] and held >= target:
                runs.append([])
                held = 0
            runs[-1].append(span)
            held += min(span.stop, size) - span.start
    return runs


def _split_text(max_characters: int, text: str, place: str) -> list[Document]:
    pieces, start = [], 0
    while start < len(text):
        end = start + max_characters
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
            end = end if end > start else start + max_characters
        pieces.append((text[start:end], place))
        start = end
    return pieces


def csv_source(
    tables: list[Path], wanted: ColumnSelection, mark: str, **more: Unpack[SourceOptions]
) -> Source:
    """Return a corpus of CSV and TSV files.

    A file is always read from its start, because a line end may be part of a field.
    """

    def read(part: int, group: int, row: int) -> Iterator[list[CsvRecord]]:
        file = tables[part]
        with contextlib.ExitStack() as closing:
            stream = closing.enter_context(file.open("rb"))
            stream = closing.enter_context(open_decompressed(stream, compression_of(file)))
            header, rows = csv_rows.read_csv(stream, separator_of(file), str(file))
            wanted.check(header, str(file))
            rows = itertools.islice(rows, row, None)
            while some := list(itertools.islice(rows, wanted.read_rows)):
                yield some

    def documents(record: CsvRecord, place: str) -> list[Document] | None:
        row = csv_rows.parse_csv_record(record, place)
        return wanted.documents(wanted.select_from_row(row), place)

    return Source(tuple(map(str, tables)), lambda part: 1, read, documents, mark, **more)


def _parse_line(wanted: ColumnSelection, line: bytes, place: str) -> list[Document] | None:
    if not line.removeprefix(BOM_UTF8).strip():
        return None
    row = parse_json_row(line, place)
    wanted.check(list(row), place)
    return wanted.documents(wanted.select_from_row(row), place, padded=False)


# Tables: Parquet, Arrow and `datasets` streams
# ------------------------------------------------------------------


def parquet_source(
    names: tuple[str, ...],
    open_part: Callable[[int], Any],
    wanted: ColumnSelection,
    mark: str,
    **more: Unpack[SourceOptions],
) -> Source:
    """Return a corpus of Parquet files; `open_part(part)` returns a path or a Python file.

    Only the pages of the wanted columns are read, one page after the other.
    """

    buffer = BUFFER if more.get("local", True) else REMOTE_BUFFER

    @functools.lru_cache(maxsize=4)
    def footer(part: int) -> pq.FileMetaData:
        try:
            with pq.ParquetFile(open_part(part)) as parquet:
                return parquet.metadata
        except READ_ERRORS as error:
            raise (
                error if isinstance(error, ConfigError) else unreadable_error(names[part], error)
            ) from error

    def read(part: int, group: int, row: int) -> Iterator[pa.Array]:
        found = schema(part)
        wanted.check(found.names, f"{names[part]}, row group {group}")
        rows = TOKEN_ROWS if wanted.are_tokens(found) else wanted.read_rows
        with pq.ParquetFile(
            open_part(part), metadata=footer(part), pre_buffer=False, buffer_size=buffer
        ) as parquet:
            yield from _slice_values(
                parquet.iter_batches(
                    rows, [group], list(wanted.columns_to_read(found.names)), use_threads=False
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


def arrow_source(
    names: tuple[str, ...], wanted: ColumnSelection, mark: str, **more: Unpack[SourceOptions]
) -> Source:
    """Return a corpus of memory-mapped Arrow files.

    The files may have the stream format, which `datasets` writes, or the file format.
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
        yield from _slice_values(tables, wanted, row, validate=True)

    return Source(
        names,
        lambda part: 1,
        read,
        wanted.documents,
        mark,
        ready=_are_tokens(names, lambda part: batches(part)[0], wanted),
        **more,
    )


def _are_tokens(
    names: tuple[str, ...], schema: Callable[[int], pa.Schema], wanted: ColumnSelection
) -> bool:
    """Return True if the first readable file contains pretokenized documents."""
    for part in range(len(names)):
        try:
            found = schema(part)
        except Unreachable:
            raise
        except READ_ERRORS:
            continue  # reported when the part is read
        return wanted.are_tokens(found)
    return False


def _slice_values(
    tables: Iterator[Any], wanted: ColumnSelection, row: int, validate: bool = False
) -> Iterator[pa.Array]:
    """Yield the wanted values in slices, starting at `row`.

    With `validate`, raise pa.ArrowInvalid for invalid offsets.
    """
    at = 0
    for table in tables:
        skipped = min(max(0, row - at), table.num_rows)
        at += table.num_rows
        values = wanted.select_from_table(table).slice(skipped)
        if validate:
            values.validate(full=True)
        size = TOKEN_ROWS if holds_tokens(values.type) else wanted.read_rows
        for first in range(0, len(values), size):
            yield values.slice(first, size)


def streamed_source(
    dataset: datasets.IterableDataset,
    names: tuple[str, ...],
    wanted: ColumnSelection,
    mark: str,
    patience: RetryPolicy,
) -> Source:
    """Return a corpus that `datasets` streams.

    After a network error, the group is reopened at the row where reading stopped.
    """

    @functools.lru_cache(maxsize=4)
    def opened(part: int) -> datasets.IterableDataset:
        try:
            return patience(names[part], lambda: dataset.shard(len(names), part).reshard())
        except READ_ERRORS as error:
            raise (
                error if isinstance(error, ConfigError) else unreadable_error(names[part], error)
            ) from error

    def read(part: int, group: int, row: int) -> Iterator[pa.Array]:
        values: Iterator[pa.Array] | None = None

        def more() -> pa.Array | None:
            nonlocal values
            try:
                if values is None:
                    values = _slice_values(
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
            except READ_ERRORS as error:
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


# Samples: images of a folder, and generated samples
# ---------------------------------------------------


def image_source(files: list[Path], wanted: ColumnSelection) -> Source:
    """Return a corpus of images with one folder per class.

    Classes are numbered in the order of their names. Each part contains images of all classes,
    because only adjacent parts are shuffled together. An image file is read only when its
    micro-batch is made.
    """
    of_classes = class_digests(files)
    numbers = {name: number for number, name in enumerate(sorted(of_classes))}
    order = permutation(len(files), "pictures")

    def read(part: int, group: int, row: int) -> Iterator[list[Path]]:
        mine = order[part * IMAGES_PER_PART :][:IMAGES_PER_PART]
        for first in range(row, len(mine), wanted.read_rows):
            yield [files[number] for number in mine[first : first + wanted.read_rows]]

    def documents(file: Path, place: str) -> list[Document]:
        return [
            (dict(zip(wanted.names, (file, numbers[file.parent.name]), strict=True)), str(file))
        ]

    names = tuple(f"pictures, part {number}" for number in range(-(-len(files) // IMAGES_PER_PART)))
    return Source(
        names,
        lambda part: 1,
        read,
        documents,
        fingerprint(of_classes, wanted.task, "pictures"),
        files=of_classes,
    )


def generated_source(
    make_row: Callable[[int], dict[str, Any]], count: int, wanted: ColumnSelection
) -> Source:
    """Return the `builtin` corpus of samples; `make_row` generates each sample from its index."""
    length = -(-count // GENERATED_PARTS)

    def read(part: int, group: int, row: int) -> Iterator[list[int]]:
        mine = range(part * length, min((part + 1) * length, count))
        for first in range(row, len(mine), wanted.read_rows):
            yield list(mine[first : first + wanted.read_rows])

    names = tuple(f"builtin, part {number}" for number in range(GENERATED_PARTS))
    return Source(
        names,
        lambda part: 1,
        read,
        lambda number, place: [(make_row(number), place)],
        f"builtin {wanted.task} {count}",
    )
