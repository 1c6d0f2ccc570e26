"""Preference pairs: a chosen and a rejected answer to one prompt.

The module reads the published formats of pairs, encodes pairs, and generates the built-in pairs.
"""

import functools
import hashlib
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..spec.errors import ConfigError, sentences
from ..spec.task import IGNORE, DatasetRow, MicroBatch
from .chat_rows import (
    JSON_CHAT,
    TOOLS_COLUMN,
    is_json_chat,
    is_trained_on,
    parse_messages,
    parse_tools,
    without_nulls,
)
from .chat_spans import RENDER_ERRORS, ChatTemplate
from .processors import encode, fitting_tokenizer, num_embeddings, pad_id
from .request import Request
from .tokenizer_identity import hash_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# in tokens: a micro-batch's rows are padded to the length of the longest answer, rounded up to a
# multiple of this number
LENGTH_MULTIPLE = 64
NUM_BUILTIN_PAIRS = 8000
Messages = list[dict[str, Any]]


class ReferenceLogprobs:
    """Reference log-probabilities: the key of a pair -> the values of the pair's two answers.

    A micro-batch may request a missing pair until the table is `complete`.
    """

    def __init__(self) -> None:
        # sorted keys; values
        self.table, self.complete = (np.empty(0, np.uint64), np.empty((0, 2), np.float32)), False

    def add(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Add the values of more pairs, (N,) uint64 and (N, 2) fp32.

        The values of pairs that are already in the table do not change.
        """
        held, of_held = self.table
        keys, first = np.unique(np.concatenate([held, keys]), return_index=True)
        # one assignment, because another thread looks up pairs
        self.table = keys, np.concatenate([of_held, values])[first]

    def __call__(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look up pairs; return (values, found).

        values: (N, 2) fp32, NaN for a missing pair. found: (N,) bool.
        """
        known, of_known = self.table
        place = np.searchsorted(known, keys)
        held, inside = np.zeros(len(keys), bool), place < len(known)
        held[inside] = known[place[inside]] == keys[inside]
        values = np.full((len(keys), 2), np.nan, np.float32)
        values[held] = of_known[place[held]]
        return values, held


@dataclass(frozen=True)
class PairProcessor:
    """A tokenizer with the settings that the encoding of pairs needs.

    If `whole_rows` is True, every micro-batch has rows of `seq_len` tokens, as pipeline stages
    require.
    """

    tokenizer: "PreTrainedTokenizerBase"
    seq_len: int
    whole_rows: bool
    day: date | None = None  # the date that a chat template writes as today's date
    references: ReferenceLogprobs = field(default_factory=ReferenceLogprobs)

    @property
    def pad(self) -> int:
        return pad_id(self.tokenizer)

    @functools.cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.day)

    def save_pretrained(self, folder: str | Path) -> None:
        self.tokenizer.save_pretrained(folder)


def pair_identity(pairs: PairProcessor, task: str) -> dict[str, Any]:
    """Return the part of a data stream's identity that depends on the tokenizer."""
    return {"tokenizer": hash_tokenizer(pairs.tokenizer, task)}


def make_pair_processor(request: Request, model_config: dict[str, Any]) -> PairProcessor:
    """Return the processor for a run's pairs.

    Raise `ConfigError` for a tokenizer that does not fit the model.
    """
    return PairProcessor(fitting_tokenizer(request, model_config), request.seq_len, request.pp > 1)


# From a row to tokens
# ---------------------------------------------------------------------------------------------


def parse_pair(
    row: DatasetRow, roles: Collection[str] = ()
) -> tuple[str | Messages, str | Messages, str | Messages]:
    """Return a row's (prompt, chosen answer, rejected answer): all strings or all message lists.

    If the row has no prompt, the prompt is the common prefix of both answers. This rule also
    applies if the answers are chats that begin with a string prompt. If such chats begin with the
    answer instead, the string prompt becomes a user message. `roles` are accepted in addition to
    `ROLES`. Raise ValueError for a row that is not a pair.
    """
    chosen, rejected, prompt = (
        _text_or_messages("chosen", row["chosen"], roles),
        _text_or_messages("rejected", row["rejected"], roles),
        row.get("prompt"),
    )
    if type(chosen) is not type(rejected):
        raise ValueError("its two answers must both be text or both be lists of messages")
    prompt = None if prompt is None else _text_or_messages("prompt", prompt, roles)
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
        shared -= 1  # a token begins with its leading space
    if isinstance(prompt, str) and not shared:
        return [{"role": "user", "content": prompt}], chosen, rejected
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _text_or_messages(name: str, value: object, roles: Collection[str]) -> str | Messages:
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
        return parse_messages(value, f"its {name}", roles) if value else []
    except ConfigError as problem:
        raise ValueError(
            problem.problems[0].rule.replace("a message", f"a message of its {name}", 1)
        ) from problem


def encode_pair(pairs: PairProcessor, row: DatasetRow) -> tuple[int, list[int], list[int]]:
    """Encode a row: (number of prompt tokens, ids of prompt + chosen, ids of prompt + rejected).

    An answer begins at the first token that differs from the tokens of the prompt alone. A string
    answer ends with the end token. Raise ValueError for a row that is too long or whose answers
    cannot be distinguished.
    """
    tokenizer = pairs.tokenizer
    prompt, chosen, rejected = parse_pair(
        row, pairs.template.roles if tokenizer.chat_template else ()
    )
    if isinstance(prompt, str):
        begin, *whole = _encode_text_pair(tokenizer, prompt, str(chosen), str(rejected))
    else:
        begin, *whole = _encode_chat_pair(pairs.template, prompt, list(chosen), list(rejected), row)

    if (highest := max(map(max, whole), default=0)) >= (count := num_embeddings(tokenizer)):
        raise ValueError(
            f"it contains token {highest}, but the model has embeddings for 0 to {count - 1} only."
            " Add more with resize_token_embeddings"
        )
    start = min(_common_token_count(begin, ids) for ids in whole)
    _check_answers(whole, start, pairs.seq_len)
    return start, whole[0], whole[1]


def _encode_text_pair(tokenizer: Any, prompt: str, chosen: str, rejected: str) -> list[list[int]]:
    """Encode the prompt, and the prompt followed by each answer and the end token."""
    texts = [prompt, prompt + chosen, prompt + rejected]
    begin, *whole = _encode_pair_texts(tokenizer, texts, add_special_tokens=True)
    end = tokenizer.eos_token_id
    return [begin, *(ids if ids and ids[-1] == end else [*ids, end] for ids in whole)]


def _encode_chat_pair(
    template: ChatTemplate,
    prompt: Messages,
    chosen: list[Any],
    rejected: list[Any],
    row: DatasetRow,
) -> list[list[int]]:
    """Encode the prompt, and the prompt followed by each answer, with the row's tools.

    Raise ValueError for messages that cannot be compared.
    """
    if not prompt:
        raise ValueError("its answers have no common prompt: their first messages already differ")
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not all(is_trained_on(message) for message in answer if isinstance(message, dict)):
            raise ValueError(
                f"its {name} answer has a message with weight 0 or train false, but a pair"
                " compares full answers"
            )
    return _render_and_encode(
        template, [prompt, prompt + chosen, prompt + rejected], _parse_pair_tools(row)
    )


def _check_answers(sequences: list[list[int]], start: int, seq_len: int) -> None:
    """Raise ValueError if prompt and answer exceed `seq_len`, or if an answer has no token.

    Also raise ValueError if both answers have the same tokens.
    """
    if (longest := max(map(len, sequences))) > seq_len:
        raise ValueError(
            f"it has {longest} tokens, more than seq_len = {seq_len}. Use --seq_len {longest}"
            " or more"
        )
    if min(map(len, sequences)) <= max(start, 1):
        raise ValueError("one of its answers has no token to predict")
    if sequences[0] == sequences[1]:
        raise ValueError("its chosen and rejected answers have the same tokens")


def _parse_pair_tools(row: DatasetRow) -> list[Any] | None:
    try:
        return without_nulls(parse_tools(row.get(TOOLS_COLUMN), "")) or None
    except ConfigError as problem:
        raise ValueError(problem.problems[0].rule) from problem


def _render_and_encode(
    template: ChatTemplate, chats: list[Any], tools: list[Any] | None
) -> list[list[int]]:
    """Render and encode chats; the first chat ends with the answer's generation prompt."""
    tokenizer = template.tokenizer
    if not tokenizer.chat_template:
        raise ValueError("it contains messages, but the tokenizer has no chat template")
    try:
        texts = [
            template.render(chat, tools, prompt=number == 0) for number, chat in enumerate(chats)
        ]
    except RENDER_ERRORS as error:
        raise ValueError(f"the chat template cannot render it: {error}") from error
    return _encode_pair_texts(tokenizer, texts)


def _encode_pair_texts(
    tokenizer: "PreTrainedTokenizerBase", texts: list[str], **options: Any
) -> list[list[int]]:
    """Encode a row's strings; raise ValueError for a string that the tokenizer cannot encode."""
    try:
        return encode(tokenizer, texts, **options)["input_ids"]
    except ConfigError as problem:
        raise ValueError(problem.problems[0].rule) from problem


def _common_token_count(one: list[int], other: list[int]) -> int:
    return sum(
        1
        for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))
    )


# Micro-batches
# --------------------------------------------------------------------------------------------------


def collate_pairs(
    pairs: PairProcessor, rows: list[DatasetRow | None], keys: list[int] | None
) -> MicroBatch:
    """Return {"input_ids", "labels", "position_ids"}, each (B, 2, T) int64.

    Index 0 of dimension 1 is the chosen answer, and index 1 is the rejected answer. labels[b, a, t]
    is the next token if that token belongs to the answer; otherwise IGNORE. The result is
    deterministic. Raise ValueError for a row that cannot be used.
    """
    found = [None if row is None else encode_pair(pairs, row) for row in rows]
    longest = max((len(ids) for pair in found if pair for ids in pair[1:]), default=1)
    length = (
        pairs.seq_len
        if pairs.whole_rows
        else min(pairs.seq_len, -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
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


def pair_keys(batch: MicroBatch) -> np.ndarray:
    """Return each pair's key, (B,) uint64, computed from its tokens and the start of its answers.

    The key does not depend on the padding. A fill-up row has the key 0.
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


def generate_pair(number: int) -> DatasetRow:
    """Generate a question that compares two numbers, with the correct and the wrong answer."""
    one, other = np.random.default_rng(number).integers(10, 100, 2).tolist()
    answers = "yes", "no"
    chosen, rejected = answers if one > other else reversed(answers)
    return {"prompt": f"{one} > {other}? ", "chosen": chosen, "rejected": rejected}
