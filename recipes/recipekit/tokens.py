"""Tokenizers, and what they make of a document: token ids, and labels that say which tokens are trained on."""

import contextlib
import functools
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from .architecture import is_hub_id, local_tokenizer
from .recipe import Recipe
from .refusal import Refusal, refuse

IGNORE = -100  # a label that carries no loss
HUB_ATTEMPTS, HUB_PATIENCE = 3, 5.0  # connections, a second apart, of so many seconds at most, before the hub counts as away

_SPECIAL = ["<|endoftext|>", "<|begin|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<|reserved_0|>", "<|reserved_1|>", "<|reserved_2|>"]
BYTE_VOCAB = 256 + len(_SPECIAL)  # 264 divides by 2, 3, 4, 6 and 8, so tensor parallel degrees can cut it

_CHATML = """\
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""

Encoded = tuple[np.ndarray, np.ndarray]  # ids (n,) int64; labels (n,) int64: the token that follows, or IGNORE


def load_tokenizer(recipe: Recipe, tiny: bool = False) -> Any:
    """The tokenizer that `recipe.tokenizer` names: `bytes`, a hub id or a folder; empty is the model's own. `tiny` means `bytes`.

    A folder without tokenizer files but with a .gguf file gives the one inside that. Raises `Refusal` when there is none.
    """
    if tiny or recipe.tokenizer == "bytes":
        return byte_tokenizer()
    flag, name = ("--tokenizer", recipe.tokenizer) if recipe.tokenizer else ("--model", recipe.model)
    options = {}
    if (found := local_tokenizer(recipe)) is not None:
        name, options = (str(found.parent), {"gguf_file": found.name}) if found.is_file() else (str(found), {})
    elif hub_is_away():
        options = {"local_files_only": True}
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError) as error:
        raise hub_refusal(f"{flag} {name}", name, error) from error


@functools.cache
def hub_is_away() -> bool:
    """True if no connection to the hub comes about: its own client finds that out in a minute of retries for each file (huggingface_hub 2.4)."""
    hub = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or {hub.scheme, "all"} & urllib.request.getproxies().keys():  # which a proxy reaches, if anything does
        return constants.HF_HUB_OFFLINE
    for attempt in range(HUB_ATTEMPTS):
        time.sleep(min(attempt, 1))
        with contextlib.suppress(OSError):
            socket.create_connection((hub.hostname or "", hub.port or {"http": 80}.get(hub.scheme, 443)), HUB_PATIENCE).close()
            return False
    return True


def hub_refusal(where: str, name: str, error: BaseException, kind: str = "") -> Refusal:
    """Why `name` could not be had from the hub or a folder, as a refusal; `kind` is the page's prefix, `datasets/` for a dataset."""
    page = f"https://huggingface.co/{kind}{name}"
    chain: list[BaseException] = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    text = " ".join(f"{error}".split("\n")[:2]).strip()
    names = {type(link).__name__ for link in chain}
    if Path(name).expanduser().exists() or not is_hub_id(name):
        exists = Path(name).expanduser().exists()
        return refuse(where, text if exists else "there is no such folder, and it is not a hub id (ORG/NAME)", "check the path")
    if any(isinstance(link, GatedRepoError) for link in chain) or "gated" in text:
        return refuse(where, "is gated, and this machine is not logged in with an account that may read it", f"ask for access at {page}, then `hf auth login`")
    if any(isinstance(link, RepositoryNotFoundError) for link in chain) or "DatasetNotFoundError" in names:
        return refuse(where, f"does not exist at {page}, or is private or gated", "check the name; if it is right, `hf auth login`")
    if names & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError"}:
        fix = f"go online (and leave HF_HUB_OFFLINE unset), or give a local folder; if {page} asks for it, `hf auth login`"
        return refuse(where, "is not in the local cache, and the hub cannot be reached", fix)
    return refuse(where, text, f"see {page}")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte and a few special tokens: `BYTE_VOCAB` in all, lossless for any text, made without a file."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    eos, bos, pad, *rest = _SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, bos_token=bos, pad_token=pad, extra_special_tokens=rest, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = _CHATML
    assert len(tokenizer) == BYTE_VOCAB
    return tokenizer


def pad_id(tokenizer: Any) -> int:
    """The token that fills a row; it never carries loss, and no other token attends to it."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


def check_tokenizer(tokenizer: Any, task: str) -> None:
    """Raises `Refusal` if the tokenizer lacks what `task` needs."""
    if tokenizer.eos_token_id is None:
        raise refuse("--tokenizer", "has no end-of-text token, which separates documents", "use the tokenizer of a causal language model")
    if task == "sft" and not tokenizer.chat_template:
        raise refuse("--tokenizer", "has no chat template, which task sft needs", "use the tokenizer of a chat model, or bytes")
    if task == "sft" and not tokenizer.is_fast:
        raise refuse("--tokenizer", "is a slow one, which cannot say where its tokens lie in the text", "use a fast tokenizer (tokenizer.json)")


def encode_texts(tokenizer: Any, texts: list[str]) -> list[Encoded]:
    """Each text as one document: begin token if the tokenizer adds one, tokens, end token. A document without a target comes back empty."""
    with_special = tokenizer("a")["input_ids"]
    begin = [tokenizer.bos_token_id] if with_special[0] == tokenizer.bos_token_id else []
    rows = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    documents = (np.array([*begin, *row, tokenizer.eos_token_id], dtype=np.int64) for row in rows)
    return [_document(ids, np.ones(len(ids), dtype=bool)) for ids in documents]


def encode_chats(tokenizer: Any, chats: list[list[dict[str, Any]]], places: list[str], seq_len: int) -> list[Encoded]:
    """Each chat as one document of at most `seq_len` tokens, loss on the assistant's answers and the end-of-turn tokens after them.

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
    """ids with the labels of their next tokens, those only that are `wanted`; empty if none is."""
    labels = np.full(len(ids), IGNORE, dtype=np.int64)
    labels[:-1] = np.where(wanted[1:], ids[1:], IGNORE)
    return (ids, labels) if wanted[1:].any() else (ids[:0], labels[:0])


def render_chat(tokenizer: Any, messages: list[dict[str, Any]], place: str) -> tuple[str, list[tuple[int, int]]]:
    """The chat as text, and the (start, end) of each assistant answer in it.

    Found without help from the template (`{% generation %}` is missing from most): an answer is what changes in the text
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
    """The message without the empty entries that Parquet adds. Raises `Refusal` if it has no role or no text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        raise refuse(place, f"a message must hold the strings 'role' and 'content', this is {str(message)[:60]}", "convert the rows to that form")
    return {key: value for key, value in message.items() if value is not None}


def _common_prefix(one: str, other: str) -> int:
    """The number of leading characters that are equal."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
