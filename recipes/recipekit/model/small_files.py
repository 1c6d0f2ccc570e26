"""An export's small files: copies of the model's own files, updated after training."""

import codecs
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from ..architectures import small_files as files
from ..architectures.lookup import folder_of, local_tokenizer
from ..architectures.small_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    PREPROCESSOR_FILE,
    PROCESSOR_FILE,
)
from .build import BuiltModel
from .empty import config_of
from .weights import weights_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Generation config keys whose values are token ids (transformers 5.22.2), single or in lists.
TOKEN_IDS = (
    *(
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
    ),
    *(
        "forced_eos_token_id",
        "suppress_tokens",
        "begin_suppress_tokens",
        "bad_words_ids",
        "force_words_ids",
    ),
    *("sequence_bias", "forced_decoder_ids"),
)
# Config keys that `construct` sets, or whose values depend on the export.
CONSTRUCTION_KEYS = ("dtype", "use_cache", "_name_or_path", "transformers_version", "architectures")
# Generation config keys that transformers derives.
METADATA_KEYS = ("_from_model_config", "_original_object_hash")


@dataclass(frozen=True)
class Origin:
    """The folders from which a run's small files are copied.

    `tokenizer` is None if the run reads no text, or if no such files exist for its tokenizer.
    `own_tokenizer` is True if the run uses the model's own tokenizer.
    """

    model: Path | None = None
    tokenizer: Path | None = None
    own_tokenizer: bool = True

    @property
    def carries_tokenizer(self) -> bool:
        """Return True if the tokenizer's files are copied unchanged."""
        return self.own_tokenizer and self.tokenizer is not None


def origin_of(
    model: str, init: str, tokenizer: str, reads_text: bool, revision: str = ""
) -> Origin:
    """Return the folders of a run's small files, given fields of its recipe."""
    folder = (
        weights_folder(model, revision)
        if init == "pretrained"
        else folder_of(model, revision=revision)
    )
    if not reads_text or tokenizer == "bytes":  # the keyword bytes, even if a folder has that name
        return Origin(folder, None, own_tokenizer=not reads_text)
    same = Path(tokenizer).is_dir() and Path(model).is_dir() and Path(tokenizer).samefile(model)
    if own := tokenizer in ("", model) or same:
        found = folder
    else:
        found = local_tokenizer(model, tokenizer) or folder_of(tokenizer, "tokenizer_config.json")
    found = found if found and found.is_dir() else None  # a .gguf file has no small files
    if found and not any(map(files.TOKENIZER_FILES.fullmatch, files.small_files(found))):
        found = None
    return Origin(folder, found, own)


@dataclass(frozen=True)
class SmallFiles:
    """An export's files except weights, as contents by name, and lines for the run's start."""

    contents: Mapping[str, bytes]
    notes: tuple[str, ...] = ()

    def with_commits(self, model: str, commits: dict[str, Any]) -> "SmallFiles":
        """Return a copy that also contains a file with the Hub commits that the run has read.

        If there are no commits, return self.
        """
        if not commits:
            return self
        return replace(
            self,
            contents={
                **self.contents,
                files.COMMITS_FILE: _json_bytes({"base_model": model, **commits}),
            },
        )

    def with_card(self, card: str) -> "SmallFiles":
        """Return a copy that contains the model card, or self if `card` is empty."""
        return (
            replace(self, contents={**self.contents, files.CARD_FILE: card.encode()})
            if card
            else self
        )

    def write(self, folder: Path, of_adapter: bool = False) -> None:
        """Write the files into `folder`; for an adapter, only tokenizer or processor files."""
        for name, content in self.contents.items():
            if of_adapter and not files.is_adapter_file(name):
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def collect_small_files(
    built: BuiltModel,
    model_config: dict[str, Any],
    processor: object,
    dtype: torch.dtype,
    origin: Origin,
    ends: tuple[int, ...],
) -> SmallFiles:
    """Return the small files for a run's exports.

    `model_config` is the config.json from which the model was constructed. `ends` are the tokens
    that end an answer in training. Raise `ConfigError` for an unreadable generation config.
    """
    model: Any = built.models[0]  # an adapter's wrapper forwards the model's attributes
    tokenizer = _tokenizer_of(processor)
    contents, notes = _collect_contents(origin, processor, reads_text=tokenizer is not None)
    if content := _generation_file(model, origin, tokenizer, ends, notes):
        contents[GENERATION_FILE] = content
    config = updated_config(model_config, model.config, str(dtype).removeprefix("torch."))
    if tokenizer is not None and not origin.carries_tokenizer:
        # Record the version of transformers that wrote the tokenizer's files.
        config["transformers_version"] = transformers.__version__
    contents[CONFIG_FILE] = _json_bytes(config | {"architectures": [built.model_plan.architecture]})
    return SmallFiles(contents, tuple(notes))


def _tokenizer_of(processor: object) -> Any:
    """Return the tokenizer that `processor` is or contains, or None if it reads no text."""
    tokenizer = getattr(processor, "tokenizer", processor)
    return tokenizer if hasattr(tokenizer, "all_special_ids") else None


# Tokenizers, templates, processors
# ---------------------------------------------------------------------------------


def _collect_contents(
    origin: Origin, processor: object, reads_text: bool
) -> tuple[dict[str, bytes], list[str]]:
    """Return all small files except config files, as (contents by name, lines for the start).

    Other functions create config.json and the generation config. If the tokenizer is the model's
    own, its files are copied. A different tokenizer writes its own files, and the keys and files
    that its class does not write are added. An image processor replaces the model's file.
    """
    contents, notes = dict[str, bytes](), list[str]()

    def of_model(name: str) -> bool:
        if name in (CONFIG_FILE, GENERATION_FILE, files.ADAPTER_FILE):
            return False
        return (
            origin.carries_tokenizer or not reads_text or not files.TOKENIZER_FILES.fullmatch(name)
        )

    if origin.model:
        _add_files(origin.model, of_model, contents, notes)
    if origin.carries_tokenizer:
        return contents, notes
    made = _processor_files(processor)
    if origin.tokenizer:
        others = dict[str, bytes]()
        _add_files(
            origin.tokenizer,
            lambda name: files.TOKENIZER_FILES.fullmatch(name) is not None,
            others,
            notes,
        )
        made = others | {
            name: _with_own_keys(content, others.get(name)) for name, content in made.items()
        }
    contents |= made
    # transformers prefers an image processor that is nested inside the processor config.
    if PREPROCESSOR_FILE in made and PROCESSOR_FILE in contents:
        whole = files.parse_json(contents[PROCESSOR_FILE], PROCESSOR_FILE)
        if "image_processor" in whole:
            contents[PROCESSOR_FILE] = _json_bytes(
                whole | {"image_processor": json.loads(made[PREPROCESSOR_FILE])}
            )
    return contents, notes


def _add_files(
    folder: Path, wanted: Callable[[str], bool], contents: dict[str, bytes], notes: list[str]
) -> None:
    """Add a folder's small files to `contents` if `wanted(name)` is true."""
    for name in filter(wanted, files.small_files(folder)):
        if (size := (folder / name).stat().st_size) > files.MAX_SMALL_FILE_BYTES:
            notes.append(
                f"{folder / name}: {size:,} bytes are too large for a config or tokenizer file."
                " Exports leave it out"
            )
        else:
            # transformers rejects a byte-order mark.
            contents[name] = (folder / name).read_bytes().removeprefix(codecs.BOM_UTF8)


def _processor_files(processor: Any) -> dict[str, bytes]:
    """Return the files that a processor writes with `save_pretrained`, by name."""
    with tempfile.TemporaryDirectory() as folder:
        processor.save_pretrained(folder)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _with_own_keys(made: bytes, own: bytes | None) -> bytes:
    """Return `made`, extended by the keys that only `own` contains.

    `own` is a tokenizer's JSON file, and `made` is the version that its class wrote.
    """
    try:
        before, now = json.loads(own or b"null"), json.loads(made)
    except ValueError:
        return made
    # tokenizer.json is always complete.
    if not isinstance(before, dict) or not isinstance(now, dict) or "model" in now:
        return made
    return _json_bytes(
        {key: value for key, value in before.items() if key != "chat_template"} | now
    )


# config.json
# --------------------------------------------------------------------------------------------------


def updated_config(own: dict[str, Any], config: "PreTrainedConfig", dtype: str) -> dict[str, Any]:
    """Return the config.json `own` with the weights' dtype and the values that training changed.

    A task or the recipe's `adapt` may have changed values in `config`. Keys that the class does not
    know or renames are kept.
    """
    found = files.with_dtype(
        _with_changed_values(own, config_of(own).to_dict(), config.to_dict()), dtype
    )
    if "torch_dtype" not in found:
        found["dtype"] = dtype
    if found.get("use_cache") is False:
        found["use_cache"] = True
    return found


def _with_changed_values(
    own: dict[str, Any], before: dict[str, Any], now: dict[str, Any]
) -> dict[str, Any]:
    found = dict(own)
    for key, value in now.items():
        if (
            key in CONSTRUCTION_KEYS
            or key.startswith("_attn_implementation")
            or (key in before and before[key] == value)
        ):
            continue
        was: Any = before.get(key)
        held: Any = own.get(key)
        nested = isinstance(value, dict) and isinstance(was, dict) and isinstance(held, dict)
        found[key] = _with_changed_values(held, was, value) if nested else value
    return found


# generation_config.json
# ----------------------------------------------------------------------------------------------


def _generation_file(
    model: "PreTrainedModel",
    origin: Origin,
    tokenizer: "PreTrainedTokenizerBase",
    ends: tuple[int, ...],
    notes: list[str],
) -> bytes | None:
    """Return the generation config for the exports, or None if the model does not generate.

    The config is the model's own file, or else derived from config.json. A line is added to `notes`
    for each change.
    """
    file = origin.model / GENERATION_FILE if origin.model else None
    carried = file is not None and file.is_file()
    if not carried and not model.can_generate():
        return None
    if file and carried:
        own = files.read_json(file)
    else:
        own = json.loads(model.generation_config.to_json_string(use_diff=True))
        own.pop("use_cache", None)  # `construct` disabled the cache for training
    found = own
    if not origin.own_tokenizer:  # False only for a run that reads text
        vocabulary = model.config.get_text_config().vocab_size
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        found, gone = with_special_tokens(
            own, {number for number in special if number < vocabulary}
        )
        rule = (
            "has token ids that are not special tokens of the run's tokenizer, so exports leave"
            " them out"
        )
        notes += [f"{file} {rule}: {', '.join(gone)}"] if gone and carried else []
    if tokenizer is not None:
        found, added = _with_end_tokens(found, tokenizer, ends)
        said = [number for number in added if carried or number != tokenizer.eos_token_id]
        names = ", ".join(
            f"{tokenizer.convert_ids_to_tokens(number)} ({number})" for number in said
        )
        line = f"{GENERATION_FILE}: exports also stop at {names}, which ends an answer in training"
        notes += [line] if said else []
    return file.read_bytes() if file and found == own and carried else _json_bytes(found)


def _with_end_tokens(
    own: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", ends: tuple[int, ...]
) -> tuple[dict[str, Any], list[int]]:
    """Return (a generation config that also stops at `ends`, the added ids).

    If the config has no end token, also add the tokenizer's end token, which ends documents.
    """
    before = token_ids_in(own.get("eos_token_id"))
    if not before:
        ends = (*ends, *token_ids_in(tokenizer.eos_token_id))
    added = [number for number in dict.fromkeys(ends) if number not in before]
    if not added:
        return own, []
    found = {key: value for key, value in own.items() if key not in METADATA_KEYS}
    found["eos_token_id"] = [*before, *added] if before or len(added) > 1 else added[0]
    return found, added


def with_special_tokens(own: dict[str, Any], special: set[int]) -> tuple[dict[str, Any], list[str]]:
    """Return (`own` without token ids that are not in `special`, the removed values)."""
    found, gone = dict(own), list[str]()
    for key in TOKEN_IDS:
        ids = token_ids_in(own.get(key))
        if special.issuperset(ids):
            continue
        flat = isinstance(own[key], list) and all(isinstance(item, int) for item in own[key])
        kept = [number for number in ids if number in special] if flat else []
        del found[key]
        found |= {key: kept} if kept else {}
        gone.append(f"{key} {own[key]}")
    return found, gone


def token_ids_in(value: object) -> list[int]:
    """Return the token ids in a generation config value.

    The value is a number, a nested list of numbers, or a sequence bias.
    """
    if isinstance(value, int):
        return [value]
    if isinstance(value, list):
        return [number for item in value for number in token_ids_in(item)]
    if isinstance(value, dict):
        return [
            int(word)
            for key in value
            for word in str(key).strip("()").split(",")
            if word.strip().isdecimal()
        ]
    return []


def _json_bytes(value: dict[str, Any]) -> bytes:
    # "backslashreplace" encodes half of a surrogate pair as \ud800.
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )
