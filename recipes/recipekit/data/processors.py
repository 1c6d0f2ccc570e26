"""Tokenizers that are loaded from the hub or from a folder, or made in code.

A tokenizer encodes a string, and may add tokens before and after the string's tokens.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..architectures.lookup import local_tokenizer
from ..architectures.shrink import BYTE_VOCAB
from ..architectures.small_files import without_bom
from ..spec.errors import config_error
from ..spec.hub import hub_error, hub_is_unreachable, snapshot_of
from ..spec.task_specs import TASKS
from .request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPECIAL = [
    "<|endoftext|>",
    "<|begin|>",
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|reserved_0|>",
    "<|reserved_1|>",
    "<|reserved_2|>",
]

_MASK = "<|reserved_0|>"

_CHATML = """\
{%- for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""


def load_tokenizer(
    model: str, tokenizer: str = "", masked: bool = False, revision: str = ""
) -> Any:
    """Load the tokenizer that `tokenizer` specifies: `bytes`, a hub id or a folder.

    "" specifies the model's own tokenizer. `revision` is the revision of the model, and applies
    only to the model's own tokenizer. If `masked` is True, the tokenizer `bytes` has a mask token
    and adds tokens around each string. If a folder has a .gguf file but no tokenizer files, the
    tokenizer is read from the .gguf file. Raise `ConfigError` if there is no tokenizer.
    """
    if tokenizer == "bytes":
        return byte_tokenizer(masked)
    flag, name = ("--tokenizer", tokenizer) if tokenizer else ("--model", model)
    options: dict[str, Any] = (
        {"revision": revision} if revision and tokenizer in ("", model) else {}
    )
    folder = None
    if (found := local_tokenizer(model, tokenizer)) is not None:
        name, options = (
            (str(found.parent), {"gguf_file": found.name}) if found.is_file() else (str(found), {})
        )
        folder = None if options else found
    elif hub_is_unreachable():
        options["local_files_only"] = True
    try:
        with without_bom(folder) if folder else contextlib.nullcontext(name) as source:
            # the default, None, asks on a terminal whether remote code may run
            loaded = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False, **options)
        loaded.name_or_path = name
        return loaded
    except (OSError, ImportError) as error:
        raise hub_error(f"{flag} {name}", name, error) from error
    except Exception as error:
        # For a damaged file, transformers and tokenizers raise errors of any type, even Exception.
        if found is None:
            raise hub_error(f"{flag} {name}", name, error) from error
        text = (str(error).strip() or repr(error)).splitlines()[0]
        raise config_error(
            f"{flag} {name}",
            f"its tokenizer's files cannot be read: {type(error).__name__}: {text}",
            "download them again",
        ) from error


def has_local_tokenizer(model: str, tokenizer: str) -> bool:
    """Return True if a tokenizer requires no file from the hub.

    Raise `ConfigError` for a folder without tokenizer files.
    """
    return tokenizer == "bytes" or local_tokenizer(model, tokenizer) is not None


def fitting_tokenizer(request: Request, model_config: dict[str, Any]) -> Any:
    """Load a run's tokenizer.

    The attribute `num_embeddings` is set to the number of tokens that have an embedding. The
    tokenizer may have more tokens than the model has embeddings, provided that the data do not use
    these tokens.
    """
    tokenizer = load_tokenizer(
        request.model, request.tokenizer, request.masked, request.model_revision
    )
    text = model_config.get("text_config")
    vocabulary = model_config.get("vocab_size") or (
        text.get("vocab_size") if isinstance(text, dict) else None
    )
    tokenizer.num_embeddings = min(vocabulary or len(tokenizer), len(tokenizer))
    return tokenizer


def num_embeddings(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the number of tokens for which the model has an embedding."""
    return getattr(tokenizer, "num_embeddings", len(tokenizer))


def check_token(tokenizer: "PreTrainedTokenizerBase", token: int, where: str) -> None:
    """Raise `ConfigError` if `token`, the highest token id at `where`, has no embedding."""
    if token < (count := num_embeddings(tokenizer)):
        return
    known = (
        f"the tokenizer has {len(tokenizer)} tokens, but the model has embeddings for 0 to"
        f" {count - 1}"
    )
    fix = (
        f"call resize_token_embeddings({len(tokenizer)}) of the model, save it, and use that"
        " folder, or use another --tokenizer"
    )
    raise config_error(
        where, f"contains token {token} ({tokenizer.convert_ids_to_tokens(token)!r}): {known}", fix
    )


def tokenizer_here(model: str, tokenizer: str, revision: str) -> str | None:
    """Return the `--tokenizer` value that loads a run's tokenizer without the hub.

    Return None if the tokenizer is not on this machine.
    """
    if tokenizer == "bytes" or local_tokenizer(model, tokenizer) is not None:
        return tokenizer
    snapshot = snapshot_of(tokenizer) if tokenizer else snapshot_of(model, revision)
    return str(snapshot) if snapshot and (snapshot / "tokenizer_config.json").is_file() else None


def byte_tokenizer(masked: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per UTF-8 byte and a few special tokens.

    The tokenizer has `BYTE_VOCAB` tokens in total, is lossless for any text, and requires no file.
    If `masked` is True, one special token is the mask token, and every text begins and ends with a
    special token, as in BERT. The token ids do not depend on `masked`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(
            vocab={character: number for number, character in enumerate(alphabet)}, merges=[]
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    eos, bos, pad, *rest = _SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        bos_token=bos,
        pad_token=pad,
        extra_special_tokens=rest,
        clean_up_tokenization_spaces=False,
    )
    if masked:
        tokenizer.mask_token, tokenizer.cls_token, tokenizer.sep_token = _MASK, bos, eos
        begin, end = ((token, tokenizer.convert_tokens_to_ids(token)) for token in (bos, eos))
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A {eos}", special_tokens=[begin, end]
        )
    else:
        tokenizer.chat_template = _CHATML
    assert len(tokenizer) == BYTE_VOCAB
    return tokenizer


def pad_id(tokenizer: Any) -> int:
    """Return the id of the padding token, which has no loss and which no token attends to."""
    own = tokenizer.pad_token_id
    return own if own is not None and own < num_embeddings(tokenizer) else tokenizer.eos_token_id


def encode(
    tokenizer: "PreTrainedTokenizerBase",
    texts: list[str],
    places: Sequence[str] = (),
    **options: object,
) -> Any:
    """Encode strings without the tokens that the tokenizer adds around each string.

    `places` names each string in error messages. Raise `ConfigError` for a string that the
    tokenizer cannot encode.
    """
    options = {
        "add_special_tokens": False,
        "return_attention_mask": False,
        "verbose": False,
    } | options
    found, problem = _attempt(tokenizer, texts, options)
    if problem is None:
        return found
    alone = (
        place
        for text, place in zip(texts, places, strict=False)
        if _attempt(tokenizer, [text], options)[1]
    )
    rule = (
        "the tokenizer cannot encode part of this text and has no token for unknown text"
        f" ({problem})"
    )
    raise config_error(
        next(alone, "--dataset"),
        rule,
        "use a tokenizer with an unknown token, correct the row, or leave it out (--bad_rows skip)",
    )


def _attempt(
    tokenizer: "PreTrainedTokenizerBase", texts: list[str], options: dict[str, Any]
) -> tuple[Any, Exception | None]:
    """Return (encoded strings, None), or (None, error) if a string cannot be tokenized.

    tokenizers 0.22 raises a plain `Exception` for an unknown word if the model has no unknown
    token.
    """
    try:
        return tokenizer(texts, **options), None
    except Exception as error:
        if type(error) is not Exception:
            raise
        return None, error


def edges(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer adds before and after a string."""
    for text in _samples(tokenizer):
        bare, _ = _attempt(tokenizer, [text], {"add_special_tokens": False, "verbose": False})
        if bare is None or not (own := bare["input_ids"][0]):
            continue
        whole = tokenizer(text, verbose=False)["input_ids"]
        for start in range(len(whole) - len(own) + 1):
            if whole[start : start + len(own)] == own:
                return whole[:start], whole[start + len(own) :]
    return [], []


def _samples(tokenizer: Any) -> Iterator[str]:
    """Yield the strings of a tokenizer's tokens.

    Special tokens are yielded last, because a tokenizer may also add them around strings.
    """
    special = set(tokenizer.all_special_ids)
    plain = (number for number in range(len(tokenizer)) if number not in special)
    for number in itertools.chain(plain, sorted(special)):
        yield tokenizer.decode([number])


def check_edges(edges: tuple[list[int], list[int]], seq_len: int) -> None:
    """Raise `ConfigError` if the tokens added around a string fill an entire row."""
    if seq_len <= (around := sum(map(len, edges))):
        raise config_error(
            f"seq_len = {seq_len}",
            f"the tokenizer adds {around} special tokens to each text, which leaves no room for the"
            " text",
            f"use --seq_len {around + 1} or more",
        )


def check_tokenizer(tokenizer: Any, task: str) -> None:
    """Raise `ConfigError` if the tokenizer lacks a feature that `task` requires."""
    if TASKS[task].masked:
        if tokenizer.mask_token_id is None or pad_id(tokenizer) is None:
            missing = "mask token" if tokenizer.mask_token_id is None else "padding token"
            raise config_error(
                "--tokenizer",
                f"has no {missing}, but this task requires one",
                "use the tokenizer of a masked language model, or bytes",
            )
        check_token(tokenizer, tokenizer.mask_token_id, "mask_token of --tokenizer")
        return
    if TASKS[task].labels_in_place:
        if pad_id(tokenizer) is None:
            raise config_error(
                "--tokenizer",
                "has no padding token, but this task requires one",
                "use another tokenizer, or bytes",
            )
        return
    if tokenizer.eos_token_id is None:
        raise config_error(
            "--tokenizer",
            "has no end-of-text token to separate documents",
            "use the tokenizer of a causal language model",
        )
    if TASKS[task].chats and not tokenizer.chat_template:
        raise config_error(
            "--tokenizer",
            "has no chat template, but task sft requires one",
            "use the tokenizer of a chat model, or bytes",
        )
    if TASKS[task].chats and not tokenizer.is_fast:
        raise config_error(
            "--tokenizer",
            "must be a fast tokenizer: a slow one does not report the text positions of its tokens",
            "use a tokenizer with a tokenizer.json",
        )
