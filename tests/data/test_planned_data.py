"""Checks of local data when a run is planned.

One row is read, so a wrong column or file is a config error before a model is built.
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import rows
from pool import ROOT
from recipekit.data.files import local_files
from recipekit.data.mixture import Domain
from recipekit.data.request import Request
from recipekit.data.sources import open_source
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe

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
    """Return a table that has two columns with the same name, as some joins write."""
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
        resolve_run(
            parse(
                Recipe(model="recipekit/llama-nano", init="random", tokenizer="bytes"),
                NANO,
                ["--dataset", str(folder / name), *flags, *start],
            )
        )


@dataclass(frozen=True)
class RefusedFile:
    """A data file, the flags of its run, and a part of the error message."""

    name: str
    content: bytes
    flags: tuple[str, ...]
    says: str


@pytest.mark.parametrize(
    ("name", "content", "flags", "says"),
    rows(
        RefusedFile(
            name="a.jsonl",
            content=lines({"content": "x"}),
            flags=(),
            says=(
                "a.jsonl, row 1: has no column 'text', only 'content'. Name the column with"
                " --text_field"
            ),
        ),
        RefusedFile(
            name="a.jsonl",
            content=b"\n" + lines({"text": 3}),
            flags=(),
            says="a.jsonl, row 2: must be text (--text_field), not int '3'",
        ),
        RefusedFile(
            name="a.jsonl",
            content=lines({"text": "x"}),
            flags=("--text_field", "body"),
            says="has no column 'body', only 'text'",
        ),
        RefusedFile(
            name="a.jsonl",
            content=lines({"text": "x"}),
            flags=SFT,
            says="has no column 'messages', only 'text'",
        ),
        RefusedFile(
            name="a.jsonl",
            content=lines({"messages": "x"}),
            flags=SFT,
            says="must be a list of messages (--messages_field), not str 'x'",
        ),
        RefusedFile(
            name="a.jsonl",
            content=lines({"text": [1, 2]}),
            flags=(),
            says="contains token ids, which require a Parquet or Arrow file",
        ),
        RefusedFile(
            name="a.json",
            content=b'[\n{"text": "x"}\n]\n',
            flags=(),
            says=(
                "a.json: must have one JSON object per line, but is a single JSON list. Convert it"
                " with datasets.load_dataset('json', "
            ),
        ),
        RefusedFile(
            name="a.json",
            content=lines([{"text": "x"}, {"text": "y"}]),
            flags=(),
            says="a.json: must have one JSON object per line, but is a single JSON list",
        ),
        RefusedFile(
            name="a.json",
            content=json.dumps([{"text": "x"}], indent=2).encode(),
            flags=(),
            says="a.json: must have one JSON object per line, but is a single JSON list",
        ),
        RefusedFile(
            name="a.json",
            content=lines([{"text": "x" * 3_000_000}]),
            flags=(),
            says="a.json: must have one JSON object per line, but is a single JSON list",
        ),
        RefusedFile(
            name="a.json",
            content=lines({"data": [{"text": "x"}]}),
            flags=(),
            says=(
                "a.json: must have one JSON object per line, but is a single object with its rows"
                " in 'data'. Convert it"
            ),
        ),
        RefusedFile(
            name="a.json",
            content=lines({"version": 2, "rows": [{"text": "x"}]}),
            flags=(),
            says="a.json', field='rows', split='train').to_json('rows.jsonl'), and name rows.jsonl",
        ),
        RefusedFile(
            name="a.json",
            content=b"\xef\xbb\xbf" + json.dumps({"data": [{"text": "x"}]}, indent=1).encode(),
            flags=(),
            says="with its rows in 'data'",
        ),
        RefusedFile(
            name="a.json",
            content=lines({"train": [{"text": "x" * 3_000_000}]}),
            flags=(),
            says="with its rows in 'train'",
        ),
        RefusedFile(
            name="a.json",
            content=json.dumps({"text": "x"}, indent=4).encode(),
            flags=(),
            says="must have one JSON object per line, but its objects span several lines",
        ),
        RefusedFile(
            name="a.jsonl",
            content=b'{"text": "x", "id": 1, "text": "y"}\n',
            flags=(),
            says="a.jsonl, row 1: has 2 columns named 'text'. Rename or delete all but one of them",
        ),
        RefusedFile(
            name="a.jsonl",
            content=b'{"id": {"a": 1}, "text": "x", "id": 1}\n',
            flags=(),
            says="a.jsonl, row 1: has 2 columns named 'id'",
        ),
        RefusedFile(
            name="a.parquet",
            content=twice("parquet"),
            flags=(),
            says="a.parquet: has 2 columns named 'text'. Rename or delete all but one of them",
        ),
        RefusedFile(
            name="a.arrow",
            content=twice("stream"),
            flags=(),
            says="a.arrow: has 2 columns named 'text'",
        ),
        RefusedFile(
            name="a.arrow",
            content=twice("file"),
            flags=("--text_field", "id"),
            says="a.arrow: has 2 columns named 'text'",
        ),
        RefusedFile(
            name="a.jsonl",
            content=lines({"messages": json.dumps(CHAT)}),
            flags=SFT,
            says=(
                "a.jsonl, row 1: contains a chat written as JSON text, but --messages_field"
                " requires a list of messages"
            ),
        ),
        RefusedFile(
            name="a.jsonl",
            content=lines({"conversations": json.dumps([{"from": "human", "value": "x"}])}),
            flags=SFT,
            says="contains a chat written as JSON text",
        ),
        RefusedFile(
            name="a.jsonl",
            content=lines({"prompt": json.dumps(CHAT[:1]), "completion": json.dumps(CHAT[1:])}),
            flags=SFT,
            says="its prompt contains a chat written as JSON text",
        ),
        RefusedFile(
            name="a.jsonl",
            content=lines({"prompt": "Hi", "completion": json.dumps(CHAT[1])}),
            flags=SFT,
            says="its completion contains a chat written as JSON text",
        ),
        RefusedFile(
            name="a.jsonl",
            content=lines({"prompt": "Hi", "chosen": json.dumps(CHAT), "rejected": "x"}),
            flags=PAIRS,
            says="its chosen contains a chat written as JSON text. Make it a list",
        ),
        RefusedFile(
            name="a.jsonl",
            content=lines({"prompt": json.dumps(CHAT[:1]), "chosen": CHAT, "rejected": CHAT}),
            flags=PAIRS,
            says="its prompt contains a chat written as JSON text",
        ),
        RefusedFile(
            name="a.parquet",
            content=pairs_as_text(),
            flags=PAIRS,
            says="its rejected contains a chat written as JSON text",
        ),
        RefusedFile(
            name="a.jsonl", content=b"", flags=(), says="a.jsonl: is empty. Download it again"
        ),
        RefusedFile(
            name="a.jsonl",
            content=b"\xef\xbb\xbf",
            flags=(),
            says="a.jsonl: is empty. Download it again",
        ),
        RefusedFile(
            name="a.jsonl.gz",
            content=gzip.compress(b"\xef\xbb\xbf", mtime=0),
            flags=(),
            says="a.jsonl.gz: is empty",
        ),
        RefusedFile(
            name="a.jsonl",
            content='{"text": "für"}\n'.encode("latin1"),
            flags=(),
            says="is not UTF-8: byte 0xfc at 11. Convert the file (iconv -f latin1 -t utf-8)",
        ),
        RefusedFile(
            name="a.jsonl",
            content='{"text": "x"}\n'.encode("utf-16"),
            flags=(),
            says="is UTF-16, not UTF-8. Convert the file (iconv -f utf-16 -t utf-8)",
        ),
        RefusedFile(
            name="a.txt", content="für\n".encode("utf-16"), flags=(), says="is UTF-16, not UTF-8"
        ),
        RefusedFile(
            name="a.txt",
            content="für".encode("latin1"),
            flags=SFT,
            says="task sft requires chats, but these are text files",
        ),
        RefusedFile(
            name="a.txt",
            content="für dich".encode("latin1"),
            flags=(),
            says="is not UTF-8: byte 0xfc at 1",
        ),
        RefusedFile(
            name="a.jsonl.gz",
            content=gzip.compress(lines({"content": "x"}), mtime=0),
            flags=(),
            says="has no column 'text', only 'content'",
        ),
        RefusedFile(
            name="a.jsonl.gz",
            content=gzip.compress(lines({"text": "x"}), mtime=0)[:12],
            flags=(),
            says="a.jsonl.gz, row 1: cannot be read: Compressed file ended",
        ),
        RefusedFile(
            name="a.xml",
            content=b"<text>x</text>\n",
            flags=(),
            says="a.xml: .xml files are not supported. Convert the file to one of .txt",
        ),
        RefusedFile(
            name="a.dat",
            content=b"text\nx\n",
            flags=(),
            says=(
                "a.dat: the file format is not clear from the ending. Convert the file to one of"
                " .txt"
            ),
        ),
        RefusedFile(
            name="a.parquet",
            content=table("parquet"),
            flags=("--text_field", "body"),
            says="has no column 'body', only 'text', 'messages', 'number', 'input_ids'",
        ),
        RefusedFile(
            name="a.parquet",
            content=table("parquet"),
            flags=("--text_field", "number"),
            says="must be text (--text_field), not int '1'",
        ),
        RefusedFile(
            name="a.parquet",
            content=table("parquet")[:-50],
            flags=(),
            says="a.parquet, row 1: cannot be read: ",
        ),
        RefusedFile(
            name="a.parquet",
            content=table("parquet"),
            flags=(*SFT, "--messages_field", "text"),
            says="must be a list of messages (--messages_field), not str 'one'",
        ),
        RefusedFile(
            name="a.arrow",
            content=table("stream"),
            flags=("--text_field", "body"),
            says="has no column 'body'",
        ),
        RefusedFile(
            name="a.arrow",
            content=table("file"),
            flags=("--text_field", "number"),
            says="must be text (--text_field), not int '1'",
        ),
        RefusedFile(
            name="a.arrow",
            content=table("file")[:100],
            flags=(),
            says="a.arrow, row 1: cannot be read: ",
        ),
    ),
)
def test_what_the_first_row_tells_is_refused_by_the_plan(tmp_path, name, content, flags, says):
    with pytest.raises(ConfigError) as refusal:
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
    """As in `datasets`, files that describe the data are skipped if there are other files."""
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
        plan = resolve_run(
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
    """With `bad_rows="skip"`, the plan reads no row, so the source must check the columns."""
    (tmp_path / name).write_bytes(content)
    request = Request(dataset=str(tmp_path / name), bad_rows="skip")
    source = open_source(request, Domain("", request.dataset), patience=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has 2 columns named 'text'"):
        list(source.read(0, 0, 0))


def test_an_odd_row_in_the_middle_may_be_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "x"}, {"content": "x"}))
    request = Request(dataset=str(tmp_path / "a.jsonl"))
    source = open_source(request, Domain("", request.dataset), patience=None)  # type: ignore[arg-type]
    first, second = next(source.read(0, 0, 0))
    assert source.documents(first, "row 1") == [("x", "row 1")]
    with pytest.raises(
        ConfigError,
        match=(
            r"row 2: has no column 'text', only 'content'\. .*--text_field.* or leave it out"
            r" \(--bad_rows skip\)"
        ),
    ):
        source.documents(second, source.place(0, 0, 1))
