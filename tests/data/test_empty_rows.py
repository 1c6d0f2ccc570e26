"""Rows without text are skipped, counted and reported in one line, and do not stop a run."""

import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recipekit.data.batching import DataRank
from recipekit.data.chunks import ChunkReader
from recipekit.data.first_row import check_first_row
from recipekit.data.pairs import PairProcessor
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import Request, Sizes
from recipekit.data.samples import open_rows
from recipekit.data.stream import open_corpus, open_stream
from recipekit.spec.errors import ConfigError
from recipekit.tasks.find import load_task

ROWS = 60  # every third row is empty
SMALL = Sizes(read_rows=5, chunk_rows=7, block_tokens=(400, 400))


def values(empty: Any) -> list[Any]:
    return [
        empty if number % 3 == 2 else f"the words of document {number}, and some more of them" * 4
        for number in range(ROWS)
    ]


def lines(folder: Path, rows: list[dict[str, Any]]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=11)
    return str(folder / "rows.parquet")


def arrow(folder: Path, rows: list[dict[str, Any]]) -> str:
    table = pa.Table.from_pylist(rows)
    with (
        pa.OSFile(str(folder / "rows.arrow"), "wb") as stream,
        pa.ipc.new_stream(stream, table.schema) as writer,
    ):
        writer.write_table(table)
    return str(folder / "rows.arrow")


def zipped(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(Path(lines(folder, rows)).read_bytes()))
    return str(folder / "rows.jsonl.gz")


def counted(reader: ChunkReader) -> tuple[int, int, int]:
    """Return a reader's total numbers of rows, empty rows and skipped rows."""
    found = [
        chunk
        for part in range(len(reader.source.parts))
        for group in range(int(str(reader.groups(part))))
        for chunk in reader.chunks(part, group, 0)
    ]
    return (
        sum(chunk.rows for chunk in found),
        sum(chunk.empty for chunk in found),
        sum(chunk.bad for chunk in found),
    )


def request(dataset: str, **more: Any) -> Request:
    fields = {"seq_len": 64, "global_batch": 2, "token_cache": "off", "sizes": SMALL}
    return Request(**({"dataset": dataset, "tokenizer": "bytes"} | fields | more))


def steps(
    asked: Request, count: int, said: list[str], state: Any = None
) -> Iterator[tuple[Any, Any]]:
    stream = open_stream(asked, byte_tokenizer(), rank=DataRank(1, 0), say=said.append, state=state)
    try:
        for _ in range(count):
            yield next(stream)
    finally:
        stream.close()


@pytest.mark.parametrize("empty", [None, "", " \n\t"], ids=["null", "empty", "blank"])
@pytest.mark.parametrize("write", [lines, parquet, arrow, zipped])
def test_empty_texts_are_counted(tmp_path: Path, write: Callable[..., str], empty: Any) -> None:
    dataset = write(tmp_path, [{"text": value, "other": 1} for value in values(empty)])
    (reader,) = open_corpus(request(dataset), byte_tokenizer()).readers()
    assert counted(reader) == (60, 20, 0)


@pytest.mark.parametrize("empty", [None, []], ids=["null", "empty"])
@pytest.mark.parametrize("write", [lines, parquet])
def test_empty_chats_are_counted(tmp_path: Path, write: Callable[..., str], empty: Any) -> None:
    dataset = write(
        tmp_path, [{"messages": empty if number % 4 == 1 else CHAT} for number in range(40)]
    )
    (reader,) = open_corpus(request(dataset, task="sft"), byte_tokenizer()).readers()
    assert counted(reader) == (40, 10, 0)


@pytest.mark.parametrize(
    ("column", "empty"), [("chosen", None), ("chosen", " "), ("rejected", None), ("rejected", "")]
)
@pytest.mark.parametrize("write", [lines, parquet])
def test_empty_answers_of_pairs_are_counted(
    tmp_path: Path, write: Callable[..., str], column: str, empty: Any
) -> None:
    rows = [
        {"prompt": "what?", "chosen": "this", "rejected": f"that {number}"}
        | ({column: empty} if number % 4 == 1 else {})
        for number in range(40)
    ]
    task = load_task("preference")
    assert task.samples
    pairs = PairProcessor(byte_tokenizer(), 64, False)
    (reader,) = open_rows(
        request(write(tmp_path, rows), task="preference"), task.samples, pairs
    ).readers()
    assert counted(reader) == (40, 10, 0)


def test_lists_of_tokens_that_are_null_or_empty_are_counted(tmp_path: Path) -> None:
    rows = [
        {"input_ids": None if number % 4 == 1 else [] if number % 4 == 2 else [10, 11, 12]}
        for number in range(40)
    ]
    dataset = parquet(tmp_path, rows)
    (reader,) = open_corpus(request(dataset, text_field="input_ids"), byte_tokenizer()).readers()
    assert counted(reader) == (40, 20, 0)


def test_a_text_file_without_text_is_an_empty_row(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(
            "" if number == 4 else " \n " if number == 5 else f"the words of file {number}"
        )
    (reader,) = open_corpus(request(str(tmp_path)), byte_tokenizer()).readers()
    assert counted(reader) == (9, 2, 0)


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('\n{"text": "some words"}\n\n \n{"text": ""}\n\n')
    (reader,) = open_corpus(request(str(tmp_path / "rows.jsonl")), byte_tokenizer()).readers()
    assert counted(reader) == (2, 1, 0)
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf\n{"text": "some words"}\n')
    (reader,) = open_corpus(request(str(tmp_path / "rows.jsonl")), byte_tokenizer()).readers()
    assert counted(reader) == (1, 0, 0)


CHAT = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "this"}]
FORMS: dict[str, dict[str, Any]] = {  # a row of each chat format
    "messages": {"messages": CHAT},
    "conversations": {
        "conversations": [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "this"}]
    },
    "alpaca": {"instruction": "what?", "input": "", "output": "this"},
    "texts": {"prompt": "what?", "completion": "this"},
    "lists": {"prompt": CHAT[:1], "completion": CHAT[1:]},
}


@pytest.mark.parametrize(
    ("form", "empty"),
    [
        *(("messages", {"messages": value}) for value in ("", " \n", None, [])),
        *(("conversations", {"conversations": value}) for value in ("", "\t", None, [])),
        ("alpaca", {"instruction": None, "input": " ", "output": ""}),
        ("alpaca", {"instruction": "what?", "output": None}),
        ("alpaca", {"instruction": "what?", "output": " \n"}),
        *(("texts", {"completion": value}) for value in (None, "", "\n")),
        *(("lists", {"completion": value}) for value in (None, [], " ")),
    ],
    ids=repr,
)
def test_empty_chats_of_every_form_are_counted(
    tmp_path: Path, form: str, empty: dict[str, Any]
) -> None:
    """The first row is empty, so the check before a run reads an empty row."""
    dataset = lines(
        tmp_path, [FORMS[form] | (empty if number % 4 == 0 else {}) for number in range(40)]
    )
    asked = request(dataset, task="sft")
    check_first_row([Path(dataset)], dataset, asked)
    (reader,) = open_corpus(asked, byte_tokenizer()).readers()
    assert counted(reader) == (40, 10, 0)


@pytest.mark.parametrize("form", ["texts", "lists"])
@pytest.mark.parametrize("empty", [None, [], "", " "], ids=repr)
def test_an_empty_prompt_leaves_its_completion(tmp_path: Path, form: str, empty: Any) -> None:
    dataset = lines(tmp_path, [FORMS[form] | {"prompt": empty}] * 4)
    asked = request(dataset, task="sft")
    check_first_row([Path(dataset)], dataset, asked)
    (reader,) = open_corpus(asked, byte_tokenizer()).readers()
    assert counted(reader) == (4, 0, 0)


def test_an_empty_list_is_an_empty_text(tmp_path: Path) -> None:
    """An empty row of text may also be an empty list, which is not a list of tokens."""
    dataset = lines(
        tmp_path, [{"text": [] if number % 3 == 0 else "some words"} for number in range(12)]
    )
    check_first_row([Path(dataset)], dataset, request(dataset))
    (reader,) = open_corpus(request(dataset), byte_tokenizer()).readers()
    assert counted(reader) == (12, 4, 0)


def test_the_built_in_texts_have_no_empty_rows() -> None:
    for task in ("pretrain", "sft"):
        (reader,) = open_corpus(request("builtin", task=task), byte_tokenizer()).readers()
        chunk = next(iter(reader.chunks(0, 0, 0)))
        assert chunk.empty == 0 < chunk.rows


def test_one_line_reports_empty_rows(tmp_path: Path) -> None:
    dataset, said = lines(tmp_path, [{"text": value} for value in values(None)]), list[str]()
    list(steps(request(dataset, sizes=Sizes()), 1, said))  # one block contains all rows
    assert said == [
        "20 of 60 rows are empty (null, no text or blank) and skipped. The metric empty_rows counts"
        " them"
    ]
    said.clear()
    list(steps(request(dataset), 1, said))
    (line,) = said
    assert re.match(r"(\d+) of the first (\d+) rows are empty", line), line


def test_the_count_goes_on_after_a_resume_and_in_the_next_epoch(tmp_path: Path) -> None:
    asked, said = request(lines(tmp_path, [{"text": value} for value in values("")])), list[str]()
    states = [state for _, state in steps(asked, 90, said)]
    counts = [state["domains"][""].get("empty", 0) for state in states]
    assert counts == sorted(counts) and counts[-1] > 20, "more than one epoch"
    assert len(said) == 1
    assert states[19]["domains"][""]["place"], "step 20 is behind the first block"
    for step in (20, 70):
        again = [
            state
            for _, state in steps(asked, 90 - step, said, json.loads(json.dumps(states[step - 1])))
        ]
        assert again == states[step:]
    assert len(said) == 1, "an earlier start has reported"


def test_kept_tokens_keep_the_count(tmp_path: Path) -> None:
    dataset = lines(tmp_path, [{"text": value} for value in values("")])
    asked = request(dataset, token_cache=str(tmp_path / "cache"))
    found = [[state for _, state in steps(asked, 40, [])] for _ in range(2)]
    assert found[0] == found[1] == [state for _, state in steps(request(dataset), 40, [])]
    assert found[0][-1]["domains"][""]["empty"] > 0


def refusal(asked: Request) -> str:
    with pytest.raises(ConfigError) as refused:
        list(steps(asked, 1, []))
    (problem,) = refused.value.problems
    return str(problem)


@pytest.mark.parametrize("write", [lines, parquet, zipped])
def test_data_without_any_text_are_refused_with_their_columns(
    tmp_path: Path, write: Callable[..., str]
) -> None:
    dataset = write(tmp_path, [{"text": "", "body": "words", "n": 1} for _ in range(12)])
    rule = (
        "contains no document to train on: of 12 rows 12 are empty, 0 cannot be read. Its columns"
        " are 'text', 'body', 'n'"
    )
    assert (
        refusal(request(dataset))
        == f"--dataset: {rule}. Add more data, or name another column (--text_field,"
        " --messages_field, ...)"
    )


def test_data_of_broken_rows_alone_are_refused_with_their_columns(tmp_path: Path) -> None:
    dataset = lines(tmp_path, [{"body": "words", "n": 1} for _ in range(12)])
    found = refusal(request(dataset, bad_rows="skip"))
    assert "of 12 rows 0 are empty, 12 cannot be read. Its columns are 'body', 'n'" in found
    dataset = lines(
        tmp_path, [{"text": None} if number % 2 else {"text": 5} for number in range(12)]
    )
    found = refusal(request(dataset, bad_rows="skip"))
    assert "of 12 rows 6 are empty, 6 cannot be read. Its columns are 'text'" in found
