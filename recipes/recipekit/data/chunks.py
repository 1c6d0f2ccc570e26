"""Chunks: the documents of a few hundred rows, as samples or as tokens.

Tokens are made once and kept as Arrow files when the corpus is local.
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

from ..spec.paths import local_path
from ..spec.refusal import Refusal, Say, refuse
from .content import ONE_PERCENT, HeldOut, characters_of, size_of
from .encode import Counts, Encoded, Encoder
from .processors import check_token
from .remote import Unreachable
from .request import Sizes
from .rows import is_empty, not_utf8, unreadable
from .source import UNREADABLE, Document, Source, Values, holds_tokens
from .values import as_python, wrong_tokens

FORMAT = 4  # of the files
TOLD = 5  # rows left out of which a run tells where they are; the others are counted
LOG = logging.getLogger(__name__)


class Chunk(NamedTuple):
    """Holds the documents of some rows as tokens, one after the other, without those held out for
    evaluation and those without a target.
    """

    ids: np.ndarray  # (tokens,) int32
    # (tokens,) int32: the target of each position or IGNORE; None: the next token of the document
    labels: np.ndarray | None
    starts: np.ndarray  # (documents,) int64: where in ids
    lengths: np.ndarray  # (documents,) int64
    row: int  # of the group, from where on the next chunk reads
    last: bool  # the group ends here
    bad: int  # rows and row groups that were skipped, being broken
    barren: int  # documents that hold no target
    told: list[str]  # why the first few of `bad` were skipped
    counts: Counts = Counts()  # chats and their lost text
    rows: int = 0  # rows read, skipped ones included
    empty: int = 0  # rows without text: null, empty or blank


class SampleChunk(NamedTuple):
    """Holds the samples of some rows, without those held out for evaluation."""

    samples: list[Document]
    lengths: np.ndarray  # (samples,) int64: what each takes of a block
    row: int  # as in a `Chunk`, with what follows
    last: bool
    bad: int
    barren: int
    told: list[str]
    counts: Counts = Counts()
    rows: int = 0
    empty: int = 0


def open_cache(
    source: Source, encoder: Encoder, token_cache: str, sizes: Sizes, rule: HeldOut = ONE_PERCENT
) -> Path | None:
    """Makes the folder of this corpus' tokens; None where none are kept: for what is not local, or
    with `--token_cache off`.
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
        sizes.chunk_rows,
        sizes.chunk_characters,
        encoder.longest,
        encoder.vocabulary,
        source.piece,
        FORMAT,
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
            raise refuse(
                f"--token_cache {token_cache}",
                f"cannot be created: {error.strerror}",
                "set it to a writable folder or to off",
            ) from error
        LOG.warning("tokens are not kept: %s", error)
        return None
    return folder


class Rows:
    """Reads the values of a group on from where reading stopped, past the values of chunks that
    another process has made.
    """

    def __init__(self, source: Source, part: int, group: int):
        self.name = f"{part}_{group}"
        self.place = partial(source.place, part, group)  # the name of a row for a person
        self._open = partial(source.read, part, group)
        self._values: Iterator[Values] | None = None
        self._end = 0  # the row after the last value read

    def at(self, row: int) -> Values | None:
        """Reads some values from `row` on, which lies behind all values given before; None at the
        end of the group.
        """
        if self._values is None:
            self._values, self._end = self._open(row), row
        for some in self._values:
            self._end += len(some)
            if self._end > row:
                return some[len(some) - (self._end - row) :]
        return None


class Found(NamedTuple):
    """Holds what the rows of a chunk hold."""

    documents: list[Document]
    row: int  # after them
    last: bool  # the group ends there
    problems: list[Refusal]  # why rows were skipped
    ready: pa.Array | None = None  # tokens, instead of documents
    rows: int = 0
    empty: int = 0


@dataclass(frozen=True)
class DocumentReader:
    """Reads rows as the documents for training, or for evaluation."""

    source: Source
    sizes: Sizes
    skip: bool
    held_out: bool | None  # as of a `Reader`
    rule: HeldOut

    def read(self, rows: Rows, row: int) -> Found:
        """Read the rows of a chunk, from `row` on."""
        begin, characters, count, empty = row, 0, 0, 0
        documents: list[Document] = []
        problems: list[Refusal] = []
        while row - begin < self.sizes.chunk_rows and characters < self.sizes.chunk_characters:
            some = self._next_values(rows, row, problems)
            if some is None:
                return Found(documents, row, True, problems, rows=count, empty=empty)
            if not isinstance(some, list):
                if holds_tokens(some.type):
                    assert not documents
                    return Found([], row, False, problems, some)
                some = as_python(some)

            for value in some:
                place = rows.place(row)
                row += 1
                try:
                    new = self._documents(value, place)
                except Refusal as problem:
                    refuse_unless(self.skip, problem)
                    problems.append(problem)
                    count += 1
                    continue
                if new is None:
                    continue
                count += 1
                empty += not new
                characters += sum(characters_of(content) for content, _ in new)
                documents += new if self.held_out is None else self._own(new, self.held_out)
        return Found(documents, row, False, problems, rows=count, empty=empty)

    def _next_values(self, rows: Rows, row: int, problems: list[Refusal]) -> Values | None:
        """Read some values from `row` on; None at the end of the group, and where the rest of it
        cannot be read and is skipped.
        """
        try:
            return rows.at(row)
        except UNREADABLE as error:
            problem = error if isinstance(error, Refusal) else unreadable(rows.place(row), error)
            refuse_unless(self.skip, problem)
            problems.append(problem)
            return None

    def _documents(self, value: Any, place: str) -> list[Document] | None:
        """Return the documents of a row that are not empty; None for a blank line, which is no row.

        Raises `Refusal` for a row that cannot be read.
        """
        if isinstance(value, UnicodeDecodeError):
            raise refuse(place, *not_utf8(value))
        found = self.source.documents(value, place)
        if found is None:
            return None
        return [document for document in found if not is_empty(document[0])]

    def _own(self, documents: list[Document], held_out: bool) -> list[Document]:
        parts = ((self.rule.part(content, held_out), place) for content, place in documents)
        return [(content, place) for content, place in parts if not is_empty(content)]


@dataclass(frozen=True)
class ChunkEncoder:
    """Makes chunks of documents, or of ready tokens."""

    encoder: Encoder
    sizes: Sizes
    skip: bool
    held_out: bool | None  # as of a `Reader`
    rule: HeldOut
    say: Say

    def chunk(self, found: Found, rows: Rows) -> Chunk:
        """Make the chunk of documents that were found in `rows`."""
        if found.ready is not None:
            return self._ready(found.ready, found.row, rows)
        self._say_if_long(found.documents)
        encoded, counts = self._encode(found.documents, found.problems)
        return _joined(found, encoded, self.encoder.chats, counts)

    def _say_if_long(self, documents: list[Document]) -> None:
        """Say which text is tokenised if that takes long."""
        characters = sum(characters_of(content) for content, _ in documents)
        if characters > self.sizes.long_text:
            longest = max(
                documents,
                key=lambda document: len(document[0]) if isinstance(document[0], str) else 0,
            )
            self.say(f"tokenising {longest[1]}: {characters:,} characters of text")

    def _encode(
        self, documents: list[Document], problems: list[Refusal]
    ) -> tuple[list[Encoded], Counts]:
        """Encode documents; add to `problems` why some of them are skipped.

        A chat may turn out to be broken only when it is rendered. Then each document is encoded
        alone.
        """
        try:
            return encode_fitting(self.encoder, documents)
        except Refusal as problem:
            refuse_unless(self.skip, problem)

        encoded, counts = list[Encoded](), Counts()
        for document in documents:
            try:
                alone, more = encode_fitting(self.encoder, [document])
                encoded, counts = encoded + alone, counts + more
            except Refusal as problem:
                refuse_unless(self.skip, problem)
                problems.append(problem)
        return encoded, counts

    def _ready(self, lists: pa.Array, row: int, rows: Rows) -> Chunk:
        """Make a chunk of documents that are tokens already; the tokens are taken as they are."""
        if self.encoder.chats:
            raise refuse(
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

        # A document of one token has no token to predict.
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
            told[:TOLD],
            rows=count,
            empty=empty,
        )

    def _without_wrong_tokens(
        self, lists: pa.Array, row: int, rows: Rows
    ) -> tuple[pa.Array, list[str]]:
        """Return the documents of ready tokens that the tokenizer may have made, and why others are
        skipped.
        """
        told, vocabulary = list[str](), self.encoder.vocabulary
        wrong = wrong_tokens(lists, vocabulary)
        for number, token in wrong:
            rule = (
                f"contains token {'null' if token is None else token}, but the tokenizer's ids"
                f" are 0 to {vocabulary - 1}"
            )
            problem = refuse(
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
    """The files of a corpus' tokens, which the processes of a host share.

    If the folder does not allow it, tokens are not kept any more: a folder of somebody else, a full
    disk or one without locks must not end the run.
    """

    folder: Path
    not_kept: threading.Event
    say: Say
    patient: float

    def load(self, name: str) -> Chunk | None:
        return _load(self.folder / f"{name}.arrow")

    def store(self, name: str, chunk: Chunk) -> None:
        with self._keeping():
            if not self.not_kept.is_set():
                _store(self.folder / f"{name}.arrow", chunk)

    @contextlib.contextmanager
    def turn(self, place: Callable[[], str]) -> Iterator[None]:
        """Hold the folder's lock, if it has one; say that another process makes the tokens of
        `place` if that takes long.
        """
        with contextlib.ExitStack() as held:
            with self._keeping():
                waited = (
                    f"waiting for the tokens of {place()}, which another process of this host makes"
                )
                held.enter_context(_turn(self.folder, self.patient, lambda: self.say(waited)))
            yield

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        """Warn and keep no more tokens after an error of the file system."""
        try:
            yield
        except OSError as error:
            LOG.warning("tokens are not kept: %s", error)
            self.not_kept.set()


@dataclass(frozen=True)
class Reader:
    """Reads chunks of one corpus."""

    source: Source
    encoder: Encoder | None  # None: the documents are samples
    skip: bool  # broken rows are counted, not refused
    sizes: Sizes
    cache: Path | None
    held_out: bool | None = False  # read the held-out documents, and no others; None: read all
    rule: HeldOut = ONE_PERCENT
    strict: bool = False  # refuse data of which most chats are lost
    say: Say = LOG.warning
    told: list[str] = field(default_factory=list)  # what was said of rows left out
    closed: threading.Event = field(default_factory=threading.Event)  # nobody wants the rest
    # tokens could not be, which was told
    not_kept: threading.Event = field(default_factory=threading.Event)
    patient: float = 5.0  # seconds after which it says that it waits for another process

    def report(self, counts: Counts, rows: int = 0, empty: int = 0, is_all: bool = True) -> None:
        """Report empty rows, the first chats and their lost text.

        `is_all`: these are the rows of a whole epoch.

        Raises `Refusal` if the lost share exceeds `MOST`, unless bad rows are skipped.
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
            raise Refusal(problems)

    def groups(self, part: int) -> int | Chunk | SampleChunk:
        """Counts the groups of a part.

        For a part that cannot be read and is to be skipped: a chunk without documents that counts
        the part as broken.
        """
        try:
            return self.source.groups(part)
        except Refusal as problem:
            refuse_unless(self.skip, problem)
            tell([str(problem)], self.told, self.say)
            return _no_documents(problem)

    def chunks(self, part: int, group: int, row: int) -> Iterator[Chunk | SampleChunk]:
        """Yields the chunks of a group from `row` on.

        Raises `Refusal` for a row that cannot be read, unless broken rows are skipped.
        """
        rows = Rows(self.source, part, group)
        while True:
            if self.closed.is_set():
                raise RuntimeError("the stream is closed")
            chunk = self._chunk(row, rows)
            tell(chunk.told, self.told, self.say)
            yield chunk
            row = chunk.row
            if chunk.last:
                return

    def _chunk(self, row: int, rows: Rows) -> Chunk | SampleChunk:
        if self.encoder is None:
            return self._samples(row, rows)
        if self.cache is None:
            return self._encoded(row, rows)
        kept = TokenFolder(self.cache, self.not_kept, self.say, self.patient)
        name = f"{rows.name}_{row}"
        if (chunk := kept.load(name)) and self._welcome(chunk):
            return chunk
        if self.not_kept.is_set():
            return self._encoded(row, rows)

        # Of all processes of this host one makes the tokens, and the others read them.
        with kept.turn(partial(rows.place, row)):
            if (chunk := kept.load(name)) and self._welcome(chunk):
                return chunk
            chunk = self._encoded(row, rows)
            kept.store(name, chunk)
        return chunk

    def _welcome(self, chunk: Chunk) -> bool:
        return self.skip or not chunk.bad  # what was skipped once is read again to be refused

    @property
    def _documents(self) -> DocumentReader:
        return DocumentReader(self.source, self.sizes, self.skip, self.held_out, self.rule)

    def _samples(self, row: int, rows: Rows) -> SampleChunk:
        found = self._documents.read(rows, row)
        least = self.sizes.block_bytes // self.sizes.block_samples
        lengths = np.array(
            [max(least, size_of(content)) for content, _ in found.documents], dtype=np.int64
        )
        told = [problem.problems[0].fault for problem in found.problems[:TOLD]]
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

    def _encoded(self, row: int, rows: Rows) -> Chunk:
        assert self.encoder is not None
        making = ChunkEncoder(
            self.encoder, self.sizes, self.skip, self.held_out, self.rule, self.say
        )
        return making.chunk(self._documents.read(rows, row), rows)


def refuse_unless(skip: bool, problem: Refusal) -> None:
    """Raise a problem of a row unless broken rows are skipped. A server that cannot be reached is
    always a problem.
    """
    if not skip or isinstance(problem, Unreachable):
        raise problem


def _joined(found: Found, encoded: list[Encoded], chats: bool, counts: Counts) -> Chunk:
    """Join encoded documents to a chunk. `chats`: a part of the tokens only are targets."""
    full = [(ids, labels) for ids, labels in encoded if len(ids)]
    ids, labels = np.empty(0, np.int32), None
    if full:
        ids = np.concatenate([ids for ids, _ in full]).astype(np.int32)
    if full and chats:
        labels = np.concatenate([labels for _, labels in full]).astype(np.int32)
    lengths = np.array([len(ids) for ids, _ in full], dtype=np.int64)
    told = [problem.problems[0].fault for problem in found.problems[:TOLD]]
    return Chunk(
        ids,
        labels,
        np.cumsum(lengths) - lengths,
        lengths,
        found.row,
        found.last,
        len(found.problems),
        len(encoded) - len(full),
        told,
        counts,
        found.rows,
        found.empty,
    )


def encode_fitting(encoder: Encoder, documents: list[Document]) -> tuple[list[Encoded], Counts]:
    """Encode documents like `encoder.counted`.

    Raises `Refusal` for the first one with a token that has no embedding.
    """
    encoded, counts = encoder.counted(documents)
    highest = max((int(ids.max()) for ids, _ in encoded if len(ids)), default=-1)
    if highest >= encoder.vocabulary:
        for document in documents if len(documents) > 1 else ():
            encode_fitting(encoder, [document])
        check_token(encoder.tokenizer, highest, documents[0][1])
    return encoded, counts


def tell(problems: list[str], told: list[str], say: Say) -> None:
    """Says which rows were left out, up to `TOLD` times in all; `told` keeps what was said."""
    for problem in problems:
        if len(told) < TOLD and problem not in told:
            told.append(problem)
            last = (
                ", the last one that is reported. The metric bad_rows counts on"
                if len(told) == TOLD
                else ""
            )
            say(f"skipped (--bad_rows skip): {problem}{last}")


def _no_documents(problem: Refusal) -> Chunk:
    nothing = np.empty(0, dtype=np.int64)
    return Chunk(
        nothing.astype(np.int32), None, nothing, nothing, 0, True, 1, 0, [problem.problems[0].fault]
    )


# The files of tokens
# ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _turn(folder: Path, patient: float, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the folder's lock, which the kernel frees when a process dies; calls `waiting`, from a
    thread, if another holds the lock for `patient` seconds.
    """
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            telling = threading.Timer(patient, waiting)
            telling.daemon = True
            telling.start()
            fcntl.flock(lock, fcntl.LOCK_EX)
            telling.cancel()
        yield


def _load(file: Path) -> Chunk | None:
    """Maps the chunk kept in `file` into memory; None if there is no such file, or it is
    damaged.
    """
    try:
        table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError):
        return None  # it is made anew
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
        counts=Counts(*counts),
    )


def _store(file: Path, chunk: Chunk) -> None:
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
