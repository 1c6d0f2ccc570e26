"""Which local files a dataset flag names: paths, globs, and of folders the files of a split and a
subset.
"""

import contextlib
import os
import sysconfig
from collections import Counter
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from ..spec.paths import is_there
from ..spec.refusal import Problem, Refusal, refuse
from .folders import below, folders_of, is_left_out, left_out
from .kinds import (
    KINDS,
    MEDIA,
    METADATA,
    PICTURES,
    choose,
    count_endings,
    describes,
    kind_of,
    possible,
    suffix,
)
from .splits import DEFAULT, PAGES, TRAIN, is_saved, splits_of

COUNTED = 32  # Parquet files whose rows are counted for the line at the start


def local_files(
    dataset: str, pictures: bool = False, split: str = TRAIN, subset: str = ""
) -> list[Path] | None:
    """Return the files that a dataset flag names (path, folder, glob, several by comma), sorted;
    None if it must be a hub id or an address.

    A folder is read by its `split` and `subset`; all other files are of the split `train`. Of a
    folder with files of several kinds `pictures` says which are data: the pictures, or all others.
    Raises `Refusal` if there are no such files.
    """
    if "://" in dataset:
        _check_addresses(dataset)
        _check_whole(dataset.partition("?")[0], split, subset)
        return None
    parts = _parts(dataset)
    files: dict[Path, None] = {}  # in order, as each part has them: to sort what is sorted is fast
    problems = []
    for part in parts:
        path = Path(part).expanduser()
        found = [path] if path.is_file() else _matching(path) if not path.is_dir() else []
        is_path = (
            len(parts) > 1
            or part.startswith((".", "/", "~"))
            or part.count("/") > 1
            or any(c in part for c in "*?[")
            or suffix(path) in KINDS
        )
        if not found and not is_path and not path.exists():
            return None
        try:
            if path.is_dir():
                found = _of_folder(path, pictures, split, subset).files
            elif found:
                _check_whole(part, split, subset)
        except Refusal as refusal:
            problems += refusal.problems
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
        raise Refusal(problems)
    found = sorted(files)
    return (
        list({os.path.abspath(file): file for file in reversed(found)}.values())[::-1]
        if len(parts) > 1
        else found
    )


def _check_addresses(dataset: str) -> None:
    """Raise `Refusal` for addresses that no run reads, such as s3://, and for paths beside
    addresses.
    """
    for part in dataset.split(","):
        address = part.strip()
        if not address or address.startswith(("http://", "https://")):
            continue
        if "://" not in address:
            raise refuse(
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
        raise refuse(
            f"--dataset {address.partition('?')[0]}",
            "only https:// and http:// addresses can be read",
            fix,
        )


def _check_whole(part: str, split: str, subset: str) -> None:
    """Raise `Refusal` for a split or a subset of a file, a glob or an address, whose rows are all
    of the split train.
    """
    if split != TRAIN:
        raise refuse(
            f"--split {split}",
            f"{part} is not a folder, so all its rows are in the split {TRAIN}",
            f"use --split {TRAIN}, or name a folder",
        )
    if subset not in ("", DEFAULT):
        raise refuse(
            f"--subset {subset}",
            f"{part} is not a folder, so it has no subsets",
            "omit --subset. In a mixture, set the subset of a folder with NAME=FOLDER:SUBSET@1",
        )


def _parts(dataset: str) -> list[str]:
    return (
        [dataset]
        if is_there(dataset)
        else [part.strip() for part in dataset.split(",") if part.strip()]
    )


def _matching(pattern: Path) -> list[Path]:
    return [file for match in glob(str(pattern), recursive=True) if (file := Path(match)).is_file()]


# Folders
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderFiles:
    """The files of a folder that are read, how many are of its other splits only, and the rest."""

    files: list[Path]
    of_other_splits: dict[str, int]
    rest: list[Path]


def _of_folder(folder: Path, pictures: bool, split: str, subset: str) -> FolderFiles:
    """Choose the files of a folder for a split and a subset.

    Raises `Refusal` if the folder does not have them.
    """
    everything = below(folder)
    data = possible(everything)
    of_names = splits_of(folder, data, subset)
    splits = {name: files for name, files in of_names.items() if files}
    if pictures and _are_classes(folder, data, splits):
        splits = {TRAIN: data}
    if split in of_names and split not in splits and is_saved(folder, data):
        others = f"use --split {' or --split '.join(splits)}, or " if splits else ""
        raise refuse(
            f"--dataset {folder}",
            f"its split {split} was saved without rows",
            f"{others}use other data",
        )
    if splits and split not in splits:
        rule = f"{folder} does not have this split, only {', '.join(splits)}"
        every = folder / f"**/*{suffix(next(file for files in splits.values() for file in files))}"
        raise refuse(
            f"--split {split}",
            rule,
            f"use --split {next(iter(splits))}, or name the files, for example --dataset '{every}'",
        )

    chosen = {name: choose(files, pictures) for name, files in splits.items()}
    files = chosen.get(split, [])
    _check_folder(folder, files, splits.get(split, ()), pictures, split)
    read, counted = set(files), set(files)
    of_other_splits = {}
    for name, others in chosen.items():
        of_other_splits |= {name: len(rest)} if (rest := set(others) - read) else {}
        counted |= set(others)
    return FolderFiles(
        files,
        of_other_splits,
        [file for file in everything if file not in counted and not describes(file)],
    )


def _check_folder(
    folder: Path, files: list[Path], of_split: tuple[Path, ...], pictures: bool, split: str
) -> None:
    """Raise `Refusal` if a folder holds no files for any task, or files of sound, or pictures with
    columns of their own.
    """
    where = f"--dataset {folder}"
    media = [file for file in of_split if suffix(file) in MEDIA]
    known = f"{', '.join(KINDS)}{', or images in one folder per class' if pictures else ''}"
    if media and len(media) >= len(files):
        rule = (
            f"contains {MEDIA[suffix(media[0])]} ({count_endings(media)}), which no task supports"
        )
        raise refuse(where, rule, "name its text files with --dataset to train on them")
    if not files:
        raise refuse(
            where,
            f"contains no supported files ({known})",
            "convert its files to one of these formats",
        )
    metadata = [file for file in of_split if file.name in METADATA]
    if metadata and pictures and suffix(files[0]) in PICTURES:
        rule = f"contains {metadata[0].name} with columns for its images, which is not supported"
        convert = (
            f"datasets.load_dataset('imagefolder', data_dir={str(folder)!r},"
            f" split={split!r}).to_parquet('pictures.parquet')"
        )
        raise refuse(where, rule, f"convert the folder with {convert}, and name that file")


def _are_classes(folder: Path, data: tuple[Path, ...], splits: dict[str, tuple[Path, ...]]) -> bool:
    """Return True if the folders right below hold pictures of a class each, and only some have the
    name of a split, as `train` or `dev`.
    """
    shown = [file for file in data if suffix(file) in PICTURES]
    folders = folders_of(shown)
    of_splits = {path for files in splits.values() for path in folders_of(list(files))}
    flat = bool(folders) and all(path.parent == folder for path in folders)
    return flat and not of_splits.issuperset(folders) and not (folder / "README.md").is_file()


def say_files(dataset: str, pictures: bool, split: str, subset: str) -> list[str]:
    """Return a line for each part of a dataset flag: the local files that are read, and what is
    left out and why.
    """
    lines = []
    for part in _parts(dataset):
        path, rest = Path(part).expanduser(), list[str]()
        if path.is_dir():
            found = _of_folder(path, pictures, split, subset)
            files = found.files
            rest += [
                f"{_counted(count, 'file')} of split {name}"
                for name, count in found.of_other_splits.items()
            ]
            reasons = Counter(_not_read(path, files).values())
            rest += [_counted(count, reason) for reason, count in sorted(reasons.items())]
            rest += [f"by their endings {count_endings(found.rest)}"] if found.rest else []
        else:
            files = local_files(part, pictures) or []
        rows = _num_rows(files)
        text = (
            f"reads {_counted(len(files), 'file')} of split"
            f" {split}{f' ({rows:,} rows)' if rows else ''}"
        )
        lines.append(
            f"--dataset {part}: {text}" + (f"; leaves out {', '.join(rest)}" if rest else "")
        )
    return lines


def _not_read(folder: Path, files: list[Path]) -> dict[Path, str]:
    """Return the entries that the listing of a folder leaves out, except hidden ones that its
    README names.
    """
    reasons = left_out(folder)
    named = {path for file in files for path in (file, *file.parents)} if reasons else set[Path]()
    named.update(folder / page for page in PAGES)
    return {path: reason for path, reason in reasons.items() if path not in named}


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count > 1 else ''}"


def _num_rows(files: list[Path]) -> int:
    """Return the rows of a few Parquet files; 0 if they are not known without reading the files."""
    if len(files) > COUNTED or any(suffix(file) != ".parquet" for file in files):
        return 0
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return sum(pq.read_metadata(file).num_rows for file in files)
    except (OSError, pa.ArrowException):  # the check of the first row says why
        return 0


# Pictures in a folder for each class
# ------------------------------------------------------------------------------


def folder_classes(dataset: str, split: str = TRAIN, subset: str = "") -> list[str]:
    """Lists the classes of a folder of pictures; none of other data, and of a folder that cannot be
    opened: who opens it says why.
    """
    with contextlib.suppress(Refusal):
        files = local_files(dataset, True, split, subset) if dataset != "builtin" else None
        if files and kind_of(files, dataset) == "pictures":
            return picture_classes(files, dataset)
    return []


def picture_classes(files: list[Path], dataset: str) -> list[str]:
    """Lists the classes of pictures, which are the names of their folders, sorted.

    Raises `Refusal` unless the folders of classes are equally deep and none is empty.
    """
    folders = folders_of(files)
    classes = sorted({folder.name for folder in folders})
    fix = "put the images into one folder per class (FOLDER/CLASS/IMAGE.png), and name FOLDER"
    for root in (path for part in _parts(dataset) if (path := Path(part).expanduser()).is_dir()):
        inside = [folder for folder in folders if folder.is_relative_to(root)]
        if root in inside:
            raise refuse(f"--dataset {root}", "contains images outside the class folders", fix)
        if deep := [folder for folder in inside if len(folder.parts) != len(inside[0].parts)]:
            rule = (
                f"its class folders must be at the same depth, not {inside[0].relative_to(root)}"
                f" and {deep[0].relative_to(root)}"
            )
            raise refuse(
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
            child for child in children.difference(inside) if not is_left_out(child.name, True)
        ):
            raise refuse(
                f"--dataset {root}",
                f"the folder of the class {empty[0].name} contains no images",
                "add images to it, or delete it",
            )
    if len(classes) == 1:
        raise refuse(
            f"--dataset {dataset}", f"must have at least two classes, not only {classes[0]}", fix
        )
    return classes


def standard_library(*without: str) -> list[Path]:
    """Lists the Python sources of the running interpreter's standard library, sorted, but for
    folders and files named in `without`.
    """
    skipped = {"site-packages", "dist-packages", *without}
    files = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        # not walked into: site-packages may hold 100,000 files
        folders[:] = [name for name in folders if name not in skipped]
        files += [
            Path(folder, name) for name in names if name.endswith(".py") and name not in skipped
        ]
    return sorted(files)
