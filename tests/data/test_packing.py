"""Packing: full rows, each token exactly once, and documents that cannot attend to each other."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipekit.data.batching import DataRank
from recipekit.data.content import is_held_out
from recipekit.data.encode import encode_chats
from recipekit.data.packing import (
    fill_rows,
    fill_single_segment_rows,
    make_packed_block,
    pack_documents,
    permutation,
)
from recipekit.data.request import Sizes
from recipekit.data.stream import open_stream
from recipekit.spec.task import IGNORE
from token_streams import (
    BYTES,
    PAD,
    check_pieces,
    pieces_of,
    request_for,
    take,
    words,
)
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("own_cache")


@given(st.lists(st.integers(1, 200), max_size=60), st.integers(1, 64), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_rows_are_tiled_and_no_token_is_lost(lengths, seq_len, key):
    """Each token is in one row, short documents stay in one segment, and padding completes each
    row.
    """
    sizes = np.array(lengths, dtype=np.int64)
    begin = np.cumsum(sizes) - sizes
    total = int(sizes.sum())
    packing = pack_documents(begin, sizes, total, seq_len, key)
    pieces = list(zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True))
    covered = np.zeros(total, dtype=int)
    for start, size in pieces:
        assert size > 0
        if start < total:
            covered[start : start + size] += 1
    assert (covered == 1).all()
    for first, size in zip(begin.tolist(), lengths, strict=True):
        assert size > seq_len or (first, size) in pieces
    for row, fill in enumerate(packing.fill.tolist()):
        own = pieces[packing.first_segment[row] : packing.first_segment[row + 1]]
        assert (
            sum(size for _, size in own) == seq_len
            and sum(size for start, size in own if start < total) == fill > 0
        )
    assert packing.first_segment[-1] == len(pieces)


def rows_of(lengths: list[int], seq_len: int, *key: object) -> list[list[tuple[int, int]]]:
    """Return every row's segments as (first token, tokens), without the padding."""
    sizes = np.array(lengths)
    packing = pack_documents(np.cumsum(sizes) - sizes, sizes, sum(lengths), seq_len, *key)
    pieces = list(zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True))
    return [
        [piece for piece in pieces[first:end] if piece[0] < sum(lengths)]
        for first, end in zip(packing.first_segment[:-1], packing.first_segment[1:], strict=True)
    ]


@pytest.mark.parametrize(
    "lengths, rows",
    [
        # The 9 joins 50 and 41, which is the fullest row with space. Otherwise a third row would be
        # needed.
        ([60, 50, 41, 9, 8, 8, 8, 8, 8], 2),
        ([160, 170, 170], 5),  # one of the remainders 60, 70 and 70 must be split again
        ([60, 70, 70], 3),  # complete documents are not split
    ],
)
def test_rows_that_documents_need(lengths, rows):
    assert len(rows_of(lengths, 100, 0)) == rows


def test_neighbours_and_order_of_documents_depend_on_the_key():
    halves = [{frozenset(row) for row in rows_of([5] * 40, 10, key)} for key in (0, 1)]
    wholes = [rows_of([10] * 40, 10, key) for key in (0, 1)]
    assert halves[0] != halves[1] and wholes[0] != wholes[1]


def test_orders_are_those_of_every_version():
    """The permutations of the data never change, so a newer version resumes with the same data."""
    assert permutation(8, 0, 1).tolist() == [6, 7, 5, 2, 3, 0, 4, 1]


@pytest.mark.parametrize("kind", ["lines", "parquet", "arrow", "text"])
@pytest.mark.parametrize("seq_len", [16, 64])
def test_every_token_once_per_epoch_and_no_short_document_cut(corpora, kind, seq_len):
    request = request_for(corpora[kind], seq_len=seq_len, global_batch=1)
    rows = []
    with contextlib.closing(open_stream(request, BYTES, rank=DataRank(1, 0))) as own:
        epochs: list[list[np.ndarray]] = [[], [], []]
        while True:
            batches, state = next(own)
            epoch = state["domains"][""]["place"].get("epoch", 0)
            if epoch == 2:
                break
            epochs[epoch].append(
                np.stack(
                    [batches[0][name].numpy() for name in ("input_ids", "labels", "position_ids")]
                )
            )
    trained = [text for text in words(300, 0) if not is_held_out(text)]
    assert 290 < len(trained) < 300
    for rows in epochs[:2]:
        check_pieces(pieces_of(np.stack(rows)), trained, seq_len)
    first, second = (np.stack(rows) for rows in epochs[:2])
    assert len(first) != len(second) or (first != second).any()


def test_rows_of_one_piece_are_taken_from_the_parts_where_they_lie():
    """The documents are multiples of a row, in several parts, with gaps for held-out documents."""
    seq_len, draw = 8, np.random.default_rng(0)
    parts = [draw.integers(0, 100, size, dtype=np.int32) for size in (40, 8, 100)]
    begin, lengths = np.array([0, 19, 40, 51, 100]), np.array([16, 16, 8, 24, 48])
    block = make_packed_block(parts, [], begin, lengths, seq_len, 0, "key")
    assert block.ids is None
    joined, rows = np.concatenate(parts), np.empty((14, seq_len + 1), np.int64)
    fill_single_segment_rows(rows[:5], block, 0)
    fill_single_segment_rows(rows[5:], block, 5)
    assert (rows[:, -1] == IGNORE).all()
    expected = [
        joined[start : start + seq_len].tolist()
        for start, size in zip(begin, lengths, strict=True)
        for start in range(start, start + size, seq_len)
    ]
    assert rows[:, :-1].tolist() == [
        joined[start : start + seq_len].tolist() for start in block.packing.starts
    ]
    assert sorted(rows[:, :-1].tolist()) == sorted(expected)
    ids, labels = np.empty((2, 14, seq_len), np.int64)
    fill_rows(ids, labels, block, 0)
    assert (ids == rows[:, :-1]).all() and (labels == rows[:, 1:]).all()
    general = make_packed_block(
        parts, [np.append(part[1:], IGNORE) for part in parts], begin, lengths, seq_len, 0, "key"
    )
    assert general.ids is not None and (general.packing.starts == block.packing.starts).all()


@pytest.mark.parametrize(
    ("corpus", "steps"),
    [
        ("builtin", 50),
        pytest.param("builtin", 200, marks=pytest.mark.slow),
        pytest.param("web", 200, marks=pytest.mark.slow),
    ],
)
def test_rows_are_full(tmp_path, corpus, steps):
    """Rows of 2,048 tokens are 99.5 % full.

    The corpora are the sources of the standard library, and documents whose lengths are typical of
    web pages.
    """
    fields = {"seq_len": 2048, "global_batch": 64, "sizes": Sizes()}
    request = (
        request_for("builtin", **fields)
        if corpus == "builtin"
        else request_for(web(tmp_path), text_field="ids", **fields)
    )
    batches, _ = take(request, steps)
    assert (batches[:, 0] != PAD).mean() > 0.995


def web(folder):
    """Write a file of tokens whose documents are as long as web pages.

    The lengths have a log-normal distribution around 446 tokens.
    """
    draw = np.random.default_rng(0)
    lengths = np.minimum(np.exp(draw.normal(6.1, 1.0, 40_000)).astype(int) + 2, 20_000)
    path = folder / "web.parquet"
    tokens = pa.ListArray.from_arrays(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        draw.integers(0, 256, lengths.sum(), dtype=np.int32),
    )
    pq.write_table(pa.table({"ids": tokens}), path, row_group_size=1000)
    return str(path)


def test_chats_are_whole_and_padded(corpora):
    batches, _ = take(request_for(corpora["chats"], task="sft", seq_len=64), 40)
    chats = [
        json.loads(line)["messages"]
        for line in Path(corpora["chats"], "chats.jsonl").read_text().splitlines()
    ]
    rendered = {
        tuple(ids[:64]): labels
        for ids, labels in encode_chats(BYTES, chats, ["row"] * len(chats), 64)
    }
    seen = set()
    for row in batches.transpose(0, 2, 1, 3).reshape(-1, 3, 64):
        for part in np.split(row, np.flatnonzero(row[2] == 0)[1:], axis=1):
            if part[0, 0] == BYTES.pad_token_id:
                assert (
                    (part[0] == BYTES.pad_token_id).all()
                    and (part[1] == IGNORE).all()
                    and part.shape[1] < 64
                )
            else:
                assert (part[1] == rendered[tuple(part[0])]).all() and (part[1] != IGNORE).any()
                seen.add(tuple(part[0]))
            assert (part[2] == np.arange(part.shape[1])).all()
    held_out = {ids for chat, ids in zip(chats, rendered, strict=True) if is_held_out(chat)}
    assert seen == set(rendered) - held_out and (batches[:, 1] != IGNORE).any(-1).all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_document_sees_another(corpora, family, attention):
    """Changing one document in a packed row changes no bit of another document's logits."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(BYTES), "attn_implementation": attention}
    if family == "llama":
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **sizes,
        )
        model = LlamaForCausalLM(config).eval()
    else:
        model = GPT2LMHeadModel(
            GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **sizes)
        ).eval()
    with contextlib.closing(
        open_stream(
            request_for(corpora["lines"], seq_len=96, micro_batch=2), BYTES, rank=DataRank(1, 0)
        )
    ) as own:
        batch = next(own)[0][0]
    starts = [*torch.nonzero(batch["position_ids"][0] == 0).flatten().tolist(), 96]
    assert len(starts) >= 4
    changed = batch["input_ids"].clone()
    changed[0, starts[1] : starts[2]] = (changed[0, starts[1] : starts[2]] + 1) % 256
    with torch.no_grad():
        one, two = (
            model(input_ids=ids, position_ids=batch["position_ids"], use_cache=False).logits
            for ids in (batch["input_ids"], changed)
        )
        leaky = model(
            input_ids=changed,
            position_ids=batch["position_ids"],
            use_cache=False,
            attention_mask=torch.ones_like(changed),
        ).logits
    assert (one[0, starts[1] : starts[2]] != two[0, starts[1] : starts[2]]).any()
    same = torch.ones(96, dtype=torch.bool)
    same[starts[1] : starts[2]] = False
    assert torch.equal(one[0, same], two[0, same]) and torch.equal(one[1], two[1])
    assert not torch.equal(leaky[0, starts[2] :], two[0, starts[2] :])  # the test can detect a leak
