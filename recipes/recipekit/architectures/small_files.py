"""The small files of a model's folder: config, generation config, tokenizer, chat templates and
processors.
"""

import codecs
import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..spec.refusal import refuse
from ..spec.run_folder import ADAPTER_CONFIG, FACTS

CONFIG, GENERATION = "config.json", "generation_config.json"
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
ADAPTER = ADAPTER_CONFIG
CARD = "README.md"  # the model card
COMMITS = "commits.json"  # of an export: what its run has read from the hub
TEMPLATES = "additional_chat_templates"  # folder of the named templates (transformers 5.22.2)
SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".codes")
# Files with such a suffix that transformers does not read.
OTHERS = re.compile(
    rf".*\.index(\.[^.]+)?\.json|trainer_state\.json|{re.escape(FACTS)}|{re.escape(COMMITS)}|(all|train|eval|test|predict)_results.*"
    r"|(licen[cs]e|notice|readme|use_policy|requirements)[^/]*",
    re.IGNORECASE,
)
OF_TOKENIZER = re.compile(
    rf"(tokenizer|vocab|merges|special_tokens_map|added_tokens|chat_template|{TEMPLATES}/|spiece|sentencepiece|tekken|bpe).*"
    r"|.*\.(model|tiktoken|spm|codes)"
)
OF_PROCESSOR = re.compile(r"([a-z]+_)*(pre)?processor_config\.json")
LARGEST = 1 << 27  # bytes of a file that counts as small
PARSED = 1 << 22  # bytes of a tokenizer's file that a plan parses


def small_files(folder: Path) -> list[str]:
    """List the names of a folder's small files: config and tokenizer files, but no weights and no
    records of training.

    Code is among them only if a config has an `auto_map`. It is copied, never run.
    """
    names = [path.name for path in folder.iterdir() if path.is_file() and is_small(path)]
    names += [f"{TEMPLATES}/{path.name}" for path in (folder / TEMPLATES).glob("*.jinja")]
    if any(
        b'"auto_map"' in (folder / name).read_bytes()
        for name in names
        if name.endswith("config.json")
    ):
        names += [path.name for path in folder.glob("*.py")]
    return sorted(names)


def is_small(path: Path) -> bool:
    """Return True for a model's config and tokenizer files, False for weights, code and records of
    training.
    """
    return path.suffix in SUFFIXES and not OTHERS.fullmatch(path.name)


@contextlib.contextmanager
def without_marks(folder: Path) -> Iterator[Path]:
    """Yield `folder`, or a copy of its small files if one begins with the byte order mark that
    Windows' editors write.

    transformers 5.22.2 refuses a JSON file that has one, and would put the mark of a chat template
    before every chat.
    """
    contents = {name: (folder / name).read_bytes() for name in small_files(folder)}
    if not any(content.startswith(codecs.BOM_UTF8) for content in contents.values()):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="without_marks_") as scratch:
        copy = Path(scratch) / folder.resolve().name
        for name, content in contents.items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(content.removeprefix(codecs.BOM_UTF8))
        yield copy


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `Refusal` if the file cannot be read or is not a JSON object."""
    try:
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise refuse(
            str(path), f"cannot be read: {error.strerror}", "give this user permission to read it"
        ) from None


def check_generation_file(folder: Path) -> None:
    """Raise `Refusal` for a generation config that an export could not read."""
    if (folder / GENERATION).is_file():
        read_json(folder / GENERATION)


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in a file's content.

    Raises `Refusal`, with `where` as the file's name.
    """
    if not content.strip():
        raise refuse(
            where,
            f"is empty ({len(content)} bytes)",
            "download the model again, or delete the file",
        )
    try:
        found = json.loads(content)
    except ValueError as error:
        raise refuse(
            where, f"is not JSON: {error}", "download the model again, or delete the file"
        ) from None
    if not isinstance(found, dict):
        raise refuse(where, "is not a JSON object", "download the model again, or delete the file")
    return found


def check_tokenizer_files(folder: Path) -> None:
    """Raise `Refusal`, with the name of the file, if a tokenizer's file is empty, cut, or no JSON
    object though it is named so.

    A file beyond `PARSED` bytes is judged by its ends: parsing it would take longer than all else
    that a plan does.
    """
    fix = "download the tokenizer again"
    for path in sorted(folder.iterdir()):
        if not path.is_file() or not OF_TOKENIZER.fullmatch(path.name):
            continue
        if path.suffix not in (".json", ".model"):
            continue
        if not (size := path.stat().st_size):
            raise refuse(str(path), "is empty (0 bytes)", fix)
        if path.suffix == ".model":
            continue
        if size <= PARSED:
            found = read_json(path)
            if path.name == "tokenizer.json" and not isinstance(found.get("model"), dict):
                raise refuse(str(path), "contains no tokenizer: its key model is missing", fix)
        elif not (
            path.open("rb").read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")
            and _end_of(path).endswith(b"}")
        ):
            raise refuse(str(path), "is truncated, or is not a JSON object", fix)


def _end_of(path: Path) -> bytes:
    with path.open("rb") as stream:
        stream.seek(-64, os.SEEK_END)
        return stream.read().rstrip()


def is_of_adapter(name: str) -> bool:
    """Return True for a small file that an adapter's export contains: its config and card, and
    files of tokenizer and processor.
    """
    return name in (ADAPTER, COMMITS, CARD) or bool(
        OF_TOKENIZER.fullmatch(name) or OF_PROCESSOR.fullmatch(name)
    )


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config.json with `dtype` as its dtype, also in nested configs.

    A null counts as a missing key.
    """
    keys = ("dtype", "torch_dtype")
    found = {
        key: with_dtype(value, dtype) if isinstance(value, dict) else value
        for key, value in config.items()
    }
    found = {key: value for key, value in found.items() if key not in keys or value is not None}
    return found | {key: dtype for key in keys if isinstance(config.get(key), str)}
