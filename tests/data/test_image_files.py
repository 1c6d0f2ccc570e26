"""Images in the stream, decoded by the task.

The bits must not depend on ranks, threads or restarts. Other tests cover broken files, memory and
the time to the first batch.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import io
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from fashion import png
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from process_memory import rss_anon
from recipekit.data import formats
from recipekit.data.batching import DataRank
from recipekit.data.held_out import eval_samples
from recipekit.data.request import Request, Sizes
from recipekit.data.samples import open_samples
from recipekit.data.stream_state import StreamMismatch, merge_states, roll_batch_hash
from recipekit.plan import RunPlan, resolve_run
from recipekit.runtime import corpus
from recipekit.spec.command import parse
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.spec.recipe import Recipe
from recipekit.spec.task import IGNORE, MicroBatch
from recipekit.tasks.image_classification import TASK, ImagePreprocessor

CONFIG = {
    "image_size": 32,
    "num_channels": 1,
    "id2label": {str(number): "" for number in range(10)},
}
SMALL = Sizes(block_samples=100, chunk_rows=64)
SAMPLES = TASK.samples
assert SAMPLES is not None


def request_for(dataset: Path | str, **fields) -> Request:
    defaults: dict[str, Any] = {
        "dataset": str(dataset),
        "task": "image_classification",
        "global_batch": 12,
        "micro_batch": 2,
        "sizes": SMALL,
    }
    return Request(**(defaults | fields))


@functools.cache
def processor(threads: int = 2, size: int = 32) -> ImagePreprocessor:
    return TASK.processor(
        Request(task="image_classification", threads=threads), CONFIG | {"image_size": size}
    )


def take(
    request: Request,
    steps: int,
    dp: int = 1,
    state: Any = None,
    pictures: ImagePreprocessor | None = None,
    **more,
) -> tuple[list[MicroBatch], dict]:
    """Return all ranks' global batches, and the state after them as JSON."""
    pictures = pictures or processor(request.threads)
    with contextlib.ExitStack() as closing:
        opening = functools.partial(open_samples, request, pictures, SAMPLES, state=state, **more)
        streams = [
            closing.enter_context(contextlib.closing(opening(rank=DataRank(dp, rank))))
            for rank in range(dp)
        ]
        batches = []
        for _ in range(steps):
            parts = [batch for own in streams for batch in next(own)[0]]
            batches.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        return batches, json.loads(json.dumps(merge_states([own.state for own in streams])))


def bits(batches: list[MicroBatch]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        for name in ("pixel_values", "labels"):
            digest.update(batch[name].numpy().tobytes())
    return digest.hexdigest()


# Order and resume
# --------------------------------------------------------------------------------------------------


def test_the_bits_do_not_depend_on_ranks_threads_and_micro_batches(fashion):
    wanted = bits(take(request_for(fashion, threads=1, micro_batch=12), 50)[0])
    for dp, threads, micro_batch in (
        (1, 2, 3),
        (2, 1, 6),
        (2, 4, 1),
        (3, 2, 4),
        (4, 4, 3),
        (4, 1, 1),
        (12, 2, 1),
    ):
        assert (
            bits(take(request_for(fashion, threads=threads, micro_batch=micro_batch), 50, dp)[0])
            == wanted
        ), (dp, threads, micro_batch)
    assert bits(take(request_for(fashion, seed=1), 50)[0]) != wanted


@pytest.fixture(scope="module")
def uninterrupted(fashion) -> list[MicroBatch]:
    return take(request_for(fashion), 140)[0]  # 1,680 rows; an epoch has about 990


@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(st.tuples(st.integers(0, 35), st.sampled_from([1, 2, 4])), min_size=2, max_size=4))
def test_resume_is_exact_at_any_point_any_number_of_times_on_other_ranks(
    fashion, uninterrupted, legs
):
    state, at = None, 0
    for length, dp in legs:
        batches, state = take(
            request_for(fashion, micro_batch=3 if dp < 4 else 1), length, dp, state
        )
        assert bits(batches) == bits(uninterrupted[at : at + length])
        at += length
    assert state is not None and state["step"] == at and len(json.dumps(state)) < 1024


def test_on_2_then_4_ranks_then_1_nothing_is_lost_and_nothing_repeated(fashion, uninterrupted):
    batches, state = [], None
    for length, dp in ((50, 2), (55, 4), (35, 1)):
        more, state = take(request_for(fashion, micro_batch=1), length, dp, state)
        batches += more
    assert bits(batches) == bits(uninterrupted)


def test_resume_reads_one_block_wherever_it_is(tmp_path, monkeypatch):
    """A resume reads as many rows at 1 % of an epoch as at 99 %."""
    rows = pa.table({"image": [[[n % 256, n // 256]] for n in range(3000)], "label": [0] * 3000})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=100)
    request = request_for(tmp_path / "a.parquet", global_batch=20, micro_batch=20)
    cut, read = formats._slice_values, []

    def counted(*given: Any) -> Any:
        for values in cut(*given):
            read.append(len(values))
            yield values

    monkeypatch.setattr(formats, "_slice_values", counted)
    with contextlib.closing(
        open_samples(request, processor(), SAMPLES, rank=DataRank(1, 0))
    ) as own:
        states = [next(own)[1] for _ in range(140)]
    counts = []
    for at in (2, 70, 138):
        read.clear()
        take(request, 1, state=states[at])
        counts.append(sum(read))
    # The block, the rows of the steps prepared ahead, and the remainder of a chunk.
    assert max(counts) <= 500, counts


def test_fewer_rows_than_lanes_and_uneven_files_never_end(tmp_path):
    for name, count in (("a", 1), ("b", 70), ("c", 3)):
        values = [[[ord(name), n]] for n in range(count)]
        pq.write_table(
            pa.table(
                {
                    "image": values,
                    "label": list(range(10)) * 7 if count == 70 else [n for n in range(count)],
                }
            ),
            tmp_path / f"{name}.parquet",
        )
    reference, _ = take(request_for(tmp_path), 40)
    assert bits(take(request_for(tmp_path, micro_batch=3), 40, 4)[0]) == bits(reference)
    few, _ = take(request_for(tmp_path / "c.parquet"), 10)
    assert bits(take(request_for(tmp_path / "c.parquet", micro_batch=1), 10, 12)[0]) == bits(few)


def test_the_hash_of_peers_sees_another_picture_and_another_order():
    draw = np.random.default_rng(0)
    batch = {
        "pixel_values": torch.from_numpy(draw.random((8, 3, 64, 64), dtype=np.float32)),
        "labels": torch.arange(8),
    }
    swapped = {name: tensor[[1, 0, *range(2, 8)]] for name, tensor in batch.items()}
    other = {**batch, "pixel_values": batch["pixel_values"].clone()}
    other["pixel_values"][5] = 0
    assert (
        len(
            {
                roll_batch_hash(0, [case])
                for case in (batch, swapped, other, {**batch, "labels": batch["labels"] + 1})
            }
        )
        == 4
    )
    assert roll_batch_hash(0, [batch]) == roll_batch_hash(
        0, [{name: tensor.clone() for name, tensor in batch.items()}]
    )


# Faults
# --------------------------------------------------------------------------------------------------


def broken_picture(folder: Path, images: np.ndarray) -> Path:
    """Write 90 images; the 41st is truncated."""
    contents = [png(image) for image in images[:90]]
    contents[40] = contents[40][:150]
    pq.write_table(
        pa.table({"image": contents, "label": list(range(10)) * 9}),
        folder / "a.parquet",
        row_group_size=30,
    )
    return folder / "a.parquet"


def test_a_picture_that_is_cut_short_is_named(tmp_path, pixels):
    with pytest.raises(
        ConfigError,
        match=(
            r"a.parquet, row group 1, row 11: cannot be used: is not a readable image: .*\. Correct"
            r" the row, or leave it out \(--bad_rows skip\)"
        ),
    ):
        take(request_for(broken_picture(tmp_path, pixels[0])), 20)


def test_a_picture_that_is_cut_short_may_count_nothing_and_is_told(tmp_path, pixels):
    path, said = broken_picture(tmp_path, pixels[0]), list[str]()
    request = request_for(path, bad_rows="skip", global_batch=4)
    batches, _ = take(request, 44, say=said.append)
    blank = [
        (number, row)
        for number, batch in enumerate(batches)
        for row in (batch["labels"] == IGNORE).nonzero().flatten().tolist()
    ]
    # Once in each epoch.
    assert len(blank) == 2 and not any(
        batches[number]["pixel_values"][row].any() for number, row in blank
    )
    assert len(said) == 1 and said[0].startswith(
        f"skipped (--bad_rows skip): {path}, row group 1, row 11: cannot be used: is not a readable"
        " image: "
    )
    assert bits(
        take(request_for(path, bad_rows="skip", global_batch=4, micro_batch=1), 44, 4)[0]
    ) == bits(batches)


@pytest.mark.parametrize("bad_rows", ["stop", "skip"])
def test_a_table_that_is_cut_short_is_named_or_counted(tmp_path, pixels, bad_rows):
    whole = broken_picture(tmp_path, pixels[0]).read_bytes()
    pq.write_table(
        pa.table({"image": [png(image) for image in pixels[0][:60]], "label": [1] * 60}),
        tmp_path / "b.parquet",
    )
    (tmp_path / "a.parquet").write_bytes(whole[:-100])
    request, said = request_for(tmp_path, bad_rows=bad_rows), list[str]()
    if bad_rows == "stop":
        with pytest.raises(ConfigError, match=r"a.parquet: cannot be read: "):
            take(request, 20)
        return
    batches, state = take(request, 20, say=said.append)
    assert (
        all((batch["labels"] == 1).all() for batch in batches) and state["domains"][""]["bad"] >= 3
    )
    assert len(said) == 1 and "a.parquet: cannot be read" in said[0]


def test_a_held_out_picture_that_is_cut_short(tmp_path, pixels):
    """A row's bytes decide whether it is held out, so some truncated images are held out."""
    contents = [png(image)[:100] for image in pixels[0][:300]]
    pq.write_table(pa.table({"image": contents, "label": [1] * 300}), tmp_path / "a.parquet")
    request, said = request_for(tmp_path / "a.parquet", eval_rows=4), list[str]()
    with pytest.raises(ConfigError, match=r"a.parquet, row \d+: cannot be used"):
        eval_samples(request, processor(), SAMPLES, rank=DataRank(1, 0))
    batches = eval_samples(
        request_for(tmp_path / "a.parquet", eval_rows=2, bad_rows="skip"),
        processor(),
        SAMPLES,
        rank=DataRank(1, 0),
        say=said.append,
    )
    assert (
        all((batch["labels"] == IGNORE).all() for batch in batches)
        and len(said) == 2
        and all("cannot be used" in line for line in said)
    )


def test_threads_that_are_gone_raise_where_the_batches_are_taken(fashion):
    pictures = TASK.processor(Request(task="image_classification"), CONFIG)
    with contextlib.closing(
        open_samples(request_for(fashion), pictures, SAMPLES, rank=DataRank(1, 0))
    ) as own:
        next(own)
        pictures.pool.shutdown()
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
            for _ in range(10):
                next(own)
        assert time.monotonic() - begun < 60


# Memory, threads and reads of a stream
# -------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_is_flat_over_2000_batches(fashion):
    with contextlib.closing(
        open_samples(
            request_for(fashion, micro_batch=12), processor(size=64), SAMPLES, rank=DataRank(1, 0)
        )
    ) as own:
        for _ in range(300):
            next(own)
        gc.collect()
        before = rss_anon()
        for _ in range(2000):
            next(own)
        gc.collect()
        assert rss_anon() - before < 6 << 20


def test_close_leaves_no_thread(fashion):
    before = set(threading.enumerate())
    pictures = TASK.processor(Request(task="image_classification"), CONFIG)
    own = open_samples(request_for(fashion), pictures, SAMPLES, rank=DataRank(1, 0))
    next(own)
    own.close()
    del own, pictures
    gc.collect()
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_the_first_batch_of_ten_thousand_row_groups_reads_the_groups_of_one_block(
    tmp_path, monkeypatch
):
    """Each row group must be read only once.

    The thread that reads ahead may start the next block. It cannot finish that block before the
    first batch is taken.
    """
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(stream, "PNG")
    table = pa.table(
        {
            "image": [stream.getvalue() + bytes([n % 256, n // 256]) for n in range(10_000)],
            "label": [n % 10 for n in range(10_000)],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    read: list[int] = []
    original = pq.ParquetFile.iter_batches

    def counted(self, rows, groups, *more, **named):
        read.extend(groups)
        return original(self, rows, groups, *more, **named)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    take(request_for(tmp_path / "a.parquet", sizes=Sizes()), 1)
    assert Sizes().block_samples <= len(read) == len(set(read)) < 2 * Sizes().block_samples


# In a run
# --------------------------------------------------------------------------------------------------


def told(path: str, lost: str, seed: int) -> tuple[list[str], list[str], str]:
    """Return one rank's messages and log when rank 1 reads a broken image.

    Also return the config error for a folder that is missing on rank 1.
    """
    said, logged, refused, rank = list[str](), list[str](), "", dist.get_rank()
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("recipekit.data.samples").addHandler(handler)
    request, say = (
        request_for(path, bad_rows="skip", global_batch=4, micro_batch=1, seed=seed),
        said.append if rank == 0 else lambda _: None,
    )
    with contextlib.closing(
        open_samples(request, processor(), SAMPLES, rank=DataRank(2, rank), say=say)
    ) as own:
        for _ in range(22):
            next(own)
    logging.getLogger("recipekit.data.samples").removeHandler(handler)
    try:
        corpus.check_data(
            plan_for(path if rank == 0 else lost),
            TASK,
            processor(),
            print,
        )
    except ConfigError as error:
        refused = str(error)
    return said, logged, refused


def test_the_rank_that_meets_a_broken_picture_tells_and_what_one_cannot_open_all_refuse(
    pools, tmp_path, pixels
):
    path = broken_picture(tmp_path, pixels[0])
    for seed in range(10):  # until rank 1 gets the broken image
        request = request_for(path, bad_rows="skip", global_batch=4, micro_batch=1, seed=seed)
        with contextlib.closing(
            open_samples(request, processor(), SAMPLES, rank=DataRank(2, 1))
        ) as own:
            if any((batch["labels"] == IGNORE).any() for _ in range(22) for batch in next(own)[0]):
                break
    results = pools.run(2, told, path=str(path), lost=str(tmp_path / "lost"), seed=seed)
    expected = (
        f"skipped (--bad_rows skip): {path}, row group 1, row 11: cannot be used: is not a readable"
        " image: "
    )
    for number, (said, logged, refused) in enumerate(results):
        assert (
            not said
            and len(logged) == number
            and all(line.startswith(f"rank 1: {expected}") for line in logged)
        )
        assert (
            refused
            == f"--dataset {tmp_path / 'lost'}: the file does not exist. Check the path, or give a"
            " hub id as ORG/NAME"
        )


def plan_for(dataset: Path | str, **fields: Any) -> RunPlan:
    """Return a plan for a run on images, with the fields that its data need."""
    command = parse(
        Recipe(model="recipekit/llama-nano", init="random", tokenizer="bytes", wandb=False),
        Path("pictures.py"),
        ["--dry_run"],
    )
    plan = resolve_run(command)
    own: dict[str, Any] = {
        "task": "image_classification",
        "dataset": str(dataset),
        "micro_batch": 2,
        "global_batch": 12,
        "eval_every": 1,
        "eval_rows": 5,
    }
    mesh, resume_from = fields.pop("mesh", plan.mesh), fields.pop("resume_from", None)
    return dataclasses.replace(
        plan,
        recipe=dataclasses.replace(plan.recipe, **(own | fields)),
        mesh=mesh,
        resume_from=resume_from,
    )


def test_a_run_evaluates_as_many_micro_batches_as_its_pipeline_needs(fashion):
    for schedule, mesh, rows in (
        ("1f1b", Mesh(pp=4), 6),
        ("dualpipev", Mesh(pp=4), 16),
        ("dualpipev", Mesh(), 6),
    ):
        plan = plan_for(fashion, pipeline_schedule=schedule, mesh=mesh)
        source = corpus.DataSource(plan, TASK, processor())
        with contextlib.closing(corpus.open_data(source, 0, None, print)) as own:
            held_out = corpus.open_held_out(source, mesh.coords(0), own.state, print)
        labels = torch.cat([batch["labels"] for batch in held_out])
        assert len(labels) == rows and (labels[:5] != IGNORE).all() and (labels[5:] == IGNORE).all()
        assert sum(int(TASK.count(batch).sum()) for batch in held_out) == 5 and {
            batch["pixel_values"].shape[0] for batch in held_out
        } == {2}
    source = corpus.DataSource(plan_for(fashion, eval_every=0), TASK, processor())
    assert corpus.open_held_out(source, Mesh().coords(0), own.state, print) == []


def test_a_run_goes_on_where_it_was_and_with_other_pictures_only_if_told(fashion, tmp_path, pixels):
    said: list[str] = []

    def opened(plan: Any, state: Any) -> Any:
        source = corpus.DataSource(plan, TASK, processor())
        return corpus.open_data(source, 0, state, said.append)

    with contextlib.closing(opened(plan_for(fashion), state=None)) as own:
        _, state = next(own)
        second = next(own)[0]
    with contextlib.closing(opened(plan_for(fashion), state=state)) as own:
        assert bits(next(own)[0]) == bits(second)
    other = broken_picture(tmp_path, pixels[0])
    with pytest.raises(StreamMismatch):
        opened(plan_for(other, resume="auto"), state=state)
    with contextlib.closing(opened(plan_for(other, resume="somewhere"), state=state)) as own:
        assert (
            own.state["step"] == 0
            and len(said) == 1
            and said[0].startswith(
                "the data differ from the checkpoint's and are read from the beginning: "
            )
        )
