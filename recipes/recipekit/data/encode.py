"""Documents as token ids and labels, which mark the tokens that are trained on."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, NamedTuple

import numpy as np

from ..spec.refusal import Problem
from ..spec.task import IGNORE
from ..spec.task_specs import TASKS
from .chat_rows import (
    OPENAI,
    Content,
    Message,
    UnknownRole,
    learned,
    messages_of,
    text_pieces,
    unknown_keys,
)
from .chat_spans import ChatTemplate, Span
from .processors import edges, encode, num_embeddings
from .source import Document
from .tokenizer_identity import identity_of

# ids (n,) int64; labels (n,) int64: the token that follows, or IGNORE
Encoded = tuple[np.ndarray, np.ndarray]


TOOLS_OF_ROW = "tools (a column)"
MOST = 0.5  # the largest share of the chats, or of their answers' text, that may be lost


class Counts(NamedTuple):
    """Counts of chats and of their lost text.

    Characters are counted in the answers that are learned.
    """

    rows: int = 0
    cut: int = 0  # rows that are longer than seq_len
    barren: int = 0  # rows without a token to learn
    said: int = 0  # characters
    dropped: int = 0  # characters that the template drops
    forms: tuple[str, ...] = ()  # names of the forms of rows
    keys: tuple[str, ...] = ()  # unread keys of messages

    def __add__(self, other: Any) -> "Counts":
        sums = (one + more for one, more in zip(self[:5], other[:5], strict=True))
        names = (
            tuple(sorted({*one, *more})) for one, more in zip(self[5:], other[5:], strict=True)
        )
        return Counts(*sums, *names)

    def lines(self, seq_len: int) -> list[str]:
        """Return a line about the chats, and a line about unread keys if there are some."""
        lost = (
            f"{self.cut:,} are longer than seq_len = {seq_len} and cut, {self.barren:,} have no"
            " answer to train on"
        )
        dropped = (
            f"the chat template leaves out {self.dropped / max(1, self.said):.1%} of the answers'"
            " text"
        )
        found = [
            f"chats: of the first {self.rows:,} rows, read as {' and '.join(self.forms)}, {lost};"
            f" {dropped}"
        ]
        return found + [
            "chats: neither training nor the chat template reads these keys:"
            f" {', '.join(self.keys)}"
        ] * bool(self.keys)

    def problems(self, seq_len: int) -> list[Problem]:
        """Return a problem for each count that exceeds the share `MOST`."""
        where, skip = (
            f"--dataset, the first {self.rows:,} rows",
            "or train on the rest with --bad_rows skip",
        )
        found = []
        if self.cut > MOST * self.rows:
            rule = (
                f"{self.cut:,} chats are longer than seq_len = {seq_len}, so their ends are cut off"
            )
            found.append(Problem(where, rule, f"use a longer --seq_len, {skip}"))
        if self.barren > MOST * self.rows:
            needed = (
                "an answer must have the role assistant, must not be excluded by weight or train,"
                " and must begin within --seq_len tokens"
            )
            found.append(
                Problem(
                    where,
                    f"{self.barren:,} chats have no answer to train on",
                    f"change the rows ({needed}), {skip}",
                )
            )
        if self.dropped > MOST * self.said:
            share = f"{self.dropped / self.said:.0%}"
            rule = (
                f"the chat template leaves out {share} of the answers' text (thoughts, calls or"
                " content)"
            )
            found.append(
                Problem(where, rule, f"use a tokenizer whose chat template includes it, {skip}")
            )
        return found

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers that a stream adds up; () without chats."""
        return tuple(self[:5]) if self.rows else ()


@dataclass(frozen=True)
class Encoder:
    """A tokenizer with the task and the row length of a run.

    `day`: the date that a chat template writes as today's date.
    """

    tokenizer: Any
    task: str
    seq_len: int
    day: date | None = None

    def __call__(self, documents: list[Document]) -> list[Encoded]:
        return self.counted(documents)[0]

    def counted(self, documents: list[Document]) -> tuple[list[Encoded], Counts]:
        """Encode documents: (ids and labels of each, counts of chats)."""
        contents, places = [content for content, _ in documents], [place for _, place in documents]
        if not documents:
            return [], Counts()
        if TASKS[self.task].masked:
            return encode_sequences(self.tokenizer, contents, self.seq_len, places), Counts()
        if self.chats:
            return counted_chats(self.template, contents, places, self.seq_len)
        return encode_texts(self.tokenizer, contents, places), Counts()

    @property
    def date(self) -> str:
        """The date that the chat template writes; empty if it writes none."""
        return self.day.isoformat() if self.day and self.chats and self.template.is_dated else ""

    @functools.cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.day)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end an answer in training; () for a task with masked tokens."""
        if TASKS[self.task].masked:
            return ()
        of_chats = (
            self.template.end_tokens
            if self.tokenizer.chat_template and (self.chats or TASKS[self.task].pairs)
            else ()
        )
        return (
            of_chats
            if self.chats
            else tuple(dict.fromkeys([*of_chats, self.tokenizer.eos_token_id]))
        )

    @property
    def chats(self) -> bool:
        return TASKS[self.task].chats

    @property
    def longest(self) -> int:
        """Returns the tokens at which documents end, since what is made of a text depends on that;
        0 if they end nowhere.
        """
        return self.seq_len if self.chats or TASKS[self.task].masked else 0

    @functools.cached_property
    def vocabulary(self) -> int:
        return num_embeddings(self.tokenizer)

    @functools.cached_property
    def identity(self) -> str:
        """The hash of the tokenizer: another value for another tokenizer."""
        return identity_of(self.tokenizer, self.task)


def encode_texts(tokenizer: Any, texts: list[str], places: Sequence[str] = ()) -> list[Encoded]:
    """Encode each text as one document: begin token if the tokenizer adds one, tokens, end token.

    A document without a target is returned empty. `places` names each text in error messages.
    """
    begin = [tokenizer.bos_token_id] if edges(tokenizer)[0][:1] == [tokenizer.bos_token_id] else []
    rows = encode(tokenizer, texts, places)["input_ids"]
    documents = (np.array([*begin, *row, tokenizer.eos_token_id], dtype=np.int64) for row in rows)
    return [_document(ids, np.ones(len(ids), dtype=bool)) for ids in documents]


def encode_sequences(
    tokenizer: Any, texts: list[str], seq_len: int, places: Sequence[str] = ()
) -> list[Encoded]:
    """Encode each text as documents of up to `seq_len` tokens. Each token is a target.

    Every document is between the tokenizer's edges, such as [CLS] and [SEP].
    """
    begin, end = edges(tokenizer)
    room = seq_len - len(begin) - len(end)
    rows = encode(tokenizer, texts, places)["input_ids"]
    parts = (
        row[start : start + room] for row in rows for start in range(0, max(len(row), 1), room)
    )
    documents = (np.array([*begin, *part, *end] if part else [], dtype=np.int64) for part in parts)
    return [(ids, ids) for ids in documents]


def encode_chats(
    tokenizer: Any, chats: list[Content], places: list[str], seq_len: int
) -> list[Encoded]:
    """Encode each chat as one document of at most `seq_len` tokens, with loss on the answers.

    An answer is everything that the template writes in a turn of the assistant. `places` names each
    chat in error messages. A chat without a target is returned empty. Raises `Refusal` for a
    malformed chat.
    """
    return counted_chats(ChatTemplate(tokenizer), chats, places, seq_len)[0]


def counted_chats(
    template: ChatTemplate, chats: list[Content], places: list[str], seq_len: int
) -> tuple[list[Encoded], Counts]:
    """Encode chats like `encode_chats`, and count the chats and their lost text."""
    rendered, counts = [], Counts(rows=len(chats))
    for messages, tools, place in _readable(template, chats, places):
        text, answers = template.answers(messages, tools, place)
        rendered.append(
            (text, [span for number, span in answers if number < 0 or learned(messages[number])])
        )
        counts += _said(messages, text, answers)
        keys = unknown_keys(messages, template.names)
        if tools and not template.names("tools"):
            keys.add(TOOLS_OF_ROW)
        counts += Counts(keys=tuple(keys))
    forms = {chat.get("form", OPENAI) if isinstance(chat, dict) else OPENAI for chat in chats}
    counts += Counts(forms=tuple(forms))
    texts = [text for text, _ in rendered]
    batch = encode(template.tokenizer, texts, places, return_offsets_mapping=True)
    encoded = []
    for (_, answers), ids, offsets in zip(
        rendered, batch["input_ids"], batch["offset_mapping"], strict=True
    ):
        wanted = wanted_tokens(offsets, answers)
        encoded.append(_document(np.array(ids, dtype=np.int64)[:seq_len], wanted[:seq_len]))
        counts += Counts(cut=int(len(ids) > seq_len), barren=int(not len(encoded[-1][0])))
    return encoded, counts


def wanted_tokens(offsets: list[tuple[int, int]], answers: list[Span]) -> np.ndarray:
    """Return which tokens contain a character of an answer, (n,) bool; `offsets` are the spans of
    the tokens.
    """
    wanted = np.zeros(len(offsets), dtype=bool)
    token = 0
    for start, end in answers:
        while token < len(offsets) and offsets[token][1] <= start:
            token += 1
        while token < len(offsets) and offsets[token][0] < end:
            wanted[token] = True
            token += 1
    return wanted


def _readable(
    template: ChatTemplate, chats: list[Content], places: list[str]
) -> list[tuple[list[Message], list[Any] | None, str]]:
    """Return (messages, tools, place) of each chat.

    Raises `Refusal`; for an unknown role it names all roles of the chats.
    """
    found, unknown, met = [], None, set[str]()
    for chat, place in zip(chats, places, strict=True):
        messages, tools = (
            (chat["messages"], chat.get("tools")) if isinstance(chat, dict) else (chat, None)
        )
        try:
            found.append((messages_of(messages, place, template.roles), tools, place))
            met |= {message["role"] for message in found[-1][0]}
        except UnknownRole as problem:
            unknown, met = unknown or problem, met | problem.met
    if unknown:
        raise UnknownRole(unknown.place, unknown.role, met)
    return found


def _said(messages: list[Message], text: str, answers: list[tuple[int, Span]]) -> Counts:
    """Count the characters of the answers that are learned, and the characters of these that the
    template drops.
    """
    said = dropped = 0
    spans = {number: span for number, span in answers if number >= 0}
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or not learned(message):
            continue
        written = text[slice(*spans[number])] if number in spans else text
        for piece in text_pieces(message):
            stripped = piece.strip()
            said += len(stripped)
            if stripped not in written:
                lines = filter(None, map(str.strip, re.split(r"\n|</?[^<>\s]+>", stripped)))
                dropped += sum(len(line) for line in lines if line not in written)
    return Counts(said=said, dropped=dropped)


def _document(ids: np.ndarray, wanted: np.ndarray) -> Encoded:
    """Labels each id with the next token where that is `wanted`; empty if no token is."""
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    labels[:-1] = np.where(wanted[1:], ids[1:], IGNORE)
    return (ids, labels) if wanted[1:].any() else (ids[:0], labels[:0])
