"""Samples: rank-independent order and keys, held-out rows, and unusable rows.

The tests use real images and numbers.
"""

import contextlib
import dataclasses
import json
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fashion import png
from recipekit.data import blocks, chunks, held_out, samples
from recipekit.data.batching import DataRank
from recipekit.data.content import is_held_out
from recipekit.data.held_out import eval_samples
from recipekit.data.prefetch import PREFETCH
from recipekit.data.request import Request
from recipekit.data.samples import open_rows, open_samples
from recipekit.data.stream_state import StreamMismatch, naming_changes
from recipekit.spec.errors import ConfigError
from recipekit.spec.task import IGNORE, MicroBatch, Samples
from sample_streams import (
    NUMBERS,
    PICTURES,
    SMALL,
    equal,
    numbers,
    request_for,
    take,
    unmirrored,
    write_rows,
)


def trained_on(pixels: tuple[np.ndarray, np.ndarray], held_out: bool = False) -> Counter:
    rows = [
        (image, int(label))
        for image, label in zip(*pixels, strict=True)
        if is_held_out({"image": png(image)}) == held_out
    ]
    return Counter((min(image.tobytes(), image[:, ::-1].tobytes()), label) for image, label in rows)


def test_images_left_out_are_not_decoded() -> None:
    decoded = list[int]()

    def collate(size: int, rows: list[dict | None], keys: list[int] | None) -> MicroBatch:
        decoded.append(len(rows))
        return PICTURES.collate(size, rows, keys)

    counted = dataclasses.replace(PICTURES, collate=collate)
    plain = request_for("builtin")
    whole, state = take(plain, 9, processor=4)
    left = dataclasses.replace(plain, leave_out="2:5")
    for dp in (1, 2):
        decoded.clear()
        found, states = take(left, 4, dp, samples=counted, processor=4)
        assert equal(found, [whole[0], *whole[6:]])
        assert states["domains"] == state["domains"] and states["step"] == 4
    _, middle = take(left, 1, 2, processor=4)
    assert equal(take(left, 3, 1, middle, processor=4)[0], whole[6:])
    with contextlib.closing(
        open_samples(dataclasses.replace(plain, leave_out="1:30"), 4, counted, rank=DataRank(1, 0))
    ) as stream:
        decoded.clear()
        stream.error_ahead()
        # The first step of this stream, and at most the steps that are prepared ahead.
        assert sum(decoded) <= 12 * (2 + PREFETCH)


def test_a_ramp_takes_the_samples_of_the_stream_in_their_order() -> None:
    """A batch ramp must not change the rows or their augmentation.

    This is tested for any number of ranks and after a resume in the middle of the ramp.
    """
    plain = request_for("builtin", micro_batch=1)
    whole, state = take(plain, 9, processor=4)
    rows = {name: torch.cat([batch[name] for batch in whole]) for name in whole[0]}
    ramp = dataclasses.replace(plain, batch_ramp="2:24, 4:48")
    edges = [0, 12, 36, 60, 108]
    for dp in (1, 2, 4):
        found, states = take(ramp, 4, dp, processor=4)
        assert equal(
            found,
            [
                {name: tensor[first:last] for name, tensor in rows.items()}
                for first, last in pairwise(edges)
            ],
        )
        assert states["domains"] == state["domains"] and states["step"] == 4
    _, middle = take(ramp, 2, 4, processor=4)
    found, _ = take(ramp, 2, 1, middle, processor=4)
    assert equal(
        found,
        [
            {name: tensor[first:last] for name, tensor in rows.items()}
            for first, last in pairwise(edges[2:])
        ],
    )


def test_pictures_come_alike_on_any_ranks_once_an_epoch_and_anew_each_epoch(fashion, pixels):
    wanted = trained_on(pixels)
    epoch = wanted.total()
    assert 970 < epoch < 1000
    reference, _ = take(request_for(fashion), 2 * epoch // 12)
    for dp, micro_batch in ((2, 3), (3, 4), (12, 1)):
        assert equal(take(request_for(fashion, micro_batch=micro_batch), 30, dp)[0], reference[:30])
    _, state = take(request_for(fashion), 41, 2)
    assert len(json.dumps(state)) < 1024
    assert equal(take(request_for(fashion), 20, 3, state)[0], reference[41:61])
    rows = [
        {name: tensor[number : number + 1] for name, tensor in batch.items()}
        for batch in reference
        for number in range(12)
    ]
    first, second = rows[:epoch], rows[epoch:]
    assert (
        unmirrored(first) == wanted and not unmirrored(second) - wanted and len(second) > epoch - 12
    )
    ways = [
        {image.numpy().tobytes() for row in epoch_rows for image in row["pixel_values"]}
        for epoch_rows in (first, second)
    ]
    assert 300 < len(ways[0] - ways[1]) < 700  # half of the images are mirrored in only one epoch


def test_pictures_may_be_encoded_or_not_and_columns_have_any_name(fashion, pixels, tmp_path):
    raw = (
        pq.read_table(fashion.with_name("raw.parquet"))
        .rename_columns(["picture", "digit"])
        .append_column("more", pa.array(range(1000)))
    )
    pq.write_table(raw, tmp_path / "raw.parquet")
    batches, _ = take(
        request_for(tmp_path / "raw.parquet", image_field="picture", label_field="digit"), 80
    )
    everything = trained_on(pixels) + trained_on(pixels, held_out=True)
    assert not unmirrored(batches) - everything


def test_every_sample_has_another_key_in_every_epoch(tmp_path):
    # Two epochs.
    batches, _ = take(request_for(numbers(tmp_path / "numbers.jsonl", 60)), 10, samples=NUMBERS)
    found, keys = (
        torch.cat([batch[name] for batch in batches]).tolist() for name in ("number", "key")
    )
    assert (
        len(set(found)) == 60 and sorted(found[:60]) == sorted(found[60:]) and len(set(keys)) == 120
    )
    assert sorted(found[:60]) not in (found[:60], found[60:]) and found[:60] != found[60:]


def test_samples_may_be_a_mixture(tmp_path):
    """`domain` is the corpus of each row. The shares follow the weights on any number of ranks."""
    for name, first in (("a", 0), ("b", 1000)):
        numbers(tmp_path / f"{name}.jsonl", 40, first)
    for dp, micro_batch in ((1, 1), (3, 2)):
        request = request_for(
            f"a={tmp_path / 'a.jsonl'}@3; b={tmp_path / 'b.jsonl'}@1", micro_batch=micro_batch
        )
        for batch in take(request, 5, dp, samples=NUMBERS)[0]:
            assert (
                torch.equal(batch["domain"], (batch["number"] >= 1000).long())
                and batch["domain"].sum() == 3
            )


def test_builtin_is_drawn_and_needs_no_file():
    batches, _ = take(request_for("builtin"), 76, 2, samples=NUMBERS)
    given = torch.cat([batch["number"] for batch in batches]).tolist()
    wanted = [n for n in range(900) if not is_held_out({"image": n})]
    assert sorted(given[: len(wanted)]) == wanted and given[: len(wanted)] != wanted
    _, state = take(request_for("builtin"), 39, samples=NUMBERS)
    assert equal(take(request_for("builtin"), 30, 3, state, samples=NUMBERS)[0], batches[39:69])


def test_a_block_ends_where_its_samples_are_large(tmp_path):
    """A block ends at block_samples samples or at block_bytes bytes, so its memory is bounded."""
    pq.write_table(
        pa.table({"image": [bytes(10_000)] * 300, "label": [0] * 300}), tmp_path / "a.parquet"
    )
    for sizes, length in (
        (dataclasses.replace(SMALL, block_bytes=1 << 28), 100),
        (dataclasses.replace(SMALL, block_bytes=200_000), 19),
    ):
        request = request_for(tmp_path / "a.parquet", sizes=sizes)
        [reader] = open_rows(request, PICTURES, None).readers()
        found: list[int] = []
        for _, block in blocks.iter_blocks(
            reader, 0, sizes.block_bytes, samples._shuffle_samples, blocks.StreamPosition()
        ):
            found.append(len(block.samples))
            if sum(found) == 300:
                break
        assert set(found[:-1]) == {length}


def evaluated(
    request: Request, dp: int, samples: Samples = PICTURES, processor: Any = 28
) -> list[MicroBatch]:
    ranks = [
        eval_samples(request, processor, samples, rank=DataRank(dp, rank)) for rank in range(dp)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    return [batch for batches in ranks for batch in batches]


@pytest.mark.parametrize("kind", ["tables", "folder"])
def test_held_out_rows_are_evaluated_alike_on_every_layout_and_never_trained_on(
    kind, fashion, classes
):
    dataset = fashion if kind == "tables" else classes
    for eval_rows in (1000, 5):
        reference: Counter = Counter()
        for dp, micro_batch in ((1, 2), (2, 3), (4, 1)):
            batches = evaluated(
                request_for(dataset, micro_batch=micro_batch, eval_rows=eval_rows), dp
            )
            labels = torch.cat([batch["labels"] for batch in batches])
            count = int((labels != IGNORE).sum())
            assert (
                len(labels) == -(-count // (dp * micro_batch)) * dp * micro_batch
                and (labels[:count] != IGNORE).all()
            )
            found = unmirrored(batches)
            del found[bytes(28 * 28), IGNORE]
            assert found.total() == count and (reference or found) == found
            reference = found
        assert count == 5 if eval_rows == 5 else 3 <= count <= 25
        assert not {image for image, _ in reference} & {
            image for image, _ in unmirrored(take(request_for(dataset), 170)[0])
        }


def test_rows_of_all_parts_are_evaluated_and_a_mixture_in_its_shares(tmp_path):
    """Evaluation takes rows from all parts. Otherwise data sorted by class would show only the
    first class.
    """
    for name, first in (("a", 0), ("b", 10_000)):
        (tmp_path / name).mkdir()
        for part in range(10):
            write_rows(
                tmp_path / name / f"{part}.jsonl",
                [
                    {"image": n, "label": 0}
                    for n in range(first + 1000 * part, first + 1000 * part + 1000)
                ],
            )
    parts = [
        n // 1000
        for batch in evaluated(request_for(tmp_path / "a", eval_rows=30), 1, NUMBERS)
        for n in batch["number"].tolist()
        if n != IGNORE
    ]
    assert len(parts) == 30 and list(dict.fromkeys(parts)) != sorted(set(parts))
    request = request_for(f"a={tmp_path / 'a'}@3; b={tmp_path / 'b'}@1", eval_rows=20)
    found = [
        n
        for batch in evaluated(request, 2, NUMBERS)
        for n in batch["number"].tolist()
        if n != IGNORE
    ]
    assert len([n for n in found if n >= 10_000]) == 5 and len(found) == 20


def test_no_held_out_row_is_refused_and_few_are_told(tmp_path):
    with pytest.raises(
        ConfigError,
        match=(
            r"numbers.jsonl: is too small: the 1 % held out for evaluation is empty\. Use"
            r" --eval_every 0"
        ),
    ):
        evaluated(request_for(numbers(tmp_path / "numbers.jsonl", 60)), 1, NUMBERS)
    said: list[str] = []
    eval_samples(
        request_for("builtin", eval_rows=100), None, NUMBERS, rank=DataRank(1, 0), say=said.append
    )
    assert said == [
        f"evaluation has {sum(is_held_out({'image': n}) for n in range(900))} rows, not eval_rows ="
        " 100: the held-out 1 % of the rows holds no more"
    ]


def test_a_long_read_for_an_evaluation_is_told_before_it_begins(monkeypatch):
    said: list[str] = []
    for rows, rank in ((201, 0), (200, 0), (201, 1)):
        request = request_for("builtin", eval_rows=rows)
        eval_samples(request, None, NUMBERS, rank=DataRank(2, rank), say=said.append)
    line = (
        "evaluation: 1 row in 100 is held out, so for eval_rows = 201 every rank first reads about"
        " 20,100 rows"
    )
    assert (
        said[0] == line
        and said.count(line) == 1
        and [words[:14] for words in said[1:]] == ["evaluation has"] * 2
    )
    monkeypatch.setattr(held_out, "_read_domains", lambda *more: pytest.fail("reads"))

    def stop(words: str) -> None:
        raise InterruptedError(words)

    with pytest.raises(InterruptedError, match="20,100 rows"):
        eval_samples(
            request_for("builtin", eval_rows=201), None, NUMBERS, rank=DataRank(1, 0), say=stop
        )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 1}, "seed = 1"),
        ({"augment": "none"}, "augment = none: the saved data stream has crop"),
        ({"global_batch": 24}, "global_batch = 24"),
    ],
)
def test_state_of_another_stream_is_refused(change, says):
    _, state = take(request_for("builtin"), 1, samples=NUMBERS)
    with pytest.raises(StreamMismatch, match=says):
        take(request_for("builtin", **change), 1, state=state, samples=NUMBERS)
    with pytest.raises(
        StreamMismatch, match=r"task = image_classification: the saved data stream has sft"
    ):
        take(
            request_for("builtin"),
            1,
            state={**state, "identity": state["identity"] | {"task": "sft"}},
            samples=NUMBERS,
        )


def test_changed_files_are_named(tmp_path):
    path = numbers(tmp_path / "numbers.jsonl", 60)
    with contextlib.closing(
        open_samples(request_for(path), None, NUMBERS, rank=DataRank(1, 0))
    ) as own:
        _, state = next(own)
        before = own.files
    numbers(path, 70)
    with (
        pytest.raises(
            StreamMismatch,
            match=(
                r"--dataset: the files differ from those the saved run read: "
                r"numbers.jsonl has changed"
            ),
        ),
        naming_changes(before),
    ):
        take(request_for(path), 1, state=state, samples=NUMBERS)


def test_only_the_first_broken_rows_are_told(tmp_path):
    (tmp_path / "a.jsonl").write_text("nonsense\n" * 20 + '{"image": 1, "label": 1}\n' * 30)
    said: list[str] = []
    request = request_for(tmp_path / "a.jsonl", bad_rows="skip")
    take(request, 1, samples=NUMBERS, say=said.append)
    assert (
        len(said) == chunks.MAX_REPORTED_ROWS
        and "a.jsonl, row 5: is not JSON" in said[-1]
        and "bad_rows counts on" in said[-1]
    )


def test_the_row_that_cannot_be_used_is_named(tmp_path):
    path = write_rows(
        tmp_path / "a.jsonl", [{"image": "many" if n == 30 else n, "label": 0} for n in range(60)]
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"a.jsonl, row 31: cannot be used: must be a class number, not str 'many'.*\. Correct"
            r" the row, or leave it out \(--bad_rows skip\)"
        ),
    ):
        take(request_for(path, micro_batch=12), 5, samples=NUMBERS)


def test_a_row_that_cannot_be_used_may_fill_up_on_any_ranks_and_is_told_once(tmp_path):
    path = write_rows(
        tmp_path / "a.jsonl",
        [{"image": "many" if n in (30, 31) else n, "label": 0} for n in range(60)],
    )
    said: list[str] = []
    # Three epochs.
    reference, _ = take(request_for(path, bad_rows="skip"), 15, samples=NUMBERS, say=said.append)
    assert sum(int((batch["number"] == IGNORE).sum()) for batch in reference[:10]) >= 4
    assert sorted(line.partition(": cannot")[0] for line in said) == [
        f"skipped (--bad_rows skip): {path}, row {row}" for row in (31, 32)
    ]
    assert equal(
        take(request_for(path, bad_rows="skip", micro_batch=4), 15, 3, samples=NUMBERS)[0],
        reference,
    )


def test_what_no_row_is_at_fault_for_is_raised(tmp_path):
    def fail(processor: None, rows: list, keys: list | None) -> MicroBatch:
        if len(rows) > 1:
            raise ValueError("two are too many")
        return {}

    with pytest.raises(ValueError, match="two are too many"):
        take(
            request_for("builtin", bad_rows="skip"),
            1,
            samples=Samples(fail, NUMBERS.builtin_row, 100),
        )
