"""Global streams of small text and token corpora, and the segments in their rows."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recipekit.data.batching import DataRank
from recipekit.data.mixture import Domain
from recipekit.data.processors import byte_tokenizer
from recipekit.data.remote import RetryPolicy
from recipekit.data.request import Request, Sizes
from recipekit.data.source import Source
from recipekit.data.sources import open_source
from recipekit.data.stream import open_stream
from recipekit.data.stream_state import merge_states
from recipekit.spec.task import IGNORE

BYTES = byte_tokenizer()
END, PAD = BYTES.eos_token_id, BYTES.pad_token_id
SEQ_LEN = 16
PATIENCE = RetryPolicy(5, print)


# With these sizes, a few hundred documents fill many blocks and chunks.
SMALL = Sizes(block_rows=32, block_tokens=(1, 1 << 22), chunk_rows=7, read_rows=7, part_bytes=1000)


def words(count: int, seed: int) -> list[str]:
    """Return different documents of 1 to 50 characters."""
    draw = random.Random(seed)
    return [
        f"{number} " + "".join(draw.choices("abc \n", k=draw.randint(0, 45)))
        for number in range(count)
    ]


def request_for(dataset: str, **fields) -> Request:
    defaults: dict[str, Any] = {
        "dataset": dataset,
        "seq_len": SEQ_LEN,
        "global_batch": 12,
        "micro_batch": 1,
        "sizes": SMALL,
    }
    if Path(dataset).name == "tokens":
        defaults["text_field"] = "ids"
    return Request(**(defaults | fields))


def take(
    request: Request, steps: int, dp: int = 1, state: dict | None = None
) -> tuple[np.ndarray, dict]:
    """Read `steps` steps.

    Return all ranks' ids, labels and positions, (steps, 3, global_batch, seq_len), and the merged
    state.
    """
    streams = [
        open_stream(request, BYTES, rank=DataRank(dp, rank), state=state) for rank in range(dp)
    ]
    batches = []
    for _ in range(steps):
        rows = []
        for own in streams:
            micro_batches, state_after = next(own)
            assert (
                state_after is own.state
                and len(micro_batches) == request.global_batch // dp // request.micro_batch
            )
            for batch in micro_batches:
                parts = [batch[name] for name in ("input_ids", "labels", "position_ids")]
                assert all(
                    part.shape == (request.micro_batch, request.seq_len)
                    and part.dtype == torch.int64
                    for part in parts
                )
                rows.append(np.stack([part.numpy() for part in parts]))
        batches.append(np.concatenate(rows, axis=1))
    merged = merge_states([json.loads(json.dumps(own.state)) for own in streams])
    for own in streams:
        own.close()
    return (
        np.stack(batches)
        if batches
        else np.empty((0, 3, request.global_batch, request.seq_len), dtype=np.int64)
    ), json.loads(json.dumps(merged))


def pieces_of(batches: np.ndarray) -> Counter:
    """Return how often each segment occurs, and check each segment's labels and positions.

    A segment is a whole document, or one row of a longer document.
    """
    found: Counter = Counter()
    for ids, labels, positions in batches.transpose(0, 2, 1, 3).reshape(-1, 3, batches.shape[-1]):
        for part in np.split(
            np.stack([ids, labels, positions]), np.flatnonzero(positions == 0)[1:], axis=1
        ):
            assert (part[2] == np.arange(part.shape[1])).all()
            if part[0, 0] == PAD:
                assert (
                    (part[0] == PAD).all()
                    and (part[1] == IGNORE).all()
                    and part.shape[1] < batches.shape[-1]
                )
                continue
            assert (part[1] == [*part[0, 1:], IGNORE]).all()
            found[tuple(part[0])] += 1
    return found


def check_pieces(pieces: Counter, texts: list[str], seq_len: int) -> None:
    """Check that every document occurs exactly once in the segments.

    A document that fits in a row is one segment. A longer document is split into several segments.
    """
    tokens = [(*tuple(BYTES(text)["input_ids"]), END) for text in texts]
    short, long = (
        Counter(ids for ids in tokens if len(ids) <= seq_len),
        [ids for ids in tokens if len(ids) > seq_len],
    )
    parts = pieces - short
    assert pieces - parts == short
    assert sum(len(part) * count for part, count in parts.items()) == sum(map(len, long))
    joined = "|".join(",".join(map(str, ids)) + "," for ids in long)
    assert all(
        "," + ",".join(map(str, part)) + "," in "," + joined.replace("|", "|,") for part in parts
    )


def texts_of(dataset: str, **fields) -> list[str]:
    return texts_from(open_source(request_for(dataset, **fields), Domain("", dataset), PATIENCE))


def texts_from(source: Source) -> list[str]:
    """Return all texts of a corpus, in file order."""
    found = []
    for part in range(len(source.parts)):
        for group in range(source.groups(part)):
            for values in source.read(part, group, 0):
                for value in values if isinstance(values, list) else values.to_pylist():
                    found += [text for text, _ in source.documents(value, "here") or ()]
    return found
