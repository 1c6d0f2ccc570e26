"""What a corpus is: its parts and groups, how their values are read, and what is wanted of a
row.
"""

import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from datasets.exceptions import DatasetsError

from ..spec.refusal import refuse
from ..spec.task_specs import TASKS
from .chat_rows import form_of
from .columns import absent_column, columns_read
from .rows import check_value, is_empty, named_twice

NEEDED = ("chosen", "rejected", "image")  # values of a sample without which a row is empty
# what broken files raise in `datasets`
UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    EOFError,
    zlib.error,
    pa.ArrowException,
    DatasetsError,
)

Document = tuple[Any, str]  # a text, or a chat (list of messages); and where it was found
Values = list[Any] | pa.Array


@dataclass(frozen=True)
class Source:
    """Describes a corpus: how many groups each part has, how a group's values are read, and how a
    value becomes documents.
    """

    parts: tuple[str, ...]  # names, for messages
    groups: Callable[[int], int]  # of a part
    # part, group, first row: the values from there on, some at a time
    read: Callable[[int, int, int], Iterator[Values]]
    # [] for an empty row; None for a blank line, which is no row
    documents: Callable[[Any, str], list[Document] | None]
    fingerprint: str
    files: dict[str, str] = field(default_factory=dict)  # name -> digest, of local files
    local: bool = True
    ready: bool = False  # documents are tokens already
    size: int = 0  # bytes of local files
    # when local files were written: one may change in its middle, which its digest does not cover
    times: tuple[int, ...] = ()
    piece: int = 0  # characters at which text is cut
    columns: Callable[[], list[str]] = list  # names of the columns met so far

    def place(self, part: int, group: int, row: int) -> str:
        """Names a row for a person; rows count from 1."""
        return (
            f"{self.parts[part]}{f', row group {group}' if self.groups(part) > 1 else ''}, row"
            f" {row + 1}"
        )


@dataclass(frozen=True)
class Wanted:
    """Says what is read of a row: one column, or, for samples that are no text, several as a
    dictionary with other names.
    """

    columns: tuple[str, ...]
    task: str
    read_rows: int  # so many values are taken at a time, unless they are tokens
    # of the columns in a sample; none: a value of the only column is a document
    names: tuple[str, ...] = ()
    # names of columns, in the order in which they were read
    met: dict[str, None] = field(default_factory=dict, hash=False, compare=False)

    @property
    def as_rows(self) -> bool:
        return bool(self.names)

    def documents(self, value: Any, place: str, padded: bool = True) -> list[Document]:
        """Return the documents of a wanted value: one, or none if it is null, empty or blank.

        Raises `Refusal` for a wrong value.

        `padded`: the value comes from a table, whose objects have the keys of all rows.
        """
        if self.as_rows:
            renamed = dict(zip(self.columns, self.names, strict=True))
            if any(
                is_empty(value.get(column)) for column, name in renamed.items() if name in NEEDED
            ):
                return []
            return [
                ({renamed.get(column, column): entry for column, entry in value.items()}, place)
            ]
        if self.chats and (form := form_of(value, self.columns[0])):
            content = form.content(value, place, padded)
            return [] if content is None else [(content, place)]
        if is_empty(value):
            return []
        check_value(value, self.chats, place)
        return [(value, place)]

    @property
    def chats(self) -> bool:
        return TASKS[self.task].chats

    def read(self, names: Collection[str]) -> tuple[str, ...]:
        """List the columns to read if a row has columns of these names."""
        return columns_read(self.task, self.columns, names)

    def of_row(self, row: dict[str, Any]) -> Any:
        return (
            {column: row[column] for column in self.read(row)}
            if self.as_rows or self.chats
            else row[self.columns[0]]
        )

    def of_table(self, table: Any) -> pa.Array:
        """Takes the wanted values from a pyarrow table or record batch."""
        several = self.as_rows or (self.chats and not self.are_tokens(table.schema))
        columns = list(self.read(table.schema.names))
        values = (
            table.select(columns).to_struct_array() if several else table.column(self.columns[0])
        )
        if isinstance(values, pa.ChunkedArray):
            # which copies
            values = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
        if pa.types.is_fixed_size_list(values.type):
            values = values.cast(pa.list_(values.type.value_type))
        return values

    def check(self, names: list[str], place: str) -> None:
        """Raises `Refusal` if a column is not among `names`, or if two of these are equal."""
        if found := named_twice(names):
            raise refuse(place, *found)
        self.met.update(dict.fromkeys(names))
        if absent := absent_column(self.task, self.columns, names):
            raise refuse(place, *absent)

    def are_tokens(self, schema: pa.Schema) -> bool:
        index = schema.get_field_index(self.columns[0])  # -1 also if two columns have this name
        return not self.as_rows and index >= 0 and holds_tokens(schema.field(index).type)


def holds_tokens(kind: pa.DataType) -> bool:
    """Recognises a column of lists of integers: documents that are tokenised already."""
    lists = (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
    return lists and pa.types.is_integer(kind.value_type)
