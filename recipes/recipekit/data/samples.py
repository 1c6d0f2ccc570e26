"""Samples that are not packed, such as images. They are dealt to slots like packed rows of text.

A sample is a row of Parquet, Arrow or JSON lines, an image in a folder, or a generated row. A
task's `collate` function makes a micro-batch from samples. Its random choices depend only on each
sample's key, which depends only on (seed, epoch, sample). So these choices are the same for any
number of ranks.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from ..spec.errors import Say, config_error
from ..spec.task import MicroBatch, Samples
from ..spec.task_specs import TASKS
from .batching import DataRank, RowDealer, RowRun, iter_steps
from .blocks import DocumentRanges, StreamPosition, iter_blocks
from .chunks import report_skipped
from .formats import GENERATED_PARTS, IMAGES_PER_PART
from .packing import permutation
from .pairs import PairProcessor
from .prefetch import Stream
from .request import Request
from .rows import SKIP_FIX
from .source import Document
from .stream import Corpus, check_global_batch, initial_stream_state, open_domains
from .stream_state import StreamState

LOG = logging.getLogger(__name__)

# errors that a task raises for a row that it cannot use
UNUSABLE_ROW_ERRORS = (ValueError, TypeError, KeyError, OSError)


class SampleBlock(NamedTuple):
    """Samples in the order in which they are dealt."""

    samples: list[Document]
    keys: list[int]
    fill: np.ndarray  # (samples,) int64, all 1

    @property
    def documents(self) -> int:
        return len(self.samples)


@dataclass(frozen=True)
class Collator:
    """Builder of micro-batches from samples.

    With `skip`, an unusable row is reported and replaced by a fill-up row. Without `skip`, an
    unusable row raises `ConfigError`.
    """

    processor: object
    samples: Samples
    skip: bool
    say: Say
    reported: list[str] = field(default_factory=list)  # problems of unusable rows

    def __call__(self, samples: list[Document | None], keys: list[int] | None) -> MicroBatch:
        rows = [sample and sample[0] for sample in samples]
        try:
            return self.samples.collate(self.processor, rows, keys)
        except UNUSABLE_ROW_ERRORS:
            usable = [
                self._is_usable(sample, keys and keys[number : number + 1])
                for number, sample in enumerate(samples)
            ]
            if all(usable):
                raise  # no single row causes the error
        return self.samples.collate(
            self.processor,
            [row if fits else None for row, fits in zip(rows, usable, strict=True)],
            keys,
        )

    def _is_usable(self, sample: Document | None, key: list[int] | None) -> bool:
        if sample is None:
            return True
        try:
            self.samples.collate(self.processor, [sample[0]], key)
        except UNUSABLE_ROW_ERRORS as error:
            problem = config_error(
                sample[1], f"cannot be used: {error}", f"correct the row, or {SKIP_FIX}"
            )
            if not self.skip:
                raise problem from error
            report_skipped([str(problem)], self.reported, self.say)
            return False
        return True


def make_collator(request: Request, processor: object, samples: Samples, say: Say) -> Collator:
    """Return a request's collator.

    Every rank reports unusable rows, because only the ranks that receive a row can detect that the
    row is unusable.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if isinstance(processor, PairProcessor) and request.day:
        processor = replace(processor, day=date.fromisoformat(request.day))
    return Collator(
        processor, samples, request.skip, partial(LOG.warning, "rank %d: %s", rank) if rank else say
    )


def open_rows(
    request: Request,
    samples: Samples,
    processor: object,
    say: Say = LOG.warning,
    state: StreamState | None = None,
) -> Corpus:
    """Open the corpora whose rows are a run's samples, as `open_corpus` opens documents."""
    sizes = [
        request.sizes.block_samples,
        request.sizes.block_bytes,
        request.sizes.chunk_rows,
        IMAGES_PER_PART,
        GENERATED_PARTS,
    ]
    own = {
        name: getattr(request, name)
        for name in ("augment", "seq_len")
        if name in TASKS[request.task].reads
    }
    own |= {"blocks": sizes, **samples.identity(processor, request.task)}
    return open_domains(request, None, samples, own, say, state)


def open_samples(
    request: Request,
    processor: object,
    samples: Samples,
    *,
    rank: DataRank,
    state: StreamState | None = None,
    say: Say = LOG.warning,
) -> Stream:
    """Open the stream of a data set's rows for one data-parallel rank.

    A step has `global_batch` rows, or as many as the batch ramp sets. Otherwise, see `open_stream`.
    If the task cannot use a row, `next` raises `ConfigError`. If bad rows are skipped, the row is
    reported instead, and its slot in the micro-batch does not count.
    """
    check_global_batch(request.ramp, request.micro_batch, rank.dp)
    corpus = open_rows(request, samples, processor, say, state)
    return read_samples(corpus, processor, samples, rank=rank, state=state, say=say)


def read_samples(
    corpus: Corpus,
    processor: object,
    samples: Samples,
    *,
    rank: DataRank,
    state: StreamState | None = None,
    say: Say = LOG.warning,
) -> Stream:
    """Start the stream of an opened corpus; see `open_samples`.

    Several streams can read the same corpus, but only one after the other.
    """
    request = corpus.request
    corpus.check(state)
    readers = corpus.readers()

    def open_blocks(
        number: int, place: StreamPosition
    ) -> Iterator[tuple[StreamPosition, SampleBlock]]:
        return iter_blocks(
            readers[number], request.seed, request.sizes.block_bytes, _shuffle_samples, place
        )

    state = state or initial_stream_state(corpus.domains, corpus.identity)
    build = partial(
        _micro_batches, make_collator(request, processor, samples, say), request.micro_batch
    )
    dealer = RowDealer(corpus.domains, open_blocks, 1, state)
    made = iter_steps(dealer, build, request, corpus.identity, rank, corpus.passing)
    return corpus.stream(made, state)


def _shuffle_samples(ranges: DocumentRanges, *key: object) -> SampleBlock:
    samples = [sample for chunk, first, last in ranges for sample in chunk.samples[first:last]]
    order = permutation(len(samples), *key).tolist()
    begin = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
    keys = [(begin + number) % (1 << 63) for number in order]
    return SampleBlock(
        [samples[number] for number in order], keys, np.ones(len(samples), dtype=np.int64)
    )


def _micro_batches(collate: Collator, micro_batch: int, runs: list[RowRun]) -> list[MicroBatch]:
    mine = [(run.block, number) for run in runs for number in range(run.row, run.row + run.size)]
    parts = [mine[first : first + micro_batch] for first in range(0, len(mine), micro_batch)]
    return [
        collate(
            [block.samples[number] for block, number in part],
            [block.keys[number] for block, number in part],
        )
        for part in parts
    ]
