"""The global data stream: which token stands where in which optimizer step, whatever the number of ranks.

Each corpus is an endless sequence of blocks: epoch after epoch, its parts and their row groups in an order drawn for the
epoch, read until a block has the tokens of some hundred rows, which are packed. Rows are dealt, one corpus or a mixture,
to the slots ("lanes") of the global batch; a data-parallel rank owns a run of neighbouring lanes. Every rank follows the
dealing of all rows and builds its own, so order and state depend on nothing but (corpus, seed, global_batch, seq_len,
mixture), and the state is a few integers for each corpus.
"""

import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ..mixture import Domain, domains_of, furthest_behind
from ..recipe import Recipe
from ..refusal import Problem, Refusal, refuse
from ..tokens import check_tokenizer, pad_id
from . import chunks, sources
from .chunks import Encoder, Reader, open_cache
from .packing import Block, fill_positions, fill_rows, fill_whole_rows, make_block, permutation
from .remote import Patience
from .sources import Source, open_source

BLOCK_ROWS = 512  # a block, the range of packing and shuffle, has the tokens of so many rows;
BLOCK_TOKENS = 1 << 20, 1 << 22  # but at least and at most so many
BARREN_DOCUMENTS = 10_000  # so many documents in a row without a target mean that there is none
PREFETCH = 3  # steps prepared ahead, at least
LULL = 0.005, 0.1  # seconds that the thread sleeps at first and at most while its steps wait to be taken: each waking costs the trainer
NAMED_FILES = 5  # changed files that a refusal names
LOG = logging.getLogger(__name__)

MicroBatch = dict[str, torch.Tensor]


class OtherData(Refusal):
    """A state is of another stream than the one that is opened."""


@dataclass(frozen=True)
class Place:
    """A document of an endless corpus: positions in the orders drawn for the epoch, then the row, then the document of that chunk."""

    epoch: int = 0
    part: int = 0
    group: int = 0
    row: int = 0
    document: int = 0
    bad: int = 0  # broken rows skipped before it


def block_tokens(seq_len: int) -> int:
    """Tokens of a block; 32 rows at least, so that long rows are packed well, too."""
    least, most = BLOCK_TOKENS
    return max(min(max(BLOCK_ROWS * seq_len, least), most), 32 * seq_len)


Held = list[tuple[Any, int, int]]  # chunks, and from which to before which of their documents


def blocks(reader: Any, seed: int, limit: int, join: Callable[..., Any], place: Place) -> Iterator[tuple[Place, Any]]:
    """Blocks of `limit` tokens from `place` on, without end: (the place after the block, what `join` makes of its documents and a key).

    Raises `Refusal` if there is no document.
    """
    barren = 0
    while True:
        held: Held = []
        tokens, begin, epoch, any_document = 0, place, place.epoch, place != Place(epoch=place.epoch, bad=place.bad)
        for at, chunk in _epoch(reader, seed, place):
            first = at.document
            barren = 0 if len(chunk.lengths) else barren + chunk.barren
            if barren >= BARREN_DOCUMENTS:
                raise _no_target(barren)
            while first < len(chunk.lengths):
                sums = np.cumsum(chunk.lengths[first:])
                count = max(int(np.searchsorted(sums, limit - tokens, side="right")), 0 if held else 1)
                if count:
                    held.append((chunk, first, first + count))
                    tokens += int(sums[count - 1])
                    first += count
                    any_document = True
                if first < len(chunk.lengths) or tokens >= limit:
                    place = Place(at.epoch, at.part, at.group, at.row, first, at.bad)
                    yield place, join(held, seed, *vars(begin).values())
                    held, tokens, begin = [], 0, place
            place = Place(at.epoch, at.part, at.group, chunk.row, 0, at.bad + chunk.bad)
        if held:
            place = Place(epoch=epoch + 1, bad=place.bad)
            yield place, join(held, seed, *vars(begin).values())
        elif not any_document:
            raise (
                _no_target(barren)
                if barren
                else refuse("--dataset", "holds no document to train on: each is empty, broken or among the held-out 1 %", "give more data")
            )
        place = Place(epoch=epoch + 1, bad=place.bad)


def _no_target(documents: int) -> Refusal:
    fix = "give longer documents; with task sft an answer must begin within --seq_len tokens"
    return refuse("--dataset", f"{documents} documents in a row hold no token to train on", fix)


def _epoch(reader: Any, seed: int, place: Place) -> Iterator[tuple[Place, Any]]:
    """The chunks of the epoch from `place` on, each with its place."""
    source, bad = reader.source, place.bad
    parts = permutation(len(source.parts), seed, place.epoch)
    for part in range(place.part, len(parts)):
        number = int(parts[part])
        count = reader.groups(number)
        if not isinstance(count, int):  # a chunk that counts what cannot be read
            yield Place(place.epoch, part, bad=bad), count
            bad += count.bad
            continue
        groups = permutation(count, seed, place.epoch, number)
        for group in range(place.group if part == place.part else 0, len(groups)):
            resumed = part == place.part and group == place.group
            row, document = (place.row, place.document) if resumed else (0, 0)
            for chunk in reader.chunks(number, int(groups[group]), row):
                yield Place(place.epoch, part, group, row, document, bad), chunk
                row, document, bad = chunk.row, 0, bad + chunk.bad


def packed(seq_len: int, pad: int, held: Held, *key: object) -> Block:
    """Documents of several chunks as packed rows."""
    ids, labels, starts, lengths, base = [], [], [], [], 0
    for chunk, first, last in held:
        low, high = int(chunk.starts[first]), int(chunk.starts[last - 1] + chunk.lengths[last - 1])
        ids.append(chunk.ids[low:high])
        if chunk.labels is not None:
            labels.append(chunk.labels[low:high])
        starts.append(chunk.starts[first:last] + (base - low))
        lengths.append(chunk.lengths[first:last])
        base += high - low
    return make_block(ids, labels, np.concatenate(starts), np.concatenate(lengths), seq_len, pad, *key)


# Lanes: rows of all corpora, dealt to the slots of the global batch -----------------------------------------------


class Domains:
    """The corpora of a stream, each at a row of a block, and the tokens that each has given.

    `open_blocks` gives, for a domain's number and a place, what `blocks` yields; a row holds at most `row_tokens`.
    """

    def __init__(self, domains: list[Domain], open_blocks: Callable[[int, Place], Iterator[tuple[Place, Any]]], row_tokens: int, state: dict):
        self.domains = domains
        self.step = state["step"]
        self.weights = [state["domains"][domain.name]["weight"] for domain in domains]  # in force when the tokens were given
        self.tokens = [state["domains"][domain.name]["tokens"] for domain in domains]
        self.before = [Place(**state["domains"][domain.name]["place"]) for domain in domains]  # of the block in use
        self.used = [state["domains"][domain.name]["used"] for domain in domains]  # rows of it
        self.bad = [state["domains"][domain.name]["bad"] for domain in domains]  # rows left out up to its end
        self.streams = [open_blocks(number, place) for number, place in enumerate(self.before)]
        self.after: list[Place | None] = [None] * len(domains)
        self.block: list[Any] = [None] * len(domains)
        self.row_tokens = row_tokens

    def state(self) -> dict[str, dict]:
        """For each domain: the place of its block, the rows used of that, its weight, the tokens given since the weights changed, the broken rows left out."""
        return {
            domain.name: {"place": {name: value for name, value in vars(place).items() if value}, "used": used, "weight": weight, "tokens": tokens, "bad": bad}
            for domain, place, used, weight, tokens, bad in zip(self.domains, self.before, self.used, self.weights, self.tokens, self.bad, strict=True)
        }

    def ready(self, number: int) -> Any:
        """The block whose next row is the domain's next."""
        block = self.block[number]
        while block is None or self.used[number] >= len(block.fill):
            if block is not None:
                after = self.after[number]
                assert after is not None
                self.before[number], self.used[number] = after, 0
            self.after[number], self.block[number] = after, block = next(self.streams[number])
            self.bad[number] = after.bad
        return block

    def deal(self, count: int) -> list["Run"]:
        """The rows of the next global batch."""
        self.step += 1
        weights = [domain.weight(self.step) for domain in self.domains]
        if weights != self.weights:  # as the mixture says, or since it was resumed with others
            self.weights, self.tokens = weights, [0] * len(self.domains)
        runs: list[Run] = []
        dealt = 0
        while dealt < count:
            number = furthest_behind(self.tokens, weights, self.row_tokens) if len(self.domains) > 1 else 0
            block = self.ready(number)
            row = self.used[number]
            size = 1 if len(self.domains) > 1 else min(count - dealt, len(block.fill) - row)
            runs.append(Run(number, block, row, dealt, size))
            self.tokens[number] += int(block.fill[row : row + size].sum())
            self.used[number] += size
            dealt += size
        return runs


class Run(NamedTuple):
    """Rows of one block that fill neighbouring slots of a global batch."""

    domain: int
    block: Any
    row: int  # the first
    slot: int  # of the first
    size: int


def steps(
    domains: Domains, build: Callable[[list[Run]], list[MicroBatch]], recipe: Recipe, identity: dict, owned: range
) -> Iterator[tuple[list[MicroBatch], dict]]:
    """What `Stream` yields, for the lanes `owned`; `build` makes the micro-batches of one step of rows whose slots count from the first of these."""
    pinned = torch.cuda.is_available()
    while True:
        mine = []
        for run in domains.deal(recipe.global_batch):
            low, high = max(owned.start, run.slot), min(owned.stop, run.slot + run.size)
            if low < high:
                mine.append(Run(run.domain, run.block, run.row + low - run.slot, low - owned.start, high - low))
        batches = build(mine)
        if len(domains.domains) > 1:
            of_rows = torch.tensor([run.domain for run in mine for _ in range(run.size)])
            for batch, part in zip(batches, of_rows.split(recipe.micro_batch), strict=True):
                batch["domain"] = part
        if pinned:
            batches = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches]
        yield batches, {"identity": identity, "step": domains.step, "domains": domains.state()}


def packed_batches(rows: int, micro_batch: int, seq_len: int) -> Callable[[list[Run]], list[MicroBatch]]:
    """Makes the micro-batches of a step that has `rows` packed rows on this rank."""
    # Fresh memory costs more than what is written into it, so steps that are gone give theirs back; by the number of dimensions.
    buffers: dict[int, deque[np.ndarray]] = {2: deque(), 3: deque()}
    whole = torch.arange(seq_len).repeat(micro_batch, 1)  # the positions of rows that are one piece

    def build(runs: list[Run]) -> list[MicroBatch]:
        if all(run.block.ids is None for run in runs):
            out = _buffer(buffers[2], (rows, seq_len + 1))
            for run in runs:
                fill_whole_rows(out[run.slot : run.slot + run.size], run.block, run.row)
            parts = [out[first : first + micro_batch] for first in range(0, rows, micro_batch)]
            return [{"input_ids": torch.from_numpy(part[:, :-1]), "labels": torch.from_numpy(part[:, 1:]), "position_ids": whole} for part in parts]
        out = _buffer(buffers[3], (3, rows, seq_len))
        for run in runs:
            ids, labels, positions = out[:, run.slot : run.slot + run.size]
            fill_rows(ids, labels, run.block, run.row)
            fill_positions(positions, run.block, run.row)
        names = ("input_ids", "labels", "position_ids")
        parts = [out[:, first : first + micro_batch] for first in range(0, rows, micro_batch)]
        return [{name: torch.from_numpy(tensor) for name, tensor in zip(names, part, strict=True)} for part in parts]

    return build


def _buffer(buffers: deque[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """The oldest of `buffers` to which no batch refers any more, else a new one."""
    for _ in range(len(buffers)):  # one turn: a batch that somebody keeps must not stand before the others
        buffers.rotate(-1)
        if sys.getrefcount(buffers[-1]) == 2:  # the deque, and the call
            return buffers[-1]
    buffers.append(np.empty(shape, dtype=np.int64))
    return buffers[-1]


class Stream:
    """An iterator of (micro-batches of one optimizer step on one data-parallel rank, state after it), prepared ahead by one thread.

    `state` is that of the batch handed out last, at first the one it was opened with. An error in the thread is raised
    by `next`, and shown one step before by `error_ahead`. `close` ends the thread. `files` names what is read: domain -> file -> digest.
    """

    def __init__(
        self,
        steps: Iterator[tuple[list[MicroBatch], dict]],
        state: dict,
        prefetch: int = PREFETCH,
        closed: threading.Event | None = None,
        files: dict[str, dict[str, str]] | None = None,
    ):
        self.state, self.files = state, files or {}
        self._queue: queue.Queue = queue.Queue(prefetch)
        self._closed = closed or threading.Event()  # ends what the thread waits for
        self._ahead: Any = None  # taken from the queue, not yet handed out
        self._thread = threading.Thread(target=self._read, args=(steps,), name="data", daemon=True)
        self._thread.start()

    def _read(self, steps: Iterator[tuple[list[MicroBatch], dict]]) -> None:
        try:
            for step in steps:
                self._wait_for_room()
                self._queue.put(step)
                if self._closed.is_set():
                    return
        except BaseException as error:  # whatever it is, it belongs to the thread that calls next
            if not self._closed.is_set():
                self._queue.put(error)

    def _wait_for_room(self) -> None:
        """Waits until a step has been taken and some time has gone by since.

        Woken by the thread that takes a step, this one would want the interpreter at the very moment when that one goes on to train.
        """
        pause, longest = LULL
        while self._queue.full() and not self._closed.is_set():
            time.sleep(pause)
            pause = min(2 * pause, longest)
        if pause > LULL[0]:
            time.sleep(LULL[0])

    def __iter__(self) -> "Stream":
        return self

    def error_ahead(self, leave: Callable[[], object] = lambda: False) -> BaseException | None:
        """What the next `next` will raise, or None; waits until that is known, or `leave()` is true."""
        while self._ahead is None and not leave():
            alive = self._thread.is_alive()  # asked first: what it put last is found below
            try:
                self._ahead = RuntimeError("the stream is closed") if self._closed.is_set() else self._queue.get(timeout=1)
            except queue.Empty:
                if not alive:
                    self._ahead = RuntimeError("the thread that reads the data has died without saying why")
        return self._ahead if isinstance(self._ahead, BaseException) else None

    def __next__(self) -> tuple[list[MicroBatch], dict]:
        if error := self.error_ahead():
            raise error
        step, self._ahead = self._ahead, None
        self.state = step[1]
        return step

    def close(self) -> None:
        self._closed.set()
        self._ahead = RuntimeError("the stream is closed") if not isinstance(self._ahead, BaseException) else self._ahead
        while self._thread.is_alive():
            while not self._queue.empty():
                self._queue.get()
            self._thread.join(0.01)
        self._queue.queue.clear()  # an error in it would keep its frames, and the files that they have open


@dataclass(frozen=True)
class Corpus:
    """What a recipe reads: each domain with its source, and what makes tokens of them."""

    domains: list[Domain]
    sources: list[Source]
    encoder: Encoder
    identity: dict
    patience: Patience

    @property
    def files(self) -> dict[str, dict[str, str]]:
        return {domain.name: source.files for domain, source in zip(self.domains, self.sources, strict=True)}

    def readers(self, recipe: Recipe, held_out: bool = False) -> list[Reader]:
        skip, told = recipe.bad_rows == "skip", []
        of_all = {"say": self.patience.say, "closed": self.patience.closed, "told": told}
        caches = [None if held_out else open_cache(recipe, source, self.encoder) for source in self.sources]
        return [Reader(source, self.encoder, skip, cache, held_out, **of_all) for source, cache in zip(self.sources, caches, strict=True)]


def open_corpus(recipe: Recipe, tokenizer: Any, say: Callable[[str], None] = LOG.warning, state: dict | None = None) -> Corpus:
    """The corpora of the recipe; a collective where one is remote. `say` is told of rows left out and of servers waited for.

    With the `state` of a stream a data set of the hub is read as it was then, whatever has been committed since.

    Raises `Refusal` if one does not exist or cannot be reached, or the tokenizer does not fit.
    """
    check_tokenizer(tokenizer, recipe.task)
    domains = domains_of(recipe)
    patience = Patience(recipe.retry_s, say)
    before = state["identity"]["corpus"] if state else {}
    opened = [open_source(recipe, domain, patience, before=before.get(domain.name, "")) for domain in domains]
    encoder = Encoder(tokenizer, recipe.task, recipe.seq_len)
    identity = {
        "corpus": {domain.name: source.fingerprint for domain, source in zip(domains, opened, strict=True)},
        "tokenizer": encoder.identity,
        "task": recipe.task,
        "seed": recipe.seed,
        "global_batch": recipe.global_batch,
        "seq_len": recipe.seq_len,
        "blocks": [block_tokens(recipe.seq_len), chunks.CHUNK_ROWS, chunks.CHUNK_CHARACTERS, sources.PIECE, sources.PART_BYTES, sources.TOKEN_LENGTH],
    }
    return Corpus(domains, opened, encoder, identity, patience)


def open_stream(
    recipe: Recipe,
    tokenizer: Any,
    *,
    dp: int,
    dp_rank: int,
    state: dict | None = None,
    files: dict[str, dict[str, str]] | None = None,
    say: Callable[[str], None] = LOG.warning,
) -> Stream:
    """The stream of one data-parallel rank, from the start or from a state of any rank of any layout.

    A micro-batch is {"input_ids", "labels", "position_ids"}, each (micro_batch, seq_len) int64; labels[b, t] is the target
    of position t or -100. They may share their memory, and rows need not lie next to each other: copy one before writing to it. A mixture adds "domain",
    (micro_batch,) int64. Raises `Refusal` if the corpus cannot be opened, `OtherData` if `state` is of another stream;
    `files`, those of that stream, let it name the ones that are others now.
    """
    check_batch(recipe, dp)
    corpus = open_corpus(recipe, tokenizer, say, state)
    if state is not None:
        check_identity(state["identity"], corpus.identity, changed_files(files or {}, corpus.files))
    readers, join = corpus.readers(recipe), partial(packed, recipe.seq_len, pad_id(tokenizer))
    limit = block_tokens(recipe.seq_len)

    def open_blocks(number: int, place: Place) -> Iterator[tuple[Place, Any]]:
        return blocks(readers[number], recipe.seed, limit, join, place)

    state = state or start(corpus.domains, corpus.identity)
    owned = lanes(recipe, dp, dp_rank)
    domains = Domains(corpus.domains, open_blocks, recipe.seq_len, state)
    prefetch = max(PREFETCH, limit // recipe.seq_len // recipe.global_batch)  # steps to take while a block is made
    made = steps(domains, packed_batches(len(owned), recipe.micro_batch, recipe.seq_len), recipe, corpus.identity, owned)
    return Stream(made, state, prefetch, corpus.patience.closed, corpus.files)


def check_batch(recipe: Recipe, dp: int) -> None:
    """Raises `Refusal` if the global batch cannot be divided over the ranks."""
    if recipe.global_batch % (dp * recipe.micro_batch):
        rule = f"is no multiple of dp({dp}) * micro_batch({recipe.micro_batch})"
        fitting = dp * recipe.micro_batch * max(1, recipe.global_batch // (dp * recipe.micro_batch))
        raise refuse(f"global_batch = {recipe.global_batch}", rule, f"use --global_batch {fitting}")


def start(domains: list[Domain], identity: dict) -> dict:
    """The state before the first step."""
    empty = {"place": {}, "used": 0, "tokens": 0, "bad": 0}
    return {"identity": identity, "step": 0, "domains": {domain.name: empty | {"weight": domain.weight(1)} for domain in domains}}


def lanes(recipe: Recipe, dp: int, dp_rank: int) -> range:
    """The slots of the global batch that a data-parallel rank owns."""
    count = recipe.global_batch // dp
    return range(dp_rank * count, (dp_rank + 1) * count)


def check_identity(saved: dict, now: dict, changed: list[str]) -> None:
    """Raises `OtherData` if two streams differ in what their order depends on; `changed` says which files do."""
    fix = "go on with the value of the saved run, or start a new one with --out NEW"
    problems = [Problem(f"{key} = {now.get(key)}", f"the saved data stream has {was}", fix) for key, was in saved.items() if now.get(key) != was]
    if changed and saved.get("corpus") != now.get("corpus"):
        fix = "bring the old files back, or start a new run with --out NEW"
        problems = [
            Problem("--dataset", f"files are others than the saved run read: {first_of(changed)}", fix) if problem.where.startswith("corpus = ") else problem
            for problem in problems
        ]
    if problems:
        raise OtherData(problems)


def first_of(changed: list[str]) -> str:
    """The first few of `changed_files`, for a message."""
    return ", ".join(changed[:NAMED_FILES]) + (f" and {len(changed) - NAMED_FILES} more" if len(changed) > NAMED_FILES else "")


def changed_files(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> list[str]:
    """Each file that differs between two runs, with what happened to it."""
    found = []
    for domain in before.keys() & now.keys():
        old, new = before[domain], now[domain]
        found += [f"{name} has changed" for name in old if name in new and new[name] != old[name]]
        found += [f"{name} is gone" for name in old if name not in new]
        found += [f"{name} is new" for name in new if name not in old]
    return found


def roll(seen: int, batches: list[MicroBatch]) -> int:
    """A 64-bit hash of all tokens and labels handed out so far, from that of those before (0 at first)."""
    for batch in batches:
        for name in ("input_ids", "labels"):
            values = batch[name].numpy().ravel().view(np.uint64)
            mixed = (values + np.arange(1, len(values) + 1, dtype=np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
            seen = (seen * 0x94D049BB133111EB + int((mixed ^ (mixed >> np.uint64(31))).sum())) % (1 << 64)
    return seen


def merge_states(states: list[dict]) -> dict:
    """The state of the stream from those of all ranks after the same step, which are equal. Raises RuntimeError if they are not."""
    for state in states:
        if state != states[0]:
            raise RuntimeError(f"ranks read different data: {states[0]} and {state}")
    return states[0]
