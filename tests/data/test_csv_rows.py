"""CSV and TSV files.

They are read by the rules of RFC 4180, as in `datasets`, except that every value stays a string.
Errors name the row that cannot be read.
"""

import csv
import gzip
from pathlib import Path
from typing import Any

import datasets
import pytest
from pool import ROOT
from recipekit.data import csv_rows
from recipekit.data.mixture import Domain
from recipekit.data.request import Request
from recipekit.data.sources import open_source
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe


def read(file: Path, first: int = 0, **fields: Any) -> list[Any]:
    """Return a file's documents from row `first` on, and the error message of each bad row.

    Row 0 is the first row below the header.
    """
    source = open_source(Request(dataset=str(file), **fields), Domain("", str(file)), patience=None)  # type: ignore[arg-type]
    found: list[Any] = []
    row = first
    for values in source.read(0, 0, first):
        for value in values:
            try:
                found += [
                    document for document, _ in source.documents(value, source.place(0, 0, row))
                ]
            except ConfigError as error:
                found.append(str(error).removeprefix(str(file)))
            row += 1
    return found


def planned(file: Path, *flags: str) -> Any:
    recipe = Recipe(model="recipekit/llama-nano", init="random", tokenizer="bytes")
    return resolve_run(
        parse(
            recipe,
            ROOT / "recipes" / "llama_nano_zero2.py",
            ["--dataset", str(file), *flags, "--dry_run"],
        )
    )


@pytest.mark.parametrize(
    "content",
    [
        "id,text\n1,one\n2,two\n",
        'id,text\n1,"a, b"\n2,"she said ""no"""\n',
        'id,text\r\n1,"two\nlines"\r\n2,"and\r\nmore"\r\n',
        "\ufefftext,id\nfür,1\n",
        '\ufeff"text","n"\nfür,1\n',
        '\ufeff"n, m","text"\n1,"für, dich"\n',
        '\ufeff"two\nlines ""quoted""","text"\r\n1,one\r\n',
        "text,id\none,1\ntwo,2",
        "text,id\n\none,1\n\n\ntwo,2\n\n",
        '"text","the ""id"""\none,1\n',
        "text,id\rone,1\rtwo,2\r",
        "text\none\n\ntwo\n",
        "text,id\n漢字,1\n🙂,2\n",
    ],
)
def test_the_rows_are_those_of_datasets(tmp_path: Path, content: str) -> None:
    for name, text in (("a.csv", content), ("a.tsv", content.replace(",", "\t"))):
        (tmp_path / name).write_text(text, newline="")
        sep = "," if name == "a.csv" else "\t"
        theirs = datasets.load_dataset(
            "csv", data_files=str(tmp_path / name), split="train", streaming=True, sep=sep
        )
        assert read(tmp_path / name) == [row["text"] for row in theirs]
        planned(tmp_path / name)


def test_values_stay_texts(tmp_path: Path) -> None:
    """`datasets` converts some of these values to numbers and nulls."""
    (tmp_path / "a.csv").write_text("text,id\n007,1\nNA,2\nnull,3\n1e5,4\n,5\n")
    assert read(tmp_path / "a.csv") == ["007", "NA", "null", "1e5"]


def test_what_csv_writes_is_read_from_any_row_on(tmp_path: Path) -> None:
    texts = [f'{number} "quoted", line\nend\r\nand ü' for number in range(500)]
    with gzip.open(tmp_path / "a.csv.gz", "wt", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(texts)])
    assert read(tmp_path / "a.csv.gz") == texts
    for first in (1, 63, 64, 499, 500, 600):
        assert read(tmp_path / "a.csv.gz", first) == texts[first:]


def test_a_row_that_cannot_be_read_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        b'text,id\none,1\ntwo\n"th\nree",3,4\n"fo"ur,4\nf\xfcnf,5\nsix,6\n"never closed,7\nlost,8\n'
    )
    assert read(tmp_path / "a.csv") == [
        "one",
        (
            ", row 2 (line 3): has 1 fields, but the header has 2. Correct the row, or leave it out"
            " (--bad_rows skip)"
        ),
        (
            ", row 3 (line 5): has 3 fields, but the header has 2. Correct the row, or leave it out"
            " (--bad_rows skip)"
        ),
        (
            ", row 4 (line 6): cannot be read: ',' expected after '\"'. Correct the row, or leave"
            " it out (--bad_rows skip)"
        ),
        (
            ", row 5 (line 7): its column 'text' is not UTF-8: byte 0xfc. Convert the file (iconv"
            " -f latin1 -t utf-8), or leave it out (--bad_rows skip)"
        ),
        "six",
        (
            ", row 7 (line 10): cannot be read: unexpected end of data. Correct the row, or leave"
            " it out (--bad_rows skip)"
        ),
    ]


def test_a_quote_that_is_never_closed_does_not_take_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_rows, "MAX_FIELD_BYTES", 1000)
    (tmp_path / "a.csv").write_text('text,id\n"open,1\n' + "some text,2\n" * 200)
    assert read(tmp_path / "a.csv")[0].startswith(", row 1 (line 8")
    assert "field larger than field limit (1000)" in read(tmp_path / "a.csv")[0]


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        (b"", (), "a.csv: is empty. Download it again"),
        (b"\n\n", (), "a.csv: is empty"),
        (b"\xef\xbb\xbf", (), "a.csv: is empty. Download it again"),
        (b"\xef\xbb\xbf\r\n", (), "a.csv: is empty"),
        (
            b"body,id\nx,1\n",
            (),
            (
                "a.csv, row 1: has no column 'text', only 'body', 'id'. Name the column with"
                " --text_field"
            ),
        ),
        (
            b"text,id,text\nx,1,y\n",
            (),
            "a.csv: has 2 columns named 'text'. Rename or delete all but one of them",
        ),
        (
            b"id;text\n1;x\n",
            (),
            (
                "a.csv: its header has one column, 'id;text'. Files with this ending must separate"
                " columns by ','"
            ),
        ),
        (b"id\ttext\n1\tx\n", (), "or rename it to end in .tsv"),
        (
            "text,id\nx,1\n".encode("utf-16"),
            (),
            "a.csv: its header is UTF-16, not UTF-8. Convert the file (iconv -f utf-16 -t utf-8)",
        ),
        (
            "täxt,id\nx,1\n".encode("latin1"),
            (),
            "a.csv: its header is not UTF-8. Convert the file (iconv -f latin1 -t utf-8)",
        ),
        (b"text,id\nx\n", (), "a.csv, row 1 (line 2): has 1 fields, but the header has 2"),
        (b'te"xt\n"a"b\n', ("--text_field", 'te"xt'), "a.csv, row 1 (line 2): cannot be read: "),
        (
            b"messages,id\nx,1\n",
            ("--task", "sft"),
            "must be a list of messages (--messages_field), not str 'x'",
        ),
        (
            b"PK\x03\x04\x00\x00",
            (),
            "a.csv: contains ZIP, but its ending says text. Rename it to end in .zip",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_the_plan(
    tmp_path: Path, content: bytes, flags: tuple[str, ...], says: str
) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        planned(tmp_path / "a.csv", *flags)
    assert says in str(refusal.value) and len(str(refusal.value).splitlines()) == 1


def test_a_file_without_rows_is_planned(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,id\n")
    planned(tmp_path / "a.csv")
    assert read(tmp_path / "a.csv") == []


def test_csv_beside_more_tables_is_left_out_and_more_csv_is_refused(tmp_path: Path) -> None:
    """A folder's most frequent format is read; equal counts are an error.

    `datasets` also reads the most frequent format. In the second folder `datasets` would read the
    CSV files.
    """
    for name in (
        "one/a.jsonl",
        "one/b.jsonl",
        "one/c.csv",
        "two/a.jsonl",
        "two/b.csv",
        "two/c.csv",
        "three/a.txt",
        "three/b.csv",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n' if name.endswith("jsonl") else "text\nx\n")
    assert (
        f"--dataset {tmp_path}/one: reads 2 files of split train; leaves out by their endings 1"
        " .csv" in planned(tmp_path / "one").notes
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"contains files of several formats: csv, lines\. Name the files of one format, for"
            r" example FOLDER/\*\.jsonl"
        ),
    ):
        planned(tmp_path / "two")
    with pytest.raises(ConfigError, match="contains files of several formats: csv, text"):
        planned(tmp_path / "three")
