"""Epochs: the counts before a run must equal the data in the run's stream."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recipekit.data import epoch_counts
from recipekit.data.batching import DataRank
from recipekit.data.content import is_held_out
from recipekit.data.epoch_counts import (
    epochs_after_rows,
    mixture_epochs,
    read_corpora_lengths,
    steps_for_epochs,
)
from recipekit.data.pairs import PairProcessor
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import Request, Sizes
from recipekit.data.samples import open_rows, open_samples
from recipekit.data.stream import open_corpus, open_stream
from recipekit.spec.schedules import Ramp
from recipekit.tasks.find import load_task

TOKENIZER = byte_tokenizer()
SMALL = Sizes(block_rows=32, block_tokens=(1, 1 << 22), chunk_rows=7, read_rows=7, part_bytes=1000)
slow = pytest.mark.slow
SILENT: Any = lambda _: None  # noqa: E731


def write(file: Path, count: int, shortest: int, longest: int) -> Path:
    """Write different documents of `shortest` to `longest` characters.

    Each character is one token, and each document has one additional end token.
    """
    draw = random.Random(count)
    with file.open("w") as lines:
        for number in range(count):
            size = draw.randint(shortest, longest)
            lines.write(
                json.dumps(
                    {"text": (f"{number:05d} " + "".join(draw.choices("abc ", k=size)))[:size]}
                )
                + "\n"
            )
    return file


def asked(dataset: object, **more: Any) -> Request:
    fields = {
        "tokenizer": "bytes",
        "seq_len": 32,
        "global_batch": 8,
        "token_cache": "off",
        "sizes": SMALL,
    }
    return Request(**({"dataset": str(dataset)} | fields | more))


def given(
    request: Request, steps: int, dp: int, tokenizer: Any = TOKENIZER
) -> tuple[list[Counter[bytes]], list[Any]]:
    """Read the streams of all ranks.

    Return how often each segment of a document occurred up to each step, and the states.
    """
    streams = [open_stream(request, tokenizer, rank=DataRank(dp, rank)) for rank in range(dp)]
    seen, counts, states = Counter[bytes](), [], []
    for _ in range(steps):
        of_ranks = [next(stream) for stream in streams]
        assert all(state == of_ranks[0][1] for _, state in of_ranks)
        for batch in (batch for batches, _ in of_ranks for batch in batches):
            for ids, positions in zip(
                batch["input_ids"].numpy(), batch["position_ids"].numpy(), strict=True
            ):
                pieces = np.split(ids, np.flatnonzero(positions == 0)[1:])
                seen.update(
                    piece.tobytes() for piece in pieces if (piece != tokenizer.pad_token_id).any()
                )
        counts.append(seen.copy())
        states.append(of_ranks[0][1])
    for stream in streams:
        stream.close()
    return counts, states


def tokens_of(pieces: Counter[bytes]) -> int:
    return sum(count * (len(piece) // 8) for piece, count in pieces.items())


def outline_of(request: Request, tokenizer: Any = TOKENIZER, name: str = "") -> Any:
    return read_corpora_lengths(open_corpus(request, tokenizer), {name}, SILENT)[name]


PACKED, UNPACKED, LONG = (6, 20), (31, 31), (20, 90)  # characters


@pytest.mark.parametrize(
    ("count", "lengths", "dp", "epochs"),
    [
        (3, PACKED, 1, 2.0),
        (3, UNPACKED, 4, 5.0),
        (3, LONG, 2, 1.5),
        (600, PACKED, 4, 2.0),
        (600, UNPACKED, 2, 1.0),
        (600, LONG, 1, 2.25),
        pytest.param(10_000, PACKED, 2, 1.0, marks=slow),
        pytest.param(600, LONG, 4, 2.0, marks=slow),
        pytest.param(10_000, LONG, 4, 2.0, marks=slow),
        pytest.param(10_000, PACKED, 1, 3.0, marks=slow),
        pytest.param(10_000, UNPACKED, 4, 2.0, marks=slow),
    ],
)
def test_epochs_are_what_the_stream_gave(
    tmp_path: Path, count: int, lengths: tuple[int, int], dp: int, epochs: float
) -> None:
    """The counted documents, tokens and steps match the data of all ranks.

    Each token occurs `epochs` times. The last step may contain additional rows.
    """
    sizes = (
        Sizes(block_rows=200, block_tokens=(1, 1 << 22), part_bytes=50_000)
        if count == 10_000
        else SMALL
    )
    request = asked(
        write(tmp_path / "rows.jsonl", count, *lengths),
        global_batch=8 if count == 3 else count // 5,
        sizes=sizes,
    )
    of = outline_of(request)
    steps, more = steps_for_epochs(of, epochs, request.ramp, SILENT)
    counts, states = given(request, steps + 1, dp)
    tokens = [tokens_of(pieces) for pieces in counts]

    texts = [
        json.loads(line)["text"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()
    ]
    trained = [text for text in texts if not is_held_out(text)]
    assert of.first_epoch.documents == len(trained) and of.first_epoch.tokens == sum(
        len(text) + 1 for text in trained
    )
    for step in {1, (steps + 1) // 2, steps, steps + 1}:
        assert states[step - 1]["domains"][""]["given"]["tokens"] == tokens[step - 1]
        complete, exact = epochs_after_rows(of, step * request.global_batch)
        assert exact and round(complete * of.first_epoch.tokens, 6) == tokens[step - 1], step
    assert 0 <= more < request.global_batch and tokens[steps - 1] >= epochs * of.first_epoch.tokens
    if epochs == int(epochs):
        times = int(epochs)
        last = (
            int(of.row_fills(times)[:more].sum())
            if more <= of.first_epoch.rows
            else tokens[steps - 1] - times * of.first_epoch.tokens
        )
        assert tokens[steps - 1] == times * of.first_epoch.tokens + last, (
            "the rows of the next epoch that fill up the last step"
        )
        if lengths != LONG:  # each document is one segment
            assert (
                len(counts[steps - 1]) == len(trained) and min(counts[steps - 1].values()) >= times
            )
            assert sum(counts[steps - 1].values()) - times * len(trained) == sum(
                max(0, number - times) for number in counts[steps - 1].values()
            )


@pytest.mark.parametrize("count", [3, 40, 200])
def test_two_epochs_have_each_token_of_each_document_twice(tmp_path: Path, count: int) -> None:
    """Every token of these documents is unique, and rows split most documents."""
    draw = np.random.default_rng(count)
    lengths = draw.integers(2, 70, count)
    numbers = np.arange(lengths.sum()) + len(TOKENIZER)
    documents = [part.tolist() for part in np.split(numbers, np.cumsum(lengths)[:-1])]
    pq.write_table(pa.table({"ids": documents}), tmp_path / "ids.parquet")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<token {number}>" for number in numbers])

    request = asked(tmp_path / "ids.parquet", text_field="ids")
    of = outline_of(request, tokenizer)
    steps, more = steps_for_epochs(of, 2, request.ramp, SILENT)
    counts, _ = given(request, steps, 2, tokenizer)
    found = Counter(
        int(token)
        for piece, times in counts[-1].items()
        for token in np.frombuffer(piece, np.int64).repeat(times)
    )
    found.pop(tokenizer.pad_token_id, None)
    assert len(found) == of.first_epoch.tokens <= len(numbers) and set(found.values()) <= {2, 3}
    assert sum(number == 3 for number in found.values()) == int(of.row_fills(2)[:more].sum())


MIXTURE = ["a={a}@70; b={b}@30", "a={a}@1|9:0; b={b}@1; c={c}@2", "a={a}@0|5:1; b={b}@3"]


@pytest.mark.parametrize("dataset", MIXTURE)
def test_epochs_of_a_mixture_are_what_its_stream_gave(tmp_path: Path, dataset: str) -> None:
    files = {
        name: write(tmp_path / f"{name}.jsonl", size, 6, 60)
        for name, size in (("a", 20), ("b", 40), ("c", 3))
    }
    request, steps = asked(dataset.format(**files)), 25
    corpus = open_corpus(request, TOKENIZER)
    outlines = read_corpora_lengths(corpus, {domain.name for domain in corpus.domains}, SILENT)
    streams = [open_stream(request, TOKENIZER, rank=DataRank(2, rank)) for rank in range(2)]
    tokens, state = Counter[int](), streams[0].state
    for stream in streams:
        for _ in range(steps):
            batches, state = next(stream)
            for ids, domain in (
                (ids, domain)
                for batch in batches
                for ids, domain in zip(batch["input_ids"], batch["domain"].tolist(), strict=True)
            ):
                tokens[domain] += int((ids != TOKENIZER.pad_token_id).sum())
        stream.close()
    found, is_exact = mixture_epochs(corpus.domains, list(outlines.values()), request, steps)
    assert is_exact
    for number, (name, of) in enumerate(outlines.items()):
        assert state["domains"][name]["given"]["tokens"] == tokens[number]
        assert found[number] == tokens[number] / of.first_epoch.tokens
    assert max(found) > 2, "some corpus is read more than twice"


def test_a_ramp_fills_epochs_with_other_steps(tmp_path: Path) -> None:
    request = asked(
        write(tmp_path / "rows.jsonl", 100, 31, 31), global_batch=4, batch_ramp="5:8, 9:16"
    )
    of = outline_of(request)
    rows = of.first_epoch.rows
    steps, more = steps_for_epochs(of, 3, request.ramp, SILENT)
    total = 4 * 4 + 4 * 8 + (steps - 8) * 16
    assert total - more == 3 * rows and 0 <= more < 16
    counts, _ = given(request, steps, 1)
    assert tokens_of(counts[-1]) == total * 32


@pytest.mark.parametrize("table", [((1, 8),), ((1, 2), (4, 8)), ((1, 1), (2, 3), (10, 7))])
def test_the_step_of_a_row_is_the_first_with_as_many(table: tuple[tuple[int, int], ...]) -> None:
    ramp = Ramp(table)
    for rows in range(1, 150):
        step = ramp.step_of(rows)
        assert ramp.total(step) >= rows > ramp.total(step - 1)


@pytest.mark.parametrize("stop", [1, 7, 13])
def test_a_stream_measures_its_first_epoch(tmp_path: Path, stop: int) -> None:
    """The measured first epoch is the same after a resume within a block, or on other ranks."""
    file = write(tmp_path / "rows.jsonl", 200, 6, 60)
    rows = file.read_text().splitlines()
    file.write_text("\n".join([*rows[:50], '{"text": null}', "no JSON", *rows[50:]]) + "\n")
    request = asked(file, bad_rows="skip", global_batch=16)
    counted = outline_of(request).first_epoch
    assert (counted.empty, counted.bad) == (1, 1)
    _, states = given(request, 30, 1)

    stream = open_stream(
        request, TOKENIZER, rank=DataRank(2, 1), state=json.loads(json.dumps(states[stop - 1]))
    )
    resumed = [next(stream)[1] for _ in range(30 - stop)]
    stream.close()
    assert resumed == states[stop:]

    known = ["epoch" in state["domains"][""] for state in states]
    assert known == sorted(known) and known[-1]
    first = known.index(True)
    assert counted.rows < 16 * (first + 1) <= counted.rows + 32
    expected = {
        "documents": counted.documents,
        "tokens": counted.tokens,
        "rows": counted.rows,
        "empty": 1,
        "bad": 1,
    }
    assert states[-1]["domains"][""]["epoch"] == states[first]["domains"][""]["epoch"] == expected


def test_a_state_of_a_version_without_a_count_is_resumed(tmp_path: Path) -> None:
    request = asked(write(tmp_path / "rows.jsonl", 200, 6, 60), global_batch=16)
    _, states = given(request, 20, 1)
    old = json.loads(json.dumps(states[4]))
    del old["domains"][""]["given"]
    stream = open_stream(request, TOKENIZER, rank=DataRank(1, 0), state=old)
    last = [next(stream)[1] for _ in range(15)][-1]["domains"][""]
    stream.close()
    assert (
        not {"given", "epoch"} & last.keys()
        and last["tokens"] == states[-1]["domains"][""]["tokens"]
    )


def test_a_long_count_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_counts, "SAY_EVERY", -1.0)
    said: list[str] = []
    request = asked(write(tmp_path / "rows.jsonl", 20, 20, 90))
    of = read_corpora_lengths(open_corpus(request, TOKENIZER), {""}, said.append)[""]
    assert (
        said[-1]
        == f"counting the data: in part 2 of 2, {of.first_epoch.documents} documents so far"
    )
    monkeypatch.setattr(type(of), "is_regular", False)
    steps_for_epochs(of, 3, request.ramp, said.append)
    assert said[-1] == "counting the rows of the epochs: 3 of 3 are packed"


def test_samples_have_as_many_rows_in_each_epoch(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{number} is", "chosen": " a number", "rejected": " none"}
        for number in range(50)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = asked(tmp_path / "pairs.jsonl", task="preference", global_batch=4)
    task = load_task("preference")
    pairs = PairProcessor(TOKENIZER, 32, False)
    of = read_corpora_lengths(open_rows(request, task.samples, pairs), {""}, SILENT)[""]
    stream = open_samples(request, pairs, task.samples, rank=DataRank(1, 0))
    pairs.references.complete = False
    steps, more = steps_for_epochs(of, 2, request.ramp, SILENT)
    state = [next(stream)[1] for _ in range(steps)][-1]["domains"][""]
    stream.close()
    assert (
        of.first_epoch.rows == of.first_epoch.tokens == of.first_epoch.documents <= 50
        and of.is_regular
    )
    assert state["given"] == {
        "documents": state["given"]["documents"],
        "tokens": 4 * steps,
        "rows": 4 * steps,
    }
    assert 4 * steps - more == 2 * of.first_epoch.rows and epochs_after_rows(of, 4 * steps) == (
        4 * steps / of.first_epoch.rows,
        True,
    )
