"""Data sources: files, folders, the standard library and data sets on the hub."""

import gc
import shutil
import sysconfig
import threading
import time
from pathlib import Path

import pytest
from recipekit.data import sources
from recipekit.data.batching import DataRank
from recipekit.data.mixture import Domain
from recipekit.data.request import Request
from recipekit.data.source import ColumnSelection
from recipekit.data.sources import open_source
from recipekit.data.stream import open_stream
from recipekit.spec.errors import ConfigError
from recipekit.spec.task import IGNORE
from token_streams import (
    BYTES,
    PATIENCE,
    request_for,
    take,
    texts_from,
    texts_of,
    words,
)

pytestmark = pytest.mark.usefixtures("own_cache")


WANTED = ColumnSelection(("text",), "pretrain", read_rows=7)


def test_builtin_chats_ask_for_the_docstring():
    batches, _ = take(request_for("builtin", task="sft", seq_len=256), 2)
    for ids, labels in batches.transpose(0, 2, 1, 3).reshape(-1, 3, 256)[:, :2]:
        text = BYTES.decode(ids)
        assert text.startswith("<|im_start|>user\nWrite the docstring.\n")
        answer = text.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
        assert BYTES.decode(labels[labels != IGNORE]).startswith(answer.removesuffix("\n"))


def test_builtin_is_the_standard_library():
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(stdlib.rglob("*.py")) if "site-packages" not in file.parts]
    content = "".join(texts_of("builtin"))
    assert content == "".join(
        file.read_text(encoding="utf-8", errors="replace").removeprefix("\ufeff") for file in files
    )


def test_ways_to_name_files(corpora, monkeypatch):
    lines = Path(corpora["lines"])
    monkeypatch.chdir(lines)
    everything = texts_of(str(lines))
    assert len(everything) == 300
    for name in (
        f"{lines}/*.jsonl",
        f"{lines}/0.jsonl,{lines}/[12].jsonl",
        "0.jsonl, 1.jsonl, 2.jsonl",
        "*.jsonl",
        str(lines / "**" / "*.jsonl"),
    ):
        assert texts_of(name) == everything, name


@pytest.mark.parametrize(
    "dataset, fields, says",
    [
        ("no/such/*.jsonl", {}, ["--dataset no/such/*.jsonl", "the file does not exist"]),
        ("./gone.txt,./gone2.txt", {}, ["gone.txt", "gone2.txt"]),
        ("gone.jsonl", {}, ["the file does not exist"]),
        ("{folder}", {}, ["several formats: lines, text"]),
        ("{folder}/c.bin", {}, ["the file format is not clear from the ending"]),
        (
            "{folder}/tables",
            {},
            ["tables: contains no supported files (.txt, ", ".parquet", "Convert its files"],
        ),
        ("{folder}/a.txt", {"task": "sft"}, ["task sft requires chats"]),
        (
            "org/name",
            {},
            [
                "--dataset org/name",
                "hub cannot be reached",
                "https://huggingface.co/datasets/org/name",
            ],
        ),
    ],
)
def test_missing_corpus_is_refused_at_once(tmp_path, dataset, fields, says):
    (tmp_path / "tables").mkdir()
    for name in ("a.txt", "b.jsonl", "c.bin", "tables/d.xml"):
        (tmp_path / name).write_text("x")
    with pytest.raises(ConfigError) as refused:
        open_stream(
            request_for(dataset.format(folder=tmp_path), **fields), BYTES, rank=DataRank(1, 0)
        )
    assert all(part in str(refused.value) for part in says), str(refused.value)


def test_fingerprint_follows_the_content(corpora, tmp_path):
    def fingerprint(request: Request) -> str:
        return open_source(request, Domain("", request.dataset), PATIENCE).fingerprint

    shutil.copytree(corpora["lines"], tmp_path / "copy")
    before = fingerprint(request_for(corpora["lines"]))
    assert (
        fingerprint(request_for(str(tmp_path / "copy")))
        == before
        == fingerprint(request_for(str(tmp_path / "copy"), seed=3, seq_len=99))
    )
    assert fingerprint(request_for(corpora["lines"], text_field="id")) != before
    path = tmp_path / "copy" / "1.jsonl"
    content = path.read_text()
    path.write_text(content.replace("a", "b", 1))
    assert fingerprint(request_for(str(tmp_path / "copy"))) != before
    path.write_text(content)
    path.rename(path.with_name("4.jsonl"))
    assert fingerprint(request_for(str(tmp_path / "copy"))) != before


def test_hub_data_set_is_streamed(corpora):
    source = sources._hub_source(Domain("", corpora["parquet"]), "train", "", WANTED, PATIENCE)
    assert (
        texts_from(source) == words(300, 0)
        and len(source.parts) == 2
        and source.groups(0) == 4
        and "/train@" in source.fingerprint
    )


@pytest.mark.parametrize(
    "subset, split, says",
    [("", "tests", ["tests", "train"]), ("no-such", "train", ["no-such", "default"])],
)
def test_wrong_split_or_subset_is_refused(corpora, subset, split, says):
    with pytest.raises(ConfigError) as refused:
        sources._hub_source(Domain("", corpora["parquet"], subset), split, "", WANTED, PATIENCE)
    assert all(part in str(refused.value) for part in says), str(refused.value)


def test_missing_subset_is_refused_with_the_choice(tmp_path, corpora):
    shutil.copytree(corpora["parquet"], tmp_path / "repository")
    card = (
        "---\nconfigs:\n- config_name: first\n  data_files: 0.parquet\n- config_name: second\n "
        " data_files: 1.parquet\n---\n"
    )
    (tmp_path / "repository" / "README.md").write_text(card)
    with pytest.raises(ConfigError, match=r"'first', 'second'"):
        sources._hub_source(Domain("", str(tmp_path / "repository")), "train", "", WANTED, PATIENCE)
    assert (
        len(
            sources._hub_source(
                Domain("", str(tmp_path / "repository"), "second"), "train", "", WANTED, PATIENCE
            ).parts
        )
        == 1
    )


def test_a_data_set_with_a_script_is_refused(tmp_path):
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").write_text("")
    with pytest.raises(
        ConfigError, match=r"--dataset .*scripted: Dataset scripts are no longer supported"
    ):
        sources._hub_source(Domain("", str(tmp_path / "scripted")), "train", "", WANTED, PATIENCE)


def test_two_threads_may_parse_at_once() -> None:
    """The training stream and the evaluation read `builtin` at the same time.

    A garbage collection during `ast.parse` can switch threads.
    """
    from recipekit.data.sources import _docstring_chats

    programs = [
        file.read_text() for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:6]
    ]
    failed: list[BaseException] = []

    def parse() -> None:
        try:
            for source in programs:
                _docstring_chats(source, "here")
        except SystemError as error:
            failed.append(error)

    def change_threads(*_: object) -> None:
        time.sleep(0.0001)

    before = gc.get_threshold()
    gc.set_threshold(100)
    gc.callbacks.append(change_threads)
    threads = [threading.Thread(target=parse) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.callbacks.remove(change_threads)
        gc.set_threshold(*before)
    assert not failed
