"""Data at web addresses and on the hub.

A local server reports that it is busy, resets connections, truncates answers, or dies.
"""

import contextlib
import hashlib
import http.server
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pool import environment, free_port
from recipekit.data import remote, sources
from recipekit.data.batching import DataRank
from recipekit.data.held_out import eval_rows
from recipekit.data.processors import byte_tokenizer
from recipekit.data.remote import RetryPolicy, probe_remote_file, redact_url
from recipekit.data.request import Request
from recipekit.data.stream import open_stream
from recipekit.data.stream_state import naming_changes
from recipekit.spec.errors import ConfigError

BYTES = byte_tokenizer()
COMMIT = "5" * 40


class Server(http.server.ThreadingHTTPServer):
    """A server for byte ranges of files; each request first consumes the next of `faults`.

    It implements the part of the hub API that `datasets` 5.2.0 uses for one repository, org/name.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.faults, self.gives_ranges = files, list[str](), True
        self.asked: list[tuple[str, str, str | None]] = []  # method, path, range
        self.sent = Counter[str]()  # bytes sent of each file
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def count(self, part: str) -> int:
        return sum(part in path for _, path, _ in self.asked)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the tests ignore clients that disconnect


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        asked = self.headers.get("Range")
        with self.server.lock:
            self.server.asked.append((self.command, path, asked))
            fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        if fault.isdigit():
            self.answer(int(fault), b"busy", {"Retry-After": "0"} if fault == "429" else {})
            return
        if fault.startswith("wait"):
            self.answer(503, b"busy", {"Retry-After": fault.removeprefix("wait")})
            return
        if path.startswith("/api/datasets/org/name"):
            self.answer(
                200, json.dumps(self.listing(path)).encode(), {"Content-Type": "application/json"}
            )
            return
        name = (
            path.removeprefix(f"/datasets/org/name/resolve/{COMMIT}/")
            .removeprefix("/datasets/org/name/resolve/main/")
            .removeprefix("/")
        )
        content = self.server.files.get(name)
        if content is None:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        more = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked or "")
        if not found or not self.server.gives_ranges:
            with self.server.lock:
                self.server.sent[name] += len(content)
            self.answer(200, content, more, cut=len(content) // 2 if fault == "truncate" else None)
            return
        first, last = int(found[1]), min(int(found[2]), len(content) - 1)
        if first >= len(content):
            self.answer(416, b"", more | {"Content-Range": f"bytes */{len(content)}"})
            return
        part = content[first : last + 1]
        with self.server.lock:
            self.server.sent[name] += len(part)
        more |= {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        self.answer(
            206,
            part,
            more,
            cut=len(part) // 2 if fault == "truncate" else None,
            short=fault == "short",
        )

    do_HEAD = do_POST = do_GET

    def listing(self, path: str) -> Any:
        files = {
            name: {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
            for name, content in self.server.files.items()
        }
        if "/tree/" in path:
            folder = path.partition(COMMIT)[2].strip("/")
            folders = {
                name.rpartition("/")[0]: {
                    "type": "directory",
                    "path": name.rpartition("/")[0],
                    "oid": "0" * 40,
                }
                for name in files
                if "/" in name
            }
            whole = "recursive=true" in self.path.lower()
            return [
                entry
                for name, entry in (folders | files).items()
                if name.rpartition("/")[0] == folder or (whole and name.startswith(folder))
            ]
        return {
            "id": "org/name",
            "sha": COMMIT,
            "private": False,
            "downloads": 0,
            "tags": [],
            "siblings": [{"rfilename": name} for name in files],
        }

    def answer(
        self,
        status: int,
        content: bytes,
        headers: dict[str, str],
        cut: int | None = None,
        short: bool = False,
    ) -> None:
        # A complete answer with fewer bytes than requested.
        content = content[: len(content) // 2] if short else content
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])
        if cut is not None:
            self.close_connection = True


def texts(count: int, seed: int) -> list[str]:
    draw = np.random.default_rng(seed)
    return [
        f"{seed}-{number} " + "x" * int(size)
        for number, size in enumerate(draw.integers(1, 60, count))
    ]


def table(own: list[str], folder: Path, **more: Any) -> bytes:
    pq.write_table(
        pa.table({"other": [text.upper() for text in own], "text": own}),
        folder / "made.parquet",
        **more,
    )
    return (folder / "made.parquet").read_bytes()


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("content")
    files = {
        f"data/train-{number}.parquet": table(texts(200, number), folder, row_group_size=50)
        for number in range(2)
    }
    return files | {
        f"{number}.jsonl": (
            "".join(json.dumps({"text": text}) + "\n" for text in texts(200, number)).encode()
        )
        for number in range(2)
    }


@pytest.fixture
def server(content) -> Iterator[Server]:
    with Server(dict(content)) as running:
        yield running
        running.shutdown()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_RETRY_WAIT", 0.05)


def request_for(dataset: str, **fields: Any) -> Request:
    return Request(
        **({"dataset": dataset, "seq_len": 32, "global_batch": 4, "retry_s": 20.0} | fields)
    )


def take(
    request: Request, steps: int, state: dict | None = None, **more: Any
) -> tuple[np.ndarray, dict]:
    with contextlib.closing(
        open_stream(request, BYTES, rank=DataRank(1, 0), state=state, **more)
    ) as own:
        rows = [[batch["input_ids"].numpy() for batch in next(own)[0]] for _ in range(steps)]
        return np.array(rows), json.loads(json.dumps(own.state))


def addresses(server: Server, kind: str) -> str:
    return ",".join(f"{server.url}/{name}" for name in server.files if name.endswith(kind))


@pytest.mark.parametrize("kind", ["parquet", pytest.param("jsonl", marks=pytest.mark.slow)])
def test_a_bad_server_changes_nothing(server, kind, tmp_path):
    """Faults during reading must not change the rows, which equal the rows of the same files on
    disk.

    Each wait is reported once.
    """
    for name, content in server.files.items():
        if name.endswith(kind):
            (tmp_path / Path(name).name).write_bytes(content)
    expected, _ = take(request_for(str(tmp_path / f"*.{kind}"), token_cache="off"), 100)
    said: list[str] = []
    faults = ["429", "503", "reset", "truncate", "short", "500", ""]
    server.faults = faults * 3
    got, _ = take(request_for(addresses(server, kind)), 100, say=said.append)
    assert (got == expected).all()
    assert not server.faults and len(said) == 18
    for part in (
        "429 Too Many Requests",
        "503 Service Unavailable",
        "reset by peer",
        "before its announced length",
        "requested bytes",
        "Asking again in",
    ):
        assert any(part in line for line in said), (part, said)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_small_files_of_a_server_without_ranges_are_read_as_a_whole(
    content, tmp_path, monkeypatch, kind
):
    """Python's own server returns the same rows as the files on disk.

    After a resume, a server with range requests also returns the same rows.
    """
    for name, data in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    names = sorted(name for name in content if name.endswith(kind))
    expected, _ = take(
        request_for(",".join(str(tmp_path / name) for name in names), token_cache="off"), 60
    )
    handler = partial(QuietHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as quick:
        threading.Thread(target=quick.serve_forever, args=(0.05,), daemon=True).start()
        dataset = ",".join(f"http://127.0.0.1:{quick.server_address[1]}/{name}" for name in names)
        got, _ = take(request_for(dataset), 60)
        _, state = take(request_for(dataset), 25)
        again, _ = take(request_for(dataset), 35, state)
        assert (got == expected).all() and (again == expected[25:]).all()
        monkeypatch.setattr(remote, "MAX_FULL_READ_BYTES", len(content[names[0]]) - 1)
        with pytest.raises(
            ConfigError,
            match=(
                rf"/{names[0]}: the server does not support HTTP range requests.* files must be at"
                r" most 0 MiB\. Download the file"
            ),
        ):
            open_stream(request_for(dataset), BYTES, rank=DataRank(1, 0))
        quick.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_a_bad_server_without_ranges_changes_nothing(server):
    """Each file is downloaded once in spite of the faults. A file that changes is an error."""
    expected, _ = take(request_for(addresses(server, "jsonl")), 60)
    server.gives_ranges = False
    server.sent.clear()
    server.faults = ["503", "reset", "", "", "truncate", "reset", "truncate", "429"]
    said: list[str] = []
    got, _ = take(request_for(addresses(server, "jsonl")), 60, say=said.append)
    assert (got == expected).all() and len(said) == 6 and not server.faults
    fetched = sum(len(server.files[f"{number}.jsonl"]) for number in range(2))
    assert sum(server.sent.values()) <= 5 * fetched, "asked for twice each, and cut short twice"
    with contextlib.closing(
        open_stream(request_for(addresses(server, "parquet")), BYTES, rank=DataRank(1, 0))
    ) as own:
        server.files = {name: content + b" " for name, content in server.files.items()}
        with pytest.raises(ConfigError, match="has changed on the server since it was opened"):
            for _ in range(300):
                next(own)


def test_resume_from_addresses_and_kept_tokens(server, tmp_path):
    request = request_for(addresses(server, "parquet"), token_cache=str(tmp_path))
    expected, _ = take(request, 60)
    _, state = take(request, 25)
    server.faults = ["reset"] * 3
    again, _ = take(request, 35, state)
    assert (again == expected[25:]).all() and list(tmp_path.glob("*/*.arrow"))
    before = server.count("train-")
    take(request, 60)
    assert server.count("train-") - before <= 4, (
        "the tokens are kept: only what the files are is asked for"
    )
    assert eval_rows(
        request_for(addresses(server, "parquet"), eval_rows=2), BYTES, rank=DataRank(1, 0)
    )


def test_gives_up_after_the_time_with_one_clear_error(server):
    with contextlib.closing(
        open_stream(
            request_for(addresses(server, "parquet"), retry_s=1.0), BYTES, rank=DataRank(1, 0)
        )
    ) as own:
        server.faults = ["503"] * 10_000
        begun = time.monotonic()
        with pytest.raises(ConfigError) as refused:
            while True:
                next(own)
    assert 0.9 < time.monotonic() - begun < 60
    for part in (
        f"{server.url}/data/train-",
        "503 Service Unavailable",
        "(--retry_s 1)",
        "resumes from the last checkpoint",
    ):
        assert part in str(refused.value), str(refused.value)
    # A busy machine takes longer than one second.
    assert re.search(r", \d+ times in [1-9] s ", str(refused.value))


def test_skip_does_not_skip_a_server_that_is_away(server):
    with (
        contextlib.closing(
            open_stream(
                request_for(addresses(server, "parquet"), retry_s=0.5, bad_rows="skip"),
                BYTES,
                rank=DataRank(1, 0),
            )
        ) as own,
        pytest.raises(ConfigError, match=r"--retry_s 0\.5"),
    ):
        server.faults = ["reset"] * 10_000
        while True:
            next(own)


def test_waits_grow_differ_and_honour_the_server(monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(remote, "FIRST_RETRY_WAIT", 0.5)

    class Closed(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return len(waits) == 9

    def fail() -> None:
        raise ConnectionResetError("reset")

    for _ in range(2):
        waits.clear()
        with pytest.raises(ConfigError, match="closed"):
            RetryPolicy(10_000, lambda _: None, Closed())("here", fail)
        limits = [min(60.0, 0.5 * 2**number) for number in range(9)]
        assert all(limit / 2 <= wait <= limit for wait, limit in zip(waits, limits, strict=True))
        assert len(set(np.round(np.array(waits) / limits, 4))) > 5


def test_retry_after_is_honoured(server):
    server.faults = ["wait2"]
    begun = time.monotonic()
    probe_remote_file(f"{server.url}/0.jsonl", RetryPolicy(20, lambda _: None))
    assert 2 <= time.monotonic() - begun < 60


def test_close_ends_a_wait_at_once(server):
    own = open_stream(request_for(addresses(server, "parquet")), BYTES, rank=DataRank(1, 0))
    server.faults = ["wait600"] * 100
    time.sleep(0.5)
    begun = time.monotonic()
    own.close()
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    "path, says",
    [
        (
            "gone.parquet",
            ["/gone.parquet", "the server returned 404 Not Found", "Check the address"],
        ),
        ("0.csv", ["every address must be a JSONL file, or every address a Parquet file"]),
        ("0.jsonl,{url}/data/train-0.parquet", ["or every address a Parquet file"]),
    ],
)
def test_a_wrong_address_is_refused_at_once(server, path, says):
    with pytest.raises(ConfigError) as refused:
        open_stream(
            request_for(f"{server.url}/{path.format(url=server.url)}"), BYTES, rank=DataRank(1, 0)
        )
    assert all(part in str(refused.value) for part in says), str(refused.value)


def test_secrets_of_an_address_are_not_shown():
    assert (
        redact_url("https://me:key@host:8/a/b.parquet?sig=secret#x") == "https://host:8/a/b.parquet"
    )


def test_a_file_that_changes_on_the_server_is_named(server, content, tmp_path):
    request = request_for(addresses(server, "parquet"))
    _, state = take(request, 1)
    with contextlib.closing(open_stream(request, BYTES, rank=DataRank(1, 0))) as own:
        files = own.files
    server.files["data/train-1.parquet"] = table(texts(200, 7), tmp_path, row_group_size=50)
    with (
        pytest.raises(ConfigError, match=r"train-1.parquet has changed\. Restore the old files"),
        naming_changes(files),
    ):
        open_stream(request, BYTES, rank=DataRank(1, 0), state=state)
    with (
        contextlib.closing(open_stream(request, BYTES, rank=DataRank(1, 0))) as own,
        pytest.raises(ConfigError, match="has changed on the server since"),
    ):
        server.files["data/train-0.parquet"] = server.files["data/train-1.parquet"] = table(
            texts(200, 8), tmp_path, row_group_size=50
        )
        for _ in range(300):
            next(own)


def test_the_first_batch_needs_no_whole_shard(tmp_path, monkeypatch):
    """The file has one row group of 48 MB.

    The first batch may read only one block of 1 MB of tokens, a buffer, and the footer.
    """
    draw = np.random.default_rng(0)
    own = [draw.bytes(8000).hex() for _ in range(1500)]
    content = table(
        own,
        tmp_path,
        row_group_size=1500,
        compression="none",
        use_dictionary=False,
        write_batch_size=16,
    )
    assert len(content) > 45e6
    with Server({"large.parquet": content}) as running:
        request = request_for(f"{running.url}/large.parquet", seq_len=2048)
        with contextlib.closing(open_stream(request, BYTES, rank=DataRank(1, 0))) as stream:
            next(stream)
            sent = running.sent["large.parquet"]
        running.shutdown()
    assert sent < 12e6, f"{sent / 1e6:.1f} of {len(content) / 1e6:.1f} MB"


# The hub
# --------------------------------------------------------------------------------------------------

RANK = """
import hashlib, os, sys
import numpy as np
import torch.distributed as dist
from recipekit.data import remote
from recipekit.data.batching import DataRank
from recipekit.data.request import Request
from recipekit.data.stream import open_stream
from recipekit.data.processors import byte_tokenizer

remote.FIRST_RETRY_WAIT = 0.05
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if world > 1:
    dist.init_process_group("gloo")
request = Request(dataset=sys.argv[1], seq_len=32, global_batch=4, retry_s=float(sys.argv[2]))
try:
    said = lambda text: print("said:", text, flush=True)
    stream = open_stream(request, byte_tokenizer(), rank=DataRank(world, rank), say=said)
    # (steps, rows of this rank, 1, seq_len)
    steps = [next(stream)[0] for _ in range(40)]
    rows = np.array([[batch["input_ids"].numpy() for batch in batches] for batches in steps])
    stream.close()
    if world > 1:
        gathered = [None] * world
        dist.all_gather_object(gathered, rows)
        rows = np.concatenate(gathered, axis=1)
    print("rows:", hashlib.sha256(rows.tobytes()).hexdigest(), flush=True)
except ValueError as refusal:
    print("refused:", refusal, flush=True)
if world > 1:
    dist.destroy_process_group()
"""


def run_ranks(server: Server, world: int, folder: Path, retry_s: float = 60.0) -> list[str]:
    (folder / "rank.py").write_text(RANK)
    port = str(free_port())
    # huggingface_hub's http_backoff retries by itself. HF_HOME is new, so no file is cached.
    more = {
        "HF_ENDPOINT": server.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(folder / "home"),
        "HF_DATASETS_CACHE": str(folder / "cache"),
    }
    more |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, str(folder / "rank.py"), "org/name", str(retry_s)],
            env=environment() | more | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    return [process.communicate(timeout=150)[0] for process in started]


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_looked_up_by_one_rank(content, tmp_path):
    """One rank with a faulty hub reads the same rows as two ranks with a good hub.

    The good hub receives each request for the list of files only once.
    """
    files = {name: own for name, own in content.items() if name.endswith("parquet")}
    outputs, questions = [], []
    for world, faults in ((1, ["503", "reset", "429"] * 2), (2, [])):
        folder = tmp_path / str(world)
        folder.mkdir()
        with Server(files) as running:
            running.faults = list(faults)
            outputs.append(run_ranks(running, world, folder))
            questions.append(Counter(path for _, path, asked in running.asked if asked is None))
            assert not running.faults
            running.shutdown()
    of_two = {
        path: count for path, count in questions[1].items() if path.startswith("/api/datasets/")
    }
    assert len(of_two) >= 3 and set(of_two.values()) == {1}, of_two
    hashes = [
        line
        for output in outputs
        for text in output
        for line in text.splitlines()
        if line.startswith("rows:")
    ]
    assert len(hashes) == 3 and len(set(hashes)) == 1, outputs
    assert any("Asking again" in line for line in outputs[0][0].splitlines()), outputs[0]


def test_a_resume_reads_the_commit_that_the_run_began_with(monkeypatch):
    """Later commits do not change the data. A different data set, split or subset cannot be
    resumed.
    """
    asked = []

    def stop(path, name=None, *, revision=None):
        asked.append(revision)
        raise FileNotFoundError("far enough")

    monkeypatch.setattr(sources.datasets, "load_dataset_builder", stop)
    state = {"identity": {"corpus": {"": f"org/name/small/train@{COMMIT} pretrain text"}}}
    for dataset, subset in (("org/name", "small"), ("org/name", "large"), ("org/names", "small")):
        with pytest.raises(ConfigError, match="far enough"):
            open_stream(
                request_for(dataset, subset=subset), BYTES, rank=DataRank(1, 0), state=state
            )
    assert asked == [COMMIT, None, None]


@pytest.mark.slow
def test_a_hub_that_stays_away_is_refused_on_every_rank(content, tmp_path):
    with Server(dict(content)) as running:
        running.faults = ["503"] * 100_000
        outputs = run_ranks(running, 2, tmp_path, retry_s=1.0)
        running.shutdown()
    for output in outputs:
        assert (
            "refused: --dataset org/name: the server returned 503 Service Unavailable" in output
            and "(--retry_s 1)" in output
        ), output
