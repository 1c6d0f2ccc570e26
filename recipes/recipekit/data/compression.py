"""Compressed text files, recognized by their first bytes.

A file-name extension may be missing, or may not match the content.
"""

import gzip
import io
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..spec.errors import config_error

if TYPE_CHECKING:
    from .remote import RemoteFile

SIGNATURES = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "bzip2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
    "lz4": re.compile(rb"\x04\x22\x4d\x18"),
    # .lzma files have no magic number: they begin with properties and sizes
    "lzma": re.compile(rb"\x5d\x00\x00.{2}(\xff{8}|.{5}\x00{3})", re.DOTALL),
}
# a zstd or lz4 frame without content: these bytes, the frame's length, and that number of bytes
SKIPPABLE_FRAME = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18.{4}", re.DOTALL)
UNSUPPORTED_SIGNATURES = {
    b"\x1f\x9d": "compress",
    b"LZIP": "lzip",
    b"\x89LZO\x00": "lzop",
    b"\xff\x06\x00\x00sNaPpY": "snappy",
}
OTHER_SIGNATURES = {  # first bytes -> format and usual ending
    b"PAR1": ("Parquet", ".parquet"),
    b"ARROW1": ("Arrow", ".arrow"),
    b"\xff\xff\xff\xff": ("Arrow", ".arrow"),
    b"PK\x03\x04": ("ZIP", ".zip"),
    b"SQLite format 3": ("SQLite", ".db"),
    b"%PDF-": ("PDF", ".pdf"),
    b"7z\xbc\xaf\x27\x1c": ("7-Zip", ".7z"),
    b"\x89HDF\r\n": ("HDF5", ".h5"),
}
COMPRESSION_ENDINGS = {
    ".gz": "gzip",
    ".bgz": "gzip",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".lzma": "lzma",
    ".zst": "zstd",
    ".lz4": "lz4",
}
SIGNATURE_BYTES = 16


def compression_of(file: "Path | RemoteFile") -> str:
    """Return a file's compression, or "" if the file is not compressed.

    A local file is checked by its content, and a remote file is checked by its name.
    """
    if not isinstance(file, Path):
        return next(
            (name for ending, name in COMPRESSION_ENDINGS.items() if file.name.endswith(ending)), ""
        )
    with file.open("rb") as stream:
        begin, frame = stream.read(SIGNATURE_BYTES), 0
        while SKIPPABLE_FRAME.match(begin):
            frame += 8 + int.from_bytes(begin[4:8], "little")
            stream.seek(frame)
            begin = stream.read(SIGNATURE_BYTES)
    return detect_compression(begin)


def detect_compression(begin: bytes) -> str:
    """Return the compression of content that starts with `begin`, or "" if it is not compressed."""
    return next((name for name, sign in SIGNATURES.items() if sign.match(begin)), "")


def check_text(file: Path) -> None:
    """Raise `ConfigError` if a text file contains a binary format or is compressed twice."""
    outer = compression_of(file)
    with file.open("rb") as stream, open_decompressed(stream, outer) as content:
        begin = content.read(SIGNATURE_BYTES)
    if inner := detect_compression(begin):
        raise config_error(
            str(file), f"is compressed twice: {inner} in {outer}", "decompress it once"
        )
    if other := next(
        (name for sign, name in UNSUPPORTED_SIGNATURES.items() if begin.startswith(sign)), ""
    ):
        raise config_error(
            str(file),
            f"is compressed with {other}, which is not supported",
            "decompress it, or compress it with gzip or zstd instead",
        )
    for sign, (name, ending) in OTHER_SIGNATURES.items():
        if begin.startswith(sign):
            fix = (
                f"{'decompress it and ' * bool(outer)}rename it to end in {ending}, or download the"
                " correct file"
            )
            raise config_error(str(file), f"contains {name}, but its ending says text", fix)


def open_decompressed(stream: BinaryIO, compression: str) -> Any:
    """Return a file's decompressed stream.

    If the data are broken, reading the stream raises OSError, EOFError, ValueError or zlib.error.
    """
    if compression == "gzip":
        return gzip.open(stream, "rb")
    if compression == "bzip2":
        import bz2

        return bz2.open(stream, "rb")
    if compression in ("xz", "lzma", "zstd", "lz4"):
        return io.BufferedReader(_DecompressedStream(stream, compression))  # type: ignore[type-var]
    return stream


class _DecompressedStream(io.RawIOBase):
    """A decompressed stream that raises OSErrors and whose lines a buffered reader can read.

    This wrapper is needed because LZMAError is not an OSError, and pyarrow's files cannot read
    lines.
    """

    def __init__(self, stream: BinaryIO, compression: str):
        import lzma

        import pyarrow as pa

        self._broken = lzma.LZMAError, pa.ArrowException
        source = (
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
