"""Where documents come from: local files, the hub, addresses, or the interpreter's own sources. Read from any row group on.

A corpus is cut into parts (files, or runs of bytes of text files), a part into groups (Parquet row groups; else one).
Reading begins at any row of any group, so that neither a shuffle nor a resume has to read what lies before.
"""

import ast
import contextlib
import functools
import gzip
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import config as datasets_config
from datasets.exceptions import DatasetsError
from datasets.packaged_modules.parquet.parquet import Parquet

from ..data_files import (
    KINDS,
    check_columns,
    check_value,
    decoded,
    digests,
    fingerprint,
    kind_of,
    local_files,
    no_chats,
    row_of,
    standard_library,
    suffix,
    unreadable,
)
from ..mixture import Domain
from ..recipe import Recipe
from ..refusal import Refusal, refuse
from ..tokens import hub_refusal
from .remote import Patience, RemoteFile, Unreachable, from_rank_0, look_up, shown

READ_ROWS = 64  # rows of text taken at a time
TOKEN_ROWS = 1024  # rows of ready tokens
PART_BYTES = 1 << 20  # text files are cut, at line ends, into parts of this size
TEXT_PARTS = 256  # many small text files are read in about so many parts
PIECE = 32 * 1024  # characters; a longer text file is cut, at a line end, into documents of at most this length
TOKEN_LENGTH = 8  # parts and documents are of so many bytes and characters for each token of a row at least, so that what fits a row stays whole
BUFFER, REMOTE_BUFFER = 1 << 18, 4 << 20  # bytes of a Parquet column read at a time: a large row group needs no more than its first rows do
UNREADABLE = (OSError, ValueError, TypeError, EOFError, zlib.error, pa.ArrowException, DatasetsError)  # what broken files raise in `datasets`

# datasets 5.2 sleeps 5 s when a Parquet reader is closed early, against a crash of pyarrow at the interpreter's end while
# its threads still read a Python file (apache/arrow#45214). Ours read with no read-ahead, and are closed long before.
datasets_config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
# It also asks a busy server twenty times, 5 to 60 s apart, whatever the time given to it: `Patience` decides instead.
datasets_config.STREAMING_READ_MAX_RETRIES = datasets_config.STREAMING_OPEN_MAX_RETRIES = 1

Document = tuple[Any, str]  # a text, or a chat (list of messages); and where it was found
Values = list[Any] | pa.Array


@dataclass(frozen=True)
class Source:
    """A corpus: how many groups each part has, how a group's values are read, and how a value becomes documents."""

    parts: tuple[str, ...]  # names, for messages
    groups: Callable[[int], int]  # of a part
    read: Callable[[int, int, int], Iterator[Values]]  # part, group, first row: the values from there on, some at a time
    documents: Callable[[Any, str], list[Document]]
    fingerprint: str
    files: dict[str, str] = field(default_factory=dict)  # name -> digest, of local files
    local: bool = True
    ready: bool = False  # documents are tokens already
    size: int = 0  # bytes of local files
    times: tuple[int, ...] = ()  # when local files were written: one may change in its middle, which its digest does not cover
    piece: int = 0  # characters at which text is cut

    def place(self, part: int, group: int, row: int) -> str:
        """Names a row for a person; rows count from 1."""
        return f"{self.parts[part]}{f', row group {group}' if self.groups(part) > 1 else ''}, row {row + 1}"


@dataclass(frozen=True)
class Wanted:
    """What is read of a row: one column, or, for samples that are no text, a dictionary of several."""

    columns: tuple[str, ...]
    documents: Callable[[Any, str], list[Document]]
    as_rows: bool = False

    def of_row(self, row: dict[str, Any]) -> Any:
        return {column: row[column] for column in self.columns} if self.as_rows else row[self.columns[0]]

    def of_table(self, table: Any) -> pa.Array:
        """The values of a pyarrow table or record batch."""
        values = pa.Table.from_batches([table]) if self.as_rows and isinstance(table, pa.RecordBatch) else table
        values = values.select(list(self.columns)).to_struct_array() if self.as_rows else values.column(self.columns[0])
        if isinstance(values, pa.ChunkedArray):
            values = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()  # which copies
        if pa.types.is_fixed_size_list(values.type):
            values = values.cast(pa.list_(values.type.value_type))
        return values

    def check(self, names: list[str], place: str) -> None:
        """Raises `Refusal` if a column is not among `names`."""
        check_columns(self.columns, names, place)

    def are_tokens(self, schema: pa.Schema) -> bool:
        return not self.as_rows and self.columns[0] in schema.names and holds_tokens(schema.field(self.columns[0]).type)


def open_source(recipe: Recipe, domain: Domain, patience: Patience, columns: tuple[str, ...] = (), before: str = "") -> Source:
    """The corpus of a domain; a collective where it is remote. Raises `Refusal` if it does not exist or cannot be reached.

    With `columns` a document is a row of a table or of JSON lines: a dictionary of these. `before` is the fingerprint of the
    same corpus in an earlier job: a data set of the hub is opened at the commit that it names.
    """
    sft = recipe.task == "sft"
    one = recipe.messages_field if sft else recipe.text_field
    wanted = Wanted(columns, _one_row, True) if columns else Wanted((one,), partial(_one_document, sft))
    if columns and domain.dataset == "builtin":
        raise _no_table(domain, columns)
    if domain.dataset == "builtin":
        return _builtin_source(recipe.seq_len, sft)
    if domain.dataset.startswith(("http://", "https://")):
        return _address_source(recipe, domain, wanted, patience)
    files = local_files(domain.dataset)
    if files is None:
        return _hub_source(recipe, domain, wanted, patience, before)
    kind = kind_of(files, domain.dataset)
    if kind == "text" and columns:
        raise _no_table(domain, columns)
    if kind == "text" and sft:
        raise no_chats(domain.dataset)
    if kind == "text":
        return _text_source(files, recipe.seq_len, None, recipe.task)
    of_files, stats = digests(files), [file.stat() for file in files]
    mark = fingerprint(of_files, recipe.task, *wanted.columns)
    more = {"files": of_files, "size": sum(stat.st_size for stat in stats), "times": tuple(stat.st_mtime_ns for stat in stats)}
    if kind == "lines":
        spans = [span for file, stat in zip(files, stats, strict=True) for span in _spans(file, stat.st_size, partial(open, file, "rb"))]
        return _lines_source(spans, wanted, mark, **more)
    names = tuple(map(str, files))
    if kind == "arrow":
        return _arrow_source(names, wanted, mark, **more)
    return _parquet_source(names, names.__getitem__, wanted, mark, **more)


@functools.cache  # a run opens its data three times, and the interpreter's own files stay what they are
def _builtin_source(seq_len: int, sft: bool) -> Source:
    files = standard_library(*(("test", "tests", "idle_test") if sft else ()))  # tests have few docstrings
    # ast warns of odd escapes in the sources it reads; their name below keeps that from the user
    warnings.filterwarnings("ignore", module="builtin_corpus")
    return _text_source(files, seq_len, _docstring_chats if sft else None, "builtin", "sft" if sft else "pretrain", whole=sft, errors="replace")


def _no_table(domain: Domain, columns: tuple[str, ...]) -> Refusal:
    return refuse(f"--dataset {domain.dataset}", f"is text, and has no columns {', '.join(columns)}", "give Parquet, Arrow or JSON lines")


def _address_source(recipe: Recipe, domain: Domain, wanted: Wanted, patience: Patience) -> Source:
    """JSONL or Parquet files behind addresses, of which rank 0 asks what they are."""
    urls = sorted(part.strip() for part in domain.dataset.split(",") if part.strip())
    kinds = {KINDS.get(suffix(Path(urlsplit(url).path)), "") for url in urls}
    if len(kinds) > 1 or not kinds <= {"lines", "parquet"}:
        raise refuse(
            "--dataset " + ",".join(map(shown, urls)),
            "an address must be that of a JSONL or Parquet file, and all of one kind",
            "name .jsonl or .parquet files",
        )
    files = from_rank_0(lambda: [look_up(url, patience) for url in urls])
    of_files = {str(file): f"{file.size} {file.version}" for file in files}
    mark = fingerprint(of_files, recipe.task, *wanted.columns)
    if kinds == {"lines"}:
        spans = [span for file in files for span in _spans(file, file.size, partial(file.open, patience))]
        return _lines_source(spans, wanted, mark, files=of_files, local=False)
    return _parquet_source(tuple(of_files), lambda part: files[part].open(patience), wanted, mark, files=of_files, local=False)


# Text and lines: runs of bytes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """The lines of a file that begin in bytes `start` to `stop`."""

    file: Path | RemoteFile
    open: Callable[[], BinaryIO]
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.file}, from byte {self.start}" if self.start else str(self.file)


def _spans(file: Path | RemoteFile, size: int, opened: Callable[[], BinaryIO], least: int = 0) -> list[Span]:
    """Runs of PART_BYTES, or of `least` if that is more. Unlike datasets' text builder, which resumes by reading a file from its start, they are reached at once."""
    if file.name.endswith(".gz"):
        return [Span(file, opened, 0, 1 << 62 if size else 0)]
    length = max(PART_BYTES, least)
    return [Span(file, opened, start, min(start + length, size)) for start in range(0, max(1, size), length)]


def _raw_lines(span: Span) -> Iterator[bytes]:
    """The span's lines, with their ends. Raises OSError, EOFError or zlib.error for a broken file."""
    with contextlib.ExitStack() as closing:
        stream: Any = closing.enter_context(span.open())
        if span.file.name.endswith(".gz"):
            stream = closing.enter_context(gzip.open(stream, "rb"))
        position = 0
        if span.start:
            stream.seek(span.start - 1)
            position = span.start - 1 + len(stream.readline())  # the end of a line that began before
        while position < span.stop and (line := stream.readline()):
            position += len(line)
            yield line


def _lines_source(spans: list[Span], wanted: Wanted, mark: str, **more: Any) -> Source:
    def read(part: int, group: int, row: int) -> Iterator[list[bytes]]:
        return _lines(spans[part], row)

    return Source(tuple(span.name for span in spans), lambda part: 1, read, partial(_from_line, wanted), mark, **more)


def _lines(span: Span, row: int) -> Iterator[list[bytes]]:
    if span.stop == 0:
        raise refuse(str(span.file), "is empty", "fetch it again, or leave it out (--bad_rows skip)")
    lines: list[bytes] = []
    try:
        for number, line in enumerate(_raw_lines(span)):
            if number < row:
                continue
            lines.append(line)
            if len(lines) == READ_ROWS:
                yield lines
                lines = []
    except (OSError, EOFError, zlib.error):
        if lines:
            yield lines  # what lies before the damage, so that it is told where that is
        raise
    if lines:
        yield lines


def _text_source(
    files: list[Path], seq_len: int, documents: Callable[[Any, str], list[Document]] | None, *more: str, whole: bool = False, errors: str = "strict"
) -> Source:
    """Text files; each span of bytes is a row, of which `documents` makes documents, else it is cut. `whole`: a file is never cut into spans."""
    of_files, stats = digests(files), [file.stat() for file in files]
    sizes, piece = [stat.st_size for stat in stats], max(PIECE, TOKEN_LENGTH * seq_len)
    documents = documents or partial(_pieces, piece)
    target = min(PART_BYTES, sum(sizes) // TEXT_PARTS)
    runs: list[list[Span]] = [[]]
    held = 0
    for file, size in zip(files, sizes, strict=True):
        opened = partial(open, file, "rb")
        for span in [Span(file, opened, 0, 1 << 62)] if whole else _spans(file, size, opened, TOKEN_LENGTH * seq_len):
            if runs[-1] and held >= target:
                runs.append([])
                held = 0
            runs[-1].append(span)
            held += min(span.stop, size) - span.start

    def read(part: int, group: int, row: int) -> Iterator[list[bytes]]:
        for span in runs[part][row:]:
            yield [b"".join(_raw_lines(span))]

    def of_span(value: bytes, place: str) -> list[Document]:
        return documents(decoded(value, place, errors), place)

    names = tuple(run[0].name if len(run) == 1 else f"{run[0].name} and the {len(run) - 1} after it" for run in runs)
    times = tuple(stat.st_mtime_ns for stat in stats)
    return Source(names, lambda part: 1, read, of_span, fingerprint(of_files, *more), files=of_files, size=sum(sizes), times=times, piece=piece)


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


def _from_line(wanted: Wanted, line: bytes, place: str) -> list[Document]:
    if not line.strip():
        return []
    row = row_of(line, place)
    wanted.check(list(row), place)
    return wanted.documents(wanted.of_row(row), place)


# Tables: Parquet, Arrow, the hub ----------------------------------------------------------------------------------


def _parquet_source(names: tuple[str, ...], opened: Callable[[int], Any], wanted: Wanted, mark: str, **more: Any) -> Source:
    """Parquet files; `opened` gives what pyarrow opens: a path, or a Python file. Of a row group only the columns' pages are read, one after the other."""

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
        rows = TOKEN_ROWS if wanted.are_tokens(found) else READ_ROWS
        with pq.ParquetFile(opened(part), metadata=footer(part), pre_buffer=False, buffer_size=buffer) as parquet:
            yield from _cut(parquet.iter_batches(rows, [group], list(wanted.columns), use_threads=False), wanted, row)

    def schema(part: int) -> pa.Schema:
        return footer(part).schema.to_arrow_schema()

    return Source(names, lambda part: footer(part).num_row_groups, read, wanted.documents, mark, ready=_are_tokens(names, schema, wanted), **more)


def _arrow_source(names: tuple[str, ...], wanted: Wanted, mark: str, **more: Any) -> Source:
    """Arrow files, in the format for streams (which `datasets` writes) or for files, mapped into memory."""

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

    return Source(names, lambda part: 1, read, wanted.documents, mark, ready=_are_tokens(names, lambda part: batches(part)[0], wanted), **more)


def _are_tokens(names: tuple[str, ...], schema: Callable[[int], pa.Schema], wanted: Wanted) -> bool:
    """Whether the first file that can be read holds documents of ready tokens."""
    for part in range(len(names)):
        try:
            found = schema(part)
        except Unreachable:
            raise
        except UNREADABLE:
            continue  # told when its turn comes
        return wanted.are_tokens(found)
    return False


def _cut(tables: Iterator[Any], wanted: Wanted, row: int, validate: bool = False) -> Iterator[pa.Array]:
    """The wanted values from `row` on, some at a time. Raises pa.ArrowInvalid for offsets that point nowhere."""
    at = 0
    for table in tables:
        skipped = min(max(0, row - at), table.num_rows)
        at += table.num_rows
        values = wanted.of_table(table).slice(skipped)
        if validate:
            values.validate(full=True)
        size = TOKEN_ROWS if holds_tokens(values.type) else READ_ROWS
        for first in range(0, len(values), size):
            yield values.slice(first, size)


def _hub_source(recipe: Recipe, domain: Domain, wanted: Wanted, patience: Patience, before: str = "") -> Source:
    """A data set of the hub, of which rank 0 asks which files it has."""
    subset = domain.subset or recipe.subset
    name = f"{domain.dataset}/{subset}/{recipe.split}@"
    revision = before.removeprefix(name).partition(" ")[0] if before.startswith(name) else None

    def resolve() -> tuple[str, list[str], Any]:
        """(hash of the commit and subset, addresses of its Parquet files, or else the data set)."""
        try:
            builder = patience(f"--dataset {domain.dataset}", lambda: datasets.load_dataset_builder(domain.dataset, subset or None, revision=revision))
            files = (builder.config.data_files or {}).get(recipe.split, [])
            if isinstance(builder, Parquet) and files and all(file.startswith("hf://datasets/") for file in files):
                return builder.hash or "", [address_of(file) for file in files], None
            return builder.hash or "", [], patience(f"--dataset {domain.dataset}", lambda: builder.as_streaming_dataset(split=recipe.split))
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: datasets 5.2 for a data set that has a script
            raise error if isinstance(error, Refusal) else hub_refusal(f"--dataset {domain.dataset}", domain.dataset, error, "datasets/") from error

    commit, urls, dataset = from_rank_0(resolve)
    mark = f"{name}{commit} {recipe.task} {' '.join(wanted.columns)}"
    if urls:
        found = functools.lru_cache(maxsize=16)(lambda part: look_up(urls[part], patience, pinned=True))
        return _parquet_source(tuple(map(shown, urls)), lambda part: found(part).open(patience), wanted, mark, local=False)
    names = tuple(f"{domain.dataset}, shard {number} of {dataset.num_shards}" for number in range(dataset.num_shards))
    return _streamed_source(dataset, names, wanted, mark, patience)


def address_of(file: str) -> str:
    """Where the hub gives out `hf://datasets/ORG/NAME@COMMIT/PATH`."""
    repository, _, rest = file.removeprefix("hf://").partition("@")
    commit, _, path = rest.partition("/")
    return f"{datasets_config.HF_ENDPOINT}/{repository}/resolve/{quote(commit, safe='')}/{quote(path)}"


def _streamed_source(dataset: datasets.IterableDataset, names: tuple[str, ...], wanted: Wanted, mark: str, patience: Patience) -> Source:
    """Whatever else `datasets` streams. A fault of the network opens the group again, at the row that was reached."""

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
                    values = _cut(opened(part).shard(opened(part).num_shards, group).with_format("arrow").iter(TOKEN_ROWS), wanted, row)
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
    return Source(names, lambda part: opened(part).num_shards, read, wanted.documents, mark, local=False, ready=ready)


def holds_tokens(kind: pa.DataType) -> bool:
    """True for a column of lists of integers: documents that are tokenised already."""
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return lists and pa.types.is_integer(kind.value_type)


def _one_document(sft: bool, value: Any, place: str) -> list[Document]:
    check_value(value, sft, place)
    return [(value, place)] if value else []


def _one_row(value: dict[str, Any], place: str) -> list[Document]:
    return [(value, place)]


# Chats of the built-in corpus -------------------------------------------------------------------------------------

_PARSING = threading.Lock()  # CPython 3.11.7 counts the depth of all threads' trees in one place: SystemError, "recursion depth mismatch"


def _docstring_chats(source: str, place: str) -> list[Document]:
    """(signature -> docstring) pairs of a Python file, as chats; none if this Python cannot parse it."""
    try:
        with _PARSING:
            tree = ast.parse(source, filename="builtin_corpus")
    except (SyntaxError, ValueError, RecursionError):
        return []
    chats = []
    bodies = [tree.body]
    while bodies:
        for node in bodies.pop():
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            bodies.append(node.body)
            if not (docstring := ast.get_docstring(node)):
                continue
            inside = ", ".join(map(ast.unparse, node.bases)) if isinstance(node, ast.ClassDef) else ast.unparse(node.args)
            signature = f"{'class' if isinstance(node, ast.ClassDef) else 'def'} {node.name}({inside}):"
            question, answer = {"role": "user", "content": f"Write the docstring.\n{signature}"}, {"role": "assistant", "content": docstring}
            chats.append(([question, answer], place))
    return chats
