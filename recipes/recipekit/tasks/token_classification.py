"""Token classification: predict the class of each word, for example of named entities.

The first token of a word has the label, and the other tokens of the word have none. Words are
joined with blanks before they are tokenised. Every tokenizer therefore reads them like text, and
the offsets of the tokens tell the words apart.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..data.encode import Encoded
from ..data.processors import check_edges, edges, encode, fitting_tokenizer
from ..data.request import Request
from ..data.rows import SKIP_FIX
from ..model.config_errors import CONSTRUCTOR_ERRORS
from ..model.probes import probe
from ..model.small import in_words
from ..spec.errors import config_error
from ..spec.task import IGNORE, Documents, MicroBatch
from ..spec.task_specs import TASKS
from . import masked_lm, pretrain
from .image_classification import num_labels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SENTENCEPIECE_BLANK = "▁"


@dataclass(frozen=True)
class Classes:
    """The classes of a model: their number, and the number of each class that has a name."""

    count: int
    numbers: Mapping[str, int]


def make_tagging_tokenizer(request: Request, model_config: dict[str, Any]) -> Any:
    """Return the tokenizer of a run. Its attribute `tag_classes` contains the classes of the model.

    Raise `ConfigError` for a tokenizer without offsets or without room for a text, and for a model
    with fewer than two classes.
    """
    tokenizer = fitting_tokenizer(request, model_config)
    if not tokenizer.is_fast:
        raise config_error(
            "--tokenizer",
            "must be a fast tokenizer: a slow one does not report the text positions of its tokens",
            "use a tokenizer with a tokenizer.json",
        )
    check_edges(edges(tokenizer), request.seq_len)
    named = (model_config.get("id2label") or {}).items()
    classes = Classes(num_labels(model_config), {str(name): int(number) for number, name in named})
    if classes.count < 2:
        raise config_error(
            f"model = {request.model}",
            f"has {classes.count} class, but a tag is one of at least two classes",
            "use --num_labels with the number of classes in the data",
        )
    tokenizer.tag_classes = classes
    return tokenizer


def class_identity(tokenizer: Any, task: str) -> dict[str, Any]:
    """Return the classes as part of a data stream's identity, and of the key of cached tokens."""
    return {"classes": [tokenizer.tag_classes.count, dict(tokenizer.tag_classes.numbers)]}


# From a row to labels
# --------------------------------------------------------------------------------------------------


def encode_words(
    tokenizer: Any, contents: list[dict[str, Any]], places: list[str], seq_len: int
) -> list[Encoded]:
    """Encode each row as documents of up to `seq_len` tokens, with a label for each word.

    Every document is enclosed in the tokenizer's edges, such as [CLS] and [SEP]. A part without a
    label is returned empty. Raise `ConfigError` for an invalid row.
    """
    begin, end = edges(tokenizer)
    room = seq_len - len(begin) - len(end)
    rows = [
        parse_row(content, place, tokenizer.tag_classes)
        for content, place in zip(contents, places, strict=True)
    ]
    batch = encode(
        tokenizer, [" ".join(words) for words, _ in rows], places, return_offsets_mapping=True
    )
    documents = []
    for row, (words, classes) in enumerate(rows):
        ids, spans = batch["input_ids"][row], _spans(batch, row)
        labels = [IGNORE] * len(ids)
        for token, number in zip(first_tokens(words, spans), classes, strict=True):
            if token >= 0:
                labels[token] = number
        for start in range(0, max(len(ids), 1), room):
            part = slice(start, start + room)
            documents.append(
                _document(
                    [*begin, *ids[part], *end],
                    [*[IGNORE] * len(begin), *labels[part], *[IGNORE] * len(end)],
                )
            )
    return documents


def _spans(batch: Any, row: int) -> list[tuple[int, int]]:
    """Return the character spans of a text's tokens. A token of only a blank has an empty span.

    Before the first word, SentencePiece gives such a token the span of the word's first letter.
    """
    return [
        (0, 0) if token == SENTENCEPIECE_BLANK else span
        for token, span in zip(batch.tokens(row), batch["offset_mapping"][row], strict=True)
    ]


def _document(ids: list[int], labels: list[int]) -> Encoded:
    """Return the arrays of a document. They are empty if it has no label."""
    size = len(ids) if any(label != IGNORE for label in labels) else 0
    return np.array(ids[:size], dtype=np.int64), np.array(labels[:size], dtype=np.int64)


def first_tokens(words: list[str], spans: list[tuple[int, int]]) -> Iterator[int]:
    """Yield the index of the first token of each word, or -1 for a word without a token.

    `spans` are the character spans of the tokens in the words joined with blanks. A token that
    contains characters of two words belongs to the first one.
    """
    token, start = 0, 0
    for word in words:
        end = start + len(word)
        while token < len(spans) and spans[token][1] <= start:
            token += 1
        found = token < len(spans) and spans[token][0] < end
        yield token if found else -1
        token, start = token + found, end + 1


def parse_row(content: dict[str, Any], place: str, classes: Classes) -> tuple[list[str], list[int]]:
    """Return the words of a row and their classes. A word without a class has IGNORE.

    Raise `ConfigError` for an invalid row.
    """
    words = _parse_list("text", "words", content["text"], place)
    tags = _parse_list("label", "tags", content["label"], place)
    for number, word in enumerate(words, 1):
        if not isinstance(word, str):
            rule = f"word {number} of its text must be text, not {_shown(word)}"
            raise _row_error(place, rule, "name another column with --text_field, correct the row")
    if len(tags) != len(words):
        rule = (
            f"its text has {_counted(words, 'word')}, but its label has {_counted(tags, 'tag')}."
            " Every word needs one tag"
        )
        raise _row_error(place, rule, f"correct the row (the tag {IGNORE} stands for no class)")
    return words, [
        class_of_tag(tag, f"{place}, tag {number}", classes) for number, tag in enumerate(tags, 1)
    ]


def _parse_list(name: str, noun: str, value: object, place: str) -> list[Any]:
    """Return the value of a column as a list. Text is split at blanks."""
    if isinstance(value, str):
        return value.split()
    if not isinstance(value, list):
        rule = f"its {name} must be a list of {noun}, or text with blanks, not {_shown(value)}"
        raise _row_error(place, rule, f"name another column with --{name}_field, correct the row")
    return value


def class_of_tag(tag: Any, place: str, classes: Classes) -> int:
    """Return the number of a tag's class, or IGNORE for a word without a class.

    A tag is a name or a number, which may be written as text. Raise `ConfigError` for other values.
    """
    known = f"the classes of the model are 0 to {classes.count - 1}"
    if isinstance(tag, str) and tag in classes.numbers:
        return classes.numbers[tag]
    try:
        if isinstance(tag, bool):
            raise TypeError
        number = int(tag) if isinstance(tag, str) else operator.index(tag)
    except TypeError:
        rule = f"must be the number or the name of a class, not {_shown(tag)}"
        raise _row_error(
            place, rule, "name another column with --label_field, correct the row"
        ) from None
    except ValueError:
        names = ", ".join(list(classes.numbers)[:10]) or "none"
        fix = (
            "write the numbers of the classes as tags, name the classes in id2label of the model's"
            " config.json"
        )
        raise _row_error(
            place, f"{tag!r} is not the name of a class: {known}, their names {names}", fix
        ) from None
    if number != IGNORE and not 0 <= number < classes.count:
        fix = "use --num_labels with the number of classes in the data, correct the row"
        raise _row_error(place, f"class {number} is not one of the model's: {known}", fix)
    return number


def _row_error(place: str, rule: str, fix: str) -> Exception:
    return config_error(place, rule, f"{fix}, or {SKIP_FIX}")


def _counted(values: list[Any], noun: str) -> str:
    return f"{len(values)} {noun}{'s' * (len(values) != 1)}"


def _shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"


# The built-in rows
# --------------------------------------------------------------------------------------------------

NUM_SENTENCES = 8000
GIVEN_NAMES = ("Ada", "Bruno", "Chen", "Dalia", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun")
FAMILY_NAMES = ("Abbott", "Berg", "Castro", "Doyle", "Eriksen", "Fuchs", "Garcia", "Hill")
PLACES = ("Accra", "Bergen", "Cusco", "Dakar", "Evora", "Fukuoka", "Graz", "Hobart")
STARTS = ("Yesterday", "Later", "In spring", "At noon", "Once", "Before the storm")
ACTS = ("met", "called", "wrote to", "walked past", "paid", "looked for", "waited for")


def generate_sentence(number: int) -> dict[str, Any]:
    """Return a row with a sentence of 6 to 12 words, in which names have class 1, others 0.

    The first word of a sentence also begins with a capital letter. All words are random, seeded by
    `number`.
    """
    draw = np.random.default_rng(number)

    def pick(words: tuple[str, ...]) -> str:
        return words[int(draw.integers(len(words)))]

    someone = (pick(GIVEN_NAMES), 1)
    some = (f"{draw.integers(2, 100)} people", 0)
    pieces = [
        (pick(STARTS), 0),
        (f"{pick(GIVEN_NAMES)} {pick(FAMILY_NAMES)}", 1),
        (pick(ACTS), 0),
        someone if draw.random() < 0.5 else some,
        ("near", 0),
        (pick(PLACES), 1),
    ]
    tagged = [(word, label) for piece, label in pieces for word in piece.split()]
    return {"text": [word for word, _ in tagged], "label": [label for _, label in tagged]}


# The model
# --------------------------------------------------------------------------------------------------


def forward(model: "PreTrainedModel", batch: MicroBatch) -> torch.Tensor:
    """Return the logits, (B, T, classes)."""
    return model(**TASK.inputs_of(batch), **pretrain.document_kwargs(batch, True)).logits


def check_tagger(model_config: dict[str, Any], attention: str, name: str) -> str:
    """Raise `ConfigError` for a model whose logits do not depend on the tokens after them.

    Return "", or why this could not be tested.
    """
    kind = model_config["model_type"]
    try:
        reads_both_ways = probe(model_config, TASK.spec.auto_class, name).reads_both_ways
    except CONSTRUCTOR_ERRORS as error:
        why = in_words(error)
        return f"it could not be tested whether a {kind} reads the words after each word: {why}"
    if not reads_both_ways:
        rule = f"a {kind} tags each word without the words after it"
        raise config_error(f"model = {name}", rule, "use an encoder, such as BERT or ModernBERT")
    return ""


TASK = replace(
    pretrain.TASK,
    spec=TASKS["token_classification"],
    processor=make_tagging_tokenizer,
    forward=forward,
    with_chunked_loss=None,
    check=check_tagger,
    documents=Documents(encode_words, generate_sentence, NUM_SENTENCES, class_identity),
    measures=("accuracy",),
    measure=masked_lm.measure,
)
