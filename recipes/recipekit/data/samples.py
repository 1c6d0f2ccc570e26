"""Samples that are not packed: preference pairs, images, rows of a table. They go through the same lanes as text.

A sample is a row of Parquet, Arrow or JSON lines. `collate` makes a micro-batch of some of them; what it draws, it draws
from a sample's key, which depends on (seed, epoch, sample) alone, so it is the same on any number of ranks.
"""

import hashlib
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from ..refusal import Refusal, Say, refuse
from ..task import IGNORE, MicroBatch
from .blocks import Held, Place, blocks
from .chunks import tell
from .encode import encode_chats
from .files import unreadable
from .lanes import Domains, Run, lanes, steps
from .mixture import domains_of
from .packing import permutation
from .prefetch import PREFETCH, Stream
from .processors import pad_id
from .remote import Patience, Unreachable
from .request import Request, Sizes
from .sameness import StreamState, check_identity
from .source import UNREADABLE, Source
from .sources import open_source
from .stream import check_batch, start

LOG = logging.getLogger(__name__)

Row = dict[str, Any]
Collate = Callable[[list[Row], list[int]], MicroBatch]  # samples, and the key of each: a number below 2^63


class SampleChunk(NamedTuple):
    """Holds some samples that follow each other."""

    rows: list[Row]
    places: list[str]
    lengths: np.ndarray  # (samples,) int64, all 1
    row: int  # of the group, from where on the next chunk reads
    last: bool
    bad: int
    barren: int = 0


class SampleBlock(NamedTuple):
    """Holds samples in the order in which they are dealt."""

    rows: list[Row]
    places: list[str]
    keys: list[int]
    fill: np.ndarray  # (samples,) int64, all 1


@dataclass(frozen=True)
class SampleReader:
    """Reads chunks of samples of one corpus."""

    source: Source
    skip: bool
    sizes: Sizes
    say: Say
    told: list[str]  # what was said of rows left out

    def groups(self, part: int) -> int | SampleChunk:
        """Counts the groups of a part. For a part that cannot be read and is to be skipped: a chunk without samples that counts the part as broken."""
        try:
            return self.source.groups(part)
        except Refusal as problem:
            self.left_out(problem)
            return SampleChunk([], [], np.empty(0, dtype=np.int64), 0, True, 1)

    def chunks(self, part: int, group: int, row: int) -> Iterator[SampleChunk]:
        """Yields the samples of a group from `row` on. Raises `Refusal` for a row that cannot be read, unless broken rows are skipped."""
        values = self.source.read(part, group, row)
        last = False
        while not last:
            rows: list[Row] = []
            places: list[str] = []
            bad = 0
            while len(rows) < self.sizes.chunk_rows:
                try:
                    some = next(values, None)
                except UNREADABLE as error:
                    self.left_out(error if isinstance(error, Refusal) else unreadable(self.source.place(part, group, row), error))
                    bad, some = bad + 1, None
                if some is None:
                    last = True
                    break
                for value in some if isinstance(some, list) else some.to_pylist():
                    place = self.source.place(part, group, row)
                    try:
                        new = self.source.documents(value, place)
                    except Refusal as problem:
                        self.left_out(problem)
                        new, bad = [], bad + 1
                    rows += [content for content, _ in new]
                    places += [found for _, found in new]
                    row += 1
            yield SampleChunk(rows, places, np.ones(len(rows), dtype=np.int64), row, last, bad)

    def left_out(self, problem: Refusal) -> None:
        if not self.skip or isinstance(problem, Unreachable):
            raise problem
        tell([str(problem)], self.told, self.say)


def open_samples(
    request: Request,
    columns: tuple[str, ...],
    collate: Collate,
    *,
    dp: int,
    dp_rank: int,
    state: StreamState | None = None,
    say: Say = LOG.warning,
) -> Stream:
    """Opens the stream of one data-parallel rank over rows of `columns`; a step has `global_batch` rows. Otherwise like `open_stream`.

    A row that `collate` cannot take raises `Refusal` from `next`.
    """
    check_batch(request.global_batch, request.micro_batch, dp)
    domains, patience, told = domains_of(request.dataset, request.subset), Patience(request.retry_s, say), list[str]()
    before = state["identity"]["corpus"] if state else {}
    opened = [open_source(request, domain, patience, columns, before.get(domain.name, "")) for domain in domains]
    readers = [SampleReader(source, request.skip, request.sizes, say, told) for source in opened]
    identity = {
        "corpus": {domain.name: reader.source.fingerprint for domain, reader in zip(domains, readers, strict=True)},
        "seed": request.seed,
        "global_batch": request.global_batch,
        "blocks": [request.sizes.block_samples, request.sizes.chunk_rows],
    }
    files = {domain.name: reader.source.files for domain, reader in zip(domains, readers, strict=True)}
    if state is not None:
        check_identity(state["identity"], identity, [])
    state = state or start(domains, identity)

    def open_blocks(number: int, place: Place) -> Iterator[tuple[Place, SampleBlock]]:
        return blocks(readers[number], request.seed, request.sizes.block_samples, _shuffled, place)

    build, owned = partial(_micro_batches, collate, request.micro_batch), lanes(request.global_batch, dp, dp_rank)
    made = steps(Domains(domains, open_blocks, 1, state), build, request, identity, owned)
    return Stream(made, state, PREFETCH, patience.closed, files)


def _shuffled(held: Held, *key: object) -> SampleBlock:
    rows = [row for chunk, first, last in held for row in chunk.rows[first:last]]
    places = [place for chunk, first, last in held for place in chunk.places[first:last]]
    order = permutation(len(rows), *key).tolist()
    begin = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
    keys = [(begin + number) % (1 << 63) for number in order]
    return SampleBlock([rows[number] for number in order], [places[number] for number in order], keys, np.ones(len(rows), dtype=np.int64))


def _micro_batches(collate: Collate, micro_batch: int, runs: list[Run]) -> list[MicroBatch]:
    numbers = [(run.block, number) for run in runs for number in range(run.row, run.row + run.size)]
    return [_collated(collate, numbers[first : first + micro_batch]) for first in range(0, len(numbers), micro_batch)]


def _collated(collate: Collate, numbers: list[tuple[SampleBlock, int]]) -> MicroBatch:
    try:
        return collate([block.rows[number] for block, number in numbers], [block.keys[number] for block, number in numbers])
    except (ValueError, TypeError, KeyError, OSError) as error:
        for block, number in numbers:
            try:
                collate([block.rows[number]], [block.keys[number]])
            except (ValueError, TypeError, KeyError, OSError) as cause:
                raise refuse(block.places[number], f"cannot be used: {cause}", "mend the row, or leave it out") from error
        raise


def pairs(tokenizer: Any, seq_len: int, rows: list[Row], keys: list[int]) -> MicroBatch:
    """Collates preference pairs: {"input_ids", "labels", "position_ids"}, (2 B, seq_len) int64: the chosen ones, then the rejected ones.

    A row has `prompt`, `chosen` and `rejected`, each a text or a list of messages. Loss on the answers only; what is longer than seq_len is cut.
    """
    chats = [_messages(row["prompt"], "user") + _messages(row[answer], "assistant") for answer in ("chosen", "rejected") for row in rows]
    encoded = encode_chats(tokenizer, chats, ["the pair"] * len(chats), seq_len)
    ids, labels = np.full((len(chats), seq_len), pad_id(tokenizer)), np.full((len(chats), seq_len), IGNORE)
    for number, (own_ids, own_labels) in enumerate(encoded):
        if not len(own_ids):
            raise ValueError(f"its {'chosen' if number < len(rows) else 'rejected'} answer does not begin within {seq_len} tokens")
        ids[number, : len(own_ids)], labels[number, : len(own_ids)] = own_ids, own_labels
    positions = np.broadcast_to(np.arange(seq_len), ids.shape).copy()
    for number, (own_ids, _) in enumerate(encoded):
        positions[number, len(own_ids) :] = np.arange(seq_len - len(own_ids))  # the padding is a document of its own
    return {name: torch.from_numpy(array) for name, array in (("input_ids", ids), ("labels", labels), ("position_ids", positions))}


def _messages(value: Any, role: str) -> list[dict[str, str]]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def images(image: str, label: str, augment: Callable[[torch.Tensor, np.random.Generator], torch.Tensor], rows: list[Row], keys: list[int]) -> MicroBatch:
    """Collates images: {"pixel_values": (B, C, H, W) fp32 of 0 to 1, "labels": (B,) int64}; an image is encoded (PNG, JPEG) or rows of pixels, 0 to 255."""
    pixels = [augment(_pixels(row[image]), np.random.default_rng(key)) for row, key in zip(rows, keys, strict=True)]
    return {"pixel_values": torch.stack(pixels), "labels": torch.tensor([int(row[label]) for row in rows])}


def _pixels(value: Any) -> torch.Tensor:
    if isinstance(value, dict):  # how `datasets` stores an image
        value = value["bytes"]
    array = np.asarray(Image.open(io.BytesIO(value)) if isinstance(value, bytes) else value, dtype=np.float32) / 255
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())  # (C, H, W)


def shifted_and_mirrored(pixels: torch.Tensor, draw: np.random.Generator) -> torch.Tensor:
    """Moves the image, (C, H, W), by up to 2 pixels each way and mirrors it every second time."""
    down, right, mirror = (int(draw.integers(limit)) for limit in (5, 5, 2))
    height, width = pixels.shape[1:]
    moved = torch.nn.functional.pad(pixels, (2, 2, 2, 2))[:, down : down + height, right : right + width]
    return moved.flip(2) if mirror else moved


def table(numbers: tuple[str, ...], categories: dict[str, int], label: str, rows: list[Row], keys: list[int]) -> MicroBatch:
    """Collates rows of a table: {"numbers": (B, N) fp32, "categories": (B, M) int64, "labels": (B,) fp32}.

    A missing number is 0. A category is hashed to one of the `categories[column]` - 1 buckets from 1 on; 0 is a missing one.
    """

    def bucket(value: Any, size: int) -> int:
        if value is None:
            return 0
        return 1 + int.from_bytes(hashlib.blake2b(str(value).encode(), digest_size=8).digest(), "big") % (size - 1)

    return {
        "numbers": torch.tensor([[0.0 if row[name] is None else float(row[name]) for name in numbers] for row in rows]).reshape(len(rows), len(numbers)),
        "categories": torch.tensor([[bucket(row[name], size) for name, size in categories.items()] for row in rows]).reshape(len(rows), len(categories)),
        "labels": torch.tensor([float(row[label]) for row in rows]),
    }
