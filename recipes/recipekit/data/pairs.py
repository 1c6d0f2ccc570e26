"""Pairs of answers to one prompt, a chosen and a rejected one: read in the forms in which they are
published, made into tokens, and drawn.
"""

import functools
import hashlib
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..spec.refusal import Refusal, sentences
from ..spec.task import IGNORE, MicroBatch, Row
from .chat_rows import JSON_CHAT, TOOLS, is_json_chat, learned, messages_of, tools_of, without_nulls
from .chat_spans import UNRENDERABLE, ChatTemplate
from .processors import encode, fitting_tokenizer, num_embeddings, pad_id
from .request import Request
from .tokenizer_identity import identity_of

# tokens: the rows of a micro-batch are as long as its longest answer, in such steps
ROUNDED_TO = 64
NUM_DRAWN = 8000
Messages = list[dict[str, Any]]


class References:
    """Holds what the start of a run says of pairs: for the key of each the log-probabilities of its
    two answers.

    A micro-batch may ask for pairs that it does not hold until it is `complete`.
    """

    def __init__(self) -> None:
        # keys, sorted; values
        self.table, self.complete = (np.empty(0, np.uint64), np.empty((0, 2), np.float32)), False

    def add(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Adds those of further pairs, (N,) uint64 and (N, 2) fp32; of a pair that it holds already
        the values stay.
        """
        held, of_held = self.table
        keys, first = np.unique(np.concatenate([held, keys]), return_index=True)
        # at once: a thread looks up others
        self.table = keys, np.concatenate([of_held, values])[first]

    def __call__(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Looks up pairs: (their values, NaN where it holds none, (N, 2) fp32; whether it holds
        them, (N,) bool).
        """
        known, of_known = self.table
        place = np.searchsorted(known, keys)
        held, inside = np.zeros(len(keys), bool), place < len(known)
        held[inside] = known[place[inside]] == keys[inside]
        values = np.full((len(keys), 2), np.nan, np.float32)
        values[held] = of_known[place[held]]
        return values, held


@dataclass(frozen=True)
class Pairs:
    """Makes pairs into tokens.

    `whole_rows`: every micro-batch has rows of `seq_len` tokens, as the stages of a pipeline want
    it.
    """

    tokenizer: Any
    seq_len: int
    whole_rows: bool
    day: date | None = None  # that a chat template writes as today's
    references: References = field(default_factory=References)

    @property
    def pad(self) -> int:
        return pad_id(self.tokenizer)

    @functools.cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.day)

    def save_pretrained(self, folder: str | Path) -> None:
        self.tokenizer.save_pretrained(folder)


def identity(pairs: Pairs, task: str) -> dict[str, Any]:
    """Return the part of a data stream's identity that its tokenizer decides."""
    return {"tokenizer": identity_of(pairs.tokenizer, task)}


def pairs_of(request: Request, model_config: dict[str, Any]) -> Pairs:
    """Makes what reads the pairs of a run.

    Raises `Refusal` for a tokenizer that does not fit the model.
    """
    return Pairs(fitting_tokenizer(request, model_config), request.seq_len, request.pp > 1)


# From a row to tokens
# ---------------------------------------------------------------------------------------------


def answers_of(
    row: Row, roles: Collection[str] = ()
) -> tuple[str | Messages, str | Messages, str | Messages]:
    """Finds (prompt, chosen answer, rejected answer) of a row, all texts or all lists of messages.

    Without a prompt, or where the answers are chats and the prompt is a text that they begin with,
    the prompt is what both begin with; a text as prompt of chats that begin with the answer is a
    user's message. `roles` are accepted in addition to `ROLES`. Raises ValueError.
    """
    chosen, rejected, prompt = (
        _content("chosen", row["chosen"], roles),
        _content("rejected", row["rejected"], roles),
        row.get("prompt"),
    )
    if type(chosen) is not type(rejected):
        raise ValueError("its two answers must both be text or both be lists of messages")
    prompt = None if prompt is None else _content("prompt", prompt, roles)
    if chosen == rejected:
        raise ValueError("its chosen and rejected answers are identical")
    if isinstance(chosen, str) and isinstance(prompt, list):
        raise ValueError("its prompt is a list of messages, but its answers are text")
    if prompt is not None and type(prompt) is type(chosen):
        return prompt, chosen, rejected
    shared = sum(
        1
        for _ in itertools.takewhile(
            lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)
        )
    )
    if isinstance(chosen, str) and chosen[:shared].endswith(" "):
        shared -= 1  # tokens begin with their space
    if isinstance(prompt, str) and not shared:
        return [{"role": "user", "content": prompt}], chosen, rejected
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _content(name: str, value: Any, roles: Collection[str]) -> str | Messages:
    if is_json_chat(value):
        raise ValueError(sentences(f"its {name} contains {JSON_CHAT[0]}", JSON_CHAT[1]))
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ValueError(
            f"its {name} must be text or a list of messages, not {type(value).__name__}"
            f" {str(value)[:40]!r}"
        )
    try:
        return messages_of(value, f"its {name}", roles) if value else []
    except Refusal as problem:
        raise ValueError(
            problem.problems[0].rule.replace("a message", f"a message of its {name}", 1)
        ) from problem


def encode_pair(pairs: Pairs, row: Row) -> tuple[int, list[int], list[int]]:
    """Encodes a row: (tokens of the prompt, ids of prompt and chosen answer, ids of prompt and
    rejected answer).

    An answer begins where prompt and answer together have other tokens than the prompt alone; an
    answer that is a text ends with the end token. Raises ValueError for a row that is too long, or
    that no answer can be told of.
    """
    tokenizer = pairs.tokenizer
    prompt, chosen, rejected = answers_of(
        row, pairs.template.roles if tokenizer.chat_template else ()
    )
    if isinstance(prompt, str):
        begin, *whole = _encoded_texts(tokenizer, prompt, str(chosen), str(rejected))
    else:
        begin, *whole = _encoded_chats(pairs.template, prompt, list(chosen), list(rejected), row)

    if (highest := max(map(max, whole), default=0)) >= (count := num_embeddings(tokenizer)):
        raise ValueError(
            f"it contains token {highest}, but the model has embeddings for 0 to {count - 1} only."
            " Add more with resize_token_embeddings"
        )
    start = min(_common(begin, ids) for ids in whole)
    _check_answers(whole, start, pairs.seq_len)
    return start, whole[0], whole[1]


def _encoded_texts(tokenizer: Any, prompt: str, chosen: str, rejected: str) -> list[list[int]]:
    """Encode the prompt, and the prompt with each answer; an answer ends with the end token."""
    texts = [prompt, prompt + chosen, prompt + rejected]
    begin, *whole = _tokens(tokenizer, texts, add_special_tokens=True)
    end = tokenizer.eos_token_id
    return [begin, *(ids if ids and ids[-1] == end else [*ids, end] for ids in whole)]


def _encoded_chats(
    template: ChatTemplate,
    prompt: Messages,
    chosen: list[Any],
    rejected: list[Any],
    row: Row,
) -> list[list[int]]:
    """Encode the prompt, and the prompt with each answer, with the tools of the row.

    Raises ValueError for messages that cannot be compared.
    """
    if not prompt:
        raise ValueError("its answers have no common prompt: their first messages already differ")
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not all(learned(message) for message in answer if isinstance(message, dict)):
            raise ValueError(
                f"its {name} answer has a message with weight 0 or train false, but a pair"
                " compares full answers"
            )
    return _rendered(template, [prompt, prompt + chosen, prompt + rejected], _tools_of(row))


def _check_answers(whole: list[list[int]], start: int, seq_len: int) -> None:
    """Raise ValueError if prompt and answer are too long together, if an answer has no token, or if
    both answers have the same ones.
    """
    if (longest := max(map(len, whole))) > seq_len:
        raise ValueError(
            f"it has {longest} tokens, more than seq_len = {seq_len}. Use --seq_len {longest}"
            " or more"
        )
    if min(map(len, whole)) <= max(start, 1):
        raise ValueError("one of its answers has no token to predict")
    if whole[0] == whole[1]:
        raise ValueError("its chosen and rejected answers have the same tokens")


def _tools_of(row: Row) -> list[Any] | None:
    try:
        return without_nulls(tools_of(row.get(TOOLS), "")) or None
    except Refusal as problem:
        raise ValueError(problem.problems[0].rule) from problem


def _rendered(template: ChatTemplate, chats: list[Any], tools: list[Any] | None) -> list[list[int]]:
    """Renders chats, the first of them up to where the answer begins, and encodes them."""
    tokenizer = template.tokenizer
    if not tokenizer.chat_template:
        raise ValueError("it contains messages, but the tokenizer has no chat template")
    try:
        texts = [
            template.render(chat, tools, prompt=number == 0) for number, chat in enumerate(chats)
        ]
    except UNRENDERABLE as error:
        raise ValueError(f"the chat template cannot render it: {error}") from error
    return _tokens(tokenizer, texts)


def _tokens(tokenizer: Any, texts: list[str], **options: Any) -> list[list[int]]:
    """Encode the texts of a row. Raises ValueError for a text that the tokenizer cannot encode."""
    try:
        return encode(tokenizer, texts, **options)["input_ids"]
    except Refusal as problem:
        raise ValueError(problem.problems[0].rule) from problem


def _common(one: list[int], other: list[int]) -> int:
    return sum(
        1
        for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))
    )


# Micro-batches
# --------------------------------------------------------------------------------------------------


def collate_pairs(pairs: Pairs, rows: list[Row | None], keys: list[int] | None) -> MicroBatch:
    """Makes {"input_ids", "labels", "position_ids"}, each (B, 2, T) int64: of each pair the chosen
    and the rejected answer.

    labels[b, a, t] is the token that follows if it belongs to the answer, or IGNORE. Nothing is
    drawn. Raises ValueError for a row that cannot be used.
    """
    found = [None if row is None else encode_pair(pairs, row) for row in rows]
    longest = max((len(ids) for pair in found if pair for ids in pair[1:]), default=1)
    length = (
        pairs.seq_len
        if pairs.whole_rows
        else min(pairs.seq_len, -(-longest // ROUNDED_TO) * ROUNDED_TO)
    )
    ids = np.full((len(rows), 2, length), pairs.pad, dtype=np.int64)
    labels = np.full(ids.shape, IGNORE, dtype=np.int64)
    for number, pair in enumerate(found):
        for answer, tokens in enumerate(pair[1:] if pair else ()):
            ids[number, answer, : len(tokens)] = tokens
            start = max(pair[0], 1) if pair else 1
            labels[number, answer, start - 1 : len(tokens) - 1] = tokens[start:]
    positions = torch.arange(length).repeat(len(rows), 2, 1)
    return {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "position_ids": positions,
    }


def keys_of(batch: MicroBatch) -> np.ndarray:
    """Makes the key of each pair, (B,) uint64, from its tokens and where its answers begin: the
    same for any padding; 0 for a row that only fills up.
    """
    ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
    found = []
    for row, targets in zip(ids, labels, strict=True):
        digest = hashlib.blake2b(digest_size=8)
        for answer, wanted in zip(row, targets, strict=True):
            places = np.flatnonzero(wanted != IGNORE)
            if len(places):
                digest.update(places[[0, -1]].tobytes() + answer[: places[-1] + 2].tobytes())
        found.append(int.from_bytes(digest.digest(), "big") if (targets != IGNORE).any() else 0)
    return np.array(found, dtype=np.uint64)


# The built-in pairs
# -----------------------------------------------------------------------------------------------


def drawn(number: int) -> Row:
    """Draws a question which of two numbers is larger, with the right answer and the wrong one."""
    one, other = np.random.default_rng(number).integers(10, 100, 2).tolist()
    answers = "yes", "no"
    chosen, rejected = answers if one > other else reversed(answers)
    return {"prompt": f"{one} > {other}? ", "chosen": chosen, "rejected": rejected}
