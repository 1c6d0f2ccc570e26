"""A stream's thread: its buffers, its end, and errors that are found ahead of the training."""

import json
import threading
import time
from collections import deque

import numpy as np
import pytest
from recipekit.data import batching
from recipekit.data.batching import DataRank
from recipekit.data.stream import open_stream
from recipekit.spec.errors import ConfigError
from token_streams import (
    BYTES,
    request_for,
    words,
)

pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_batch_that_is_kept_takes_no_memory_of_the_others():
    buffers: deque[np.ndarray] = deque()
    kept = batching._reusable_buffer(buffers, (2,))
    for _ in range(300):
        held = [batching._reusable_buffer(buffers, (2,)) for _ in range(3)]
        assert len({id(buffer) for buffer in [kept, *held]}) == 4
        del held
    assert len(buffers) == 4


def test_close_leaves_no_thread(corpora):
    before = set(threading.enumerate())
    own = open_stream(request_for(corpora["parquet"]), BYTES, rank=DataRank(1, 0))
    next(own)
    time.sleep(0.1)  # the queue is full, so the thread waits
    own.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="closed"):
        next(own)
    own.close()


def test_error_comes_after_the_good_steps_is_seen_one_step_early_and_stays(tmp_path):
    """The steps before the bad row are returned. After these steps, every `next` raises."""
    good = "\n".join(json.dumps({"text": text}) for text in words(400, 2))
    (tmp_path / "a.jsonl").write_text(good + "\nnonsense\n")
    before = set(threading.enumerate())
    own = open_stream(
        request_for(str(tmp_path / "a.jsonl"), global_batch=1), BYTES, rank=DataRank(1, 0)
    )
    steps = 0
    while own.error_ahead() is None:
        next(own)
        steps += 1
    assert steps > 5 and own.state["step"] == steps
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"a.jsonl, from byte \d+, row \d+: is not JSON"):
            next(own)
    own.close()
    assert set(threading.enumerate()) == before
