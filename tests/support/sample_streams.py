"""Global streams of samples: images and numbers."""

import contextlib
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recipekit.data.batching import DataRank
from recipekit.data.content import is_held_out
from recipekit.data.files import local_files
from recipekit.data.first_row import check_first_row
from recipekit.data.images import class_number, open_image
from recipekit.data.request import Request, Sizes
from recipekit.data.samples import open_samples
from recipekit.data.stream_state import merge_states
from recipekit.spec.task import IGNORE, MicroBatch, Samples

SMALL = Sizes(block_samples=100, chunk_rows=64)
NAMES = ("image", "label")


def request_for(dataset: Path | str, **fields) -> Request:
    defaults: dict[str, Any] = {
        "dataset": str(dataset),
        "task": "image_classification",
        "global_batch": 12,
        "micro_batch": 2,
        "sizes": SMALL,
    }
    return Request(**(defaults | fields))


def as_they_are(size: int, rows: list[dict | None], keys: list[int] | None) -> MicroBatch:
    """Return images of (size, size) grey pixels; images with an odd key are mirrored."""
    out, labels = (
        torch.zeros(len(rows), size, size, dtype=torch.uint8),
        torch.full((len(rows),), IGNORE),
    )
    for number, row in enumerate(rows):
        if row is not None:
            pixels = np.asarray(open_image(row["image"]))
            out[number] = torch.from_numpy(
                pixels[:, :: -1 if keys and keys[number] % 2 else 1].copy()
            )
            labels[number] = class_number(row["label"])
    return {"pixel_values": out, "labels": labels}


def numbers_and_keys(
    processor: None, rows: list[dict | None], keys: list[int] | None
) -> MicroBatch:
    """Return the keys and the numbers in the column "image"."""
    numbers = torch.tensor([IGNORE if row is None else class_number(row["image"]) for row in rows])
    return {"number": numbers, "key": torch.tensor(keys or [0] * len(rows))}


PICTURES = Samples(
    as_they_are,
    lambda number: {"image": np.full((4, 4), number % 256, dtype=np.uint8), "label": number},
    900,
)
NUMBERS = Samples(numbers_and_keys, lambda number: {"image": number, "label": 0}, 900)


def take(
    request: Request,
    steps: int,
    dp: int = 1,
    state: dict | None = None,
    samples: Samples = PICTURES,
    processor: Any = 28,
    **more,
) -> tuple[list[MicroBatch], dict]:
    """Return all ranks' global batches, and the state after them."""
    with contextlib.ExitStack() as closing:
        opening = partial(open_samples, request, processor, samples, state=state, **more)
        streams = [
            closing.enter_context(contextlib.closing(opening(rank=DataRank(dp, rank))))
            for rank in range(dp)
        ]
        batches = []
        for _ in range(steps):
            parts = [batch for own in streams for batch in next(own)[0]]
            assert {len(tensor) for part in parts for tensor in part.values()} == {
                request.micro_batch
            }
            batches.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        return batches, json.loads(json.dumps(merge_states([own.state for own in streams])))


def equal(one: list[MicroBatch], other: list[MicroBatch]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a
    )


def unmirrored(batches: list[MicroBatch]) -> Counter:
    """Count each (image, class) pair, and ignore whether the image is mirrored."""
    found = [
        (min(image.numpy().tobytes(), image.flip(1).numpy().tobytes()), int(label))
        for batch in batches
        for image, label in zip(*batch.values(), strict=True)
    ]
    return Counter(found)


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def numbers(path: Path, count: int, first: int = 0) -> Path:
    """Write a file of rows that all belong to the training set."""
    fitting = [n for n in range(first, first + 2 * count) if not is_held_out({"image": n})][:count]
    return write_rows(path, [{"image": n, "label": 0} for n in fitting])


def looked_at(dataset: Path, **fields) -> None:
    files = local_files(str(dataset))
    assert files is not None
    check_first_row(files, str(dataset), request_for(dataset, **fields))
