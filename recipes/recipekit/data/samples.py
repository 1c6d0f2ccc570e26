"""Samples that are not packed, as pictures are. They go through the same lanes as text.

A sample is a row of Parquet, Arrow or JSON lines, a picture of a folder, or drawn. A task's
`collate` makes a micro-batch of some of them; what it draws, it draws from a sample's key, which
depends on (seed, epoch, sample) alone, so it is the same on any number of ranks.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from ..spec.refusal import Say, refuse
from ..spec.task import MicroBatch, Samples
from ..spec.task_specs import TASKS
from .blocks import Held, Place, blocks
from .chunks import tell
from .formats import DRAWN_PARTS, PICTURES_OF_A_PART
from .lanes import DataRank, Domains, Run, steps
from .packing import permutation
from .pairs import Pairs
from .prefetch import PREFETCH, Stream
from .request import Request
from .rows import SKIP
from .sameness import StreamState
from .source import Document
from .stream import Corpus, check_batch, opened, start

LOG = logging.getLogger(__name__)

# what a task raises for a row that it cannot use
UNUSABLE = (ValueError, TypeError, KeyError, OSError)


class SampleBlock(NamedTuple):
    """Holds samples in the order in which they are dealt."""

    samples: list[Document]
    keys: list[int]
    fill: np.ndarray  # (samples,) int64, all 1

    @property
    def documents(self) -> int:
        return len(self.samples)


@dataclass(frozen=True)
class Collator:
    """Makes micro-batches of samples.

    With `skip` a row that cannot be used is told and becomes one that only fills up, else it raises
    `Refusal`.
    """

    processor: Any
    samples: Samples
    skip: bool
    say: Say
    told: list[str] = field(default_factory=list)  # what was said of such rows

    def __call__(self, samples: list[Document | None], keys: list[int] | None) -> MicroBatch:
        rows = [sample and sample[0] for sample in samples]
        try:
            return self.samples.collate(self.processor, rows, keys)
        except UNUSABLE:
            usable = [
                self._usable(sample, keys and keys[number : number + 1])
                for number, sample in enumerate(samples)
            ]
            if all(usable):
                raise  # no row alone is at fault
        return self.samples.collate(
            self.processor,
            [row if fits else None for row, fits in zip(rows, usable, strict=True)],
            keys,
        )

    def _usable(self, sample: Document | None, key: list[int] | None) -> bool:
        if sample is None:
            return True
        try:
            self.samples.collate(self.processor, [sample[0]], key)
        except UNUSABLE as error:
            problem = refuse(sample[1], f"cannot be used: {error}", f"correct the row, or {SKIP}")
            if not self.skip:
                raise problem from error
            tell([str(problem)], self.told, self.say)
            return False
        return True


def collator(request: Request, processor: Any, samples: Samples, say: Say) -> Collator:
    """Makes the collator of a request.

    Whether a row can be used is found out by the ranks that it is dealt to alone: they tell,
    whichever they are.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if isinstance(processor, Pairs) and request.day:
        processor = replace(processor, day=date.fromisoformat(request.day))
    return Collator(
        processor, samples, request.skip, partial(LOG.warning, "rank %d: %s", rank) if rank else say
    )


def open_rows(
    request: Request,
    samples: Samples,
    processor: Any,
    say: Say = LOG.warning,
    state: StreamState | None = None,
) -> Corpus:
    """Open the corpora whose rows are the samples of a run, as `open_corpus` opens documents."""
    sizes = [
        request.sizes.block_samples,
        request.sizes.block_bytes,
        request.sizes.chunk_rows,
        PICTURES_OF_A_PART,
        DRAWN_PARTS,
    ]
    own = {
        name: getattr(request, name)
        for name in ("augment", "seq_len")
        if name in TASKS[request.task].reads
    }
    own |= {"blocks": sizes, **samples.identity(processor, request.task)}
    return opened(request, None, samples, own, say, state)


def open_samples(
    request: Request,
    processor: Any,
    samples: Samples,
    *,
    rank: DataRank,
    state: StreamState | None = None,
    say: Say = LOG.warning,
) -> Stream:
    """Opens the stream of one data-parallel rank over rows of a data set; a step has `global_batch`
    of them, or those of its ramp.

    Otherwise like `open_stream`.

    A row that the task cannot use raises `Refusal` from `next`, or, where bad rows are skipped, is
    told, and its place in the micro-batch counts nothing.
    """
    check_batch(request.ramp, request.micro_batch, rank.dp)
    corpus = open_rows(request, samples, processor, say, state)
    corpus.check(state)
    readers = corpus.readers()

    def open_blocks(number: int, place: Place) -> Iterator[tuple[Place, SampleBlock]]:
        return blocks(readers[number], request.seed, request.sizes.block_bytes, _shuffled, place)

    state = state or start(corpus.domains, corpus.identity)
    build = partial(_micro_batches, collator(request, processor, samples, say), request.micro_batch)
    made = steps(
        Domains(corpus.domains, open_blocks, 1, state), build, request, corpus.identity, rank
    )
    return Stream(made, state, PREFETCH, corpus.patience.closed, corpus.files)


def _shuffled(held: Held, *key: object) -> SampleBlock:
    samples = [sample for chunk, first, last in held for sample in chunk.samples[first:last]]
    order = permutation(len(samples), *key).tolist()
    begin = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
    keys = [(begin + number) % (1 << 63) for number in order]
    return SampleBlock(
        [samples[number] for number in order], keys, np.ones(len(samples), dtype=np.int64)
    )


def _micro_batches(collate: Collator, micro_batch: int, runs: list[Run]) -> list[MicroBatch]:
    mine = [(run.block, number) for run in runs for number in range(run.row, run.row + run.size)]
    parts = [mine[first : first + micro_batch] for first in range(0, len(mine), micro_batch)]
    return [
        collate(
            [block.samples[number] for block, number in part],
            [block.keys[number] for block, number in part],
        )
        for part in parts
    ]
