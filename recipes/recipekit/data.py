"""The global data stream: which token stands where in which optimizer step, whatever the number of ranks.

The corpus is one endless sequence of documents: epoch after epoch, its parts (files) in an order drawn for the epoch,
the documents of a block of about a thousand shuffled. Document i goes to lane i % global_batch. Lane j packs its
documents into rows and supplies row j of every global batch; a data-parallel rank owns a run of neighbouring lanes.
So the order depends on (corpus, seed, global_batch, seq_len) alone. All randomness is a hash of (seed, epoch, block),
so the state is small: for every lane the first token that no row holds yet, and one place to start reading from.
"""

import ast
import functools
import hashlib
import json
import logging
import os
import queue
import sysconfig
import threading
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from glob import escape, glob
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets.exceptions import DatasetsError

from .recipe import Recipe
from .refusal import Problem, Refusal, refuse
from .tokens import IGNORE, Encoded, check_tokenizer, encode_chats, encode_texts, hub_refusal, pad_id

READ_ROWS = 64  # rows taken from `datasets` at a time
BLOCK_DOCUMENTS, BLOCK_CHARACTERS = 1024, 64_000_000  # a block, the range of the shuffle, ends at whichever comes first
PIECE = 32 * 1024  # characters; a longer text file is cut, at a line end, into documents of at most this length
TEXT_PARTS = 256  # text files are read in at most this many parts: one `shard()` call per file is slow (datasets 5.2: 4 ms of 1,800)
BARREN_DOCUMENTS = 10_000  # so many documents in a row without a target mean that there is none
PREFETCH = 3  # steps prepared ahead

UNREADABLE = (OSError, ValueError, TypeError, EOFError, zlib.error, pa.ArrowException, DatasetsError)  # what broken files raise in `datasets`
LOG = logging.getLogger(__name__)
Document = tuple[Any, str]  # a text, or a chat (list of messages); and where it was found
MicroBatch = dict[str, torch.Tensor]


# The corpus: rows from `datasets`, documents from rows ------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A corpus: `parts` shards of a streaming data set, and how a value of its `column` becomes documents."""

    dataset: datasets.IterableDataset
    parts: int
    names: list[str]  # of the parts, for messages
    column: str
    documents: Callable[[Any, str], list[Document]]
    fingerprint: str


def open_source(recipe: Recipe) -> Source:
    """The corpus of the recipe. Raises `Refusal` if it does not exist or cannot be reached."""
    sft = recipe.task == "sft"
    field = recipe.messages_field if sft else recipe.text_field
    if recipe.dataset == "builtin":
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages"} | ({"test", "tests", "idle_test"} if sft else set())  # tests have few docstrings
        files = []
        for folder, folders, names in os.walk(stdlib):
            folders[:] = [name for name in folders if name not in skipped]  # not walked into: site-packages may hold 100,000 files
            files += [Path(folder, name) for name in names if name.endswith(".py") and name not in skipped]
        files.sort()
        # ast warns of odd escapes in the sources it reads; their name below keeps that from the user
        warnings.filterwarnings("ignore", module="builtin_corpus")
        return _text_source(files, _docstring_chats if sft else _pieces, _file_fingerprint(files, "builtin", recipe.task))
    files = _local_files(recipe.dataset)
    if files is None:
        return _hub_source(recipe, field)
    kind = _kind(files, recipe.dataset)
    if kind == "text" and sft:
        raise refuse(f"--dataset {recipe.dataset}", "task sft needs chats, these are text files", "give JSONL or Parquet with --messages_field")
    fingerprint = _file_fingerprint(files, recipe.task, "" if kind == "text" else field)
    if kind == "text":
        return _text_source(files, _pieces, fingerprint)
    names = [str(file) for file in files]
    if kind == "lines":
        # Lines, not the json builder: that guesses one schema for all rows and cannot name the row that breaks it
        return Source(_load("text", files, fingerprint), len(files), names, "text", partial(_from_line, field, sft), fingerprint)
    return Source(_load("parquet", files, fingerprint), len(files), names, field, partial(_one_document, sft), fingerprint)


def fingerprint(recipe: Recipe) -> str:
    """Names the content that the recipe reads: equal for equal copies of local files; of a hub data set its commit."""
    return open_source(recipe).fingerprint


def _local_files(dataset: str) -> list[Path] | None:
    """The files that the text names (path, folder, glob, several by comma), sorted; None if it must be a hub id."""
    parts = [dataset] if Path(dataset).expanduser().exists() else [part.strip() for part in dataset.split(",") if part.strip()]
    files: set[Path] = set()
    problems = []
    for part in parts:
        path = Path(part).expanduser()
        if path.is_dir():
            found = [file for file in path.rglob("*") if file.is_file() and _suffix(file) in _KINDS and not file.name.startswith((".", "_"))]
        elif path.exists():
            found = [path]
        else:
            found = [file for match in glob(str(path), recursive=True) if (file := Path(match)).is_file()]
        is_path = len(parts) > 1 or part.startswith((".", "/", "~")) or part.count("/") > 1 or any(c in part for c in "*?[") or _suffix(path) in _KINDS
        if not found and not is_path and not path.exists():
            return None
        if not found:
            problems.append(Problem(f"--dataset {part}", "there is no such file", "check the path; a hub id is ORG/NAME"))
        files.update(found)
    if problems:
        raise Refusal(problems)
    return sorted(files)


_KINDS = {".txt": "text", ".md": "text", ".rst": "text", ".py": "text", ".jsonl": "lines", ".ndjson": "lines", ".json": "lines", ".parquet": "parquet"}


def _suffix(file: Path) -> str:
    return Path(file.name.removesuffix(".gz")).suffix.lower()


def _kind(files: list[Path], dataset: str) -> str:
    kinds = {_KINDS.get(_suffix(file), "") for file in files}
    if "" in kinds:
        odd = next(file for file in files if _suffix(file) not in _KINDS)
        raise refuse(f"--dataset {odd}", "the ending does not say what is in it", f"rename it to one of {', '.join(_KINDS)}")
    if len(kinds) > 1:
        raise refuse(f"--dataset {dataset}", f"holds files of several kinds: {', '.join(sorted(kinds))}", "name those of one kind, for example FOLDER/*.jsonl")
    return kinds.pop()


def _load(builder: str, files: list[Path], fingerprint: str, **options: Any) -> datasets.IterableDataset:
    return _loaded(builder, tuple(escape(os.path.abspath(file)) for file in files), fingerprint, **options)  # `datasets` reads a path as a glob


@functools.lru_cache(maxsize=8)
def _loaded(builder: str, files: tuple[str, ...], fingerprint: str, **options: Any) -> datasets.IterableDataset:
    """`load_dataset`, once for the same content: it takes a second for the 1,800 files of `builtin`, and both streams of a run read them."""
    try:
        return datasets.load_dataset(builder, data_files={"train": list(files)}, split="train", streaming=True, **options)
    except UNREADABLE as error:
        raise _unreadable(files[0], error) from error  # `datasets` looks into the first file only


def _text_source(files: list[Path], documents: Callable[[Any, str], list[Document]], fingerprint: str) -> Source:
    dataset = _load("text", files, fingerprint, sample_by="document", encoding_errors="replace")
    parts = min(len(files), TEXT_PARTS)
    names = [str(file) for file in files] if parts == len(files) else [f"part {number} of the text files" for number in range(parts)]
    return Source(dataset, parts, names, "text", documents, fingerprint)


def _hub_source(recipe: Recipe, field: str) -> Source:
    try:
        builder = datasets.load_dataset_builder(recipe.dataset, recipe.subset or None)
        dataset = builder.as_streaming_dataset(split=recipe.split)
        assert isinstance(dataset, datasets.IterableDataset)
    except (OSError, ValueError) as error:
        raise hub_refusal(f"--dataset {recipe.dataset}", recipe.dataset, error, "datasets/") from error
    parts = dataset.num_shards
    names = [f"{recipe.dataset}, shard {number} of {parts}" for number in range(parts)]
    fingerprint = f"{recipe.dataset}/{recipe.subset}/{recipe.split}@{builder.hash} {recipe.task} {field}"
    return Source(dataset, parts, names, field, partial(_one_document, recipe.task == "sft"), fingerprint)


def _file_fingerprint(files: list[Path], *more: str) -> str:
    """A hash of the files' names below their common folder, sizes, and first and last 64 KB."""
    base = os.path.commonpath([file.parent for file in files])
    digest = hashlib.blake2b(repr(more).encode(), digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(base).as_posix()}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(65536))
            if size > 65536:
                stream.seek(max(65536, size - 65536))
                digest.update(stream.read())
    return digest.hexdigest()


def _one_document(sft: bool, value: Any, place: str) -> list[Document]:
    if value is not None and not isinstance(value, list if sft else str):
        expected = "a list of messages (--messages_field)" if sft else "text (--text_field)"
        raise refuse(place, f"holds {type(value).__name__} {str(value)[:40]!r} where {expected} should be", "name another column, or mend the row")
    return [(value, place)] if value else []


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


def _from_line(field: str, sft: bool, line: str, place: str) -> list[Document]:
    if not line.strip():
        return []
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise refuse(place, f"is not JSON: {error}", "write one JSON object per line") from error
    if "\\ud" in line.lower():  # half of a surrogate pair is legal JSON but cannot be encoded
        row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
    if not isinstance(row, dict):
        raise refuse(place, f"is not a JSON object but a {type(row).__name__}", "write one JSON object per line")
    if field not in row:
        raise _no_column(field, list(row), place)
    return _one_document(sft, row[field], place)


def _unreadable(place: str, error: Exception) -> Refusal:
    return refuse(place, f"cannot be read: {str(error).strip().splitlines()[0]}", "replace the file, or leave it out")


def _no_column(field: str, columns: list[str], place: str) -> Refusal:
    return refuse(place, f"has no column {field!r}, only {', '.join(map(repr, columns))}", "name the column with --text_field (task sft: --messages_field)")


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


# Reading: documents in order, from any saved place ----------------------------------------------------------------


def read(source: Source, part: int, hf_state: dict | None, row: int) -> Iterator[tuple[list[Document], Callable[[], dict], int]]:
    """The documents of one part, READ_ROWS rows at a time, from `row`, whose `datasets` state is `hf_state`.

    Yields (documents, a function that gives the `datasets` state after them, the number of rows read so far).
    """
    name = source.names[part]
    rows = source.dataset.shard(source.parts, part).with_format("arrow")
    if hf_state is not None:
        rows.load_state_dict(hf_state)
    tables = rows.iter(READ_ROWS)
    while True:
        try:
            table: Any = next(tables, None)  # a pyarrow table
        except UNREADABLE as error:
            raise _unreadable(f"{name}, after row {row}", error) from error
        if table is None:
            return
        if source.column not in table.column_names:
            raise _no_column(source.column, table.column_names, name)
        documents = []
        for value in table[source.column].to_pylist():
            row += 1
            documents += source.documents(value, f"{name}, row {row}")
        yield documents, rows.state_dict, row


START = {"epoch": 0, "block": 0, "part": 0, "hf": None, "row": 0, "index": 0, "epoch_index": 0}


def blocks(source: Source, seed: int, place: dict) -> Iterator[tuple[dict, list[Document]]]:
    """The training documents from `place` on, without end: (where the block starts, its documents shuffled)."""
    while True:
        first, block, characters = place, [], 0
        order = _shuffled(source.parts, f"{seed}/{place['epoch']}")
        for number in range(first["part"], source.parts):
            start = (first["hf"], first["row"]) if number == first["part"] else (None, 0)
            for documents, state, row in read(source, order[number], *start):
                block += documents
                characters += sum(_length(content) for content, _ in documents)
                if len(block) >= BLOCK_DOCUMENTS or characters >= BLOCK_CHARACTERS:
                    kept = _training_part(block, f"{seed}/{place['epoch']}/{place['block']}")
                    yield place, kept
                    after = {"part": number, "hf": state(), "row": row, "block": place["block"] + 1, "index": place["index"] + len(kept)}
                    place, block, characters = {**place, **after}, [], 0
        kept = _training_part(block, f"{seed}/{place['epoch']}/{place['block']}")
        yield place, kept
        index = place["index"] + len(kept)
        if index == place["epoch_index"]:
            raise refuse("--dataset", "holds no document to train on: each is empty or among the held-out 1 %", "give more data")
        place = {**START, "epoch": place["epoch"] + 1, "index": index, "epoch_index": index}


def _training_part(block: list[Document], key: str) -> list[Document]:
    shuffled = (block[number] for number in _shuffled(len(block), key))
    return [document for document in shuffled if not _is_empty(document[0]) and not is_held_out(document[0])]


def _shuffled(count: int, key: str) -> list[int]:
    """0 .. count-1 in an order that depends on `key` only, in every version of everything."""
    return sorted(range(count), key=lambda number: hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest())


def is_held_out(content: Any) -> bool:
    """True for about 1 % of all documents, which are for evaluation only; depends on the content alone."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big") % 100 == 0


def _is_empty(content: Any) -> bool:
    return isinstance(content, str) and not content.strip()


def _length(content: Any) -> int:
    return len(content) if isinstance(content, str) else 1000


# Packing: lanes and rows ------------------------------------------------------------------------------------------


class Lane:
    """The documents of one row slot of the global batch, and the first token that no row holds yet."""

    def __init__(self, document: int = 0, offset: int = 0):
        self.document = document  # documents of this lane that lie wholly in rows
        self.offset = offset  # tokens of the next document that do
        self.waiting: deque[Document] = deque()
        self.tokens: deque[Encoded] = deque()
        self.held = -offset  # tokens ready for rows; what of a document was used before a resume is subtracted when it comes

    def add(self, encoded: Encoded) -> None:
        self.tokens.append(encoded)
        self.held += len(encoded[0])

    def row(self, seq_len: int, pad: int, whole: bool) -> np.ndarray:
        """The next row (3, seq_len): ids, labels, positions. `whole`: a document that does not fit into the rest starts the next row."""
        row = np.empty((3, seq_len), dtype=np.int64)
        filled = 0
        while filled < seq_len and self.tokens:
            ids, labels = self.tokens[0]
            left = len(ids) - self.offset
            if whole and left > seq_len - filled:
                break
            take = min(left, seq_len - filled)
            row[0, filled : filled + take] = ids[self.offset : self.offset + take]
            row[1, filled : filled + take] = labels[self.offset : self.offset + take]
            row[2, filled : filled + take] = np.arange(take)
            filled += take
            self.offset += take
            if self.offset == len(ids):
                self.tokens.popleft()
                self.document, self.offset = self.document + 1, 0
        self.held -= filled
        row[0, filled:], row[1, filled:], row[2, filled:] = pad, IGNORE, np.arange(seq_len - filled)  # a document of its own
        return row


def _encode(recipe: Recipe, tokenizer: Any, documents: list[Document]) -> list[Encoded]:
    contents, places = [content for content, _ in documents], [place for _, place in documents]
    if recipe.task == "sft":
        return encode_chats(tokenizer, contents, places, recipe.seq_len)
    return encode_texts(tokenizer, contents)


def _micro_batches(rows: list[np.ndarray], micro_batch: int) -> list[MicroBatch]:
    batches = []
    for start in range(0, len(rows), micro_batch):
        ids, labels, positions = np.stack(rows[start : start + micro_batch], axis=1)  # each (micro_batch, seq_len) int64
        batches.append({name: torch.from_numpy(part) for name, part in (("input_ids", ids), ("labels", labels), ("position_ids", positions))})
    return batches


# The stream -------------------------------------------------------------------------------------------------------


class Stream:
    """An iterator of (micro-batches of one optimizer step on one data-parallel rank, state after it), prepared ahead by one thread.

    `state` is that of the batch handed out last, at first the one it was opened with. An error in the thread is raised
    by `next`. `close` ends the thread.
    """

    def __init__(self, steps: Iterator[tuple[list[MicroBatch], dict]], state: dict):
        self.state = state
        self._queue: queue.Queue = queue.Queue(PREFETCH)
        self._closed = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, args=(steps,), name="data", daemon=True)
        self._thread.start()

    def _read(self, steps: Iterator[tuple[list[MicroBatch], dict]]) -> None:
        try:
            for step in steps:
                self._queue.put(step)
                if self._closed.is_set():
                    return
        except BaseException as error:  # whatever it is, it belongs to the thread that calls next
            self._queue.put(error)

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> tuple[list[MicroBatch], dict]:
        if self._error is None and not self._closed.is_set():
            step = self._queue.get()
            if not isinstance(step, BaseException):
                self.state = step[1]
                return step
            self._error = step
        raise self._error or RuntimeError("the stream is closed")

    def close(self) -> None:
        self._closed.set()
        while self._thread.is_alive():
            while not self._queue.empty():
                self._queue.get()
            self._thread.join(0.01)


def open_stream(recipe: Recipe, tokenizer: Any, *, dp: int, dp_rank: int, state: dict | None = None) -> Stream:
    """The stream of one data-parallel rank, from the start or from a state made by `merge_states` on any number of ranks.

    A micro-batch is {"input_ids", "labels", "position_ids"}, each (micro_batch, seq_len) int64; labels[b, t] is the target
    of position t or -100. Raises `Refusal` if the corpus cannot be opened, or `state` is of another stream.
    """
    if recipe.global_batch % (dp * recipe.micro_batch):
        rule = f"is no multiple of dp({dp}) * micro_batch({recipe.micro_batch})"
        raise refuse(
            f"global_batch = {recipe.global_batch}",
            rule,
            f"use --global_batch {dp * recipe.micro_batch * max(1, recipe.global_batch // (dp * recipe.micro_batch))}",
        )
    check_tokenizer(tokenizer, recipe.task)
    source = open_source(recipe)
    identity = _identity(recipe, tokenizer, source)
    if state is None:
        state = {"identity": identity, "first_lane": 0, "lanes": [[0, 0]] * recipe.global_batch, "reader": START}
    _check_identity(state["identity"], identity)
    assert len(state["lanes"]) == recipe.global_batch, "the state of one rank; join them with merge_states first"
    num_lanes = recipe.global_batch // dp
    return Stream(_steps(recipe, tokenizer, source, state, range(dp_rank * num_lanes, (dp_rank + 1) * num_lanes)), state)


def _steps(recipe: Recipe, tokenizer: Any, source: Source, state: dict, owned: range) -> Iterator[tuple[list[MicroBatch], dict]]:
    """What `Stream` yields, for the lanes `owned`, from `state` on."""
    lanes = [Lane(*position) for position in state["lanes"][owned.start : owned.stop]]
    dealt = [lane.document for lane in lanes]
    places: deque[dict] = deque()  # where the blocks start that hold documents not yet used up
    reader = blocks(source, recipe.seed, state["reader"])
    barren = 0
    while True:
        while short := [lane for lane in lanes if lane.held < recipe.seq_len]:
            while not all(lane.waiting for lane in short):
                place, documents = next(reader)
                places.append(place)
                for index, document in enumerate(documents, place["index"]):
                    number, slot = divmod(index, recipe.global_batch)
                    lane = slot - owned.start
                    if slot in owned and number >= dealt[lane]:
                        assert number == dealt[lane], "a document was skipped: the state is not of this stream"
                        lanes[lane].waiting.append(document)
                        dealt[lane] += 1
            for lane, encoded in zip(short, _encode(recipe, tokenizer, [lane.waiting.popleft() for lane in short]), strict=True):
                lane.add(encoded)
                barren = 0 if len(encoded[0]) else barren + 1
            if barren >= BARREN_DOCUMENTS:
                rule = f"{barren} documents in a row hold no token to train on"
                raise refuse("--dataset", rule, "task sft: an answer must begin within --seq_len tokens; else look at the data")
        rows = [lane.row(recipe.seq_len, pad_id(tokenizer), whole=recipe.task == "sft") for lane in lanes]
        needed = min(lane.document * recipe.global_batch + slot for slot, lane in zip(owned, lanes, strict=True))
        while len(places) > 1 and places[1]["index"] <= needed:
            places.popleft()
        positions = [[lane.document, lane.offset] for lane in lanes]
        yield (
            _micro_batches(rows, recipe.micro_batch),
            {"identity": state["identity"], "first_lane": owned.start, "lanes": positions, "reader": places[0]},
        )


def merge_states(states: list[dict]) -> dict:
    """The state of the whole stream from those of all ranks after the same step; peers may hold the same lanes.

    Raises RuntimeError if peers that should have read the same tokens have not.
    """
    lanes: dict[int, list[int]] = {}
    for state in states:
        if state["identity"] != states[0]["identity"]:
            raise RuntimeError(f"ranks read different data: {states[0]['identity']} and {state['identity']}")
        for lane, position in enumerate(state["lanes"], state["first_lane"]):
            if lanes.setdefault(lane, position) != position:
                raise RuntimeError(f"peers disagree on lane {lane} of the data stream: {lanes[lane]} and {position}")
    assert sorted(lanes) == list(range(states[0]["identity"]["global_batch"])), "a rank's state is missing"
    reader = min((state["reader"] for state in states), key=lambda place: (place["index"], place["epoch"], place["block"]))
    return {"identity": states[0]["identity"], "first_lane": 0, "lanes": [lanes[lane] for lane in sorted(lanes)], "reader": reader}


def _identity(recipe: Recipe, tokenizer: Any, source: Source) -> dict:
    """What the order of the tokens depends on."""
    probe = [tokenizer("Zürich 1_000\n\tif x != 'ß':")["input_ids"], len(tokenizer), tokenizer.chat_template if recipe.task == "sft" else None]
    return {
        "corpus": source.fingerprint,
        "tokenizer": hashlib.blake2b(repr(probe).encode(), digest_size=8).hexdigest(),
        "task": recipe.task,
        "seed": recipe.seed,
        "global_batch": recipe.global_batch,
        "seq_len": recipe.seq_len,
        "blocks": [READ_ROWS, BLOCK_DOCUMENTS, BLOCK_CHARACTERS, PIECE, TEXT_PARTS],
    }


def _check_identity(saved: dict, now: dict) -> None:
    fix = "go on with the value of the saved run, or start a new one with --out NEW"
    problems = [Problem(f"{key} = {now.get(key)}", f"the saved data stream has {was}", fix) for key, was in saved.items() if now.get(key) != was]
    if problems:
        raise Refusal(problems)


def eval_rows(recipe: Recipe, tokenizer: Any, *, dp: int, dp_rank: int, say: Callable[[str], None] = LOG.warning) -> list[MicroBatch]:
    """The micro-batches of this rank of the evaluation: `recipe.eval_rows` rows of held-out documents, fewer if there are fewer.

    All ranks together hold the same rows on every layout; rows whose labels are all -100 make their numbers equal.
    Raises `Refusal` if no document is held out.
    """
    check_tokenizer(tokenizer, recipe.task)
    rows = _held_out_rows(recipe, tokenizer, open_source(recipe))
    if not rows:
        raise refuse(f"--dataset {recipe.dataset}", "is so small that its held-out 1 % is empty", "use --eval_every 0, or more data")
    if len(rows) < recipe.eval_rows and dp_rank == 0:
        say(f"evaluation has {len(rows)} rows, not eval_rows = {recipe.eval_rows}: the held-out 1 % of the documents holds no more")
    num_rows = -(-len(rows) // (dp * recipe.micro_batch)) * recipe.micro_batch  # on each rank
    empty = Lane().row(recipe.seq_len, pad_id(tokenizer), whole=False)
    rows += [empty] * (dp * num_rows - len(rows))
    return _micro_batches(rows[dp_rank * num_rows : (dp_rank + 1) * num_rows], recipe.micro_batch)


def _held_out_rows(recipe: Recipe, tokenizer: Any, source: Source) -> list[np.ndarray]:
    lane, rows = Lane(), []
    for part in range(source.parts):
        for documents, _, _ in read(source, part, None, 0):
            held_out = [document for document in documents if not _is_empty(document[0]) and is_held_out(document[0])]
            for encoded in _encode(recipe, tokenizer, held_out) if held_out else []:
                lane.add(encoded)
            while lane.held >= recipe.seq_len:
                rows.append(lane.row(recipe.seq_len, pad_id(tokenizer), whole=recipe.task == "sft"))
                if len(rows) == recipe.eval_rows:
                    return rows
    while lane.held > 0:
        rows.append(lane.row(recipe.seq_len, pad_id(tokenizer), whole=recipe.task == "sft"))
    return rows[: recipe.eval_rows]
