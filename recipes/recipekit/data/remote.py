"""Files over HTTP: read in ranges; each range is asked for again until it came whole or the time is
over.

A small file of a server without ranges is fetched as a whole.

A range can be asked for any number of times, so a fault on the way neither loses nor repeats a row.
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
from email.utils import parsedate_to_datetime
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

import torch.distributed as dist
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, httpx

from ..parallel.groups import waiting_group
from ..spec.refusal import Refusal, Say, refuse

BUSY = (408, 425, 429, 500, 502, 503, 504)  # answers that may be others a little later
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds; each wait is twice the one before
SILENT = 30.0  # seconds that a rank other than 0 waits before it tells, too
TIMEOUT = 20.0  # seconds without a byte
READ_AHEAD = 1 << 20  # bytes fetched at a time where a file is read line by line
NETWORK = (
    ConnectionError,
    TimeoutError,
    socket.gaierror,
    urllib.error.URLError,
    http.client.HTTPException,
    httpx.TransportError,
)
WHOLE_BYTES = 64 << 20  # the largest file that is read as a whole, from a server without ranges
LOG = logging.getLogger(__name__)
# not the seeded one of the module `random`: ranks must not all come back at the same moment
_DRAW = random.Random()

Made = TypeVar("Made")


class Unreachable(Refusal):
    """Says that a server gave no answer in the time it had: no fault of the data, so nothing to
    skip.
    """


@dataclass(frozen=True)
class Patience:
    """Asks a server that does not answer well again, for `seconds`; `say` is told of each wait."""

    seconds: float
    say: Say
    closed: threading.Event = field(default_factory=threading.Event)  # ends the waiting

    def __call__(self, where: str, attempt: Callable[[], Made]) -> Made:
        """Returns the value of `attempt`, which is called again after each passing fault.

        Raises `Unreachable` when the time is over.
        """
        begun, tries = time.monotonic(), 0
        while True:
            try:
                return attempt()
            except Exception as error:  # whatever a library makes of the fault: the chain tells
                if not is_passing(error):
                    raise
                tries += 1
                waited = time.monotonic() - begun
                if waited >= self.seconds:
                    fix = (
                        "check the server and the connection, then start the run again: it resumes"
                        " from the last checkpoint (to wait longer, use --retry_s)"
                    )
                    raise Unreachable(
                        refuse(
                            where,
                            f"{describe(error)}, {tries} times in {waited:.0f} s (--retry_s"
                            f" {self.seconds:g})",
                            fix,
                        ).problems
                    ) from error
                wait = max(
                    min(LONGEST_WAIT, FIRST_WAIT * 2 ** (tries - 1)) * _DRAW.uniform(0.5, 1.0),
                    retry_after(error) * _DRAW.uniform(1.0, 1.1),
                )
                wait = min(wait, self.seconds - waited)
                text = (
                    f"{where}: {describe(error)}. Asking again in {wait:.1f} s, for"
                    f" {self.seconds - waited:.0f} s more"
                )
                self.say(text)
                if waited > SILENT and dist.is_initialized() and (rank := dist.get_rank()):
                    LOG.warning("rank %d: %s", rank, text)  # all the others wait for it
            if self.closed.wait(wait):
                raise Unreachable(
                    refuse(
                        where, "cannot be retried: the stream is closed", "open the stream again"
                    ).problems
                )


def chain(error: BaseException) -> list[BaseException]:
    """Lists the error and all errors that led to it; `datasets` raises some anew without a cause,
    so contexts count.
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
    for link in chain(error):
        status = getattr(link, "code", None) or getattr(
            getattr(link, "response", None), "status_code", None
        )
        if isinstance(status, int):
            return status
    return None


def is_passing(error: BaseException) -> bool:
    """True for a fault of the network or the server that may be gone a little later."""
    links = chain(error)
    if any(
        isinstance(link, Refusal | OfflineModeIsEnabled | ssl.SSLCertVerificationError)
        for link in links
    ):
        return False
    # datasets 5.2.0 keeps no more of it than its name
    if any("OfflineModeIsEnabled" in str(link) for link in links):
        return False
    if any(isinstance(link, socket.gaierror) and link.errno == socket.EAI_NONAME for link in links):
        return False
    if (status := status_of(error)) is not None:
        return status in BUSY
    return any(isinstance(link, NETWORK) for link in links)


def retry_after(error: BaseException) -> float:
    """Reads how many seconds the server asks to wait; 0 if it does not say."""
    for link in chain(error):
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


def describe(error: BaseException) -> str:
    """Names the fault below all others, in one line."""
    if (status := status_of(error)) is not None:
        return f"the server returned {status} {http.client.responses.get(status, '')}".rstrip()
    links = chain(error)
    inner = [link for link in links if isinstance(link, NETWORK)][-1:] or links[:1]
    if isinstance(inner[0], http.client.IncompleteRead):
        return "the response ended before its announced length"
    return (str(inner[0]).strip() or type(inner[0]).__name__).splitlines()[0]


def from_rank_0(make: Callable[[], Made]) -> Made:
    """Calls `make` on rank 0 and gives its value to every rank of the job (a collective): 512 ranks
    would be too much for a server.

    Raises its `Refusal` on all ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except Refusal as refusal:
            box[1] = refusal.problems
    dist.broadcast_object_list(box, group=waiting_group())
    if box[1]:
        raise Refusal(box[1])
    return box[0]


@dataclass(frozen=True)
class RemoteFile:
    """Names a file behind an address."""

    url: str
    size: int
    # what the server calls this content (ETag or date); "": the address itself stands for it
    version: str
    is_whole: bool = False  # the server gives no ranges, so the file is read as a whole

    @property
    def name(self) -> str:
        return PurePosixPath(urlsplit(self.url).path).name

    def __str__(self) -> str:
        return shown(self.url)

    def open(self, patience: Patience) -> BinaryIO:
        return io.BufferedReader(Ranges(self, patience), READ_AHEAD)  # type: ignore[return-value]


def shown(url: str) -> str:
    """Shortens the address: without user, password and query, which may hold secrets."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class Ranges(io.RawIOBase):
    """Makes a Python file of a remote file; fetches only what is read."""

    def __init__(self, file: RemoteFile, patience: Patience):
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
        content = self._patience(str(self._file), lambda: fetch(self._file, self._position, end))
        buffer[: len(content)] = content
        self._position = end
        return len(content)


def look_up(url: str, patience: Patience, pinned: bool = False) -> RemoteFile:
    """Asks for size and version of the file behind an address; `pinned` says that its content never
    changes.

    Raises `Refusal` if the file cannot be read.
    """

    def ask() -> RemoteFile:
        try:
            with request(url, "bytes=0-0") as answer:
                if answer.status != 206:
                    return _without_ranges(url, answer)
                if len(answer.read()) != 1:
                    raise ConnectionError("the server returned no data for a request of one byte")
                size = int(answer.headers["Content-Range"].rpartition("/")[2])
                return RemoteFile(url, size, "" if pinned else version_of(answer.headers))
        except urllib.error.HTTPError as error:
            if error.code == 416:  # no byte 0
                return RemoteFile(url, 0, "" if pinned else version_of(error.headers))
            raise

    try:
        return patience(shown(url), ask)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, Refusal):
            raise
        raise refuse(
            shown(url),
            f"cannot be read: {describe(error)}",
            "check the address and its permissions",
        ) from error


def _without_ranges(url: str, answer: Any) -> RemoteFile:
    """Return the file of a server without range requests, by its answer.

    Raise `Refusal` if the file is large.
    """
    stated = answer.headers.get("Content-Length")
    size = int(stated) if stated else len(answer.read(WHOLE_BYTES + 1))
    if size > WHOLE_BYTES or answer.headers.get("Content-Encoding", "identity") != "identity":
        rule = "the server does not support HTTP range requests"
        if size > WHOLE_BYTES:
            rule += f", and without them files must be at most {WHOLE_BYTES >> 20} MiB"
        raise refuse(shown(url), rule, "download the file and name its path")
    return RemoteFile(url, size, version_of(answer.headers), is_whole=True)


@functools.lru_cache(maxsize=16)  # at most 1 GiB; the spans of a file are read far apart
def _copy(file: RemoteFile) -> BinaryIO:
    """Fetch a whole file into a temporary one. Raise as `fetch` does."""
    with request(file.url) as answer:
        stated = int(answer.headers.get("Content-Length") or file.size)
        if stated != file.size or version_of(answer.headers) != file.version:
            raise _changed(file)
        content = answer.read(file.size + 1)
        if len(content) < file.size:  # with a limit, http.client does not notice the early end
            raise ConnectionError(f"the server returned {len(content)} of {file.size} bytes")
        if len(content) > file.size:
            raise _changed(file)
    try:
        copy = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (closed when the cache drops it)
        copy.write(content)
    except OSError as error:
        raise refuse(
            str(file),
            f"cannot be stored in {tempfile.gettempdir()}: {error.strerror}",
            "free space there, or set TMPDIR",
        ) from error
    return cast("BinaryIO", copy)


def _changed(file: RemoteFile) -> Refusal:
    return refuse(
        str(file),
        "has changed on the server since it was opened",
        "start a new run with --out NEW, or restore the old file",
    )


def fetch(file: RemoteFile, start: int, end: int) -> bytes:
    """Fetches bytes `start` to before `end`.

    Raises OSError for a fault that a second try may mend, `Refusal` if the file has changed.
    """
    if file.is_whole:
        return os.pread(_copy(file).fileno(), end - start, start)
    with request(file.url, f"bytes={start}-{end - 1}") as answer:
        size = int(answer.headers.get("Content-Range", "").rpartition("/")[2] or -1)
        changed = size != file.size or (file.version and version_of(answer.headers) != file.version)
        if answer.status != 206:
            raise ConnectionError(
                f"the server returned {answer.status} to a request for part of the file"
            )
        if changed:
            raise _changed(file)
        content = answer.read()
        if len(content) != end - start:
            raise ConnectionError(
                f"the server returned {len(content)} of {end - start} requested bytes"
            )
        return content


def request(url: str, ranges: str = "") -> Any:
    """Ask for some bytes of a file, or for all of it; return the answer, open."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "recipekit"} | (
        {"Range": ranges} if ranges else {}
    )
    asked = urllib.request.Request(url, headers=headers)
    if url.startswith(f"{constants.ENDPOINT}/"):
        for name, value in build_hf_headers().items():
            if name.lower() == "authorization":
                # not for the storage that the hub points to
                asked.add_unredirected_header(name, value)
    return urllib.request.urlopen(asked, timeout=TIMEOUT)


def version_of(headers: Any) -> str:
    return (headers.get("ETag") or headers.get("Last-Modified") or "").removeprefix("W/").strip('"')
