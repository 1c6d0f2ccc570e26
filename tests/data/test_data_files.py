"""Local data is read for one row when a run is planned: a wrong column or file is refused before a
model is built.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pool import ROOT
from recipekit.data.files import local_files
from recipekit.data.mixture import Domain
from recipekit.data.request import Request
from recipekit.data.sources import open_source
from recipekit.plan import make_plan
from recipekit.spec.command import parse
from recipekit.spec.recipe import Recipe
from recipekit.spec.refusal import Refusal

NANO = ROOT / "recipes" / "llama_nano_zero2.py"
SFT = ("--task", "sft")
PAIRS = ("--task", "preference")
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
TABLE = {
    "text": ["one", "two"],
    "messages": [CHAT, CHAT],
    "number": [1, 2],
    "input_ids": [[1, 2], [3]],
}


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def table(kind: str) -> bytes:
    sink = pa.BufferOutputStream()
    if kind == "parquet":
        pq.write_table(pa.table(TABLE), sink)
    else:
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(
            sink, pa.table(TABLE).schema
        ) as writer:
            writer.write_table(pa.table(TABLE))
    return sink.getvalue().to_pybytes()


def twice(kind: str) -> bytes:
    """Return a table with two columns of one name, which a join may write."""
    made = pa.Table.from_arrays(
        [pa.array(["x"]), pa.array(["y"]), pa.array(["z"])], names=["text", "id", "text"]
    )
    sink = pa.BufferOutputStream()
    if kind == "parquet":
        pq.write_table(made, sink)
    else:
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(
            sink, made.schema
        ) as writer:
            writer.write_table(made)
    return sink.getvalue().to_pybytes()


def pairs_as_text() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table({"prompt": ["Hi"], "chosen": ["yes"], "rejected": [json.dumps(CHAT[1:])]}), sink
    )
    return sink.getvalue().to_pybytes()


def planned(folder: Path, name: str, content: bytes, *flags: str) -> None:
    (folder / name).write_bytes(content)
    for start in ([], ["--dry_run"]):
        make_plan(
            parse(
                Recipe(model="recipekit/llama-nano", init="random", tokenizer="bytes"),
                NANO,
                ["--dataset", str(folder / name), *flags, *start],
            )
        )


@pytest.mark.parametrize(
    ("name", "content", "flags", "says"),
    [
        (
            "a.jsonl",
            lines({"content": "x"}),
            (),
            (
                "a.jsonl, row 1: has no column 'text', only 'content'. Name the column with"
                " --text_field"
            ),
        ),
        (
            "a.jsonl",
            b"\n" + lines({"text": 3}),
            (),
            "a.jsonl, row 2: must be text (--text_field), not int '3'",
        ),
        (
            "a.jsonl",
            lines({"text": "x"}),
            ("--text_field", "body"),
            "has no column 'body', only 'text'",
        ),
        ("a.jsonl", lines({"text": "x"}), SFT, "has no column 'messages', only 'text'"),
        (
            "a.jsonl",
            lines({"messages": "x"}),
            SFT,
            "must be a list of messages (--messages_field), not str 'x'",
        ),
        (
            "a.jsonl",
            lines({"text": [1, 2]}),
            (),
            "contains token ids, which require a Parquet or Arrow file",
        ),
        (
            "a.json",
            b'[\n{"text": "x"}\n]\n',
            (),
            (
                "a.json: must have one JSON object per line, but is a single JSON list. Convert it"
                " with datasets.load_dataset('json', "
            ),
        ),
        (
            "a.json",
            lines([{"text": "x"}, {"text": "y"}]),
            (),
            "a.json: must have one JSON object per line, but is a single JSON list",
        ),
        (
            "a.json",
            json.dumps([{"text": "x"}], indent=2).encode(),
            (),
            "a.json: must have one JSON object per line, but is a single JSON list",
        ),
        (
            "a.json",
            lines([{"text": "x" * 3_000_000}]),
            (),
            "a.json: must have one JSON object per line, but is a single JSON list",
        ),
        (
            "a.json",
            lines({"data": [{"text": "x"}]}),
            (),
            (
                "a.json: must have one JSON object per line, but is a single object with its rows"
                " in 'data'. Convert it"
            ),
        ),
        (
            "a.json",
            lines({"version": 2, "rows": [{"text": "x"}]}),
            (),
            "a.json', field='rows', split='train').to_json('rows.jsonl'), and name rows.jsonl",
        ),
        (
            "a.json",
            b"\xef\xbb\xbf" + json.dumps({"data": [{"text": "x"}]}, indent=1).encode(),
            (),
            "with its rows in 'data'",
        ),
        ("a.json", lines({"train": [{"text": "x" * 3_000_000}]}), (), "with its rows in 'train'"),
        (
            "a.json",
            json.dumps({"text": "x"}, indent=4).encode(),
            (),
            "must have one JSON object per line, but its objects span several lines",
        ),
        (
            "a.jsonl",
            b'{"text": "x", "id": 1, "text": "y"}\n',
            (),
            "a.jsonl, row 1: has 2 columns named 'text'. Rename or delete all but one of them",
        ),
        (
            "a.jsonl",
            b'{"id": {"a": 1}, "text": "x", "id": 1}\n',
            (),
            "a.jsonl, row 1: has 2 columns named 'id'",
        ),
        (
            "a.parquet",
            twice("parquet"),
            (),
            "a.parquet: has 2 columns named 'text'. Rename or delete all but one of them",
        ),
        ("a.arrow", twice("stream"), (), "a.arrow: has 2 columns named 'text'"),
        ("a.arrow", twice("file"), ("--text_field", "id"), "a.arrow: has 2 columns named 'text'"),
        (
            "a.jsonl",
            lines({"messages": json.dumps(CHAT)}),
            SFT,
            (
                "a.jsonl, row 1: contains a chat written as JSON text, but --messages_field"
                " requires a list of messages"
            ),
        ),
        (
            "a.jsonl",
            lines({"conversations": json.dumps([{"from": "human", "value": "x"}])}),
            SFT,
            "contains a chat written as JSON text",
        ),
        (
            "a.jsonl",
            lines({"prompt": json.dumps(CHAT[:1]), "completion": json.dumps(CHAT[1:])}),
            SFT,
            "its prompt contains a chat written as JSON text",
        ),
        (
            "a.jsonl",
            lines({"prompt": "Hi", "completion": json.dumps(CHAT[1])}),
            SFT,
            "its completion contains a chat written as JSON text",
        ),
        (
            "a.jsonl",
            lines({"prompt": "Hi", "chosen": json.dumps(CHAT), "rejected": "x"}),
            PAIRS,
            "its chosen contains a chat written as JSON text. Make it a list",
        ),
        (
            "a.jsonl",
            lines({"prompt": json.dumps(CHAT[:1]), "chosen": CHAT, "rejected": CHAT}),
            PAIRS,
            "its prompt contains a chat written as JSON text",
        ),
        ("a.parquet", pairs_as_text(), PAIRS, "its rejected contains a chat written as JSON text"),
        ("a.jsonl", b"", (), "a.jsonl: is empty. Download it again"),
        ("a.jsonl", b"\xef\xbb\xbf", (), "a.jsonl: is empty. Download it again"),
        ("a.jsonl.gz", gzip.compress(b"\xef\xbb\xbf", mtime=0), (), "a.jsonl.gz: is empty"),
        (
            "a.jsonl",
            '{"text": "für"}\n'.encode("latin1"),
            (),
            "is not UTF-8: byte 0xfc at 11. Convert the file (iconv -f latin1 -t utf-8)",
        ),
        (
            "a.jsonl",
            '{"text": "x"}\n'.encode("utf-16"),
            (),
            "is UTF-16, not UTF-8. Convert the file (iconv -f utf-16 -t utf-8)",
        ),
        ("a.txt", "für\n".encode("utf-16"), (), "is UTF-16, not UTF-8"),
        ("a.txt", "für".encode("latin1"), SFT, "task sft requires chats, but these are text files"),
        ("a.txt", "für dich".encode("latin1"), (), "is not UTF-8: byte 0xfc at 1"),
        (
            "a.jsonl.gz",
            gzip.compress(lines({"content": "x"}), mtime=0),
            (),
            "has no column 'text', only 'content'",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(lines({"text": "x"}), mtime=0)[:12],
            (),
            "a.jsonl.gz, row 1: cannot be read: Compressed file ended",
        ),
        (
            "a.xml",
            b"<text>x</text>\n",
            (),
            "a.xml: .xml files are not supported. Convert the file to one of .txt",
        ),
        (
            "a.dat",
            b"text\nx\n",
            (),
            "a.dat: the file format is not clear from the ending. Convert the file to one of .txt",
        ),
        (
            "a.parquet",
            table("parquet"),
            ("--text_field", "body"),
            "has no column 'body', only 'text', 'messages', 'number', 'input_ids'",
        ),
        (
            "a.parquet",
            table("parquet"),
            ("--text_field", "number"),
            "must be text (--text_field), not int '1'",
        ),
        ("a.parquet", table("parquet")[:-50], (), "a.parquet, row 1: cannot be read: "),
        (
            "a.parquet",
            table("parquet"),
            (*SFT, "--messages_field", "text"),
            "must be a list of messages (--messages_field), not str 'one'",
        ),
        ("a.arrow", table("stream"), ("--text_field", "body"), "has no column 'body'"),
        (
            "a.arrow",
            table("file"),
            ("--text_field", "number"),
            "must be text (--text_field), not int '1'",
        ),
        ("a.arrow", table("file")[:100], (), "a.arrow, row 1: cannot be read: "),
    ],
)
def test_what_the_first_row_tells_is_refused_by_the_plan(tmp_path, name, content, flags, says):
    with pytest.raises(Refusal) as refusal:
        planned(tmp_path, name, content, *flags)
    (problem,) = refusal.value.problems
    assert says in str(problem) and len(str(problem).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "flags"),
    [
        ("a.jsonl", b"\xef\xbb\xbf" + lines({"text": "x"}), ()),
        ("a.jsonl", b"\r\n \n" + lines({"text": ""}, {"other": 1}), ()),
        ("a.jsonl", b"\xef\xbb\xbf\r\n" + lines({"text": "x"}), ()),
        ("a.jsonl", lines({"text": None}, {"text": "x"}), ()),
        ("a.jsonl", lines({"text": 'the word "text": twice, "text"', "id": {"text": 1}}), ()),
        ("a.jsonl", lines({"text": "x", "notes": [{"by": "a"}]}), ()),
        ("a.jsonl", lines({"messages": [*CHAT] * 40_000}), SFT),
        ("a.jsonl", lines({"prompt": "[1, 2]", "completion": '{"role": "a name"}'}), SFT),
        (
            "a.jsonl",
            lines({"prompt": "Write JSON", "chosen": '[{"name": "a"}]', "rejected": "[]"}),
            PAIRS,
        ),
        ("a.csv", b"text,id\nx,1\n", ()),
        ("a.jsonl", lines({"messages": CHAT}), SFT),
        ("a.jsonl", lines({"text": "x" * 3_000_000}), ("--text_field", "text")),
        ("a.jsonl", lines({"content": "x"}), ("--bad_rows", "skip")),
        ("a.jsonl", b"nonsense\n" + lines({"text": "x"}), ("--bad_rows", "skip")),
        ("a.txt", ("ü" * 600_000).encode(), ()),
        ("a.txt.gz", gzip.compress(b"text", mtime=0), ()),
        ("a.parquet", table("parquet"), ()),
        ("a.parquet", table("parquet"), ("--text_field", "input_ids")),
        ("a.parquet", table("parquet"), SFT),
        ("a.arrow", table("stream"), ()),
        ("a.arrow", table("file"), ("--text_field", "input_ids")),
    ],
)
def test_what_can_be_read_is_planned(tmp_path, name, content, flags):
    planned(tmp_path, name, content, *flags)


def test_what_is_left_out_of_a_folder_is_told(tmp_path):
    """What describes the data is no data, as for `datasets`; pages that are alone are."""
    for name in (
        "a.jsonl",
        "below/b.jsonl",
        "README.md",
        "LICENSE",
        "license.txt",
        "c.csv",
        "below/d.csv.gz",
        "e.zip",
        ".g.csv",
        ".h/i.jsonl",
        "below/__j/k.csv",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(lines({"text": "x"}))
    assert local_files(str(tmp_path)) == [tmp_path / "a.jsonl", tmp_path / "below" / "b.jsonl"]

    def notes(dataset: Path) -> list[str]:
        command = ["--dataset", str(dataset), "--dry_run"]
        plan = make_plan(
            parse(
                Recipe(model="recipekit/llama-nano", init="random", tokenizer="bytes"),
                NANO,
                command,
            )
        )
        return [note for note in plan.notes if note.startswith("--dataset")]

    assert notes(tmp_path) == [
        f"--dataset {tmp_path}: reads 2 files of split train; leaves out 1 hidden file, 2 hidden"
        " folders, by their endings 2 .csv, 1 .zip"
    ]
    for name in ("a.jsonl", "below/b.jsonl"):
        (tmp_path / name).rename(tmp_path / f"{name}.txt")
    assert local_files(str(tmp_path)) == sorted(
        tmp_path / name for name in ("a.jsonl.txt", "below/b.jsonl.txt", "license.txt")
    )
    assert notes(tmp_path / "*.txt") == [
        f"--dataset {tmp_path}/*.txt: reads 2 files of split train"
    ]
    (tmp_path / "pages" / "more").mkdir(parents=True)
    for name in ("README.md", "more/README.md", "more/a.rst"):
        (tmp_path / "pages" / name).write_text("x")
    assert local_files(str(tmp_path / "pages")) == [
        tmp_path / "pages" / name for name in ("README.md", "more/README.md", "more/a.rst")
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.parquet", twice("parquet")), ("a.arrow", twice("stream")), ("b.arrow", twice("file"))],
)
def test_two_columns_of_one_name_are_refused_by_the_source(tmp_path, name, content):
    """The plan reads no row where bad rows are left out."""
    (tmp_path / name).write_bytes(content)
    request = Request(dataset=str(tmp_path / name), bad_rows="skip")
    source = open_source(request, Domain("", request.dataset), patience=None)  # type: ignore[arg-type]
    with pytest.raises(Refusal, match="has 2 columns named 'text'"):
        list(source.read(0, 0, 0))


def test_an_odd_row_in_the_middle_may_be_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "x"}, {"content": "x"}))
    request = Request(dataset=str(tmp_path / "a.jsonl"))
    source = open_source(request, Domain("", request.dataset), patience=None)  # type: ignore[arg-type]
    first, second = next(source.read(0, 0, 0))
    assert source.documents(first, "row 1") == [("x", "row 1")]
    with pytest.raises(
        Refusal,
        match=(
            r"row 2: has no column 'text', only 'content'\. .*--text_field.* or leave it out"
            r" \(--bad_rows skip\)"
        ),
    ):
        source.documents(second, source.place(0, 0, 1))
