"""Analysis of chat templates.

The tests cover the header and the endings, dates, roles, types of contents and calls, and the
positions of answers.
"""

from dataclasses import dataclass
from datetime import date
from typing import Any

import pytest
from cases import rows
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
from recipekit.spec.errors import ConfigError

DAY = date(2026, 3, 4)
PAIR = [user("q1"), assistant("a1"), user("q2"), assistant("a2")]


def template(source: Any, day: date | None = DAY) -> ChatTemplate:
    return ChatTemplate(
        template_tokenizer(source, ("<|end|>", "<|x|>"), ("<turn_end>",), eos="<|end|>"), day
    )


def each(source: str, prompt: str = "") -> str:
    """Return a template that writes `source` for each message, followed by a generation prompt."""
    return (
        "{% for m in messages %}"
        + source
        + "{% endfor %}{% if add_generation_prompt %}"
        + prompt
        + "{% endif %}"
    )


def answers(of: ChatTemplate, chat: list[Any], tools: Any = None) -> list[str]:
    text, found = of.answers(chat, tools, "row 1")
    return [text[slice(*span)] for _, span in found]


# Around an answer
# -------------------------------------------------------------------------------------------------

QWEN_CALL = '", "arguments": {}}\n</tool_call><|im_end|>\n'
HEADERS = "<|start_header_id|>assistant<|end_header_id|>\n\n"
# For each template: its generation prompt, the lengths to which the prompt may be shortened, and
# the texts after an answer.
AROUND = {
    "Qwen2.5": ("<|im_start|>assistant\n", (0, 1, 10, 22), ("<|im_end|>\n", QWEN_CALL)),
    "Qwen3": ("<|im_start|>assistant\n", (0, 1, 10, 22), ("", "<|im_end|>\n", QWEN_CALL)),
    "Llama 2": ("", (0,), (" </s>", "")),
    "Llama 3.1": (HEADERS, (0, 1, 2, 19, 28, 47), ("<|eot_id|>", '", "parameters": {}}<|eot_id|>')),
    "Mistral v1": ("", (0,), ("</s>", "")),
    "Mistral v3": ("", (0,), ("</s>", '", "arguments": {}, "id": "call00001"}]</s>')),
    "Gemma": ("<start_of_turn>model\n", (0, 1, 6, 21), ("<end_of_turn>\n", "")),
    "Phi-3": ("<|assistant|>\n", (0, 1, 14), ("<|end|>\n", "<|end|>\n<|endoftext|>", "")),
    "DeepSeek-R1": (
        "<Assistant><think>\n",
        (0, 1, 8, 19),
        ("<end>", "\n```json\n{}\n```<tool_call_end><tool_calls_end><end>"),
    ),
    "Zephyr": ("<|assistant|>", (0, 13), ("</s>\n", "")),
    "SmolVLM": ("Assistant:", (0, 10), ("<end_of_utterance>\n", "")),
    "Vicuna": (" ASSISTANT:", (0, 11), ("</s>", "")),
}


@pytest.mark.parametrize("name", AROUND)
def test_text_around_an_answer(name):
    found = ChatTemplate(published_tokenizer(name), DAY)
    assert (found.header, found.steps_back, found.endings) == AROUND[name]
    assert found.ending == AROUND[name][2][0] and found.writes_header


@pytest.mark.parametrize(
    "source, header, ending",
    [
        ("<{{ m.role }}>{{ m.content }}\n", "<assistant>", "\n"),
        (
            "{% if not loop.first %}<|end|>{% endif %}<{{ m.role }}>{{ m.content }}",
            "<|end|><assistant>",
            "<|end|>",
        ),
        (
            (
                "{{ 'A: ' if loop.index == 2 else 'A; ' if m.role == 'assistant' else 'U' }}{{"
                " m.content }}."
            ),
            "A",
            ".",
        ),
        ("{{ loop.index }}{{ m.content }}.", "", "."),
        (" {{ m.content }}.", "", "."),
        (
            "{% if messages | length == 3 %}{{ m.a.b }}{% endif %}<{{ m.role }}>{{ m.content }}\n",
            "<assistant>",
            "\n",
        ),
        ("<{{ m.role }}>{{ m.content if m.role == 'user' }}\n", "", ""),
        ("<{{ m.role }}>{{ m.content }}{{ m.content if m.role == 'assistant' }}\n", "", "\ue001\n"),
        (
            (
                "{% if m.role == 'user' %}<u>{{ m.content }}{% else %}<a>{{ m.content }}</a>{%"
                " endif %}"
            ),
            "<a>",
            "</a>",
        ),
        (
            (
                "{% if loop.index == 1 and loop.last %}{{ m.nope.nope }}{% endif %}<{{ m.role }}>{{"
                " m.content }}"
            ),
            "",
            "",
        ),
    ],
)
def test_header_of_a_template_without_a_generation_prompt(source, header, ending):
    """The header is the text before every answer.

    The header is empty if the answers have no common prefix.
    """
    found = template(each(source))
    assert (found.header, found.ending, found.writes_header) == (header, ending, not header)


@pytest.mark.parametrize(
    "part, text, end",
    [
        ("ab", "abX", 2),
        ("ab", "ab<|end|>X", 9),
        ("ab\n", "ab\n  <|end|>X", 12),
        ("ab", "ab<turn_end>X", 2),
        ("ab<turn_end>", "ab<|end|>X", 9),
        ("ab<|end|>\n", "ab<|end|>\nX", 10),
        ("ab<|end|><turn_end>", "ab<|end|>\nX", 9),
        ("ab<|end|>", "ab<|x|>X", 7),
        ("ab<|end|>", "abX", 2),
        ("abc", "abX", None),
        ("abc<|end|>", "abX", None),
        ("ab", "abc", 2),
    ],
)
def test_end_of_an_answer_in_a_longer_chat(part, text, end):
    found = template(each("{{ m.content }}"))
    assert found.answer_end(part, text) == end
    found.tokenizer.eos_token = None
    assert found.answer_end("ab", "ab<|end|>") == 2


@pytest.mark.parametrize(
    "source, expected",
    [
        (
            (
                "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}<turn_end>{% else"
                " %}<|end|>{% endfor %}"
            ),
            ["<|end|>"],
        ),
        (
            (
                "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}<|x|>{% else"
                " %}<|end|>{% endfor %}"
            ),
            ["<|end|>", "<|x|>"],
        ),
        (
            (
                "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name +"
                " c.function.arguments }}<|x|>{% else %}<turn_end>{% endfor %}"
            ),
            ["<turn_end>", "<|x|>"],
        ),
        (
            (
                "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{{"
                " c.function.arguments.items() | list }}<|x|>{% else %}.{% endfor %}"
            ),
            ["<|x|>"],
        ),
        (
            "{{ m.content }}<turn_end>.{% if loop.last %}<|x|><|end|>\n{% endif %}",
            ["<turn_end>", "<|end|>"],
        ),
        ("{{ m.content }}{{ m.content }}<turn_end>", ["<turn_end>"]),
    ],
)
def test_last_token_of_each_ending_ends_an_answer(source, expected):
    """After a call, only a special token ends the turn; other tokens there close the call."""
    found = template(each("<{{ m.role }}>" + source))
    assert found.tokenizer.convert_ids_to_tokens(list(found.end_tokens)) == expected


def test_a_token_that_begins_like_another_is_told_from_it():
    tokenizer = template_tokenizer(each("{{ m.content }}\n", "<|x|>>bot\n"), ("<|x|>", "<|x|>>"))
    assert ChatTemplate(tokenizer).steps_back == (0, 1, 4, 10)


# Dates, marks, keys and roles
# -------------------------------------------------------------------------------------


def test_date_is_written_in_the_format_of_each_call():
    source = (
        "{{ strftime_now('%d %b') }}|{{ strftime_now( \"%B 'x' %Y\" ) }}{# strftime_now(f) #}"
        + each("{{ m.content }}")
    )
    assert (
        template(source).is_dated
        and template(source).render([user("q")]) == "04 Mar|March 'x' 2026q"
    )
    today = date.today()
    assert template("{{ strftime_now('%Y') }}", None).render([user("q")]) in (
        str(today.year),
        str(date.today().year),
    )
    computed = "{% set f = '%Y' %}{{ strftime_now(f) }}"
    assert template(computed, None).render([user("q")]) == str(date.today().year)
    for read in (
        lambda of: of.rendered(PAIR, None, "row 1"),
        lambda of: of.attempt(PAIR),
        lambda of: of.header,
    ):
        with pytest.raises(
            ConfigError, match=r"^--tokenizer: its chat template computes the date format"
        ):
            read(template(computed))
    assert not template("{# strftime_now('%d') #}").is_dated


def test_two_templates_of_a_tokenizer():
    both = template(
        {
            "default": "default" + each("{{ m.content }}"),
            "tool_use": "{{ strftime_now('%d') }}" + each("{{ m.content }}"),
        }
    )
    assert (
        both.is_dated
        and both.render([user("q")]) == "defaultq"
        and both.render([user("q")], TOOLS) == "04q"
    )
    marked = "{% generation %}{{ m.content }}{% endgeneration %}"
    assert not template({"default": each(marked), "tool_use": each("{{ m.content }}")}).is_marked
    assert not template({"default": each("{{ m.content }}"), "tool_use": each(marked)}).is_marked
    assert template({"default": each(marked), "tool_use": each(marked)}).is_marked
    with pytest.raises(
        ConfigError, match=r"^--tokenizer: has several chat templates and none named `default`"
    ):
        template({"one": "a", "two": "b"}).render([user("q")])


@pytest.mark.parametrize(
    "tag",
    [
        "{% generation %}",
        "{%generation%}",
        "{%- generation -%}",
        "{%+ generation +%}",
        "{%-\n generation\n-%}",
    ],
)
def test_marks_in_any_spelling(tag):
    assert template(each(tag + "{{ m.content }}{% endgeneration %}")).is_marked
    assert not template(each("{# " + tag + " #}{{ m.content }}")).is_marked


def test_keys_and_roles_that_a_template_names():
    found = template(
        "{% if m.role == 'judge' or x == \"two words\" or y != 'not' %}{{ m.a_b }}{{ tools }}{%"
        " elif m['c.d'] ==  'e.f-g' %}{% endif %}{# note #}"
    )
    assert found.roles == {"judge", "two words", "e.f-g"}
    keys = ("a_b", "tools", "c.d", "judge", "a", "b", "tool", "ools", "c-d", "note")
    assert [key for key in keys if found.mentions(key)] == ["a_b", "tools", "c.d", "judge"]


@pytest.mark.parametrize(
    "wrong",
    [
        "raise_exception('x')",
        "m.content + 1",
        "'{x}'.format(y=1)",
        "'{'.format()",
        "none | wordwrap",
        "'{1}'.format('a')",
        "m.x.y",
    ],
)
def test_a_chat_that_cannot_be_rendered_is_refused(wrong):
    found = template(
        each("{% if m.content == 'bad' %}{{ " + wrong + " }}{% endif %}{{ m.content }}")
    )
    assert found.attempt([user("bad")]) is None and found.attempt([user("good")]) == "good"
    with pytest.raises(ConfigError, match=r"^row 1: the chat template cannot render this chat: "):
        found.answers([user("bad")], None, "row 1")
    assert found.attempt([]) is None


# Forms of contents and calls
# --------------------------------------------------------------------------------------

CALL = assistant("", {"x": "ü"})
AS_TEXT = assistant("", '{"x": "ü"}')


def written_calls(arguments: str, content: str = "{{ m.content }}") -> str:
    return each(
        content
        + "{% for c in m.tool_calls %}[{{ c.function.name }}:"
        + arguments
        + "]{% endfor %};"
    )


@pytest.mark.parametrize(
    "arguments, from_dictionary, from_text",
    [
        # Without this conversion, a dictionary would be written in Python syntax.
        ("{{ c.function.arguments }}", '{"x": "ü"}', '{"x": "ü"}'),
        # Without this conversion, a string would be quoted.
        ("{{ c.function.arguments | tojson }}", '{"x": "ü"}', '{"x": "ü"}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "x=ü", "x=ü"),
        ("{{ '' + c.function.arguments }}", '{"x": "ü"}', '{"x": "ü"}'),
        (
            (
                "{{ 'T' + c.function.arguments if c.function.arguments is string else 'D' ~"
                " c.function.arguments | tojson }}"
            ),
            'D{"x": "ü"}',
            'T{"x": "ü"}',
        ),
    ],
)
def test_arguments_are_given_in_the_type_that_the_template_writes(
    arguments, from_dictionary, from_text
):
    found = template(written_calls(arguments))
    assert [found.render([user("q"), call]) for call in (CALL, AS_TEXT)] == [
        f"q;[f:{text}];" for text in (from_dictionary, from_text)
    ]


@pytest.mark.parametrize(
    "content, arguments, expected",
    [
        ("{{ m.content }}", "{{ c.function.arguments | tojson }}", ""),
        ("{{ m.content.strip() }}", "{{ '' + c.function.arguments }}", ""),
        ("{{ m.content if m.content is not none }}", "{{ c.function.arguments | tojson }}", ""),
        (
            (
                "{% if m.tool_calls and m.content is not none %}{{ m.a.b }}{% endif %}{{ m.content"
                " or '' }}"
            ),
            "{{ c.function.arguments | tojson }}",
            None,
        ),
        (
            (
                "{% if m.tool_calls and m.content is not none %}{{ m.a.b }}{% endif %}{{ m.content"
                " or '' }}"
            ),
            "{{ '' + c.function.arguments }}",
            None,
        ),
        (
            "{% if m.tool_calls and m.content is not none %}{{ m.a.b }}{% endif %}{{ m.content }}",
            "{{ '' + c.function.arguments }}",
            "",
        ),
    ],
)
def test_content_of_a_message_that_only_calls(content, arguments, expected):
    found = template(written_calls(arguments, content))
    chat = found.adapt_messages([user("q"), CALL, assistant("a", {"x": 1})])
    assert [message["content"] for message in chat] == ["q", expected, "a"]


def test_a_template_for_tools_decides_the_form_of_calls():
    of_tools = written_calls("{{ '' + c.function.arguments }}")
    found = template(
        {"default": written_calls("{{ c.function.arguments | tojson }}"), "tool_use": of_tools}
    )
    assert found.render([user("q"), CALL], TOOLS) == 'q;[f:{"x": "ü"}];'


PARTS = "{% for p in m.content %}{{ p.text }}{% endfor %}"


@pytest.mark.parametrize(
    "source, content",
    [
        (PARTS, [{"type": "text", "text": "q"}]),
        ("{{ m.content }}", "q"),
        ("{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}", "q"),
        ("{{ m.content[0].text }}", [{"type": "text", "text": "q"}]),
        ("nothing", "q"),
    ],
)
def test_contents_are_given_in_the_form_that_the_template_writes(source, content):
    assert template(each(source)).adapt_messages([user("q")]) == [user("q") | {"content": content}]


# Answers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length, shorter", [(256, 64), (64, 16), (16, 8), (8, 4), (4, 0)])
def test_longest_known_end_of_the_prompt_is_looked_up(length, shorter):
    """The generation prompt is matched by its longest suffix that occurs in the chat.

    The prompt and the chat agree only in the last `length` characters. The answer begins with a
    shorter suffix of the prompt.
    """
    head = "".join(chr(0x4E00 + number) for number in range(length))
    decoy = head[length - shorter :] if shorter else ""
    of_user, of_assistant = (
        "<{{ messages | length }}>{{ m.content }}",
        "{{ messages | length }}" + head,
    )
    source = (
        "{% if m.role == 'user' %}"
        + of_user
        + "{% else %}"
        + of_assistant
        + decoy
        + "{{ m.content }}{% endif %}"
    )
    assert answers(template(each(source, of_assistant)), [user("quest"), assistant("a")]) == [
        decoy + "a"
    ]


OTHER_ENDING = (
    "{{ messages | length if loop.first }}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls"
    " %}{{ c.function.name }}<|x|>{% else %}<|end|>{% endfor %}"
)
OTHER_HEADER = (
    "{% if m.role == 'user' %}U{{ m.content }};{% else %}{{ '<|x|>' if not loop.first }}name: {{"
    " m.content }};{% endif %}"
)


@dataclass(frozen=True)
class Answers:
    """A chat template, its generation prompt, a chat, and the answers in its text."""

    source: str
    prompt: str
    chat: list[dict[str, Any]]
    expected: list[str]


@pytest.mark.parametrize(
    "source, prompt, chat, expected",
    rows(
        # The first answer lacks the header's first token.
        Answers(
            source=OTHER_HEADER,
            prompt="<|x|>name:",
            chat=[assistant("hi"), *PAIR],
            expected=[" hi;", " a1;", " a2;"],
        ),
        # The header in the chat ends with a line break that the prompt lacks, or the other way
        # round.
        Answers(
            source="<{{ m.role }}>\n{{ m.content }}\n",
            prompt="<assistant>",
            chat=PAIR,
            expected=["\na1\n", "\na2\n"],
        ),
        Answers(
            source="<{{ m.role }}>{{ m.content }}\n",
            prompt="<assistant>\n",
            chat=PAIR,
            expected=["a1\n", "a2\n"],
        ),
        # The template writes the number of messages, so all offsets shift. The code therefore
        # searches for each answer, which ends with the ending.
        Answers(
            source="{{ messages | length if loop.first }}<{{ m.role }}>{{ m.content }}<|end|>",
            prompt="<assistant>",
            chat=PAIR,
            expected=["a1<|end|>", "a2<|end|>"],
        ),
        Answers(
            source="{{ messages | length if loop.first }}<{{ m.role }}>{{ m.content }}",
            prompt="<assistant>",
            chat=PAIR[:2],
            expected=["a1"],
        ),
        # A chat may contain the private-use character that marks answers during the search.
        Answers(
            source="{{ messages | length if loop.first }}<{{ m.role }}>{{ m.content }}<|end|>",
            prompt="<assistant>",
            chat=[user("\ue100q"), assistant("\ue101")],
            expected=["\ue101<|end|>"],
        ),
        # One prefix of the chat cannot be rendered. No text around an answer is the same in a
        # shorter chat. An ending appears before the last answer.
        Answers(
            source=(
                "{{ m.a.b if messages | length == 2 and messages[-1].content == 'a1' }}<{{ m.role"
                " }}>{{ m.content }}\n"
            ),
            prompt="<assistant>",
            chat=PAIR,
            expected=["a1\n", "a2\n"],
        ),
        Answers(
            source="{{ messages | length }}{{ m.content }}",
            prompt="",
            chat=PAIR,
            expected=["a1", "a2"],
        ),
        Answers(
            source=OTHER_ENDING,
            prompt="<assistant>",
            chat=[*PAIR[:3], assistant("", {"x": 1})],
            expected=["a1<|end|>", "f<|x|>"],
        ),
        # Answers without any surrounding text.
        Answers(source="{{ m.content }}", prompt="", chat=PAIR, expected=["a1", "a2"]),
        # Two consecutive answers; only the second begins with the header.
        Answers(
            source="<{{ m.role }}>{{ m.content }}.",
            prompt="<assistant>",
            chat=[user("q"), assistant("a"), assistant("<assistant>b")],
            expected=["a.", "<assistant>b."],
        ),
    ),
)
def test_answers_of_a_chat(source, prompt, chat, expected):
    assert answers(template(each(source, prompt)), chat) == expected


@pytest.mark.parametrize(
    "source, number",
    [
        # No suffix of the prompt occurs in the chat.
        (
            (
                "{{ '[b]' if m.role == 'assistant' else '[u]' }}{{ m.content }};{{ messages |"
                " length }}"
            ),
            2,
        ),
        # The template does not write the answer.
        (
            (
                "{{ 'x' if m.role == 'assistant' else m.content }}{{ messages | length if"
                " loop.first }}"
            ),
            2,
        ),
        # The last answer is rendered before the first one.
        ("{{ 'a2|' if loop.first and messages[-1].content == 'a2' }}{{ m.content }}<|end|>", 4),
    ],
)
def test_an_answer_that_cannot_be_found_is_refused(source, number):
    with pytest.raises(
        ConfigError,
        match=(
            f"^row 1, message {number}: the chat template changes this answer, so its tokens cannot"
            " be located"
        ),
    ):
        answers(template(each(source, "<assistant>" if "[b]" in source else "")), PAIR)


MARKED = (
    "{% if m.role == 'assistant' %}{{ 'A' }}{% generation %}{{ m.content }}.{% endgeneration %}{%"
    " else %}{{ m.content }}{% endif %}"
)


@pytest.mark.parametrize(
    "silent, expected",
    [
        ((), ["a.", "b.", "c."]),
        ((1,), ["b.", "c."]),
        ((2,), ["a.", "c."]),
        ((4,), ["a.", "b."]),
        ((1, 2), ["c."]),
        ((1, 2, 4), []),
    ],
)
@pytest.mark.parametrize("source", [MARKED, MARKED.replace("{{ 'A' }}", "")])
def test_marked_answers_that_are_excluded_are_left_out(source, silent, expected):
    """Excluded answers are not trained on, even if the answer before or after is included."""
    chat = [user("q"), assistant("a"), assistant("b"), user("r"), assistant("c")]
    chat = [
        message | ({"train": False} if number in silent else {})
        for number, message in enumerate(chat)
    ]
    assert answers(template(each(source, "A" if "'A'" in source else "")), chat) == expected


def test_tools_and_system_reach_every_part_of_a_chat():
    source = (
        "{{ tools | length if tools }}{{ messages[0].content if messages[0].role == 'system' }}"
        + each("<{{ m.role }}>{{ m.content }}\n", "<assistant>")
    )
    found = template(source)
    assert found.answers([system("S"), *PAIR], TOOLS, "row 1")[1] == [(2, (32, 35)), (4, (55, 58))]
    assert answers(found, [*PAIR[:2], tool("t"), assistant("b")], TOOLS) == ["a1\n", "b\n"]
