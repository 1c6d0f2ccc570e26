"""Kinds of data files by their file-name extensions, and the choice of a folder's data files."""

import functools
import os
from collections import Counter
from pathlib import Path

from ..spec.errors import config_error
from .compression import COMPRESSION_ENDINGS
from .splits import NON_DATA_FILES

FORMAT_BY_ENDING = {
    ".txt": "text", ".md": "text", ".rst": "text", ".py": "text", ".yaml": "text",
    ".jsonl": "lines", ".ndjson": "lines", ".json": "lines",
    ".parquet": "parquet", ".arrow": "arrow",
    ".csv": "csv", ".tsv": "csv",
}  # fmt: skip
# files of one kind, "pictures"
IMAGE_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
MEDIA_ENDINGS = {
    **dict.fromkeys(
        (".aac", ".aif", ".aiff", ".flac", ".m4a", ".mp3", ".oga", ".ogg", ".opus", ".wav", ".wma"),
        "sound",
    ),
    **dict.fromkeys((".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"), "video"),
}
UNSUPPORTED_ENDINGS = (
    *MEDIA_ENDINGS,
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
# files that count as descriptions if they are next to data of a different kind
PAGE_ENDINGS = (".md", ".rst", ".py", ".yaml")
# files with columns that belong to the images or sounds in the same folder
METADATA_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def suffix(file: Path) -> str:
    """Return the extension that decides a file's kind, in lower case: .jsonl for a.jsonl.gz."""
    name, ending = os.path.splitext(file.name)
    return (os.path.splitext(name)[1] if ending.lower() in COMPRESSION_ENDINGS else ending).lower()


def kind_of(files: list[Path], dataset: str) -> str:
    """Return the kind of the files: text, lines, csv, parquet, arrow or pictures.

    Raise `ConfigError` if the files have several kinds, or an unknown kind.
    """
    kinds = {
        FORMAT_BY_ENDING.get(ending, "pictures" if ending in IMAGE_ENDINGS else "")
        for ending in {suffix(file) for file in files}
    }
    if "" in kinds:
        odd = next(
            file for file in files if suffix(file) not in (*FORMAT_BY_ENDING, *IMAGE_ENDINGS)
        )
        fix = f"convert the file to one of {', '.join(FORMAT_BY_ENDING)}"
        if suffix(odd) not in UNSUPPORTED_ENDINGS:
            raise config_error(
                f"--dataset {odd}",
                "the file format is not clear from the ending",
                f"{fix}, or rename the file if it already has one of these formats",
            )
        raise config_error(f"--dataset {odd}", f"{suffix(odd)} files are not supported", fix)
    if len(kinds) > 1:
        raise config_error(
            f"--dataset {dataset}",
            f"contains files of several formats: {', '.join(sorted(kinds))}",
            "name the files of one format, for example FOLDER/*.jsonl",
        )
    return kinds.pop()


@functools.lru_cache(maxsize=32)
def candidate_files(files: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the files of a folder that could be data according to their extensions.

    Pages and scripts count as data only if the folder has no other data.
    """
    known = {*FORMAT_BY_ENDING, *IMAGE_ENDINGS, *UNSUPPORTED_ENDINGS}
    found = tuple(file for file in files if suffix(file) in known)
    pages = {file for file in found if suffix(file) in PAGE_ENDINGS}
    alone = all(
        file in pages or suffix(file) not in FORMAT_BY_ENDING or file.name in NON_DATA_FILES
        for file in found
    )
    return found if alone else tuple(file for file in found if file not in pages)


@functools.lru_cache(maxsize=32)
def choose_data_files(files: tuple[Path, ...], images: bool) -> list[Path]:
    """Return a folder's data files.

    If both images and other files could be data, the images are chosen if `images` is True. README
    and LICENSE files next to data of a different kind are descriptions. CSV files next to other
    tables are excluded unless they are more numerous. All other mixtures of kinds are returned
    unchanged, and `kind_of` rejects them.
    """
    endings = {file: suffix(file) for file in files}
    mixed = any(ending in IMAGE_ENDINGS or ending in MEDIA_ENDINGS for ending in endings.values())
    found = [
        file
        for file, ending in endings.items()
        if ending in FORMAT_BY_ENDING
        and not (mixed and (file.name in METADATA_FILES or _is_readme(file)))
    ]
    shown = [file for file, ending in endings.items() if ending in IMAGE_ENDINGS]
    if shown and (
        not found
        or (
            images
            and not {FORMAT_BY_ENDING[endings[file]] for file in found} & {"parquet", "arrow"}
        )
    ):
        return shown

    counts = Counter(endings[file] for file in found if file.name not in METADATA_FILES)
    leading = {
        FORMAT_BY_ENDING[ending]
        for ending, count in counts.items()
        if count == max(counts.values())
    }
    # if the numbers of files are equal, `datasets` prefers CSV to text, and all other kinds to both
    if leading - {"csv", "text"} or leading == {"text"}:
        found = [file for file in found if FORMAT_BY_ENDING[endings[file]] != "csv"]
    data = [
        file for file in found if FORMAT_BY_ENDING[endings[file]] != "text" or not _is_readme(file)
    ]
    return found if all(FORMAT_BY_ENDING[endings[file]] == "text" for file in data) else data


def is_description(file: Path) -> bool:
    """Return True for a file that describes the data next to it."""
    return file.name in NON_DATA_FILES or file.name == "state.json" or _is_readme(file)


def _is_readme(file: Path) -> bool:
    return file.stem.upper() in ("README", "LICENSE")


def count_endings(files: list[Path]) -> str:
    """Return the number of files per extension, most frequent first: 2 .md, 1 .zip."""
    counts = Counter(suffix(file) or file.name for file in files).most_common()
    listed = [f"{count} {ending}" for ending, count in counts[:3]]
    rest = sum(count for _, count in counts[3:])
    return ", ".join(listed + ([f"{rest} others"] if rest else []))
