"""Bad input: errors with file and row, skipped rows, and resources that a stream must release."""

import contextlib
import dataclasses
import gc
import gzip
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from process_memory import rss_anon
from recipekit.data import batching, chunks, prefetch
from recipekit.data.batching import DataRank
from recipekit.data.content import is_held_out
from recipekit.data.held_out import eval_rows
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import Request, Sizes
from recipekit.data.stream import open_stream
from recipekit.data.stream_state import naming_changes
from recipekit.spec.errors import ConfigError

BYTES = byte_tokenizer()
END = BYTES.eos_token_id
# With these sizes a small file has many blocks and chunks.
SMALL = Sizes(block_rows=16, block_tokens=(1, 1 << 22), chunk_rows=7, read_rows=7)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Use an empty token cache."""
    monkeypatch.setattr(chunks.datasets_config, "HF_DATASETS_CACHE", tmp_path / "cache")


def texts(count: int, seed: int) -> list[str]:
    """Return documents that are not held out and fill one row each."""
    found = (f"{seed}.{number:04} " + "x" * 20 for number in range(2 * count))
    return [text for text in found if not is_held_out(text)][:count]


def lines(own: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in own).encode()


def parquet(path: Path, values: pa.Array, name: str = "text") -> bytes:
    pq.write_table(
        pa.table({name: values, "number": range(len(values))}),
        path,
        row_group_size=30,
        compression="none",
        use_dictionary=False,
    )
    return path.read_bytes()


# Each fault writes the file `a`. It returns the largest number of the 60 documents that can be
# read, the number of broken rows in an epoch, and the error message.
Fault = Callable[[Path], tuple[list[str], int, str]]


def not_an_object(folder: Path) -> tuple[list[str], int, str]:
    own = texts(60, 1)
    (folder / "a.jsonl").write_bytes(lines(own[:30]) + b"[1]\n" + lines(own[30:]))
    return own, 1, r"a\.jsonl, row 31: must be a JSON object, not a list"


def not_json(folder: Path) -> tuple[list[str], int, str]:
    own = texts(60, 1)
    (folder / "a.jsonl").write_bytes(lines(own) + b'{"text": \n')
    return own, 1, r"a\.jsonl, row 61: is not JSON"


def missing_column(folder: Path) -> tuple[list[str], int, str]:
    own = texts(60, 1)
    (folder / "a.jsonl").write_bytes(b'{"body": "x"}\n' + lines(own))
    return own, 1, r"a\.jsonl, row 1: has no column 'text', only 'body'"


def not_utf8_line(folder: Path) -> tuple[list[str], int, str]:
    own = texts(60, 1)
    (folder / "a.jsonl").write_bytes(lines(own[:9]) + b'{"text": "caf\xe9"}\n' + lines(own[9:]))
    return own, 1, r"a\.jsonl, row 10: is not UTF-8: byte 0xe9 at 13"


def empty_file(folder: Path) -> tuple[list[str], int, str]:
    (folder / "a.jsonl").write_bytes(b"")
    return [], 1, r"a\.jsonl: is empty"


def empty_gzip_file(folder: Path) -> tuple[list[str], int, str]:
    (folder / "a.jsonl.gz").write_bytes(b"")
    return [], 1, r"a\.jsonl\.gz: is empty"


def corrupt_gzip(folder: Path) -> tuple[list[str], int, str]:
    own = texts(60, 1)
    good = gzip.compress(lines(own), mtime=0)
    (folder / "a.jsonl.gz").write_bytes(good[:12] + b"\xff" * 40 + good[52:])
    return [], 1, r"a\.jsonl\.gz, row 1: cannot be read: Error -3 while decompressing"


def cut_gzip(folder: Path) -> tuple[list[str], int, str]:
    own = texts(60, 1)
    good = gzip.compress(lines(own), mtime=0)
    (folder / "a.jsonl.gz").write_bytes(good[:-20])
    return own, 1, r"a\.jsonl\.gz, row \d+: cannot be read: Compressed file ended before"


def no_parquet(folder: Path) -> tuple[list[str], int, str]:
    (folder / "a.parquet").write_bytes(b"this was never Parquet, from its first byte on")
    return [], 1, r"a\.parquet: cannot be read"


def cut_parquet(folder: Path) -> tuple[list[str], int, str]:
    content = parquet(folder / "a.parquet", pa.array(texts(60, 1)))
    (folder / "a.parquet").write_bytes(content[: len(content) // 2])
    return [], 1, r"a\.parquet: cannot be read"


def corrupt_page(folder: Path) -> tuple[list[str], int, str]:
    own = texts(60, 1)
    content = parquet(folder / "a.parquet", pa.array(own))
    column = pq.ParquetFile(folder / "a.parquet").metadata.row_group(1).column(0)
    at = column.data_page_offset
    (folder / "a.parquet").write_bytes(content[:at] + b"\xff" * 40 + content[at + 40 :])
    return own[:30], 1, r"a\.parquet, row group 1, row 1: cannot be read"


def not_utf8_in_parquet(folder: Path) -> tuple[list[str], int, str]:
    own = texts(60, 1)
    content = parquet(folder / "a.parquet", pa.array(own))
    at = content.index(own[33].encode())
    (folder / "a.parquet").write_bytes(content[:at] + b"\xe9" + content[at + 1 :])
    return own[:33] + own[34:], 1, r"a\.parquet, row group 1, row 4: is not UTF-8: byte 0xe9 at 0"


def missing_parquet_column(folder: Path) -> tuple[list[str], int, str]:
    parquet(folder / "a.parquet", pa.array(texts(60, 1)), "body")
    # one error for each row group
    return [], 2, r"a\.parquet, row group \d: has no column 'text', only 'body', 'number'"


def number_for_text(folder: Path) -> tuple[list[str], int, str]:
    parquet(folder / "a.parquet", pa.array(range(20)))
    return [], 20, r"a\.parquet, row \d+: must be text \(--text_field\), not int '\d+'"


def number_of_5000_digits(folder: Path) -> tuple[list[str], int, str]:
    own = texts(60, 1)
    (folder / "a.jsonl").write_bytes(
        lines(own[:30]) + b'{"text": "x", "number": ' + b"7" * 5000 + b"}\n" + lines(own[30:])
    )
    return own, 1, r"a\.jsonl, row 31: cannot be read as JSON: Exceeds the limit \(4300 digits\)"


def deep_json(folder: Path) -> tuple[list[str], int, str]:
    own = texts(60, 1)
    (folder / "a.jsonl").write_bytes(
        lines(own[:30]) + b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n" + lines(own[30:])
    )
    return own, 1, r"a\.jsonl, row 31: cannot be read as JSON: maximum recursion depth exceeded"


def cut_arrow(folder: Path) -> tuple[list[str], int, str]:
    own = texts(60, 1)
    with (
        pa.OSFile(str(folder / "a.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, pa.schema({"text": pa.string()})) as writer,
    ):
        writer.write_table(pa.table({"text": own}), max_chunksize=30)
    content = (folder / "a.arrow").read_bytes()
    (folder / "a.arrow").write_bytes(content[: len(content) * 3 // 4])
    return own[:30], 1, r"a\.arrow, row 31: cannot be read"


def no_arrow(folder: Path) -> tuple[list[str], int, str]:
    (folder / "a.arrow").write_bytes(b"this was never Arrow, from its first byte on")
    return [], 1, r"a\.arrow, row 1: cannot be read"


FAULTS = [
    *(
        not_an_object,
        not_json,
        missing_column,
        not_utf8_line,
        empty_file,
        empty_gzip_file,
        corrupt_gzip,
        cut_gzip,
    ),
    *(
        no_parquet,
        cut_parquet,
        corrupt_page,
        not_utf8_in_parquet,
        missing_parquet_column,
        number_for_text,
        cut_arrow,
        no_arrow,
    ),
    *(number_of_5000_digits, deep_json),
]


def make(fault: Fault, folder: Path) -> tuple[list[str], list[str], int, str]:
    """Write the broken file `a` before a good file of the same format.

    Return the readable documents of both files, the number of broken rows, and the error message.
    """
    broken, bad, says = fault(folder)
    good = texts(90, 2)
    kind = next(folder.glob("a.*")).name.removeprefix("a.")
    if kind == "parquet":
        parquet(folder / "b.parquet", pa.array(good))
    elif kind == "arrow":
        with (
            pa.OSFile(str(folder / "b.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, pa.schema({"text": pa.string()})) as writer,
        ):
            writer.write_table(pa.table({"text": good}))
    else:
        (folder / "b.jsonl").write_bytes(lines(good))
    return broken, good, bad, says


def request_for(folder: Path, **fields) -> Request:
    return Request(
        **({"dataset": f"{folder}/*.*", "seq_len": 32, "global_batch": 6, "sizes": SMALL} | fields)
    )


def take(
    request: Request, steps: int, dp: int = 1, state: dict | None = None, say=print
) -> tuple[np.ndarray, list[dict]]:
    """Take some steps; return ids (steps, global_batch, seq_len) and the state after each step."""
    with contextlib.ExitStack() as closing:
        streams = [
            closing.enter_context(
                contextlib.closing(
                    open_stream(request, BYTES, rank=DataRank(dp, rank), state=state, say=say)
                )
            )
            for rank in range(dp)
        ]
        rows, states = [], []
        for _ in range(steps):
            given = [next(own) for own in streams]
            rows.append(
                np.concatenate(
                    [batch["input_ids"].numpy() for batches, _ in given for batch in batches]
                )
            )
            assert all(after == given[0][1] for _, after in given)
            states.append(json.loads(json.dumps(given[0][1])))
        return np.array(rows), states


def documents(ids: np.ndarray) -> list[str]:
    """Return the documents of rows that contain one document each."""
    return [BYTES.decode(row[: list(row).index(END)]) for row in ids.reshape(-1, ids.shape[-1])]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_with_its_place(fault, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    says = make(fault, folder)[-1]
    with pytest.raises(ConfigError, match=says):
        take(request_for(folder), 60)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_left_out_counted_and_told(fault, tmp_path):
    """The result is the same in every layout, with and without cached tokens, and after any resume.

    All other rows are read.
    """
    folder = tmp_path / "data"
    folder.mkdir()
    broken, good, bad, says = make(fault, folder)
    said: list[str] = []
    request = request_for(folder, bad_rows="skip")
    ids, states = take(request, 60, say=said.append)
    seen = set(documents(ids))
    assert set(good) <= seen <= set(good) | set(broken)
    if fault is not cut_gzip:  # this file loses its last lines
        assert seen == set(good) | set(broken)
    counts = [state["domains"][""]["bad"] for state in states]
    epochs = [state["domains"][""]["place"].get("epoch", 0) for state in states]
    assert counts == sorted(counts) and counts[-1] >= bad * epochs[-1] >= bad
    assert any(bad == count for count in counts), counts
    assert (
        any(re.search(says.split(":")[0], line) for line in said)
        and len(said) <= chunks.MAX_REPORTED_ROWS
    ), said
    for dp, cache, at in ((2, "off", 7), (3, "auto", 23), (1, "auto", 41)):
        again, after = take(
            dataclasses.replace(request, token_cache=cache), 60 - at, dp, states[at - 1]
        )
        assert (again == ids[at:]).all() and after == states[at:]


@pytest.mark.parametrize(
    "kind, wrong, says",
    [
        (pa.int32(), 300, "300"),
        (pa.int32(), -1, "-1"),
        (pa.int8(), -1, "-1"),
        (pa.uint16(), 40_000, "40000"),
        (pa.int64(), (1 << 32) + 2, "4294967298"),  # 2, if its upper half is lost
        (pa.int64(), -(1 << 32) + 2, "-4294967294"),
        (pa.uint32(), 1 << 31, "2147483648"),
        (pa.int32(), None, "null"),
    ],
)
def test_what_is_no_token_is_named_or_left_out(tmp_path, kind, wrong, says):
    """Only the row that contains the bad token is named or skipped.

    A null row counts as missing, but not as bad.
    """
    own = texts(60, 1)
    ids: list = [list(text.encode())[:20] for text in own]
    broken = [*ids[:34], None, [*ids[34][:5], wrong, *ids[34][5:], wrong], *ids[35:], [], [wrong]]
    parquet(tmp_path / "a.parquet", pa.array(broken, pa.list_(kind)), "ids")
    request = request_for(tmp_path, text_field="ids")
    rule = (
        rf"contains token {says}, but the tokenizer's ids are 0 to {len(BYTES) - 1}. Use the"
        r" tokenizer that made"
    )
    with pytest.raises(ConfigError, match=rf"a\.parquet, row group (1, row 6|2, row 3): {rule}"):
        take(request, 60)
    said: list[str] = []
    rows, states = take(
        dataclasses.replace(request, bad_rows="skip", seq_len=20), 60, say=said.append
    )
    seen = {tuple(row) for row in rows.reshape(-1, 20)}
    assert seen <= {tuple(row) for row in ids[:34] + ids[35:]} and len(seen) > 50
    assert {state["domains"][""]["bad"] for state in states} >= {2} and [
        f"contains token {says}" in line for line in said
    ] == [True, True, False]
    assert said[2].startswith("2 of the first 63 rows are empty")


def test_only_the_first_faults_are_told_and_kept_tokens_tell_them_too(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"nonsense\n" * 20 + lines(texts(40, 1)))
    for _ in range(2):
        said: list[str] = []
        _, states = take(request_for(tmp_path, bad_rows="skip"), 5, say=said.append)
        assert (
            len(said) == chunks.MAX_REPORTED_ROWS
            and "a.jsonl, row 5: is not JSON" in said[-1]
            and "bad_rows counts on" in said[-1]
        )
        assert states[0]["domains"][""]["bad"] == 20


def test_tokens_kept_while_skipping_are_refused_by_stop(tmp_path):
    make(not_json, tmp_path)
    take(request_for(tmp_path, bad_rows="skip"), 30)
    with pytest.raises(ConfigError, match="is not JSON"):
        take(request_for(tmp_path), 30)


@pytest.mark.parametrize("fault", [no_parquet, corrupt_page, empty_file, corrupt_gzip])
def test_evaluation_leaves_out_too(fault, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    make(fault, folder)
    held_out = [text for text in (f"held {number}" for number in range(2000)) if is_held_out(text)]
    if fault in (no_parquet, corrupt_page):
        parquet(folder / "c.parquet", pa.array(held_out))
    else:
        (folder / "c.jsonl").write_bytes(lines(held_out))
    said: list[str] = []
    batches = eval_rows(
        request_for(folder, bad_rows="skip", eval_rows=2),
        BYTES,
        rank=DataRank(1, 0),
        say=said.append,
    )
    assert batches and any("skipped" in line for line in said)
    with pytest.raises(ConfigError):
        eval_rows(request_for(folder, eval_rows=2), BYTES, rank=DataRank(1, 0))


def test_a_swapped_shard_is_named(tmp_path):
    for number in range(9):
        (tmp_path / f"{number}.jsonl").write_bytes(lines(texts(20, number)))
    request = request_for(tmp_path)
    with contextlib.closing(open_stream(request, BYTES, rank=DataRank(1, 0))) as own:
        next(own)
        state, files = own.state, json.loads(json.dumps(own.files))
    (tmp_path / "3.jsonl").write_bytes(lines(texts(20, 33)))
    with (
        pytest.raises(
            ConfigError,
            match=(
                r"^--dataset: the files differ from those the saved run read: "
                r"3\.jsonl has changed\."
                r" Restore the old files"
            ),
        ),
        naming_changes(files),
    ):
        open_stream(request, BYTES, rank=DataRank(1, 0), state=state)
    for number in range(4, 9):
        (tmp_path / f"{number}.jsonl").rename(tmp_path / f"n{number}.jsonl")
    with (
        pytest.raises(
            ConfigError,
            match=r"3.jsonl has changed, 4.jsonl is gone, .* 7.jsonl is gone and 6 more\. Restore",
        ),
        naming_changes(files),
    ):
        open_stream(request, BYTES, rank=DataRank(1, 0), state=state)
    # This run did not record its files.
    with pytest.raises(ConfigError, match="the saved data stream has"):
        open_stream(request, BYTES, rank=DataRank(1, 0), state=state)


# Released resources
# ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lines", "parquet"])
def test_memory_is_flat_over_10_000_batches(tmp_path, kind):
    own = texts(2000, 1)
    if kind == "lines":
        (tmp_path / "a.jsonl").write_bytes(lines(own))
    else:
        parquet(
            tmp_path / "a.parquet",
            pa.array([[*BYTES(text)["input_ids"], END] for text in own], pa.list_(pa.int32())),
            "ids",
        )
    request = request_for(
        tmp_path,
        dataset=str(next(tmp_path.glob("a.*"))),
        text_field="ids" if kind == "parquet" else "text",
        token_cache="off",
    )
    with contextlib.closing(open_stream(request, BYTES, rank=DataRank(1, 0))) as own_stream:
        for _ in range(1000):
            next(own_stream)
        gc.collect()
        before = rss_anon()
        for _ in range(10_000):
            next(own_stream)
        gc.collect()
        assert rss_anon() - before < 6 << 20


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "arrow"])
def test_close_leaves_no_file_no_thread_and_no_memory(tmp_path, kind):
    own = texts(3000, 1)
    if kind == "parquet":
        parquet(tmp_path / "a.parquet", pa.array(own))
    elif kind == "arrow":
        with (
            pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, pa.schema({"text": pa.string()})) as writer,
        ):
            writer.write_table(pa.table({"text": own}), max_chunksize=30)
    else:
        (tmp_path / f"a.{kind}").write_bytes(
            gzip.compress(lines(own)) if kind.endswith("gz") else lines(own)
        )
    process = psutil.Process()
    shared, threads = set(os.listdir("/dev/shm")), set(threading.enumerate())
    files = {file.path for file in process.open_files()}
    for _ in range(3):
        own_stream = open_stream(
            request_for(tmp_path, dataset=str(tmp_path / f"a.{kind}"), token_cache="off"),
            BYTES,
            rank=DataRank(1, 0),
        )
        next(own_stream)
        own_stream.close()
        del own_stream
    assert set(threading.enumerate()) == threads
    assert {file.path for file in process.open_files()} == files
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in maps, [line for line in maps.splitlines() if str(tmp_path) in line]
    assert not {
        name for name in set(os.listdir("/dev/shm")) - shared if "torch" in name or "data" in name
    }


def test_a_dead_reader_raises_where_the_batches_are_taken():
    """The next batch must raise an error, even if the reader dies without an error message."""

    def two_steps():
        yield [], {"step": 1}
        yield [], {"step": 2}

    own = prefetch.Stream(two_steps(), {"step": 0})
    assert next(own)[1]["step"] == 1 and next(own)[1]["step"] == 2
    begun = time.monotonic()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="thread died"):
            next(own)
    assert time.monotonic() - begun < 60
    own.close()


def test_an_error_that_nobody_thought_of_is_raised_too(tmp_path, monkeypatch):
    make(not_json, tmp_path)

    def fail(*_):
        raise MemoryError("no memory left")

    monkeypatch.setattr(batching, "fill_rows", fail)
    with (
        contextlib.closing(open_stream(request_for(tmp_path), BYTES, rank=DataRank(1, 0))) as own,
        pytest.raises(MemoryError, match="no memory left"),
    ):
        next(own)
