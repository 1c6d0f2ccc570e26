"""Held-out documents are evaluated in the same way in every layout, and are never trained on."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from recipekit.data.batching import DataRank
from recipekit.data.content import is_held_out
from recipekit.data.held_out import eval_rows
from recipekit.spec.errors import ConfigError
from recipekit.spec.task import IGNORE
from token_streams import (
    BYTES,
    END,
    SEQ_LEN,
    check_pieces,
    pieces_of,
    request_for,
    take,
    words,
)

pytestmark = pytest.mark.usefixtures("own_cache")


def tokens_of(batches: list[dict[str, torch.Tensor]]) -> np.ndarray:
    """Return, in order, the ids of the rows that have a label."""
    ids, labels = (
        torch.cat([batch[name] for batch in batches]).numpy() for name in ("input_ids", "labels")
    )
    return ids[(labels != IGNORE).any(1)]


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[str, list[str]]:
    path = tmp_path_factory.mktemp("large") / "large.jsonl"
    texts = words(3000, 5)
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return str(path), texts


def test_evaluation_is_the_same_on_every_layout(large):
    path, _ = large
    request = request_for(path, eval_rows=7)
    reference = tokens_of(eval_rows(request, BYTES, rank=DataRank(1, 0)))
    assert len(reference) == 7
    for dp, micro_batch in ((2, 1), (2, 4), (4, 2), (8, 1)):
        ranks = [
            eval_rows(
                dataclasses.replace(request, micro_batch=micro_batch),
                BYTES,
                rank=DataRank(dp, rank),
            )
            for rank in range(dp)
        ]
        assert len({len(batches) for batches in ranks}) == 1
        assert all(
            batch["input_ids"].shape == (micro_batch, SEQ_LEN)
            for batches in ranks
            for batch in batches
        )
        assert (tokens_of([batch for batches in ranks for batch in batches]) == reference).all()


def test_held_out_documents_are_evaluated_and_never_trained_on(large):
    path, texts = large
    held_out = [text for text in texts if is_held_out(text)]
    assert 10 < len(held_out) < 60
    said = []
    batches = eval_rows(
        request_for(path, eval_rows=100_000), BYTES, rank=DataRank(1, 0), say=said.append
    )
    rows = np.stack(
        [
            np.concatenate([batch[name].numpy() for batch in batches])
            for name in ("input_ids", "labels", "position_ids")
        ]
    )
    check_pieces(pieces_of(rows[None]), held_out, SEQ_LEN)
    assert "held-out 1 %" in said[0]
    trained = pieces_of(take(request_for(path, seq_len=256), 60)[0])
    assert set(trained) == {
        (*tuple(BYTES(text)["input_ids"]), END) for text in set(texts) - set(held_out)
    }


def test_ready_tokens_are_held_out_too(tmp_path):
    """A pre-tokenized document is either in the training set or in the evaluation set, never in
    both.
    """
    draw = np.random.default_rng(3)
    documents = [
        draw.integers(0, 250, int(size), dtype=np.int32) for size in draw.integers(2, 40, 3000)
    ]
    pq.write_table(
        pa.table({"ids": pa.array([ids.tolist() for ids in documents], pa.list_(pa.int32()))}),
        tmp_path / "ids.parquet",
        row_group_size=500,
    )
    request = request_for(
        str(tmp_path / "ids.parquet"), text_field="ids", seq_len=64, eval_rows=100_000
    )
    batches = eval_rows(request, BYTES, rank=DataRank(1, 0))
    rows = np.stack(
        [
            np.concatenate([batch[name].numpy() for batch in batches])
            for name in ("input_ids", "labels", "position_ids")
        ]
    )
    evaluated, trained = set(pieces_of(rows[None])), set(pieces_of(take(request, 150)[0]))
    assert (
        10 < len(evaluated) < 60
        and not evaluated & trained
        and evaluated | trained == {tuple(ids.tolist()) for ids in documents}
    )


def test_no_held_out_document_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("a small file")
    assert not is_held_out("a small file")
    with pytest.raises(ConfigError, match="the 1 % held out for evaluation is empty"):
        eval_rows(request_for(str(tmp_path / "one.txt")), BYTES, rank=DataRank(1, 0))


def test_builtin_evaluation():
    batches = eval_rows(request_for("builtin", eval_rows=4), BYTES, rank=DataRank(2, 0))
    assert len(batches) == 2 and all((batch["labels"] != IGNORE).any() for batch in batches)
