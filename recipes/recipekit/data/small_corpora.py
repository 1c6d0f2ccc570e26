"""Local corpora before a run: is there a document to train on, and which one is held out if the 1 %
is empty?
"""

from collections.abc import Iterator
from typing import Any

from ..spec.refusal import Refusal, refuse
from .blocks import no_document
from .chunks import Chunk, Reader, SampleChunk
from .content import ONE_PERCENT, SHARE, HeldOut, hash_of, hash_of_tokens
from .encode import Encoder
from .request import Request
from .source import Document, Source

SHORTEST = 2 * 10  # characters or tokens; a shorter document has no tenth worth holding out


def check_documents(source: Source, request: Request) -> None:
    """Raise `Refusal` for a corpus without any document, as far as that can be known without
    tokens.
    """
    if source.ready:
        return
    rows = empty = bad = 0
    for chunk in _chunks(source, None, request):
        rows, empty, bad = rows + chunk.rows, empty + chunk.empty, bad + chunk.bad
        # a broken row is refused when its turn comes
        if len(chunk.lengths) or (bad and not request.skip):
            return
    raise no_document(source, rows, empty, bad)


def choose(sources: list[Source], encoder: Encoder | None, request: Request) -> HeldOut:
    """Return the rule of the held-out documents of local corpora.

    Reads until the 1 % rule holds a document out, which takes about a hundred documents. In a
    corpus without such a document, the document with the smallest hash is chosen; a document that
    is alone gives its last tenth. Raises `Refusal` if there is one document only and it cannot be
    cut.
    """
    only: tuple[int, Any] | None = None
    smallest: HeldOut | None = None
    for source in sources:
        found: dict[int, Document] = {}
        for number, document in _hashed(source, encoder, request):
            if number not in found and _usable(document, encoder):
                found[number] = document
                if number % SHARE == 0:
                    return ONE_PERCENT
        if len(found) > 1 and smallest is None:
            smallest = HeldOut(min(found))
        only = only or next(iter(found.items()), None)
    if smallest or only is None:
        return smallest or ONE_PERCENT
    number, (content, place) = only
    if isinstance(content, str | range) and len(content) >= SHORTEST:
        return HeldOut(number, True)
    rule = "is the only document, and evaluation requires a second one that training does not see"
    raise refuse(f"--dataset, {place}", rule, "add more data, or use --eval_every 0")


def _hashed(
    source: Source, encoder: Encoder | None, request: Request
) -> Iterator[tuple[int, Document]]:
    """Yield (hash, document) of all documents; of ready tokens a range stands for the document."""
    for chunk in _chunks(source, encoder, request):
        if isinstance(chunk, SampleChunk):
            yield from ((hash_of(document[0]), document) for document in chunk.samples)
        else:
            numbers = hash_of_tokens(chunk.ids, chunk.starts, chunk.lengths)
            yield from (
                (int(number), (range(length), source.parts[0]))
                for number, length in zip(numbers, chunk.lengths, strict=True)
            )


def _chunks(
    source: Source, encoder: Encoder | None, request: Request
) -> Iterator[Chunk | SampleChunk]:
    """Yield the chunks of all documents.

    Broken rows are left out here: they are refused when their turn comes.
    """
    reader = Reader(
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


def _usable(document: Document, encoder: Encoder | None) -> bool:
    """Return True if a document has a token to learn."""
    if encoder is None or isinstance(document[0], range):
        return True
    try:
        return any(len(ids) for ids, _ in encoder([document]))
    except Refusal:
        return False
