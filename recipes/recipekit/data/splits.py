"""Splits and subsets of a local folder.

`datasets.load_dataset(FOLDER)` finds the same splits (datasets 5.2.0). The following sources are
tried in order:

- a folder written by `save_to_disk`
- the `configs` of README.md
- `data/NAME-00000-of-00001.*`
- folders with the name of a split
- files with the name of a split

In all other folders, every file belongs to the split `train`. `datasets.data_files` is not used
because it does not follow links to folders, and because its import takes seconds.
"""

import functools
import json
import os
import posixpath
import re
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

from ..spec.errors import config_error
from .folders import files_below

SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
NON_DATA_FILES = (
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "dummy_data.zip",
)
CONFIG_PAGES = (
    "README.md",
    ".huggingface.yaml",
)  # may declare subsets; the last page with subsets takes precedence
TRAIN_SPLIT = "train"  # the split of every file that belongs to no other split
DEFAULT_SUBSET = "default"  # the subset of a folder whose README declares no subsets
COPY_FIX = "copy the whole folder again"
_WORD_BOUNDARY = r"[-._ 0-9]"  # characters that separate words in file and folder names
_IN_FOLDER = {
    split: re.compile(
        rf"(?:.*{_WORD_BOUNDARY})?(?:{'|'.join(words)})(?:{_WORD_BOUNDARY}.*)?", re.DOTALL
    )
    for split, words in SPLIT_WORDS.items()
}
_IN_FILE = {
    split: re.compile(rf"(?:.*{_WORD_BOUNDARY})?(?:{'|'.join(words)}){_WORD_BOUNDARY}.*", re.DOTALL)
    for split, words in SPLIT_WORDS.items()
}
_SHARD = re.compile(r"data/([^/]*)-[0-9]{5}-of-[0-9]{5}[^/]*\.[^/]*")
_SPLIT = re.compile(r"\w+(\.\w+)*")
_CONFIG_KEYS = {
    "config_name",
    "data_files",
    "data_dir",
    "default",
    "features",
    "version",
    "description",
}

FilePaths = tuple[Path, ...]


def splits_of(folder: Path, files: FilePaths, subset: str = "") -> dict[str, FilePaths]:
    """Return the files of each split of a folder; `files` must be all files below the folder.

    `subset` is a config in the folder's README. Raise `ConfigError` for a subset that the folder
    does not have, and for an unusable README or state.json.
    """
    files, saved = _without_leftovers(folder, files)
    where = f"--dataset {folder}"
    page, configs = ("", {}) if saved else _read_configs(folder)
    if configs and (name := subset or _default_config(configs)):
        if name in configs:
            return _config_splits(folder, files, page, configs[name] | {"config_name": name})
    elif configs:
        rule = f"{page} has several subsets and no default: {', '.join(configs)}"
        raise config_error(
            where, rule, f"choose one with --subset, for example --subset {next(iter(configs))}"
        )
    elif subset in ("", DEFAULT_SUBSET):
        return saved or _by_names(folder, files)
    rule = (
        f"has the subsets {', '.join(configs)}"
        if configs
        else "has no subsets: its README.md names no configs"
    )
    fix = f"use --subset {next(iter(configs))}" if configs else "omit --subset"
    raise config_error(f"--subset {subset}", f"is not in {folder}, which {rule}", fix)


def _relative_paths(folder: Path, files: FilePaths) -> dict[str, Path]:
    """Return the files by their paths relative to the folder, with / as the separator."""
    cut = len(os.path.join(folder, "")) if folder != Path() else 0
    return {str(file)[cut:]: file for file in files}


# Names of files and folders
# ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def _by_names(folder: Path, files: FilePaths) -> dict[str, FilePaths]:
    names = {
        name: file
        for name, file in _relative_paths(folder, files).items()
        if posixpath.basename(name) not in NON_DATA_FILES
    }
    shards: dict[str, list[Path]] = {}
    for name, file in names.items():
        if (shard := _SHARD.fullmatch(name)) and _SPLIT.fullmatch(shard[1]):
            shards.setdefault(shard[1], []).append(file)
    found = {
        split: tuple(shards[split])
        for split in dict.fromkeys([*SPLIT_WORDS, *shards])
        if split in shards
    }
    return found or _by_folders(names) or _by_files(names) or {TRAIN_SPLIT: tuple(names.values())}


def _by_folders(names: dict[str, Path]) -> dict[str, FilePaths]:
    of_folders = {
        path: _splits_in(path.split("/"), _IN_FOLDER)
        for path in {posixpath.dirname(name) for name in names}
    }
    return _group_by_split({name: of_folders[posixpath.dirname(name)] for name in names}, names)


def _by_files(names: dict[str, Path]) -> dict[str, FilePaths]:
    return _group_by_split(
        {name: _splits_in([posixpath.basename(name)], _IN_FILE) for name in names}, names
    )


def _splits_in(words: list[str], patterns: dict[str, re.Pattern[str]]) -> list[str]:
    return [
        split
        for split, pattern in patterns.items()
        if any(pattern.fullmatch(word) for word in words)
    ]


def _group_by_split(of_names: dict[str, list[str]], names: dict[str, Path]) -> dict[str, FilePaths]:
    found = {
        split: tuple(names[name] for name, splits in of_names.items() if split in splits)
        for split in SPLIT_WORDS
    }
    return {split: files for split, files in found.items() if files}


# README.md
# --------------------------------------------------------------------------------------------------


def _read_configs(folder: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return (page, subsets) of the page that declares subsets: README.md or .huggingface.yaml.

    Return ("", {}) if no page declares subsets. As in `datasets`, .huggingface.yaml takes
    precedence.
    """
    found: tuple[str, dict[str, dict[str, Any]]] = "", {}
    for page in (folder / name for name in CONFIG_PAGES):
        if page.is_file() and (declared := _declared_configs(page)) is not None:
            found = page.name, declared
    return found


def _declared_configs(page: Path) -> dict[str, dict[str, Any]] | None:
    """Return the subsets that a page declares, or None if the page does not mention subsets."""
    is_readme = page.suffix == ".md"
    if is_readme and not page.read_bytes().removeprefix(BOM_UTF8).lstrip().startswith(b"---"):
        return None
    from huggingface_hub import repocard  # imported only for a page with a header

    # repocard's yaml is PyYAML, which is not one of the project's requirements
    cards: Any = repocard
    try:
        header = (
            cards.metadata_load(page)
            if is_readme
            else cards.yaml.safe_load(page.read_text("utf-8-sig"))
        )
        if "configs" not in (header or {}):
            return None
        return {str(config["config_name"]): dict(config) for config in header["configs"] or []}
    except (ValueError, TypeError, KeyError, AttributeError, cards.yaml.YAMLError) as error:
        rule = (
            f"{'the header of ' * is_readme}{page.name} cannot be read: {type(error).__name__}:"
            f" {' '.join(str(error).split())}"
        )
        fix = (
            f"correct {'the header' if is_readme else 'the file'}, or name the files instead of the"
            " folder"
        )
        raise config_error(f"--dataset {page.parent}", rule, fix) from error


def _default_config(configs: dict[str, dict[str, Any]]) -> str:
    names = [
        name
        for name, config in configs.items()
        if len(configs) == 1 or name == DEFAULT_SUBSET or config.get("default")
    ]
    return names[0] if names else ""


def _config_splits(
    folder: Path, files: FilePaths, page: str, config: dict[str, Any]
) -> dict[str, FilePaths]:
    where, name = f"--dataset {folder}", config["config_name"]
    if odd := sorted(key for key in config.keys() - _CONFIG_KEYS if config[key]):
        raise config_error(
            where,
            f"{page} sets {', '.join(odd)} for its subset {name}, which is not supported",
            "name the files of the subset instead of the folder",
        )
    base = posixpath.normpath(str(config.get("data_dir") or "."))
    if not (folder / base).is_dir():
        raise config_error(
            where,
            f"{page} has the data_dir {base} for its subset {name}, but that folder does not exist",
            "download it, or name the files",
        )
    if config.get("data_files") is None:
        return _data_dir_splits(folder, files, base)

    patterns = _split_patterns(where, page, config["data_files"])
    found = _by_patterns(folder, files, base, page, patterns)
    if not found:
        raise config_error(
            where,
            f"no file matches the data_files of {page} for its subset {name}",
            "download its files, or name your files instead",
        )
    return found


def _data_dir_splits(folder: Path, files: FilePaths, base: str) -> dict[str, FilePaths]:
    """Return the files of each split of a subset that has a data_dir but no data_files."""
    names = _relative_paths(folder, files)
    if base == ".":
        return _by_names(folder / base, tuple(names.values()))
    hidden = _hidden_parts(f"{base}/")
    inside = tuple(
        file
        for path, file in _pattern_candidates(folder, names, base).items()
        if path.startswith(f"{base}/") and _hidden_parts(path) == hidden
    )
    return _by_names(folder / base, inside)


def _by_patterns(
    folder: Path, files: FilePaths, base: str, page: str, patterns: dict[str, list[str]]
) -> dict[str, FilePaths]:
    """Return the files of each non-empty split, matched by patterns relative to `base`.

    `base` is a folder below `folder`. Raise `ConfigError` for a file that a pattern names but that
    does not exist.
    """
    names = _relative_paths(folder, files)
    found = {}
    for split, of_split in patterns.items():
        chosen: dict[Path, None] = {}
        for pattern in of_split:
            whole = posixpath.normpath(posixpath.join(base, pattern))
            matched = _match_pattern(whole, _pattern_candidates(folder, names, whole))
            if not matched and not any(sign in pattern for sign in "*?["):
                raise config_error(
                    f"--dataset {folder}",
                    f"{page} names {pattern} for its split {split}, but that file does not exist",
                    "download it, or name the files",
                )
            chosen.update(dict.fromkeys(matched))
        if chosen:
            found[split] = tuple(chosen)
    return found


def _pattern_candidates(folder: Path, names: dict[str, Path], pattern: str) -> dict[str, Path]:
    """Return the files that a pattern may match.

    Hidden files are included if the pattern names a hidden part.
    """
    return (
        _relative_paths(folder, files_below(folder, include_hidden=True))
        if any(_hidden_parts(f"{pattern}/"))
        else names
    )


def _hidden_parts(path: str) -> tuple[int, int]:
    """Return the numbers of a path's hidden parts and of its folders such as __pycache__.

    A pattern matches only files for which both numbers are the same.
    """
    parts = path.split("/")
    return sum(part.startswith(".") and set(part) != {"."} for part in parts), sum(
        part.startswith("__") for part in parts[:-1]
    )


def _split_patterns(where: str, page: str, data_files: object) -> dict[str, list[str]]:
    """Return each split's patterns, from any form that README.md may use."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    found: dict[str, list[str]] = {}
    for entry in entries:
        split, paths = (
            (str(entry.get("split")), entry.get("path"))
            if isinstance(entry, dict)
            else (TRAIN_SPLIT, entry)
        )
        listed: list[Any] = paths if isinstance(paths, list) else [paths]
        if not all(isinstance(path, str) for path in listed) or (
            isinstance(entry, dict) and (entry.keys() != {"split", "path"} or split in found)
        ):
            raise config_error(
                where,
                f"{page} has data_files that cannot be read: {entry!r}",
                "write - split: train and path: data/train-*",
            )
        if far := [
            path
            for path in listed
            if "://" in path or path.startswith("/") or ".." in path.split("/")
        ]:
            raise config_error(
                where,
                f"{page} names {far[0]}, which is not in the folder",
                "name the files instead of the folder",
            )
        found.setdefault(split, []).extend(listed)
    return found


def _match_pattern(pattern: str, names: dict[str, Path]) -> list[Path]:
    """Return the files that a pattern matches in fsspec: * within a name, ** for any folders."""
    *folders, last = pattern.split("/")
    ahead = "".join(
        "(?:[^/]+/)*" if part == "**" else f"{_path_part_regex(part)}/" for part in folders
    )
    whole = re.compile(ahead + (".+" if last == "**" else _path_part_regex(last)), re.DOTALL)
    hidden = _hidden_parts(pattern)
    found = {
        name: file
        for name, file in names.items()
        if whole.fullmatch(name) and _hidden_parts(name) == hidden
    }
    return [
        file
        for name, file in found.items()
        if (base := posixpath.basename(name)) not in NON_DATA_FILES or base == last
    ]


def _path_part_regex(part: str) -> str:
    signs = re.split(r"(\*+|\?|\[[!^]?\]?[^]]*\])", part)
    return "".join(
        _wildcard_regex(sign) if number % 2 else re.escape(sign)
        for number, sign in enumerate(signs)
    )


def _wildcard_regex(sign: str) -> str:
    if sign.startswith("["):
        inner = sign[1:-1].replace("\\", "\\\\")
        return f"[^/{inner[1:]}]" if inner[:1] in ("!", "^") else f"[{inner}]"
    return "[^/]" if sign == "?" else "[^/]*"


# Folders of save_to_disk
# ------------------------------------------------------------------------------------------


def _without_leftovers(folder: Path, files: FilePaths) -> tuple[FilePaths, dict[str, FilePaths]]:
    """Return (the data set's files, the splits of a folder that `save_to_disk` wrote).

    A state.json names the data files in its folder. Other files next to these data files are
    excluded, because they may be `datasets` caches that contain the same rows again.
    """
    states = {
        file.parent: state
        for file in files
        if str(file).endswith("state.json") and (state := _saved_dataset_state(file))
    }
    _check_states(folder, files, states)
    if not states:
        return files, {}

    named = {
        parent: {entry["filename"] for entry in state["_data_files"]}
        for parent, state in states.items()
    }
    kept = tuple(
        file for file in files if file.parent not in named or file.name in named[file.parent]
    )
    _check_complete(folder, kept, named)
    return kept, _saved_splits(folder, kept, states)


def _check_complete(folder: Path, kept: FilePaths, named: dict[Path, set[str]]) -> None:
    """Raise `ConfigError` if a file that a folder's state.json names does not exist."""
    for parent, names in named.items():
        missing = names - {file.name for file in kept if file.parent == parent}
        if missing:
            raise config_error(
                f"--dataset {folder}",
                f"{parent / 'state.json'} names {min(missing)}, but that file does not exist",
                COPY_FIX,
            )


def _saved_splits(folder: Path, files: FilePaths, states: dict[Path, Any]) -> dict[str, FilePaths]:
    """Return the splits of a folder that `save_to_disk` wrote; {} for other folders."""
    if folder in states:
        own = tuple(file for file in files if file.parent == folder)
        saved_as = states[folder].get("_split")
        names = [TRAIN_SPLIT, saved_as] if saved_as and isinstance(saved_as, str) else [TRAIN_SPLIT]
        return dict.fromkeys(names, own)

    page = folder / "dataset_dict.json"
    if page not in files:
        return {}
    splits = _read_json_object(page).get("splits")
    if not isinstance(splits, list):
        raise config_error(
            f"--dataset {folder}",
            "dataset_dict.json is damaged: it must hold a list of splits",
            COPY_FIX,
        )
    if lost := [split for split in splits if folder / str(split) not in states]:
        raise config_error(
            f"--dataset {folder}",
            f"dataset_dict.json names the split {lost[0]}, which does not exist",
            COPY_FIX,
        )
    return {
        str(split): tuple(file for file in files if file.parent == folder / str(split))
        for split in splits
    }


def is_saved_dataset(folder: Path, files: FilePaths) -> bool:
    """Return True for a folder that `save_to_disk` wrote."""
    return any(folder / name in files for name in ("state.json", "dataset_dict.json"))


def _check_states(folder: Path, files: FilePaths, states: dict[Path, Any]) -> None:
    """Raise `ConfigError` if a state.json does not name the Arrow files in its folder."""
    damaged = {
        file.parent
        for file in files
        if str(file).endswith("state.json") and file.name == "state.json"
    } - states.keys()
    if damaged and (
        found := sorted(
            file.parent for file in files if file.parent in damaged and file.suffix == ".arrow"
        )
    ):
        raise config_error(
            f"--dataset {folder}",
            f"{found[0] / 'state.json'} is damaged: it must name the Arrow files in its folder",
            COPY_FIX,
        )


def _saved_dataset_state(file: Path) -> dict[str, Any] | None:
    """Return the state of a saved data set, or None if the state.json has a different purpose."""
    found = _read_json_object(file) if file.name == "state.json" else {}
    listed = found.get("_data_files")
    right = isinstance(listed, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in listed
    )
    return found if right else None


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
