"""Data faults with several ranks: all ranks stop or continue together, and no rank hangs.

A start also checks that all ranks have the same data.
"""

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job import NANO, Job, checkpoints, contention, deepspeed, metrics
from recipekit.data import chunks, formats
from recipekit.data.content import is_held_out
from recipekit.data.request import Sizes, request_from_recipe
from short_runs import BASE, train

SMALL = Sizes(block_rows=16, block_tokens=(1, 1 << 22), chunk_rows=7)
RECIPE = replace(BASE, steps=60, eval_every=0, warmup_steps=0, save_every=0)


def texts(count: int, seed: int) -> list[str]:
    found = (f"{seed}.{number:04} " + "x" * 20 for number in range(2 * count))
    return [text for text in found if not is_held_out(text)][:count]


def lines(own: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in own)


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    """Use blocks of 16 rows, so that a fault is a few steps ahead of the first step."""
    from recipekit.runtime import corpus

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            corpus,
            "request_from_recipe",
            lambda recipe: replace(request_from_recipe(recipe), sizes=SMALL),
        )
        yield


def train_small(argv: list[str], fault: str = "", **fields: Any) -> tuple[int | str, str]:
    """Run `train` with small blocks on one rank of a pool, with a fault on rank 1.

    The fault "stall" occurs on both ranks.
    """
    import torch.distributed as dist
    from recipekit.runtime import corpus, engine, prepare

    with small_blocks(), pytest.MonkeyPatch.context() as patch:
        if fault == "disk" and dist.get_rank() == 1:
            read = formats._raw_lines

            def failing(span: Any) -> Iterator[bytes]:
                yield from itertools.islice(read(span), 150)
                raise OSError(5, "Input/output error")

            patch.setattr(formats, "_raw_lines", failing)
        if fault == "stall":
            read, latest = (
                formats._raw_lines,
                Path(argv[argv.index("--out") + 1]) / "checkpoints" / "latest",
            )

            def stalling(span: Any) -> Iterator[bytes]:
                """Yield 150 rows, send SIGTERM to this rank, and wait for a checkpoint.

                Other threads, which count the data before the run, read without a stall.
                """
                if threading.current_thread().name != "data":
                    yield from read(span)
                    return
                yield from itertools.islice(read(span), 150)
                time.sleep(3)
                os.kill(os.getpid(), signal.SIGTERM)
                began = time.monotonic()
                while not latest.exists() and time.monotonic() - began < 60:
                    time.sleep(0.1)

            patch.setattr(formats, "_raw_lines", stalling)
        if fault == "signal" and dist.get_rank() == 1:
            patch.setattr(prepare, "open_data", lambda *given: ToldToStop(corpus.open_data(*given)))
        if fault == "lost" and dist.get_rank() == 1:
            files = Path(argv[argv.index("--dataset") + 1])
            patch.setattr(
                engine, "check_data", lambda *given: (files.unlink(), corpus.check_data(*given))[1]
            )
        if fault == "off by one" and dist.get_rank() == 1:
            patch.setattr(prepare, "open_data", lambda *given: OffByOne(corpus.open_data(*given)))
        try:
            return train(replace(RECIPE, **fields), argv)
        except RuntimeError as error:
            return str(error), ""


class OffByOne:
    """A stream that skips the data of step 4."""

    def __init__(self, inner: Any):
        self.inner, self.steps = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __next__(self) -> Any:
        self.steps += 1
        if self.steps == 4:
            next(self.inner)
        return next(self.inner)


class ToldToStop:
    """A stream whose rank receives SIGTERM exactly when an error is found ahead."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __next__(self) -> Any:
        return next(self.inner)

    def error_ahead(self, *given: Any) -> Any:
        if error := self.inner.error_ahead(*given):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # gives the listening thread time to receive it
        return error


def nothing() -> None:
    """Do nothing; when this call returns, every rank has imported all modules."""


def stopped_at(printed: str) -> int:
    (line,) = [
        line for line in printed.splitlines() if line.startswith("stopped by bad data after step ")
    ]
    return int(line.removeprefix("stopped by bad data after step ").partition(" of ")[0])


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("row", marks=pytest.mark.slow),
        pytest.param("disk", marks=pytest.mark.slow),
        "signal",
    ],
)
def test_stop_ends_all_ranks_with_a_checkpoint_and_the_place(
    pools: Any, tmp_path: Path, fault: str
) -> None:
    """All ranks must stop together, for each of three faults.

    - Every rank reads a bad row.
    - The disk of one rank's host fails.
    - One rank receives SIGTERM when the bad row is found.
    """
    (tmp_path / "a.jsonl").write_text(
        lines(texts(150, 1)) + ("nonsense\n" if fault != "disk" else "") + lines(texts(50, 2))
    )
    argv = [
        "--out",
        str(tmp_path / "run"),
        "--dataset",
        str(tmp_path / "a.jsonl"),
        "--token_cache",
        "off",
    ]
    results = pools.run(2, train_small, argv=argv, fault=fault)
    assert [code for code, _ in results] == [1, 1], results
    last = stopped_at(results[0][1])
    assert (
        3 < last < 25
        and checkpoints(tmp_path / "run") == [last]
        and len(metrics(tmp_path / "run")) == last
    )
    says = (
        "a.jsonl, row 151: is not JSON"
        if fault != "disk"
        else "a.jsonl, row 151: cannot be read: [Errno 5] Input/output error"
    )
    assert f"Step {last + 1} cannot be made: {tmp_path}/{says}" in results[0][1], results[0][1]


@pytest.mark.slow
def test_a_stop_while_data_are_waited_for_leaves_a_checkpoint(pools: Any, tmp_path: Path) -> None:
    """The data are missing for longer than a rank may run after SIGTERM."""
    (tmp_path / "a.jsonl").write_text(lines(texts(200, 1)))
    argv = [
        "--out",
        str(tmp_path / "run"),
        "--dataset",
        str(tmp_path / "a.jsonl"),
        "--token_cache",
        "off",
        "--grace",
        "15",
    ]
    results = pools.run(2, train_small, argv=argv, fault="stall")
    assert [code for code, _ in results] == [143, 143], results
    last = len(metrics(tmp_path / "run"))
    assert (
        3 < last < 25
        and checkpoints(tmp_path / "run") == [last]
        and f"stopped by SIGTERM after step {last}" in results[0][1]
    ), results


@pytest.mark.slow
def test_a_launched_run_stops_with_exit_code_1(tmp_path: Path, ops: Callable[[str], None]) -> None:
    """The bad row is in the first block, so every rank rejects it before the first step.

    The error must be printed once, without a traceback.
    """
    (tmp_path / "a.jsonl").write_text(lines(texts(150, 1)) + "nonsense\n")
    job = Job(
        tmp_path,
        deepspeed(
            NANO,
            "--tiny",
            "--dataset",
            tmp_path / "a.jsonl",
            "--steps",
            5,
            "--no-wandb",
            "--out",
            tmp_path / "run",
        ),
    )
    try:
        assert job.wait(150) == 1
        told = [
            line
            for line in job.output.splitlines()
            if "a.jsonl, row 151: is not JSON" in line and not line.startswith("data: not counted")
        ]
        assert len(told) == 1 and "Traceback" not in job.output, job.output
        job.wait_gone(20)
    finally:
        job.close()


@pytest.mark.slow
def test_skip_trains_on_counts_and_resumes_alike(pools: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number in range(3):
        (data / f"{number}.jsonl").write_text(
            lines(texts(70, number)) + "nonsense\n[1]\n" + lines(texts(20, 10 + number))
        )
    argv = ["--dataset", str(data / "*.jsonl"), "--bad_rows", "skip", "--steps", "24"]
    whole, parts = (
        ["--out", str(tmp_path / "whole"), *argv],
        ["--out", str(tmp_path / "parts"), *argv],
    )
    results = pools.run(2, train_small, argv=whole)
    assert [code for code, _ in results] == [0, 0], results
    assert "skipped (--bad_rows skip): " in results[0][1] and "skipped" not in results[1][1], (
        results
    )
    assert results[0][1].count("skipped (--bad_rows skip): ") == chunks.MAX_REPORTED_ROWS
    for stop in ("7", "16", "0"):
        results = pools.run(2, train_small, argv=[*parts, "--stop_at", stop])
        assert [code for code, _ in results] == [0, 0], results
    counts, again = (
        [line["bad_rows"] for line in metrics(tmp_path / name)] for name in ("whole", "parts")
    )
    assert counts == again and counts == sorted(counts) and counts[-1] >= 3
    losses, resumed = (
        [line["loss"] for line in metrics(tmp_path / name)] for name in ("whole", "parts")
    )
    assert losses == resumed

    kept = json.loads((tmp_path / "parts" / "data_files.json").read_text())
    assert set(kept[""]) == {"0.jsonl", "1.jsonl", "2.jsonl"}
    (data / "1.jsonl").write_text(lines(texts(90, 5)))
    results = pools.run(
        2,
        train_small,
        argv=[
            *parts,
            "--stop_at",
            "0",
            "--resume",
            str(tmp_path / "parts" / "checkpoints" / "step_00000016"),
        ],
    )
    assert (
        [code for code, _ in results] == [0, 0]
        and "the data differ from the checkpoint's and are read from the beginning: --dataset"
        in results[0][1]
    ), results
    results = pools.run(
        2,
        train_small,
        argv=["--out", str(tmp_path / "swapped"), *argv[:-1], "12", "--stop_at", "5"],
    )
    assert [code for code, _ in results] == [0, 0], results
    (data / "2.jsonl").write_text(lines(texts(90, 6)))
    results = pools.run(2, train_small, argv=["--out", str(tmp_path / "swapped"), *argv[:-1], "12"])
    assert all(
        "the files differ from those the saved run read: 2.jsonl has changed. Restore the old files"
        in str(code)
        for code, _ in results
    ), results


def train_apart(argv: list[str], datasets: list[str], **more: Any) -> tuple[int | str, str]:
    """Run `train_small` with a separate dataset for each rank, as if the hosts had different
    copies.
    """
    import torch.distributed as dist

    return train_small([*argv, "--dataset", datasets[dist.get_rank()]], **more)


def test_ranks_that_hold_different_data_are_refused_before_the_first_step(
    pools: Any, tmp_path: Path
) -> None:
    for host in ("one", "two"):
        (tmp_path / host).mkdir()
        for name in ("same", "other"):
            (tmp_path / host / f"{name}.jsonl").write_text(
                lines(texts(100, 1 if name == "same" else len(host) + ord(host[0])))
            )
    argv, out = ["--steps", "4"], tmp_path / "run"
    results = pools.run(
        2,
        train_apart,
        argv=[*argv, "--out", str(out)],
        datasets=[str(tmp_path / host) for host in ("one", "two")],
    )
    said = results[0][0]
    assert isinstance(said, str) and results[1][0] == said, results
    assert (
        "the data of rank 1 on " in said
        and "differ from the data of rank 0 on " in said
        and said.count("other.jsonl has changed") == 1
    ), said
    assert (
        "same.jsonl" not in said and said.count("\n") == 0 and not (out / "metrics.jsonl").exists()
    ), said
    copies = [str(tmp_path / "one" / "same.jsonl"), str(tmp_path / "two" / "same.jsonl")]
    results = pools.run(
        2, train_apart, argv=[*argv, "--out", str(tmp_path / "equal")], datasets=copies
    )
    assert [code for code, _ in results] == [0, 0], results


def test_data_that_one_rank_cannot_open_end_all_ranks_before_a_model_is_built(
    pools: Any, tmp_path: Path
) -> None:
    """The first row exists when the run is planned, but then one host's file disappears."""
    copies = [str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")]
    for copy in copies:
        Path(copy).write_text(lines(texts(20, 1)))
    results = pools.run(
        2, train_apart, argv=["--out", str(tmp_path / "run")], datasets=copies, fault="lost"
    )
    assert all("two.jsonl: the file does not exist" in str(code) for code, _ in results), results
    assert "built in" not in results[0][1] and not (tmp_path / "run").exists(), results


@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_peers_that_read_other_data_are_caught_within_ten_steps(
    pools: Any, tmp_path: Path, layout: str
) -> None:
    (tmp_path / "a.jsonl").write_text(lines(texts(400, 1)))
    fields = {layout[:2]: 2}
    argv = ["--dataset", str(tmp_path / "a.jsonl"), "--steps", "12"]
    assert [
        code
        for code, _ in pools.run(
            2, train_small, argv=["--out", str(tmp_path / "equal"), *argv], **fields
        )
    ] == [0, 0]
    results = pools.run(
        2, train_small, argv=["--out", str(tmp_path / "other"), *argv], fault="off by one", **fields
    )
    assert [code for code, _ in results] == [
        "ranks 0 and 1 share data-parallel rank 0, but were given other tokens up to step 10"
    ] * 2, results
    assert len(metrics(tmp_path / "other")) == 10


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [(2, 3), (2, 3, 4)])
def test_uneven_shards_never_hang(pools: Any, tmp_path: Path, worlds: tuple[int, ...]) -> None:
    """Several numbers of ranks read three shards of 3, 40 and 11 documents.

    30 steps cover many epochs, and every rank takes the same number of steps.
    """
    (tmp_path / "data").mkdir()
    for number, count in enumerate((3, 40, 11)):
        (tmp_path / "data" / f"{number}.jsonl").write_text(lines(texts(count, number)))
    tokens = []
    for world in worlds:
        pools.run(world, nothing)
        argv = [
            "--out",
            str(tmp_path / str(world)),
            "--dataset",
            str(tmp_path / "data" / "*.jsonl"),
            "--steps",
            "30",
        ]
        results = pools.run(
            world, train_small, timeout=60 * contention(), argv=argv, global_batch=12
        )
        assert [code for code, _ in results] == [0] * world, results
        tokens.append([line["tokens"] for line in metrics(tmp_path / str(world))])
    assert all(own == tokens[0] for own in tokens) and len(tokens[0]) == 30
