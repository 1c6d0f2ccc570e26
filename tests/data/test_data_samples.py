"""Samples: real pictures and numbers, in an order and with keys that do not depend on the ranks;
held-out rows; rows that cannot be used.
"""

import contextlib
import dataclasses
import json
import os
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fashion import png
from recipekit.data import blocks, chunks, held_out, samples, sources
from recipekit.data.content import is_held_out
from recipekit.data.files import folder_classes, local_files
from recipekit.data.first_row import check_first_row
from recipekit.data.folders import SETTLED
from recipekit.data.held_out import eval_samples
from recipekit.data.lanes import DataRank
from recipekit.data.mixture import Domain
from recipekit.data.pictures import class_number, opened
from recipekit.data.remote import Patience
from recipekit.data.request import Request, Sizes
from recipekit.data.sameness import OtherData, merge_states, naming_changes
from recipekit.data.samples import open_rows, open_samples
from recipekit.data.source import Wanted
from recipekit.data.sources import open_source
from recipekit.spec.refusal import Refusal
from recipekit.spec.task import IGNORE, MicroBatch, Samples

SMALL = Sizes(block_samples=100, chunk_rows=64)
NAMES = ("image", "label")


def request_for(dataset: Path | str, **fields) -> Request:
    defaults: dict[str, Any] = {
        "dataset": str(dataset),
        "task": "image_classification",
        "global_batch": 12,
        "micro_batch": 2,
        "sizes": SMALL,
    }
    return Request(**(defaults | fields))


def as_they_are(size: int, rows: list[dict | None], keys: list[int] | None) -> MicroBatch:
    """Pictures of (size, size) grey pixels, mirrored by every second key."""
    out, labels = (
        torch.zeros(len(rows), size, size, dtype=torch.uint8),
        torch.full((len(rows),), IGNORE),
    )
    for number, row in enumerate(rows):
        if row is not None:
            pixels = np.asarray(opened(row["image"]))
            out[number] = torch.from_numpy(
                pixels[:, :: -1 if keys and keys[number] % 2 else 1].copy()
            )
            labels[number] = class_number(row["label"])
    return {"pixel_values": out, "labels": labels}


def numbers_and_keys(
    processor: None, rows: list[dict | None], keys: list[int] | None
) -> MicroBatch:
    """Rows whose "image" is a number."""
    numbers = torch.tensor([IGNORE if row is None else class_number(row["image"]) for row in rows])
    return {"number": numbers, "key": torch.tensor(keys or [0] * len(rows))}


PICTURES = Samples(
    as_they_are,
    lambda number: {"image": np.full((4, 4), number % 256, dtype=np.uint8), "label": number},
    900,
)
NUMBERS = Samples(numbers_and_keys, lambda number: {"image": number, "label": 0}, 900)


def take(
    request: Request,
    steps: int,
    dp: int = 1,
    state: dict | None = None,
    samples: Samples = PICTURES,
    processor: Any = 28,
    **more,
) -> tuple[list[MicroBatch], dict]:
    """The global batches of all ranks put together, and the state after them."""
    with contextlib.ExitStack() as closing:
        opening = partial(open_samples, request, processor, samples, state=state, **more)
        streams = [
            closing.enter_context(contextlib.closing(opening(rank=DataRank(dp, rank))))
            for rank in range(dp)
        ]
        batches = []
        for _ in range(steps):
            parts = [batch for own in streams for batch in next(own)[0]]
            assert {len(tensor) for part in parts for tensor in part.values()} == {
                request.micro_batch
            }
            batches.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        return batches, json.loads(json.dumps(merge_states([own.state for own in streams])))


def equal(one: list[MicroBatch], other: list[MicroBatch]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a
    )


@pytest.fixture(scope="module")
def classes(tmp_path_factory, pixels) -> Path:
    """The pictures as files, in a folder for each class."""
    folder = tmp_path_factory.mktemp("classes")
    for number, (image, label) in enumerate(zip(*pixels, strict=True)):
        (folder / f"class_{label}").mkdir(exist_ok=True)
        (folder / f"class_{label}" / f"{number}.png").write_bytes(png(image))
    return folder


def unmirrored(batches: list[MicroBatch]) -> Counter:
    """How often each (picture, class) was given, whichever way round."""
    found = [
        (min(image.numpy().tobytes(), image.flip(1).numpy().tobytes()), int(label))
        for batch in batches
        for image, label in zip(*batch.values(), strict=True)
    ]
    return Counter(found)


def trained_on(pixels: tuple[np.ndarray, np.ndarray], held_out: bool = False) -> Counter:
    rows = [
        (image, int(label))
        for image, label in zip(*pixels, strict=True)
        if is_held_out({"image": png(image)}) == held_out
    ]
    return Counter((min(image.tobytes(), image[:, ::-1].tobytes()), label) for image, label in rows)


# Order
# --------------------------------------------------------------------------------------------------


def test_a_ramp_takes_the_samples_of_the_stream_in_their_order() -> None:
    """Row k is row k without a ramp, its augmentation included, on any number of ranks and after a
    resume in the middle.
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
    assert 300 < len(ways[0] - ways[1]) < 700  # half of them the other way round


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


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def numbers(path: Path, count: int, first: int = 0) -> Path:
    """A file of rows that are all trained on."""
    fitting = [n for n in range(first, first + 2 * count) if not is_held_out({"image": n})][:count]
    return write_rows(path, [{"image": n, "label": 0} for n in fitting])


def test_every_sample_has_another_key_in_every_epoch(tmp_path):
    # two epochs
    batches, _ = take(request_for(numbers(tmp_path / "numbers.jsonl", 60)), 10, samples=NUMBERS)
    found, keys = (
        torch.cat([batch[name] for batch in batches]).tolist() for name in ("number", "key")
    )
    assert (
        len(set(found)) == 60 and sorted(found[:60]) == sorted(found[60:]) and len(set(keys)) == 120
    )
    assert sorted(found[:60]) not in (found[:60], found[60:]) and found[:60] != found[60:]


def test_samples_may_be_a_mixture(tmp_path):
    """Each row is of the corpus that `domain` says, in the shares of the weights, on any ranks."""
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
    """At block_samples of them, or at block_bytes: memory is bounded."""
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
        for _, block in blocks.blocks(
            reader, 0, sizes.block_bytes, samples._shuffled, blocks.Place()
        ):
            found.append(len(block.samples))
            if sum(found) == 300:
                break
        assert set(found[:-1]) == {length}


# Held out
# --------------------------------------------------------------------------------------------------


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
    """Data sorted by class would else be evaluated on the first."""
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
        Refusal,
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
    monkeypatch.setattr(held_out, "_of_domains", lambda *more: pytest.fail("reads"))

    def stop(words: str) -> None:
        raise InterruptedError(words)

    with pytest.raises(InterruptedError, match="20,100 rows"):
        eval_samples(
            request_for("builtin", eval_rows=201), None, NUMBERS, rank=DataRank(1, 0), say=stop
        )


# Another stream
# --------------------------------------------------------------------------------------------------


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
    with pytest.raises(OtherData, match=says):
        take(request_for("builtin", **change), 1, state=state, samples=NUMBERS)
    with pytest.raises(
        OtherData, match=r"task = image_classification: the saved data stream has sft"
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
            OtherData,
            match=(
                r"--dataset: the files differ from those the saved run read: "
                r"numbers.jsonl has changed"
            ),
        ),
        naming_changes(before),
    ):
        take(request_for(path), 1, state=state, samples=NUMBERS)


# Rows that cannot be used
# ---------------------------------------------------------------------------------------------


def test_only_the_first_broken_rows_are_told(tmp_path):
    (tmp_path / "a.jsonl").write_text("nonsense\n" * 20 + '{"image": 1, "label": 1}\n' * 30)
    said: list[str] = []
    request = request_for(tmp_path / "a.jsonl", bad_rows="skip")
    take(request, 1, samples=NUMBERS, say=said.append)
    assert (
        len(said) == chunks.TOLD
        and "a.jsonl, row 5: is not JSON" in said[-1]
        and "bad_rows counts on" in said[-1]
    )


def test_the_row_that_cannot_be_used_is_named(tmp_path):
    path = write_rows(
        tmp_path / "a.jsonl", [{"image": "many" if n == 30 else n, "label": 0} for n in range(60)]
    )
    with pytest.raises(
        Refusal,
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
    # three epochs
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
        take(request_for("builtin", bad_rows="skip"), 1, samples=Samples(fail, NUMBERS.drawn, 100))


# What is refused before a run
# -----------------------------------------------------------------------------------------


def looked_at(dataset: Path, **fields) -> None:
    files = local_files(str(dataset))
    assert files is not None
    check_first_row(files, str(dataset), request_for(dataset, **fields))


@pytest.mark.parametrize(
    ("content", "fields", "says"),
    [
        (
            '{"picture": 1, "label": 1}',
            {},
            (
                "a.jsonl, row 1: has no column 'image', only 'picture', 'label'. Name the column"
                " with --image_field"
            ),
        ),
        (
            '\n{"image": [[1, 2]], "class": 1}',
            {},
            (
                "a.jsonl, row 2: has no column 'label', only 'image', 'class'. Name the column with"
                " --label_field"
            ),
        ),
        (
            '{"image": "cat.png", "label": 1}',
            {},
            (
                "row 1: its image is not a readable image: str 'cat.png' must be an encoded image"
                " file or rows of pixels. Name another"
            ),
        ),
        ('{"image": [[0, 1, 256]], "label": 1}', {}, "pixels must be whole numbers from 0 to 255"),
        ('{"image": [[0.5]], "label": 1}', {}, "pixels must be whole numbers from 0 to 255"),
        ('{"image": [[0, 1], [2]], "label": 1}', {}, "its image is not a readable image: "),
        ('{"image": [[[1, 2]]], "label": 1}', {}, "pixels must have the shape (H, W) or"),
        (
            '{"image": [[1]], "label": "cat"}',
            {},
            (
                "its label must be a class number, not str 'cat'. Name another column with"
                " --label_field"
            ),
        ),
        ('{"image": [[1]], "label": 1.0}', {}, "its label must be a class number, not float '1.0'"),
        (
            '{"image": true, "label": 1}',
            {},
            "its image is not a readable image: bool 'True' must be an encoded image file",
        ),
        (
            '{"image": {"bytes": null, "path": "zip://a.png::hf://b"}, "label": 1}',
            {},
            "the row contains no image bytes, only the path 'zip://a.png::hf://b'",
        ),
        (
            '{"image": [[1]], "label": 1}',
            {"task": "pretrain"},
            "a.jsonl, row 1: has no column 'text'",
        ),
    ],
)
def test_what_the_first_row_tells_is_refused(tmp_path, content, fields, says):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(Refusal) as refusal:
        looked_at(tmp_path / "a.jsonl", **fields)
    assert says in str(refusal.value) and len(str(refusal.value).splitlines()) == 1
    if "task" not in fields:
        looked_at(tmp_path / "a.jsonl", bad_rows="skip")


def test_first_rows_of_tables(tmp_path, fashion):
    looked_at(fashion)
    looked_at(fashion.with_name("raw.parquet"))
    with pytest.raises(
        Refusal,
        match=(
            r"has no column 'picture', only 'image', 'label'\. Name the column with --image_field"
        ),
    ):
        looked_at(fashion, image_field="picture")
    whole = pq.read_table(fashion / "0.parquet")["image"][0].as_py()["bytes"]
    pq.write_table(pa.table({"image": [whole[:200]], "label": [1]}), tmp_path / "cut.parquet")
    with pytest.raises(Refusal, match=r"cut.parquet, row 1: its image is not a readable image: "):
        looked_at(tmp_path / "cut.parquet")
    pq.write_table(
        pa.table({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}),
        tmp_path / "empty.parquet",
    )
    looked_at(tmp_path / "empty.parquet")


def test_text_has_no_samples(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    for look in (looked_at, lambda path: take(request_for(path), 1)):
        with pytest.raises(
            Refusal,
            match=(
                r"a.txt: is text, but task image_classification requires rows with the columns"
                r" image, label\. Use Parquet, Arrow or JSON"
            ),
        ):
            look(tmp_path / "a.txt")


# A folder of pictures
# -------------------------------------------------------------------------------------------------


def test_a_folder_for_each_class(classes, pixels):
    wanted = [
        (image, int(label))
        for number, (image, label) in enumerate(zip(*pixels, strict=True))
        if not is_held_out({"image": classes / f"class_{label}/{number}.png"})
    ]
    assert 970 < len(wanted) < 1000
    reference, _ = take(request_for(classes), len(wanted) // 12)
    left = Counter(
        (min(image.tobytes(), image[:, ::-1].tobytes()), label) for image, label in wanted
    )
    assert (
        not unmirrored(reference) - left
        and (left - unmirrored(reference)).total() == len(wanted) % 12
    )
    # parts hold pictures of all classes
    assert all(len(batch["labels"].unique()) > 2 for batch in reference)
    assert equal(take(request_for(classes, micro_batch=4), 20, 3)[0], reference[:20])
    _, state = take(request_for(classes), 39)
    assert equal(take(request_for(classes, micro_batch=3), 30, 2, state)[0], reference[39:69])
    looked_at(classes)


def test_a_file_is_held_out_by_its_class_and_name_wherever_it_lies():
    chosen = [
        {
            number
            for number in range(1000)
            if is_held_out({"image": Path(root, "cat", f"{number}.png")})
        }
        for root in ("a", "/b/c")
    ]
    assert chosen[0] == chosen[1] and 2 <= len(chosen[0]) <= 25
    assert chosen[0] == {
        number
        for number in range(1000)
        if is_held_out({"image": {"bytes": None, "path": f"d/cat/{number}.png"}})
    }


def test_pictures_are_read_when_they_are_needed(classes, tmp_path):
    """And one that cannot be read is named by its file."""
    for number in range(2):
        for file in sorted((classes / f"class_{number}").iterdir())[:30]:
            (tmp_path / "d" / file.parent.name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "d" / file.parent.name / file.name).write_bytes(file.read_bytes())
    with contextlib.closing(
        open_samples(request_for(tmp_path / "d", global_batch=2), 28, PICTURES, rank=DataRank(1, 0))
    ) as own:
        next(own)
        for file in (tmp_path / "d").rglob("*.png"):
            file.unlink()
        with pytest.raises(
            Refusal,
            match=r"class_[01]/\d+.png: cannot be used: is not a readable image: .*No such file",
        ):
            for _ in range(10):
                next(own)


def test_a_changed_picture_is_another_data_set(classes, tmp_path):
    for number in range(3):
        for file in sorted((classes / f"class_{number}").iterdir())[:40]:
            (tmp_path / "d" / file.parent.name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "d" / file.parent.name / file.name).write_bytes(file.read_bytes())
    (tmp_path / "d").rename(tmp_path / "e")  # moved, it is the same
    with contextlib.closing(
        open_samples(request_for(tmp_path / "e"), 28, PICTURES, rank=DataRank(1, 0))
    ) as own:
        _, state = next(own)
        before = own.files
    wanted = take(request_for(tmp_path / "e"), 30)[0]
    (tmp_path / "e").rename(tmp_path / "d")
    assert equal(take(request_for(tmp_path / "d"), 29, state=state)[0], wanted[1:])
    changed = sorted((tmp_path / "d" / "class_1").iterdir())[3]
    (tmp_path / "new").write_bytes(changed.read_bytes()[:-1] + b"x")
    (tmp_path / "new").replace(changed)
    with (
        pytest.raises(
            OtherData, match=r"from those the saved run read: class_1 has changed\. Restore"
        ),
        naming_changes(before),
    ):
        take(request_for(tmp_path / "d"), 1, state=state)


def test_a_folder_that_stays_as_it_is_is_listed_and_hashed_once(tmp_path, monkeypatch):
    """A run opens its data some times before its first step, on every rank, and pictures are many.

    What changes between is seen.
    """
    folders, calls = [tmp_path, tmp_path / "cat", tmp_path / "dog"], Counter()
    for folder in folders[1:]:
        folder.mkdir()
        for number in range(50):
            (folder / f"{number}.png").write_bytes(png(np.full((2, 2), number, np.uint8)))

    for folder in folders:
        # as if it had been made a while ago
        os.utime(folder, ns=(0, folder.stat().st_mtime_ns - 10 * SETTLED))

    def opening() -> tuple[dict[str, str], list[Path] | None, Counter]:
        calls.clear()
        looked_at(tmp_path)
        source = open_source(request_for(tmp_path), Domain("", str(tmp_path)), Patience(5, print))
        return source.files, local_files(str(tmp_path)), Counter(calls)

    def counted(real: Any, name: str, path: Any, *more: Any, **named: Any) -> Any:
        calls[name, Path(path).suffix == ".png"] += 1
        return real(path, *more, **named)

    for owner, name in ((os, "scandir"), (Path, "stat"), (Path, "open")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *more, real=real, name=name, **named: counted(real, name, *more, **named),
        )
    digests, files, first = opening()
    assert (
        first["scandir", False] == 3 and first["stat", True] >= 100 and first["open", True] == 102
    )  # two more: is the first picture a pointer of Git LFS, and can it be decoded?
    same, same_files, second = opening()
    assert (
        (same, same_files) == (digests, files)
        and not second["scandir", False]
        and second["open", True] == 2
        and second["stat", True] < 5
    )
    (tmp_path / "new").write_bytes(png(np.full((2, 2), 99, np.uint8)))
    (tmp_path / "new").replace(tmp_path / "cat" / "7.png")
    other, same_files, _ = opening()
    assert same_files == files and other["dog"] == digests["dog"] and other["cat"] != digests["cat"]
    # within a tick of the clock, too
    (tmp_path / "dog" / "3.png").rename(tmp_path / "dog" / "more.png")
    renamed, other_files, _ = opening()
    assert (
        other_files != files and renamed["dog"] != other["dog"] and renamed["cat"] == other["cat"]
    )


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["a.png", "b.png"],
            (
                "contains images outside the class folders. Put the images into one folder per"
                " class (FOLDER/CLASS/IMAGE.png)"
            ),
        ),
        (["cat/a.png", "b.png"], "contains images outside the class folders"),
        (
            ["cat/a.png", "more/dog/b.png"],
            (
                "its class folders must be at the same depth, not cat and more/dog. Name the parent"
                " folder of the classes, for example"
            ),
        ),
        (["cat/a.png", "cat/b.png"], "must have at least two classes, not only cat"),
        (
            ["cat/a.png", "dog/b.png", "cow/notes.log"],
            "the folder of the class cow contains no images. Add images to it, or delete it",
        ),
        (["cat/notes.log"], "contains no supported files (.txt, .md, "),
        ([], "contains no supported files"),
    ],
)
def test_a_folder_without_classes_is_refused(tmp_path, names, says):
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(png(np.zeros((2, 2), np.uint8)))
    (tmp_path / "data").mkdir(exist_ok=True)
    for look in (
        looked_at,
        lambda path: open_source(request_for(path), Domain("", str(path)), Patience(5, print)),
    ):
        with pytest.raises(Refusal) as refusal:
            look(tmp_path / "data")
        assert says in str(refusal.value), str(refusal.value)


def test_a_hidden_folder_is_no_class(tmp_path):
    """Other programs keep previews and the like in one; the folder that is named may be hidden
    itself.

    `_old` is not hidden: `datasets` reads it.
    """
    for name in (
        "cat/a.png",
        "_old/b.png",
        ".thumbnails/a.png",
        "cat/.previews/a.png",
        "__MACOSX/c.png",
    ):
        (tmp_path / ".data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".data" / name).write_bytes(png(np.zeros((2, 2), np.uint8)))
    assert local_files(str(tmp_path / ".data"), pictures=True) == [
        tmp_path / ".data" / name for name in ("_old/b.png", "cat/a.png")
    ]
    assert folder_classes(str(tmp_path / ".data")) == ["_old", "cat"]
    looked_at(tmp_path / ".data")


def test_what_lies_beside_pictures_and_pictures_beside_text(tmp_path):
    """The task says which of them are data; tables are, for both."""
    for name in (
        "cat/a.png",
        "dog/b.JPEG",
        "classes.txt",
        "README.md",
        "index.json",
        "cat/.hidden.png",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(png(np.zeros((2, 2), np.uint8)))
    assert local_files(str(tmp_path), pictures=True) == [
        tmp_path / "cat" / "a.png",
        tmp_path / "dog" / "b.JPEG",
    ]
    assert local_files(str(tmp_path / "*/*"), pictures=True) == [
        tmp_path / "cat" / "a.png",
        tmp_path / "dog" / "b.JPEG",
    ]
    assert local_files(str(tmp_path)) == [tmp_path / name for name in ("classes.txt", "index.json")]
    looked_at(tmp_path)
    with pytest.raises(
        Refusal,
        match=(
            r"contains images, which task pretrain does not support\. Use --task"
            r" image_classification, or use other data"
        ),
    ):
        looked_at(tmp_path / "cat", task="pretrain")
    (tmp_path / "a.parquet").touch()
    assert local_files(str(tmp_path), pictures=True) == local_files(str(tmp_path))


# Hub data sets (a folder stands in for a repository: `datasets` opens both with the same call)
# ------------------------


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_pictures_of_the_hub(tmp_path, pixels, kind):
    """Written by `datasets` with its own type, and read as it streams them."""
    own = datasets.Dataset.from_dict(
        {
            "image": [{"bytes": png(image), "path": None} for image in pixels[0][:60]],
            "label": pixels[1][:60],
        },
        features=datasets.Features(
            {
                "image": datasets.Image(),
                "label": datasets.ClassLabel(names=[f"class {n}" for n in range(10)]),
            }
        ),
    )
    (tmp_path / "data").mkdir()
    (
        own.to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
        if kind == "parquet"
        else own.save_to_disk(tmp_path / "data")
    )
    if kind == "parquet":
        source = sources._hub_source(
            Domain("", str(tmp_path / "data")),
            "train",
            "",
            Wanted(NAMES, "image_classification", 7, NAMES),
            Patience(5, print),
        )
    else:
        source = open_source(
            request_for(str(tmp_path / "data" / "*.arrow")),
            Domain("", str(tmp_path / "data" / "*.arrow")),
            Patience(5, print),
        )
    rows = [
        source.documents(value, "")[0][0]
        for values in source.read(0, 0, 0)
        for value in values.to_pylist()
    ]
    assert len(rows) == 60 and all(set(row) == {*NAMES} for row in rows)
    assert [row["label"] for row in rows] == pixels[1][:60].tolist()
    assert all(
        (np.asarray(opened(row["image"])) == image).all()
        for row, image in zip(rows, pixels[0], strict=False)
    )
