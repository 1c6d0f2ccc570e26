"""Documents as token ids and labels, which mark the tokens that are trained on."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..spec.errors import Problem
from ..spec.task import IGNORE, Documents
from ..spec.task_specs import TASKS
from .chat_rows import (
    OPENAI,
    Content,
    Message,
    UnknownRole,
    answer_texts,
    is_trained_on,
    parse_messages,
    unknown_keys,
)
from .chat_spans import CharSpan, ChatTemplate
from .processors import edges, encode, num_embeddings
from .source import Document
from .tokenizer_identity import hash_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# ids (n,) int64; labels (n,) int64: the next token or IGNORE
Encoded = tuple[np.ndarray, np.ndarray]


TOOLS_OF_ROW = "tools (a column)"
MAX_LOST_SHARE = 0.5  # maximum share of the chats, or of their answers' text, that may be lost


class ChatCounts(NamedTuple):
    """Counts of chats and of their lost text.

    Characters are counted only in answers that are trained on.
    """

    rows: int = 0
    truncated: int = 0  # rows that are longer than seq_len
    barren: int = 0  # rows without a token to train on
    answer_characters: int = 0  # characters of answers
    dropped_characters: int = 0  # characters that the template drops
    forms: tuple[str, ...] = ()  # names of the row formats
    keys: tuple[str, ...] = ()  # message keys that nothing reads

    def __add__(self, other: Any) -> "ChatCounts":
        sums = (one + more for one, more in zip(self[:5], other[:5], strict=True))
        names = (
            tuple(sorted({*one, *more})) for one, more in zip(self[5:], other[5:], strict=True)
        )
        return ChatCounts(*sums, *names)

    def lines(self, seq_len: int) -> list[str]:
        """Return a line about the chats, and a second line if there are unread keys."""
        lost = (
            f"{self.truncated:,} are longer than seq_len = {seq_len} and cut, {self.barren:,} have"
            " no answer to train on"
        )
        dropped = (
            "the chat template leaves out"
            f" {self.dropped_characters / max(1, self.answer_characters):.1%} of the answers' text"
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
        """Return a problem for each lost share that exceeds `MAX_LOST_SHARE`."""
        where, skip = (
            f"--dataset, the first {self.rows:,} rows",
            "or train on the rest with --bad_rows skip",
        )
        found = []
        if self.truncated > MAX_LOST_SHARE * self.rows:
            rule = (
                f"{self.truncated:,} chats are longer than seq_len = {seq_len}, so their ends are"
                " cut off"
            )
            found.append(Problem(where, rule, f"use a longer --seq_len, {skip}"))
        if self.barren > MAX_LOST_SHARE * self.rows:
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
        if self.dropped_characters > MAX_LOST_SHARE * self.answer_characters:
            share = f"{self.dropped_characters / self.answer_characters:.0%}"
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
        """The counts that a stream adds up; () without chats."""
        return tuple(self[:5]) if self.rows else ()


@dataclass(frozen=True)
class Encoder:
    """A tokenizer with a run's task and row length.

    `day` is the date that a chat template writes as today's date. `documents` is the `Task` field
    of that name. It is not None if the labels cannot be derived from the tokens.
    """

    tokenizer: Any
    task: str
    seq_len: int
    day: date | None = None
    documents: Documents | None = None

    def __call__(self, documents: list[Document]) -> list[Encoded]:
        return self.encode_with_counts(documents)[0]

    def encode_with_counts(self, documents: list[Document]) -> tuple[list[Encoded], ChatCounts]:
        """Encode documents; return (ids and labels of each document, counts of chats)."""
        contents, places = [content for content, _ in documents], [place for _, place in documents]
        if not documents:
            return [], ChatCounts()
        if self.documents:
            encode_rows = self.documents.encode
            return encode_rows(self.tokenizer, contents, places, self.seq_len), ChatCounts()
        if TASKS[self.task].masked:
            return encode_sequences(self.tokenizer, contents, self.seq_len, places), ChatCounts()
        if self.chats:
            return encode_chats_with_counts(self.template, contents, places, self.seq_len)
        return encode_texts(self.tokenizer, contents, places), ChatCounts()

    @property
    def date(self) -> str:
        """The date that the chat template writes; empty if the template writes no date."""
        return self.day.isoformat() if self.day and self.chats and self.template.is_dated else ""

    @functools.cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.day)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end an answer in training; () for a masked-token task."""
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
    def keeps_labels(self) -> bool:
        """Return True if labels are stored because they cannot be derived from the tokens."""
        return self.chats or self.documents is not None

    @property
    def longest(self) -> int:
        """The maximum number of tokens in a document, or 0 if there is no maximum.

        This length affects how text is tokenized.
        """
        ends = self.keeps_labels or TASKS[self.task].masked
        return self.seq_len if ends else 0

    @functools.cached_property
    def vocabulary(self) -> int:
        return num_embeddings(self.tokenizer)

    @property
    def label_identity(self) -> dict[str, Any]:
        """The values on which the labels of the task's documents depend; {} without such labels."""
        return self.documents.identity(self.tokenizer, self.task) if self.documents else {}

    @functools.cached_property
    def identity(self) -> str:
        """The tokenizer's hash, which differs between tokenizers."""
        return hash_tokenizer(self.tokenizer, self.task)


def encode_texts(
    tokenizer: "PreTrainedTokenizerBase", texts: list[str], places: Sequence[str] = ()
) -> list[Encoded]:
    """Encode each string as one document: the tokenizer's begin token, if any, tokens, end token.

    A document without a target is returned empty. `places` names each string in error messages.
    """
    begin = [tokenizer.bos_token_id] if edges(tokenizer)[0][:1] == [tokenizer.bos_token_id] else []
    rows = encode(tokenizer, texts, places)["input_ids"]
    documents = (np.array([*begin, *row, tokenizer.eos_token_id], dtype=np.int64) for row in rows)
    return [_label_tokens(ids, np.ones(len(ids), dtype=bool)) for ids in documents]


def encode_sequences(
    tokenizer: "PreTrainedTokenizerBase", texts: list[str], seq_len: int, places: Sequence[str] = ()
) -> list[Encoded]:
    """Encode each string as documents of up to `seq_len` tokens in which every token is a target.

    Every document is enclosed in the tokenizer's edge tokens, such as [CLS] and [SEP].
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
    tokenizer: "PreTrainedTokenizerBase", chats: list[Content], places: list[str], seq_len: int
) -> list[Encoded]:
    """Encode each chat as one document of at most `seq_len` tokens, with loss on the answers.

    An answer is everything that the template writes in an assistant turn. `places` names each chat
    in error messages. A chat without a target is returned empty. Raise `ConfigError` for a
    malformed chat.
    """
    return encode_chats_with_counts(ChatTemplate(tokenizer), chats, places, seq_len)[0]


def encode_chats_with_counts(
    template: ChatTemplate, chats: list[Content], places: list[str], seq_len: int
) -> tuple[list[Encoded], ChatCounts]:
    """Encode chats as `encode_chats` does, and count the chats and their lost text."""
    rendered, counts = [], ChatCounts(rows=len(chats))
    for messages, tools, place in _parse_chats(template, chats, places):
        text, answers = template.answers(messages, tools, place)
        rendered.append(
            (
                text,
                [span for number, span in answers if number < 0 or is_trained_on(messages[number])],
            )
        )
        counts += _count_answer_text(messages, text, answers)
        keys = unknown_keys(messages, template.mentions)
        if tools and not template.mentions("tools"):
            keys.add(TOOLS_OF_ROW)
        counts += ChatCounts(keys=tuple(keys))
    forms = {chat.get("form", OPENAI) if isinstance(chat, dict) else OPENAI for chat in chats}
    counts += ChatCounts(forms=tuple(forms))
    texts = [text for text, _ in rendered]
    batch = encode(template.tokenizer, texts, places, return_offsets_mapping=True)
    encoded = []
    for (_, answers), ids, offsets in zip(
        rendered, batch["input_ids"], batch["offset_mapping"], strict=True
    ):
        wanted = answer_token_mask(offsets, answers)
        encoded.append(_label_tokens(np.array(ids, dtype=np.int64)[:seq_len], wanted[:seq_len]))
        counts += ChatCounts(truncated=int(len(ids) > seq_len), barren=int(not len(encoded[-1][0])))
    return encoded, counts


def answer_token_mask(offsets: list[tuple[int, int]], answers: list[CharSpan]) -> np.ndarray:
    """Return a mask of the tokens that contain a character of an answer, (n,) bool.

    `offsets` contains the tokens' character spans.
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


def _parse_chats(
    template: ChatTemplate, chats: list[Content], places: list[str]
) -> list[tuple[list[Message], list[Any] | None, str]]:
    """Return (messages, tools, place) of each chat.

    Raise `ConfigError` for a malformed chat. The error for an unknown role lists all roles in the
    chats.
    """
    found, unknown, met = [], None, set[str]()
    for chat, place in zip(chats, places, strict=True):
        messages, tools = (
            (chat["messages"], chat.get("tools")) if isinstance(chat, dict) else (chat, None)
        )
        try:
            found.append((parse_messages(messages, place, template.roles), tools, place))
            met |= {message["role"] for message in found[-1][0]}
        except UnknownRole as problem:
            unknown, met = unknown or problem, met | problem.met
    if unknown:
        raise UnknownRole(unknown.place, unknown.role, met)
    return found


def _count_answer_text(
    messages: list[Message], text: str, answers: list[tuple[int, CharSpan]]
) -> ChatCounts:
    """Count the characters in trained answers, and the characters that the template drops from
    them.
    """
    said = dropped = 0
    spans = {number: span for number, span in answers if number >= 0}
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or not is_trained_on(message):
            continue
        written = text[slice(*spans[number])] if number in spans else text
        for piece in answer_texts(message):
            stripped = piece.strip()
            said += len(stripped)
            if stripped not in written:
                lines = filter(None, map(str.strip, re.split(r"\n|</?[^<>\s]+>", stripped)))
                dropped += sum(len(line) for line in lines if line not in written)
    return ChatCounts(answer_characters=said, dropped_characters=dropped)


def _label_tokens(ids: np.ndarray, is_target: np.ndarray) -> Encoded:
    """Label each id with the next token if that token is a target.

    Return empty arrays if no token is a target.
    """
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    labels[:-1] = np.where(is_target[1:], ids[1:], IGNORE)
    return (ids, labels) if is_target[1:].any() else (ids[:0], labels[:0])
