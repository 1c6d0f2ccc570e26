"""Chat counts: sums, warning thresholds, reports, and how a stream's state stores them."""

import json
from datetime import date
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import TOOLS, assistant, published_tokenizer, template_tokenizer, tool, user
from recipekit.data.blocks import StreamPosition, iter_blocks
from recipekit.data.chat_rows import OPENAI, UnknownRole
from recipekit.data.chunks import ChunkReader
from recipekit.data.encode import ChatCounts, Encoder, answer_token_mask
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import Request, Sizes
from recipekit.data.stream import open_corpus
from recipekit.runtime.metrics import PEAK_MEMORY, StepTimes, metrics_of
from recipekit.runtime.rank_times import NoRankClock
from recipekit.spec.errors import ConfigError
from recipekit.spec.mesh import Mesh
from recipekit.spec.task import IGNORE
from recipekit.spec.task_specs import TASKS
from recipekit.watch.throughput import Goodput

DAY = date(2026, 3, 4)
PAIR = [user("q"), assistant("a")]  # 23 tokens with bytes and ChatML; the last three have labels


def test_counts_are_added_and_names_are_sorted():
    one, other = (
        ChatCounts(1, 2, 3, 4, 5, ("c", "a"), ("x",)),
        ChatCounts(10, 20, 30, 40, 50, ("b", "a"), ("z", "y")),
    )
    assert one + other == (11, 22, 33, 44, 55, ("a", "b", "c"), ("x", "y", "z")) == other + one
    assert (
        one.numbers == (1, 2, 3, 4, 5)
        and ChatCounts(truncated=2, answer_characters=3).numbers == () == ChatCounts().numbers
    )


@pytest.mark.parametrize(
    "counts, expected",
    [
        (
            ChatCounts(1200, 1100, 30, 400, 50, ("A", "B")),
            [
                "chats: of the first 1,200 rows, read as A and B, 1,100 are longer than seq_len ="
                " 64 and cut, 30 have no answer to train on; the chat template leaves out 12.5% of"
                " the answers' text"
            ],
        ),
        (
            ChatCounts(3, forms=("A",), keys=("k", "l")),
            [
                (
                    "chats: of the first 3 rows, read as A, 0 are longer than seq_len = 64 and cut,"
                    " 0 have no answer to train on; the chat template leaves out 0.0% of the"
                    " answers' text"
                ),
                "chats: neither training nor the chat template reads these keys: k, l",
            ],
        ),
    ],
)
def test_lines_about_chats(counts, expected):
    assert counts.lines(64) == expected


WHERE = "--dataset, the first 11 rows: "
NEEDED = (
    "an answer must have the role assistant, must not be excluded by weight or train, and must"
    " begin within --seq_len tokens"
)
CUT = (
    "chats are longer than seq_len = 64, so their ends are cut off. Use a longer --seq_len, or"
    " train on the rest with --bad_rows skip"
)
NONE = (
    f"chats have no answer to train on. Change the rows ({NEEDED}), or train on the rest with"
    " --bad_rows skip"
)
DROPPED = (
    "of the answers' text (thoughts, calls or content). Use a tokenizer whose chat template"
    " includes it, or train on the rest with --bad_rows skip"
)


@pytest.mark.parametrize(
    "counts, expected",
    [
        (ChatCounts(10, 5, 5, 8, 4), []),
        (ChatCounts(), []),
        (ChatCounts(11, 6, 5, 8, 4), [f"6 {CUT}"]),
        (ChatCounts(11, 5, 6, 8, 4), [f"6 {NONE}"]),
        (ChatCounts(11, 5, 5, 8, 5), [f"the chat template leaves out 62% {DROPPED}"]),
        (
            ChatCounts(11, 7, 8, 4, 3),
            [f"7 {CUT}", f"8 {NONE}", f"the chat template leaves out 75% {DROPPED}"],
        ),
    ],
)
def test_problems_begin_above_half(counts, expected):
    assert [str(ConfigError([problem])) for problem in counts.problems(64)] == [
        WHERE + text for text in expected
    ]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    "counts, is_bad",
    [
        (ChatCounts(4, 3, forms=("A",)), True),
        (ChatCounts(4, 2, forms=("A",)), False),
        (ChatCounts(0, 3), None),
    ],
)
def test_lines_are_said_and_problems_refused(strict, skip, counts, is_bad):
    said: list[str] = []
    encoder: Any = SimpleNamespace(seq_len=64)
    reader = ChunkReader(
        SimpleNamespace(), encoder, skip, Sizes(), None, strict=strict, say=said.append
    )  # type: ignore[arg-type]
    if is_bad and strict and not skip:
        with pytest.raises(ConfigError, match="3 chats are longer than seq_len = 64"):
            reader.report(counts)
    else:
        reader.report(counts)
    assert said == ([] if is_bad is None else counts.lines(64))


# Encoding
# --------------------------------------------------------------------------------------------------

# A chat, and the counts (its tokens, cut, barren, said, dropped) for rows of 23 tokens.
CHATS: list[tuple[Any, tuple[int, int, int, int, int]]] = [
    (PAIR, (23, 0, 0, 1, 0)),
    ([user("q"), assistant("abc")], (23, 1, 0, 3, 0)),
    ([user("q" * 20), assistant("ab")], (0, 1, 1, 2, 0)),
    ([user("q")], (0, 0, 1, 0, 0)),
    ({"messages": [user("q"), assistant("a", weight=0)], "form": "B"}, (0, 0, 1, 0, 0)),
    ([user("q"), assistant("a", reasoning_content="thought")], (23, 0, 0, 8, 7)),
    (
        {
            "messages": [user("q") | {"loss": 1}, assistant(" b ")],
            "tools": [{"name": "f"}],
            "form": "A",
        },
        (23, 1, 0, 1, 0),
    ),
]


def test_chats_are_counted():
    encoder = Encoder(byte_tokenizer(), "sft", 23)
    total = ChatCounts()
    for chat, (tokens, cut, barren, said, dropped) in CHATS:
        ((ids, labels),), counts = encoder.encode_with_counts([(chat, "row 1")])
        assert len(ids) == len(labels) == tokens and counts[:5] == (1, cut, barren, said, dropped)
        total += counts
    encoded, counts = encoder.encode_with_counts([(chat, "row") for chat, _ in CHATS])
    assert (
        counts
        == total
        == ChatCounts(7, 3, 3, 15, 7, ("A", "B", OPENAI), ("loss", "tools (a column)"))
    )
    assert [len(ids) for ids, _ in encoded] == [23, 23, 0, 0, 0, 23, 23]
    assert [label != IGNORE for label in encoded[0][1]] == [False] * 19 + [True] * 3 + [False]
    assert encoder.encode_with_counts([]) == ([], ChatCounts())
    assert (
        Encoder(byte_tokenizer(), "pretrain", 23).encode_with_counts([("text", "row 1")])[1]
        == ChatCounts()
        == Encoder(byte_tokenizer(True), "masked_lm", 23).encode_with_counts([("text", "row 1")])[1]
    )


@pytest.mark.parametrize(
    "offsets, answers, expected",
    [
        ([(0, 2), (2, 4), (4, 6)], [(2, 4)], [0, 1, 0]),
        ([(0, 2), (2, 4), (4, 6)], [(1, 3)], [1, 1, 0]),
        ([(0, 2), (2, 4), (4, 6)], [(3, 6)], [0, 1, 1]),
        ([(0, 2), (2, 4), (4, 6)], [(0, 1), (5, 6)], [1, 0, 1]),
        ([(0, 2), (2, 2), (2, 4)], [(2, 2)], [0, 0, 0]),
        ([(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 1), (1, 2), (3, 9)], [1, 1, 0, 1]),
        ([(0, 1), (1, 2)], [], [0, 0]),
    ],
)
def test_tokens_with_a_character_of_an_answer_are_learned(offsets, answers, expected):
    assert answer_token_mask(offsets, answers).tolist() == [bool(wanted) for wanted in expected]


def test_roles_of_all_rows_are_named_with_the_first_unknown_one():
    rows = [
        [user("q"), tool("t")],
        [user("q"), {"role": "bot", "content": "a"}],
        [{"role": "critic", "content": "c"}],
        PAIR,
    ]
    with pytest.raises(UnknownRole) as refused:
        Encoder(byte_tokenizer(), "sft", 64).encode_with_counts(
            [(chat, f"row {number}") for number, chat in enumerate(rows, 1)]
        )
    assert (refused.value.place, refused.value.role) == ("row 2", "bot")
    assert refused.value.met == {"user", "tool", "bot", "critic", "assistant"}


@pytest.mark.parametrize(
    "source, chat, said, dropped",
    [
        # two, three
        (
            "{{ m.content.split('\n')[0] }};four",
            [user("q"), assistant("one\n two \n<b>three</b>\n</i>four")],
            31,
            8,
        ),
        ("{{ m.content }}", [user("q"), assistant(" a\n b ")], 4, 0),
        (
            "{% generation %}{{ m.content }}{% endgeneration %}",
            [user("q"), assistant("a", reasoning="thought")],
            8,
            7,
        ),
        (
            "{% generation %}{{ m.content }}{% endgeneration %}",
            [assistant("a", train=False, reasoning="thought"), assistant("bc")],
            2,
            0,
        ),
        (
            "{{ m.content }}",
            [user("q") | {"reasoning": "thought"}, tool("t"), assistant("a")],
            1,
            0,
        ),
    ],
)
def test_lost_characters_of_answers(source, chat, said, dropped):
    tokenizer = template_tokenizer(
        "{% for m in messages %}<{{ m.role }}>" + source + ";\n{% endfor %}"
    )
    _, counts = Encoder(tokenizer, "sft", 1000).encode_with_counts([(chat, "row 1")])
    assert (counts.answer_characters, counts.dropped_characters) == (said, dropped)


def test_what_an_encoder_depends_on():
    plain, dated, undated = (
        byte_tokenizer(),
        published_tokenizer("Granite"),
        published_tokenizer("Qwen3"),
    )
    assert [
        Encoder(tokenizer, task, 64, day).date
        for tokenizer, task, day in (
            (dated, "sft", DAY),
            (dated, "sft", None),
            (dated, "pretrain", DAY),
            (undated, "sft", DAY),
        )
    ] == ["2026-03-04", "", "", ""]
    assert [Encoder(plain, task, 64).longest for task in ("sft", "masked_lm", "pretrain")] == [
        64,
        64,
        0,
    ]
    plain.num_embeddings = 260
    assert (Encoder(plain, "sft", 64).vocabulary, Encoder(dated, "sft", 64).vocabulary) == (
        260,
        len(dated),
    )


def test_a_tool_column_that_the_template_reads_is_no_unread_key():
    chat = {"messages": PAIR, "tools": TOOLS, "form": "A"}
    assert [
        Encoder(tokenizer, "sft", 999).encode_with_counts([(chat, "row")])[1].keys
        for tokenizer in (byte_tokenizer(), published_tokenizer("Qwen2.5"))
    ] == [("tools (a column)",), ()]


# Chunks and blocks
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["template", "token"])
def test_chats_beside_a_broken_one_are_counted(tmp_path, wrong):
    """The template or the vocabulary rejects one of five chats. Cached tokens keep their counts."""
    tokenizer = published_tokenizer("Qwen2.5")
    tokenizer.num_embeddings = len(tokenizer) - 1  # one too few: </tool_response> has no embedding
    chats = [[user(f"{n}?"), assistant("a" * (n + 1))] for n in range(5)]
    chats[3] = [
        user("3?"),
        assistant("", "no JSON") if wrong == "template" else assistant("</tool_response>"),
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    )
    request = Request(
        dataset=str(tmp_path / "rows.jsonl"),
        task="sft",
        seq_len=44,
        bad_rows="skip",
        token_cache=str(tmp_path / "kept"),
    )
    found = []
    for _ in range(2):
        (reader,) = open_corpus(request, tokenizer, say=lambda said: None).readers()
        found.append(
            [
                (len(chunk.lengths), chunk.bad, chunk.barren, chunk.counts, chunk.row, chunk.last)
                for chunk in reader.chunks(0, 0, 0)
            ]
        )
    counts = ChatCounts(4, 2, 0, 1 + 2 + 3 + 5, 0, (OPENAI,))
    assert found[0][0][:4] == (4, 1, 0, counts) and found[0] == found[1]


START = StreamPosition()


class Chunks:
    """A fake reader with two parts. Each part has two groups of two chunks.

    Each chunk contains one document of ten tokens. If `broken` is set, part 1 cannot be read.
    """

    def __init__(self, empty: bool = False, broken: bool = False):
        self.source, self.sizes, self.encoder = (
            SimpleNamespace(parts=("a", "b")),
            Sizes(),
            SimpleNamespace(chats=True),
        )
        self.empty, self.broken = empty, broken
        self.read: list[ChatCounts] = []
        self.reported: list[ChatCounts] = []
        self.report = lambda counts, *_, **__: self.reported.append(counts)

    def chunk(self, counts: ChatCounts, row: int, bad: int) -> Any:
        lengths = np.array([] if self.empty or not counts.rows else [10], np.int64)
        return SimpleNamespace(
            lengths=lengths,
            row=row,
            bad=bad,
            barren=int(self.empty),
            counts=counts,
            rows=1,
            empty=0,
        )

    def groups(self, part: int) -> Any:
        return self.chunk(ChatCounts(), 0, 1) if self.broken and part else 2

    def chunks(self, part: int, group: int, row: int) -> Any:
        for at in range(row, 2):
            counts = ChatCounts(1 + 2 * part, group, at, 10, part + group + at)
            self.read.append(counts)
            yield self.chunk(counts, at + 1, at)


def taken(
    reader: Chunks, number: int, place: StreamPosition = START, limit: int = 10
) -> list[tuple[StreamPosition, Any]]:
    stream = iter_blocks(reader, 5, limit, lambda held, seed, *key: (len(held), seed, key), place)
    return [next(stream) for _ in range(number)]


def test_numbers_of_chats_are_carried_from_chunk_to_chunk_and_epoch_to_epoch():
    reader = Chunks()
    found = taken(reader, 20)
    for number, (place, _) in enumerate(found):
        before = sum_of(reader.read[:number])
        assert place.lost == before.numbers and place.bad == before.barren
        assert (place.epoch, place.document) == (number // 8, 1)
    assert reader.reported == reader.read[:1]
    for number in range(19):
        place = found[number][0]
        again = Chunks()
        assert taken(again, 19 - number, place) == found[number + 1 :] and not again.reported


def test_blocks_of_several_chunks_carry_their_numbers():
    reader = Chunks()
    found = taken(reader, 4, limit=30)
    assert [held for _, (held, _, _) in found] == [3, 3, 2, 3] and reader.reported == [
        sum_of(reader.read[:3])
    ]
    assert found[1][0].lost == sum_of(reader.read[:5]).numbers
    assert found[2][0] == StreamPosition(epoch=1, bad=4, lost=sum_of(reader.read[:8]).numbers)
    assert [key for _, (_, _, key) in found] == [(0,) * 6, *(place.key for place, _ in found[:3])]


def sum_of(counts: list[ChatCounts]) -> ChatCounts:
    return sum(counts, ChatCounts())


def test_numbers_survive_a_part_that_cannot_be_read():
    reader = Chunks(broken=True)
    found = taken(reader, 9)
    assert found[-1][0].lost == sum_of(reader.read[:8]).numbers and found[-1][0].bad == 2 * 2 + 2
    again = Chunks(broken=True)
    assert taken(again, 4, found[4][0]) == found[5:]


def test_an_epoch_that_fills_no_block_is_reported_once():
    reader = Chunks()
    assert [place.epoch for place, _ in taken(reader, 2, limit=1000)] == [
        1,
        2,
    ] and reader.reported == [sum_of(reader.read[:8])]


@pytest.mark.parametrize("name", ["epoch", "part", "group", "row", "document", "bad"])
def test_a_stream_behind_its_beginning_reports_nothing(name):
    reader = Chunks()
    taken(reader, 12, StreamPosition(**{name: 1}))
    assert not reader.reported
    lost = (5, 4, 3, 2, 1)
    assert (
        taken(Chunks(), 1, StreamPosition(**{name: 1}, lost=lost))[0][0].lost[0] >= 5
        and StreamPosition(**{name: 1}, lost=lost).key == StreamPosition(**{name: 1}).key
    )


@pytest.mark.parametrize(
    "place, reads",
    [
        (StreamPosition(epoch=1, bad=3), 8),
        (StreamPosition(part=1), 12),
        (StreamPosition(group=1), 14),
        (StreamPosition(row=1), 15),
        (StreamPosition(document=1), 16),
    ],
)
def test_only_a_whole_epoch_without_documents_is_refused(place, reads):
    reader = Chunks(empty=True)
    with pytest.raises(ConfigError) as refused:
        taken(reader, 1, place)
    needed = (
        "Each chat needs a message of the role assistant that is not excluded by weight or train"
        " and begins within --seq_len tokens"
    )
    assert (
        str(refused.value)
        == f"--dataset: {reads} consecutive documents contain no token to train on. {needed}"
        and len(reader.read) == reads
    )


@pytest.mark.parametrize("task", ["sft", "pretrain"])
def test_metrics_hold_the_chats_that_all_domains_lost(task):
    recipe = SimpleNamespace(batch_ramp="", bad_rows="refuse")
    engine = SimpleNamespace(
        device=torch.device("cpu"), optimizer=SimpleNamespace(param_groups=[{"lr": 0.5}])
    )
    ready: Any = SimpleNamespace(
        plan=SimpleNamespace(
            recipe=recipe, mesh=Mesh(), last_step=9, command=SimpleNamespace(rank=0)
        ),
        engine=engine,
        state={"tokens": 7},
    )
    ready.engine.current_loss_scale = lambda: None
    ready.watch = SimpleNamespace(goodput=Goodput(0.0, 0.0))
    ready.rank_clock = NoRankClock()
    ready.epochs, ready.tracker = (
        SimpleNamespace(completed_epochs=lambda state: {}, report=lambda state, say: None),
        SimpleNamespace(say=print),
    )
    ready.task, ready.step_metrics, ready.flops, ready.peak_flops = (
        SimpleNamespace(spec=TASKS[task]),
        SimpleNamespace(by_domain=None),
        None,
        None,
    )
    result = {
        "loss": 1.0,
        "grad_norm": 2.0,
        "tokens": 6,
        "stop": 0,
        "means": {},
        "extra": {PEAK_MEMORY: [5]},
        "losses_of_ranks": [1.0],
    }
    state: Any = {
        "domains": {"a": {"lost": [10, 2, 1, 100, 25]}, "b": {}, "c": {"lost": [10, 1, 3, 150, 25]}}
    }
    found = metrics_of(ready, 3, result, state, StepTimes(2.0, 0.1), None)
    expected = {"rows_read": 20, "rows_cut": 3, "rows_without_target": 4, "answers_dropped": 0.2}
    assert {key: found[key] for key in expected if key in found} == (
        expected if task == "sft" else {}
    )
