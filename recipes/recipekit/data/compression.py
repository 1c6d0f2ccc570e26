"""Compressed files of text, recognised by their first bytes: an ending may be missing, or another
than the content's.
"""

import gzip
import io
import re
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ..spec.refusal import refuse

SIGNS = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "bzip2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
    "lz4": re.compile(rb"\x04\x22\x4d\x18"),
    # .lzma files begin with properties and sizes only
    "lzma": re.compile(rb"\x5d\x00\x00.{2}(\xff{8}|.{5}\x00{3})", re.DOTALL),
}
# a frame of zstd or lz4 without content: this, its length and so many bytes
SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18.{4}", re.DOTALL)
UNREAD = {
    b"\x1f\x9d": "compress",
    b"LZIP": "lzip",
    b"\x89LZO\x00": "lzop",
    b"\xff\x06\x00\x00sNaPpY": "snappy",
}
OTHER_SIGNS = {  # first bytes -> format, and the ending that such files have
    b"PAR1": ("Parquet", ".parquet"),
    b"ARROW1": ("Arrow", ".arrow"),
    b"\xff\xff\xff\xff": ("Arrow", ".arrow"),
    b"PK\x03\x04": ("ZIP", ".zip"),
    b"SQLite format 3": ("SQLite", ".db"),
    b"%PDF-": ("PDF", ".pdf"),
    b"7z\xbc\xaf\x27\x1c": ("7-Zip", ".7z"),
    b"\x89HDF\r\n": ("HDF5", ".h5"),
}
ENDINGS = {
    ".gz": "gzip",
    ".bgz": "gzip",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".lzma": "lzma",
    ".zst": "zstd",
    ".lz4": "lz4",
}
SIGN_BYTES = 16


def compression_of(file: Any) -> str:
    """Return how a file is compressed, "" if it is not: a local file by its content, a remote one
    by its name.
    """
    if not isinstance(file, Path):
        return next((name for ending, name in ENDINGS.items() if file.name.endswith(ending)), "")
    with file.open("rb") as stream:
        begin, frame = stream.read(SIGN_BYTES), 0
        while SKIPPABLE.match(begin):
            frame += 8 + int.from_bytes(begin[4:8], "little")
            stream.seek(frame)
            begin = stream.read(SIGN_BYTES)
    return compressed_as(begin)


def compressed_as(begin: bytes) -> str:
    """Return how content with these first bytes is compressed, "" if it is not."""
    return next((name for name, sign in SIGNS.items() if sign.match(begin)), "")


def check_text(file: Path) -> None:
    """Raise `Refusal` for a file of text whose content is another format's, or compressed twice."""
    outer = compression_of(file)
    with file.open("rb") as stream, decompressed(stream, outer) as content:
        begin = content.read(SIGN_BYTES)
    if inner := compressed_as(begin):
        raise refuse(str(file), f"is compressed twice: {inner} in {outer}", "decompress it once")
    if other := next((name for sign, name in UNREAD.items() if begin.startswith(sign)), ""):
        raise refuse(
            str(file),
            f"is compressed with {other}, which is not supported",
            "decompress it, or compress it with gzip or zstd instead",
        )
    for sign, (name, ending) in OTHER_SIGNS.items():
        if begin.startswith(sign):
            fix = (
                f"{'decompress it and ' * bool(outer)}rename it to end in {ending}, or download the"
                " correct file"
            )
            raise refuse(str(file), f"contains {name}, but its ending says text", fix)


def decompressed(stream: BinaryIO, compression: str) -> Any:
    """Return the stream of a file's content.

    Reading it raises OSError, EOFError, ValueError or an error of zlib for broken data.
    """
    if compression == "gzip":
        return gzip.open(stream, "rb")
    if compression == "bzip2":
        import bz2

        return bz2.open(stream, "rb")
    if compression in ("xz", "lzma", "zstd", "lz4"):
        return io.BufferedReader(_Checked(stream, compression))  # type: ignore[type-var]
    return stream


class _Checked(io.RawIOBase):
    """A decompressed stream whose errors are OSErrors: lzma has an error of its own, and pyarrow's
    files cannot read lines.
    """

    def __init__(self, stream: BinaryIO, compression: str):
        import lzma

        import pyarrow as pa

        self._broken = lzma.LZMAError, pa.ArrowException
        source: Any = (
            lzma.LZMAFile
            if compression in ("xz", "lzma")
            else partial(pa.CompressedInputStream, compression=compression)
        )
        self._stream = source(stream)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._stream.read(len(buffer))
        except self._broken as error:
            raise OSError(f"broken compressed data: {error}") from error
        buffer[: len(content)] = content
        return len(content)
