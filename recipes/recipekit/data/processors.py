"""Tokenizers: loaded from the hub or a folder, or made in code; the tokens of a text, and those put
around it.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..architectures.lookup import local_tokenizer
from ..architectures.shrink import BYTE_VOCAB
from ..architectures.small_files import without_marks
from ..spec.hub import hub_is_away, hub_refusal, snapshot_of
from ..spec.refusal import refuse
from ..spec.task_specs import TASKS
from .request import Request

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
    """Load the tokenizer that `tokenizer` names: `bytes`, a hub id or a folder; the model's own if
    that is empty.

    `revision` is the model's, and its tokenizer's. `masked`: `bytes` has a mask token, and puts
    tokens round each text. A folder without tokenizer files but with a .gguf file gives the
    tokenizer inside that file. Raises `Refusal` when there is none.
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
    elif hub_is_away():
        options["local_files_only"] = True
    try:
        with without_marks(folder) if folder else contextlib.nullcontext(name) as source:
            # None, the default, asks on a terminal whether to run code
            loaded = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False, **options)
        loaded.name_or_path = name
        return loaded
    except (OSError, ImportError) as error:
        raise hub_refusal(f"{flag} {name}", name, error) from error
    except Exception as error:
        # For a damaged file transformers and tokenizers raise errors of any type, even Exception.
        if found is None:
            raise hub_refusal(f"{flag} {name}", name, error) from error
        text = (str(error).strip() or repr(error)).splitlines()[0]
        raise refuse(
            f"{flag} {name}",
            f"its tokenizer's files cannot be read: {type(error).__name__}: {text}",
            "download them again",
        ) from error


def has_local_tokenizer(model: str, tokenizer: str) -> bool:
    """Return True if a tokenizer needs no file of the hub.

    Raises `Refusal` for a folder without tokenizer files.
    """
    return tokenizer == "bytes" or local_tokenizer(model, tokenizer) is not None


def fitting_tokenizer(request: Request, model_config: dict[str, Any]) -> Any:
    """Load the tokenizer of a run.

    It may have more tokens than the model has embeddings, if the data do not use them.

    Its attribute `num_embeddings` counts its tokens that have an embedding.
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


def num_embeddings(tokenizer: Any) -> int:
    """Count the tokens of a tokenizer for which its model has an embedding."""
    return getattr(tokenizer, "num_embeddings", len(tokenizer))


def check_token(tokenizer: Any, token: int, where: str) -> None:
    """Raise `Refusal` if `token`, the highest one met at `where`, has no embedding."""
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
    raise refuse(
        where, f"contains token {token} ({tokenizer.convert_ids_to_tokens(token)!r}): {known}", fix
    )


def tokenizer_here(model: str, tokenizer: str, revision: str) -> str | None:
    """Return the value of `--tokenizer` that loads a run's tokenizer without asking the hub; None
    if it is not on this machine.
    """
    if tokenizer == "bytes" or local_tokenizer(model, tokenizer) is not None:
        return tokenizer
    snapshot = snapshot_of(tokenizer) if tokenizer else snapshot_of(model, revision)
    return str(snapshot) if snapshot and (snapshot / "tokenizer_config.json").is_file() else None


def byte_tokenizer(masked: bool = False) -> PreTrainedTokenizerFast:
    """Makes a tokenizer of one token per UTF-8 byte and a few special tokens: `BYTE_VOCAB` in all,
    lossless for any text, made without a file.

    `masked`: one of them is the mask, and every text begins and ends with one, as for BERT. The
    numbers of all stay.
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
    """Names the padding token; it never carries loss, and no other token attends to it."""
    own = tokenizer.pad_token_id
    return own if own is not None and own < num_embeddings(tokenizer) else tokenizer.eos_token_id


def encode(tokenizer: Any, texts: list[str], places: Sequence[str] = (), **options: Any) -> Any:
    """Encode texts without the tokens that the tokenizer puts around each.

    Raises `Refusal` for a text that the tokenizer cannot encode; `places` names the texts.
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
    raise refuse(
        next(alone, "--dataset"),
        rule,
        "use a tokenizer with an unknown token, correct the row, or leave it out (--bad_rows skip)",
    )


def _attempt(
    tokenizer: Any, texts: list[str], options: dict[str, Any]
) -> tuple[Any, Exception | None]:
    """Return (encoded texts, None), or (None, the error of a text that has no tokens).

    tokenizers 0.22 raises a plain `Exception` for a word that a model without an unknown token does
    not know.
    """
    try:
        return tokenizer(texts, **options), None
    except Exception as error:
        if type(error) is not Exception:
            raise
        return None, error


def edges(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer puts before and after a text."""
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
    """Yield the texts of a tokenizer's tokens, special ones last because a tokenizer may also put
    them around texts.
    """
    special = set(tokenizer.all_special_ids)
    plain = (number for number in range(len(tokenizer)) if number not in special)
    for number in itertools.chain(plain, sorted(special)):
        yield tokenizer.decode([number])


def check_edges(edges: tuple[list[int], list[int]], seq_len: int) -> None:
    """Raises `Refusal` if the tokens that the tokenizer puts round a text leave no room in a
    row.
    """
    if seq_len <= (around := sum(map(len, edges))):
        raise refuse(
            f"seq_len = {seq_len}",
            f"the tokenizer adds {around} special tokens to each text, which leaves no room for the"
            " text",
            f"use --seq_len {around + 1} or more",
        )


def check_tokenizer(tokenizer: Any, task: str) -> None:
    """Raises `Refusal` if the tokenizer lacks what `task` needs."""
    if TASKS[task].masked:
        if tokenizer.mask_token_id is None or pad_id(tokenizer) is None:
            missing = "mask token" if tokenizer.mask_token_id is None else "padding token"
            raise refuse(
                "--tokenizer",
                f"has no {missing}, but this task requires one",
                "use the tokenizer of a masked language model, or bytes",
            )
        check_token(tokenizer, tokenizer.mask_token_id, "mask_token of --tokenizer")
        return
    if tokenizer.eos_token_id is None:
        raise refuse(
            "--tokenizer",
            "has no end-of-text token to separate documents",
            "use the tokenizer of a causal language model",
        )
    if TASKS[task].chats and not tokenizer.chat_template:
        raise refuse(
            "--tokenizer",
            "has no chat template, but task sft requires one",
            "use the tokenizer of a chat model, or bytes",
        )
    if TASKS[task].chats and not tokenizer.is_fast:
        raise refuse(
            "--tokenizer",
            "must be a fast tokenizer: a slow one does not report the text positions of its tokens",
            "use a tokenizer with a tokenizer.json",
        )
