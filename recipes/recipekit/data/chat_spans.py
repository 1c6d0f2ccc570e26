"""A tokenizer's chat template: renders chats, and finds the text of each answer in them.

An answer is everything that the template writes between the generation prompt and the next message: content, thoughts,
tool calls and the end of the turn. A template that marks its answers (`{% generation %}`) is taken at its word.
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

from ..refusal import Refusal, refuse
from .chat_rows import Message, parts_of, with_arguments

Span = tuple[int, int]  # characters of a rendered chat: the first, and the one after the last

GENERATION = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")
TODAY = re.compile(r"strftime_now\(\s*(?P<quote>['\"])(?P<format>.*?)(?P=quote)\s*\)")
UNRENDERABLE = (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError)
TAILS = (256, 64, 16, 8, 4)  # characters of a prompt by which its end is looked up
QUESTION, ANSWER = "\ue000", "\ue001"  # of the template's samples: private characters
CALL_ID = "call00001"  # nine letters and digits, as Mistral's templates demand
FIX = "check the roles, their order and the tool calls in the row"


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """The chat template of a tokenizer. `day`: the date that a template writes as today's; None: the day on which it is rendered."""

    tokenizer: Any
    day: date | None = None

    @functools.cached_property
    def sources(self) -> dict[bool, str]:
        """The template's text without tools (False) and with tools (True): some tokenizers have two."""
        templates = {}
        for has_tools in (False, True):
            try:
                templates[has_tools] = self.tokenizer.get_chat_template(None, [{}] if has_tools else None)
            except ValueError as error:
                rule = "has several chat templates, and none is the default"
                raise refuse("--tokenizer", rule, "name one of them `default` in its chat_template") from error
        return templates

    @functools.cached_property
    def is_dated(self) -> bool:
        """True if the template writes today's date."""
        return any("strftime_now" in source for source in self.sources.values())

    @functools.cached_property
    def is_marked(self) -> bool:
        """True if the template marks what the assistant generates."""
        return all(GENERATION.search(source) for source in self.sources.values())

    @functools.cached_property
    def _dated_sources(self) -> dict[bool, str]:
        if not self.is_dated or self.day is None:
            return self.sources
        day = self.day
        found = {key: TODAY.sub(lambda call: repr(day.strftime(call["format"])), source) for key, source in self.sources.items()}
        if any(re.search(r"strftime_now\s*\(", source) for source in found.values()):
            rule = "its chat template computes the format of today's date, which must stay the same for the whole run"
            raise refuse("--tokenizer", rule, "write the format as a string: strftime_now('%d %B %Y')")
        return found

    # Rendering ----------------------------------------------------------------------------------------------------

    def render(self, messages: list[Message], tools: list[Any] | None = None, prompt: bool = False) -> str:
        """Render a chat as text; with `prompt` the generation prompt follows. Raises one of `UNRENDERABLE`."""
        return self._render(messages, tools, prompt, marks=False)[0]

    def _render(self, messages: list[Message], tools: list[Any] | None, prompt: bool, marks: bool) -> tuple[str, list[Span]]:
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

    def rendered(self, messages: list[Message], tools: list[Any] | None, place: str) -> tuple[str, list[Span]]:
        """Render a chat: (text, the spans that the template marks). Raises `Refusal`."""
        try:
            return self._render(messages, tools, False, self.is_marked)
        except UNRENDERABLE as error:
            if isinstance(error, Refusal):
                raise
            raise refuse(place, f"the chat template cannot render this chat: {error}", FIX) from error

    def in_its_form(self, messages: list[Message]) -> list[Message]:
        """Give contents the form that the template takes (text, or a list of parts), and arguments of tool calls (JSON text, or a dictionary)."""
        if self._takes_parts:
            messages = [{**message, "content": parts_of(message["content"])} for message in messages]
        if not any(message.get("tool_calls") for message in messages):
            return messages
        messages = [{**message, **self._no_content} if message.get("tool_calls") and not message["content"] else message for message in messages]
        return [with_arguments(message, *self._arguments) if message.get("tool_calls") else message for message in messages]

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """True if the template writes a content that is a list of parts, and not one that is a text, as those of many models of images."""
        return not self._writes(QUESTION) and self._writes(parts_of(QUESTION))

    def _writes(self, content: Any) -> bool:
        """Return True if the template writes a question with this content, in which `QUESTION` is."""
        chat = [{"role": "user", "content": content}]
        try:
            texts, _ = render_jinja_template([chat], chat_template=self._dated_sources[False], **self.tokenizer.special_tokens_map)
        except UNRENDERABLE as error:
            if isinstance(error, Refusal):
                raise
            return False
        return QUESTION in texts[0]

    @functools.cached_property
    def _arguments(self) -> tuple[bool, bool]:
        """Whether the template takes the arguments of a tool call as (a dictionary, JSON text), which sample calls show."""
        as_text = '{"a": "b"}'
        return "{'a'" not in (self._sample_call({"a": "b"}) or "{'a'"), as_text in self._sample_call(as_text)

    @functools.cached_property
    def _no_content(self) -> Message:
        """The content of a message that is a tool call alone, in the form with which the template writes the call."""
        contents: tuple[Message, ...] = ({"content": ""}, {"content": None})
        return next((content for content in contents if any(self._sample_call(arguments, content) for arguments in ({}, "{}"))), contents[0])

    def _sample_call(self, arguments: Any, content: Message | None = None) -> str:
        """Render a chat whose answer is a tool call; empty if the template does not take these arguments, or writes no call."""
        call = {"id": CALL_ID, "type": "function", "function": {"name": ANSWER, "arguments": arguments}}
        answer = {"role": "assistant", "tool_calls": [call], **(self._no_content if content is None else content)}
        try:
            texts, _ = render_jinja_template(
                [[{"role": "user", "content": QUESTION}, answer]], chat_template=self._dated_sources[True], **self.tokenizer.special_tokens_map
            )
        except UNRENDERABLE:
            return ""
        return texts[0] if ANSWER in texts[0] and "None" not in texts[0] else ""

    # The samples: what the template writes around an answer -----------------------------------------------------------

    @functools.cached_property
    def _sample(self) -> str:
        """Two questions and two answers, rendered; empty if the template takes no such chat."""
        return self.attempt(_sample_chat(2)) or ""

    @functools.cached_property
    def header(self) -> str:
        """The generation prompt; of a template without one, what it writes between a question and every answer."""
        ask = _sample_chat(1)[:1]
        bare, prompted = self.attempt(ask), self.attempt(ask, prompt=True)
        if bare is not None and prompted is not None and prompted != bare:
            return prompted[self._shared(bare, prompted) :]
        parts = self._sample.split(ANSWER)
        if bare is None or len(parts) != 3 or not parts[0].startswith(bare) or QUESTION not in parts[1]:
            return ""
        first = parts[0][len(bare) :]
        second = self.attempt(_sample_chat(2)[:3]) or ""
        second = (parts[0] + ANSWER + parts[1])[len(second) :]
        header = first[: _common_prefix(first, second)] if second else first
        return header if header.strip() else ""

    @functools.cached_property
    def prompts_itself(self) -> bool:
        """True if the template writes `header` where a generation prompt is asked for."""
        ask = _sample_chat(1)[:1]
        return not self.header or (self.attempt(ask, prompt=True) or "").endswith(self.header)

    @functools.cached_property
    def ending(self) -> str:
        """What the template writes behind an answer that a question follows."""
        first = self.attempt(_sample_chat(1))
        begin = self._sample.find(ANSWER) + 1
        end = self.end_of(first, self._sample) if first is not None and begin else None
        return self._sample[begin:end] if end is not None and end >= begin else ""

    @functools.cached_property
    def endings(self) -> tuple[str, ...]:
        """What the template writes behind an answer: one that a question follows, the last one, one that is a tool call."""
        found = [self.ending]
        if (last := self.attempt(_sample_chat(1))) and ANSWER in last:
            found.append(last.partition(ANSWER)[2])
        return tuple(dict.fromkeys([*found, self._ending_of_calls]))

    @functools.cached_property
    def _ending_of_calls(self) -> str:
        return (self._sample_call({}) or self._sample_call("{}")).rpartition(ANSWER)[2]

    @functools.cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end an answer: the last added one behind it."""
        ids, special = self.tokenizer.get_added_vocab(), self.tokenizer.added_tokens_decoder
        behind = [(ending, ids[tokens[-1]]) for ending in self.endings if (tokens := self._added.findall(ending))]
        return tuple(dict.fromkeys(token for ending, token in behind if ending != self._ending_of_calls or special[token].special))

    @functools.cached_property
    def roles(self) -> frozenset[str]:
        """The roles that the template compares with."""
        return frozenset(role for source in self.sources.values() for _, role in re.findall(r"==\s*(['\"])([\w .-]+)\1", source))

    def names(self, key: str) -> bool:
        """Return True if the template names this key."""
        return any(re.search(rf"(?<![\w]){re.escape(key)}(?![\w])", source) for source in self.sources.values())

    @functools.cached_property
    def _added(self) -> re.Pattern[str]:
        tokens = sorted(map(str, self.tokenizer.get_added_vocab()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    @functools.cached_property
    def steps_back(self) -> tuple[int, ...]:
        """Lengths by which a prompt may be shortened until it agrees with the chat: no part, the header's last part, its last two, ..."""
        return tuple(itertools.accumulate((len(part) for part in reversed(self._parts(self.header))), initial=0))

    def _parts(self, text: str) -> list[str]:
        """Cut a text at its added tokens and line ends."""
        places = {0, len(text)} | {place for found in self._added.finditer(text) for place in found.span()}
        places |= {found.end() for found in re.finditer("\n", text)}
        return [text[first:last] for first, last in itertools.pairwise(sorted(places))]

    def _shared(self, one: str, other: str) -> int:
        """Count the leading characters that are equal, without a part of an added token of either text."""
        common = _common_prefix(one, other)
        for text in (one, other):
            for found in self._added.finditer(text, max(0, common - 64)):
                if found.start() >= common:
                    break
                if found.end() > common:
                    return found.start()
        return common

    # Answers ------------------------------------------------------------------------------------------------------

    def answers(self, messages: list[Message], tools: list[Any] | None, place: str) -> tuple[str, list[tuple[int, Span]]]:
        """Render a chat: (text, of each answer the number of its message and its span; -1 if the template marks it). Raises `Refusal`."""
        text, marked = self.rendered(messages, tools, place)
        if self.is_marked and all(learned(message) for message in messages):
            return text, [(-1, span) for span in marked]
        spans = list(_Chat(self, messages, tools, place, text).spans())
        if not self.is_marked:
            return text, spans
        silent = [span for number, span in spans if not learned(messages[number])]
        return text, [(-1, span) for span in marked if not any(_overlap(span, other) for other in silent)]

    def attempt(self, messages: list[Message], tools: list[Any] | None = None, prompt: bool = False) -> str | None:
        """Render a part of a chat; None if the template refuses this part alone."""
        try:
            return self.render(messages, tools, prompt)
        except UNRENDERABLE as error:
            if isinstance(error, Refusal):
                raise
            return None

    def end_of(self, part: str, text: str) -> int | None:
        """Find where the last answer of `part` ends in the longer chat `text`, where it may end with another token."""
        end = self._shared(part, text)
        rest = part[end:]
        if self._added.sub("", rest).strip():
            return None
        if any(found.end() == len(text[:end].rstrip()) for found in self._added.finditer(text, max(0, end - 64), end)):
            return end
        token = self._added if rest.strip() else re.compile(re.escape(self.tokenizer.eos_token or "\0"))
        late = token.match(text, end + len(text[end:]) - len(text[end:].lstrip()))
        return late.end() if late else end


@dataclass(frozen=True)
class _Chat:
    """A chat and its text, in which the answers are looked for."""

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
        """Find where an answer begins: behind the generation prompt; None if the text does not begin with what is before the answer."""
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
        """Find where an answer ends; None if the text does not begin with the messages up to it."""
        if number + 1 == len(self.messages):
            return len(self.text)
        part = self.template.attempt(self.messages[: number + 1], self.tools)
        return None if part is None else self.template.end_of(part, self.text)

    def _looked_up(self, number: int, low: int) -> Span:
        """Find an answer whose chat is rendered otherwise up to here than as a whole, as where thoughts or tools move.

        The chat is rendered once more with another answer in its place: what differs is the answer, between its header and its ending.
        """
        text = self.text
        mark = next(chr(code) for code in range(0xE100, 0xF8FF) if chr(code) not in text)
        changed = [*self.messages[:number], _marked(self.messages[number], mark), *self.messages[number + 1 :]]
        other = self.template.attempt(changed, self.tools)
        if other is None or mark not in other:
            raise _not_found(self.place, number)
        first = _common_prefix(text, other)
        last = len(text) - min(_common_prefix(text[::-1], other[::-1]), len(text) - first)
        start, end = self._behind_prompt(self._prompt(number) or self.template.header, low, first), len(text)
        if number + 1 < len(self.messages):
            endings = list(filter(str.strip, self.template.endings)) or [self.template.ending]
            ends = [(at, len(ending)) for ending in endings if (at := text.find(ending, last)) >= 0]
            end = sum(min(ends, default=(-1, 0)))
        if start is None or end < last or first < low:
            raise _not_found(self.place, number)
        return start, end

    def _behind_prompt(self, prompt: str, low: int, high: int) -> int | None:
        """Find the last place between `low` and `high` where the text ends as the prompt does."""
        if not prompt:
            return high
        for length, back in itertools.product(TAILS, self.template.steps_back):
            tail = prompt[: len(prompt) - back][-length:]
            if tail and (at := self.text.rfind(tail, low, high)) >= 0:
                return at + len(tail)
        return None if self.template.header else high


def learned(message: Message) -> bool:
    """Return True unless the row excludes this message from training."""
    return bool(message.get("train", True))


def _sample_chat(turns: int) -> list[Message]:
    return [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}] * turns


def _marked(message: Message, mark: str) -> Message:
    """Make another answer of the same kind, which says nothing but `mark`."""
    if not message.get("tool_calls"):
        return {"role": "assistant", "content": mark}
    calls = []
    for call in message["tool_calls"]:
        function = {"name": mark, "arguments": {}}
        calls.append({**call, "function": function} if "function" in call else {**call, **function})
    return {**message, "content": mark if message.get("content") else message.get("content"), "tool_calls": calls}


def _not_found(place: str, number: int) -> Refusal:
    rule = "the chat template changes this answer so that its tokens cannot be found"
    return refuse(f"{place}, message {number + 1}", rule, "look at the row and the template, or leave it out (--bad_rows skip)")


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _common_prefix(one: str, other: str) -> int:
    """Count the leading characters that are equal."""
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
