"""The definition of a corpus: its parts, its groups, the reader of its values, and its columns."""

import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from datasets.exceptions import DatasetsError

from ..spec.errors import config_error
from ..spec.task_specs import TASKS
from .chat_rows import match_chat_form
from .columns import columns_to_read, missing_column
from .rows import check_value, duplicate_column, is_empty

# values without which a row is empty
REQUIRED_VALUES = ("chosen", "rejected", "image", "text")
# errors of `datasets` for broken files
READ_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    EOFError,
    zlib.error,
    pa.ArrowException,
    DatasetsError,
)

Document = tuple[Any, str]  # (a string or a list of messages, its place for error messages)
Values = list[Any] | pa.Array


@dataclass(frozen=True)
class Source:
    """A corpus: its parts and groups, a reader of values, and their conversion to documents."""

    parts: tuple[str, ...]  # names of the parts, for messages
    groups: Callable[[int], int]  # number of groups of a part
    # (part, group, first row) -> the values from that row on, in batches
    read: Callable[[int, int, int], Iterator[Values]]
    # (value, place) -> documents; [] for an empty row; None for a blank line, which is not a row
    documents: Callable[[Any, str], list[Document] | None]
    fingerprint: str
    files: dict[str, str] = field(default_factory=dict)  # name -> digest, of local files
    local: bool = True
    ready: bool = False  # True if documents are tokens already
    size: int = 0  # bytes of local files
    # modification times of local files, because a change in the middle of a file does not change
    # its digest
    times: tuple[int, ...] = ()
    piece: int = 0  # characters at which a text is split
    columns: Callable[[], list[str]] = list  # names of the columns found so far

    def place(self, part: int, group: int, row: int) -> str:
        """Return a row's name for messages, in which rows are numbered from 1."""
        return (
            f"{self.parts[part]}{f', row group {group}' if self.groups(part) > 1 else ''}, row"
            f" {row + 1}"
        )


@dataclass(frozen=True)
class ColumnSelection:
    """The values that are read from a row.

    They are a single column or, for samples, a dictionary of several columns under other names.
    """

    columns: tuple[str, ...]
    task: str
    read_rows: int  # values that are read at a time, unless they are tokens
    # names of the columns in a sample; () if a document is the value of the only column
    names: tuple[str, ...] = ()
    # names of columns in the order in which they were found
    seen_columns: dict[str, None] = field(default_factory=dict, hash=False, compare=False)

    @property
    def as_rows(self) -> bool:
        return bool(self.names)

    def documents(self, value: Any, place: str, padded: bool = True) -> list[Document]:
        """Return the documents of a value: one, or [] if the value is null, empty or blank.

        If `padded` is True, the value comes from a table, whose objects have the keys of all rows.
        Raise `ConfigError` for an invalid value.
        """
        if self.as_rows:
            renamed = dict(zip(self.columns, self.names, strict=True))
            if any(
                is_empty(value.get(column))
                for column, name in renamed.items()
                if name in REQUIRED_VALUES
            ):
                return []
            return [
                ({renamed.get(column, column): entry for column, entry in value.items()}, place)
            ]
        if self.chats and (form := match_chat_form(value, self.columns[0])):
            content = form.content(value, place, padded)
            return [] if content is None else [(content, place)]
        if is_empty(value):
            return []
        check_value(value, self.chats, place)
        return [(value, place)]

    @property
    def chats(self) -> bool:
        return TASKS[self.task].chats

    def columns_to_read(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the columns to read from rows whose column names are `names`."""
        return columns_to_read(self.task, self.columns, names)

    def select_from_row(self, row: dict[str, Any]) -> Any:
        return (
            {column: row[column] for column in self.columns_to_read(row)}
            if self.as_rows or self.chats
            else row[self.columns[0]]
        )

    def select_from_table(self, table: pa.Table | pa.RecordBatch) -> pa.Array:
        """Return the selected values of a pyarrow table or record batch."""
        several = self.as_rows or (self.chats and not self.are_tokens(table.schema))
        columns = list(self.columns_to_read(table.schema.names))
        values = (
            table.select(columns).to_struct_array() if several else table.column(self.columns[0])
        )
        if isinstance(values, pa.ChunkedArray):
            # this copies the values
            values = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
        if pa.types.is_fixed_size_list(values.type):
            values = values.cast(pa.list_(values.type.value_type))
        return values

    def check(self, names: list[str], place: str) -> None:
        """Raise `ConfigError` if a required column is not in `names`, or if `names` contains
        duplicates.
        """
        if found := duplicate_column(names):
            raise config_error(place, *found)
        self.seen_columns.update(dict.fromkeys(names))
        if absent := missing_column(self.task, self.columns, names):
            raise config_error(place, *absent)

    def are_tokens(self, schema: pa.Schema) -> bool:
        index = schema.get_field_index(self.columns[0])  # -1 also for duplicate columns
        return not self.as_rows and index >= 0 and holds_tokens(schema.field(index).type)


def holds_tokens(kind: pa.DataType) -> bool:
    """Return True for a column of integer lists, which are pretokenized documents."""
    lists = (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
    return lists and pa.types.is_integer(kind.value_type)
