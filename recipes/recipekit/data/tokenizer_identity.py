"""A hash of the parts of a tokenizer that decide a run's tokens.

It names kept tokens and data streams.
"""

import contextlib
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from ..spec.task_specs import TASKS

# in a serialized tokenizer: padding and truncation, the state of the last call, precede it
ADDED = '"added_tokens":'
# Options of a tokenizer that change no token: where its files are, padding, truncation and what is
# hashed by itself.
WITHOUT_EFFECT = (
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
PLAIN = (str, int, float, bool, list, dict, type(None))


def identity_of(tokenizer: Any, task: str) -> str:
    """Return the hash of a tokenizer for a task, 16 hexadecimal digits.

    It is the same for a copy of the tokenizer in another folder or process, and after calls that
    pad or truncate.
    """
    facts = TASKS[task]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    stated: dict[str, Any] = {
        "tokenizer": _of_python(tokenizer)
        if backend is None
        else _digest(backend.to_str().partition(ADDED)[2]),
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
    }
    if facts.masked:  # special tokens are never masked, and never replace a masked token
        stated |= {
            "mask": tokenizer.mask_token_id,
            "all_special": sorted(set(tokenizer.all_special_ids)),
        }
    if facts.chats or facts.pairs:  # a template may write any of the named tokens
        stated |= {"template": tokenizer.chat_template, "named": tokenizer.special_tokens_map}
    return _digest(json.dumps(stated, sort_keys=True))


def _of_python(tokenizer: Any) -> str:
    """Hash a tokenizer that is written in Python: its class, vocabulary and options, and the
    content of its files.
    """
    options = {
        key: value
        for key, value in getattr(tokenizer, "init_kwargs", {}).items()
        if isinstance(value, PLAIN) and key not in WITHOUT_EFFECT and not key.endswith("_file")
    }
    files = list[str]()
    # a class that keeps no vocabulary files raises NotImplementedError (transformers 5.22.2); its
    # vocabulary is hashed below
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
    return _digest(json.dumps(stated, sort_keys=True, default=str))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def former_identity(tokenizer: Any, task: str) -> str:
    """Return the identity that runs recorded before `identity_of`: a hash of the tokens of one
    text.

    A run that recorded it can still be resumed, with the check that it was begun with.
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
    return _digest(repr(probe))
