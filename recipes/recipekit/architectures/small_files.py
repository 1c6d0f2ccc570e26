"""The small files in a model folder: configs, tokenizer, chat templates and processors."""

import codecs
import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..spec.errors import config_error
from ..spec.run_folder import ADAPTER_CONFIG, RUN_JSON

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
ADAPTER_FILE = ADAPTER_CONFIG
CARD_FILE = "README.md"  # the model card
COMMITS_FILE = "commits.json"  # in an export: the hub commits that its run has read
TEMPLATES = "additional_chat_templates"  # folder of the named templates (transformers 5.22.2)
SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".codes")
# files with such a suffix that transformers does not read
IGNORED_FILES = re.compile(
    rf".*\.index(\.[^.]+)?\.json|trainer_state\.json|{re.escape(RUN_JSON)}|{re.escape(COMMITS_FILE)}|(all|train|eval|test|predict)_results.*"
    r"|(licen[cs]e|notice|readme|use_policy|requirements)[^/]*",
    re.IGNORECASE,
)
TOKENIZER_FILES = re.compile(
    rf"(tokenizer|vocab|merges|special_tokens_map|added_tokens|chat_template|{TEMPLATES}/|spiece|sentencepiece|tekken|bpe).*"
    r"|.*\.(model|tiktoken|spm|codes)"
)
PROCESSOR_FILES = re.compile(r"([a-z]+_)*(pre)?processor_config\.json")
MAX_SMALL_FILE_BYTES = 1 << 27  # maximum size of a small file
MAX_PARSED_BYTES = 1 << 22  # maximum size of a tokenizer file that a plan parses


def small_files(folder: Path) -> list[str]:
    """Return the names of a folder's small files: config and tokenizer files.

    Weights and training records are excluded. Code is included only if a config has an `auto_map`.
    The code is copied, never run.
    """
    names = [path.name for path in folder.iterdir() if path.is_file() and is_small_file(path)]
    names += [f"{TEMPLATES}/{path.name}" for path in (folder / TEMPLATES).glob("*.jinja")]
    if any(
        b'"auto_map"' in (folder / name).read_bytes()
        for name in names
        if name.endswith("config.json")
    ):
        names += [path.name for path in folder.glob("*.py")]
    return sorted(names)


def is_small_file(path: Path) -> bool:
    """Return True for a model's config and tokenizer files.

    Weights, code and training records are excluded.
    """
    return path.suffix in SUFFIXES and not IGNORED_FILES.fullmatch(path.name)


@contextlib.contextmanager
def without_bom(folder: Path) -> Iterator[Path]:
    """Yield `folder`, or a copy of its small files without byte order marks.

    The copy is created if a file begins with the mark that Windows editors write. transformers
    5.22.2 rejects a JSON file with this mark. If a chat template began with the mark, transformers
    would insert it before every chat.
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
    """Read a file that contains a JSON object.

    Raises `ConfigError` if the file cannot be read or is not a JSON object.
    """
    try:
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise config_error(
            str(path), f"cannot be read: {error.strerror}", "give this user permission to read it"
        ) from None


def check_generation_file(folder: Path) -> None:
    """Raise `ConfigError` for a generation config that an export could not read later."""
    if (folder / GENERATION_FILE).is_file():
        read_json(folder / GENERATION_FILE)


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in a file's content.

    Raises `ConfigError`, with `where` as the file's name.
    """
    if not content.strip():
        raise config_error(
            where,
            f"is empty ({len(content)} bytes)",
            "download the model again, or delete the file",
        )
    try:
        found = json.loads(content)
    except ValueError as error:
        raise config_error(
            where, f"is not JSON: {error}", "download the model again, or delete the file"
        ) from None
    if not isinstance(found, dict):
        raise config_error(
            where, "is not a JSON object", "download the model again, or delete the file"
        )
    return found


def check_tokenizer_files(folder: Path) -> None:
    """Raise `ConfigError` for a tokenizer file that is empty, truncated or not JSON.

    The error names the file. Only files that are named as JSON must contain a JSON object. If a
    file exceeds `MAX_PARSED_BYTES` bytes, only its beginning and end are checked, because parsing
    would take longer than the rest of a plan.
    """
    fix = "download the tokenizer again"
    for path in sorted(folder.iterdir()):
        if not path.is_file() or not TOKENIZER_FILES.fullmatch(path.name):
            continue
        if path.suffix not in (".json", ".model"):
            continue
        if not (size := path.stat().st_size):
            raise config_error(str(path), "is empty (0 bytes)", fix)
        if path.suffix == ".model":
            continue
        if size <= MAX_PARSED_BYTES:
            found = read_json(path)
            if path.name == "tokenizer.json" and not isinstance(found.get("model"), dict):
                raise config_error(
                    str(path), "contains no tokenizer: its key model is missing", fix
                )
        elif not (
            path.open("rb").read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")
            and _read_tail(path).endswith(b"}")
        ):
            raise config_error(str(path), "is truncated, or is not a JSON object", fix)


def _read_tail(path: Path) -> bytes:
    with path.open("rb") as stream:
        stream.seek(-64, os.SEEK_END)
        return stream.read().rstrip()


def is_adapter_file(name: str) -> bool:
    """Return True for a small file that an adapter's export contains.

    These files are the adapter's config and card, and the files of the tokenizer and processor.
    """
    return name in (ADAPTER_FILE, COMMITS_FILE, CARD_FILE) or bool(
        TOKENIZER_FILES.fullmatch(name) or PROCESSOR_FILES.fullmatch(name)
    )


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config.json with its dtype set to `dtype`, also in nested configs.

    A null is treated as a missing key.
    """
    keys = ("dtype", "torch_dtype")
    found = {
        key: with_dtype(value, dtype) if isinstance(value, dict) else value
        for key, value in config.items()
    }
    found = {key: value for key, value in found.items() if key not in keys or value is not None}
    return found | {key: dtype for key in keys if isinstance(config.get(key), str)}
