"""Files over HTTP, read in ranges.

Each range is requested until it has arrived in full or the time limit is reached.

If the server does not support ranges, a small file is downloaded in full.

Since a range can be requested any number of times, a fault during a request neither loses nor
repeats a row.

The HTTP files of fsspec 2026.9.0 are not a replacement (tested on 2026-11-28 with the server in
tests/data/test_remote.py). They require aiohttp, which the pinned packages do not include. They
return a truncated response, or bytes of a file that has changed, without an error. They report a
busy server as a missing file. `HfFileSystem` of huggingface_hub 2.4.0 reads only repositories of
the hub. It also returns truncated responses, and it retries five times regardless of the deadline.
"""

import functools
import http.client
import io
import logging
import os
import random
import socket
import ssl
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

import torch.distributed as dist
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, httpx

from ..parallel.groups import long_wait_group
from ..spec.errors import ConfigError, Say, config_error

RETRY_STATUSES = (408, 425, 429, 500, 502, 503, 504)  # statuses that may change with time
FIRST_RETRY_WAIT, MAX_RETRY_WAIT = 0.5, 60.0  # seconds; each wait is twice the previous one
SILENT_SECONDS = 30.0  # seconds before ranks other than 0 also log that they wait
TIMEOUT = 20.0  # seconds without a byte
READ_AHEAD = 1 << 20  # bytes per request when a file is read line by line
NETWORK_ERRORS = (
    ConnectionError,
    TimeoutError,
    socket.gaierror,
    urllib.error.URLError,
    http.client.HTTPException,
    httpx.TransportError,
)
MAX_FULL_READ_BYTES = 64 << 20  # maximum file size for a full read from a server without ranges
LOG = logging.getLogger(__name__)
# Not the seeded generator of the module `random`, because the ranks must not all retry at the same
# time.
_JITTER = random.Random()

Made = TypeVar("Made")


class Unreachable(ConfigError):
    """The error for a server that did not answer in time.

    The data are not at fault, so no row is skipped.
    """


@dataclass(frozen=True)
class RetryPolicy:
    """The retry rule for servers that do not answer properly.

    Retries continue for `seconds`, and each wait is reported with `say`.
    """

    seconds: float
    say: Say
    closed: threading.Event = field(default_factory=threading.Event)  # ends a wait

    def __call__(self, where: str, attempt: Callable[[], Made]) -> Made:
        """Return the value of `attempt`, which is called again after each transient fault.

        Raise `Unreachable` when the time limit is reached.
        """
        begun, tries = time.monotonic(), 0
        while True:
            try:
                return attempt()
            except Exception as error:  # libraries wrap the fault, so the whole chain is checked
                if not is_transient(error):
                    raise
                tries += 1
                waited = time.monotonic() - begun
                if waited >= self.seconds:
                    fix = (
                        "check the server and the connection, then start the run again: it resumes"
                        " from the last checkpoint (to wait longer, use --retry_s)"
                    )
                    raise Unreachable(
                        config_error(
                            where,
                            f"{describe_fault(error)}, {tries} times in {waited:.0f} s (--retry_s"
                            f" {self.seconds:g})",
                            fix,
                        ).problems
                    ) from error
                wait = max(
                    min(MAX_RETRY_WAIT, FIRST_RETRY_WAIT * 2 ** (tries - 1))
                    * _JITTER.uniform(0.5, 1.0),
                    retry_after(error) * _JITTER.uniform(1.0, 1.1),
                )
                wait = min(wait, self.seconds - waited)
                text = (
                    f"{where}: {describe_fault(error)}. Asking again in {wait:.1f} s, for"
                    f" {self.seconds - waited:.0f} s more"
                )
                self.say(text)
                if waited > SILENT_SECONDS and dist.is_initialized() and (rank := dist.get_rank()):
                    LOG.warning("rank %d: %s", rank, text)  # all the others wait for it
            if self.closed.wait(wait):
                raise Unreachable(
                    config_error(
                        where, "cannot be retried: the stream is closed", "open the stream again"
                    ).problems
                )


def error_chain(error: BaseException) -> list[BaseException]:
    """Return the error and all errors that led to it.

    Contexts are included because `datasets` re-raises some errors without a cause.
    """
    found: list[BaseException] = []
    waiting: list[Any] = [error]
    while waiting:
        link = waiting.pop(0)
        if isinstance(link, BaseException) and link not in found:
            found.append(link)
            waiting += [link.__cause__, link.__context__, getattr(link, "reason", None)]
    return found


def status_of(error: BaseException) -> int | None:
    for link in error_chain(error):
        status = getattr(link, "code", None) or getattr(
            getattr(link, "response", None), "status_code", None
        )
        if isinstance(status, int):
            return status
    return None


def is_transient(error: BaseException) -> bool:
    """Return True for a fault of the network or the server that may be temporary."""
    links = error_chain(error)
    if any(
        isinstance(link, ConfigError | OfflineModeIsEnabled | ssl.SSLCertVerificationError)
        for link in links
    ):
        return False
    # datasets 5.2.0 preserves only the name of this error.
    if any("OfflineModeIsEnabled" in str(link) for link in links):
        return False
    if any(isinstance(link, socket.gaierror) and link.errno == socket.EAI_NONAME for link in links):
        return False
    if (status := status_of(error)) is not None:
        return status in RETRY_STATUSES
    return any(isinstance(link, NETWORK_ERRORS) for link in links)


def retry_after(error: BaseException) -> float:
    """Return how many seconds the server asks the client to wait; 0 by default."""
    for link in error_chain(error):
        headers = getattr(link, "headers", None) or getattr(
            getattr(link, "response", None), "headers", None
        )
        text = headers.get("Retry-After") if headers else None
        if text and text.strip().isdecimal():
            return float(text)
        if text:
            try:
                return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
            except (ValueError, TypeError):
                return 0.0
    return 0.0


def describe_fault(error: BaseException) -> str:
    """Return a one-line description of the first fault in the chain."""
    if (status := status_of(error)) is not None:
        return f"the server returned {status} {http.client.responses.get(status, '')}".rstrip()
    links = error_chain(error)
    inner = [link for link in links if isinstance(link, NETWORK_ERRORS)][-1:] or links[:1]
    if isinstance(inner[0], http.client.IncompleteRead):
        return "the response ended before its announced length"
    return (str(inner[0]).strip() or type(inner[0]).__name__).splitlines()[0]


def from_rank_0(make: Callable[[], Made]) -> Made:
    """Call `make` on rank 0 and return its value on every rank of the job.

    This is a collective operation. Requests from 512 ranks would overload a server. If `make`
    raises `ConfigError`, all ranks raise that error.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except ConfigError as error:
            box[1] = error.problems
    dist.broadcast_object_list(box, group=long_wait_group())
    if box[1]:
        raise ConfigError(box[1])
    return box[0]


@dataclass(frozen=True)
class RemoteFile:
    """A file at an address."""

    url: str
    size: int
    # the version of the content (ETag or date); "" if the address identifies the content
    version: str
    read_in_full: bool = False  # True if the server has no ranges

    @property
    def name(self) -> str:
        return PurePosixPath(urlsplit(self.url).path).name

    def __str__(self) -> str:
        return redact_url(self.url)

    def open(self, patience: RetryPolicy) -> BinaryIO:
        return io.BufferedReader(RangeReader(self, patience), READ_AHEAD)  # type: ignore[return-value]


def redact_url(url: str) -> str:
    """Return an address without user, password and query, which may contain secrets."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class RangeReader(io.RawIOBase):
    """A file object for a remote file; it requests only the bytes that are read."""

    def __init__(self, file: RemoteFile, patience: RetryPolicy):
        self._file, self._patience, self._position = file, patience, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._file.size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._file.size)
        if end <= self._position:
            return 0
        content = self._patience(
            str(self._file), lambda: fetch_range(self._file, self._position, end)
        )
        buffer[: len(content)] = content
        self._position = end
        return len(content)


def probe_remote_file(url: str, patience: RetryPolicy, pinned: bool = False) -> RemoteFile:
    """Return the file at an address, with the file's size and version.

    `pinned` is True if the content at the address never changes. Raise `ConfigError` if the file
    cannot be read.
    """

    def ask() -> RemoteFile:
        try:
            with open_url(url, "bytes=0-0") as answer:
                if answer.status != 206:
                    return _without_ranges(url, answer)
                if len(answer.read()) != 1:
                    raise ConnectionError("the server returned no data for a request of one byte")
                size = int(answer.headers["Content-Range"].rpartition("/")[2])
                return RemoteFile(url, size, "" if pinned else content_version(answer.headers))
        except urllib.error.HTTPError as error:
            if error.code == 416:  # no byte 0
                return RemoteFile(url, 0, "" if pinned else content_version(error.headers))
            raise

    try:
        return patience(redact_url(url), ask)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, ConfigError):
            raise
        raise config_error(
            redact_url(url),
            f"cannot be read: {describe_fault(error)}",
            "check the address and its permissions",
        ) from error


def _without_ranges(url: str, answer: http.client.HTTPResponse) -> RemoteFile:
    """Return a file read from `answer`, for a server that does not support range requests.

    Raise `ConfigError` if the file is too large.
    """
    stated = answer.headers.get("Content-Length")
    size = int(stated) if stated else len(answer.read(MAX_FULL_READ_BYTES + 1))
    if (
        size > MAX_FULL_READ_BYTES
        or answer.headers.get("Content-Encoding", "identity") != "identity"
    ):
        rule = "the server does not support HTTP range requests"
        if size > MAX_FULL_READ_BYTES:
            rule += f", and without them files must be at most {MAX_FULL_READ_BYTES >> 20} MiB"
        raise config_error(redact_url(url), rule, "download the file and name its path")
    return RemoteFile(url, size, content_version(answer.headers), read_in_full=True)


@functools.lru_cache(maxsize=16)  # at most 1 GiB: a file's spans are read far apart
def _download_full(file: RemoteFile) -> BinaryIO:
    """Download a full file into a temporary file; raise the errors of `fetch_range`."""
    with open_url(file.url) as answer:
        stated = int(answer.headers.get("Content-Length") or file.size)
        if stated != file.size or content_version(answer.headers) != file.version:
            raise _changed_file_error(file)
        content = answer.read(file.size + 1)
        if len(content) < file.size:  # http.client detects no early end if a byte limit is given
            raise ConnectionError(f"the server returned {len(content)} of {file.size} bytes")
        if len(content) > file.size:
            raise _changed_file_error(file)
    try:
        copy = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (closed when the cache drops it)
        copy.write(content)
    except OSError as error:
        raise config_error(
            str(file),
            f"cannot be stored in {tempfile.gettempdir()}: {error.strerror}",
            "free space there, or set TMPDIR",
        ) from error
    return cast("BinaryIO", copy)


def _changed_file_error(file: RemoteFile) -> ConfigError:
    return config_error(
        str(file),
        "has changed on the server since it was opened",
        "start a new run with --out NEW, or restore the old file",
    )


def fetch_range(file: RemoteFile, start: int, end: int) -> bytes:
    """Request the bytes from `start` up to, but not including, `end`.

    Raise OSError for a fault that a retry may fix, and `ConfigError` if the file has changed.
    """
    if file.read_in_full:
        return os.pread(_download_full(file).fileno(), end - start, start)
    with open_url(file.url, f"bytes={start}-{end - 1}") as answer:
        size = int(answer.headers.get("Content-Range", "").rpartition("/")[2] or -1)
        changed = size != file.size or (
            file.version and content_version(answer.headers) != file.version
        )
        if answer.status != 206:
            raise ConnectionError(
                f"the server returned {answer.status} to a request for part of the file"
            )
        if changed:
            raise _changed_file_error(file)
        content = answer.read()
        if len(content) != end - start:
            raise ConnectionError(
                f"the server returned {len(content)} of {end - start} requested bytes"
            )
        return content


def open_url(url: str, ranges: str = "") -> Any:
    """Request some bytes of a file, or the full file, and return the open response."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "recipekit"} | (
        {"Range": ranges} if ranges else {}
    )
    asked = urllib.request.Request(url, headers=headers)
    if url.startswith(f"{constants.ENDPOINT}/"):
        for name, value in build_hf_headers().items():
            if name.lower() == "authorization":
                # not sent to the storage server to which the hub redirects
                asked.add_unredirected_header(name, value)
    return urllib.request.urlopen(asked, timeout=TIMEOUT)


def content_version(headers: Message) -> str:
    return (headers.get("ETag") or headers.get("Last-Modified") or "").removeprefix("W/").strip('"')
