"""A tokenizer's chat template: rendered chats, and the spans of their answers.

An answer is everything that the template writes between the generation prompt and the next message:
content, thoughts, tool calls and the end of the turn. If a template marks its answers (`{%
generation %}`), these marks count.
"""

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from ..spec.refusal import Refusal, refuse
from .chat_rows import Message, another_answer, learned, parts_of, with_arguments

Span = tuple[int, int]  # characters of a rendered chat: the first, and the one after the last

GENERATION = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")
COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
TODAY = re.compile(r"strftime_now\(\s*(?P<quote>['\"])(?P<format>.*?)(?P=quote)\s*\)")
UNRENDERABLE = (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError)
TAILS = (256, 64, 16, 8, 4)  # lengths of a prompt's end that is looked up in a chat, in characters
QUESTION, ANSWER = "\ue000", "\ue001"  # contents of the sample chats: private characters
CALL_ID = "call00001"  # nine letters and digits, which Mistral's templates require
FIX = "check the roles, their order and the tool calls in the row"


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """The chat template of a tokenizer.

    `day`: the date that it writes as today's date; None: the day of rendering.
    """

    tokenizer: Any
    day: date | None = None

    @functools.cached_property
    def sources(self) -> dict[bool, str]:
        """The template's text for chats without tools (False) and with tools (True).

        Some tokenizers have two templates.
        """
        templates = {}
        for has_tools in (False, True):
            try:
                templates[has_tools] = self.tokenizer.get_chat_template(
                    None, [{}] if has_tools else None
                )
            except ValueError as error:
                rule = "has several chat templates and none named `default`"
                raise refuse(
                    "--tokenizer", rule, "rename one of them to `default` in its chat_template"
                ) from error
        return templates

    @functools.cached_property
    def _code(self) -> list[str]:
        """The template's texts without their comments."""
        return [COMMENT.sub("", source) for source in self.sources.values()]

    @functools.cached_property
    def is_dated(self) -> bool:
        """True if the template writes today's date."""
        return any("strftime_now" in source for source in self._code)

    @functools.cached_property
    def is_marked(self) -> bool:
        """True if the template marks what the assistant generates."""
        return all(GENERATION.search(source) for source in self._code)

    @functools.cached_property
    def _dated_sources(self) -> dict[bool, str]:
        if not self.is_dated or self.day is None:
            return self.sources
        day = self.day
        written = lambda call: repr(day.strftime(call["format"]))  # noqa: E731
        found = {key: TODAY.sub(written, source) for key, source in self.sources.items()}
        if any(
            re.search(r"strftime_now\s*\(", COMMENT.sub("", source)) for source in found.values()
        ):
            rule = (
                "its chat template computes the date format, but the date text must not change"
                " during a run"
            )
            raise refuse(
                "--tokenizer",
                rule,
                "write the format as a literal string in the template: strftime_now('%d %B %Y')",
            )
        return found

    # Rendering
    # ----------------------------------------------------------------------------------------------

    def render(
        self, messages: list[Message], tools: list[Any] | None = None, prompt: bool = False
    ) -> str:
        """Render a chat as text, with the generation prompt if `prompt` is set.

        Raises one of `UNRENDERABLE`.
        """
        return self._render(messages, tools, prompt, marks=False)[0]

    def _render(
        self, messages: list[Message], tools: list[Any] | None, prompt: bool, marks: bool
    ) -> tuple[str, list[Span]]:
        if not messages:
            raise ValueError("a chat without messages")
        found: Any = render_jinja_template(
            [self.in_its_form(messages)],
            tools=tools,
            chat_template=self._dated_sources[bool(tools)],
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompt,
            **self.tokenizer.special_tokens_map,
        )
        (text,), spans = found
        return text, spans[0] if marks else []

    def rendered(
        self, messages: list[Message], tools: list[Any] | None, place: str
    ) -> tuple[str, list[Span]]:
        """Return (a chat as text, the spans that the template marks). Raises `Refusal`."""
        try:
            return self._render(messages, tools, False, self.is_marked)
        except UNRENDERABLE as error:
            if isinstance(error, Refusal):
                raise
            raise refuse(
                place, f"the chat template cannot render this chat: {error}", FIX
            ) from error

    def in_its_form(self, messages: list[Message]) -> list[Message]:
        """Return messages in the form that the template accepts.

        A content is a text or a list of parts. Arguments of a tool call are JSON text or a
        dictionary.
        """
        if self._takes_parts:
            messages = [
                {**message, "content": parts_of(message["content"])} for message in messages
            ]
        if not any(message.get("tool_calls") for message in messages):
            return messages
        return [
            self._with_calls(message) if message.get("tool_calls") else message
            for message in messages
        ]

    def _with_calls(self, message: Message) -> Message:
        return with_arguments(
            message if message["content"] else {**message, **self._no_content}, *self._arguments
        )

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """True if the template writes contents that are lists of parts, and no texts, as for many
        vision models.
        """
        return not self._writes(QUESTION) and self._writes(parts_of(QUESTION))

    def _writes(self, content: Any) -> bool:
        """Return True if the template writes a question with this content, which contains
        `QUESTION`.
        """
        chat = [{"role": "user", "content": content}]
        source, tokens = self._dated_sources[False], self.tokenizer.special_tokens_map
        try:
            texts, _ = render_jinja_template([chat], chat_template=source, **tokens)
        except UNRENDERABLE:
            return False
        return QUESTION in texts[0]

    @functools.cached_property
    def _arguments(self) -> tuple[bool, bool]:
        """(True if a tool call's arguments may be a dictionary, True if they may be JSON text), by
        sample calls.
        """
        as_text = '{"a": "b"}'
        return "{'a'" not in (
            self._sample_call({"a": "b"}) or "{'a'"
        ), as_text in self._sample_call(as_text)

    @functools.cached_property
    def _no_content(self) -> Message:
        """The content with which the template writes a message that only calls tools: "" or
        null.
        """
        contents: tuple[Message, ...] = ({"content": ""}, {"content": None})
        fitting = (
            content
            for content in contents
            if self._sample_call({}, content) or self._sample_call("{}", content)
        )
        return next(fitting, contents[0])

    def _sample_call(self, arguments: Any, content: Message | None = None) -> str:
        """Render a chat whose answer is a tool call; empty if the template fails on it or drops the
        call.
        """
        call = {
            "id": CALL_ID,
            "type": "function",
            "function": {"name": ANSWER, "arguments": arguments},
        }
        answer = {
            "role": "assistant",
            "tool_calls": [call],
            **(self._no_content if content is None else content),
        }
        chat = [{"role": "user", "content": QUESTION}, answer]
        source, tokens = self._dated_sources[True], self.tokenizer.special_tokens_map
        try:
            texts, _ = render_jinja_template([chat], chat_template=source, **tokens)
        except UNRENDERABLE:
            return ""
        return texts[0] if ANSWER in texts[0] and "None" not in texts[0] else ""

    # Sample chats: the text around an answer
    # --------------------------------------------------------------------------

    @functools.cached_property
    def _sample(self) -> str:
        """Two questions and two answers, rendered; empty if the template fails on them."""
        return self.attempt(_sample_chat(2)) or ""

    @functools.cached_property
    def header(self) -> str:
        """The generation prompt.

        If the template has no such prompt: the text between a question and every answer.
        """
        ask = _sample_chat(1)[:1]
        bare, prompted = self.attempt(ask), self.attempt(ask, prompt=True)
        if bare is not None and prompted is not None and prompted != bare:
            return prompted[self._shared(bare, prompted) :]
        parts = self._sample.split(ANSWER)
        if (
            bare is None
            or len(parts) != 3
            or not parts[0].startswith(bare)
            or QUESTION not in parts[1]
        ):
            return ""
        first = parts[0][len(bare) :]
        asked = self.attempt(_sample_chat(2)[:3])
        second = (parts[0] + ANSWER + parts[1])[len(asked) :] if asked else ""
        header = first[: _common_prefix(first, second)] if second else first
        return header if header.strip() else ""

    @functools.cached_property
    def prompts_itself(self) -> bool:
        """True if the template writes `header` as its generation prompt."""
        ask = _sample_chat(1)[:1]
        return not self.header or (self.attempt(ask, prompt=True) or "").endswith(self.header)

    @functools.cached_property
    def ending(self) -> str:
        """The text between an answer and the next question."""
        first = self.attempt(_sample_chat(1))
        begin = self._sample.find(ANSWER) + 1
        end = self.end_of(first, self._sample) if first is not None and begin else None
        return self._sample[begin:end] if end is not None and end >= begin else ""

    @functools.cached_property
    def endings(self) -> tuple[str, ...]:
        """The texts that follow an answer: before a question, at the end of a chat, after a tool
        call.
        """
        last = self.attempt(_sample_chat(1)) or ""
        return tuple(dict.fromkeys([self.ending, last.partition(ANSWER)[2], self._ending_of_calls]))

    @functools.cached_property
    def _ending_of_calls(self) -> str:
        return (self._sample_call({}) or self._sample_call("{}")).rpartition(ANSWER)[2]

    @functools.cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end an answer: the last added token of each ending, if the answer is
        learned up to there.
        """
        ids, special = self.tokenizer.get_added_vocab(), self.tokenizer.added_tokens_decoder
        behind = [
            (ending, ids[tokens[-1]])
            for ending in self.endings
            if (tokens := self._added.findall(self._learned(ending)))
        ]
        return tuple(
            dict.fromkeys(
                token
                for ending, token in behind
                if ending != self._ending_of_calls or special[token].special
            )
        )

    def _learned(self, ending: str) -> str:
        """Return the part of an answer's ending that is learned: all of it, unless `{% generation
        %}` marks less.
        """
        if not self.is_marked or ending == self._ending_of_calls:
            return ending
        text, spans = self._render(_sample_chat(2), None, False, marks=True)
        marked = [text[start:end].partition(ANSWER)[2] for start, end in spans]
        return ending[: max((_common_prefix(part, ending) for part in marked), default=0)]

    @functools.cached_property
    def roles(self) -> frozenset[str]:
        """The roles in comparisons of the template."""
        return frozenset(
            role
            for source in self._code
            for _, role in re.findall(r"==\s*(['\"])([\w .-]+)\1", source)
        )

    def names(self, key: str) -> bool:
        """Return True if the template names this key."""
        return any(
            re.search(rf"(?<![\w]){re.escape(key)}(?![\w])", source) for source in self._code
        )

    @functools.cached_property
    def _added(self) -> re.Pattern[str]:
        tokens = sorted(map(str, self.tokenizer.get_added_vocab()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    @functools.cached_property
    def steps_back(self) -> tuple[int, ...]:
        """Lengths by which a prompt may be shortened until the chat begins with it: 0, and the last
        parts of the header.
        """
        return tuple(
            itertools.accumulate(
                (len(part) for part in reversed(self._parts(self.header))), initial=0
            )
        )

    def _parts(self, text: str) -> list[str]:
        """Split a text at its added tokens and line ends."""
        pieces = itertools.chain(self._added.finditer(text), re.finditer("\n", text))
        places = {0, len(text)} | {place for found in pieces for place in found.span()}
        return [text[first:last] for first, last in itertools.pairwise(sorted(places))]

    def _shared(self, one: str, other: str) -> int:
        """Count the common leading characters of two texts, without a partial added token."""
        common = _common_prefix(one, other)
        for text in (one, other):
            for found in self._added.finditer(text, max(0, common - 64)):
                if found.start() >= common:
                    break
                if found.end() > common:
                    return found.start()
        return common

    # Answers
    # ----------------------------------------------------------------------------------------------

    def answers(
        self, messages: list[Message], tools: list[Any] | None, place: str
    ) -> tuple[str, list[tuple[int, Span]]]:
        """Return (a chat as text, (number of its message, span) of each answer). Raises `Refusal`.

        The number is -1 for an answer that the template marks.
        """
        text, marked = self.rendered(messages, tools, place)
        if self.is_marked and all(learned(message) for message in messages):
            return text, [(-1, span) for span in marked]
        spans = list(_Chat(self, messages, tools, place, text).spans())
        if not self.is_marked:
            return text, spans
        silent = [span for number, span in spans if not learned(messages[number])]
        return text, [
            (-1, (start, end))
            for start, end in marked
            if not any(start < last and first < end for first, last in silent)
        ]

    def attempt(
        self, messages: list[Message], tools: list[Any] | None = None, prompt: bool = False
    ) -> str | None:
        """Render a part of a chat; None if the template fails on it."""
        try:
            return self.render(messages, tools, prompt)
        except UNRENDERABLE as error:
            if isinstance(error, Refusal):
                raise
            return None

    def end_of(self, part: str, text: str) -> int | None:
        """Return the end of the last answer of `part` in the longer chat `text`; its last token may
        differ there.
        """
        end = self._shared(part, text)
        rest = part[end:]
        if self._added.sub("", rest).strip():
            return None
        if any(
            found.end() == len(text[:end].rstrip())
            for found in self._added.finditer(text, max(0, end - 64), end)
        ):
            return end
        token = (
            self._added if rest.strip() else re.compile(re.escape(self.tokenizer.eos_token or "\0"))
        )
        late = token.match(text, end + len(text[end:]) - len(text[end:].lstrip()))
        return late.end() if late else end


@dataclass(frozen=True)
class _Chat:
    """A chat and its rendered text."""

    template: ChatTemplate
    messages: list[Message]
    tools: list[Any] | None
    place: str
    text: str

    def spans(self) -> Iterator[tuple[int, Span]]:
        """Yield the number of each answer's message and its span. Raises `Refusal`."""
        low = 0
        for number, message in enumerate(self.messages):
            if message["role"] != "assistant":
                continue
            start, end = self._start(number), self._end(number)
            if start is None or end is None or not low <= start <= end:
                start, end = self._looked_up(number, low)
            low = end
            yield number, (start, end)

    def _start(self, number: int) -> int | None:
        """Return the start of an answer, after the generation prompt; None if the text does not
        begin with this prompt.
        """
        prompt = self._prompt(number)
        for back in self.template.steps_back if prompt else ():
            if self.text.startswith(prompt[: len(prompt) - back]):
                return len(prompt) - back
        return None

    def _prompt(self, number: int) -> str:
        before = self.messages[:number]
        prompt = self.template.attempt(before, self.tools, prompt=True) if before else None
        if prompt is None:
            return ""
        return prompt if self.template.prompts_itself else prompt + self.template.header

    def _end(self, number: int) -> int | None:
        """Return the end of an answer; None if the text does not begin with the messages up to
        it.
        """
        if number + 1 == len(self.messages):
            return len(self.text)
        part = self.template.attempt(self.messages[: number + 1], self.tools)
        return None if part is None else self.template.end_of(part, self.text)

    def _looked_up(self, number: int, low: int) -> Span:
        """Find an answer if the chat up to it is no prefix of the whole chat, for example because
        thoughts or tools move.

        Render the chat again with another answer. The two texts differ in the answer, between its
        header and its ending.
        """
        text = self.text
        mark = next(chr(code) for code in range(0xE100, 0xF8FF) if chr(code) not in text)
        changed = [
            *self.messages[:number],
            another_answer(self.messages[number], mark),
            *self.messages[number + 1 :],
        ]
        other = self.template.attempt(changed, self.tools)
        if other is None or mark not in other:
            raise _not_found(self.place, number)
        first = _common_prefix(text, other)
        last = len(text) - min(_common_prefix(text[::-1], other[::-1]), len(text) - first)
        start, end = (
            self._behind_prompt(self._prompt(number) or self.template.header, low, first),
            len(text),
        )
        if number + 1 < len(self.messages):
            endings = list(filter(str.strip, self.template.endings)) or [self.template.ending]
            ends = [(at, len(ending)) for ending in endings if (at := text.find(ending, last)) >= 0]
            end = sum(min(ends, default=(-1, 0)))
        if start is None or end < last or first < low:
            raise _not_found(self.place, number)
        return start, end

    def _behind_prompt(self, prompt: str, low: int, high: int) -> int | None:
        """Return the last place between `low` and `high` where the end of the prompt ends in the
        text.
        """
        for length, back in itertools.product(TAILS, self.template.steps_back):
            tail = prompt[: len(prompt) - back][-length:]
            if tail and (at := self.text.rfind(tail, low, high)) >= 0:
                return at + len(tail)
        return None if self.template.header else high


def _sample_chat(turns: int) -> list[Message]:
    return [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}] * turns


def _not_found(place: str, number: int) -> Refusal:
    rule = "the chat template changes this answer, so its tokens cannot be located"
    fix = "compare the row with the template, or leave the row out (--bad_rows skip)"
    return refuse(f"{place}, message {number + 1}", rule, fix)


def _common_prefix(one: str, other: str) -> int:
    """Count the common leading characters of two texts."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
