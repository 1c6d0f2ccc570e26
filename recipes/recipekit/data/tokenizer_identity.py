"""A hash of the parts of a tokenizer that determine a run's tokens.

The hash identifies cached tokens and data streams.
"""

import contextlib
import hashlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..spec.task_specs import TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# In a serialized tokenizer, this key follows padding and truncation, which are left from the last
# call and must not be hashed.
ADDED_TOKENS_KEY = '"added_tokens":'
# Tokenizer options that do not change any token: file locations, padding, truncation, and values
# that are hashed separately.
IGNORED_OPTIONS = (
    *(
        "name_or_path",
        "tokenizer_class",
        "processor_class",
        "auto_map",
        "chat_template",
        "added_tokens_decoder",
    ),
    *("model_max_length", "max_length", "padding_side", "truncation_side", "padding", "truncation"),
    *("clean_up_tokenization_spaces", "model_input_names", "is_local", "local_files_only"),
)
JSON_TYPES = (str, int, float, bool, list, dict, type(None))


def hash_tokenizer(tokenizer: "PreTrainedTokenizerBase", task: str) -> str:
    """Return a tokenizer's hash for a task as 16 hexadecimal digits.

    A copy of the tokenizer in a different folder or process has the same hash. Calls that pad or
    truncate do not change the hash.
    """
    facts = TASKS[task]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    stated: dict[str, Any] = {
        "tokenizer": _hash_python_tokenizer(tokenizer)
        if backend is None
        else _short_hash(backend.to_str().partition(ADDED_TOKENS_KEY)[2]),
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
    }
    if facts.masked:  # special tokens are never masked, and never replace a masked token
        stated |= {
            "mask": tokenizer.mask_token_id,
            "all_special": sorted(set(tokenizer.all_special_ids)),
        }
    if facts.chats or facts.pairs:  # a template may write any of the special tokens
        stated |= {"template": tokenizer.chat_template, "named": tokenizer.special_tokens_map}
    return _short_hash(json.dumps(stated, sort_keys=True))


def _hash_python_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Hash a tokenizer written in Python: its class, vocabulary, options and file contents."""
    options = {
        key: value
        for key, value in getattr(tokenizer, "init_kwargs", {}).items()
        if isinstance(value, JSON_TYPES)
        and key not in IGNORED_OPTIONS
        and not key.endswith("_file")
    }
    files = list[str]()
    # a class without vocabulary files raises NotImplementedError (transformers 5.22.2); in that
    # case, the vocabulary is hashed below
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(NotImplementedError):
        tokenizer.save_vocabulary(folder)
        files = sorted(
            hashlib.blake2b(file.read_bytes()).hexdigest() for file in Path(folder).iterdir()
        )
    added = {
        number: repr(token)
        for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
    }
    stated = [type(tokenizer).__name__, tokenizer.get_vocab(), added, options, files]
    return _short_hash(json.dumps(stated, sort_keys=True, default=str))


def _short_hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def legacy_tokenizer_hash(tokenizer: "PreTrainedTokenizerBase", task: str) -> str:
    """Return the identity recorded by runs before `hash_tokenizer`: a hash of one text's tokens.

    A run that recorded this identity can still be resumed, with the same check as when it started.
    """
    facts = TASKS[task]
    probe: list[Any] = [tokenizer("Zürich 1_000\n\tif x != 'ß':")["input_ids"], len(tokenizer)]
    probe += [
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.chat_template if facts.chats else None,
    ]
    if facts.masked:
        bare, whole = (
            tokenizer("a", add_special_tokens=False)["input_ids"],
            tokenizer("a")["input_ids"],
        )
        start = next(
            (start for start in range(len(whole)) if whole[start : start + len(bare)] == bare), 0
        )
        probe.append((whole[:start], whole[start + len(bare) :]))
    return _short_hash(repr(probe))
