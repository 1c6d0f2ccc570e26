"""The global data stream: which token stands where in which optimizer step, whatever the number of
ranks.

Each corpus is an endless sequence of blocks: epoch after epoch, its parts and their row groups in
an order drawn for the epoch, read until a block has the tokens of some hundred rows, which are
packed. Rows are dealt, one corpus or a mixture, to the slots ("lanes") of the global batch; a
data-parallel rank owns a run of neighbouring lanes. Every rank follows the dealing of all rows and
builds its own, so order and state depend on nothing but (corpus, seed, global_batch or its stated
ramp, seq_len, mixture), and the state is a few integers for each corpus.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

from ..kernels.documents import with_documents, with_starts
from ..spec.phases import Ramp
from ..spec.refusal import Problem, Refusal, Say
from ..spec.task import Samples
from .blocks import Place, blocks, packed
from .chunks import Reader, open_cache
from .content import HeldOut
from .encode import Encoder
from .formats import PIECE, TOKEN_LENGTH
from .lanes import DataRank, Domains, packed_batches, steps
from .masks import masks_of
from .mixture import Domain, domains_of
from .prefetch import PREFETCH, Stream
from .processors import check_edges, check_tokenizer, edges, pad_id
from .remote import Patience
from .request import Request
from .sameness import DomainState, StreamState, at_step, check_identity
from .small_corpora import check_documents, choose
from .source import Source
from .sources import open_source
from .tokenizer_identity import former_identity

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """Holds what a run reads: each domain with its source, and what makes tokens of their
    documents, None if these are samples.
    """

    request: Request
    domains: list[Domain]
    sources: list[Source]
    encoder: Encoder | None
    identity: dict
    patience: Patience
    rule: HeldOut

    def check(self, state: StreamState | None) -> None:
        """Raise `OtherData` if a `state` is of another stream than this one."""
        if state is not None:
            now = at_step(self.identity, self.request.ramp, state["step"])
            check_identity(self._in_todays_words(state["identity"]), now, self.files)

    def _in_todays_words(self, saved: dict) -> dict:
        """Return a saved identity with this version's hash of the tokenizer if an older version
        recorded the same tokenizer.

        Older versions recorded a hash of a sample's tokens or, for samples, the flag `--tokenizer`.
        """
        now = self.identity.get("tokenizer")
        if saved.get("tokenizer") in (None, now):
            return saved
        encoder = self.encoder
        former = (
            former_identity(encoder.tokenizer, encoder.task) if encoder else self.request.tokenizer
        )
        return saved | {"tokenizer": now} if saved["tokenizer"] == former else saved

    @property
    def files(self) -> dict[str, dict[str, str]]:
        return {
            domain.name: source.files
            for domain, source in zip(self.domains, self.sources, strict=True)
        }

    def readers(self, held_out: bool = False) -> list[Reader]:
        """Makes a reader for each source: of the documents to train on, or of those held out."""
        skip, sizes, told = self.request.skip, self.request.sizes, []
        of_all = {"say": self.patience.say, "closed": self.patience.closed, "told": told}
        kept = None if held_out else self.encoder
        caches = [
            open_cache(source, kept, self.request.token_cache, sizes, self.rule) if kept else None
            for source in self.sources
        ]
        # chats of a trial may be cut
        strict = [domain.dataset != "builtin" and not self.request.tiny for domain in self.domains]
        parts = zip(self.sources, caches, strict, strict=True)
        return [
            Reader(source, self.encoder, skip, sizes, cache, held_out, self.rule, whole, **of_all)
            for source, cache, whole in parts
        ]


def open_corpus(
    request: Request, tokenizer: Any, say: Say = LOG.warning, state: StreamState | None = None
) -> Corpus:
    """Opens the corpora that a run reads; a collective where one is remote.

    `say` is told of rows left out and of servers waited for.

    With the `state` of a stream a data set of the hub is read as it was then, whatever has been
    committed since. Raises `Refusal` if a corpus does not exist or cannot be reached, or if the
    tokenizer does not fit.
    """
    check_tokenizer(tokenizer, request.task)
    if request.masked:
        check_edges(edges(tokenizer), request.seq_len)
    day = (state or {}).get("identity", {}).get("date") or request.day  # of the run's first start
    encoder, sizes = (
        Encoder(tokenizer, request.task, request.seq_len, date.fromisoformat(day) if day else None),
        request.sizes,
    )
    own = {
        "tokenizer": encoder.identity,
        "seq_len": request.seq_len,
        "blocks": [
            sizes.tokens_of_block(request.seq_len),
            sizes.chunk_rows,
            sizes.chunk_characters,
            PIECE,
            sizes.part_bytes,
            TOKEN_LENGTH,
        ],
    }
    own |= {"date": encoder.date} if encoder.date else {}
    if request.masked:  # a token may be replaced by any token that has an embedding
        own |= {
            "mask_rate": request.mask_rate,
            "whole_words": request.whole_words,
            "vocabulary": encoder.vocabulary,
        }
    return opened(request, encoder, None, own, say, state)


def opened(
    request: Request,
    encoder: Encoder | None,
    samples: Samples | None,
    own: dict[str, Any],
    say: Say,
    state: StreamState | None,
) -> Corpus:
    """Opens the corpora of a task that makes tokens of documents, or `samples` of rows; `own` goes
    into the identity.
    """
    domains, patience = domains_of(request.dataset, request.subset), Patience(request.retry_s, say)
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
        **own,
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
            choose(list(small.values()), encoder, request)
            if request.eval_every and len(small) == len(sources)
            else rule
        )
    if rule.chosen is not None:
        identity["held_out"] = [rule.chosen, rule.is_part]
    return Corpus(request, domains, sources, encoder, identity, patience, rule)


def open_stream(
    request: Request,
    tokenizer: Any,
    *,
    rank: DataRank,
    state: StreamState | None = None,
    documents: bool = False,
    say: Say = LOG.warning,
) -> Stream:
    """Opens the stream of one data-parallel rank, from the start or from a state of any rank of any
    layout.

    A micro-batch is {"input_ids", "labels", "position_ids"}, each (micro_batch, seq_len) int64;
    labels[b, t] is the target of position t or -100. These tensors may share their memory, and rows
    need not lie next to each other: copy a tensor before writing to it. A mixture adds "domain",
    (micro_batch,) int64, and `documents` what attention reads instead of a mask
    (kernels/documents.py); without these rows of masked tokens add "document_starts", (micro_batch,
    seq_len) bool. Raises `Refusal` if the corpus cannot be opened, `OtherData` if `state` is of
    another stream.
    """
    check_batch(request.ramp, request.micro_batch, rank.dp)
    corpus = open_corpus(request, tokenizer, say, state)
    corpus.check(state)
    readers, join = (
        corpus.readers(),
        partial(packed, request.seq_len, pad_id(tokenizer), masks=masks_of(request, tokenizer)),
    )
    limit = request.sizes.tokens_of_block(request.seq_len)

    def open_blocks(number: int, place: Place) -> Iterator[tuple[Place, Any]]:
        return blocks(readers[number], request.seed, limit, join, place)

    state = state or start(corpus.domains, corpus.identity)
    domains = Domains(corpus.domains, open_blocks, request.seq_len, state)
    # steps to take while a block is made
    prefetch = max(PREFETCH, limit // request.seq_len // request.ramp.most)
    add = with_documents if documents else with_starts if request.masked else dict
    made = steps(
        domains,
        packed_batches(request.micro_batch, request.seq_len),
        request,
        corpus.identity,
        rank,
        add,
    )
    return Stream(made, state, prefetch, corpus.patience.closed, corpus.files)


def check_batch(ramp: Ramp, micro_batch: int, dp: int) -> None:
    """Raises `Refusal` if a global batch cannot be divided over the ranks."""
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
        raise Refusal(problems)


def start(domains: list[Domain], identity: dict[str, Any]) -> StreamState:
    """Makes the state before the first step."""
    begun = {
        domain.name: DomainState(place={}, used=0, weight=domain.weight(1), tokens=0, bad=0)
        for domain in domains
    }
    return {"identity": identity, "step": 0, "domains": begun}
