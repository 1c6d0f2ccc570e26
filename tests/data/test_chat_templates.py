"""The labelled text of chats that are rendered with published models' templates."""

import json
from datetime import date
from typing import Any

import pytest
from chat_templates import (
    TOOLS,
    assistant,
    published_tokenizer,
    system,
    template_tokenizer,
    tool,
    user,
)
from recipekit.data.chat_spans import ChatTemplate
from recipekit.data.encode import Encoder, encode_chats, encode_chats_with_counts
from recipekit.spec.errors import ConfigError
from recipekit.spec.task import IGNORE

DAY = date(2026, 3, 4)
TURNS = [system("S."), user("q1"), assistant("a1"), user("q2"), assistant(" a2 ")]
PAIR = [user("q1"), assistant("a1"), user("q2"), assistant("a2")]
EMPTY = [user("q1"), assistant(""), user("q2"), assistant("a2")]
CALLING = [user("q1"), assistant("", {"x": "y"}), tool("12"), assistant("a1")]
AS_TEXT = [user("q1"), assistant(None, '{"x": "y"}'), tool("12"), assistant("a1")]
AGAIN = [*CALLING, user("q2"), assistant("", {"z": 1}), tool("13"), assistant("a2")]
THOUGHTS = [
    user("q1"),
    assistant("<think>\nt1\n</think>\n\na1"),
    user("q2"),
    assistant("<think>\nt2\n</think>\n\na2"),
]
KEPT = [
    user("q1"),
    assistant("a1", reasoning_content="t1"),
    user("q2"),
    assistant("a2", reasoning_content="t2"),
]
BETWEEN = [
    user("q1"),
    assistant("", {"x": "y"}, reasoning_content="t1"),
    tool("12"),
    assistant("a1"),
    user("q2"),
    assistant("a2"),
]

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "y"}}\n</tool_call><|im_end|>\n'
CALL2 = '<tool_call>\n{"name": "f", "arguments": {"z": 1}}\n</tool_call><|im_end|>\n'
NO_THOUGHT = "<think>\n\n</think>\n\n"
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "f", "arguments": {"x": "y"}, "id": "abcdef123"}]</s>'
MISTRAL_CALL2 = '[TOOL_CALLS] [{"name": "f", "arguments": {"z": 1}, "id": "abcdef123"}]</s>'
LLAMA_CALL = '{"name": "f", "parameters": {"x": "y"}}<|eot_id|>'
GRANITE_CALL = (
    '<|tool_call|>[{"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments":'
    ' {"x": "y"}}}]<|end_of_text|>\n'
)
R1_CALL = (
    '<tool_calls_begin><tool_call_begin>function<tool_sep>f\n```json\n{"x":'
    ' "y"}\n```<tool_call_end><tool_calls_end><end>'
)
SMOL = "<|im_start|>assistant\n<think>\n\n</think>\n"

# The text of each answer that a model with the given template is trained on, written by hand.
LEARNED = [
    ("Qwen2.5", TURNS, None, ["a1<|im_end|>\n", " a2 <|im_end|>\n"]),
    ("Qwen2.5", CALLING, TOOLS, [CALL, "a1<|im_end|>\n"]),
    ("Qwen2.5", AS_TEXT, TOOLS, [CALL, "a1<|im_end|>\n"]),
    ("Qwen2.5", AGAIN, TOOLS, [CALL, "a1<|im_end|>\n", CALL2, "a2<|im_end|>\n"]),
    ("Qwen2.5", EMPTY, None, ["<|im_end|>\n", "a2<|im_end|>\n"]),
    ("Qwen2.5", [user("q1"), assistant("Now:", {"x": "y"})], TOOLS, [f"Now:\n{CALL}"]),
    ("Qwen3", TURNS, None, ["a1<|im_end|>\n", NO_THOUGHT + " a2 <|im_end|>\n"]),
    ("Qwen3", THOUGHTS, None, ["a1<|im_end|>\n", "<think>\nt2\n</think>\n\na2<|im_end|>\n"]),
    ("Qwen3", KEPT, None, ["a1<|im_end|>\n", "<think>\nt2\n</think>\n\na2<|im_end|>\n"]),
    ("Qwen3", AGAIN, TOOLS, [CALL, "a1<|im_end|>\n", CALL2, NO_THOUGHT + "a2<|im_end|>\n"]),
    ("Qwen3", BETWEEN, TOOLS, [CALL, "a1<|im_end|>\n", NO_THOUGHT + "a2<|im_end|>\n"]),
    (
        "Qwen3",
        BETWEEN[:4],
        TOOLS,
        ["<think>\nt1\n</think>\n\n" + CALL, NO_THOUGHT + "a1<|im_end|>\n"],
    ),
    ("Llama 2", TURNS, None, [" a1 </s>", " a2 </s>"]),
    ("Llama 2", EMPTY, None, ["  </s>", " a2 </s>"]),
    ("Llama 3.1", TURNS, None, ["a1<|eot_id|>", "a2<|eot_id|>"]),
    ("Llama 3.1", CALLING, TOOLS, [LLAMA_CALL, "a1<|eot_id|>"]),
    ("Llama 3.1", AS_TEXT, TOOLS, [LLAMA_CALL, "a1<|eot_id|>"]),
    ("Llama 3.2", TURNS, None, ["a1<|eot_id|>", "a2<|eot_id|>"]),
    ("Mistral v1", PAIR, None, ["a1</s>", "a2</s>"]),
    ("Mistral v1", EMPTY, None, ["</s>", "a2</s>"]),
    ("Mistral v3", TURNS, None, [" a1</s>", " a2</s>"]),
    ("Mistral v3", CALLING, TOOLS, [MISTRAL_CALL, " a1</s>"]),
    ("Mistral v3", AGAIN, TOOLS, [MISTRAL_CALL, " a1</s>", MISTRAL_CALL2, " a2</s>"]),
    ("Mistral v3", AS_TEXT, TOOLS, [MISTRAL_CALL, " a1</s>"]),
    ("Gemma", PAIR, None, ["a1<end_of_turn>\n", "a2<end_of_turn>\n"]),
    ("Gemma", EMPTY, None, ["<end_of_turn>\n", "a2<end_of_turn>\n"]),
    ("Gemma 3", TURNS, None, ["a1<end_of_turn>\n", "a2<end_of_turn>\n"]),
    ("Phi-3", TURNS, None, ["a1<|end|>\n", " a2 <|end|>\n<|endoftext|>"]),
    ("Phi-3", EMPTY, None, ["<|end|>\n", "a2<|end|>\n<|endoftext|>"]),
    ("DeepSeek-R1", TURNS, None, ["a1<end>", " a2 <end>"]),
    ("DeepSeek-R1", THOUGHTS, None, ["\n\na1<end>", "\n\na2<end>"]),
    ("DeepSeek-R1", CALLING, None, [R1_CALL, "a1<end>"]),
    ("DeepSeek-R1", AS_TEXT, None, [R1_CALL, "a1<end>"]),
    ("DeepSeek-R1", [user("q1"), assistant("<b>1</b>")], None, ["<b>1</b><end>"]),
    ("Granite", TURNS, None, ["a1<|end_of_text|>\n", " a2 <|end_of_text|>\n"]),
    ("Granite", CALLING, TOOLS, [GRANITE_CALL, "a1<|end_of_text|>\n"]),
    ("SmolLM3", TURNS, None, [f"{SMOL}a1<|im_end|>\n", f"{SMOL} a2 <|im_end|>\n"]),
    (
        "SmolLM3",
        THOUGHTS,
        None,
        [f"<|im_start|>assistant\n<think>\nt{n}\n</think>\n\na{n}<|im_end|>\n" for n in (1, 2)],
    ),
    ("Zephyr", TURNS, None, ["\na1</s>\n", "\n a2 </s>\n"]),
    ("Command-R", TURNS, None, ["a1<|END|>", "a2<|END|>"]),
    ("Command-R", EMPTY, None, ["<|END|>", "a2<|END|>"]),
    ("SmolVLM", TURNS, None, [" a1<end_of_utterance>\n", "  a2 <end_of_utterance>\n"]),
    ("SmolVLM", EMPTY, None, [" <end_of_utterance>\n", " a2<end_of_utterance>\n"]),
    ("LLaVA", TURNS, None, ["a1 ", " a2  "]),
    ("Vicuna", TURNS, None, [" a1</s>", "  a2 </s>"]),
]


def runs(tokenizer, ids, labels):
    """Return the text of each run of labelled tokens."""
    found, run = [], []
    for label in [*labels.tolist(), IGNORE]:
        if label != IGNORE:
            run.append(label)
        elif run:
            found.append(tokenizer.decode(run))
            run = []
    assert all(
        label in (IGNORE, following) for label, following in zip(labels, ids[1:], strict=False)
    )
    return found


def encoded(tokenizer, chat, tools=None):
    content: Any = {"messages": chat, "tools": tools} if tools else chat
    ((ids, labels),), counts = encode_chats_with_counts(
        ChatTemplate(tokenizer, DAY), [content], ["row 1"], 10_000
    )
    return ids, labels, counts


@pytest.mark.parametrize("name, chat, tools, expected", LEARNED)
def test_learned_is_all_that_the_template_writes_in_a_turn(name, chat, tools, expected):
    tokenizer = published_tokenizer(name)
    ids, labels, _ = encoded(tokenizer, chat, tools)
    assert runs(tokenizer, ids, labels) == expected


@pytest.mark.parametrize("arguments", [{"x": "Zürich"}, '{"x": "Zürich"}', {"x": "東京"}])
def test_arguments_of_calls_keep_their_letters(arguments):
    """Letters must also stay unchanged if a template expects JSON text and the row contains an
    object.
    """
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}{{"
        " c.function.name + c.function.arguments }}{% endfor %};{% endfor %}"
    )
    tokenizer = template_tokenizer(source)
    ids, _, counts = encoded(tokenizer, [user("q"), assistant("", arguments)])
    expected = (
        arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )
    assert f"f{expected};" in tokenizer.decode(ids) and counts.dropped_characters == 0


def test_tokens_are_the_templates_own():
    for name, chat in (
        ("Qwen3", THOUGHTS),
        ("Phi-3", TURNS),
        ("Mistral v3", PAIR),
        ("Granite", [system("S."), *PAIR]),
    ):
        tokenizer = published_tokenizer(name)
        ids, _, _ = encoded(tokenizer, chat)
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(chat, tokenize=False), name


@pytest.mark.parametrize(
    "name, expected",
    [
        ("Qwen2.5", ["<|im_end|>"]),
        ("Llama 3.1", ["<|eot_id|>"]),
        ("Llama 2", ["</s>"]),
        ("Gemma", ["<end_of_turn>"]),
        ("Phi-3", ["<|end|>", "<|endoftext|>"]),
        ("DeepSeek-R1", ["<end>"]),
        ("SmolLM3", ["<|im_end|>"]),
        ("Granite", ["<|end_of_text|>"]),
    ],
)
def test_end_tokens_are_those_that_answers_end_with(name, expected):
    tokenizer = published_tokenizer(name)
    assert (
        tokenizer.convert_ids_to_tokens(list(Encoder(tokenizer, "sft", 64).end_tokens)) == expected
    )


@pytest.mark.parametrize(
    "inside, behind, expected",
    [("{end}", "", ["<|end|>"]), ("", "{end}", []), ("<turn_end>", "{end}", ["<turn_end>"])],
)
def test_end_tokens_of_a_marked_template_are_those_that_it_marks(inside, behind, expected):
    answer = "{% generation %}{{ m.content }}" + inside + "{% endgeneration %}" + behind
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    )
    tokenizer = template_tokenizer(
        source.replace("{end}", "<|end|>"), ("<|end|>",), ("<turn_end>",), eos="<|end|>"
    )
    assert (
        tokenizer.convert_ids_to_tokens(list(Encoder(tokenizer, "sft", 64).end_tokens)) == expected
    )


def test_comments_of_a_template_are_no_part_of_it():
    comment = "{# {% generation %} strftime_now(f) {{ m.note }} {% if m.role == 'judge' %} #}"
    template = ChatTemplate(
        template_tokenizer(
            comment + "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        ),
        DAY,
    )
    assert (
        not template.is_marked
        and not template.is_dated
        and not template.mentions("note")
        and "judge" not in template.roles
    )
    text, answers = template.answers(PAIR, None, "row 1")
    assert [text[slice(*span)] for _, span in answers] == ["a1\n", "a2\n"]


def test_end_tokens_of_other_tasks():
    tokenizer = published_tokenizer("Phi-3")
    assert Encoder(tokenizer, "pretrain", 64).end_tokens == (tokenizer.eos_token_id,)
    assert tokenizer.convert_ids_to_tokens(
        list(Encoder(tokenizer, "preference", 64).end_tokens)
    ) == ["<|end|>", "<|endoftext|>"]
    assert Encoder(tokenizer, "masked_lm", 64).end_tokens == ()
    assert (
        Encoder(
            template_tokenizer(
                "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            ),
            "sft",
            64,
        ).end_tokens
        == ()
    )


@pytest.mark.parametrize("name", ["Qwen2.5", "Mistral v3", "DeepSeek-R1"])
def test_call_without_arguments_is_written_with_empty_ones(name):
    tokenizer, written = published_tokenizer(name), []
    for function in ({"name": "f"}, {"name": "f", "arguments": {}}):
        call = {"id": "abcdef123", "type": "function", "function": function}
        ids, _, _ = encoded(tokenizer, [user("q"), assistant("", tool_calls=[call])])
        written.append(tokenizer.decode(ids))
    assert written[0] == written[1]


def test_arguments_that_are_no_json_are_refused_by_the_name_of_the_call():
    with pytest.raises(
        ConfigError, match=r"the arguments of the call of f are not JSON: .*, in 'q: 1'\. Check"
    ):
        encode_chats(
            published_tokenizer("Qwen2.5"), [[user("q"), assistant("", "q: 1")]], ["row 1"], 100
        )


@pytest.mark.parametrize(
    "source, chat, expected",
    [
        # The end of the turn is an added token that is not special, or plain text, or is missing.
        ("{{ m.role }}:\n{{ m.content }}<turn_end>\n", PAIR, ["a1<turn_end>\n", "a2<turn_end>\n"]),
        ("{{ m.role }}:\n{{ m.content }}###\n", PAIR, ["a1###\n", "a2###\n"]),
        ("{{ m.role }}: {{ m.content }}\n", PAIR, ["a1\n", "a2\n"]),
        # The end of the turn is written with the next message, or only the last answer has an end.
        (
            "{% if not loop.first %}{{ eos_token }}{% endif %}<{{ m.role }}>{{ m.content }}",
            PAIR,
            ["a1<|end|>", "a2"],
        ),
        (
            "<{{ m.role }}>{{ m.content }}{% if loop.last %}<final>{% else %}<turn_end>{% endif %}",
            PAIR,
            ["a1<turn_end>", "a2<final>"],
        ),
        # The messages contain words of the template.
        (
            "{{ m.role }}:\n{{ m.content }}<turn_end>\n",
            [user("assistant:\na1"), assistant("a1<turn_end>\nuser:\n")],
            ["a1<turn_end>\nuser:\n<turn_end>\n"],
        ),
        (
            "{{ m.role }}:\n{{ m.content }}<turn_end>\n",
            [assistant("hi"), user("q"), assistant("a")],
            ["hi<turn_end>\n", "a<turn_end>\n"],
        ),
        (
            "{{ m.role }}:\n{{ m.content }}<turn_end>\n",
            [user("q"), assistant("a"), assistant("b")],
            ["a<turn_end>\n", "b<turn_end>\n"],
        ),
    ],
)
def test_end_of_a_turn_is_learned(source, chat, expected):
    tokenizer = template_tokenizer(
        "{% for m in messages %}" + source + "{% endfor %}",
        ("<|end|>",),
        ("<turn_end>", "<final>"),
        eos="<|end|>",
    )
    ids, labels, _ = encoded(tokenizer, chat)
    assert "".join(runs(tokenizer, ids, labels)) == "".join(expected)


@pytest.mark.parametrize(
    "more, expected",
    [
        ({"weight": 0}, ["a2<|im_end|>\n"]),
        ({"weight": 0.0}, ["a2<|im_end|>\n"]),
        ({"train": False}, ["a2<|im_end|>\n"]),
        ({"training": False}, ["a2<|im_end|>\n"]),
        ({"weight": 1, "train": True, "training": None}, ["a1<|im_end|>\n", "a2<|im_end|>\n"]),
    ],
)
@pytest.mark.parametrize("name", ["Qwen2.5", "SmolLM3"])
def test_a_message_may_be_left_out_of_training(name, more, expected):
    tokenizer = published_tokenizer(name)
    ids, labels, _ = encoded(
        tokenizer, [user("q1"), assistant("a1", **more), user("q2"), assistant("a2")]
    )
    prefix = SMOL if name == "SmolLM3" else ""
    assert runs(tokenizer, ids, labels) == [prefix + text for text in expected]


@pytest.mark.parametrize(
    "more",
    [
        {"weight": 0.5},
        {"weight": 2},
        {"weight": True},
        {"train": 1},
        {"training": "no"},
        {"weight": 0, "train": True},
    ],
)
def test_another_weight_is_refused(more):
    with pytest.raises(ConfigError, match=next(iter(more))):
        encode_chats(
            published_tokenizer("Qwen2.5"), [[user("q"), assistant("a", **more)]], ["row 1"], 100
        )


@pytest.mark.parametrize(
    "chat, expected",
    [
        ([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], ["a<|im_end|>\n"]),
        (
            [
                user("q"),
                assistant(None)
                | {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ],
            ["ab<|im_end|>\n"],
        ),
        (
            [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": "y"}}'},
            ],
            [CALL],
        ),
    ],
)
def test_forms_of_messages(chat, expected):
    tokenizer = published_tokenizer("Qwen2.5")
    ids, labels, _ = encoded(tokenizer, chat)
    assert runs(tokenizer, ids, labels) == expected


@pytest.mark.parametrize(
    "name, chat, said, dropped",
    [
        ("Qwen2.5", PAIR, 4, 0),
        ("Qwen3", THOUGHTS, 46, 2),  # t1
        ("Qwen3", [user("q"), assistant("a", reasoning_content="t", thinking="t")], 2, 0),
        ("DeepSeek-R1", THOUGHTS, 46, 4),
        ("Llama 2", [user("q"), assistant("a", {"xx": "yy"})], 6, 5),  # a, f, xx, yy
        ("Gemma", [user("q"), assistant("a", reasoning_content="thought")], 8, 7),
        (
            "Gemma",
            [
                user("q"),
                assistant("left out", weight=0, reasoning_content="thought"),
                user("q"),
                assistant("a"),
            ],
            1,
            0,
        ),
    ],
)
def test_what_the_template_drops_is_counted(name, chat, said, dropped):
    _, _, counts = encoded(published_tokenizer(name), chat)
    assert (counts.answer_characters, counts.dropped_characters) == (said, dropped)


@pytest.mark.parametrize("seq_len, cut", [(-1, 1), (0, 0), (1, 0)])
@pytest.mark.parametrize("name", ["Qwen2.5", "Llama 2"])
def test_a_row_of_exactly_seq_len_tokens_is_not_cut(name, seq_len, cut):
    tokenizer = published_tokenizer(name)
    ids, _, _ = encoded(tokenizer, PAIR)
    (found,), counts = encode_chats_with_counts(
        ChatTemplate(tokenizer), [PAIR], ["row 1"], len(ids) + seq_len
    )
    assert (counts.truncated, counts.rows, len(found[0])) == (cut, 1, len(ids) + min(seq_len, 0))


@pytest.mark.parametrize("key, more", [("default", None), ("tool_use", TOOLS)])
def test_a_template_of_its_own_for_tools_is_taken_for_rows_with_tools(key, more):
    tokenizer = published_tokenizer("Qwen2.5")
    body = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    tokenizer.chat_template = {"default": f"default:{body}", "tool_use": f"tool_use:{body}"}
    text, answers = ChatTemplate(tokenizer, DAY).answers(PAIR, more, "row 1")
    assert text.startswith(f"{key}:<|im_start|>user\nq1")
    assert [text[slice(*span)] for _, span in answers] == ["a1<|im_end|>\n", "a2<|im_end|>\n"]
