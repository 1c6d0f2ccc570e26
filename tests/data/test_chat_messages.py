"""A row's messages: formats, columns, roles, weights, tools, calls and answer texts."""

from typing import Any

import pytest
from chat_templates import assistant, system, user
from recipekit.data.chat_rows import (
    OPENAI,
    REASONING_KEYS,
    ROLES,
    UnknownRole,
    answer_texts,
    chat_forms,
    is_trained_on,
    match_chat_form,
    parse_messages,
    parse_tools,
    replace_answer,
    unknown_keys,
    with_arguments,
    without_nulls,
)
from recipekit.spec.errors import ConfigError

SHAREGPT, ALPACA, PROMPTS = (
    "ShareGPT (conversations)",
    "Alpaca (instruction, input, output)",
    "prompts and completions",
)
PAIR = [user("q"), assistant("a")]
UNTRAINED: dict[str, Any] = {"weight": None, "training": None, "train": False}


def content(row: dict[str, Any], padded: bool = False, messages_field: str = "messages") -> Any:
    form = match_chat_form(row, messages_field)
    assert form is not None
    return form.content(row, "row 7", padded)


# Forms
# --------------------------------------------------------------------------------------------------


def test_columns_of_each_form():
    """Required columns come first. The formats are listed in the order in which they are tried."""
    names = [
        "history",
        "tools",
        "system",
        "output",
        "input",
        "instruction",
        "completion",
        "prompt",
        "conversations",
        "messages",
        "id",
    ]
    assert [(form.name, form.present(names)) for form in chat_forms("messages")] == [
        (OPENAI, ["messages", "system", "tools"]),
        (SHAREGPT, ["conversations", "system", "tools"]),
        (ALPACA, ["instruction", "output", "input", "system", "history"]),
        (PROMPTS, ["prompt", "completion", "system", "tools"]),
    ]
    assert [(form.name, form.present(names)) for form in chat_forms("id")] == [
        (OPENAI, ["id", "system", "tools"])
    ]
    for form in chat_forms("messages"):
        for name in form.columns:
            assert match_chat_form([other for other in form.columns if other != name]) is None
    assert chat_forms("messages")[2].present(["system", "output", "messages"]) == [
        "output",
        "system",
    ]
    assert (
        match_chat_form(["output", "instruction"]) is not None
        and match_chat_form(["conversations"], "talk") is None
    )


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"messages": PAIR}, PAIR),
        (
            {"messages": PAIR, "tools": [{"name": "f"}]},
            {"messages": PAIR, "form": OPENAI, "tools": [{"name": "f"}]},
        ),
        ({"messages": PAIR, "tools": []}, PAIR),
        ({"messages": None}, None),
        ({"messages": [], "system": "S"}, None),
        ({"messages": PAIR, "system": ""}, PAIR),
        ({"messages": PAIR, "system": None}, PAIR),
        ({"messages": PAIR, "system": "S"}, [system("S"), *PAIR]),
        ({"messages": [system("S"), *PAIR], "system": "S"}, [system("S"), *PAIR]),
        ({"messages": [system("T"), *PAIR], "system": "S"}, [system("S"), system("T"), *PAIR]),
        ({"messages": [user("S"), *PAIR], "system": "S"}, [system("S"), user("S"), *PAIR]),
        (
            {"conversations": [{"from": "system", "value": "S"}], "system": "S"},
            {"messages": [{"from": "system", "value": "S"}], "form": SHAREGPT},
        ),
        (
            {"conversations": PAIR, "tools": '[{"name": "f"}]'},
            {"messages": PAIR, "form": SHAREGPT, "tools": [{"name": "f"}]},
        ),
        ({"conversations": None}, None),
        ({"instruction": "q", "output": "a"}, {"messages": PAIR, "form": ALPACA}),
        (
            {"instruction": "q", "input": "i", "output": "a"},
            {"messages": [user("q\ni"), assistant("a")], "form": ALPACA},
        ),
        ({"instruction": None, "input": "i", "output": None}, None),
        (
            {"instruction": None, "input": "i", "output": "a"},
            {"messages": [user("i"), assistant("a")], "form": ALPACA},
        ),
        (
            {"instruction": "", "input": None, "output": "a"},
            {"messages": [user(""), assistant("a")], "form": ALPACA},
        ),
        ({"instruction": "", "input": "", "output": ""}, None),
        (
            {"instruction": "q", "output": "a", "tools": [{"name": "f"}]},
            {"messages": PAIR, "form": ALPACA},
        ),
        (
            {"instruction": "q", "output": "a", "history": [["x", "y"]]},
            {"messages": [user("x"), assistant("y"), *PAIR], "form": ALPACA},
        ),
        ({"instruction": "q", "output": "a", "history": None}, {"messages": PAIR, "form": ALPACA}),
        ({"prompt": "q", "completion": "a"}, {"messages": PAIR, "form": PROMPTS}),
        ({"prompt": "q", "completion": ""}, None),
        ({"prompt": [user("q")], "completion": None}, None),
        (
            {"prompt": None, "completion": [assistant("a")]},
            {"messages": [assistant("a")], "form": PROMPTS},
        ),
        ({"prompt": "", "completion": ""}, None),
        ({"prompt": None, "completion": None}, None),
        (
            {"prompt": [user("q")], "completion": [assistant("a")]},
            {"messages": [user("q") | UNTRAINED, assistant("a")], "form": PROMPTS},
        ),
        (
            {"prompt": "q", "completion": "a", "tools": [{"name": "f"}]},
            {"messages": PAIR, "form": PROMPTS, "tools": [{"name": "f"}]},
        ),
    ],
)
def test_content_of_a_row(row, expected):
    assert content(row) == expected


def test_nulls_of_a_table_are_dropped_from_tools_and_calls_alone():
    call = {
        "function": {"name": "f", "arguments": {"x": None, "y": [{"z": None, "w": 0}]}},
        "id": None,
    }
    row = {
        "messages": [user("q") | {"name": None}, assistant(None, tool_calls=[call]), "odd"],
        "tools": [{"name": "f", "strict": None}],
    }
    assert content(row, padded=False) == {
        "messages": row["messages"],
        "form": OPENAI,
        "tools": row["tools"],
    }
    calling = assistant(
        None, tool_calls=[{"function": {"name": "f", "arguments": {"y": [{"w": 0}]}}}]
    )
    assert content(row, padded=True) == {
        "messages": [user("q") | {"name": None}, calling, "odd"],
        "form": OPENAI,
        "tools": [{"name": "f"}],
    }
    assert without_nulls([None, {"a": None, "b": [None, {"c": None}]}, 0]) == [
        None,
        {"b": [None, {}]},
        0,
    ]


@pytest.mark.parametrize(
    "row, says",
    [
        ({"messages": PAIR, "system": 5}, "its system must be text, not int '5'"),
        (
            {"messages": "q", "system": 5},
            r"must be a list of messages \(--messages_field\), not str 'q'",
        ),
        ({"conversations": {"from": "human"}}, "must be a list of messages .*, not dict"),
        ({"instruction": 5, "output": "a"}, "its instruction must be text, not int '5'"),
        ({"instruction": "q", "input": ["i"], "output": "a"}, "its input must be text, not list"),
        ({"instruction": "q", "output": {"a": 1}}, "its output must be text, not dict"),
        (
            {"instruction": "q", "output": "a", "history": [["q", "a"], "qa"]},
            "its history must be a list of pairs of texts: a question and its answer, not list",
        ),
        (
            {"instruction": "q", "output": "a", "history": [["q", "a", "b"]]},
            "its history must be a list of pairs of texts: a question and its answer, not list",
        ),
        (
            {"instruction": "q", "output": "a", "history": [[1, "a"]]},
            "its history must be a list of pairs of texts: a question and its answer, not list",
        ),
        (
            {"instruction": "q", "output": "a", "history": {"q": "a"}},
            "its history must be a list of pairs of texts: a question and its answer, not dict",
        ),
        (
            {"prompt": [user("q")], "completion": "a"},
            (
                r"its completion must be a list of messages \(or prompt and completion both text\),"
                r" not str 'a'"
            ),
        ),
        ({"prompt": "q", "completion": [assistant("a")]}, "its prompt must be a list of messages"),
        (
            {"prompt": ["q"], "completion": [assistant("a")]},
            "its prompt must be a list of messages",
        ),
        (
            {"prompt": [user("q")], "completion": [assistant("a"), "b"]},
            "its completion must be a list of messages",
        ),
    ],
)
def test_wrong_value_of_a_column_is_refused(row, says):
    with pytest.raises(ConfigError, match=rf"^row 7: {says}"):
        content(row)


# Tools
# --------------------------------------------------------------------------------------------------

F = {"name": "f"}


@pytest.mark.parametrize(
    "value, expected",
    [
        (None, []),
        ("", []),
        (" \n", []),
        ("null", []),
        ("[]", []),
        ([], []),
        ([F], [F]),
        ('[{"name": "f"}]', [F]),
        (['{"name": "f"}', F], [F, F]),
    ],
)
def test_tools_of_a_row(value, expected):
    assert parse_tools(value, "row 7") == expected


@pytest.mark.parametrize(
    "value", ["f(x)", '{"name": "f"}', {"name": "f"}, [1], "[1]", [[F]], 5, [F, "f"], ["5"]]
)
def test_unreadable_tools_are_refused(value):
    with pytest.raises(
        ConfigError,
        match=r"^row 7: its tools (cannot be read|must be a list of tool descriptions, not)",
    ):
        parse_tools(value, "row 7")


# Messages
# --------------------------------------------------------------------------------------------------

CALL: dict[str, Any] = {"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}
BARE: dict[str, Any] = {"name": "f", "arguments": {"x": 1}}  # without the "function" wrapper


def part(text: Any, **more: Any) -> dict[str, Any]:
    return {"text": text} | more


@pytest.mark.parametrize(
    "message, expected",
    [
        (user("q") | {"name": None, "tool_calls": None}, user("q")),
        (assistant("a", tool_calls=[]), assistant("a")),
        (assistant("a", name="n", cache=0), assistant("a", name="n", cache=0)),
        (assistant(None, tool_calls=[CALL]), assistant("", tool_calls=[CALL])),
        ({"role": "assistant", "tool_calls": [BARE, CALL]}, assistant("", tool_calls=[BARE, CALL])),
        *(
            ({"role": "assistant", key: "t"}, assistant("", **{key: "t"}))
            for key in ("reasoning_content", "thinking", "reasoning")
        ),
        (user("q") | {"content": [part("a", type="text"), part("b")]}, user("ab")),
        (user("q") | {"content": []}, user("")),
        ({"from": "human", "value": "q", "name": "n"}, user("q") | {"name": "n"}),
        ({"from": "gpt", "value": [part("a")]}, assistant("a")),
        (
            {"from": "human", "role": "assistant", "content": "a"},
            assistant("a", **{"from": "human"}),
        ),
        (
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            assistant("", tool_calls=[{"type": "function", "function": BARE}]),
        ),
        (
            {"from": "function_call", "value": '[{"name": "f"}, {"name": "g"}]', "train": False},
            assistant(
                "",
                tool_calls=[{"type": "function", "function": {"name": name}} for name in "fg"],
                train=False,
            ),
        ),
        *(
            (assistant("a", **{key: value}), assistant("a", train=bool(value)))
            for key, value in (("weight", 1), ("weight", 0), ("weight", 1.0))
        ),
        *(
            (assistant("a", **{key: value}), assistant("a", train=value))
            for key in ("train", "training")
            for value in (True, False)
        ),
        (assistant("a", weight=0, train=False, training=False), assistant("a", train=False)),
        (assistant("a", weight=1, training=True), assistant("a", train=True)),
        (assistant("a", **UNTRAINED), assistant("a", train=False)),
        (assistant("a", weight=None), assistant("a")),
    ],
)
def test_message_in_its_one_form(message, expected):
    assert parse_messages([message], "row 7") == [expected]
    assert is_trained_on(expected) == (expected.get("train") is not False)


@pytest.mark.parametrize(
    "message, says",
    [
        ("q", "a message requires the strings 'role' and 'content', but this one is q"),
        ({"role": 5, "content": "q"}, "a message requires the strings"),
        ({"from": 5, "value": "q"}, "a message requires the strings"),
        ({"role": "user"}, "a message requires the strings"),
        ({"from": "human"}, "a message requires the strings"),
        ({"role": "assistant", "reasoning": ["t"]}, "a message requires the strings"),
        (assistant(None, tool_calls=[]), "a message requires the strings"),
        (assistant("", tool_calls=[CALL]) | {"content": 5}, "a message requires the strings"),
        *(
            (user("q") | {"content": [entry]}, "a message requires the strings")
            for entry in ("q", part(5), {"type": "text"}, part("q", type="image"))
        ),
        (
            user("q") | {"content": [part("q"), part("x", type="image")]},
            "a message requires the strings",
        ),
        *(
            (
                assistant("", tool_calls=calls),
                "the tool_calls of a message must be a list of named functions",
            )
            for calls in ({"name": "f"}, "f", ["f"])
        ),
        *(
            (assistant("", tool_calls=[CALL, call]), "the tool_calls of a message")
            for call in ({"function": "f"}, {"function": {}}, {"name": 5}, {"id": "1"})
        ),
        ({"from": "function_call", "value": "f(x)"}, "a function_call is not JSON"),
        ({"from": "function_call", "value": "5"}, "the tool_calls of a message"),
        *(
            (assistant("a", weight=value), "the weight of a message must be 0 or 1, not")
            for value in (True, False, 2, 0.5, -1, "1")
        ),
        *(
            (assistant("a", **{key: value}), f"the {key} of a message must be true or false")
            for key in ("train", "training")
            for value in (0, 1, "true")
        ),
        *(
            (
                assistant("a", **{one: first, other: second}),
                "a message cannot be both trained on and excluded",
            )
            for one, first, other, second in (
                ("weight", 1, "train", False),
                ("weight", 0, "training", True),
                ("train", True, "training", False),
            )
        ),
    ],
)
def test_unreadable_message_is_refused(message, says):
    with pytest.raises(ConfigError, match=rf"^row 7: {says}"):
        parse_messages([user("q"), message], "row 7")


@pytest.mark.parametrize("chat", [None, [], {}, "q", {"role": "user"}])
def test_chat_must_be_a_list_of_messages(chat):
    with pytest.raises(ConfigError, match=r"^row 7: a chat must be a list of messages"):
        parse_messages(chat, "row 7")


@pytest.mark.parametrize(
    "role", ["assistant", "developer", "function", "ipython", "system", "tool", "user"]
)
def test_known_roles(role):
    assert role in ROLES and parse_messages([{"role": role, "content": "q"}], "row 7") == [
        {"role": role, "content": "q"}
    ]


def test_unknown_role_is_refused_with_the_roles_that_were_met():
    chat = [
        user("q"),
        {"role": "judge", "content": "j"},
        {"role": "critic", "content": "c"},
        assistant("a"),
    ]
    with pytest.raises(UnknownRole) as refused:
        parse_messages(chat, "row 7", ("judge",))
    assert (refused.value.place, refused.value.role, refused.value.met) == (
        "row 7",
        "critic",
        {"user", "judge", "critic", "assistant"},
    )
    assert (
        "row 7: a message has the role 'critic': these rows use the roles assistant, critic, judge,"
        " user, and the known roles are " in str(refused.value)
    )
    assert len(parse_messages(chat, "row 7", ("judge", "critic"))) == 4


def test_keys_that_training_or_the_template_reads_are_known():
    message = assistant(
        "a",
        train=True,
        tool_calls=[CALL],
        tool_call_id="1",
        name="n",
        reasoning_content="r",
        thinking="t",
        reasoning="s",
    )
    assert REASONING_KEYS == ("reasoning_content", "thinking", "reasoning") and len(message) == 9
    assert unknown_keys([message], lambda key: False) == set()
    odd = [
        message,
        user("q") | {"loss": 1, "note": 2, "train": False},
        {"role": "tool", "content": "t", "train": True},
    ]
    assert unknown_keys(odd, lambda key: key == "note") == {
        "loss",
        "train or weight of tool messages",
    }


# Calls
# --------------------------------------------------------------------------------------------------

CALLS = [
    {"name": "f", "arguments": '{"x": ["y", {"z": "w"}], "n": 5}'},
    {"function": {"name": "g", "arguments": {"k": "v", "o": None}}},
    {"name": "h", "arguments": "plain"},
    {"name": "i"},
]


def test_texts_of_an_answer():
    """The texts are the content, distinct thoughts, call names, and argument keys and texts."""
    message = assistant(
        "c", reasoning_content="t1", thinking="t2", reasoning="t1", tool_calls=CALLS
    )
    assert answer_texts(message) == [
        "c",
        "t1",
        "t2",
        *("f", "x", "n", "y", "z", "w"),
        *("g", "k", "o", "v"),
        "h",
        "plain",
        "i",
    ]
    assert answer_texts(assistant("c", thinking=["t"])) == ["c"]


@pytest.mark.parametrize(
    "as_dictionary, as_text, given, expected",
    [
        (True, True, {"x": "ü"}, {"x": "ü"}),
        (True, True, '{"x": 1}', '{"x": 1}'),
        (True, False, {"x": "ü"}, {"x": "ü"}),
        (True, False, '{"x": 1}', {"x": 1}),
        (True, False, " ", {}),
        (False, True, {"x": "ü"}, '{"x": "ü"}'),
        (False, True, '{"x": 1}', '{"x": 1}'),
        (False, True, None, "{}"),
        (True, False, None, {}),
        (False, False, {"x": "ü"}, {"x": "ü"}),
        (False, False, '{"x": 1}', '{"x": 1}'),
        (False, True, "", ""),
    ],
)
def test_arguments_of_calls_in_the_type_that_the_template_takes(
    as_dictionary, as_text, given, expected
):
    calls = [
        {"id": "1", "function": {"name": "f", "arguments": given, "more": 2}},
        {"name": "g", "arguments": given},
    ]
    made = with_arguments(assistant("a", tool_calls=calls), as_dictionary, as_text)
    expected_calls = [
        {"id": "1", "function": {"name": "f", "arguments": expected, "more": 2}},
        {"name": "g", "arguments": expected},
    ]
    assert made == assistant("a", tool_calls=expected_calls)


@pytest.mark.parametrize(
    "message, expected",
    [
        (assistant("a", reasoning="t"), assistant("X")),
        (
            assistant("", tool_calls=[CALL], reasoning="t"),
            assistant(
                "",
                tool_calls=[{"id": "1", "function": {"name": "X", "arguments": {}}}],
                reasoning="t",
            ),
        ),
        (assistant("a", tool_calls=[BARE | {"id": "2"}, CALL]), None),
    ],
)
def test_another_answer_of_the_same_kind(message, expected):
    two = [
        {"name": "X", "arguments": {}, "id": "2"},
        {"id": "1", "function": {"name": "X", "arguments": {}}},
    ]
    assert replace_answer(message, "X") == (expected or assistant("X", tool_calls=two))
