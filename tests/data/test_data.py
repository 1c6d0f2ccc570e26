"""The global stream: order, resume, mixture, packing, masks, held-out documents, bad input."""

import contextlib
import dataclasses
import fcntl
import gc
import gzip
import hashlib
import itertools
import json
import os
import random
import shutil
import sysconfig
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from recipekit.data import blocks, chunks, lanes, sources, stream
from recipekit.data.content import is_held_out
from recipekit.data.encode import Counts, encode_chats
from recipekit.data.formats import PIECE
from recipekit.data.held_out import eval_rows
from recipekit.data.lanes import DataRank
from recipekit.data.mixture import Domain, domains_of, furthest_behind
from recipekit.data.packing import fill_rows, fill_whole_rows, make_block, pack, permutation
from recipekit.data.processors import byte_tokenizer
from recipekit.data.remote import Patience
from recipekit.data.request import Request, Sizes
from recipekit.data.sameness import OtherData, merge_states, roll
from recipekit.data.source import Source, Wanted
from recipekit.data.sources import open_source
from recipekit.data.stream import open_stream
from recipekit.plan import make_plan
from recipekit.spec.command import Command
from recipekit.spec.recipe import Recipe
from recipekit.spec.refusal import Refusal
from recipekit.spec.task import IGNORE
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

BYTES = byte_tokenizer()
END, PAD = BYTES.eos_token_id, BYTES.pad_token_id
SEQ_LEN = 16
PATIENCE = Patience(5, print)
WANTED = Wanted(("text",), "pretrain", read_rows=7)
# a few hundred documents have many blocks and chunks
SMALL = Sizes(block_rows=32, block_tokens=(1, 1 << 22), chunk_rows=7, read_rows=7, part_bytes=1000)


def words(count: int, seed: int) -> list[str]:
    """Documents of 1 to 50 characters, all different."""
    draw = random.Random(seed)
    return [
        f"{number} " + "".join(draw.choices("abc \n", k=draw.randint(0, 45)))
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, str]:
    """The same 300 documents as JSONL in three files, Parquet and Arrow in two, text files, and
    tokens; 90 chats; and a mixture.
    """
    folder = tmp_path_factory.mktemp("corpora")
    texts = words(300, 0)
    for kind in ("lines", "parquet", "arrow", "tokens", "text", "chats"):
        (folder / kind).mkdir()
    for number in range(3):
        rows = [
            json.dumps({"id": 1, "text": text}) for text in texts[100 * number : 100 * number + 100]
        ]
        (folder / "lines" / f"{number}.jsonl").write_text("\n".join(rows) + "\n")
    for number in range(2):
        own = texts[150 * number : 150 * number + 150]
        table = pa.table({"text": own, "n": range(150)})
        pq.write_table(table, folder / "parquet" / f"{number}.parquet", row_group_size=40)
        with (
            pa.OSFile(str(folder / "arrow" / f"{number}.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=40)
        tokens = pa.table(
            {
                "ids": pa.array(
                    [[*BYTES(text)["input_ids"], END] for text in own], pa.list_(pa.int32())
                )
            }
        )
        pq.write_table(tokens, folder / "tokens" / f"{number}.parquet", row_group_size=40)
    for number, text in enumerate(texts):
        (folder / "text" / f"{number:03}.txt").write_text(text)
    chats = [
        {
            "messages": [
                {"role": "user", "content": text[:5]},
                {"role": "assistant", "content": text},
            ]
        }
        for text in words(90, 1)
    ]
    (folder / "chats" / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (folder / "other.jsonl").write_text(
        "\n".join(json.dumps({"text": text.upper()}) for text in words(200, 7))
    )
    found = {path.name: str(path) for path in folder.iterdir()}
    return found | {
        "mixture": (
            f"small={folder / 'lines'}@50; large={folder / 'other.jsonl'}@30|20:10;"
            f" parquet={folder / 'parquet'}@20"
        )
    }


KINDS = [
    ("lines", "pretrain"),
    ("parquet", "pretrain"),
    ("arrow", "pretrain"),
    ("tokens", "pretrain"),
    ("text", "pretrain"),
    ("chats", "sft"),
    ("mixture", "pretrain"),
]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Tokens of earlier runs are none of this module's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks.datasets_config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


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


def of_kind(corpora: dict[str, str], kind: str, task: str, **fields) -> Request:
    return request_for(
        corpora.get(kind, kind),
        task=task,
        **({"seq_len": 64 if task == "sft" else SEQ_LEN} | fields),
    )


def take_steps(
    request: Request, sizes: list[int], dp: int = 1, state: dict | None = None
) -> tuple[list[np.ndarray], list[dict]]:
    """Of each step (3, rows, seq_len), the ids, labels and positions of all ranks put together, and
    the merged state; `sizes` are the rows that it has to have.
    """
    streams = [
        open_stream(request, BYTES, rank=DataRank(dp, rank), state=state) for rank in range(dp)
    ]
    found, states = [], []
    for size in sizes:
        taken = [next(own)[0] for own in streams]
        assert {len(own) for own in taken} == {size // dp // request.micro_batch}
        rows = [
            torch.stack([batch[name] for name in ("input_ids", "labels", "position_ids")])
            for own in taken
            for batch in own
        ]
        found.append(torch.cat(rows, 1).numpy().copy())
        states.append(json.loads(json.dumps(merge_states([own.state for own in streams]))))
    for own in streams:
        own.close()
    return found, states


def take(
    request: Request, steps: int, dp: int = 1, state: dict | None = None
) -> tuple[np.ndarray, dict]:
    """(steps, 3, global_batch, seq_len): the ids, labels and positions of all ranks put together,
    and the merged state.
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


# Order
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, task", [*KINDS, ("builtin", "pretrain")])
def test_order_does_not_depend_on_the_ranks(corpora, kind, task):
    """The bytes of 50 global batches are the same for every divisor of the global batch, any
    micro-batch, with and without kept tokens.
    """
    request = of_kind(corpora, kind, task)
    layouts = (
        [(1, 1), (1, 12), (2, 3), (3, 2), (4, 1), (6, 2), (12, 1), (1, 4), (2, 6)]
        if kind != "builtin"
        else [(1, 2), (3, 1)]
    )
    hashes = set()
    for number, (dp, micro_batch) in enumerate(layouts):
        cache = {"token_cache": "off"} if number % 2 else {}
        batches, _ = take(
            dataclasses.replace(request, micro_batch=micro_batch, **cache),
            50 if kind != "builtin" else 10,
            dp,
        )
        hashes.add(hashlib.sha256(batches.tobytes()).hexdigest())
    assert len(hashes) == 1
    assert len(np.unique(batches[:, 0].reshape(-1, request.seq_len), axis=0)) > 80


def test_order_depends_on_seed_and_epoch(corpora):
    one, two = (take(request_for(corpora["lines"], seed=seed), 5)[0] for seed in (0, 1))
    assert (one[0] != two[0]).any()


class Shards:
    """A corpus of ten files of ten row groups, each of which is one chunk that tells where it
    lies.
    """

    source = SimpleNamespace(parts=range(10))

    def groups(self, part: int) -> int:
        return 10

    def chunks(self, part: int, group: int, row: int) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(
            part=part, group=group, row=1, bad=0, counts=Counts(), rows=1, empty=0
        )


def test_files_and_row_groups_have_another_order_in_each_epoch_and_for_each_seed():
    orders = [
        [
            (chunk.part, chunk.group)
            for _, chunk in blocks._epoch(Shards(), seed, blocks.Place(epoch=epoch))
        ]
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert all(
        sorted(order) == list(itertools.product(range(10), range(10))) for order in orders
    ), "each once"
    assert len({tuple(dict.fromkeys(part for part, _ in order)) for order in orders}) == 3
    assert len({tuple(group for part, group in order if part == 0) for order in orders}) == 3
    assert (
        len({tuple(group for part, group in orders[0] if part == number) for number in range(10)})
        > 5
    )


# Packing
# --------------------------------------------------------------------------------------------------


def pieces_of(batches: np.ndarray) -> Counter:
    """The ids of every piece (a document, or a row's length of a longer one), counted, and what
    each must be checked.
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
    """Every document that fits a row is one piece, once; the others' tokens are there once, in
    parts of them.
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


@given(st.lists(st.integers(1, 200), max_size=60), st.integers(1, 64), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_rows_are_tiled_and_no_token_is_lost(lengths, seq_len, key):
    """Of any documents: each token lies in one row, a document that fits a row in one piece, and
    all rows are full with the padding.
    """
    sizes = np.array(lengths, dtype=np.int64)
    begin = np.cumsum(sizes) - sizes
    total = int(sizes.sum())
    packing = pack(begin, sizes, total, seq_len, key)
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
        own = pieces[packing.first[row] : packing.first[row + 1]]
        assert (
            sum(size for _, size in own) == seq_len
            and sum(size for start, size in own if start < total) == fill > 0
        )
    assert packing.first[-1] == len(pieces)


def rows_of(lengths: list[int], seq_len: int, *key: object) -> list[list[tuple[int, int]]]:
    """The pieces of every row, (first token, tokens), without the padding."""
    sizes = np.array(lengths)
    packing = pack(np.cumsum(sizes) - sizes, sizes, sum(lengths), seq_len, *key)
    pieces = list(zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True))
    return [
        [piece for piece in pieces[first:end] if piece[0] < sum(lengths)]
        for first, end in zip(packing.first[:-1], packing.first[1:], strict=True)
    ]


@pytest.mark.parametrize(
    "lengths, rows",
    [
        # the 9 goes to the 50 and 41, the fullest row that has room, else a third row is needed
        ([60, 50, 41, 9, 8, 8, 8, 8, 8], 2),
        ([160, 170, 170], 5),  # of the rests 60, 70 and 70 one is cut once more
        ([60, 70, 70], 3),  # whole documents are not
    ],
)
def test_rows_that_documents_need(lengths, rows):
    assert len(rows_of(lengths, 100, 0)) == rows


def test_neighbours_and_order_of_documents_depend_on_the_key():
    halves = [{frozenset(row) for row in rows_of([5] * 40, 10, key)} for key in (0, 1)]
    wholes = [rows_of([10] * 40, 10, key) for key in (0, 1)]
    assert halves[0] != halves[1] and wholes[0] != wholes[1]


def test_orders_are_those_of_every_version():
    """A run that goes on with a newer version reads what it would have read."""
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
    """Documents of whole rows in several parts, with gaps between them where others are held
    out.
    """
    seq_len, draw = 8, np.random.default_rng(0)
    parts = [draw.integers(0, 100, size, dtype=np.int32) for size in (40, 8, 100)]
    begin, lengths = np.array([0, 19, 40, 51, 100]), np.array([16, 16, 8, 24, 48])
    block = make_block(parts, [], begin, lengths, seq_len, 0, "key")
    assert block.ids is None
    joined, rows = np.concatenate(parts), np.empty((14, seq_len + 1), np.int64)
    fill_whole_rows(rows[:5], block, 0)
    fill_whole_rows(rows[5:], block, 5)
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
    general = make_block(
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
    """99.5 % of what rows of 2,048 tokens can hold, on the sources of the standard library and on
    documents of web length.
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
    """Makes a file of tokens whose documents are as long as those of the web: a logarithmic normal
    distribution around 446 tokens.
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


# State and resume
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(corpora) -> dict[tuple[str, str], np.ndarray]:
    return {(kind, task): take(of_kind(corpora, kind, task), 100)[0] for kind, task in KINDS}


# shrinking takes minutes
@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_resume_is_exact_at_any_point_any_number_of_times(corpora, uninterrupted, draw):
    """Segments of random length, 0 included (saved right after a resume), on 1, 2, 3 or 4 ranks,
    over several epochs.
    """
    kind, task = draw.draw(st.sampled_from(KINDS))
    reference = uninterrupted[kind, task]
    segments = draw.draw(
        st.lists(
            st.tuples(st.integers(0, 40), st.sampled_from([1, 2, 3, 4])), min_size=2, max_size=5
        )
    )
    state, done = None, 0
    for steps, dp in segments:
        steps = min(steps, len(reference) - done)
        got, state = take(of_kind(corpora, kind, task), steps, dp, state)
        assert (got == reference[done : done + steps]).all()
        done += steps


@pytest.mark.slow
@settings(max_examples=100, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(st.integers(0, 30), min_size=4, max_size=4))
def test_resume_of_a_mixture_on_2_4_3_and_1_ranks(corpora, uninterrupted, lengths):
    state, done = None, 0
    for steps, dp in zip(lengths, (2, 4, 3, 1), strict=True):
        steps = min(steps, 100 - done)
        got, state = take(request_for(corpora["mixture"]), steps, dp, state)
        assert (got == uninterrupted["mixture", "pretrain"][done : done + steps]).all()
        done += steps


def test_state_is_small_and_the_same_for_any_ranks(corpora):
    request = request_for(corpora["mixture"])
    states = [take(request, 30, dp)[1] for dp in (1, 2, 12)]
    assert states[0] == states[1] == states[2]
    assert len(json.dumps(states[0])) < 1024 + 64 * request.global_batch


@pytest.mark.parametrize("kind", ["lines", "parquet", "arrow", "text", "tokens"])
def test_resume_reads_one_block_wherever_it_is(corpora, kind, monkeypatch):
    """The rows that a resume reads do not grow with its place in the epoch."""
    request = request_for(corpora[kind], token_cache="off")
    read: list[int] = []
    original = chunks.Reader._encoded

    def counted(self, row, rows):
        chunk = original(self, row, rows)
        read.append(chunk.row - row)
        return chunk

    monkeypatch.setattr(chunks.Reader, "_encoded", counted)
    costs = []
    for steps in (1, 20, 40, 55):
        _, state = take(request, steps)
        read.clear()
        place = blocks.Place(**state["domains"][""]["place"])
        [reader] = stream.open_corpus(request, BYTES).readers()
        next(
            blocks.blocks(
                reader,
                request.seed,
                SMALL.tokens_of_block(SEQ_LEN),
                partial(blocks.packed, SEQ_LEN, PAD),
                place,
            )
        )
        costs.append(sum(read))
    # three row groups at most: a block has about 25 documents, and ready tokens are read 40 at a
    # time
    assert max(costs) <= 120, costs


def test_ten_thousand_row_groups_start_at_once(tmp_path, monkeypatch):
    """The first batch needs the footer of one file, not those of all; measured: 0.4 s to the first
    batch on two busy cores.
    """
    ids = pa.array([list(range(20))] * 1000, pa.list_(pa.int32()))
    for number in range(10):
        pq.write_table(pa.table({"ids": ids}), tmp_path / f"{number}.parquet", row_group_size=1)
    opened: list[int] = []
    original = chunks.Reader.chunks

    def counted(self, part, group, row):
        opened.append(part)
        return original(self, part, group, row)

    monkeypatch.setattr(chunks.Reader, "chunks", counted)
    request = request_for(str(tmp_path), text_field="ids")
    with contextlib.closing(open_stream(request, BYTES, rank=DataRank(1, 0))) as own:
        assert own.error_ahead() is None
    assert len(set(opened)) <= 2


def test_tokens_are_kept_where_there_is_room(corpora, monkeypatch, tmp_path, caplog):
    """Not by themselves where they would fill the disk; in a folder that is named, always."""
    monkeypatch.setattr(chunks.datasets_config, "HF_DATASETS_CACHE", tmp_path / "auto")
    request = request_for(corpora["lines"])
    full = dataclasses.replace(request, sizes=dataclasses.replace(SMALL, times_free=1 << 50))
    reference, _ = take(full, 3)
    assert not list((tmp_path / "auto").rglob("*.arrow")) and "tokens are not kept" in caplog.text
    assert (
        take(dataclasses.replace(full, token_cache=str(tmp_path / "named")), 3)[0] == reference
    ).all()
    assert list((tmp_path / "named").rglob("*.arrow"))
    assert (take(request, 3)[0] == reference).all() and list((tmp_path / "auto").rglob("*.arrow"))


@pytest.mark.parametrize("kind", ["lines.gz", "parquet"])
def test_a_group_is_opened_once_by_each_of_the_ranks_that_share_its_tokens(
    corpora, tmp_path, monkeypatch, kind
):
    """Whichever rank makes a chunk, the others read on behind it from where they are."""
    if kind == "lines.gz":
        (tmp_path / "a.jsonl.gz").write_bytes(
            gzip.compress(
                b"".join(file.read_bytes() for file in sorted(Path(corpora["lines"]).iterdir()))
            )
        )
    request = request_for(
        str(tmp_path / "a.jsonl.gz") if kind == "lines.gz" else corpora[kind],
        token_cache=str(tmp_path / "kept"),
    )
    [alone] = stream.open_corpus(dataclasses.replace(request, token_cache="off"), BYTES).readers()
    reference = list(alone.chunks(0, 0, 0))
    opened: list[int] = []
    read = alone.source.read
    counted = dataclasses.replace(alone.source, read=lambda *at: opened.append(at[2]) or read(*at))
    cache = chunks.open_cache(counted, alone.encoder, request.token_cache, SMALL)
    ranks = [
        dataclasses.replace(alone, source=counted, cache=cache, told=[]).chunks(0, 0, 0)
        for _ in range(3)
    ]
    for number in range(len(reference)):
        for rank in range(3):  # each goes first in its turn
            chunk = next(ranks[(number + rank) % 3])
            assert (
                (chunk.ids == reference[number].ids).all()
                and chunk.row == reference[number].row
                and chunk.last == reference[number].last
            )
    assert len(reference) >= 6 and len(opened) <= 3 and opened[0] == 0


@pytest.mark.parametrize("what", ["lock", "chunk"])
def test_a_folder_that_cannot_keep_tokens_does_not_end_the_run(corpora, tmp_path, caplog, what):
    request = request_for(corpora["lines"], token_cache=str(tmp_path))
    reference, _ = take(dataclasses.replace(request, token_cache="off"), 20)
    [reader] = stream.open_corpus(request, BYTES).readers()
    assert reader.cache
    if what == "lock":
        (reader.cache / "lock").mkdir()
    else:
        for part, row in itertools.product(range(len(reader.source.parts)), range(100)):
            (reader.cache / f"{part}_0_{row}.{os.getpid()}").mkdir()
    assert (take(request, 20)[0] == reference).all()
    assert caplog.text.count("tokens are not kept") == 1 and not list(reader.cache.rglob("*.arrow"))


def test_kept_tokens_of_a_file_that_changed_in_its_middle_are_not_used(tmp_path):
    (tmp_path / "a.txt").write_text("a small file, which is read together with the next\n")
    for letter in "bc":  # the same size and ends
        (tmp_path / "b.txt").write_text("x" * 80_000 + letter * 40_000 + "x" * 80_000)
        batches, _ = take(request_for(str(tmp_path), seq_len=256), 60)
        assert (batches[:, 0] == BYTES(letter)["input_ids"][0]).sum() > 1000


def test_a_tokenizer_with_another_end_token_is_another(corpora, tmp_path):
    """Its documents end with its own, though another's are kept; and it does not go on with the
    other's stream.
    """
    other = byte_tokenizer()
    other.eos_token = "<|im_end|>"
    request = request_for(corpora["lines"], token_cache=str(tmp_path))
    _, state = take(request, 1)
    with contextlib.closing(open_stream(request, other, rank=DataRank(1, 0))) as own:
        ids = np.concatenate([batch["input_ids"].numpy() for batch in next(own)[0]])
    assert (ids == other.eos_token_id).any() and not (ids == END).any()
    with pytest.raises(Refusal, match=r"^--tokenizer: must match the tokenizer of the saved run"):
        open_stream(request, other, rank=DataRank(1, 0), state=state)


def test_builtin_resumes_on_fewer_ranks():
    request = request_for("builtin", seq_len=256)
    reference, _ = take(request, 20)
    _, state = take(request, 9, dp=2)
    again, _ = take(request, 11, dp=1, state=state)
    assert (again == reference[9:]).all()


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"global_batch": 24}, {"seq_len": 32}, {"dataset": "builtin"}, {"task": "sft"}],
)
def test_state_of_another_stream_is_refused(corpora, change):
    request = request_for(corpora["lines"])
    _, state = take(request, 1)
    with pytest.raises(Refusal) as refused:
        open_stream(dataclasses.replace(request, **change), BYTES, rank=DataRank(1, 0), state=state)
    name = {"dataset": "corpus"}.get(next(iter(change)), next(iter(change)))
    assert any(problem.where.startswith(name) for problem in refused.value.problems)


def test_states_of_all_ranks_must_agree(corpora):
    streams = [
        open_stream(request_for(corpora["lines"]), BYTES, rank=DataRank(2, rank)) for rank in (0, 1)
    ]
    states = [next(own)[1] for own in streams]
    assert merge_states(states)["step"] == 1
    states[1] = next(streams[1])[1]
    with pytest.raises(RuntimeError, match="ranks read different data"):
        merge_states(states)
    for own in streams:
        own.close()


def test_the_hash_of_tokens_sees_their_order():
    ids, labels = torch.arange(8).view(2, 4), torch.arange(8, 16).view(2, 4)
    batch, other = {"input_ids": ids, "labels": labels}, {"input_ids": ids + 1, "labels": labels}
    swapped = ids.clone()
    swapped[0, 0], swapped[0, 1] = ids[0, 1], ids[0, 0]
    given_out = [
        [batch, other],
        [other, batch],
        [batch],
        [{**batch, "input_ids": swapped}],
        [{**batch, "input_ids": ids.flip(0)}],
    ]
    given_out += [[{**batch, "labels": labels.flip(1)}], [{"input_ids": labels, "labels": ids}]]
    assert len({roll(0, batches) for batches in given_out}) == len(given_out)
    assert roll(roll(0, [batch]), [other]) == roll(0, [batch, other]), (
        "it goes on from step to step"
    )


@pytest.mark.parametrize(
    ("kind", "task"),
    [("lines", "pretrain"), ("tokens", "pretrain"), ("chats", "sft"), ("mixture", "pretrain")],
)
def test_a_ramp_takes_the_rows_of_the_stream_in_their_order(corpora, kind, task):
    """Row k of the run is row k without a ramp; a resume after any step, on another number of
    ranks, goes on with the row that is next.
    """
    plain = of_kind(corpora, kind, task)
    ramp = dataclasses.replace(plain, batch_ramp="3:24, 5:36")
    sizes = [12, 12, 24, 24, 36, 36]  # 144 rows, which without it are 12 steps
    steps, state = take(plain, 12)
    rows = steps.transpose(1, 0, 2, 3).reshape(3, 144, -1)
    edges = [0, 12, 24, 48, 72, 108, 144]
    for dp, micro_batch in ((1, 1), (2, 3), (4, 3)):
        found, states = take_steps(dataclasses.replace(ramp, micro_batch=micro_batch), sizes, dp)
        for number, own in enumerate(found):
            np.testing.assert_array_equal(own, rows[:, edges[number] : edges[number + 1]])
        assert [own["step"] for own in states] == [1, 2, 3, 4, 5, 6] and states[-1][
            "domains"
        ] == state["domains"]
        after = 3 if dp == 2 else 1 + dp
        for other in {1, 2, 4} - {dp}:
            again, _ = take_steps(
                dataclasses.replace(ramp, micro_batch=3), sizes[after:], other, states[after - 1]
            )
            np.testing.assert_array_equal(np.concatenate(again, 1), rows[:, edges[after] :])


def test_what_of_a_ramp_has_come_is_part_of_the_stream(corpora):
    """What has not may change, and with it the position stays; before its first change a stream is
    the one without.
    """
    plain = of_kind(corpora, "lines", "pretrain")
    ramp = dataclasses.replace(plain, batch_ramp="3:24, 5:36")
    _, states = take_steps(ramp, [12, 12, 24, 24])
    _, without = take_steps(plain, [12, 12])
    assert states[1] == without[1] and states[2]["identity"] == states[1]["identity"] | {
        "batch_ramp": [[3, 24]]
    }
    for batch_ramp, later in (("3:24", 24), ("3:24, 5:48, 6:60", 48)):
        take_steps(dataclasses.replace(plain, batch_ramp=batch_ramp), [later], state=states[3])
    take_steps(dataclasses.replace(plain, batch_ramp="3:48"), [48], state=without[1])
    for batch_ramp, now in (
        ("", []),
        ("2:24", [[2, 24]]),
        ("3:36", [[3, 36]]),
        ("3:24, 4:36", [[3, 24], [4, 36]]),
    ):
        with pytest.raises(OtherData) as refused:
            open_stream(
                dataclasses.replace(plain, batch_ramp=batch_ramp),
                BYTES,
                rank=DataRank(1, 0),
                state=states[3],
            )
        assert str(refused.value).startswith(
            f"batch_ramp = {now}: the saved data stream has [[3, 24]]"
        )
    with pytest.raises(
        OtherData, match=r"batch_ramp = \[\[2, 24\]\]: the saved data stream has \[\]"
    ):
        open_stream(
            dataclasses.replace(plain, batch_ramp="2:24"),
            BYTES,
            rank=DataRank(1, 0),
            state=without[1],
        )


def test_a_ramp_that_does_not_divide_is_refused_by_the_stream(corpora):
    with pytest.raises(Refusal) as refused:
        open_stream(
            dataclasses.replace(
                of_kind(corpora, "lines", "pretrain"), batch_ramp="3:20, 4:24, 6:30"
            ),
            BYTES,
            rank=DataRank(4, 0),
        )
    assert [str(problem) for problem in refused.value.problems] == [
        "batch_ramp from step 6 = 30: is not divisible by dp(4) * micro_batch(1). Use --batch_ramp"
        " 6:28"
    ]


def test_fewer_documents_than_lanes(tmp_path):
    (tmp_path / "few.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in ("ab", "cd", "ef"))
    )
    batches, _ = take(request_for(str(tmp_path / "few.jsonl")), 4, dp=4)
    assert set(pieces_of(batches)) == {
        (*BYTES(text)["input_ids"], END) for text in ("ab", "cd", "ef")
    }


def test_global_batch_must_divide(corpora):
    with pytest.raises(
        Refusal,
        match=(
            r"global_batch = 12: is not divisible by dp\(5\) \* micro_batch\(1\)\. Use"
            r" --global_batch 10"
        ),
    ):
        open_stream(request_for(corpora["lines"]), BYTES, rank=DataRank(5, 0))


# Mixtures
# --------------------------------------------------------------------------------------------------


def test_shares_of_a_mixture_after_every_batch(corpora):
    """Each domain is within one row of its share, from the step on at which the weights last
    changed.
    """
    request = request_for(corpora["mixture"], global_batch=7)
    shares = {1: (0.5, 0.3, 0.2), 20: (50 / 80, 10 / 80, 20 / 80)}
    counted = np.zeros(3)
    with contextlib.closing(open_stream(request, BYTES, rank=DataRank(1, 0))) as own:
        for step in range(1, 60):
            batches, state = next(own)
            if step == 20:
                counted[:] = 0
            for batch in batches:
                counted[int(batch["domain"])] += int((batch["input_ids"] != PAD).sum())
            share = np.array(shares[20 if step >= 20 else 1])
            assert (np.abs(counted - share * counted.sum()) <= SEQ_LEN).all(), step
            assert [domain["tokens"] for domain in state["domains"].values()] == counted.tolist()


def test_domain_of_every_row(corpora):
    """`domain` says which corpus a row is of, on any ranks and in any micro-batches; one corpus has
    upper case letters only, one lower case.
    """
    cases = [torch.tensor(BYTES(letters)["input_ids"]) for letters in ("abc", "ABC")]
    for dp, micro_batch in ((1, 1), (2, 3), (3, 2)):
        request = request_for(
            f"lower={corpora['lines']}@1; upper={corpora['other.jsonl']}@1", micro_batch=micro_batch
        )
        for rank in range(dp):
            with contextlib.closing(open_stream(request, BYTES, rank=DataRank(dp, rank))) as own:
                batches = [batch for _ in range(5) for batch in next(own)[0]]
            for batch in batches:
                for domain, letters in enumerate(cases):
                    assert (
                        batch["domain"][torch.isin(batch["input_ids"], letters).any(1)] == domain
                    ).all()
            assert torch.cat([batch["domain"] for batch in batches]).unique().tolist() == [0, 1]


def test_parts_of_a_mixture():
    assert domains_of("a=org/name:sub@1; b=x.jsonl@2|5:0.5", "other") == [
        Domain("a", "org/name", "sub", ((1, 1.0),)),
        Domain("b", "x.jsonl", "other", ((1, 2.0), (5, 0.5))),
    ]


def test_next_row_is_of_the_first_domain_furthest_behind():
    assert [
        furthest_behind(tokens, [1, 1, 0], 16)
        for tokens in ([0, 0, 0], [16, 0, 0], [16, 15, 0], [16, 16, 0])
    ] == [0, 1, 1, 0]
    dealt = [0, 0]
    order = [furthest_behind(dealt, [1, 3], 16)]
    while len(order) < 8:  # the row that comes counts among all: the first is of the larger share
        dealt[order[-1]] += 16
        order.append(furthest_behind(dealt, [1, 3], 16))
    assert order == [1, 0, 1, 1, 1, 0, 1, 1]


def test_shares_after_a_resume_with_other_weights(corpora):
    """They are kept from there on; what was given before is no debt."""
    request = request_for(
        f"small={corpora['lines']}@50; large={corpora['other.jsonl']}@50", global_batch=8
    )
    _, state = take(request, 50)
    counted = np.zeros(2)
    changed = dataclasses.replace(
        request, dataset=request.dataset.replace("@50", "@70", 1).replace("@50", "@30")
    )
    with contextlib.closing(open_stream(changed, BYTES, rank=DataRank(1, 0), state=state)) as own:
        for step in range(51, 60):
            for batch in next(own)[0]:
                counted[int(batch["domain"])] += int((batch["input_ids"] != PAD).sum())
            assert (np.abs(counted - np.array([0.7, 0.3]) * counted.sum()) <= SEQ_LEN).all(), (
                step,
                counted,
            )


@pytest.mark.parametrize(
    "dataset, says",
    [
        ("a=x.jsonl@5; b=y.jsonl", ["'b=y.jsonl'", "is not a valid part of a mixture"]),
        ("a=x.jsonl@five", ["is not a valid part of a mixture", "@five"]),
        ("a=x.jsonl@5|3:1|2:4; b=y.jsonl@1", ["'a=x.jsonl@5|3:1|2:4'", "70|1000:50"]),
        ("a=x.jsonl@5|3:1|3:4; b=y.jsonl@1", ["'a=x.jsonl@5|3:1|3:4'"]),
        ("a=x.jsonl@5; a=y.jsonl@1", ["a", "is the name of two corpora"]),
        ("a=x.jsonl@0; b=y.jsonl@0", ["all weights of the mixture are 0"]),
        ("a=x.jsonl@1|9:0; b=y.jsonl@0", ["from step 9 on", "all weights of the mixture are 0"]),
    ],
)
def test_wrong_mixture_is_refused(dataset, says):
    with pytest.raises(Refusal) as refused:
        domains_of(dataset)
    assert all(part in str(refused.value) for part in says), str(refused.value)
    # before anything is started, with whatever else is wrong
    with pytest.raises(Refusal) as planned:
        make_plan(
            Command(
                Recipe(model="x", dataset=dataset, tokenizer="bytes"), "name", Path(), frozenset()
            )
        )
    assert set(refused.value.problems) <= set(planned.value.problems)


# Chats
# --------------------------------------------------------------------------------------------------


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


def test_builtin_chats_ask_for_the_docstring():
    batches, _ = take(request_for("builtin", task="sft", seq_len=256), 2)
    for ids, labels in batches.transpose(0, 2, 1, 3).reshape(-1, 3, 256)[:, :2]:
        text = BYTES.decode(ids)
        assert text.startswith("<|im_start|>user\nWrite the docstring.\n")
        answer = text.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
        assert BYTES.decode(labels[labels != IGNORE]).startswith(answer.removesuffix("\n"))


def test_chats_without_an_answer_within_the_row_are_refused(corpora):
    for limit, says in (
        (50, r"\d+ consecutive documents contain no token to train on"),
        (500, "90 chats have no answer to train on"),
    ):  # within an epoch, at its end
        sizes = dataclasses.replace(SMALL, barren_documents=limit)
        with pytest.raises(Refusal, match=says):
            take(request_for(corpora["chats"], task="sft", seq_len=16, sizes=sizes), 1)


# Attention
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_document_sees_another(corpora, family, attention):
    """Changing one document of a packed row changes no logit of another, bit for bit."""
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
    assert not torch.equal(leaky[0, starts[2] :], two[0, starts[2] :])  # the test can see a leak


# Held-out documents
# -----------------------------------------------------------------------------------------------


def tokens_of(batches: list[dict[str, torch.Tensor]]) -> np.ndarray:
    """Ids of the rows that carry a label, in order."""
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
    """A document of ready tokens is in training or in the evaluation, and in one of them."""
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


def test_documents_of_ready_tokens_may_be_empty(tmp_path):
    """Also all of a row group, or all there are."""
    kinds = pa.list_(pa.int32())
    pq.write_table(
        pa.table({"ids": pa.array([[]] * 4 + [[7], [], None, []] + [list(range(9))] * 4, kinds)}),
        tmp_path / "some.parquet",
        row_group_size=4,
    )
    pq.write_table(
        pa.table({"ids": pa.array([[]] * 4, kinds)}), tmp_path / "none.parquet", row_group_size=4
    )
    fields = {"text_field": "ids", "seq_len": 16, "global_batch": 2, "micro_batch": 2}
    assert set(pieces_of(take(request_for(str(tmp_path / "some.parquet"), **fields), 4)[0])) == {
        tuple(range(9))
    }
    with pytest.raises(Refusal, match="of 4 rows 4 are empty"):
        take(request_for(str(tmp_path / "none.parquet"), **fields), 1)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_any_type_of_list_holds_tokens(tmp_path, kind):
    """Lists of fixed length too, which may be null as others may; the same tokens give the same
    batches.
    """
    draw = np.random.default_rng(5)
    documents = [draw.integers(0, 250, 16).tolist() for _ in range(300)]
    documents[7] = None
    seen = set()
    for number, lists in enumerate(
        [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16(), 16)]
    ):
        (folder := tmp_path / str(number)).mkdir()
        table = pa.table({"ids": pa.array(documents, lists)})
        if kind == "parquet":
            pq.write_table(table, folder / "ids.parquet", row_group_size=100)
        else:
            with (
                pa.OSFile(str(folder / "ids.arrow"), "wb") as sink,
                pa.ipc.new_stream(sink, table.schema) as writer,
            ):
                writer.write_table(table, max_chunksize=100)
        batches, _ = take(request_for(str(folder), text_field="ids", seq_len=16), 40)
        seen.add(batches.tobytes())
    assert len(seen) == 1 and len(set(pieces_of(batches))) > 280


def test_tokens_in_json_lines_are_refused_with_the_way(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"ids": [1, 2, 3]}\n')
    with pytest.raises(
        Refusal,
        match=(
            r"a.jsonl, row 1: contains token ids, which require a Parquet or Arrow file\."
            r" .*to_parquet"
        ),
    ):
        take(request_for(str(tmp_path / "a.jsonl"), text_field="ids"), 1)


def test_no_held_out_document_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("a small file")
    assert not is_held_out("a small file")
    with pytest.raises(Refusal, match="the 1 % held out for evaluation is empty"):
        eval_rows(request_for(str(tmp_path / "one.txt")), BYTES, rank=DataRank(1, 0))


def test_builtin_evaluation():
    batches = eval_rows(request_for("builtin", eval_rows=4), BYTES, rank=DataRank(2, 0))
    assert len(batches) == 2 and all((batch["labels"] != IGNORE).any() for batch in batches)


# Sources
# --------------------------------------------------------------------------------------------------


def texts_of(dataset: str, **fields) -> list[str]:
    return texts_from(open_source(request_for(dataset, **fields), Domain("", dataset), PATIENCE))


def texts_from(source: Source) -> list[str]:
    """All texts of a corpus, in the order of its files."""
    found = []
    for part in range(len(source.parts)):
        for group in range(source.groups(part)):
            for values in source.read(part, group, 0):
                for value in values if isinstance(values, list) else values.to_pylist():
                    found += [text for text, _ in source.documents(value, "here") or ()]
    return found


def test_builtin_is_the_standard_library():
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(stdlib.rglob("*.py")) if "site-packages" not in file.parts]
    content = "".join(texts_of("builtin"))
    assert content == "".join(
        file.read_text(encoding="utf-8", errors="replace").removeprefix("\ufeff") for file in files
    )


def test_ways_to_name_files(corpora, monkeypatch):
    lines = Path(corpora["lines"])
    monkeypatch.chdir(lines)
    everything = texts_of(str(lines))
    assert len(everything) == 300
    for name in (
        f"{lines}/*.jsonl",
        f"{lines}/0.jsonl,{lines}/[12].jsonl",
        "0.jsonl, 1.jsonl, 2.jsonl",
        "*.jsonl",
        str(lines / "**" / "*.jsonl"),
    ):
        assert texts_of(name) == everything, name


def test_odd_files_are_read(tmp_path):
    odd = tmp_path / "a [b], {c} é*"
    odd.mkdir()
    (odd / "mark.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\n")
    assert texts_of(str(odd / "mark.txt")) == ["café\n"]
    long = "".join(f"line {number}\n" for number in range(10_000))
    (odd / "long.txt").write_text(long)
    pieces = texts_of(str(odd / "long.txt"))
    assert (
        "".join(pieces) == long
        and all(len(piece) <= PIECE and piece.endswith("\n") for piece in pieces)
        and len(pieces) > 2
    )
    (odd / "zip.jsonl.gz").write_bytes(
        gzip.compress(b'\n{"text": "a\\u2028b"}\n  \n{"text": null}\n{"text": "c\xe2\x80\xa8d"}')
    )
    assert texts_of(str(odd / "zip.jsonl.gz")) == ["a\u2028b", "c\u2028d"]
    (odd / "empty.txt").write_text("")
    (odd / "zip.jsonl.gz").unlink()
    (tmp_path / "half.jsonl").write_text(r'{"text": "a\ud83d b\uD83D\uDE00"}')
    assert texts_of(str(tmp_path / "half.jsonl")) == ["a? b\U0001f600"]
    assert len(texts_of(str(odd))) == len(pieces) + 1


def test_a_text_file_that_fits_a_row_is_not_cut(tmp_path):
    """However long rows are; its kept tokens are others than those of a file that was cut."""
    text = "".join(f"line {number}\n" for number in range(110_000))
    (tmp_path / "long.txt").write_text(text)
    folders = set()
    for seq_len, longest in (
        (16, PIECE),
        (4096, PIECE),
        (len(text) // 8 - 10_000, len(text) - 80_000),
        (len(text) // 8 + 1, len(text)),
    ):
        source = open_source(
            request_for(str(tmp_path), seq_len=seq_len, sizes=Sizes()),
            Domain("", str(tmp_path)),
            PATIENCE,
        )
        pieces = texts_from(source)
        assert "".join(pieces) == text and longest - 20 < max(map(len, pieces)) <= longest
        folders.add(
            chunks.open_cache(source, stream.Encoder(BYTES, "pretrain", seq_len), "auto", SMALL)
        )
    assert len(folders) == 3


@pytest.mark.parametrize(
    "name, content, says",
    [
        (
            "a.jsonl",
            '{"text": "x"}\n[1, 2]\n',
            ["a.jsonl, row 2", "must be a JSON object, not a list"],
        ),
        ("a.jsonl", '{"text": "x"}\n{"text": "y"}\n{"text": \n', ["a.jsonl, row 3", "is not JSON"]),
        (
            "a.jsonl",
            '{"text": "x"}\n{"body": "x"}\n',
            ["a.jsonl, row 2", "has no column 'text', only 'body'", "--text_field"],
        ),
        (
            "a.jsonl",
            '{"text": 5}\n',
            ["a.jsonl, row 1", "must be text (--text_field), not int '5'"],
        ),
        ("a.parquet", "no parquet", ["a.parquet", "cannot be read"]),
        ("a.txt", " \n", ["contains no document to train on"]),
        ("a.jsonl", "", ["a.jsonl", "is empty", "--bad_rows skip"]),
        (
            "a.jsonl",
            b'{"text": "caf\xe9"}\n',
            ["a.jsonl, row 1", "is not UTF-8: byte 0xe9 at 13", "iconv"],
        ),
        ("a.txt", b"caf\xe9 \xff", ["a.txt, row 1", "is not UTF-8: byte 0xe9 at 3"]),
    ],
)
def test_bad_rows_are_named(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with (
        pytest.raises(Refusal) as refused,
        contextlib.closing(
            open_stream(request_for(str(tmp_path)), BYTES, rank=DataRank(1, 0))
        ) as own,
    ):
        next(own)
    assert all(part in str(refused.value) for part in says), str(refused.value)


def test_bad_columns_and_broken_files_are_named(tmp_path, corpora):
    with pytest.raises(
        Refusal, match=r"[01].parquet, row group \d: has no column 'body', only 'text', 'n'"
    ):
        take(request_for(corpora["parquet"], text_field="body"), 1)
    whole = Path(corpora["parquet"], "0.parquet").read_bytes()
    middle = len(whole) // 2
    (tmp_path / "broken.parquet").write_bytes(
        whole[: middle - 200] + b"\xff" * 400 + whole[middle + 200 :]
    )
    with pytest.raises(Refusal, match=r"broken.parquet, row group \d, row \d+: cannot be read"):
        take(request_for(str(tmp_path / "broken.parquet")), 40)
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00garbage")
    with pytest.raises(Refusal, match=r"cut.jsonl.gz, row 1: cannot be read"):
        take(request_for(str(tmp_path / "cut.jsonl.gz")), 1)


@pytest.mark.parametrize(
    "dataset, fields, says",
    [
        ("no/such/*.jsonl", {}, ["--dataset no/such/*.jsonl", "the file does not exist"]),
        ("./gone.txt,./gone2.txt", {}, ["gone.txt", "gone2.txt"]),
        ("gone.jsonl", {}, ["the file does not exist"]),
        ("{folder}", {}, ["several formats: lines, text"]),
        ("{folder}/c.bin", {}, ["the file format is not clear from the ending"]),
        (
            "{folder}/tables",
            {},
            ["tables: contains no supported files (.txt, ", ".parquet", "Convert its files"],
        ),
        ("{folder}/a.txt", {"task": "sft"}, ["task sft requires chats"]),
        (
            "org/name",
            {},
            [
                "--dataset org/name",
                "hub cannot be reached",
                "https://huggingface.co/datasets/org/name",
            ],
        ),
    ],
)
def test_missing_corpus_is_refused_at_once(tmp_path, dataset, fields, says):
    (tmp_path / "tables").mkdir()
    for name in ("a.txt", "b.jsonl", "c.bin", "tables/d.xml"):
        (tmp_path / name).write_text("x")
    with pytest.raises(Refusal) as refused:
        open_stream(
            request_for(dataset.format(folder=tmp_path), **fields), BYTES, rank=DataRank(1, 0)
        )
    assert all(part in str(refused.value) for part in says), str(refused.value)


def test_fingerprint_follows_the_content(corpora, tmp_path):
    def fingerprint(request: Request) -> str:
        return open_source(request, Domain("", request.dataset), PATIENCE).fingerprint

    shutil.copytree(corpora["lines"], tmp_path / "copy")
    before = fingerprint(request_for(corpora["lines"]))
    assert (
        fingerprint(request_for(str(tmp_path / "copy")))
        == before
        == fingerprint(request_for(str(tmp_path / "copy"), seed=3, seq_len=99))
    )
    assert fingerprint(request_for(corpora["lines"], text_field="id")) != before
    path = tmp_path / "copy" / "1.jsonl"
    content = path.read_text()
    path.write_text(content.replace("a", "b", 1))
    assert fingerprint(request_for(str(tmp_path / "copy"))) != before
    path.write_text(content)
    path.rename(path.with_name("4.jsonl"))
    assert fingerprint(request_for(str(tmp_path / "copy"))) != before


# The thread
# --------------------------------------------------------------------------------------------------


def test_a_batch_that_is_kept_takes_no_memory_of_the_others():
    buffers: deque[np.ndarray] = deque()
    kept = lanes._buffer(buffers, (2,))
    for _ in range(300):
        held = [lanes._buffer(buffers, (2,)) for _ in range(3)]
        assert len({id(buffer) for buffer in [kept, *held]}) == 4
        del held
    assert len(buffers) == 4


def test_close_leaves_no_thread(corpora):
    before = set(threading.enumerate())
    own = open_stream(request_for(corpora["parquet"]), BYTES, rank=DataRank(1, 0))
    next(own)
    time.sleep(0.1)  # the queue is full, the thread waits
    own.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="closed"):
        next(own)
    own.close()


def test_error_comes_after_the_good_steps_is_seen_one_step_early_and_stays(tmp_path):
    """The steps made before the bad row are handed out, then `next` raises, every time."""
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
        with pytest.raises(Refusal, match=r"a.jsonl, from byte \d+, row \d+: is not JSON"):
            next(own)
    own.close()
    assert set(threading.enumerate()) == before


# Hub data sets (a folder stands in for a repository: `datasets` opens both with the same call)
# ----------------------


def test_hub_data_set_is_streamed(corpora):
    source = sources._hub_source(Domain("", corpora["parquet"]), "train", "", WANTED, PATIENCE)
    assert (
        texts_from(source) == words(300, 0)
        and len(source.parts) == 2
        and source.groups(0) == 4
        and "/train@" in source.fingerprint
    )


@pytest.mark.parametrize(
    "subset, split, says",
    [("", "tests", ["tests", "train"]), ("no-such", "train", ["no-such", "default"])],
)
def test_wrong_split_or_subset_is_refused(corpora, subset, split, says):
    with pytest.raises(Refusal) as refused:
        sources._hub_source(Domain("", corpora["parquet"], subset), split, "", WANTED, PATIENCE)
    assert all(part in str(refused.value) for part in says), str(refused.value)


def test_missing_subset_is_refused_with_the_choice(tmp_path, corpora):
    shutil.copytree(corpora["parquet"], tmp_path / "repository")
    card = (
        "---\nconfigs:\n- config_name: first\n  data_files: 0.parquet\n- config_name: second\n "
        " data_files: 1.parquet\n---\n"
    )
    (tmp_path / "repository" / "README.md").write_text(card)
    with pytest.raises(Refusal, match=r"'first', 'second'"):
        sources._hub_source(Domain("", str(tmp_path / "repository")), "train", "", WANTED, PATIENCE)
    assert (
        len(
            sources._hub_source(
                Domain("", str(tmp_path / "repository"), "second"), "train", "", WANTED, PATIENCE
            ).parts
        )
        == 1
    )


def test_a_data_set_with_a_script_is_refused(tmp_path):
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").write_text("")
    with pytest.raises(
        Refusal, match=r"--dataset .*scripted: Dataset scripts are no longer supported"
    ):
        sources._hub_source(Domain("", str(tmp_path / "scripted")), "train", "", WANTED, PATIENCE)


def test_two_threads_may_parse_at_once() -> None:
    """The training stream and the evaluation read `builtin` at the same time; a garbage collection
    amid `ast.parse` changes threads.
    """
    from recipekit.data.sources import _docstring_chats

    programs = [
        file.read_text() for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:6]
    ]
    failed: list[BaseException] = []

    def parse() -> None:
        try:
            for source in programs:
                _docstring_chats(source, "here")
        except SystemError as error:
            failed.append(error)

    def change_threads(*_: object) -> None:
        time.sleep(0.0001)

    before = gc.get_threshold()
    gc.set_threshold(100)
    gc.callbacks.append(change_threads)
    threads = [threading.Thread(target=parse) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.callbacks.remove(change_threads)
        gc.set_threshold(*before)
    assert not failed


def test_a_long_document_is_told_before_its_tokens_are_made(tmp_path: Path) -> None:
    rows = [{"text": "short"}, {"text": "long " * 1000}, {"text": "short"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said: list[str] = []
    request = request_for(
        str(tmp_path / "a.jsonl"),
        token_cache="off",
        sizes=dataclasses.replace(SMALL, long_text=3000),
    )
    [reader] = stream.open_corpus(request, BYTES, said.append).readers()
    assert said == []
    next(reader.chunks(0, 0, 0))
    assert said == [f"tokenising {tmp_path}/a.jsonl, row 2: 5,005 characters of text"]
    next(
        dataclasses.replace(reader, sizes=dataclasses.replace(SMALL, long_text=10_000)).chunks(
            0, 0, 0
        )
    )
    assert len(said) == 1


def test_a_wait_for_the_tokens_of_another_process_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a word"}\n' * 5)
    said: list[str] = []
    request = request_for(str(tmp_path / "a.jsonl"), token_cache=str(tmp_path / "kept"))
    [reader] = stream.open_corpus(request, BYTES, said.append).readers()
    reader = dataclasses.replace(reader, patient=0.1)
    assert reader.cache is not None
    with (reader.cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reading = threading.Thread(target=lambda: next(reader.chunks(0, 0, 0)))
        reading.start()
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    reading.join(30)
    assert said == [
        f"waiting for the tokens of {tmp_path}/a.jsonl, row 1, which another process of this host"
        " makes"
    ]
