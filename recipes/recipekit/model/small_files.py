"""The small files of an export: copies of the model's own files, with the values that training
decides.
"""

import codecs
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from ..architectures import small_files as files
from ..architectures.lookup import folder_of, local_tokenizer
from ..architectures.small_files import CONFIG, GENERATION, PREPROCESSOR, PROCESSOR
from .build import Built
from .empty import config_of
from .weights import weights_folder

# Keys of a generation config whose values are token ids (transformers 5.22.2), alone or in lists.
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
# Keys of a config that `construct` sets, or whose value depends on the export.
OF_CONSTRUCTION = ("dtype", "use_cache", "_name_or_path", "transformers_version", "architectures")
# of a generation config that transformers derives
OF_METADATA = ("_from_model_config", "_original_object_hash")


@dataclass(frozen=True)
class Origin:
    """Folders that the small files of a run come from.

    `tokenizer` is None if the run reads no text, or if its tokenizer was not read from such files.
    `own_tokenizer`: the run reads with the model's own tokenizer.
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
    """Return the folders of a run's small files; the arguments are fields of the recipe."""
    folder = (
        weights_folder(model, revision)
        if init == "pretrained"
        else folder_of(model, revision=revision)
    )
    if not reads_text or tokenizer == "bytes":  # the word, also where a folder has that name
        return Origin(folder, None, own_tokenizer=not reads_text)
    same = Path(tokenizer).is_dir() and Path(model).is_dir() and Path(tokenizer).samefile(model)
    if own := tokenizer in ("", model) or same:
        found = folder
    else:
        found = local_tokenizer(model, tokenizer) or folder_of(tokenizer, "tokenizer_config.json")
    found = found if found and found.is_dir() else None  # a .gguf file has no small files
    if found and not any(map(files.OF_TOKENIZER.fullmatch, files.small_files(found))):
        found = None
    return Origin(folder, found, own)


@dataclass(frozen=True)
class SmallFiles:
    """Contents of an export's files except weights, by name, and lines for the start of the run."""

    contents: Mapping[str, bytes]
    notes: tuple[str, ...] = ()

    def with_commits(self, model: str, commits: dict[str, Any]) -> "SmallFiles":
        """Add a file that names the repositories of the hub that a run has read, and their commits;
        without any, add no file.
        """
        if not commits:
            return self
        return replace(
            self, contents={**self.contents, files.COMMITS: _json({"base_model": model, **commits})}
        )

    def with_card(self, card: str) -> "SmallFiles":
        """Add the model card; without a text, add no file."""
        return (
            replace(self, contents={**self.contents, files.CARD: card.encode()}) if card else self
        )

    def write(self, folder: Path, of_adapter: bool = False) -> None:
        """Write the files into `folder`; for an adapter, only files of the tokenizer or
        processor.
        """
        for name, content in self.contents.items():
            if of_adapter and not files.is_of_adapter(name):
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def gather(
    built: Built,
    model_config: dict[str, Any],
    processor: Any,
    dtype: torch.dtype,
    origin: Origin,
    ends: tuple[int, ...],
) -> SmallFiles:
    """Read and make the small files of a run's exports.

    `model_config` is the config.json that the model was made from. `ends` are the tokens that end
    an answer in training. Raises `Refusal` for a generation config that cannot be read.
    """
    model: Any = built.models[0]  # an adapter's wrapper has the attributes of its model
    tokenizer = _tokenizer_of(processor)
    contents, notes = _carried(origin, processor, reads_text=tokenizer is not None)
    if content := _generation_file(model, origin, tokenizer, ends, notes):
        contents[GENERATION] = content
    config = changed_config(model_config, model.config, str(dtype).removeprefix("torch."))
    if tokenizer is not None and not origin.carries_tokenizer:
        # the version that wrote the tokenizer's files
        config["transformers_version"] = transformers.__version__
    contents[CONFIG] = _json(config | {"architectures": [built.architecture]})
    return SmallFiles(contents, tuple(notes))


def _tokenizer_of(processor: Any) -> Any:
    """Return the tokenizer that `processor` is or holds; None if it reads no text."""
    tokenizer = getattr(processor, "tokenizer", processor)
    return tokenizer if hasattr(tokenizer, "all_special_ids") else None


# Tokenizers, templates, processors
# ---------------------------------------------------------------------------------


def _carried(
    origin: Origin, processor: Any, reads_text: bool
) -> tuple[dict[str, bytes], list[str]]:
    """Return (contents by name, lines for the start) of all small files except config and
    generation config.

    Files of the model's own tokenizer are copied. Another tokenizer writes its files, and the keys
    and files that its class does not write are added. An image processor replaces the model's file.
    """
    contents, notes = dict[str, bytes](), list[str]()

    def of_model(name: str) -> bool:
        if name in (CONFIG, GENERATION, files.ADAPTER):
            return False
        return origin.carries_tokenizer or not reads_text or not files.OF_TOKENIZER.fullmatch(name)

    if origin.model:
        _read(origin.model, of_model, contents, notes)
    if origin.carries_tokenizer:
        return contents, notes
    made = _saved(processor)
    if origin.tokenizer:
        others = dict[str, bytes]()
        _read(
            origin.tokenizer,
            lambda name: files.OF_TOKENIZER.fullmatch(name) is not None,
            others,
            notes,
        )
        made = others | {
            name: _with_own_keys(content, others.get(name)) for name, content in made.items()
        }
    contents |= made
    # transformers prefers an image processor that is nested there
    if PREPROCESSOR in made and PROCESSOR in contents:
        whole = files.parse_json(contents[PROCESSOR], PROCESSOR)
        if "image_processor" in whole:
            contents[PROCESSOR] = _json(whole | {"image_processor": json.loads(made[PREPROCESSOR])})
    return contents, notes


def _read(
    folder: Path, wanted: Callable[[str], bool], contents: dict[str, bytes], notes: list[str]
) -> None:
    """Add small files of a folder to `contents`, if `wanted(name)` is true."""
    for name in filter(wanted, files.small_files(folder)):
        if (size := (folder / name).stat().st_size) > files.LARGEST:
            notes.append(
                f"{folder / name}: {size:,} bytes are too large for a config or tokenizer file."
                " Exports leave it out"
            )
        else:
            # which transformers refuses
            contents[name] = (folder / name).read_bytes().removeprefix(codecs.BOM_UTF8)


def _saved(processor: Any) -> dict[str, bytes]:
    """Return the files that a processor writes with `save_pretrained`, by name."""
    with tempfile.TemporaryDirectory() as folder:
        processor.save_pretrained(folder)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _with_own_keys(made: bytes, own: bytes | None) -> bytes:
    """Add keys of a tokenizer's JSON file `own` that are missing in `made`, the file that its class
    wrote.
    """
    try:
        before, now = json.loads(own or b"null"), json.loads(made)
    except ValueError:
        return made
    # tokenizer.json is complete
    if not isinstance(before, dict) or not isinstance(now, dict) or "model" in now:
        return made
    return _json({key: value for key, value in before.items() if key != "chat_template"} | now)


# config.json
# --------------------------------------------------------------------------------------------------


def changed_config(own: dict[str, Any], config: Any, dtype: str) -> dict[str, Any]:
    """Return the config.json `own` with the dtype of the weights, and with the values that have
    changed in the model's `config`.

    A task or the recipe's `adapt` may have changed them. Keys that the class does not know, or
    renames, stay.
    """
    found = files.with_dtype(_changed(own, config_of(own).to_dict(), config.to_dict()), dtype)
    if "torch_dtype" not in found:
        found["dtype"] = dtype
    if found.get("use_cache") is False:
        found["use_cache"] = True
    return found


def _changed(own: dict[str, Any], before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    found = dict(own)
    for key, value in now.items():
        if (
            key in OF_CONSTRUCTION
            or key.startswith("_attn_implementation")
            or (key in before and before[key] == value)
        ):
            continue
        was: Any = before.get(key)
        held: Any = own.get(key)
        nested = isinstance(value, dict) and isinstance(was, dict) and isinstance(held, dict)
        found[key] = _changed(held, was, value) if nested else value
    return found


# generation_config.json
# ----------------------------------------------------------------------------------------------


def _generation_file(
    model: Any, origin: Origin, tokenizer: Any, ends: tuple[int, ...], notes: list[str]
) -> bytes | None:
    """Return the generation config of the exports: the model's own file, or else one derived from
    config.json.

    None for a model that does not generate. Adds a line to `notes` for each change.
    """
    file = origin.model / GENERATION if origin.model else None
    carried = file is not None and file.is_file()
    if not carried and not model.can_generate():
        return None
    if file and carried:
        own = files.read_json(file)
    else:
        own = json.loads(model.generation_config.to_json_string(use_diff=True))
        own.pop("use_cache", None)  # `construct` switched the cache off for training
    found = own
    if not origin.own_tokenizer:  # false only for a run that reads text
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
        found, added = _with_ends(found, tokenizer, ends)
        said = [number for number in added if carried or number != tokenizer.eos_token_id]
        names = ", ".join(
            f"{tokenizer.convert_ids_to_tokens(number)} ({number})" for number in said
        )
        line = f"{GENERATION}: exports also stop at {names}, which ends an answer in training"
        notes += [line] if said else []
    return file.read_bytes() if file and found == own and carried else _json(found)


def _with_ends(
    own: dict[str, Any], tokenizer: Any, ends: tuple[int, ...]
) -> tuple[dict[str, Any], list[int]]:
    """Return (a generation config that also stops at `ends`, the ids that were added).

    A config without an end token gets the tokenizer's, which ends documents.
    """
    before = ids_of(own.get("eos_token_id"))
    if not before:
        ends = (*ends, *ids_of(tokenizer.eos_token_id))
    added = [number for number in dict.fromkeys(ends) if number not in before]
    if not added:
        return own, []
    found = {key: value for key, value in own.items() if key not in OF_METADATA}
    found["eos_token_id"] = [*before, *added] if before or len(added) > 1 else added[0]
    return found, added


def with_special_tokens(own: dict[str, Any], special: set[int]) -> tuple[dict[str, Any], list[str]]:
    """Return (`own` without token ids that are not `special`, the removed values)."""
    found, gone = dict(own), list[str]()
    for key in TOKEN_IDS:
        ids = ids_of(own.get(key))
        if special.issuperset(ids):
            continue
        flat = isinstance(own[key], list) and all(isinstance(item, int) for item in own[key])
        kept = [number for number in ids if number in special] if flat else []
        del found[key]
        found |= {key: kept} if kept else {}
        gone.append(f"{key} {own[key]}")
    return found, gone


def ids_of(value: Any) -> list[int]:
    """Collect the token ids in a value of a generation config: a number, lists of numbers, or a
    bias of sequences.
    """
    if isinstance(value, int):
        return [value]
    if isinstance(value, list):
        return [number for item in value for number in ids_of(item)]
    if isinstance(value, dict):
        return [
            int(word)
            for key in value
            for word in str(key).strip("()").split(",")
            if word.strip().isdecimal()
        ]
    return []


def _json(value: dict[str, Any]) -> bytes:
    # half a surrogate pair: \ud800
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )
