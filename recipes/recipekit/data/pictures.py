"""What a row says of a classified picture: the picture, in any of its forms, and the number of its
class.

Needs no torch.
"""

import io
import operator
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

BROKEN = (
    OSError,
    ValueError,
    TypeError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
DEEP = ("I", "F")  # how Pillow's modes begin that hold more than 8 bits of a channel


def opened(value: Any) -> Image.Image:
    """Decodes a picture, and turns it as its camera says. Raises ValueError for what is none.

    It is an encoded file (bytes, a path, or a dictionary of both as `datasets` stores it), or
    pixels of 0 to 255, (H, W) or (H, W, C).
    """
    try:
        return _decoded(value)
    except BROKEN as error:  # Pillow's decoders raise any of these
        raise ValueError(
            "is not a readable image:"
            f" {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        ) from error


def _decoded(value: Any) -> Image.Image:
    if isinstance(value, dict):
        value = value.get("bytes") or _file(value.get("path"))
    if isinstance(value, Path):
        value = value.read_bytes()
    if not isinstance(value, bytes):
        return Image.fromarray(_pixels(value))
    image = Image.open(io.BytesIO(value))
    image.load()
    if image.mode.startswith(DEEP):
        raise ValueError(f"it has more than 8 bits per channel (mode {image.mode})")
    ImageOps.exif_transpose(image, in_place=True)
    return image


def _file(path: Any) -> Path:
    if not isinstance(path, str) or "://" in path:
        raise ValueError(f"the row contains no image bytes, only the path {path!r}")
    return Path(path)


def _pixels(value: Any) -> np.ndarray:
    if not isinstance(value, list | np.ndarray):
        raise TypeError(
            f"{type(value).__name__} {str(value)[:40]!r} must be an encoded image file or rows of"
            " pixels"
        )
    pixels = np.asarray(value)
    if pixels.dtype.kind not in "iu" or not pixels.size or pixels.min() < 0 or pixels.max() > 255:
        raise ValueError("pixels must be whole numbers from 0 to 255")
    if pixels.ndim != 2 and (pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4)):
        raise ValueError(
            f"pixels must have the shape (H, W) or (H, W, 1, 3 or 4), not {pixels.shape}"
        )
    return np.ascontiguousarray(
        pixels[:, :, 0] if pixels.shape[2:] == (1,) else pixels, dtype=np.uint8
    )


def class_number(value: Any) -> int:
    """Returns the number of a class. Raises TypeError for what is no whole number."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"must be a class number, not {type(value).__name__} {str(value)[:40]!r}"
        ) from None
