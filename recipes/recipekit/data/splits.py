"""Splits and subsets of a local folder: the files that `datasets.load_dataset(FOLDER)` takes for
each (datasets 5.2.0).

In this order: what `save_to_disk` wrote, the `configs` of README.md, `data/NAME-00000-of-00001.*`,
folders with the name of a split, files with the name of a split. In all other folders every file is
of the split `train`. Rules of their own instead of `datasets.data_files`: `datasets` does not
follow links to folders, and takes seconds to import.
"""

import functools
import json
import os
import posixpath
import re
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

from ..spec.refusal import refuse
from .folders import below

WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
NOT_DATA = (
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "dummy_data.zip",
)
PAGES = ("README.md", ".huggingface.yaml")  # may declare subsets; the last one that does counts
TRAIN = "train"  # the split of every file that has no other
DEFAULT = "default"  # name of the subset of a folder whose README names none
COPY = "copy the whole folder again"
_EDGE = r"[-._ 0-9]"  # what divides words in the name of a file or folder
_IN_FOLDER = {
    split: re.compile(rf"(?:.*{_EDGE})?(?:{'|'.join(words)})(?:{_EDGE}.*)?", re.DOTALL)
    for split, words in WORDS.items()
}
_IN_FILE = {
    split: re.compile(rf"(?:.*{_EDGE})?(?:{'|'.join(words)}){_EDGE}.*", re.DOTALL)
    for split, words in WORDS.items()
}
_SHARD = re.compile(r"data/([^/]*)-[0-9]{5}-of-[0-9]{5}[^/]*\.[^/]*")
_SPLIT = re.compile(r"\w+(\.\w+)*")
_SETTINGS = {
    "config_name",
    "data_files",
    "data_dir",
    "default",
    "features",
    "version",
    "description",
}

Files = tuple[Path, ...]


def splits_of(folder: Path, files: Files, subset: str = "") -> dict[str, Files]:
    """Return the files of each split of a folder, given all files below it.

    `subset` is a config of its README.

    Raises `Refusal` for a subset that the folder does not have, and for a README or state.json that
    cannot be followed.
    """
    files, saved = _without_leftovers(folder, files)
    where = f"--dataset {folder}"
    page, configs = ("", {}) if saved else _configs(folder)
    if configs and (name := subset or _default(configs)):
        if name in configs:
            return _of_config(folder, files, page, configs[name] | {"config_name": name})
    elif configs:
        rule = f"{page} has several subsets and no default: {', '.join(configs)}"
        raise refuse(
            where, rule, f"choose one with --subset, for example --subset {next(iter(configs))}"
        )
    elif subset in ("", DEFAULT):
        return saved or _by_names(folder, files)
    rule = (
        f"has the subsets {', '.join(configs)}"
        if configs
        else "has no subsets: its README.md names no configs"
    )
    fix = f"use --subset {next(iter(configs))}" if configs else "omit --subset"
    raise refuse(f"--subset {subset}", f"is not in {folder}, which {rule}", fix)


def _relative(folder: Path, files: Files) -> dict[str, Path]:
    """Return the files by their path below the folder, with / between folders."""
    cut = len(os.path.join(folder, "")) if folder != Path() else 0
    return {str(file)[cut:]: file for file in files}


# Names of files and folders
# ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def _by_names(folder: Path, files: Files) -> dict[str, Files]:
    names = {
        name: file
        for name, file in _relative(folder, files).items()
        if posixpath.basename(name) not in NOT_DATA
    }
    shards: dict[str, list[Path]] = {}
    for name, file in names.items():
        if (shard := _SHARD.fullmatch(name)) and _SPLIT.fullmatch(shard[1]):
            shards.setdefault(shard[1], []).append(file)
    found = {
        split: tuple(shards[split]) for split in dict.fromkeys([*WORDS, *shards]) if split in shards
    }
    return found or _by_folders(names) or _by_files(names) or {TRAIN: tuple(names.values())}


def _by_folders(names: dict[str, Path]) -> dict[str, Files]:
    of_folders = {
        path: _splits_in(path.split("/"), _IN_FOLDER)
        for path in {posixpath.dirname(name) for name in names}
    }
    return _grouped({name: of_folders[posixpath.dirname(name)] for name in names}, names)


def _by_files(names: dict[str, Path]) -> dict[str, Files]:
    return _grouped(
        {name: _splits_in([posixpath.basename(name)], _IN_FILE) for name in names}, names
    )


def _splits_in(words: list[str], patterns: dict[str, re.Pattern[str]]) -> list[str]:
    return [
        split
        for split, pattern in patterns.items()
        if any(pattern.fullmatch(word) for word in words)
    ]


def _grouped(of_names: dict[str, list[str]], names: dict[str, Path]) -> dict[str, Files]:
    found = {
        split: tuple(names[name] for name, splits in of_names.items() if split in splits)
        for split in WORDS
    }
    return {split: files for split, files in found.items() if files}


# README.md
# --------------------------------------------------------------------------------------------------


def _configs(folder: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """Read the subsets that README.md or .huggingface.yaml declares: (name of that file, subsets);
    {} if none is declared.

    Like `datasets`, take those of .huggingface.yaml if it declares any.
    """
    found: tuple[str, dict[str, dict[str, Any]]] = "", {}
    for page in (folder / name for name in PAGES):
        if page.is_file() and (declared := _declared(page)) is not None:
            found = page.name, declared
    return found


def _declared(page: Path) -> dict[str, dict[str, Any]] | None:
    """Return the subsets that a page declares; None if it says nothing about subsets."""
    is_readme = page.suffix == ".md"
    if is_readme and not page.read_bytes().removeprefix(BOM_UTF8).lstrip().startswith(b"---"):
        return None
    from huggingface_hub import repocard  # planning a run imports it only for a page with a header

    # its yaml, which PyYAML provides, has no place of its own among our requirements
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
        raise refuse(f"--dataset {page.parent}", rule, fix) from error


def _default(configs: dict[str, dict[str, Any]]) -> str:
    names = [
        name
        for name, config in configs.items()
        if len(configs) == 1 or name == DEFAULT or config.get("default")
    ]
    return names[0] if names else ""


def _of_config(folder: Path, files: Files, page: str, config: dict[str, Any]) -> dict[str, Files]:
    where, name = f"--dataset {folder}", config["config_name"]
    if odd := sorted(key for key in config.keys() - _SETTINGS if config[key]):
        raise refuse(
            where,
            f"{page} sets {', '.join(odd)} for its subset {name}, which is not supported",
            "name the files of the subset instead of the folder",
        )
    base = posixpath.normpath(str(config.get("data_dir") or "."))
    if not (folder / base).is_dir():
        raise refuse(
            where,
            f"{page} has the data_dir {base} for its subset {name}, but that folder does not exist",
            "download it, or name the files",
        )
    if config.get("data_files") is None:
        return _in_data_dir(folder, files, base)

    patterns = _patterns(where, page, config["data_files"])
    found = _by_patterns(folder, files, base, page, patterns)
    if not found:
        raise refuse(
            where,
            f"no file matches the data_files of {page} for its subset {name}",
            "download its files, or name your files instead",
        )
    return found


def _in_data_dir(folder: Path, files: Files, base: str) -> dict[str, Files]:
    """Return the files of each split of a subset that names a data_dir, and no data_files."""
    names = _relative(folder, files)
    if base == ".":
        return _by_names(folder / base, tuple(names.values()))
    hidden = _hidden_parts(f"{base}/")
    inside = tuple(
        file
        for path, file in _named(folder, names, base).items()
        if path.startswith(f"{base}/") and _hidden_parts(path) == hidden
    )
    return _by_names(folder / base, inside)


def _by_patterns(
    folder: Path, files: Files, base: str, page: str, patterns: dict[str, list[str]]
) -> dict[str, Files]:
    """Return the files of each split that has some, by its patterns below the folder `base`.

    Raises `Refusal` for a file that a pattern names, but that does not exist.
    """
    names = _relative(folder, files)
    found = {}
    for split, of_split in patterns.items():
        chosen: dict[Path, None] = {}
        for pattern in of_split:
            whole = posixpath.normpath(posixpath.join(base, pattern))
            matched = _matched(whole, _named(folder, names, whole))
            if not matched and not any(sign in pattern for sign in "*?["):
                raise refuse(
                    f"--dataset {folder}",
                    f"{page} names {pattern} for its split {split}, but that file does not exist",
                    "download it, or name the files",
                )
            chosen.update(dict.fromkeys(matched))
        if chosen:
            found[split] = tuple(chosen)
    return found


def _named(folder: Path, names: dict[str, Path], pattern: str) -> dict[str, Path]:
    """Return the files among which a pattern chooses: hidden ones too if it names a hidden part."""
    return (
        _relative(folder, below(folder, hidden=True))
        if any(_hidden_parts(f"{pattern}/"))
        else names
    )


def _hidden_parts(path: str) -> tuple[int, int]:
    """Count the hidden parts of a path, and its folders such as __pycache__. A pattern matches only
    files with equally many.
    """
    parts = path.split("/")
    return sum(part.startswith(".") and set(part) != {"."} for part in parts), sum(
        part.startswith("__") for part in parts[:-1]
    )


def _patterns(where: str, page: str, data_files: Any) -> dict[str, list[str]]:
    """Return the patterns of each split in the forms that README.md may have."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    found: dict[str, list[str]] = {}
    for entry in entries:
        split, paths = (
            (str(entry.get("split")), entry.get("path"))
            if isinstance(entry, dict)
            else (TRAIN, entry)
        )
        listed: list[Any] = paths if isinstance(paths, list) else [paths]
        if not all(isinstance(path, str) for path in listed) or (
            isinstance(entry, dict) and (entry.keys() != {"split", "path"} or split in found)
        ):
            raise refuse(
                where,
                f"{page} has data_files that cannot be read: {entry!r}",
                "write - split: train and path: data/train-*",
            )
        if far := [
            path
            for path in listed
            if "://" in path or path.startswith("/") or ".." in path.split("/")
        ]:
            raise refuse(
                where,
                f"{page} names {far[0]}, which is not in the folder",
                "name the files instead of the folder",
            )
        found.setdefault(split, []).extend(listed)
    return found


def _matched(pattern: str, names: dict[str, Path]) -> list[Path]:
    """Return the files that match a pattern as fsspec does: * within a name, ** for any folders."""
    *folders, last = pattern.split("/")
    ahead = "".join("(?:[^/]+/)*" if part == "**" else f"{_of_part(part)}/" for part in folders)
    whole = re.compile(ahead + (".+" if last == "**" else _of_part(last)), re.DOTALL)
    hidden = _hidden_parts(pattern)
    found = {
        name: file
        for name, file in names.items()
        if whole.fullmatch(name) and _hidden_parts(name) == hidden
    }
    return [
        file
        for name, file in found.items()
        if (base := posixpath.basename(name)) not in NOT_DATA or base == last
    ]


def _of_part(part: str) -> str:
    signs = re.split(r"(\*+|\?|\[[!^]?\]?[^]]*\])", part)
    return "".join(
        _of_sign(sign) if number % 2 else re.escape(sign) for number, sign in enumerate(signs)
    )


def _of_sign(sign: str) -> str:
    if sign.startswith("["):
        inner = sign[1:-1].replace("\\", "\\\\")
        return f"[^/{inner[1:]}]" if inner[:1] in ("!", "^") else f"[{inner}]"
    return "[^/]" if sign == "?" else "[^/]*"


# Folders of save_to_disk
# ------------------------------------------------------------------------------------------


def _without_leftovers(folder: Path, files: Files) -> tuple[Files, dict[str, Files]]:
    """Return the files without what lies beside a saved data set but is not its data, and the
    splits of a saved folder.

    A state.json names the files of its folder: caches of `datasets` beside them hold rows a second
    time.
    """
    states = {
        file.parent: state
        for file in files
        if str(file).endswith("state.json") and (state := _state(file))
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


def _check_complete(folder: Path, kept: Files, named: dict[Path, set[str]]) -> None:
    """Raise `Refusal` if a file that the state.json of its folder names does not exist."""
    for parent, names in named.items():
        missing = names - {file.name for file in kept if file.parent == parent}
        if missing:
            raise refuse(
                f"--dataset {folder}",
                f"{parent / 'state.json'} names {min(missing)}, but that file does not exist",
                COPY,
            )


def _saved_splits(folder: Path, files: Files, states: dict[Path, Any]) -> dict[str, Files]:
    """Return the splits of a folder that `save_to_disk` wrote; {} for another folder."""
    if folder in states:
        own = tuple(file for file in files if file.parent == folder)
        saved_as = states[folder].get("_split")
        names = [TRAIN, saved_as] if saved_as and isinstance(saved_as, str) else [TRAIN]
        return dict.fromkeys(names, own)

    page = folder / "dataset_dict.json"
    if page not in files:
        return {}
    splits = _parsed(page).get("splits")
    if not isinstance(splits, list):
        raise refuse(
            f"--dataset {folder}",
            "dataset_dict.json is damaged: it must hold a list of splits",
            COPY,
        )
    if lost := [split for split in splits if folder / str(split) not in states]:
        raise refuse(
            f"--dataset {folder}",
            f"dataset_dict.json names the split {lost[0]}, which does not exist",
            COPY,
        )
    return {
        str(split): tuple(file for file in files if file.parent == folder / str(split))
        for split in splits
    }


def is_saved(folder: Path, files: Files) -> bool:
    """Return True for a folder that `save_to_disk` wrote."""
    return any(folder / name in files for name in ("state.json", "dataset_dict.json"))


def _check_states(folder: Path, files: Files, states: dict[Path, Any]) -> None:
    """Raise `Refusal` for a state.json beside Arrow files that does not name them."""
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
        raise refuse(
            f"--dataset {folder}",
            f"{found[0] / 'state.json'} is damaged: it must name the Arrow files in its folder",
            COPY,
        )


def _state(file: Path) -> dict[str, Any] | None:
    """Return the state of a saved data set; None if the file is another state.json."""
    found = _parsed(file) if file.name == "state.json" else {}
    listed = found.get("_data_files")
    right = isinstance(listed, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in listed
    )
    return found if right else None


def _parsed(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
