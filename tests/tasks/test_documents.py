"""Labelled documents keep their labels through packing, and a resume compares the values that
decide the labels.
"""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recipekit.data.batching import DataRank
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import Request
from recipekit.data.stream import open_corpus, open_stream
from recipekit.data.stream_state import StreamMismatch
from recipekit.spec.task import IGNORE, Documents

SHIFT = 1000  # of a label against its token


def encode(tokenizer: Any, texts: list[str], places: list[str], seq_len: int) -> list[Any]:
    """Label every second token with a number that is no token's id."""
    found = []
    for text in texts:
        ids = np.array(tokenizer(text[:seq_len])["input_ids"], dtype=np.int64)
        found.append((ids, np.where(np.arange(len(ids)) % 2 == 0, ids + SHIFT, IGNORE)))
    return found


def shifted(shift: int) -> Documents:
    return Documents(encode, str, 1, lambda tokenizer, task: {"shift": shift})


@pytest.fixture
def request_of_file(tmp_path: Path) -> Request:
    rows = [json.dumps({"text": "word " * number}) for number in range(1, 60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return Request(
        dataset=str(tmp_path / "rows.jsonl"),
        tokenizer="bytes",
        token_cache=str(tmp_path / "tokens"),
        seq_len=64,
        micro_batch=4,
        global_batch=4,
        eval_every=0,
        documents=shifted(SHIFT),
    )


def test_labels_are_those_of_encode(request_of_file: Request) -> None:
    stream = open_stream(request_of_file, byte_tokenizer(), rank=DataRank(1, 0))
    with contextlib.closing(stream):
        batches = [next(stream)[0][0] for _ in range(3)]
    for batch in batches:
        labelled = batch["labels"] != IGNORE
        assert labelled.any() and not labelled.all()
        assert (batch["labels"][labelled] == batch["input_ids"][labelled] + SHIFT).all()
        assert (batch["position_ids"][labelled] % 2 == 0).all()


def test_a_resume_compares_what_decides_the_labels(request_of_file: Request) -> None:
    stream = open_stream(request_of_file, byte_tokenizer(), rank=DataRank(1, 0))
    with contextlib.closing(stream):
        state = next(stream)[1]
    open_corpus(request_of_file, byte_tokenizer()).check(state)
    other = dataclasses.replace(request_of_file, documents=shifted(SHIFT + 1))
    with pytest.raises(StreamMismatch):
        open_corpus(other, byte_tokenizer()).check(state)
