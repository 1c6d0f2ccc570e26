"""Detection of compressed files by their content, regardless of their file names."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pool import ROOT
from recipekit.data.mixture import Domain
from recipekit.data.request import Request
from recipekit.data.source import READ_ERRORS
from recipekit.data.sources import open_source
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe

TEXTS = [f"document {number} with some more words than this" for number in range(3000)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
CSV = "text\n" + "\n".join(TEXTS)


def frame(name: str) -> Callable[[bytes], bytes]:
    """Return a function that compresses as the command-line tools do, with a frame header."""

    def compressed(content: bytes) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, name) as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()

    return compressed


# pzstd writes such a skippable frame before each data frame.
SKIPPED = b"\x53\x2a\x4d\x18\x15\x00\x00\x00" + b"user data of a frame."
PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": frame("zstd"),
    "lz4": frame("lz4"),
}
PACK |= {
    "lzma": lambda content: lzma.compress(content, format=lzma.FORMAT_ALONE),
    "zstd behind a skippable frame": lambda content: SKIPPED + SKIPPED + frame("zstd")(content),
    "lz4 behind a skippable frame": lambda content: SKIPPED + frame("lz4")(content),
}
ENDING = {
    "gzip": ".gz",
    "bzip2": ".bz2",
    "xz": ".xz",
    "zstd": ".zst",
    "lz4": ".lz4",
    "lzma": ".lzma",
}


def rows_of(file: Path) -> list[Any]:
    source = open_source(Request(dataset=str(file)), Domain("", str(file)), patience=None)  # type: ignore[arg-type]
    return [
        document
        for values in source.read(0, 0, 0)
        for value in values
        for document, _ in source.documents(value, "")
    ]


def planned(file: Path) -> Any:
    recipe = Recipe(model="recipekit/llama-nano", init="random", tokenizer="bytes")
    return resolve_run(
        parse(
            recipe, ROOT / "recipes" / "llama_nano_zero2.py", ["--dataset", str(file), "--dry_run"]
        )
    )


@pytest.mark.parametrize("name", PACK)
def test_content_decides_and_the_ending_names_the_kind(tmp_path: Path, name: str) -> None:
    for ending, content in (
        (".jsonl", LINES),
        (".csv", CSV.encode()),
        (".txt", "\n".join(TEXTS).encode()),
    ):
        for more in ("", ENDING[name.split()[0]], ".gz"):
            file = tmp_path / f"a{ending}{more}"
            file.write_bytes(PACK[name](content))
            planned(file)
            found = rows_of(file)
            assert (found if ending != ".txt" else "".join(found).splitlines()) == TEXTS, file.name


@pytest.mark.parametrize("name", PACK)
def test_several_streams_in_one_file_are_read(tmp_path: Path, name: str) -> None:
    """`cat a.gz b.gz` and parallel compressors write such files."""
    (tmp_path / "a.jsonl").write_bytes(
        PACK[name](LINES[: LINES.index(b"\n", 500)]) + PACK[name](LINES[LINES.index(b"\n", 500) :])
    )
    assert rows_of(tmp_path / "a.jsonl") == TEXTS


@pytest.mark.parametrize("name", PACK)
def test_a_broken_stream_is_an_error_that_is_caught(tmp_path: Path, name: str) -> None:
    packed = PACK[name](LINES)
    for number, content in enumerate(
        (packed[: len(packed) // 2], packed[:200] + bytes(40) + packed[240:])
    ):
        file = tmp_path / f"{number}.jsonl"
        file.write_bytes(content)
        with pytest.raises(READ_ERRORS):
            rows_of(file)


def test_a_plain_file_with_the_ending_of_a_compressed_one_is_read(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "a.jsonl.xz"):
        (tmp_path / name).write_bytes(LINES)
        planned(tmp_path / name)
        assert rows_of(tmp_path / name) == TEXTS


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            b"PAR1\x15\x04",
            (
                "a.jsonl: contains Parquet, but its ending says text. Rename it to end in .parquet,"
                " or download the correct file"
            ),
        ),
        (b"ARROW1\x00\x00", "contains Arrow, .* Rename it to end in .arrow"),
        (b"PK\x03\x04\x14\x00", "contains ZIP, .* Rename it to end in .zip"),
        (b"%PDF-1.7\n", "contains PDF, "),
        (b"SQLite format 3\x00", "contains SQLite, "),
    ],
)
def test_the_content_of_another_format_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=says) as refusal:
        planned(tmp_path / "a.jsonl")
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.txt.gz"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            gzip.compress(gzip.compress(LINES)),
            "is compressed twice: gzip in gzip. Decompress it once",
        ),
        (gzip.compress(PACK["zstd"](LINES)), "is compressed twice: zstd in gzip"),
        (PACK["xz"](PACK["bzip2"](LINES)), "is compressed twice: bzip2 in xz"),
        (b"LZIP\x01", "is compressed with lzip, which is not supported. Decompress it"),
        (b"\x1f\x9d\x90", "is compressed with compress, which is not supported"),
        (
            gzip.compress(b"PAR1\x15\x04"),
            (
                "contains Parquet, but its ending says text. Decompress it and rename it to end in"
                " .parquet"
            ),
        ),
    ],
)
def test_content_that_is_not_read_is_named(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}: {says}"):
        planned(tmp_path / name)


def test_a_later_file_that_is_compressed_twice_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(PACK["zstd"](LINES)))
    with pytest.raises(
        ConfigError,
        match=(
            r"must be text, but is compressed \(zstd\)\. .* If a file is compressed twice,"
            r" decompress it once"
        ),
    ):
        rows_of(tmp_path / "a.jsonl.gz")


POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid"
    b" sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.mark.parametrize(
    "name", ["a.txt", "a.jsonl", "a.parquet", "a.arrow", "a.csv", "a.jsonl.gz"]
)
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(POINTER)
    for look in (planned, rows_of):
        with pytest.raises(
            ConfigError,
            match=(
                rf"{name}: is a Git LFS pointer, not the file itself\. Fetch the file: git lfs pull"
            ),
        ):
            look(tmp_path / name)


def test_a_later_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number:03}.txt").write_text(
            "version https://example.org: a text that is no pointer"
        )
    (tmp_path / "299.txt").write_bytes(POINTER)
    with pytest.raises(ConfigError, match=r"299.txt: is a Git LFS pointer"):
        rows_of(tmp_path)
