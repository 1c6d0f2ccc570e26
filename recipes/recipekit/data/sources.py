"""Where documents come from: local files, the hub, addresses, or the interpreter's own sources. Read from any row group on.

A corpus is cut into parts (files, or runs of bytes of text files), a part into groups (Parquet row groups; else one).
Reading begins at any row of any group, so that neither a shuffle nor a resume has to read what lies before.
"""

import ast
import functools
import gzip
import json
import logging
import os
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import config as datasets_config
from datasets.exceptions import DatasetsError

from ..recipe import Recipe
from ..refusal import Refusal, refuse
from ..tokens import hub_refusal
from .files import digests, fingerprint, kind_of, local_files, standard_library
from .mixture import Domain

READ_ROWS = 64  # rows of text taken at a time
TOKEN_ROWS = 1024  # rows of ready tokens
PART_BYTES = 1 << 20  # text files are cut, at line ends, into parts of this size
TEXT_PARTS = 256  # many small text files are read in about so many parts
PIECE = 32 * 1024  # characters; a longer text file is cut, at a line end, into documents of at most this length
UNREADABLE = (OSError, ValueError, TypeError, EOFError, zlib.error, pa.ArrowException, DatasetsError)  # what broken files raise in `datasets`
LOG = logging.getLogger(__name__)

# datasets 5.2 sleeps 5 s when a Parquet reader is closed early, against a crash of pyarrow at the interpreter's end while
# its threads still read a Python file (apache/arrow#45214). Ours read with no read-ahead, and are closed long before.
datasets_config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0

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

    def place(self, part: int, group: int, row: int) -> str:
        """Names a row for a person; rows count from 1."""
        return f"{self.parts[part]}{f', row group {group}' if self.groups(part) > 1 else ''}, row {row + 1}"


def open_source(recipe: Recipe, domain: Domain, columns: tuple[str, ...] = ()) -> Source:
    """The corpus of a domain. Raises `Refusal` if it does not exist or cannot be reached.

    With `columns` a document is a row of a table or of JSON lines: a dictionary of these.
    """
    sft = recipe.task == "sft"
    column = columns or (recipe.messages_field if sft else recipe.text_field,)
    if columns and domain.dataset == "builtin":
        raise refuse("--dataset builtin", f"is text, and has no columns {', '.join(columns)}", "give Parquet, Arrow or JSON lines")
    if domain.dataset == "builtin":
        files = standard_library(*(("test", "tests", "idle_test") if sft else ()))  # tests have few docstrings
        # ast warns of odd escapes in the sources it reads; their name below keeps that from the user
        warnings.filterwarnings("ignore", module="builtin_corpus")
        return _text_source(files, _docstring_chats if sft else _pieces, "builtin", recipe.task, whole=sft, errors="replace")
    files = local_files(domain.dataset)
    if files is None:
        return _hub_source(recipe, domain, column, partial(_one_document, sft) if not columns else _one_row)
    kind = kind_of(files, domain.dataset)
    if kind == "text" and columns:
        raise refuse(f"--dataset {domain.dataset}", f"is text, and has no columns {', '.join(columns)}", "give Parquet, Arrow or JSON lines")
    if kind == "text" and sft:
        raise refuse(f"--dataset {domain.dataset}", "task sft needs chats, these are text files", "give JSONL or Parquet with --messages_field")
    if kind == "text":
        return _text_source(files, _pieces, recipe.task)
    of_files = digests(files)
    if kind == "lines":
        spans = [span for file in files for span in _spans(file, file.stat().st_size)]
        return Source(
            parts=tuple(span.name for span in spans),
            groups=lambda part: 1,
            read=lambda part, group, row: _lines(spans[part], row),
            documents=partial(_from_line, column, partial(_one_document, sft) if not columns else _one_row),
            fingerprint=fingerprint(of_files, recipe.task, *column),
            files=of_files,
        )
    dataset = _loaded(kind, tuple(escape(os.path.abspath(file)) for file in files), (kind, *of_files.values()))
    names = tuple(str(file) for file in files)
    as_document = partial(_one_document, sft) if not columns else _one_row
    return _table_source(dataset, names, column, as_document, fingerprint(of_files, recipe.task, *column), files=of_files)


# Text and lines: runs of bytes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """The lines of a file that begin in bytes `start` to `stop`."""

    file: Path
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.file}, from byte {self.start}" if self.start else str(self.file)


def _spans(file: Path, size: int) -> list[Span]:
    """Runs of PART_BYTES. Unlike datasets' text builder, which resumes by reading a file from its start, they are reached at once."""
    if file.name.endswith(".gz"):
        return [Span(file, 0, 1 << 62)]
    return [Span(file, start, min(start + PART_BYTES, size)) for start in range(0, max(1, size), PART_BYTES)]


def _raw_lines(span: Span) -> Iterator[bytes]:
    """The span's lines, with their ends. Raises `Refusal` for an empty file, OSError, EOFError or zlib.error for a broken one."""
    opened: Any = gzip.open if span.file.name.endswith(".gz") else open
    with opened(span.file, "rb") as stream:
        position = 0
        if span.start:
            stream.seek(span.start - 1)
            position = span.start - 1 + len(stream.readline())  # the end of a line that began before
        while position < span.stop and (line := stream.readline()):
            position += len(line)
            yield line


def _lines(span: Span, row: int) -> Iterator[list[bytes]]:
    if span.file.stat().st_size == 0:
        raise refuse(str(span.file), "is empty", "fetch it again, or leave it out (--bad_rows skip)")
    lines: list[bytes] = []
    for number, line in enumerate(_raw_lines(span)):
        if number < row:
            continue
        lines.append(line)
        if len(lines) == READ_ROWS:
            yield lines
            lines = []
    if lines:
        yield lines


def _text_source(files: list[Path], documents: Callable[[Any, str], list[Document]], *more: str, whole: bool = False, errors: str = "strict") -> Source:
    """Text files; each span of bytes is a row. `whole`: a file is never cut into spans."""
    of_files = digests(files)
    sizes = [file.stat().st_size for file in files]
    target = min(PART_BYTES, sum(sizes) // TEXT_PARTS)
    runs: list[list[Span]] = [[]]
    held = 0
    for file, size in zip(files, sizes, strict=True):
        for span in [Span(file, 0, 1 << 62)] if whole else _spans(file, size):
            if runs[-1] and held >= target:
                runs.append([])
                held = 0
            runs[-1].append(span)
            held += min(span.stop, size) - span.start

    def read(part: int, group: int, row: int) -> Iterator[list[bytes]]:
        for span in runs[part][row:]:
            yield [b"".join(_raw_lines(span))]

    def decoded(value: bytes, place: str) -> list[Document]:
        return documents(_decoded(value, place, errors), place)

    names = tuple(run[0].name if len(run) == 1 else f"{run[0].name} and the {len(run) - 1} after it" for run in runs)
    return Source(names, lambda part: 1, read, decoded, fingerprint(of_files, *more), of_files)


def _decoded(value: bytes, place: str, errors: str = "strict") -> str:
    try:
        return value.decode("utf-8", errors).removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8: byte {value[error.start]:#04x} at {error.start}"
        raise refuse(place, rule, "convert the file (iconv -f latin1 -t utf-8), or leave it out (--bad_rows skip)") from error


def _pieces(text: str, place: str) -> list[Document]:
    pieces, start = [], 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
            end = end if end > start else start + PIECE
        pieces.append((text[start:end], place))
        start = end
    return pieces


def _from_line(columns: tuple[str, ...], documents: Callable[[Any, str], list[Document]], line: bytes, place: str) -> list[Document]:
    if not line.strip():
        return []
    text = _decoded(line, place)
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise refuse(place, f"is not JSON: {error}", "write one JSON object per line") from error
    if "\\ud" in text.lower():  # half of a surrogate pair is legal JSON but cannot be encoded
        row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
    if not isinstance(row, dict):
        raise refuse(place, f"is not a JSON object but a {type(row).__name__}", "write one JSON object per line")
    if missing := [column for column in columns if column not in row]:
        raise no_column(missing[0], list(row), place)
    return documents(row[columns[0]] if documents is not _one_row else {column: row[column] for column in columns}, place)


# Tables: Parquet, Arrow, the hub ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _loaded(builder: str, files: tuple[str, ...], content: tuple[str, ...]) -> datasets.IterableDataset:
    """`load_dataset`, once for the same `content`: both streams of a run read it."""
    try:
        return datasets.load_dataset(builder, data_files={"train": list(files)}, split="train", streaming=True)
    except UNREADABLE as error:
        raise unreadable(files[0], error) from error  # `datasets` looks into the first file only


def _hub_source(recipe: Recipe, domain: Domain, columns: tuple[str, ...], documents: Callable[[Any, str], list[Document]]) -> Source:
    try:
        builder = datasets.load_dataset_builder(domain.dataset, domain.subset or recipe.subset or None)
        dataset = builder.as_streaming_dataset(split=recipe.split)
        assert isinstance(dataset, datasets.IterableDataset)
    except (OSError, ValueError) as error:
        raise hub_refusal(f"--dataset {domain.dataset}", domain.dataset, error, "datasets/") from error
    names = tuple(f"{domain.dataset}, shard {number} of {dataset.num_shards}" for number in range(dataset.num_shards))
    mark = f"{domain.dataset}/{domain.subset or recipe.subset}/{recipe.split}@{builder.hash} {recipe.task} {' '.join(columns)}"
    return _table_source(dataset, names, columns, documents, mark, local=False)


def _table_source(
    dataset: datasets.IterableDataset, names: tuple[str, ...], columns: tuple[str, ...], documents: Callable[[Any, str], list[Document]], mark: str, **more: Any
) -> Source:
    @functools.lru_cache(maxsize=4)
    def opened(part: int) -> datasets.IterableDataset:
        """One file, cut into its row groups; its footer is read when its turn comes."""
        try:
            return dataset.shard(len(names), part).reshard()
        except UNREADABLE as error:
            raise unreadable(names[part], error) from error

    def groups(part: int) -> int:
        return opened(part).num_shards

    def read(part: int, group: int, row: int) -> Iterator[pa.Array]:
        name = f"{names[part]}, row group {group}"
        if groups(part) == 0:
            return
        tables = opened(part).shard(groups(part), group).with_format("arrow").iter(TOKEN_ROWS)
        at = 0
        while True:
            table: Any = next(tables, None)  # a pyarrow table
            if table is None:
                return
            if missing := [column for column in columns if column not in table.column_names]:
                raise no_column(missing[0], table.column_names, name)
            skipped = min(max(0, row - at), table.num_rows)
            at += table.num_rows
            values = (table[columns[0]] if documents is not _one_row else pa.chunked_array(table.select(list(columns)).to_struct_array())).slice(skipped)
            values = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()  # which copies
            size = TOKEN_ROWS if holds_tokens(values.type) else READ_ROWS
            for first in range(0, len(values), size):
                yield values.slice(first, size)

    kind = dataset.features.arrow_schema.field(columns[0]).type if dataset.features and columns[0] in dataset.features else None
    return Source(names, groups, read, documents, mark, ready=len(columns) == 1 and kind is not None and holds_tokens(kind), **more)


def holds_tokens(kind: pa.DataType) -> bool:
    """True for a column of lists of integers: documents that are tokenised already."""
    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type)


def _one_document(sft: bool, value: Any, place: str) -> list[Document]:
    if value is not None and not isinstance(value, list if sft else str):
        expected = "a list of messages (--messages_field)" if sft else "text (--text_field)"
        raise refuse(place, f"holds {type(value).__name__} {str(value)[:40]!r} where {expected} should be", "name another column, or mend the row")
    return [(value, place)] if value else []


def _one_row(value: dict[str, Any], place: str) -> list[Document]:
    return [(value, place)]


def unreadable(place: str, error: Exception) -> Refusal:
    return refuse(place, f"cannot be read: {(str(error).strip() or type(error).__name__).splitlines()[0]}", "replace the file, or leave it out")


def no_column(column: str, columns: list[str], place: str) -> Refusal:
    return refuse(place, f"has no column {column!r}, only {', '.join(map(repr, columns))}", "name the column with --text_field (task sft: --messages_field)")


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
