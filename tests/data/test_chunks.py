"""A corpus's chunks: cached tokens, shared by the ranks and discarded after a change."""

import contextlib
import dataclasses
import fcntl
import gzip
import itertools
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from recipekit.data import chunks, stream
from recipekit.data.batching import DataRank
from recipekit.data.processors import byte_tokenizer
from recipekit.data.stream import open_stream
from recipekit.spec.errors import ConfigError
from token_streams import (
    BYTES,
    END,
    SMALL,
    request_for,
    take,
)

pytestmark = pytest.mark.usefixtures("own_cache")


def test_tokens_are_kept_where_there_is_room(corpora, monkeypatch, tmp_path, caplog):
    """The default cache is skipped if it would fill the disk. An explicitly named folder is always
    used.
    """
    monkeypatch.setattr(chunks.datasets_config, "HF_DATASETS_CACHE", tmp_path / "auto")
    request = request_for(corpora["lines"])
    full = dataclasses.replace(request, sizes=dataclasses.replace(SMALL, times_free=1 << 50))
    reference, _ = take(full, 3)
    assert not list((tmp_path / "auto").rglob("*.arrow")) and "tokens are not kept" in caplog.text
    assert (
        take(dataclasses.replace(full, token_cache=str(tmp_path / "named")), 3)[0] == reference
    ).all()
    assert list((tmp_path / "named").rglob("*.arrow"))
    assert (take(request, 3)[0] == reference).all() and list((tmp_path / "auto").rglob("*.arrow"))


@pytest.mark.parametrize("kind", ["lines.gz", "parquet"])
def test_a_group_is_opened_once_by_each_of_the_ranks_that_share_its_tokens(
    corpora, tmp_path, monkeypatch, kind
):
    """Whichever rank encodes a chunk, each of the other ranks continues after the chunk from its
    own position.
    """
    if kind == "lines.gz":
        (tmp_path / "a.jsonl.gz").write_bytes(
            gzip.compress(
                b"".join(file.read_bytes() for file in sorted(Path(corpora["lines"]).iterdir()))
            )
        )
    request = request_for(
        str(tmp_path / "a.jsonl.gz") if kind == "lines.gz" else corpora[kind],
        token_cache=str(tmp_path / "kept"),
    )
    [alone] = stream.open_corpus(dataclasses.replace(request, token_cache="off"), BYTES).readers()
    reference = list(alone.chunks(0, 0, 0))
    opened: list[int] = []
    read = alone.source.read
    counted = dataclasses.replace(alone.source, read=lambda *at: opened.append(at[2]) or read(*at))
    cache = chunks.open_cache(counted, alone.encoder, request.token_cache, SMALL)
    ranks = [
        dataclasses.replace(alone, source=counted, cache=cache, told=[]).chunks(0, 0, 0)
        for _ in range(3)
    ]
    for number in range(len(reference)):
        for rank in range(3):  # each rank is first in turn
            chunk = next(ranks[(number + rank) % 3])
            assert (
                (chunk.ids == reference[number].ids).all()
                and chunk.row == reference[number].row
                and chunk.last == reference[number].last
            )
    assert len(reference) >= 6 and len(opened) <= 3 and opened[0] == 0


@pytest.mark.parametrize("what", ["lock", "chunk"])
def test_a_folder_that_cannot_keep_tokens_does_not_end_the_run(corpora, tmp_path, caplog, what):
    request = request_for(corpora["lines"], token_cache=str(tmp_path))
    reference, _ = take(dataclasses.replace(request, token_cache="off"), 20)
    [reader] = stream.open_corpus(request, BYTES).readers()
    assert reader.cache
    if what == "lock":
        (reader.cache / "lock").mkdir()
    else:
        for part, row in itertools.product(range(len(reader.source.parts)), range(100)):
            (reader.cache / f"{part}_0_{row}.{os.getpid()}").mkdir()
    assert (take(request, 20)[0] == reference).all()
    assert caplog.text.count("tokens are not kept") == 1 and not list(reader.cache.rglob("*.arrow"))


def test_kept_tokens_of_a_file_that_changed_in_its_middle_are_not_used(tmp_path):
    (tmp_path / "a.txt").write_text("a small file, which is read together with the next\n")
    for letter in "bc":  # same size, same beginning and end
        (tmp_path / "b.txt").write_text("x" * 80_000 + letter * 40_000 + "x" * 80_000)
        batches, _ = take(request_for(str(tmp_path), seq_len=256), 60)
        assert (batches[:, 0] == BYTES(letter)["input_ids"][0]).sum() > 1000


def test_a_tokenizer_with_another_end_token_is_another(corpora, tmp_path):
    """Documents end with their tokenizer's end token, even if a cache of a different tokenizer
    exists.

    A resume with a different end token is rejected.
    """
    other = byte_tokenizer()
    other.eos_token = "<|im_end|>"
    request = request_for(corpora["lines"], token_cache=str(tmp_path))
    _, state = take(request, 1)
    with contextlib.closing(open_stream(request, other, rank=DataRank(1, 0))) as own:
        ids = np.concatenate([batch["input_ids"].numpy() for batch in next(own)[0]])
    assert (ids == other.eos_token_id).any() and not (ids == END).any()
    with pytest.raises(
        ConfigError, match=r"^--tokenizer: must match the tokenizer of the saved run"
    ):
        open_stream(request, other, rank=DataRank(1, 0), state=state)


def test_a_long_document_is_told_before_its_tokens_are_made(tmp_path: Path) -> None:
    rows = [{"text": "short"}, {"text": "long " * 1000}, {"text": "short"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said: list[str] = []
    request = request_for(
        str(tmp_path / "a.jsonl"),
        token_cache="off",
        sizes=dataclasses.replace(SMALL, long_text=3000),
    )
    [reader] = stream.open_corpus(request, BYTES, said.append).readers()
    assert said == []
    next(reader.chunks(0, 0, 0))
    assert said == [f"tokenising {tmp_path}/a.jsonl, row 2: 5,005 characters of text"]
    next(
        dataclasses.replace(reader, sizes=dataclasses.replace(SMALL, long_text=10_000)).chunks(
            0, 0, 0
        )
    )
    assert len(said) == 1


def test_a_wait_for_the_tokens_of_another_process_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a word"}\n' * 5)
    said: list[str] = []
    request = request_for(str(tmp_path / "a.jsonl"), token_cache=str(tmp_path / "kept"))
    [reader] = stream.open_corpus(request, BYTES, said.append).readers()
    reader = dataclasses.replace(reader, patient=0.1)
    assert reader.cache is not None
    with (reader.cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reading = threading.Thread(target=lambda: next(reader.chunks(0, 0, 0)))
        reading.start()
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    reading.join(30)
    assert said == [
        f"waiting for the tokens of {tmp_path}/a.jsonl, row 1, which another process of this host"
        " makes"
    ]
