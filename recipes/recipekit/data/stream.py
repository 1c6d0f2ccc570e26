"""The global data stream: the token at each position of each optimizer step.

The stream is the same for any number of ranks. Each corpus is an endless sequence of blocks. In
every epoch, the corpus's parts and their row groups are shuffled and then read. A block is full
when it contains the tokens of a few hundred rows, and a full block is packed. The rows of one
corpus or of a mixture are dealt to the slots of the global batch. Each data-parallel rank owns a
range of adjacent slots.

Every rank follows the dealing of all rows, but builds only its own rows. So order and state depend
only on the corpus, the seed, the global batch (or its batch ramp), seq_len and the mixture. The
state consists of a few integers for each corpus.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

from ..kernels.documents import with_document_starts, with_documents
from ..spec.errors import ConfigError, Problem, Say
from ..spec.schedules import Ramp
from ..spec.task import Documents, MicroBatch, Samples
from .batching import DataRank, Passing, RowDealer, iter_steps, packed_batch_builder
from .blocks import StreamPosition, iter_blocks, pack_chunks
from .chunks import ChunkReader, open_cache
from .content import HeldOut
from .encode import Encoder
from .formats import CHARACTERS_PER_TOKEN, MAX_DOCUMENT_CHARACTERS
from .masking import make_token_masker
from .mixture import Domain, domains_of
from .prefetch import PREFETCH, Stream
from .processors import check_edges, check_tokenizer, edges, pad_id
from .remote import RetryPolicy
from .request import Request
from .small_corpora import check_documents, choose_held_out_rule
from .source import Source
from .sources import open_source
from .stream_state import DomainState, StreamState, check_identity, identity_at_step
from .tokenizer_identity import legacy_tokenizer_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """A run's data: each domain with its source, and the encoder of the documents.

    The encoder is None if the documents are samples.
    """

    request: Request
    domains: list[Domain]
    sources: list[Source]
    encoder: Encoder | None
    identity: dict
    patience: RetryPolicy
    rule: HeldOut

    def check(self, state: StreamState | None) -> None:
        """Raise `StreamMismatch` if `state` belongs to a different stream."""
        if state is not None:
            request, step = self.request, state["step"]
            now = identity_at_step(self.identity, request.ramp, request.left_out, step)
            check_identity(self._with_current_hash(state["identity"]), now, self.files)

    def _with_current_hash(self, saved: dict) -> dict:
        """Return a saved identity in which the tokenizer's hash is replaced by its current hash.

        Older versions recorded a hash of a sample's tokens or, for samples, the flag `--tokenizer`.
        If an older version recorded a different tokenizer, the identity is returned unchanged.
        """
        now = self.identity.get("tokenizer")
        if saved.get("tokenizer") in (None, now):
            return saved
        encoder = self.encoder
        former = (
            legacy_tokenizer_hash(encoder.tokenizer, encoder.task)
            if encoder
            else self.request.tokenizer
        )
        return saved | {"tokenizer": now} if saved["tokenizer"] == former else saved

    def stream(
        self,
        made: Iterator[tuple[list[MicroBatch], StreamState]],
        state: StreamState,
        prefetch: int = PREFETCH,
    ) -> Stream:
        """Start the thread that prepares steps ahead."""
        self.patience.closed.clear()  # an earlier stream of this corpus may have been closed
        return Stream(made, state, prefetch, self.patience.closed, self.files)

    @property
    def passing(self) -> Passing:
        """Receiver of progress lines, and the event that ends a passing over."""
        return Passing(self.patience.say, self.patience.closed)

    @property
    def files(self) -> dict[str, dict[str, str]]:
        return {
            domain.name: source.files
            for domain, source in zip(self.domains, self.sources, strict=True)
        }

    def readers(self, held_out: bool = False) -> list[ChunkReader]:
        """Return a reader of each source, for either the training documents or the held-out
        documents.
        """
        skip, sizes, told = self.request.skip, self.request.sizes, []
        of_all = {"say": self.patience.say, "closed": self.patience.closed, "told": told}
        kept = None if held_out else self.encoder
        caches = [
            open_cache(source, kept, self.request.token_cache, sizes, self.rule) if kept else None
            for source in self.sources
        ]
        # chats of a trial may be truncated
        strict = [domain.dataset != "builtin" and not self.request.tiny for domain in self.domains]
        parts = zip(self.sources, caches, strict, strict=True)
        return [
            ChunkReader(
                source, self.encoder, skip, sizes, cache, held_out, self.rule, whole, **of_all
            )
            for source, cache, whole in parts
        ]


def open_corpus(
    request: Request,
    tokenizer: "PreTrainedTokenizerBase",
    say: Say = LOG.warning,
    state: StreamState | None = None,
) -> Corpus:
    """Open the corpora that a run reads. This is a collective operation if one of them is remote.

    `say` receives messages about skipped rows and about waiting for servers. If the `state` of a
    stream is given, a hub data set is read at the commit that the stream used. Raise `ConfigError`
    if a corpus does not exist or is unreachable, or if the tokenizer does not fit.
    """
    check_tokenizer(tokenizer, request.task)
    if request.masked:
        check_edges(edges(tokenizer), request.seq_len)
    day = (state or {}).get("identity", {}).get("date") or request.day  # from its first start
    encoder, sizes = (
        Encoder(
            tokenizer,
            request.task,
            request.seq_len,
            date.fromisoformat(day) if day else None,
            request.documents,
        ),
        request.sizes,
    )
    own = {
        "tokenizer": encoder.identity,
        "seq_len": request.seq_len,
        "blocks": [
            sizes.tokens_of_block(request.seq_len),
            sizes.chunk_rows,
            sizes.chunk_characters,
            MAX_DOCUMENT_CHARACTERS,
            sizes.part_bytes,
            CHARACTERS_PER_TOKEN,
        ],
    }
    own |= {"date": encoder.date} if encoder.date else {}
    own |= encoder.label_identity
    if request.masked:  # any token with an embedding may be a replacement
        own |= {
            "mask_rate": request.mask_rate,
            "whole_words": request.whole_words,
            "vocabulary": encoder.vocabulary,
        }
    return open_domains(request, encoder, request.documents, own, say, state)


def open_domains(
    request: Request,
    encoder: Encoder | None,
    samples: Samples | Documents | None,
    task_identity: dict[str, Any],
    say: Say,
    state: StreamState | None,
) -> Corpus:
    """Open the corpora of a task that encodes documents, or whose rows are `samples`.

    `task_identity` becomes part of the stream's identity. `samples`, or the task's documents, also
    generate the rows of the dataset `builtin`.
    """
    domains, patience = (
        domains_of(request.dataset, request.subset),
        RetryPolicy(request.retry_s, say),
    )
    before = state["identity"]["corpus"] if state else {}
    sources = [
        open_source(request, domain, patience, before.get(domain.name, ""), samples)
        for domain in domains
    ]
    corpus = {
        domain.name: source.fingerprint for domain, source in zip(domains, sources, strict=True)
    }
    identity = {
        "corpus": corpus,
        "task": request.task,
        "seed": request.seed,
        "global_batch": request.global_batch,
        **task_identity,
    }
    parts = zip(domains, sources, strict=True)
    small = {
        domain.name: source
        for domain, source in parts
        if source.local and domain.dataset != "builtin" and domain.weight(1)
    }
    rule = HeldOut(*(state or {}).get("identity", {}).get("held_out", ()))
    if state is None:
        for source in small.values():
            check_documents(source, request)
        rule = (
            choose_held_out_rule(list(small.values()), encoder, request)
            if request.eval_every and len(small) == len(sources)
            else rule
        )
    if rule.chosen is not None:
        identity["held_out"] = [rule.chosen, rule.is_part]
    return Corpus(request, domains, sources, encoder, identity, patience, rule)


def open_stream(
    request: Request,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    rank: DataRank,
    state: StreamState | None = None,
    documents: bool = False,
    say: Say = LOG.warning,
) -> Stream:
    """Open one data-parallel rank's stream, from the start or from a saved state.

    The state may have been saved by any rank of any layout. A micro-batch is {"input_ids",
    "labels", "position_ids"}, each (micro_batch, seq_len) int64. labels[b, t] is the target of
    position t or -100. These tensors may share memory, and their rows may not be contiguous, so
    copy a tensor before writing to it.

    A mixture adds "domain", (micro_batch,) int64. `documents` adds the document boundaries that
    attention reads instead of a mask (kernels/documents.py). Without `documents`, a bidirectional
    task adds "document_starts", (micro_batch, seq_len) bool.

    Raise `ConfigError` if the corpus cannot be opened, and `StreamMismatch` if `state` belongs to a
    different stream.
    """
    check_global_batch(request.ramp, request.micro_batch, rank.dp)
    corpus = open_corpus(request, tokenizer, say, state)
    return read_documents(corpus, tokenizer, rank=rank, state=state, documents=documents)


def read_documents(
    corpus: Corpus,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    rank: DataRank,
    state: StreamState | None = None,
    documents: bool = False,
) -> Stream:
    """Start the stream of an opened corpus; see `open_stream`.

    Several streams can read the same corpus, but only one after the other.
    """
    request = corpus.request
    corpus.check(state)
    readers, join = (
        corpus.readers(),
        partial(
            pack_chunks,
            request.seq_len,
            pad_id(tokenizer),
            masks=make_token_masker(request, tokenizer),
        ),
    )
    limit = request.sizes.tokens_of_block(request.seq_len)

    def open_blocks(number: int, place: StreamPosition) -> Iterator[tuple[StreamPosition, Any]]:
        return iter_blocks(readers[number], request.seed, limit, join, place)

    state = state or initial_stream_state(corpus.domains, corpus.identity)
    domains = RowDealer(corpus.domains, open_blocks, request.seq_len, state)
    # number of steps to prepare ahead, enough to cover the time that packing a block takes
    prefetch = max(PREFETCH, limit // request.seq_len // request.ramp.max_rows)
    add = with_documents if documents else with_document_starts if request.bidirectional else dict
    made = iter_steps(
        domains,
        packed_batch_builder(request.micro_batch, request.seq_len, add),
        request,
        corpus.identity,
        rank,
        corpus.passing,
    )
    return corpus.stream(made, state, prefetch)


def check_global_batch(ramp: Ramp, micro_batch: int, dp: int) -> None:
    """Raise `ConfigError` if a global batch cannot be split evenly over the ranks."""
    each, problems = dp * micro_batch, []
    for first, rows in ramp.table:
        if rows % each:
            where, flag = (
                ("global_batch", "--global_batch ")
                if first == 1
                else (f"batch_ramp from step {first}", f"--batch_ramp {first}:")
            )
            rule = f"is not divisible by dp({dp}) * micro_batch({micro_batch})"
            problems.append(
                Problem(f"{where} = {rows}", rule, f"use {flag}{each * max(1, rows // each)}")
            )
    if problems:
        raise ConfigError(problems)


def initial_stream_state(domains: list[Domain], identity: dict[str, Any]) -> StreamState:
    """Return the state before the first step."""
    begun = {
        domain.name: DomainState(place={}, used=0, weight=domain.weight(1), tokens=0, bad=0)
        for domain in domains
    }
    return {"identity": identity, "step": 0, "domains": begun}
