"""The global stream: its order, its state, exact resumes, and batch ramps."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from recipekit.data import batching, blocks, chunks, stream
from recipekit.data.batching import DataRank
from recipekit.data.encode import ChatCounts
from recipekit.data.request import Request
from recipekit.data.stream import open_stream
from recipekit.data.stream_state import StreamMismatch, merge_states, roll_batch_hash
from recipekit.spec.errors import ConfigError
from token_streams import (
    BYTES,
    END,
    PAD,
    SEQ_LEN,
    SMALL,
    pieces_of,
    request_for,
    take,
)

pytestmark = pytest.mark.usefixtures("own_cache")


KINDS = [
    ("lines", "pretrain"),
    ("parquet", "pretrain"),
    ("arrow", "pretrain"),
    ("tokens", "pretrain"),
    ("text", "pretrain"),
    ("chats", "sft"),
    ("mixture", "pretrain"),
]


def of_kind(corpora: dict[str, str], kind: str, task: str, **fields) -> Request:
    return request_for(
        corpora.get(kind, kind),
        task=task,
        **({"seq_len": 64 if task == "sft" else SEQ_LEN} | fields),
    )


def take_steps(
    request: Request, sizes: list[int], dp: int = 1, state: dict | None = None
) -> tuple[list[np.ndarray], list[dict]]:
    """Read one step for each number in `sizes`, which are the expected numbers of rows.

    For each step, return an array (3, rows, seq_len) with all ranks' ids, labels and positions, and
    the merged states.
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


@pytest.mark.parametrize("kind, task", [*KINDS, ("builtin", "pretrain")])
def test_order_does_not_depend_on_the_ranks(corpora, kind, task):
    """50 global batches have the same bytes for every divisor of the global batch.

    Neither the micro-batch nor the token cache changes the bytes.
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
    """A corpus of ten files with ten row groups each.

    Each group is one chunk that contains its own position.
    """

    source = SimpleNamespace(parts=range(10))

    def groups(self, part: int) -> int:
        return 10

    def chunks(self, part: int, group: int, row: int) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(
            part=part, group=group, row=1, bad=0, counts=ChatCounts(), rows=1, empty=0
        )


def test_files_and_row_groups_have_another_order_in_each_epoch_and_for_each_seed():
    orders = [
        [
            (chunk.part, chunk.group)
            for _, chunk in blocks._epoch_chunks(Shards(), seed, blocks.StreamPosition(epoch=epoch))
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


@pytest.fixture(scope="module")
def uninterrupted(corpora) -> dict[tuple[str, str], np.ndarray]:
    return {(kind, task): take(of_kind(corpora, kind, task), 100)[0] for kind, task in KINDS}


# No shrink phase, which would take minutes.
@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_resume_is_exact_at_any_point_any_number_of_times(corpora, uninterrupted, draw):
    """Runs are split into segments of random length, on 1 to 4 ranks, over several epochs.

    Length 0 means that the state is saved immediately after a resume.
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
    """The number of rows that a resume reads does not depend on its position in the epoch."""
    request = request_for(corpora[kind], token_cache="off")
    read: list[int] = []
    original = chunks.ChunkReader._encoded

    def counted(self, row, rows):
        chunk = original(self, row, rows)
        read.append(chunk.row - row)
        return chunk

    monkeypatch.setattr(chunks.ChunkReader, "_encoded", counted)
    costs = []
    for steps in (1, 20, 40, 55):
        _, state = take(request, steps)
        read.clear()
        place = blocks.StreamPosition(**state["domains"][""]["place"])
        [reader] = stream.open_corpus(request, BYTES).readers()
        next(
            blocks.iter_blocks(
                reader,
                request.seed,
                SMALL.tokens_of_block(SEQ_LEN),
                partial(blocks.pack_chunks, SEQ_LEN, PAD),
                place,
            )
        )
        costs.append(sum(read))
    # At most three row groups, because a block has about 25 documents, and pre-tokenized rows are
    # read 40 at a time.
    assert max(costs) <= 120, costs


def test_ten_thousand_row_groups_start_at_once(tmp_path, monkeypatch):
    """The first batch may read the footer of only one file.

    Measured: 0.4 s to the first batch on two busy cores.
    """
    ids = pa.array([list(range(20))] * 1000, pa.list_(pa.int32()))
    for number in range(10):
        pq.write_table(pa.table({"ids": ids}), tmp_path / f"{number}.parquet", row_group_size=1)
    opened: list[int] = []
    original = chunks.ChunkReader.chunks

    def counted(self, part, group, row):
        opened.append(part)
        return original(self, part, group, row)

    monkeypatch.setattr(chunks.ChunkReader, "chunks", counted)
    request = request_for(str(tmp_path), text_field="ids")
    with contextlib.closing(open_stream(request, BYTES, rank=DataRank(1, 0))) as own:
        assert own.error_ahead() is None
    assert len(set(opened)) <= 2


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
    with pytest.raises(ConfigError) as refused:
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
    assert len({roll_batch_hash(0, batches) for batches in given_out}) == len(given_out)
    assert roll_batch_hash(roll_batch_hash(0, [batch]), [other]) == roll_batch_hash(
        0, [batch, other]
    ), "it goes on from step to step"


@pytest.mark.parametrize(
    ("kind", "task"),
    [("lines", "pretrain"), ("tokens", "pretrain"), ("chats", "sft"), ("mixture", "pretrain")],
)
def test_a_ramp_takes_the_rows_of_the_stream_in_their_order(corpora, kind, task):
    """A batch ramp changes only how the rows are grouped into steps.

    A resume after any step, on a different number of ranks, continues with the next row.
    """
    plain = of_kind(corpora, kind, task)
    ramp = dataclasses.replace(plain, batch_ramp="3:24, 5:36")
    sizes = [12, 12, 24, 24, 36, 36]  # 144 rows, which are 12 steps without a ramp
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
    """A resume may change only the part of a ramp that the run has not reached.

    The position stays the same. Before the ramp's first change, the stream equals a stream without
    a ramp.
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
        with pytest.raises(StreamMismatch) as refused:
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
        StreamMismatch, match=r"batch_ramp = \[\[2, 24\]\]: the saved data stream has \[\]"
    ):
        open_stream(
            dataclasses.replace(plain, batch_ramp="2:24"),
            BYTES,
            rank=DataRank(1, 0),
            state=without[1],
        )


LEFT_OUT = [
    ({"leave_out": "3:4"}, [12] * 6, 4),
    ({"leave_out": "3:1, 3:3"}, [12] * 6, 4),
    # The batches of steps 3, 4 and 5 are passed over.
    ({"leave_out": "3:3", "batch_ramp": "4:24, 6:36"}, [12, 12, 12, 24, 24, 36], 3),
]


@pytest.mark.parametrize(("fields", "sizes", "left"), LEFT_OUT)
@pytest.mark.parametrize(
    ("kind", "task"),
    [("lines", "pretrain"), ("tokens", "pretrain"), ("chats", "sft"), ("mixture", "pretrain")],
)
def test_batches_left_out_are_those_of_the_next_steps(corpora, kind, task, fields, sizes, left):
    """The stream passes over what steps 3, 4, ... of the plain stream take.

    A resume after any step, on a different number of ranks, continues with the next row.
    """
    request = of_kind(corpora, kind, task, micro_batch=3, **fields)
    plain = dataclasses.replace(request, leave_out="")
    whole, states = take_steps(plain, [request.ramp.rows(step) for step in range(1, left + 3)])
    begun = {**states[-1], "step": 2, "identity": states[1]["identity"]}
    expected, ends = take_steps(plain, sizes[2:], state=begun)
    expected = [*whole[:2], *expected]
    for dp, after in ((1, 1), (2, 2), (4, 3)):
        found, own = take_steps(request, sizes, dp)
        for number, rows in enumerate(found):
            np.testing.assert_array_equal(rows, expected[number])
        assert own[-1]["domains"] == ends[-1]["domains"] and own[-1]["step"] == 6
        again, _ = take_steps(request, sizes[after:], 3 - min(dp, 2), own[after - 1])
        for rows, same in zip(again, expected[after:], strict=True):
            np.testing.assert_array_equal(rows, same)


def test_batches_left_out_have_the_weights_of_their_steps(corpora):
    """A weight that changes while batches are passed over changes back for the step itself."""
    mixture = corpora["mixture"].replace("@50", "@50|5:9", 1)
    assert "|5:9" in mixture
    request = of_kind({"mixture": mixture}, "mixture", "pretrain", leave_out="3:4", micro_batch=3)
    plain = dataclasses.replace(request, leave_out="")
    _, states = take_steps(plain, [12] * 6)
    expected, _ = take_steps(plain, [12] * 4, state={**states[-1], "step": 2})
    found, _ = take_steps(request, [12] * 6)
    np.testing.assert_array_equal(np.stack(found[2:]), np.stack(expected))


def test_batches_left_out_are_part_of_the_stream_from_their_step_on(corpora):
    plain = of_kind(corpora, "lines", "pretrain")
    request = dataclasses.replace(plain, leave_out="3:4")
    _, states = take_steps(request, [12] * 4)
    _, without = take_steps(plain, [12] * 3)
    assert states[1] == without[1]
    assert states[2]["identity"] == states[1]["identity"] | {"leave_out": [[3, 4]]}
    take_steps(dataclasses.replace(plain, leave_out="3:4, 5:2"), [12], state=states[3])
    take_steps(dataclasses.replace(plain, leave_out="3:9"), [12], state=without[1])
    for state, leave_out, rule in (
        (states[3], "", r"leave_out = \[\]: the saved data stream has \[\[3, 4\]\]"),
        (states[3], "3:5", r"leave_out = \[\[3, 5\]\]: the saved data stream has"),
        (without[2], "3:4", r"leave_out = \[\[3, 4\]\]: the saved data stream has \[\]"),
    ):
        other = dataclasses.replace(plain, leave_out=leave_out)
        with pytest.raises(StreamMismatch, match=rule):
            open_stream(other, BYTES, rank=DataRank(1, 0), state=state)


def test_passing_over_batches_is_reported_and_ends_with_the_stream(corpora, monkeypatch):
    monkeypatch.setattr(batching, "SAY_PASSED_EVERY", 0.0)
    request = of_kind(corpora, "lines", "pretrain", leave_out="1:1000000")
    said: list[str] = []
    own = open_stream(request, BYTES, rank=DataRank(1, 0), say=said.append)
    while not said:
        time.sleep(0.01)
    own.close()
    assert said[0] == (
        "data: 1 of 1,000,000 global batches passed over, which are left out before step 1"
    )


def test_a_ramp_that_does_not_divide_is_refused_by_the_stream(corpora):
    with pytest.raises(ConfigError) as refused:
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
        ConfigError,
        match=(
            r"global_batch = 12: is not divisible by dp\(5\) \* micro_batch\(1\)\. Use"
            r" --global_batch 10"
        ),
    ):
        open_stream(request_for(corpora["lines"]), BYTES, rank=DataRank(5, 0))


def test_chats_without_an_answer_within_the_row_are_refused(corpora):
    for limit, says in (
        (50, r"\d+ consecutive documents contain no token to train on"),
        (500, "90 chats have no answer to train on"),
    ):  # within an epoch, and at its end
        sizes = dataclasses.replace(SMALL, barren_documents=limit)
        with pytest.raises(ConfigError, match=says):
            take(request_for(corpora["chats"], task="sft", seq_len=16, sizes=sizes), 1)
