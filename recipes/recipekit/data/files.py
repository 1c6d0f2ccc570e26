"""The local files that a dataset flag specifies.

The flag may contain paths, globs, and folders with splits and subsets.
"""

import contextlib
import os
import sysconfig
from collections import Counter
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from ..spec.errors import ConfigError, Problem, config_error
from ..spec.paths import path_exists
from .folders import excluded_entries, files_below, is_excluded, parent_folders
from .kinds import (
    FORMAT_BY_ENDING,
    IMAGE_ENDINGS,
    MEDIA_ENDINGS,
    METADATA_FILES,
    candidate_files,
    choose_data_files,
    count_endings,
    is_description,
    kind_of,
    suffix,
)
from .splits import CONFIG_PAGES, DEFAULT_SUBSET, TRAIN_SPLIT, is_saved_dataset, splits_of

MAX_COUNTED_FILES = 32  # maximum number of Parquet files whose rows are counted at the start


def local_files(
    dataset: str, images: bool = False, split: str = TRAIN_SPLIT, subset: str = ""
) -> list[Path] | None:
    """Return the files that a dataset flag specifies, sorted.

    Return None if the flag must be a hub id or an address. The flag may contain a path, a folder, a
    glob, or several of these separated by commas. `split` and `subset` select files of a folder.
    All other files belong to the split `train`. If a folder contains several kinds of files,
    `images` selects the images; otherwise all other files are selected. Raise `ConfigError` if the
    files do not exist.
    """
    if "://" in dataset:
        _check_addresses(dataset)
        _check_no_split(dataset.partition("?")[0], split, subset)
        return None
    parts = _split_dataset_flag(dataset)
    files: dict[Path, None] = {}  # keeps order: sorting sorted files is fast
    problems = []
    for part in parts:
        path = Path(part).expanduser()
        found = [path] if path.is_file() else _glob_files(path) if not path.is_dir() else []
        is_path = (
            len(parts) > 1
            or part.startswith((".", "/", "~"))
            or part.count("/") > 1
            or any(c in part for c in "*?[")
            or suffix(path) in FORMAT_BY_ENDING
        )
        if not found and not is_path and not path.exists():
            return None
        try:
            if path.is_dir():
                found = _choose_folder_files(path, images, split, subset).files
            elif found:
                _check_no_split(part, split, subset)
        except ConfigError as error:
            problems += error.problems
            continue
        if not found:
            problems.append(
                Problem(
                    f"--dataset {part}",
                    "the file does not exist",
                    "check the path, or give a hub id as ORG/NAME",
                )
            )
        files.update(dict.fromkeys(found))
    if problems:
        raise ConfigError(problems)
    found = sorted(files)
    return (
        list({os.path.abspath(file): file for file in reversed(found)}.values())[::-1]
        if len(parts) > 1
        else found
    )


def _check_addresses(dataset: str) -> None:
    """Raise `ConfigError` for unsupported addresses such as s3://, and for addresses mixed with
    paths.
    """
    for part in dataset.split(","):
        address = part.strip()
        if not address or address.startswith(("http://", "https://")):
            continue
        if "://" not in address:
            raise config_error(
                f"--dataset {address}",
                "a path cannot be combined with addresses",
                "give paths only, or addresses only",
            )
        fixes = {
            "hf": "give the hub id, ORG/NAME",
            "file": f"give the path, {address.partition('://')[2]}",
        }
        fix = fixes.get(
            address.partition("://")[0], "mount it or copy it to a local folder, and give that path"
        )
        raise config_error(
            f"--dataset {address.partition('?')[0]}",
            "only https:// and http:// addresses can be read",
            fix,
        )


def _check_no_split(part: str, split: str, subset: str) -> None:
    """Raise `ConfigError` if a split or subset is requested for a file, a glob or an address.

    All rows of such data belong to the split train.
    """
    if split != TRAIN_SPLIT:
        raise config_error(
            f"--split {split}",
            f"{part} is not a folder, so all its rows are in the split {TRAIN_SPLIT}",
            f"use --split {TRAIN_SPLIT}, or name a folder",
        )
    if subset not in ("", DEFAULT_SUBSET):
        raise config_error(
            f"--subset {subset}",
            f"{part} is not a folder, so it has no subsets",
            "omit --subset. In a mixture, set the subset of a folder with NAME=FOLDER:SUBSET@1",
        )


def _split_dataset_flag(dataset: str) -> list[str]:
    return (
        [dataset]
        if path_exists(dataset)
        else [part.strip() for part in dataset.split(",") if part.strip()]
    )


def _glob_files(pattern: Path) -> list[Path]:
    return [file for match in glob(str(pattern), recursive=True) if (file := Path(match)).is_file()]


# Folders
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderFiles:
    """A folder's files: files to read, counts of files that belong only to other splits, and the
    rest.
    """

    files: list[Path]
    of_other_splits: dict[str, int]
    rest: list[Path]


def _choose_folder_files(folder: Path, images: bool, split: str, subset: str) -> FolderFiles:
    """Return a folder's files for a split and a subset.

    Raise `ConfigError` if the folder does not have this split or subset.
    """
    everything = files_below(folder)
    data = candidate_files(everything)
    of_names = splits_of(folder, data, subset)
    splits = {name: files for name, files in of_names.items() if files}
    if images and _are_class_folders(folder, data, splits):
        splits = {TRAIN_SPLIT: data}
    if split in of_names and split not in splits and is_saved_dataset(folder, data):
        others = f"use --split {' or --split '.join(splits)}, or " if splits else ""
        raise config_error(
            f"--dataset {folder}",
            f"its split {split} was saved without rows",
            f"{others}use other data",
        )
    if splits and split not in splits:
        rule = f"{folder} does not have this split, only {', '.join(splits)}"
        every = folder / f"**/*{suffix(next(file for files in splits.values() for file in files))}"
        raise config_error(
            f"--split {split}",
            rule,
            f"use --split {next(iter(splits))}, or name the files, for example --dataset '{every}'",
        )

    chosen = {name: choose_data_files(files, images) for name, files in splits.items()}
    files = chosen.get(split, [])
    _check_folder(folder, files, splits.get(split, ()), images, split)
    read, counted = set(files), set(files)
    of_other_splits = {}
    for name, others in chosen.items():
        of_other_splits |= {name: len(rest)} if (rest := set(others) - read) else {}
        counted |= set(others)
    return FolderFiles(
        files,
        of_other_splits,
        [file for file in everything if file not in counted and not is_description(file)],
    )


def _check_folder(
    folder: Path, files: list[Path], of_split: tuple[Path, ...], images: bool, split: str
) -> None:
    """Raise `ConfigError` if a folder contains no supported files.

    Audio, video, and images with a metadata file of columns are not supported either.
    """
    where = f"--dataset {folder}"
    media = [file for file in of_split if suffix(file) in MEDIA_ENDINGS]
    known = (
        f"{', '.join(FORMAT_BY_ENDING)}{', or images in one folder per class' if images else ''}"
    )
    if media and len(media) >= len(files):
        rule = (
            f"contains {MEDIA_ENDINGS[suffix(media[0])]} ({count_endings(media)}), which no task"
            " supports"
        )
        raise config_error(where, rule, "name its text files with --dataset to train on them")
    if not files:
        raise config_error(
            where,
            f"contains no supported files ({known})",
            "convert its files to one of these formats",
        )
    metadata = [file for file in of_split if file.name in METADATA_FILES]
    if metadata and images and suffix(files[0]) in IMAGE_ENDINGS:
        rule = f"contains {metadata[0].name} with columns for its images, which is not supported"
        convert = (
            f"datasets.load_dataset('imagefolder', data_dir={str(folder)!r},"
            f" split={split!r}).to_parquet('pictures.parquet')"
        )
        raise config_error(where, rule, f"convert the folder with {convert}, and name that file")


def _are_class_folders(
    folder: Path, data: tuple[Path, ...], splits: dict[str, tuple[Path, ...]]
) -> bool:
    """Return True if the direct subfolders are image classes.

    This is the case if the subfolders contain images, and if at least one subfolder does not have
    the name of a split, such as `train` or `dev`.
    """
    shown = [file for file in data if suffix(file) in IMAGE_ENDINGS]
    folders = parent_folders(shown)
    of_splits = {path for files in splits.values() for path in parent_folders(list(files))}
    flat = bool(folders) and all(path.parent == folder for path in folders)
    return flat and not of_splits.issuperset(folders) and not (folder / "README.md").is_file()


def describe_files(dataset: str, images: bool, split: str, subset: str) -> list[str]:
    """Return a line for each part of a dataset flag.

    The line lists the files that are read, and the files that are not read and why.
    """
    lines = []
    for part in _split_dataset_flag(dataset):
        path, rest = Path(part).expanduser(), list[str]()
        if path.is_dir():
            found = _choose_folder_files(path, images, split, subset)
            files = found.files
            rest += [
                f"{_plural(count, 'file')} of split {name}"
                for name, count in found.of_other_splits.items()
            ]
            reasons = Counter(_excluded_entries(path, files).values())
            rest += [_plural(count, reason) for reason, count in sorted(reasons.items())]
            rest += [f"by their endings {count_endings(found.rest)}"] if found.rest else []
        else:
            files = local_files(part, images) or []
        rows = _num_rows(files)
        text = (
            f"reads {_plural(len(files), 'file')} of split"
            f" {split}{f' ({rows:,} rows)' if rows else ''}"
        )
        lines.append(
            f"--dataset {part}: {text}" + (f"; leaves out {', '.join(rest)}" if rest else "")
        )
    return lines


def _excluded_entries(folder: Path, files: list[Path]) -> dict[Path, str]:
    """Return the entries that a folder's listing excludes.

    Hidden entries that the folder's README names are not among them.
    """
    reasons = excluded_entries(folder)
    named = {path for file in files for path in (file, *file.parents)} if reasons else set[Path]()
    named.update(folder / page for page in CONFIG_PAGES)
    return {path: reason for path, reason in reasons.items() if path not in named}


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count > 1 else ''}"


def _num_rows(files: list[Path]) -> int:
    """Return the number of rows in a few Parquet files; 0 if counting would require reading the
    files.
    """
    if len(files) > MAX_COUNTED_FILES or any(suffix(file) != ".parquet" for file in files):
        return 0
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return sum(pq.read_metadata(file).num_rows for file in files)
    except (OSError, pa.ArrowException):  # the check of the first row reports this error
        return 0


# Images in one folder per class
# ------------------------------------------------------------------------------


def folder_classes(dataset: str, split: str = TRAIN_SPLIT, subset: str = "") -> list[str]:
    """Return the classes of an image folder.

    Return [] for other data, and for a folder that cannot be opened, because the code that opens
    the folder reports the reason.
    """
    with contextlib.suppress(ConfigError):
        files = local_files(dataset, True, split, subset) if dataset != "builtin" else None
        if files and kind_of(files, dataset) == "pictures":
            return image_classes(files, dataset)
    return []


def image_classes(files: list[Path], dataset: str) -> list[str]:
    """Return the sorted class names of images, which are the names of their folders.

    Raise `ConfigError` unless all class folders are at the same depth and contain images.
    """
    folders = parent_folders(files)
    classes = sorted({folder.name for folder in folders})
    fix = "put the images into one folder per class (FOLDER/CLASS/IMAGE.png), and name FOLDER"
    for root in (
        path for part in _split_dataset_flag(dataset) if (path := Path(part).expanduser()).is_dir()
    ):
        inside = [folder for folder in folders if folder.is_relative_to(root)]
        if root in inside:
            raise config_error(
                f"--dataset {root}", "contains images outside the class folders", fix
            )
        if deep := [folder for folder in inside if len(folder.parts) != len(inside[0].parts)]:
            rule = (
                f"its class folders must be at the same depth, not {inside[0].relative_to(root)}"
                f" and {deep[0].relative_to(root)}"
            )
            raise config_error(
                f"--dataset {root}",
                rule,
                f"name the parent folder of the classes, for example {deep[0].parent}",
            )
        if len(classes) == 1:
            break
        children = {
            child
            for parent in {folder.parent for folder in inside}
            for child in parent.iterdir()
            if child.is_dir()
        }
        if empty := sorted(
            child for child in children.difference(inside) if not is_excluded(child.name, True)
        ):
            raise config_error(
                f"--dataset {root}",
                f"the folder of the class {empty[0].name} contains no images",
                "add images to it, or delete it",
            )
    if len(classes) == 1:
        raise config_error(
            f"--dataset {dataset}", f"must have at least two classes, not only {classes[0]}", fix
        )
    return classes


def standard_library(*without: str) -> list[Path]:
    """Return the Python sources of the running interpreter's standard library, sorted.

    Folders and files whose names are in `without` are excluded.
    """
    skipped = {"site-packages", "dist-packages", *without}
    files = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        # do not walk into site-packages, which may contain 100,000 files
        folders[:] = [name for name in folders if name not in skipped]
        files += [
            Path(folder, name) for name in names if name.endswith(".py") and name not in skipped
        ]
    return sorted(files)
