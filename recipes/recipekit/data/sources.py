"""Sources of documents: local files, the hub, addresses, or the interpreter's own source files.

A corpus consists of parts, which are files or byte ranges of text files. A part consists of groups:
the row groups of a Parquet file, or otherwise a single group. Reading can begin at any row of any
group. So neither a shuffle nor a resume must read the preceding rows.
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

from ..compat.datasets import skip_read_retries, skip_shutdown_sleep
from ..spec.errors import ConfigError, config_error
from ..spec.hub import hub_error, hub_is_unreachable
from ..spec.task import Documents, Samples
from .digests import file_digests, fingerprint
from .files import local_files, standard_library
from .first_row import check_kind
from .formats import (
    SourceOptions,
    arrow_source,
    csv_source,
    generated_source,
    image_source,
    lines_source,
    parquet_source,
    split_into_spans,
    streamed_source,
    text_source,
)
from .hub_cache import cached_commit, cached_source
from .kinds import FORMAT_BY_ENDING, kind_of, suffix
from .mixture import Domain
from .remote import RetryPolicy, from_rank_0, probe_remote_file, redact_url
from .request import Request
from .source import ColumnSelection, Document, Source

skip_shutdown_sleep()
skip_read_retries()


def open_source(
    request: Request,
    domain: Domain,
    patience: RetryPolicy,
    saved_fingerprint: str = "",
    samples: Samples | Documents | None = None,
) -> Source:
    """Open a domain's corpus. This is a collective operation if the corpus is remote.

    `saved_fingerprint` is the same corpus's fingerprint in an earlier job. A hub data set is opened
    at the commit in that fingerprint. `samples` describes a task whose documents are samples:
    dictionaries of the columns that the task reads. Raise `ConfigError` if the corpus does not
    exist or is unreachable.
    """
    wanted = ColumnSelection(request.columns, request.task, request.sizes.read_rows, request.names)
    return replace(
        _open_domain_source(request, domain, wanted, patience, saved_fingerprint, samples),
        columns=partial(list, wanted.seen_columns),
    )


def _open_domain_source(
    request: Request,
    domain: Domain,
    wanted: ColumnSelection,
    patience: RetryPolicy,
    saved_fingerprint: str,
    samples: Samples | Documents | None,
) -> Source:
    sizes = request.sizes
    if samples and wanted.as_rows and domain.dataset == "builtin":
        return generated_source(samples.builtin_row, samples.num_builtin_rows, wanted)
    if domain.dataset == "builtin":
        return _builtin_source(request.seq_len, sizes.part_bytes, request.chats)
    if domain.dataset.startswith(("http://", "https://")):
        return _address_source(domain.dataset, wanted, patience, sizes.part_bytes)
    files = local_files(domain.dataset, "image" in request.names, request.split, domain.subset)
    if files is None:
        return _hub_source(
            domain, request.split, request.dataset_revision, wanted, patience, saved_fingerprint
        )
    kind = kind_of(files, domain.dataset)
    check_kind(kind, files, domain.dataset, request)
    if kind == "pictures":
        return image_source(files, wanted)
    if kind == "text":
        return text_source(files, request.seq_len, sizes.part_bytes, request.task)
    return _rows_source(files, kind, wanted, sizes.part_bytes)


def _rows_source(files: list[Path], kind: str, wanted: ColumnSelection, part_bytes: int) -> Source:
    """Open local files whose rows are read individually: lines, CSV, Arrow or Parquet."""
    of_files, stats = file_digests(files), [file.stat() for file in files]
    mark = fingerprint(of_files, wanted.task, *wanted.columns)
    more: SourceOptions = {
        "files": of_files,
        "size": sum(stat.st_size for stat in stats),
        "times": tuple(stat.st_mtime_ns for stat in stats),
    }
    if kind == "lines":
        cut = (
            split_into_spans(file, stat.st_size, partial(open, file, "rb"), part_bytes)
            for file, stat in zip(files, stats, strict=True)
        )
        return lines_source([span for spans in cut for span in spans], wanted, mark, **more)
    if kind == "csv":
        return csv_source(files, wanted, mark, **more)
    names = tuple(map(str, files))
    if kind == "arrow":
        return arrow_source(names, wanted, mark, **more)
    return parquet_source(names, names.__getitem__, wanted, mark, **more)


# Cached because a run reopens its data for the evaluation, and the interpreter's source files do
# not change.
@functools.cache
def _builtin_source(seq_len: int, part_bytes: int, chats: bool) -> Source:
    # tests have few docstrings
    files = standard_library(*(("test", "tests", "idle_test") if chats else ()))
    # ast warns about unusual escapes in the sources that it parses. These sources are parsed under
    # the name builtin_corpus, so that only their warnings are hidden.
    warnings.filterwarnings("ignore", module="builtin_corpus")
    documents = _docstring_chats if chats else None
    source = text_source(
        files,
        seq_len,
        part_bytes,
        "builtin",
        "sft" if chats else "pretrain",
        documents=documents,
        one_span_per_file=chats,
        errors="replace",
    )
    # a file without documents does not count as an empty row
    return replace(source, documents=lambda value, place: source.documents(value, place) or None)


def _address_source(
    dataset: str, wanted: ColumnSelection, patience: RetryPolicy, part_bytes: int
) -> Source:
    """Open JSONL or Parquet files at addresses; rank 0 queries their sizes."""
    urls = sorted(part.strip() for part in dataset.split(",") if part.strip())
    kinds = {FORMAT_BY_ENDING.get(suffix(Path(urlsplit(url).path)), "") for url in urls}
    if len(kinds) > 1 or not kinds <= {"lines", "parquet"}:
        raise config_error(
            "--dataset " + ",".join(map(redact_url, urls)),
            "every address must be a JSONL file, or every address a Parquet file",
            "give addresses that end in .jsonl, or addresses that end in .parquet",
        )
    files = from_rank_0(lambda: [probe_remote_file(url, patience) for url in urls])
    of_files = {str(file): f"{file.size} {file.version}" for file in files}
    mark = fingerprint(of_files, wanted.task, *wanted.columns)
    if kinds == {"lines"}:
        spans = [
            span
            for file in files
            for span in split_into_spans(file, file.size, partial(file.open, patience), part_bytes)
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
    domain: Domain,
    split: str,
    revision: str,
    wanted: ColumnSelection,
    patience: RetryPolicy,
    saved_fingerprint: str = "",
) -> Source:
    """Open a hub data set, or read it from the hub's cache if the hub is unreachable.

    If the hub is reachable, rank 0 queries the list of files.
    """
    name = f"{domain.dataset}/{domain.subset}/{split}@"
    revision = revision or (
        saved_fingerprint.removeprefix(name).partition(" ")[0]
        if saved_fingerprint.startswith(name)
        else ""
    )
    of_rows = f" {wanted.task} {' '.join(wanted.columns)}"
    if cached := from_rank_0(lambda: cached_commit(domain.dataset, revision)):
        return cached_source(domain, cached, split, wanted, f"{name}{cached}{of_rows}", patience)

    # Without a connection, a run that has read the data set before keeps retrying.
    asking = partial(_query_hub, domain, split, revision, patience, is_new=not saved_fingerprint)
    commit, urls, dataset = from_rank_0(asking)
    mark = f"{name}{commit}{of_rows}"
    if urls:
        found = functools.lru_cache(maxsize=16)(
            lambda part: probe_remote_file(urls[part], patience, pinned=True)
        )
        return parquet_source(
            tuple(map(redact_url, urls)),
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


def _query_hub(
    domain: Domain, split: str, revision: str, patience: RetryPolicy, is_new: bool
) -> tuple[str, list[str], Any]:
    """Query the hub; return (hash of commit and subset, addresses of Parquet files, data set).

    The data set is None if the addresses are known.
    """
    where = f"--dataset {domain.dataset}"
    if is_new and not datasets_config.HF_HUB_OFFLINE and hub_is_unreachable():
        away = ConnectionError("no connection to the hub")
        raise hub_error(where, domain.dataset, away, "datasets/")
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
            return commit, [hub_file_url(file) for file in files], None
        return commit, [], patience(where, lambda: builder.as_streaming_dataset(split=split))
    except (OSError, ValueError, RuntimeError) as error:
        # datasets 5.2 raises RuntimeError for a data set that has a script.
        if isinstance(error, ConfigError):
            raise
        raise hub_error(where, domain.dataset, error, "datasets/") from error


def _is_on_hub(file: str) -> bool:
    return file.startswith("hf://datasets/")


def hub_file_url(file: str) -> str:
    """Return the download address of `hf://datasets/ORG/NAME@COMMIT/PATH`."""
    repository, _, rest = file.removeprefix("hf://").partition("@")
    commit, _, path = rest.partition("/")
    return (
        f"{datasets_config.HF_ENDPOINT}/{repository}/resolve/{quote(commit, safe='')}/{quote(path)}"
    )


# Chats of the built-in corpus
# -------------------------------------------------------------------------------------

# CPython 3.11.7 counts the depth of the syntax trees of all threads together. Therefore, parallel
# parsing raises SystemError, "recursion depth mismatch".
_PARSE_LOCK = threading.Lock()


def _docstring_chats(source: str, place: str) -> list[Document]:
    """Return chats made from a Python file's (signature -> docstring) pairs.

    Return [] if the running Python cannot parse the file.
    """
    try:
        with _PARSE_LOCK:
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
