"""Where documents come from: local files, the hub, addresses, or the interpreter's own sources.

Read from any row group on.

A corpus is cut into parts (files, or runs of bytes of text files), a part into groups (Parquet row
groups; else one). Reading begins at any row of any group, so that neither a shuffle nor a resume
has to read what lies before.
"""

import ast
import functools
import threading
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import datasets
from datasets import config as datasets_config
from datasets.packaged_modules.parquet.parquet import Parquet

from ..spec.hub import hub_is_away, hub_refusal
from ..spec.refusal import Refusal, refuse
from ..spec.task import Samples
from .digests import digests, fingerprint
from .files import local_files, standard_library
from .first_row import check_kind
from .formats import (
    arrow_source,
    csv_source,
    drawn_source,
    lines_source,
    parquet_source,
    picture_source,
    spans_of,
    streamed_source,
    text_source,
)
from .hub_cache import cached_commit, cached_source
from .kinds import KINDS, kind_of, suffix
from .mixture import Domain
from .remote import Patience, from_rank_0, look_up, shown
from .request import Request
from .source import Document, Source, Wanted

# datasets 5.2 sleeps 5 s when a Parquet reader is closed early, against a crash of pyarrow at the
# interpreter's end while its threads still read a Python file (apache/arrow#45214). Ours read with
# no read-ahead, and are closed long before.
datasets_config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
# It also asks a busy server twenty times, 5 to 60 s apart, whatever the time given to it:
# `Patience` decides instead.
datasets_config.STREAMING_READ_MAX_RETRIES = datasets_config.STREAMING_OPEN_MAX_RETRIES = 1


def open_source(
    request: Request,
    domain: Domain,
    patience: Patience,
    before: str = "",
    samples: Samples | None = None,
) -> Source:
    """Opens the corpus of a domain; a collective where it is remote.

    Raises `Refusal` if it does not exist or cannot be reached.

    `before` is the fingerprint of the same corpus in an earlier job: a data set of the hub is
    opened at the commit that it names. `samples` are those of a task whose documents are samples:
    dictionaries of the columns that it reads.
    """
    wanted = Wanted(request.columns, request.task, request.sizes.read_rows, request.names)
    return replace(
        _source_of(request, domain, wanted, patience, before, samples),
        columns=partial(list, wanted.met),
    )


def _source_of(
    request: Request,
    domain: Domain,
    wanted: Wanted,
    patience: Patience,
    before: str,
    samples: Samples | None,
) -> Source:
    sizes = request.sizes
    if samples and domain.dataset == "builtin":
        return drawn_source(samples.drawn, samples.num_drawn, wanted)
    if domain.dataset == "builtin":
        return _builtin_source(request.seq_len, sizes.part_bytes, request.chats)
    if domain.dataset.startswith(("http://", "https://")):
        return _address_source(domain.dataset, wanted, patience, sizes.part_bytes)
    files = local_files(domain.dataset, "image" in request.names, request.split, domain.subset)
    if files is None:
        return _hub_source(
            domain, request.split, request.dataset_revision, wanted, patience, before
        )
    kind = kind_of(files, domain.dataset)
    check_kind(kind, files, domain.dataset, request)
    if kind == "pictures":
        return picture_source(files, wanted)
    if kind == "text":
        return text_source(files, request.seq_len, sizes.part_bytes, request.task)
    return _rows_source(files, kind, wanted, sizes.part_bytes)


def _rows_source(files: list[Path], kind: str, wanted: Wanted, part_bytes: int) -> Source:
    """Open local files of rows: lines, CSV, Arrow or Parquet."""
    of_files, stats = digests(files), [file.stat() for file in files]
    mark = fingerprint(of_files, wanted.task, *wanted.columns)
    more = {
        "files": of_files,
        "size": sum(stat.st_size for stat in stats),
        "times": tuple(stat.st_mtime_ns for stat in stats),
    }
    if kind == "lines":
        cut = (
            spans_of(file, stat.st_size, partial(open, file, "rb"), part_bytes)
            for file, stat in zip(files, stats, strict=True)
        )
        return lines_source([span for spans in cut for span in spans], wanted, mark, **more)
    if kind == "csv":
        return csv_source(files, wanted, mark, **more)
    names = tuple(map(str, files))
    if kind == "arrow":
        return arrow_source(names, wanted, mark, **more)
    return parquet_source(names, names.__getitem__, wanted, mark, **more)


# a run opens its data three times, and the interpreter's own files stay what they are
@functools.cache
def _builtin_source(seq_len: int, part_bytes: int, chats: bool) -> Source:
    # tests have few docstrings
    files = standard_library(*(("test", "tests", "idle_test") if chats else ()))
    # ast warns of odd escapes in the sources it reads; their name below keeps that from the user
    warnings.filterwarnings("ignore", module="builtin_corpus")
    documents = _docstring_chats if chats else None
    source = text_source(
        files,
        seq_len,
        part_bytes,
        "builtin",
        "sft" if chats else "pretrain",
        documents=documents,
        whole=chats,
        errors="replace",
    )
    # a file without text is no empty row
    return replace(source, documents=lambda value, place: source.documents(value, place) or None)


def _address_source(dataset: str, wanted: Wanted, patience: Patience, part_bytes: int) -> Source:
    """Opens JSONL or Parquet files behind addresses; rank 0 asks for their sizes."""
    urls = sorted(part.strip() for part in dataset.split(",") if part.strip())
    kinds = {KINDS.get(suffix(Path(urlsplit(url).path)), "") for url in urls}
    if len(kinds) > 1 or not kinds <= {"lines", "parquet"}:
        raise refuse(
            "--dataset " + ",".join(map(shown, urls)),
            "every address must be a JSONL file, or every address a Parquet file",
            "give addresses that end in .jsonl, or addresses that end in .parquet",
        )
    files = from_rank_0(lambda: [look_up(url, patience) for url in urls])
    of_files = {str(file): f"{file.size} {file.version}" for file in files}
    mark = fingerprint(of_files, wanted.task, *wanted.columns)
    if kinds == {"lines"}:
        spans = [
            span
            for file in files
            for span in spans_of(file, file.size, partial(file.open, patience), part_bytes)
        ]
        return lines_source(spans, wanted, mark, files=of_files, local=False)
    return parquet_source(
        tuple(of_files),
        lambda part: files[part].open(patience),
        wanted,
        mark,
        files=of_files,
        local=False,
    )


def _hub_source(
    domain: Domain, split: str, revision: str, wanted: Wanted, patience: Patience, before: str = ""
) -> Source:
    """Open a data set of the hub: from the hub's cache if the hub cannot be reached, else rank 0
    asks for its files.
    """
    name = f"{domain.dataset}/{domain.subset}/{split}@"
    revision = revision or (
        before.removeprefix(name).partition(" ")[0] if before.startswith(name) else ""
    )
    of_rows = f" {wanted.task} {' '.join(wanted.columns)}"
    if cached := from_rank_0(lambda: cached_commit(domain.dataset, revision)):
        return cached_source(domain, cached, split, wanted, f"{name}{cached}{of_rows}", patience)

    # A run that has read the data set before does not give up at once without a connection.
    asking = partial(_ask_hub, domain, split, revision, patience, is_new=not before)
    commit, urls, dataset = from_rank_0(asking)
    mark = f"{name}{commit}{of_rows}"
    if urls:
        found = functools.lru_cache(maxsize=16)(
            lambda part: look_up(urls[part], patience, pinned=True)
        )
        return parquet_source(
            tuple(map(shown, urls)),
            lambda part: found(part).open(patience),
            wanted,
            mark,
            local=False,
        )
    names = tuple(
        f"{domain.dataset}, shard {number} of {dataset.num_shards}"
        for number in range(dataset.num_shards)
    )
    return streamed_source(dataset, names, wanted, mark, patience)


def _ask_hub(
    domain: Domain, split: str, revision: str, patience: Patience, is_new: bool
) -> tuple[str, list[str], Any]:
    """Ask the hub for (hash of the commit and subset, addresses of the Parquet files, or else the
    data set).
    """
    where = f"--dataset {domain.dataset}"
    if is_new and not datasets_config.HF_HUB_OFFLINE and hub_is_away():
        away = ConnectionError("no connection to the hub")
        raise hub_refusal(where, domain.dataset, away, "datasets/")
    try:
        builder = patience(
            where,
            lambda: datasets.load_dataset_builder(
                domain.dataset, domain.subset or None, revision=revision or None
            ),
        )
        commit = builder.hash or ""
        files = (builder.config.data_files or {}).get(split, [])
        if isinstance(builder, Parquet) and files and all(map(_is_on_hub, files)):
            return commit, [address_of(file) for file in files], None
        return commit, [], patience(where, lambda: builder.as_streaming_dataset(split=split))
    except (OSError, ValueError, RuntimeError) as error:
        # datasets 5.2 raises RuntimeError for a data set that has a script.
        if isinstance(error, Refusal):
            raise
        raise hub_refusal(where, domain.dataset, error, "datasets/") from error


def _is_on_hub(file: str) -> bool:
    return file.startswith("hf://datasets/")


def address_of(file: str) -> str:
    """Makes the address at which the hub gives out `hf://datasets/ORG/NAME@COMMIT/PATH`."""
    repository, _, rest = file.removeprefix("hf://").partition("@")
    commit, _, path = rest.partition("/")
    return (
        f"{datasets_config.HF_ENDPOINT}/{repository}/resolve/{quote(commit, safe='')}/{quote(path)}"
    )


# Chats of the built-in corpus
# -------------------------------------------------------------------------------------

# CPython 3.11.7 counts the depth of all threads' trees in one place: SystemError, "recursion depth
# mismatch"
_PARSING = threading.Lock()


def _docstring_chats(source: str, place: str) -> list[Document]:
    """Makes chats of the (signature -> docstring) pairs of a Python file; none if this Python
    cannot parse it.
    """
    try:
        with _PARSING:
            tree = ast.parse(source, filename="builtin_corpus")
    except (SyntaxError, ValueError, RecursionError):
        return []
    chats = []
    bodies = [tree.body]
    while bodies:
        for node in bodies.pop():
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            bodies.append(node.body)
            if not (docstring := ast.get_docstring(node)):
                continue
            inside = (
                ", ".join(map(ast.unparse, node.bases))
                if isinstance(node, ast.ClassDef)
                else ast.unparse(node.args)
            )
            signature = (
                f"{'class' if isinstance(node, ast.ClassDef) else 'def'} {node.name}({inside}):"
            )
            question, answer = (
                {"role": "user", "content": f"Write the docstring.\n{signature}"},
                {"role": "assistant", "content": docstring},
            )
            chats.append(([question, answer], place))
    return chats
