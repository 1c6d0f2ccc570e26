"""Chunks: the documents of a few hundred rows, as samples or as tokens.

The documents of a local corpus are tokenized once, and their tokens are stored in Arrow files.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import config as datasets_config

from ..spec.errors import ConfigError, Say, config_error
from ..spec.paths import local_path
from .content import ONE_PERCENT, HeldOut, count_characters, estimate_bytes
from .encode import ChatCounts, Encoded, Encoder
from .processors import check_token
from .remote import Unreachable
from .request import Sizes
from .rows import encoding_problem, is_empty, unreadable_error
from .source import READ_ERRORS, Document, Source, Values, holds_tokens
from .values import invalid_tokens, to_python_values

CHUNK_FORMAT = 4  # version of the token files
MAX_REPORTED_ROWS = 5  # maximum number of skipped rows that are reported individually
LOG = logging.getLogger(__name__)


class Chunk(NamedTuple):
    """The documents of some rows as tokens, one document after the other.

    Held-out documents and documents without a target are excluded.
    """

    ids: np.ndarray  # (tokens,) int32
    # (tokens,) int32: the target of each position or IGNORE; None if the target is the document's
    # next token
    labels: np.ndarray | None
    starts: np.ndarray  # (documents,) int64: index of each document's first token in ids
    lengths: np.ndarray  # (documents,) int64
    row: int  # index in the group of the next chunk's first row
    last: bool  # True if the group ends here
    bad: int  # number of broken rows and row groups that were skipped
    barren: int  # documents without a target
    told: list[str]  # why each of the first few `bad` rows was skipped
    counts: ChatCounts = ChatCounts()  # chats and their lost text
    rows: int = 0  # rows read, skipped ones included
    empty: int = 0  # rows without text: null, empty or blank


class SampleChunk(NamedTuple):
    """The samples of some rows, excluding samples held out for evaluation."""

    samples: list[Document]
    lengths: np.ndarray  # (samples,) int64: estimated bytes of memory for each sample
    row: int  # as in `Chunk`, like the fields below
    last: bool
    bad: int
    barren: int
    told: list[str]
    counts: ChatCounts = ChatCounts()
    rows: int = 0
    empty: int = 0


def open_cache(
    source: Source, encoder: Encoder, token_cache: str, sizes: Sizes, rule: HeldOut = ONE_PERCENT
) -> Path | None:
    """Create and return the folder for this corpus's tokens.

    Return None if no tokens are stored, because the corpus is not local or because of
    `--token_cache off`.
    """
    if source.ready or token_cache == "off" or (token_cache == "auto" and not source.local):
        return None
    base = (
        Path(datasets_config.HF_DATASETS_CACHE) / "recipekit"
        if token_cache == "auto"
        else local_path(f"--token_cache {token_cache}", token_cache)
    )
    small = (rule,) if rule.chosen is not None else ()
    limits = (
        *small,
        *encoder.label_identity.items(),
        sizes.chunk_rows,
        sizes.chunk_characters,
        encoder.longest,
        encoder.vocabulary,
        source.piece,
        CHUNK_FORMAT,
    )
    key = hashlib.blake2b(
        repr((source.fingerprint, encoder.identity, encoder.date, limits, source.times)).encode(),
        digest_size=12,
    ).hexdigest()
    folder = base / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (
            token_cache == "auto"
            and source.size * sizes.times_free > (free := shutil.disk_usage(folder).free)
            and not any(folder.iterdir())
        ):
            LOG.warning(
                "tokens are not kept: %.1f GB of data, %.1f GB free in %s. --token_cache FOLDER"
                " keeps them",
                source.size / 1e9,
                free / 1e9,
                base,
            )
            return None
    except OSError as error:
        if token_cache != "auto":
            raise config_error(
                f"--token_cache {token_cache}",
                f"cannot be created: {error.strerror}",
                "set it to a writable folder or to off",
            ) from error
        LOG.warning("tokens are not kept: %s", error)
        return None
    return folder


class GroupCursor:
    """A reader of a group's values that continues where the previous read ended.

    It skips the values of chunks that a different process has made.
    """

    def __init__(self, source: Source, part: int, group: int):
        self.name = f"{part}_{group}"
        self.place = partial(source.place, part, group)  # the name of a row in messages
        self._open = partial(source.read, part, group)
        self._values: Iterator[Values] | None = None
        self._end = 0  # the row after the last value read

    def values_from(self, row: int) -> Values | None:
        """Read some values, starting at `row`, which must not precede any value already returned.

        Return None at the end of the group.
        """
        if self._values is None:
            self._values, self._end = self._open(row), row
        for some in self._values:
            self._end += len(some)
            if self._end > row:
                return some[len(some) - (self._end - row) :]
        return None


class ChunkContents(NamedTuple):
    """The contents of a chunk's rows."""

    documents: list[Document]
    row: int  # the row after them
    last: bool  # True if the group ends there
    problems: list[ConfigError]  # why rows were skipped
    token_lists: pa.Array | None = None  # tokens, instead of documents
    rows: int = 0
    empty: int = 0


@dataclass(frozen=True)
class DocumentReader:
    """A reader of rows that returns them as documents for training or evaluation."""

    source: Source
    sizes: Sizes
    skip: bool
    held_out: bool | None  # as in `ChunkReader`
    rule: HeldOut

    def read(self, rows: GroupCursor, row: int) -> ChunkContents:
        """Read the rows of one chunk, starting at `row`."""
        begin, characters, count, empty = row, 0, 0, 0
        documents: list[Document] = []
        problems: list[ConfigError] = []
        while row - begin < self.sizes.chunk_rows and characters < self.sizes.chunk_characters:
            some = self._next_values(rows, row, problems)
            if some is None:
                return ChunkContents(documents, row, True, problems, rows=count, empty=empty)
            if not isinstance(some, list):
                if holds_tokens(some.type):
                    assert not documents
                    return ChunkContents([], row, False, problems, some)
                some = to_python_values(some)

            for value in some:
                place = rows.place(row)
                row += 1
                try:
                    new = self._documents(value, place)
                except ConfigError as problem:
                    refuse_unless(self.skip, problem)
                    problems.append(problem)
                    count += 1
                    continue
                if new is None:
                    continue
                count += 1
                empty += not new
                characters += sum(count_characters(content) for content, _ in new)
                documents += (
                    new if self.held_out is None else self._select_parts(new, self.held_out)
                )
        return ChunkContents(documents, row, False, problems, rows=count, empty=empty)

    def _next_values(
        self, rows: GroupCursor, row: int, problems: list[ConfigError]
    ) -> Values | None:
        """Read some values, starting at `row`.

        Return None at the end of the group, or if the rest of the group cannot be read and is
        skipped.
        """
        try:
            return rows.values_from(row)
        except READ_ERRORS as error:
            problem = (
                error
                if isinstance(error, ConfigError)
                else unreadable_error(rows.place(row), error)
            )
            refuse_unless(self.skip, problem)
            problems.append(problem)
            return None

    def _documents(self, value: object, place: str) -> list[Document] | None:
        """Return the non-empty documents of a row.

        Return None for a blank line, because a blank line is not a row. Raise `ConfigError` for a
        row that cannot be read.
        """
        if isinstance(value, UnicodeDecodeError):
            raise config_error(place, *encoding_problem(value))
        found = self.source.documents(value, place)
        if found is None:
            return None
        return [document for document in found if not is_empty(document[0])]

    def _select_parts(self, documents: list[Document], held_out: bool) -> list[Document]:
        parts = ((self.rule.part(content, held_out), place) for content, place in documents)
        return [(content, place) for content, place in parts if not is_empty(content)]


@dataclass(frozen=True)
class ChunkEncoder:
    """Builder of chunks from documents or from pretokenized documents."""

    encoder: Encoder
    sizes: Sizes
    skip: bool
    held_out: bool | None  # as in `ChunkReader`
    rule: HeldOut
    say: Say

    def chunk(self, contents: ChunkContents, rows: GroupCursor) -> Chunk:
        """Make a chunk from the documents that were read from `rows`."""
        if contents.token_lists is not None:
            return self._tokenized_chunk(contents.token_lists, contents.row, rows)
        self._say_if_long(contents.documents)
        encoded, counts = self._encode(contents.documents, contents.problems)
        return _join_encoded(contents, encoded, self.encoder.keeps_labels, counts)

    def _say_if_long(self, documents: list[Document]) -> None:
        """Report which text is being tokenized if it is long enough to take a while."""
        characters = sum(count_characters(content) for content, _ in documents)
        if characters > self.sizes.long_text:
            longest = max(
                documents,
                key=lambda document: len(document[0]) if isinstance(document[0], str) else 0,
            )
            self.say(f"tokenising {longest[1]}: {characters:,} characters of text")

    def _encode(
        self, documents: list[Document], problems: list[ConfigError]
    ) -> tuple[list[Encoded], ChatCounts]:
        """Encode documents, and append the reason for each skipped document to `problems`.

        A broken chat may be detected only when it is rendered. In that case, each document is
        encoded separately.
        """
        try:
            return encode_checked(self.encoder, documents)
        except ConfigError as problem:
            refuse_unless(self.skip, problem)

        encoded, counts = list[Encoded](), ChatCounts()
        for document in documents:
            try:
                alone, more = encode_checked(self.encoder, [document])
                encoded, counts = encoded + alone, counts + more
            except ConfigError as problem:
                refuse_unless(self.skip, problem)
                problems.append(problem)
        return encoded, counts

    def _tokenized_chunk(self, lists: pa.Array, row: int, rows: GroupCursor) -> Chunk:
        """Make a chunk from pretokenized documents without changing their tokens."""
        if self.encoder.chats:
            raise config_error(
                "--dataset",
                "task sft requires chats, but this column contains token ids",
                "name the column of the chats with --messages_field",
            )
        count, end = len(lists), row + len(lists)
        lists, told = self._without_wrong_tokens(lists, row, rows)

        nulls = lists.null_count
        lists = lists.drop_null()
        ids = lists.flatten().to_numpy().astype(np.int32, copy=False)
        offsets = lists.offsets.to_numpy().astype(np.int64)
        starts, lengths = offsets[:-1] - offsets[0], offsets[1:] - offsets[:-1]

        # A document with a single token has no target.
        empty, barren = nulls + int(np.count_nonzero(lengths == 0)), np.count_nonzero(lengths == 1)
        long = lengths > 1
        if not long.all():
            starts, lengths = starts[long], lengths[long]
        if self.held_out is not None:
            starts, lengths = self.rule.tokens(ids, starts, lengths, self.held_out)
        return Chunk(
            ids,
            None,
            starts,
            lengths,
            end,
            False,
            len(told),
            int(barren),
            told[:MAX_REPORTED_ROWS],
            rows=count,
            empty=empty,
        )

    def _without_wrong_tokens(
        self, lists: pa.Array, row: int, rows: GroupCursor
    ) -> tuple[pa.Array, list[str]]:
        """Return (the documents with valid token ids, why each other document is skipped)."""
        told, vocabulary = list[str](), self.encoder.vocabulary
        wrong = invalid_tokens(lists, vocabulary)
        for number, token in wrong:
            rule = (
                f"contains token {'null' if token is None else token}, but the tokenizer's ids"
                f" are 0 to {vocabulary - 1}"
            )
            problem = config_error(
                rows.place(row + number),
                rule,
                "use the tokenizer that made these tokens (--tokenizer), or correct the row",
            )
            refuse_unless(self.skip, problem)
            told.append(str(problem))
        if wrong:
            right = np.setdiff1d(np.arange(len(lists)), [number for number, _ in wrong])
            lists = lists.take(pa.array(right))
        return lists, told


@dataclass(frozen=True)
class TokenFolder:
    """The folder with a corpus's token files, shared by the processes of a host.

    After a file-system error, no more tokens are stored. A folder of a different user, a full disk
    or a file system without locks must not end the run.
    """

    folder: Path
    disabled: threading.Event
    say: Say
    notice_after_s: float

    def load(self, name: str) -> Chunk | None:
        return _load_chunk(self.folder / f"{name}.arrow")

    def store(self, name: str, chunk: Chunk) -> None:
        with self._disable_on_error():
            if not self.disabled.is_set():
                _store_chunk(self.folder / f"{name}.arrow", chunk)

    @contextlib.contextmanager
    def lock(self, place: Callable[[], str]) -> Iterator[None]:
        """Hold the folder's lock, if the folder supports locks.

        If a different process is making the tokens of `place` and the wait is long, report the
        wait.
        """
        with contextlib.ExitStack() as held:
            with self._disable_on_error():
                waited = (
                    f"waiting for the tokens of {place()}, which another process of this host makes"
                )
                held.enter_context(
                    _lock_folder(self.folder, self.notice_after_s, lambda: self.say(waited))
                )
            yield

    @contextlib.contextmanager
    def _disable_on_error(self) -> Iterator[None]:
        """After a file-system error, log a warning and stop storing tokens."""
        try:
            yield
        except OSError as error:
            LOG.warning("tokens are not kept: %s", error)
            self.disabled.set()


@dataclass(frozen=True)
class ChunkReader:
    """A reader of one corpus's chunks."""

    source: Source
    encoder: Encoder | None  # None: the documents are samples
    skip: bool  # count broken rows instead of raising a config error
    sizes: Sizes
    cache: Path | None
    held_out: bool | None = False  # True: only held-out documents; False: all others; None: all
    rule: HeldOut = ONE_PERCENT
    strict: bool = False  # reject data that would lose most of their chats
    say: Say = LOG.warning
    told: list[str] = field(default_factory=list)  # messages about skipped rows
    closed: threading.Event = field(default_factory=threading.Event)  # the stream is closed
    # set, after a warning, when tokens could not be stored
    cache_disabled: threading.Event = field(default_factory=threading.Event)
    patient: float = 5.0  # seconds to wait for a different process before the wait is reported

    def report(
        self, counts: ChatCounts, rows: int = 0, empty: int = 0, is_all: bool = True
    ) -> None:
        """Report empty rows, the first chats and the chats' lost text.

        `is_all` is True if the counts cover all rows of an epoch. Raise `ConfigError` if the lost
        share exceeds `MAX_LOST_SHARE`, unless bad rows are skipped.
        """
        if empty:
            self.say(
                f"{empty:,} of {'' if is_all else 'the first '}{rows:,} rows are empty (null, no"
                " text or blank) and skipped. The metric empty_rows counts them"
            )
        if not counts.rows:
            return
        assert self.encoder is not None
        for line in counts.lines(self.encoder.seq_len):
            self.say(line)
        if self.strict and not self.skip and (problems := counts.problems(self.encoder.seq_len)):
            raise ConfigError(problems)

    def groups(self, part: int) -> int | Chunk | SampleChunk:
        """Return the number of groups in a part.

        If the part cannot be read and bad rows are skipped, return an empty chunk that counts the
        part as broken.
        """
        try:
            return self.source.groups(part)
        except ConfigError as problem:
            refuse_unless(self.skip, problem)
            report_skipped([str(problem)], self.told, self.say)
            return _unreadable_part(problem)

    def chunks(self, part: int, group: int, row: int) -> Iterator[Chunk | SampleChunk]:
        """Yield a group's chunks, starting at `row`.

        Raise `ConfigError` for a row that cannot be read, unless broken rows are skipped.
        """
        rows = GroupCursor(self.source, part, group)
        while True:
            if self.closed.is_set():
                raise RuntimeError("the stream is closed")
            chunk = self._chunk(row, rows)
            report_skipped(chunk.told, self.told, self.say)
            yield chunk
            row = chunk.row
            if chunk.last:
                return

    def _chunk(self, row: int, rows: GroupCursor) -> Chunk | SampleChunk:
        if self.encoder is None:
            return self._samples(row, rows)
        if self.cache is None:
            return self._encoded(row, rows)
        kept = TokenFolder(self.cache, self.cache_disabled, self.say, self.patient)
        name = f"{rows.name}_{row}"
        if (chunk := kept.load(name)) and self._is_accepted(chunk):
            return chunk
        if self.cache_disabled.is_set():
            return self._encoded(row, rows)

        # One process on this host makes the tokens, and the other processes read them.
        with kept.lock(partial(rows.place, row)):
            if (chunk := kept.load(name)) and self._is_accepted(chunk):
                return chunk
            chunk = self._encoded(row, rows)
            kept.store(name, chunk)
        return chunk

    def _is_accepted(self, chunk: Chunk) -> bool:
        return self.skip or not chunk.bad  # reread skipped rows to report them

    @property
    def _documents(self) -> DocumentReader:
        return DocumentReader(self.source, self.sizes, self.skip, self.held_out, self.rule)

    def _samples(self, row: int, rows: GroupCursor) -> SampleChunk:
        found = self._documents.read(rows, row)
        least = self.sizes.block_bytes // self.sizes.block_samples
        lengths = np.array(
            [max(least, estimate_bytes(content)) for content, _ in found.documents], dtype=np.int64
        )
        told = [problem.problems[0].fault for problem in found.problems[:MAX_REPORTED_ROWS]]
        return SampleChunk(
            found.documents,
            lengths,
            found.row,
            found.last,
            len(found.problems),
            0,
            told,
            rows=found.rows,
            empty=found.empty,
        )

    def _encoded(self, row: int, rows: GroupCursor) -> Chunk:
        assert self.encoder is not None
        making = ChunkEncoder(
            self.encoder, self.sizes, self.skip, self.held_out, self.rule, self.say
        )
        return making.chunk(self._documents.read(rows, row), rows)


def refuse_unless(skip: bool, problem: ConfigError) -> None:
    """Raise a row's config error unless broken rows are skipped.

    The error for an unreachable server is always raised.
    """
    if not skip or isinstance(problem, Unreachable):
        raise problem


def _join_encoded(
    contents: ChunkContents, encoded: list[Encoded], keeps_labels: bool, counts: ChatCounts
) -> Chunk:
    """Join encoded documents into a chunk.

    `keeps_labels` is True if the labels cannot be derived from the tokens.
    """
    full = [(ids, labels) for ids, labels in encoded if len(ids)]
    ids, labels = np.empty(0, np.int32), None
    if full:
        ids = np.concatenate([ids for ids, _ in full]).astype(np.int32)
    if full and keeps_labels:
        labels = np.concatenate([labels for _, labels in full]).astype(np.int32)
    lengths = np.array([len(ids) for ids, _ in full], dtype=np.int64)
    told = [problem.problems[0].fault for problem in contents.problems[:MAX_REPORTED_ROWS]]
    return Chunk(
        ids,
        labels,
        np.cumsum(lengths) - lengths,
        lengths,
        contents.row,
        contents.last,
        len(contents.problems),
        len(encoded) - len(full),
        told,
        counts,
        contents.rows,
        contents.empty,
    )


def encode_checked(encoder: Encoder, documents: list[Document]) -> tuple[list[Encoded], ChatCounts]:
    """Encode documents as `encoder.encode_with_counts` does.

    Raise `ConfigError` for the first document that contains a token without an embedding.
    """
    encoded, counts = encoder.encode_with_counts(documents)
    highest = max((int(ids.max()) for ids, _ in encoded if len(ids)), default=-1)
    if highest >= encoder.vocabulary:
        for document in documents if len(documents) > 1 else ():
            encode_checked(encoder, [document])
        check_token(encoder.tokenizer, highest, documents[0][1])
    return encoded, counts


def report_skipped(problems: list[str], reported: list[str], say: Say) -> None:
    """Report at most `MAX_REPORTED_ROWS` skipped rows; `reported` collects their problems."""
    for problem in problems:
        if len(reported) < MAX_REPORTED_ROWS and problem not in reported:
            reported.append(problem)
            last = (
                ", the last one that is reported. The metric bad_rows counts on"
                if len(reported) == MAX_REPORTED_ROWS
                else ""
            )
            say(f"skipped (--bad_rows skip): {problem}{last}")


def _unreadable_part(problem: ConfigError) -> Chunk:
    nothing = np.empty(0, dtype=np.int64)
    return Chunk(
        nothing.astype(np.int32), None, nothing, nothing, 0, True, 1, 0, [problem.problems[0].fault]
    )


# The files of tokens
# ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _lock_folder(
    folder: Path, notice_after_s: float, on_wait: Callable[[], None]
) -> Iterator[None]:
    """Hold the folder's lock; the kernel releases the lock when the process dies.

    If a different process holds the lock for `notice_after_s` seconds, call `on_wait` from a
    thread.
    """
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            telling = threading.Timer(notice_after_s, on_wait)
            telling.daemon = True
            telling.start()
            fcntl.flock(lock, fcntl.LOCK_EX)
            telling.cancel()
        yield


def _load_chunk(file: Path) -> Chunk | None:
    """Map the chunk in `file` into memory; return None if the file is missing or damaged."""
    try:
        table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError):
        return None  # the chunk is made again
    facts = json.loads(table.schema.metadata[b"chunk"])
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    ids = columns["ids"]
    lengths = np.diff(ids.offsets.to_numpy()).astype(np.int64)
    labels = columns["labels"].flatten().to_numpy() if "labels" in columns else None
    counts: list[Any] = [
        tuple(value) if isinstance(value, list) else value for value in facts.pop("counts")
    ]
    return Chunk(
        ids.flatten().to_numpy(),
        labels,
        np.cumsum(lengths) - lengths,
        lengths,
        **facts,
        counts=ChatCounts(*counts),
    )


def _store_chunk(file: Path, chunk: Chunk) -> None:
    offsets = np.concatenate([[0], np.cumsum(chunk.lengths)]).astype(np.int32)
    columns = {"ids": pa.ListArray.from_arrays(offsets, chunk.ids)}
    if chunk.labels is not None:
        columns["labels"] = pa.ListArray.from_arrays(offsets, chunk.labels)
    names = ("row", "last", "bad", "barren", "told", "counts", "rows", "empty")
    facts = {name: getattr(chunk, name) for name in names}
    table = pa.table(columns).replace_schema_metadata({"chunk": json.dumps(facts)})
    made = file.with_suffix(f".{os.getpid()}")
    try:
        with pa.OSFile(str(made), "wb") as stream, pa.ipc.new_file(stream, table.schema) as writer:
            writer.write_table(table)
        made.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            made.unlink()
        raise
