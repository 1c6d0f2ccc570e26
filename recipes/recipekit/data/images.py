"""Values of an image-classification row: the image, in any supported form, and the class number.

This module does not need torch.
"""

import io
import operator
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

DECODE_ERRORS = (
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
HIGH_BIT_DEPTH_MODES = (
    "I",
    "F",
)  # prefixes of Pillow's modes with more than 8 bits per channel


def open_image(value: object) -> Image.Image:
    """Decode an image and apply its EXIF orientation; raise ValueError if it cannot be decoded.

    `value` may be an encoded file: bytes, a path, or a dictionary of both as `datasets` stores it.
    It may also be an array of pixels from 0 to 255, (H, W) or (H, W, C).
    """
    try:
        return _decode_image(value)
    except DECODE_ERRORS as error:  # Pillow's decoders raise any of these
        raise ValueError(
            "is not a readable image:"
            f" {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        ) from error


def _decode_image(value: object) -> Image.Image:
    if isinstance(value, dict):
        value = value.get("bytes") or _image_path(value.get("path"))
    if isinstance(value, Path):
        value = value.read_bytes()
    if not isinstance(value, bytes):
        return Image.fromarray(_checked_pixels(value))
    image = Image.open(io.BytesIO(value))
    image.load()
    if image.mode.startswith(HIGH_BIT_DEPTH_MODES):
        raise ValueError(f"it has more than 8 bits per channel (mode {image.mode})")
    ImageOps.exif_transpose(image, in_place=True)
    return image


def _image_path(path: object) -> Path:
    if not isinstance(path, str) or "://" in path:
        raise ValueError(f"the row contains no image bytes, only the path {path!r}")
    return Path(path)


def _checked_pixels(value: object) -> np.ndarray:
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
    """Return a class number; raise TypeError if the value is not an integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"must be a class number, not {type(value).__name__} {str(value)[:40]!r}"
        ) from None
