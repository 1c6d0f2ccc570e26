"""Chat rows in the formats of published data sets, and the counts of cut and dropped text."""

import contextlib
import json
from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import assistant, published_tokenizer, user
from recipekit.data.batching import DataRank
from recipekit.data.chat_rows import parse_messages
from recipekit.data.chunks import open_cache
from recipekit.data.encode import Encoder
from recipekit.data.processors import byte_tokenizer
from recipekit.data.request import Request, Sizes
from recipekit.data.stream import open_corpus, open_stream
from recipekit.runtime.metrics import chats_lost
from recipekit.spec.errors import ConfigError
from recipekit.spec.run_folder import day_of_run
from recipekit.spec.task import IGNORE

NUMBERS = range(120)
CHATML = "<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{a}<|im_end|>\n"
SMALL = Sizes(chunk_rows=16, block_rows=8, block_tokens=(256, 256))
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": null}'}}


def written(folder, rows, kind="jsonl"):
    file = folder / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return str(file)


def read(dataset, tokenizer=None, steps=3, state=None, **changes):
    """Read some steps.

    Return (each document's full text and labelled text, state, messages).
    """
    fields = {
        "task": "sft",
        "seq_len": 64,
        "global_batch": 2,
        "micro_batch": 2,
        "token_cache": "off",
        "sizes": SMALL,
    }
    request, tokenizer = Request(dataset=dataset, **fields | changes), tokenizer or byte_tokenizer()
    found, said = [], []
    with contextlib.closing(
        open_stream(request, tokenizer, rank=DataRank(1, 0), say=said.append, state=state)
    ) as stream:
        for _ in range(steps):
            (batch,), state = next(stream)
            for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
                learned = tokenizer.decode(labels[labels != IGNORE])
                found.append((tokenizer.decode(ids).split("<|pad|>")[0], learned))
    return found, state, said


def part(text):
    return {"type": "text", "text": text}


FORMS = {
    "messages": lambda n: {"messages": [user(f"{n}?"), assistant(f"{n}!")]},
    "parts": lambda n: {
        "messages": [
            {"role": role, "content": [part(f"{n}{end}")]}
            for role, end in (("user", "?"), ("assistant", "!"))
        ]
    },
    "ShareGPT": lambda n: {
        "id": n,
        "conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": f"{n}!"}],
    },
    "Alpaca": lambda n: {"instruction": f"{n}?", "input": "", "output": f"{n}!"},
    "prompts": lambda n: {"prompt": f"{n}?", "completion": f"{n}!"},
    "completions": lambda n: {"prompt": [user(f"{n}?")], "completion": [assistant(f"{n}!")]},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_forms_of_rows_are_read_by_their_columns(tmp_path, form, kind):
    dataset = written(tmp_path, map(FORMS[form], NUMBERS), kind)
    found, _, said = read(dataset)
    for text, learned in found:
        for chat in text.split("<|im_start|>user\n")[1:]:
            number = chat.split("?")[0]
            assert chat == CHATML.format(q=f"{number}?", a=f"{number}!").removeprefix(
                "<|im_start|>user\n"
            )
            assert f"{number}!<|im_end|>\n" in learned
    assert (
        len(said) == 1
        and said[0].startswith("chats: of the first ")
        and {"parts": "messages", "completions": "prompts"}.get(form, form) in said[0]
    )


def test_input_of_an_instruction_and_system_of_a_row(tmp_path):
    rows = [{"instruction": f"{n}?", "input": "x", "output": "y", "system": "S"} for n in NUMBERS]
    ((text, _), *_), _, _ = read(written(tmp_path, rows), seq_len=128)
    assert (
        text.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n")
        and "?\nx<|im_end|>" in text
    )


@pytest.mark.parametrize("form", ["messages", "ShareGPT", "Alpaca", "prompts", "a named column"])
def test_system_column_begins_the_chat_in_every_form(tmp_path, form):
    """The system text is not repeated if the chat already begins with it."""
    named, changes = (
        form == "a named column",
        {"messages_field": "conversations"} if form == "a named column" else {},
    )
    rows = [FORMS["ShareGPT" if named else form](n) | {"system": "S"} for n in NUMBERS]
    if form == "messages":
        rows = [
            {
                "messages": [{"role": "system", "content": "S"}] * (n % 2) + row["messages"],
                "system": "S",
            }
            for n, row in enumerate(rows)
        ]
    found, _, _ = read(written(tmp_path, rows), seq_len=128, **changes)
    for text, _ in found:
        assert text.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n")
        assert text.count("system\n") == text.count("user\n")


def test_history_of_an_alpaca_row_is_read_as_earlier_turns(tmp_path):
    rows = [
        {"instruction": f"{n}?", "output": "y", "history": [["q1", "a1"], ["q2", "a2"]]}
        for n in NUMBERS
    ]
    ((text, learned), *_), _, _ = read(written(tmp_path, rows), seq_len=256)
    turns = "".join(CHATML.format(q=q, a=a) for q, a in (("q1", "a1"), ("q2", "a2")))
    assert text.startswith(turns) and learned.startswith(
        "a1<|im_end|>\na2<|im_end|>\ny<|im_end|>\n"
    )


def test_prompt_of_a_completion_is_not_learned(tmp_path):
    rows = [
        {
            "prompt": [user("q"), assistant("earlier"), user(f"{n}?")],
            "completion": [assistant("later")],
        }
        for n in NUMBERS
    ]
    found, _, _ = read(written(tmp_path, rows), seq_len=256)
    assert all(
        "earlier" in text and set(learned.split("<|im_end|>\n")) == {"later", ""}
        for text, learned in found
    )


@pytest.mark.parametrize("value", [0, False, ""])
def test_entries_of_tools_that_are_not_null_stay_in_tables(tmp_path, value):
    """In Parquet all tools share one set of keys, with null where a tool lacks a key."""
    tools = [{"name": "f", "default": value}, {"name": "g", "strict": True}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": value, "y": None}}}
    rows = [
        {
            "messages": [
                user(f"{n}?"),
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ],
            "tools": tools,
        }
        for n in NUMBERS
    ]
    ((text, learned), *_), _, _ = read(
        written(tmp_path, rows, "parquet"), published_tokenizer("Qwen2.5"), seq_len=512
    )
    assert f"# Tools\n{json.dumps(tools[0])}\n{json.dumps(tools[1])}<|im_end|>" in text
    assert f'"arguments": {json.dumps({"x": value})}}}' in learned


def test_nulls_of_tools_stay_in_lines_of_json(tmp_path):
    """In JSON lines, the user wrote a null explicitly, because each line has separate keys."""
    tools = [{"name": "f", "default": None}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": None, "y": 1}}}
    rows = [
        {
            "messages": [
                user(f"{n}?"),
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ],
            "tools": tools,
        }
        for n in NUMBERS
    ]
    ((text, learned), *_), _, _ = read(
        written(tmp_path, rows), published_tokenizer("Qwen2.5"), seq_len=512
    )
    assert f"# Tools\n{json.dumps(tools[0])}<|im_end|>" in text
    assert '"arguments": {"x": null, "y": 1}}' in learned


@pytest.mark.parametrize(
    "flag", [{"weight": 1}, {"training": True}, {"train": True}, {"weight": 0}]
)
def test_a_prompt_is_never_learned_whatever_it_says(tmp_path, flag):
    rows = [
        {
            "prompt": [user(f"{n}?"), assistant("earlier") | flag, user("q")],
            "completion": [assistant("later")],
        }
        for n in NUMBERS
    ]
    found, _, _ = read(written(tmp_path, rows), seq_len=256)
    assert all("earlier" not in learned and "later" in learned for _, learned in found)


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"prompt": "", "completion": "a"}, "a"),
        ({"prompt": [], "completion": [assistant("a")]}, "a"),
    ],
)
def test_a_completion_without_prompt_is_learned(tmp_path, row, expected):
    found, state, _ = read(written(tmp_path, [row | {"id": n} for n in NUMBERS]), seq_len=256)
    assert (
        all(set(learned.split("<|im_end|>\n")) == {expected, ""} for _, learned in found)
        and not state["domains"][""]["bad"]
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("as_text", [True, False])
def test_tools_of_a_row_reach_the_template(tmp_path, kind, as_text):
    tools = (
        [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        if kind == "jsonl"
        else [{"type": "function", "function": {"name": "f"}}]
    )
    rows = [
        {"messages": [user(f"{n}?"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]}
        for n in NUMBERS
    ]
    rows = [row | {"tools": json.dumps(tools) if as_text else tools} for row in rows]
    ((text, learned), *_), _, said = read(
        written(tmp_path, rows, kind), published_tokenizer("Qwen2.5"), seq_len=512
    )
    assert f"# Tools\n{json.dumps(tools[0])}<|im_end|>" in text
    assert learned.startswith(
        '<tool_call>\n{"name": "f", "arguments": {"x": null}}\n</tool_call><|im_end|>\n'
    )
    assert "leaves out 0.0%" in said[0] and len(said) == 1


@pytest.mark.parametrize(
    "row, says",
    [
        (
            {"messages": [user("q"), {"role": "bot", "content": "a"}]},
            "these rows use the roles bot, user",
        ),
        (
            {"messages": [user("q"), {"role": "model", "content": "a"}]},
            "an answer has the role assistant",
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "claude", "value": "a"}]},
            "the role 'claude'",
        ),
        ({"messages": [user("q"), assistant("a")], "tools": "f(x)"}, "its tools cannot be read"),
        (
            {"messages": [user("q"), assistant("a")], "tools": [1]},
            "its tools must be a list of tool descriptions",
        ),
        ({"instruction": "q", "output": 5}, "its output must be text, not int '5'"),
        (
            {"instruction": "q", "output": "a", "history": [["q"]]},
            "its history must be a list of pairs of texts: a question and its answer, not list",
        ),
        ({"instruction": "q", "output": "a", "history": [["q", 1]]}, "a list of pairs of texts"),
        (
            {"instruction": "q", "output": "a", "history": "q"},
            "its history must be a list of pairs of texts: a question and its answer, not str 'q'",
        ),
        ({"prompt": "q", "completion": [assistant("a")]}, "its prompt must be a list of messages"),
        ({"question": "q", "answer": "a"}, "has no column 'messages', only 'question', 'answer'"),
    ],
)
def test_unreadable_row_is_refused(tmp_path, row, says):
    with pytest.raises(ConfigError) as refused:
        read(written(tmp_path, [row] * 40))
    assert says in str(refused.value) and "rows.jsonl" in str(refused.value)


@pytest.mark.parametrize("form", ["messages", "ShareGPT", "Alpaca", "prompts"])
def test_pretrain_refuses_chats(tmp_path, form):
    with pytest.raises(ConfigError, match="Use --task sft, which reads such rows"):
        read(written(tmp_path, map(FORMS[form], NUMBERS)), task="pretrain")


@pytest.mark.parametrize(
    "speaker, role",
    [
        *(
            ("human", "user"),
            ("user", "user"),
            ("gpt", "assistant"),
            ("chatgpt", "assistant"),
            ("assistant", "assistant"),
        ),
        *(
            ("system", "system"),
            ("tool", "tool"),
            ("observation", "tool"),
            ("function_response", "tool"),
        ),
    ],
)
def test_speakers_of_sharegpt_have_their_roles(speaker, role):
    assert parse_messages([{"from": speaker, "value": "v"}], "row 1") == [
        {"role": role, "content": "v"}
    ]


def test_typed_column_wins(tmp_path):
    rows = [
        {"messages": [user("x"), assistant("wrong")], "talk": [user(f"{n}?"), assistant("right")]}
        for n in NUMBERS
    ]
    found, _, _ = read(written(tmp_path, rows), messages_field="talk")
    assert all("right" in learned and "wrong" not in learned for _, learned in found)
    with pytest.raises(ConfigError, match="has no column 'chat'"):
        read(written(tmp_path, rows), messages_field="chat")


# Counts
# --------------------------------------------------------------------------------------------------


def mixed(share):
    """Return chats; `share` percent are too long, and the same share has no answer."""
    long, none = [user("q"), assistant("a" * 99)], [user("q")]
    chats = [
        long if n % 100 < share else none if n % 100 < 2 * share else [user("q"), assistant("a")]
        for n in range(400)
    ]
    return [{"messages": [user(f"{n}"), *chat]} for n, chat in enumerate(chats)]


def test_what_is_not_learned_is_counted(tmp_path):
    dataset = written(tmp_path, mixed(20))
    _, state, said = read(dataset, steps=200, token_cache=str(tmp_path / "kept"))
    rows, cut, barren, letters, dropped = state["domains"][""]["lost"]
    assert (
        rows > 400
        and abs(cut - rows / 5) < 20
        and abs(barren - rows / 5) < 20
        and letters > 10 * rows
        and not dropped
    )
    assert len(said) == 1 and "are longer than seq_len = 64 and cut" in said[0]
    _, kept, again = read(dataset, steps=200, token_cache=str(tmp_path / "kept"))
    assert kept == state and again == said  # from cached tokens
    _, first, _ = read(dataset, steps=90)
    _, resumed, _ = read(dataset, steps=110, state=json.loads(json.dumps(first)))
    assert resumed["domains"] == state["domains"]


@pytest.mark.parametrize("elsewhere", ["question", "other answer"])
def test_dropped_text_that_is_also_elsewhere_in_the_chat_is_dropped(elsewhere):
    thought = "a thought of some length"
    chat = [
        user(thought if elsewhere == "question" else "q"),
        assistant("a", reasoning_content=thought),
        user("q"),
    ]
    chat.append(assistant(thought if elsewhere == "other answer" else "b"))
    _, counts = Encoder(published_tokenizer("Qwen2.5"), "sft", 1000).encode_with_counts(
        [(chat, "row 1")]
    )
    assert (counts.answer_characters, counts.dropped_characters) == (
        len("a") + len(thought) + len(chat[-1]["content"]),
        len(thought),
    )


def test_counts_go_on_over_epochs(tmp_path):
    """The counts cover the entire run, and a resume in a later epoch continues the counts.

    `metrics.jsonl` reports these totals.
    """
    dataset = written(
        tmp_path,
        [{"messages": [user(f"{n}"), assistant("a" * (9 if n % 4 else 99))]} for n in range(40)],
    )
    _, state, _ = read(dataset, steps=60)
    domain = state["domains"][""]
    rows, cut, *_ = domain["lost"]
    assert (
        (epoch := domain["place"]["epoch"]) >= 2 and rows >= 39 * epoch and abs(cut - rows / 4) < 5
    )
    _, first, _ = read(dataset, steps=40)
    _, resumed, _ = read(dataset, steps=20, state=json.loads(json.dumps(first)))
    assert resumed["domains"] == state["domains"]


def test_numbers_of_domains_are_added():
    assert chats_lost([[10, 2, 1, 100, 25], [], [10, 0, 1, 100, 25]]) == {
        "rows_read": 20,
        "rows_cut": 2,
        "rows_without_target": 2,
        "answers_dropped": 0.25,
    }
    assert chats_lost([[]]) == {
        "rows_read": 0,
        "rows_cut": 0,
        "rows_without_target": 0,
        "answers_dropped": 0.0,
    }


@pytest.mark.parametrize(
    "chat, says",
    [
        ([user("q"), assistant("a" * 99)], "are longer than seq_len = 64"),
        ([user("q")], "have no answer to train on"),
        ([user("q"), assistant("a", weight=0)], "have no answer to train on"),
        ([user("q"), assistant("", {"x": "yy"})], "of the answers' text"),
        ([user("q"), assistant("a", reasoning_content="a thought")], "of the answers' text"),
    ],
)
def test_most_chats_must_be_learned(tmp_path, chat, says):
    dataset = written(
        tmp_path,
        [{"messages": [user(f"{n}"), *chat]} for n in NUMBERS]
        + [FORMS["messages"](n) for n in range(40)],
    )
    with pytest.raises(ConfigError) as refused:
        read(dataset)
    assert says in str(refused.value) and "--bad_rows skip" in str(refused.value)
    read(dataset, bad_rows="skip", steps=1)
    read(dataset, tiny=True, steps=1)


def test_resume_neither_reports_nor_refuses_later_chats(tmp_path):
    good, long = ({"messages": [user("q"), assistant(text)]} for text in ("a", "a" * 99))
    folder = tmp_path / "rows"
    folder.mkdir()
    for number, row in enumerate((good, long) * 4):
        (folder / f"{number}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for _ in range(160)))
    _, state, _ = read(str(folder), steps=40, bad_rows="skip")
    for _ in range(8):
        _, state, _ = read(str(folder), steps=10, state=state, bad_rows="skip")
        assert state["domains"][""]["place"], "the resume begins behind the first block"
        _, _, said = read(str(folder), steps=1, state=json.loads(json.dumps(state)))
        assert not said


def test_keys_that_nobody_reads_are_named(tmp_path):
    rows = [
        {
            "messages": [user(f"{n}?") | {"loss": True}, assistant("a", cache=1)],
            "tools": [{"name": "f"}],
        }
        for n in NUMBERS
    ]
    _, _, said = read(written(tmp_path, rows))
    assert (
        said[1]
        == "chats: neither training nor the chat template reads these keys: cache, loss, tools (a"
        " column)"
    )


@pytest.mark.parametrize(
    "key, value, is_named",
    [("train", True, True), ("weight", 1, True), ("training", True, True), ("weight", 0, False)],
)
def test_a_question_that_is_to_be_learned_is_named(tmp_path, key, value, is_named):
    rows = [{"messages": [user(f"{n}?") | {key: value}, assistant("a")]} for n in NUMBERS]
    _, _, said = read(written(tmp_path, rows))
    assert (
        said[1:]
        == [
            "chats: neither training nor the chat template reads these keys: train or weight of"
            " user messages"
        ]
    ) == is_named


# Dates
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, text",
    [
        ("Llama 3.2", "Today Date: 04 Mar 2026"),
        ("Granite", "Today is March 04, 2026."),
        ("SmolLM3", "Today: 04 March 2026"),
    ],
)
def test_date_of_a_template_is_that_of_the_first_start(tmp_path, name, text):
    dataset, tokenizer = (
        written(tmp_path, map(FORMS["messages"], NUMBERS)),
        published_tokenizer(name),
    )
    found, state, _ = read(dataset, tokenizer, seq_len=256, day="2026-03-04")
    assert all(text in row for row, _ in found) and state["identity"]["date"] == "2026-03-04"
    # Resume on another day.
    again, later, _ = read(dataset, tokenizer, seq_len=256, day="2027-01-01", state=state)
    assert all(text in row for row, _ in again) and later["identity"] == state["identity"]


def test_date_is_in_the_key_of_kept_tokens_only_where_it_is_written(tmp_path):
    dataset = written(tmp_path, map(FORMS["messages"], NUMBERS))

    def key(name, day):
        request = Request(dataset=dataset, task="sft", seq_len=64, day=day)
        corpus = open_corpus(request, published_tokenizer(name))
        assert ("date" in corpus.identity) == (name == "Granite")
        return open_cache(corpus.sources[0], corpus.encoder, str(tmp_path / "kept"), request.sizes)

    assert key("Granite", "2026-03-04") != key("Granite", "2026-03-05") and key(
        "Granite", "2026-03-04"
    ) == key("Granite", "2026-03-04")
    assert key("Qwen3", "2026-03-04") == key("Qwen3", "2026-03-05") and key(
        "Llama 3.1", "2026-03-04"
    ) == key("Llama 3.1", "2026-03-05")


def test_a_computed_format_of_the_date_is_refused():
    tokenizer = published_tokenizer("Qwen2.5")
    tokenizer.chat_template = (
        "{% set form = '%d' %}{{ strftime_now(form) }}{% for m in messages %}{{ m.content }}{%"
        " endfor %}"
    )
    with pytest.raises(ConfigError, match="computes the date format"):
        Encoder(tokenizer, "sft", 64, date(2026, 3, 4))([([user("q"), assistant("a")], "row 1")])


def test_run_json_keeps_the_date(tmp_path):
    step = tmp_path / "checkpoints" / "step_00000002"
    step.mkdir(parents=True)
    assert (day_of_run(None), day_of_run(tmp_path)) == ("", "")
    (tmp_path / "run.json").write_text(json.dumps({"date": "2026-03-04"}))
    assert day_of_run(tmp_path) == day_of_run(step) == "2026-03-04"
