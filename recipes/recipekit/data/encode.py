"""What a tokenizer makes of a document: token ids, and labels that say which tokens are trained on."""

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError

from ..refusal import refuse
from ..task import IGNORE
from ..tasks.facts import TASKS
from .processors import num_embeddings
from .source import Document

Encoded = tuple[np.ndarray, np.ndarray]  # ids (n,) int64; labels (n,) int64: the token that follows, or IGNORE


@dataclass(frozen=True)
class Encoder:
    """Makes tokens of documents."""

    tokenizer: Any
    task: str
    seq_len: int

    def __call__(self, documents: list[Document]) -> list[tuple[np.ndarray, np.ndarray]]:
        contents, places = [content for content, _ in documents], [place for _, place in documents]
        if not documents:
            return []
        if TASKS[self.task].masked:
            return encode_sequences(self.tokenizer, contents, self.seq_len)
        return encode_chats(self.tokenizer, contents, places, self.seq_len) if self.chats else encode_texts(self.tokenizer, contents)

    @property
    def chats(self) -> bool:
        return TASKS[self.task].chats

    @property
    def longest(self) -> int:
        """Returns the tokens at which documents end, since what is made of a text depends on that; 0 if they end nowhere."""
        return self.seq_len if self.chats or TASKS[self.task].masked else 0

    @functools.cached_property
    def vocabulary(self) -> int:
        return num_embeddings(self.tokenizer)

    @functools.cached_property
    def identity(self) -> str:
        """Hashes what the tokenizer makes of a text: another value for another tokenizer."""
        tokenizer = self.tokenizer
        own = tokenizer("Zürich 1_000\n\tif x != 'ß':")["input_ids"], len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id
        probe = [*own, tokenizer.chat_template if self.chats else None, *([edges(tokenizer)] if TASKS[self.task].masked else [])]
        return hashlib.blake2b(repr(probe).encode(), digest_size=8).hexdigest()


def encode_texts(tokenizer: Any, texts: list[str]) -> list[Encoded]:
    """Encodes each text as one document: begin token if the tokenizer adds one, tokens, end token. A document without a target comes back empty."""
    with_special = tokenizer("a")["input_ids"]
    begin = [tokenizer.bos_token_id] if with_special[0] == tokenizer.bos_token_id else []
    rows = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    documents = (np.array([*begin, *row, tokenizer.eos_token_id], dtype=np.int64) for row in rows)
    return [_document(ids, np.ones(len(ids), dtype=bool)) for ids in documents]


def encode_sequences(tokenizer: Any, texts: list[str], seq_len: int) -> list[Encoded]:
    """Encodes each text as documents of up to `seq_len` tokens, every one between the tokenizer's edges, such as [CLS] and [SEP]; each token is a target."""
    begin, end = edges(tokenizer)
    room = seq_len - len(begin) - len(end)
    rows = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    parts = (row[start : start + room] for row in rows for start in range(0, max(len(row), 1), room))
    documents = (np.array([*begin, *part, *end] if part else [], dtype=np.int64) for part in parts)
    return [(ids, ids) for ids in documents]


def edges(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Finds the tokens that a tokenizer puts before and behind a text."""
    bare, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    start = next(start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def encode_chats(tokenizer: Any, chats: list[list[dict[str, Any]]], places: list[str], seq_len: int) -> list[Encoded]:
    """Encodes each chat as one document of at most `seq_len` tokens, with loss on the assistant's answers and the end-of-turn tokens after them.

    `places` names each chat in messages. A chat without a target comes back empty. Raises `Refusal` for a malformed chat.
    """
    rendered = [render_chat(tokenizer, chat, place) for chat, place in zip(chats, places, strict=True)]
    texts = [text for text, _ in rendered]
    batch = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True, verbose=False)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    encoded = []
    for (text, answers), ids, offsets in zip(rendered, batch["input_ids"], batch["offset_mapping"], strict=True):
        wanted = np.zeros(len(ids), dtype=bool)
        token = 0
        for start, end in answers:
            while token < len(ids) and offsets[token][1] <= start:
                token += 1
            while token < len(ids) and offsets[token][0] < end:
                wanted[token] = True
                token += 1
            turn_end = token  # the end of the turn: white space, then one special token
            while turn_end < len(ids) and ids[turn_end] not in special and text[slice(*offsets[turn_end])].isspace():
                turn_end += 1
            if turn_end < len(ids) and ids[turn_end] in special:
                wanted[token : turn_end + 1] = True
                token = turn_end + 1
        encoded.append(_document(np.array(ids, dtype=np.int64)[:seq_len], wanted[:seq_len]))
    return encoded


def _document(ids: np.ndarray, wanted: np.ndarray) -> Encoded:
    """Labels each id with the next token where that is `wanted`; empty if no token is."""
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    labels[:-1] = np.where(wanted[1:], ids[1:], IGNORE)
    return (ids, labels) if wanted[1:].any() else (ids[:0], labels[:0])


def render_chat(tokenizer: Any, messages: list[dict[str, Any]], place: str) -> tuple[str, list[tuple[int, int]]]:
    """Renders the chat as text, and finds the (start, end) of each assistant answer in it.

    Answers are found without help from the template (`{% generation %}` is missing from most): an answer is what changes in the text
    when its message is replaced by a character that occurs nowhere. That holds for templates that strip an answer or
    drop its thoughts; it is checked that the part found is the end of the message, white space aside.
    """
    messages = [_message(message, place) for message in _as_list(messages, place)]
    text = _render(tokenizer, messages, place)
    mark = next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)
    answers: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        marked = _render(tokenizer, [*messages[:number], {**message, "content": mark}, *messages[number + 1 :]], place)
        start = _common_prefix(text, marked)
        end = len(text) - min(_common_prefix(text[::-1], marked[::-1]), len(text) - start)
        found, said = "".join(text[start:end].split()), "".join(message["content"].split())
        after_last = not answers or start >= answers[-1][1]
        if marked.count(mark) != 1 or not said.endswith(found) or bool(found) != bool(said) or not after_last:
            fix = "look at the row and the template: the answer's text must occur once, unchanged apart from white space at its ends"
            raise refuse(f"{place}, message {number + 1}", "the chat template changes this answer so that its tokens cannot be told", fix)
        answers.append((start, end))
    return text, answers


def _render(tokenizer: Any, messages: list[dict[str, Any]], place: str) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, TypeError, KeyError) as error:
        raise refuse(place, f"the chat template cannot render this chat: {error}", "check the roles and their order in the row") from error


def _as_list(messages: Any, place: str) -> list[Any]:
    if not isinstance(messages, list) or not messages:
        raise refuse(place, f"a chat must be a list of messages, this is {type(messages).__name__} {str(messages)[:40]!r}", "check --messages_field")
    return messages


def _message(message: Any, place: str) -> dict[str, Any]:
    """Drops the empty entries that Parquet adds to a message. Raises `Refusal` if it has no role or no text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        raise refuse(place, f"a message must hold the strings 'role' and 'content', this is {str(message)[:60]}", "convert the rows to that form")
    return {key: value for key, value in message.items() if value is not None}


def _common_prefix(one: str, other: str) -> int:
    """Counts the leading characters that are equal."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
