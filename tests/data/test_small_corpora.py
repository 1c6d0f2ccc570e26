"""Corpora without any document in the held-out 1 %, and corpora without any document at all."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from recipekit.data.batching import DataRank
from recipekit.data.content import is_held_out
from recipekit.data.held_out import eval_rows, eval_samples
from recipekit.data.pairs import PairProcessor
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import Request
from recipekit.data.samples import open_rows, open_samples
from recipekit.data.stream import open_corpus, open_stream
from recipekit.data.stream_state import StreamMismatch
from recipekit.plan import resolve_run
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.recipe import Recipe
from recipekit.spec.task import IGNORE
from recipekit.tasks.find import load_task

TOKENIZER = byte_tokenizer()


def request(dataset: object, **more: Any) -> Request:
    fields = {
        "tokenizer": "bytes",
        "seq_len": 64,
        "global_batch": 2,
        "token_cache": "off",
        "eval_every": 1,
        "eval_rows": 4,
    }
    return Request(**({"dataset": str(dataset)} | fields | more))


def trained_and_evaluated(asked: Request, steps: int = 40) -> tuple[str, str, list[str]]:
    """Return (text of `steps` training steps, text of the evaluation, printed lines)."""
    said: list[str] = []
    stream = open_stream(asked, TOKENIZER, rank=DataRank(1, 0), say=said.append)
    batches = [batch for _ in range(steps) for batch in next(stream)[0]]
    stream.close()
    held_out = eval_rows(asked, TOKENIZER, rank=DataRank(1, 0), state=stream.state, say=said.append)
    return text_of(batches), text_of(held_out), said


def text_of(batches: list[dict[str, torch.Tensor]]) -> str:
    ids = np.concatenate(
        [batch["input_ids"].numpy()[batch["labels"].numpy() != IGNORE] for batch in batches]
    )
    return TOKENIZER.decode(ids.tolist(), skip_special_tokens=True)


def book(folder: Path, lines: int) -> Path:
    (folder / "book.txt").write_text(
        "".join(f"line {number:05d} of the book\n" for number in range(lines))
    )
    return folder / "book.txt"


def numbers_in(text: str) -> set[str]:
    return {word for word in text.replace("\n", " ").split() if len(word) == 5 and word.isdecimal()}


def test_one_document_of_a_book_is_held_out(tmp_path: Path) -> None:
    """400 KB of text are split into 13 documents."""
    asked = request(book(tmp_path, 18_000), seq_len=256, global_batch=16, eval_rows=1000)
    trained, evaluated, said = trained_and_evaluated(asked, 120)
    seen, held_out = numbers_in(trained), numbers_in(evaluated)
    assert len(seen | held_out) > 17_000 and 1_000 < len(held_out) < 1_700, (
        "all but the lines that rows cut"
    )
    assert not seen & held_out
    line = (
        "evaluation: no document of this small data set falls into the held-out 1 %, so one"
        " document is held out from training"
    )
    assert said[0] == line and len(said) == 2


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_the_last_tenth_of_the_only_document_is_held_out(tmp_path: Path, kind: str) -> None:
    file = book(tmp_path, 200)
    text = file.read_text()
    if kind == "jsonl":
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": None}) + "\n")
    if kind == "parquet":
        file = tmp_path / "rows.parquet"
        pq.write_table(pa.table({"text": [text]}), file)
    trained, evaluated, said = trained_and_evaluated(request(file, eval_rows=100))
    held_out = numbers_in(evaluated)
    assert len(held_out) > 16 and held_out <= {f"{number:05d}" for number in range(180, 200)}
    assert (
        len(numbers_in(trained)) > 150
        and numbers_in(trained) <= {f"{number:05d}" for number in range(181)} - held_out
    )
    assert any("the last tenth of the only document is held out" in line for line in said)


def test_equal_documents_count_as_one(tmp_path: Path) -> None:
    text = "words that stand in each of the rows of this file, one after the other"
    (tmp_path / "rows.jsonl").write_text((json.dumps({"text": text}) + "\n") * 5)
    trained, evaluated, _ = trained_and_evaluated(request(tmp_path / "rows.jsonl"))
    assert "the other" in evaluated and "the other" not in trained and "words that stand" in trained


@pytest.mark.parametrize("lengths", [[40] * 3, [60]], ids=["three documents", "one document"])
def test_ready_tokens(tmp_path: Path, lengths: list[int]) -> None:
    draw = np.random.default_rng(1)
    documents = [draw.permutation(200)[:length].tolist() for length in lengths]
    pq.write_table(pa.table({"ids": documents}), tmp_path / "ids.parquet")
    asked = request(tmp_path / "ids.parquet", text_field="ids")
    stream = open_stream(asked, TOKENIZER, rank=DataRank(1, 0))
    seen = {
        int(token)
        for _ in range(6)
        for batch in next(stream)[0]
        for token in batch["input_ids"][batch["labels"] != IGNORE]
    }
    stream.close()
    held_out = [
        int(token)
        for batch in eval_rows(asked, TOKENIZER, rank=DataRank(1, 0), state=stream.state)
        for token in batch["input_ids"][batch["labels"] != IGNORE]
    ]
    if len(lengths) == 1:
        assert held_out == documents[0][54:59] and seen == set(documents[0][:53])
    else:
        (mine,) = [ids for ids in documents if ids[:39] == held_out]
        assert seen == {token for ids in documents if ids != mine for token in ids[:39]}


def chat(number: int, answer: str = "this") -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": answer},
        ]
    }


def test_the_held_out_chat_has_an_answer_to_learn(tmp_path: Path) -> None:
    rows = [chat(number, f"answer {number}") for number in range(3)]
    rows += [
        {"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(3, 5)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not any(is_held_out(row["messages"]) for row in rows)
    _, evaluated, said = trained_and_evaluated(request(tmp_path / "rows.jsonl", task="sft"))
    assert "answer" in evaluated and any("one document is held out" in line for line in said)


def test_pairs(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"question {number}", "chosen": "yes", "rejected": "no"} for number in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task, pairs = load_task("reward"), PairProcessor(TOKENIZER, 64, False)
    assert task.samples and not any(is_held_out(row) for row in rows)
    asked = request(tmp_path / "rows.jsonl", task="reward")
    stream = open_samples(asked, pairs, task.samples, rank=DataRank(1, 0))
    seen = {
        tuple(row.flatten().tolist())
        for _ in range(6)
        for batch in next(stream)[0]
        for row in batch["input_ids"]
    }
    stream.close()
    held_out = eval_samples(asked, pairs, task.samples, rank=DataRank(1, 0), state=stream.state)
    mine = {tuple(row.flatten().tolist()) for batch in held_out for row in batch["input_ids"]} - {
        tuple([TOKENIZER.pad_token_id] * 128)
    }
    assert len(seen) == 3 and not seen & mine


@pytest.mark.parametrize("task", ["sft", "reward"])
def test_one_row_that_cannot_be_cut_is_refused_before_the_model(tmp_path: Path, task: str) -> None:
    row = chat(1) | {"prompt": "question", "chosen": "yes", "rejected": "no"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    pairs = partial(
        open_rows,
        samples=load_task("reward").samples,
        processor=PairProcessor(TOKENIZER, 64, False),
    )
    opened: Any = pairs if task == "reward" else partial(open_corpus, tokenizer=TOKENIZER)
    with pytest.raises(
        ConfigError,
        match=(
            r"row 1: is the only document, and evaluation requires a second one.*\. Add more data,"
            r" or use --eval_every 0"
        ),
    ):
        opened(request(tmp_path / "rows.jsonl", task=task))
    opened(request(tmp_path / "rows.jsonl", task=task, eval_every=0))


@pytest.mark.parametrize("skip", ["stop", "skip"])
@pytest.mark.parametrize("eval_every", [0, 1])
def test_data_without_text_are_refused_before_the_model(
    tmp_path: Path, eval_every: int, skip: str
) -> None:
    for name, content in (
        ("a.txt", ""),
        ("b.txt", " \n"),
        ("c.jsonl", '{"text": ""}\n{"text": null}\n'),
        ("d.json", '{"text": " "}\n'),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=r"contains no (document to train on|rows)|is empty"):
            open_corpus(request(tmp_path / name, eval_every=eval_every, bad_rows=skip), TOKENIZER)


def test_without_evaluation_nothing_is_held_out_and_a_resume_keeps_the_choice(
    tmp_path: Path,
) -> None:
    file = book(tmp_path, 200)
    asked = request(file, eval_every=0)
    stream = open_stream(asked, TOKENIZER, rank=DataRank(1, 0))
    assert "held_out" not in next(stream)[1]["identity"]
    stream.close()
    on = open_stream(request(file), TOKENIZER, rank=DataRank(1, 0))
    state = json.loads(json.dumps(next(on)[1]))
    rest = [batch["input_ids"].tolist() for _ in range(3) for batch in next(on)[0]]
    on.close()
    assert state["identity"]["held_out"][1] is True
    for eval_every in (1, 0):
        again = open_stream(
            request(file, eval_every=eval_every), TOKENIZER, rank=DataRank(1, 0), state=state
        )
        assert [batch["input_ids"].tolist() for _ in range(3) for batch in next(again)[0]] == rest
        again.close()
    with pytest.raises(StreamMismatch):
        file.write_text(file.read_text() + "and more")
        open_stream(request(file), TOKENIZER, rank=DataRank(1, 0), state=state)


def test_kept_tokens_know_what_is_held_out(tmp_path: Path) -> None:
    file = book(tmp_path, 200)
    for eval_every in (0, 1, 0):
        with_cache, without = (
            {"eval_every": eval_every, "token_cache": cache}
            for cache in (str(tmp_path / "cache"), "off")
        )
        found = []
        for more in (with_cache, without):
            stream = open_stream(request(file, **more), TOKENIZER, rank=DataRank(1, 0))
            found.append(
                [batch["input_ids"].tolist() for _ in range(20) for batch in next(stream)[0]]
            )
            stream.close()
        assert found[0] == found[1]


def test_a_corpus_with_held_out_documents_is_as_it_was(tmp_path: Path) -> None:
    rows = [f"document {number} has some words" for number in range(400)]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in rows)
    )
    assert any(map(is_held_out, rows))
    for eval_every in (0, 1):
        assert (
            "held_out"
            not in open_corpus(
                request(tmp_path / "rows.jsonl", eval_every=eval_every), TOKENIZER
            ).identity
        )


@pytest.mark.parametrize("skip", ["stop", "skip"])
def test_a_dry_run_refuses_small_files_without_text(tmp_path: Path, skip: str) -> None:
    contents = {
        "a.txt": "",
        "b.txt": " \n\n",
        "c.jsonl": '{"text": ""}\n\n{"text": null}\n',
        "d.json": '{"text": " "}\n',
        "e.txt": "\ufeff",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
        recipe = Recipe(
            model="recipekit/llama-nano",
            init="random",
            dataset=str(tmp_path / name),
            tokenizer="bytes",
            bad_rows=skip,
        )
        with pytest.raises(
            ConfigError, match=r"contains no document: every row is empty .*\. Use other data"
        ):
            resolve_run(parse(recipe, Path("mine.py"), ["--dry_run"]))
    (tmp_path / "c.jsonl").write_text(contents["c.jsonl"] + '{"text": "words"}\n')
    resolve_run(
        parse(
            Recipe(
                model="recipekit/llama-nano",
                init="random",
                dataset=str(tmp_path / "c.jsonl"),
                tokenizer="bytes",
            ),
            Path("mine.py"),
            ["--dry_run"],
        )
    )
