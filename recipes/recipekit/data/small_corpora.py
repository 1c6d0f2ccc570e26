"""Checks of local corpora before a run.

A corpus must contain a document to train on. If the 1% rule selects no held-out document, a
different rule selects one.
"""

from collections.abc import Iterator
from typing import Any

from ..spec.errors import ConfigError, config_error
from .blocks import no_document_error
from .chunks import Chunk, ChunkReader, SampleChunk
from .content import HELD_OUT_ONE_IN, ONE_PERCENT, HeldOut, content_hash, token_hashes
from .encode import Encoder
from .request import Request
from .source import Document, Source

MIN_SPLIT_LENGTH = 2 * 10  # characters or tokens; a shorter document cannot be split


def check_documents(source: Source, request: Request) -> None:
    """Raise `ConfigError` for a corpus without documents, if this can be detected without
    tokenizing.
    """
    if source.ready:
        return
    rows = empty = bad = 0
    for chunk in _corpus_chunks(source, None, request):
        rows, empty, bad = rows + chunk.rows, empty + chunk.empty, bad + chunk.bad
        # a broken row is rejected later, when it is read for training
        if len(chunk.lengths) or (bad and not request.skip):
            return
    raise no_document_error(source, rows, empty, bad)


def choose_held_out_rule(
    sources: list[Source], encoder: Encoder | None, request: Request
) -> HeldOut:
    """Return the rule that selects the held-out documents of local corpora.

    Read until the 1% rule selects a document, which takes about a hundred documents. If that rule
    selects no document of the corpus, the document with the smallest hash is held out. If the
    corpus has only one document, the document's last tenth is held out. Raise `ConfigError` if that
    document cannot be split.
    """
    only: tuple[int, Any] | None = None
    smallest: HeldOut | None = None
    for source in sources:
        found: dict[int, Document] = {}
        for number, document in _hashed_documents(source, encoder, request):
            if number not in found and _has_target(document, encoder):
                found[number] = document
                if number % HELD_OUT_ONE_IN == 0:
                    return ONE_PERCENT
        if len(found) > 1 and smallest is None:
            smallest = HeldOut(min(found))
        only = only or next(iter(found.items()), None)
    if smallest or only is None:
        return smallest or ONE_PERCENT
    number, (content, place) = only
    if isinstance(content, str | range) and len(content) >= MIN_SPLIT_LENGTH:
        return HeldOut(number, True)
    rule = "is the only document, and evaluation requires a second one that training does not see"
    raise config_error(f"--dataset, {place}", rule, "add more data, or use --eval_every 0")


def _hashed_documents(
    source: Source, encoder: Encoder | None, request: Request
) -> Iterator[tuple[int, Document]]:
    """Yield (hash, document) for all documents; a range represents pretokenized documents."""
    for chunk in _corpus_chunks(source, encoder, request):
        if isinstance(chunk, SampleChunk):
            yield from ((content_hash(document[0]), document) for document in chunk.samples)
        else:
            numbers = token_hashes(chunk.ids, chunk.starts, chunk.lengths)
            yield from (
                (int(number), (range(length), source.parts[0]))
                for number, length in zip(numbers, chunk.lengths, strict=True)
            )


def _corpus_chunks(
    source: Source, encoder: Encoder | None, request: Request
) -> Iterator[Chunk | SampleChunk]:
    """Yield the chunks of all documents.

    Broken rows are excluded here, and rejected later when they are read for training.
    """
    reader = ChunkReader(
        source,
        encoder if source.ready else None,
        True,
        request.sizes,
        None,
        held_out=None,
        say=lambda _: None,
    )
    for part in range(len(source.parts)):
        groups = reader.groups(part)
        if not isinstance(groups, int):
            yield groups
            continue
        for group in range(groups):
            yield from reader.chunks(part, group, 0)


def _has_target(document: Document, encoder: Encoder | None) -> bool:
    """Return True if a document contains a token to train on."""
    if encoder is None or isinstance(document[0], range):
        return True
    try:
        return any(len(ids) for ids, _ in encoder([document]))
    except ConfigError:
        return False
