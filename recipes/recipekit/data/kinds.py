"""Kinds of data files by their endings, and the files of a folder that are data."""

import functools
import os
from collections import Counter
from pathlib import Path

from ..spec.refusal import refuse
from .compression import ENDINGS
from .splits import NOT_DATA

KINDS = {
    ".txt": "text", ".md": "text", ".rst": "text", ".py": "text", ".yaml": "text",
    ".jsonl": "lines", ".ndjson": "lines", ".json": "lines",
    ".parquet": "parquet", ".arrow": "arrow",
    ".csv": "csv", ".tsv": "csv",
}  # fmt: skip
# of one kind, "pictures"
PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
MEDIA = {
    **dict.fromkeys(
        (".aac", ".aif", ".aiff", ".flac", ".m4a", ".mp3", ".oga", ".ogg", ".opus", ".wav", ".wma"),
        "sound",
    ),
    **dict.fromkeys((".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"), "video"),
}
OTHER_KINDS = (
    *MEDIA,
    *(
        ".xls",
        ".xlsx",
        ".xml",
        ".html",
        ".pdf",
        ".docx",
        ".zip",
        ".tar",
        ".tgz",
        ".db",
        ".pkl",
        ".npy",
    ),
)
# describe the data where they lie beside data of another kind
PAGES = (".md", ".rst", ".py", ".yaml")
# columns of the pictures or sounds beside them
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def suffix(file: Path) -> str:
    """Return the ending that names a file's kind, in small letters: .jsonl of a.jsonl.gz."""
    name, ending = os.path.splitext(file.name)
    return (os.path.splitext(name)[1] if ending.lower() in ENDINGS else ending).lower()


def kind_of(files: list[Path], dataset: str) -> str:
    """Return the kind of the files: text, lines, csv, parquet, arrow or pictures.

    Raises `Refusal` if the files are of several kinds, or of an unknown one.
    """
    kinds = {
        KINDS.get(ending, "pictures" if ending in PICTURES else "")
        for ending in {suffix(file) for file in files}
    }
    if "" in kinds:
        odd = next(file for file in files if suffix(file) not in (*KINDS, *PICTURES))
        fix = f"convert the file to one of {', '.join(KINDS)}"
        if suffix(odd) not in OTHER_KINDS:
            raise refuse(
                f"--dataset {odd}",
                "the file format is not clear from the ending",
                f"{fix}, or rename the file if it already has one of these formats",
            )
        raise refuse(f"--dataset {odd}", f"{suffix(odd)} files are not supported", fix)
    if len(kinds) > 1:
        raise refuse(
            f"--dataset {dataset}",
            f"contains files of several formats: {', '.join(sorted(kinds))}",
            "name the files of one format, for example FOLDER/*.jsonl",
        )
    return kinds.pop()


@functools.lru_cache(maxsize=32)
def possible(files: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the files of a folder that could be data by their endings.

    Pages and scripts are data only where they are alone.
    """
    known = {*KINDS, *PICTURES, *OTHER_KINDS}
    found = tuple(file for file in files if suffix(file) in known)
    pages = {file for file in found if suffix(file) in PAGES}
    alone = all(
        file in pages or suffix(file) not in KINDS or file.name in NOT_DATA for file in found
    )
    return found if alone else tuple(file for file in found if file not in pages)


@functools.lru_cache(maxsize=32)
def choose(files: tuple[Path, ...], pictures: bool) -> list[Path]:
    """Choose the files of a folder that are data.

    `pictures`: the task takes these, where both they and other files could be data.

    README and LICENSE beside data of another kind describe the data. CSV files beside other tables
    are left out unless they are more. Other mixtures of kinds are returned as they are, for
    `kind_of` to refuse.
    """
    endings = {file: suffix(file) for file in files}
    mixed = any(ending in PICTURES or ending in MEDIA for ending in endings.values())
    found = [
        file
        for file, ending in endings.items()
        if ending in KINDS and not (mixed and (file.name in METADATA or _is_readme(file)))
    ]
    shown = [file for file, ending in endings.items() if ending in PICTURES]
    if shown and (
        not found
        or (pictures and not {KINDS[endings[file]] for file in found} & {"parquet", "arrow"})
    ):
        return shown

    counts = Counter(endings[file] for file in found if file.name not in METADATA)
    leading = {KINDS[ending] for ending, count in counts.items() if count == max(counts.values())}
    # of equally many files `datasets` reads text last, and CSV before it
    if leading - {"csv", "text"} or leading == {"text"}:
        found = [file for file in found if KINDS[endings[file]] != "csv"]
    data = [file for file in found if KINDS[endings[file]] != "text" or not _is_readme(file)]
    return found if all(KINDS[endings[file]] == "text" for file in data) else data


def describes(file: Path) -> bool:
    """Return True for a file that describes the data beside it."""
    return file.name in NOT_DATA or file.name == "state.json" or _is_readme(file)


def _is_readme(file: Path) -> bool:
    return file.stem.upper() in ("README", "LICENSE")


def count_endings(files: list[Path]) -> str:
    """Return how many files have which ending, the most frequent ones first: 2 .md, 1 .zip."""
    counts = Counter(suffix(file) or file.name for file in files).most_common()
    listed = [f"{count} {ending}" for ending, count in counts[:3]]
    rest = sum(count for _, count in counts[3:])
    return ", ".join(listed + ([f"{rest} others"] if rest else []))
