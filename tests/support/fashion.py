"""Fashion-MNIST, as Debian installs it."""

import gzip
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

FASHION = Path("/usr/share/datasets/fashion-mnist")


def read(count: int, part_of: str = "t10k") -> tuple[np.ndarray, np.ndarray]:
    """Return the first images, (count, 28, 28) uint8, and their classes, (count,) uint8.

    They come from the test set, or from the training set if `part_of` is "train".
    """
    if not FASHION.exists():
        pytest.skip("needs Debian's dataset-fashion-mnist (tests/system_packages.sh)")

    def part(name: str, header: int) -> np.ndarray:
        with gzip.open(FASHION / name) as stream:
            return np.frombuffer(stream.read(), np.uint8, offset=header)

    return part(f"{part_of}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)[:count], part(
        f"{part_of}-labels-idx1-ubyte.gz", 8
    )[:count]


def png(image: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()
