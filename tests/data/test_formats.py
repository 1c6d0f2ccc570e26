"""Data file formats: texts, tables and token ids, and rows that cannot be read."""

import contextlib
import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recipekit.data import chunks, stream
from recipekit.data.batching import DataRank
from recipekit.data.formats import MAX_DOCUMENT_CHARACTERS
from recipekit.data.mixture import Domain
from recipekit.data.request import Sizes
from recipekit.data.sources import open_source
from recipekit.data.stream import open_stream
from recipekit.spec.errors import ConfigError
from token_streams import (
    BYTES,
    PATIENCE,
    SMALL,
    pieces_of,
    request_for,
    take,
    texts_from,
    texts_of,
)

pytestmark = pytest.mark.usefixtures("own_cache")


def test_documents_of_ready_tokens_may_be_empty(tmp_path):
    """All documents of a row group, or all documents of a file, may be empty."""
    kinds = pa.list_(pa.int32())
    pq.write_table(
        pa.table({"ids": pa.array([[]] * 4 + [[7], [], None, []] + [list(range(9))] * 4, kinds)}),
        tmp_path / "some.parquet",
        row_group_size=4,
    )
    pq.write_table(
        pa.table({"ids": pa.array([[]] * 4, kinds)}), tmp_path / "none.parquet", row_group_size=4
    )
    fields = {"text_field": "ids", "seq_len": 16, "global_batch": 2, "micro_batch": 2}
    assert set(pieces_of(take(request_for(str(tmp_path / "some.parquet"), **fields), 4)[0])) == {
        tuple(range(9))
    }
    with pytest.raises(ConfigError, match="of 4 rows 4 are empty"):
        take(request_for(str(tmp_path / "none.parquet"), **fields), 1)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_any_type_of_list_holds_tokens(tmp_path, kind):
    """Lists of fixed length, which may be null, are also accepted.

    Equal tokens give equal batches.
    """
    draw = np.random.default_rng(5)
    documents = [draw.integers(0, 250, 16).tolist() for _ in range(300)]
    documents[7] = None
    seen = set()
    for number, lists in enumerate(
        [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16(), 16)]
    ):
        (folder := tmp_path / str(number)).mkdir()
        table = pa.table({"ids": pa.array(documents, lists)})
        if kind == "parquet":
            pq.write_table(table, folder / "ids.parquet", row_group_size=100)
        else:
            with (
                pa.OSFile(str(folder / "ids.arrow"), "wb") as sink,
                pa.ipc.new_stream(sink, table.schema) as writer,
            ):
                writer.write_table(table, max_chunksize=100)
        batches, _ = take(request_for(str(folder), text_field="ids", seq_len=16), 40)
        seen.add(batches.tobytes())
    assert len(seen) == 1 and len(set(pieces_of(batches))) > 280


def test_tokens_in_json_lines_are_refused_with_the_way(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"ids": [1, 2, 3]}\n')
    with pytest.raises(
        ConfigError,
        match=(
            r"a.jsonl, row 1: contains token ids, which require a Parquet or Arrow file\."
            r" .*to_parquet"
        ),
    ):
        take(request_for(str(tmp_path / "a.jsonl"), text_field="ids"), 1)


def test_odd_files_are_read(tmp_path):
    odd = tmp_path / "a [b], {c} é*"
    odd.mkdir()
    (odd / "mark.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\n")
    assert texts_of(str(odd / "mark.txt")) == ["café\n"]
    long = "".join(f"line {number}\n" for number in range(10_000))
    (odd / "long.txt").write_text(long)
    pieces = texts_of(str(odd / "long.txt"))
    assert (
        "".join(pieces) == long
        and all(len(piece) <= MAX_DOCUMENT_CHARACTERS and piece.endswith("\n") for piece in pieces)
        and len(pieces) > 2
    )
    (odd / "zip.jsonl.gz").write_bytes(
        gzip.compress(b'\n{"text": "a\\u2028b"}\n  \n{"text": null}\n{"text": "c\xe2\x80\xa8d"}')
    )
    assert texts_of(str(odd / "zip.jsonl.gz")) == ["a\u2028b", "c\u2028d"]
    (odd / "empty.txt").write_text("")
    (odd / "zip.jsonl.gz").unlink()
    (tmp_path / "half.jsonl").write_text(r'{"text": "a\ud83d b\uD83D\uDE00"}')
    assert texts_of(str(tmp_path / "half.jsonl")) == ["a? b\U0001f600"]
    assert len(texts_of(str(odd))) == len(pieces) + 1


def test_a_text_file_that_fits_a_row_is_not_cut(tmp_path):
    """A text file is not split if it fits in a row, for any row length.

    The tokens of a split file are cached separately.
    """
    text = "".join(f"line {number}\n" for number in range(110_000))
    (tmp_path / "long.txt").write_text(text)
    folders = set()
    for seq_len, longest in (
        (16, MAX_DOCUMENT_CHARACTERS),
        (4096, MAX_DOCUMENT_CHARACTERS),
        (len(text) // 8 - 10_000, len(text) - 80_000),
        (len(text) // 8 + 1, len(text)),
    ):
        source = open_source(
            request_for(str(tmp_path), seq_len=seq_len, sizes=Sizes()),
            Domain("", str(tmp_path)),
            PATIENCE,
        )
        pieces = texts_from(source)
        assert "".join(pieces) == text and longest - 20 < max(map(len, pieces)) <= longest
        folders.add(
            chunks.open_cache(source, stream.Encoder(BYTES, "pretrain", seq_len), "auto", SMALL)
        )
    assert len(folders) == 3


@pytest.mark.parametrize(
    "name, content, says",
    [
        (
            "a.jsonl",
            '{"text": "x"}\n[1, 2]\n',
            ["a.jsonl, row 2", "must be a JSON object, not a list"],
        ),
        ("a.jsonl", '{"text": "x"}\n{"text": "y"}\n{"text": \n', ["a.jsonl, row 3", "is not JSON"]),
        (
            "a.jsonl",
            '{"text": "x"}\n{"body": "x"}\n',
            ["a.jsonl, row 2", "has no column 'text', only 'body'", "--text_field"],
        ),
        (
            "a.jsonl",
            '{"text": 5}\n',
            ["a.jsonl, row 1", "must be text (--text_field), not int '5'"],
        ),
        ("a.parquet", "no parquet", ["a.parquet", "cannot be read"]),
        ("a.txt", " \n", ["contains no document to train on"]),
        ("a.jsonl", "", ["a.jsonl", "is empty", "--bad_rows skip"]),
        (
            "a.jsonl",
            b'{"text": "caf\xe9"}\n',
            ["a.jsonl, row 1", "is not UTF-8: byte 0xe9 at 13", "iconv"],
        ),
        ("a.txt", b"caf\xe9 \xff", ["a.txt, row 1", "is not UTF-8: byte 0xe9 at 3"]),
    ],
)
def test_bad_rows_are_named(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with (
        pytest.raises(ConfigError) as refused,
        contextlib.closing(
            open_stream(request_for(str(tmp_path)), BYTES, rank=DataRank(1, 0))
        ) as own,
    ):
        next(own)
    assert all(part in str(refused.value) for part in says), str(refused.value)


def test_bad_columns_and_broken_files_are_named(tmp_path, corpora):
    with pytest.raises(
        ConfigError, match=r"[01].parquet, row group \d: has no column 'body', only 'text', 'n'"
    ):
        take(request_for(corpora["parquet"], text_field="body"), 1)
    whole = Path(corpora["parquet"], "0.parquet").read_bytes()
    middle = len(whole) // 2
    (tmp_path / "broken.parquet").write_bytes(
        whole[: middle - 200] + b"\xff" * 400 + whole[middle + 200 :]
    )
    with pytest.raises(ConfigError, match=r"broken.parquet, row group \d, row \d+: cannot be read"):
        take(request_for(str(tmp_path / "broken.parquet")), 40)
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00garbage")
    with pytest.raises(ConfigError, match=r"cut.jsonl.gz, row 1: cannot be read"):
        take(request_for(str(tmp_path / "cut.jsonl.gz")), 1)
