"""Chats in data sets: the forms of rows, recognised by their columns, and their messages."""

import contextlib
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from ..spec.refusal import Refusal, refuse
from .rows import is_empty

Message = dict[str, Any]
Row = dict[str, Any]
Content = list[Message] | Row  # a chat: its messages, or a dictionary with messages, tools and form

ROLES = ("assistant", "developer", "function", "ipython", "system", "tool", "user")
SPEAKERS = {  # of ShareGPT, whose other speakers are roles
    "human": "user", "gpt": "assistant", "chatgpt": "assistant",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
}  # fmt: skip
TOOLS = "tools"  # the column of the tools that a chat may call
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # equivalent keys of a message
# keys of a message
UNDERSTOOD = {"role", "content", "train", "tool_calls", "tool_call_id", "name", *THOUGHTS}
SKIP = "leave the row out (--bad_rows skip)"


# Forms of rows
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A form of rows: its required and optional columns, and the function that makes messages of a
    row.
    """

    name: str
    columns: tuple[str, ...]
    optional: tuple[str, ...]
    messages: Callable[[Row, str], Any]

    def present(self, names: Collection[str]) -> list[str]:
        """List the columns of this form that are among `names`."""
        return [name for name in (*self.columns, *self.optional) if name in names]

    def content(self, row: Row, place: str, padded: bool) -> Content | None:
        """Return the chat of a row; None for an empty row. Raises `Refusal`.

        `padded`: objects have the keys of all rows, as in tables.
        """
        messages = self.messages(row, place)
        if not messages:
            return None
        tools = tools_of(row.get(TOOLS), place) if TOOLS in self.optional else None
        if padded:
            tools, messages = (
                without_nulls(tools),
                [_without_nulls_in_calls(message) for message in messages],
            )
        if self.name == OPENAI and not tools:
            return messages
        return {"messages": messages, "form": self.name} | ({TOOLS: tools} if tools else {})


OPENAI = "OpenAI messages"


def forms(messages_field: str) -> tuple[Form, ...]:
    """List the supported forms, in the order in which they are tried.

    If `messages_field` is not the default, it is the only column of chats.
    """

    def named(row: Row, place: str) -> list[Message]:
        return _list(row[messages_field], place)

    openai = Form(OPENAI, (messages_field,), ("system", TOOLS), _with_system(named))
    if messages_field != "messages":
        return (openai,)
    optional = ("input", "system", "history")
    return (
        openai,
        Form(
            "ShareGPT (conversations)",
            ("conversations",),
            ("system", TOOLS),
            _with_system(_sharegpt),
        ),
        Form(
            "Alpaca (instruction, input, output)",
            ("instruction", "output"),
            optional,
            _with_system(_alpaca),
        ),
        Form(
            "prompts and completions",
            ("prompt", "completion"),
            ("system", TOOLS),
            _with_system(_completion),
        ),
    )


def form_of(names: Collection[str], messages_field: str = "messages") -> Form | None:
    """Return the form of rows with these columns; None if they match no form."""
    return next(
        (form for form in forms(messages_field) if all(name in names for name in form.columns)),
        None,
    )


def _with_system(
    messages: Callable[[Row, str], list[Message]],
) -> Callable[[Row, str], list[Message]]:
    def made(row: Row, place: str) -> list[Message]:
        found, system = messages(row, place), row.get("system")
        if system is not None and not isinstance(system, str):
            raise _wrong(place, "system", system, "text")
        if not system or not found or _is_system(found[0], system):
            return found
        return [{"role": "system", "content": system}, *found]

    return made


def _is_system(message: Any, text: str) -> bool:
    """Return True if a message is a system message with this text."""
    if not isinstance(message, dict):
        return False
    return (
        message.get("role", message.get("from")) == "system"
        and message.get("content", message.get("value")) == text
    )


def is_json_chat(value: Any) -> bool:
    """Return True for a text that is the JSON of a chat.

    Such a text would be learned with its brackets and keys.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return False
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return False
    messages = found if isinstance(found, list) else [found]
    return bool(messages) and all(
        isinstance(message, dict)
        and ({"role", "content"} <= message.keys() or {"from", "value"} <= message.keys())
        for message in messages
    )


# what it is, and the fix
JSON_CHAT = "a chat written as JSON text", "make it a list of messages (json.loads of the text)"


def _list(value: Any, place: str) -> list[Message]:
    if is_json_chat(value):
        raise refuse(
            place,
            f"contains {JSON_CHAT[0]}, but --messages_field requires a list of messages",
            f"{JSON_CHAT[1]}, or {SKIP}",
        )
    if is_empty(value):
        return []
    if not isinstance(value, list):
        rule = (
            f"must be a list of messages (--messages_field), not {type(value).__name__}"
            f" {str(value)[:40]!r}"
        )
        raise refuse(
            place, rule, f"name another column with --messages_field, correct the row, or {SKIP}"
        )
    return value


def _sharegpt(row: Row, place: str) -> list[Message]:
    return _list(row["conversations"], place)


def _alpaca(row: Row, place: str) -> list[Message]:
    for name in ("instruction", "input", "output"):
        if row.get(name) is not None and not isinstance(row[name], str):
            raise _wrong(place, name, row[name], "text")
    question, history = (
        "\n".join(filter(None, (row["instruction"], row.get("input")))),
        row.get("history") or [],
    )
    if is_empty(row["output"]) and not history:
        return []
    if not _are_turns(history):
        raise _wrong(
            place, "history", history, "a list of pairs of texts: a question and its answer"
        )
    turns = [*history, (question, row["output"] or "")]
    return [
        message
        for asked, answer in turns
        for message in (
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answer},
        )
    ]


def _are_turns(history: Any) -> bool:
    """Return True for a list of pairs of texts, the earlier turns of an Alpaca row.

    Their answers are learned.
    """

    def is_turn(turn: Any) -> bool:
        return (
            isinstance(turn, list)
            and len(turn) == 2
            and all(isinstance(text, str) for text in turn)
        )

    return isinstance(history, list) and all(map(is_turn, history))


def _completion(row: Row, place: str) -> list[Message]:
    """Return the chat of a prompt and its completion, which are texts or lists of messages.

    Only the completion is learned.
    """
    prompt, completion = row["prompt"], row["completion"]
    if is_empty(completion):
        return []
    if is_empty(prompt):
        prompt = "" if isinstance(row["completion"], str) else []
    for name, value in (("prompt", prompt), ("completion", completion)):
        if is_json_chat(value):
            raise refuse(place, f"its {name} contains {JSON_CHAT[0]}", f"{JSON_CHAT[1]}, or {SKIP}")
    if isinstance(prompt, str) and isinstance(completion, str):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            raise _wrong(
                place, name, value, "a list of messages (or prompt and completion both text)"
            )
    return [*map(_unlearned, prompt), *completion]


def _unlearned(message: Any) -> Message:
    return {**message, "weight": None, "training": None, "train": False}


def _wrong(place: str, name: str, value: Any, expected: str) -> Refusal:
    rule = f"its {name} must be {expected}, not {type(value).__name__} {str(value)[:40]!r}"
    return refuse(
        place,
        rule,
        f"name the column of the chats with --messages_field, correct the row, or {SKIP}",
    )


def tools_of(value: Any, place: str) -> list[Any]:
    """Parse the tools of a row: a list of descriptions, or a list as JSON text.

    A description may also be JSON text.
    """
    try:
        tools = json.loads(value.strip() or "[]") if isinstance(value, str) else value
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools or ()]
    except (ValueError, TypeError) as error:
        raise refuse(
            place, f"its tools cannot be read: {error}", f"write a JSON list of tools, or {SKIP}"
        ) from error
    if not all(isinstance(tool, dict) for tool in tools):
        rule = f"its tools must be a list of tool descriptions, not {str(tools)[:40]!r}"
        raise refuse(place, rule, f"write a JSON list of objects, or {SKIP}")
    return tools


def without_nulls(value: Any) -> Any:
    """Drop null entries of objects.

    Parquet and Arrow add them, because all rows of a column have the same keys.
    """
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _without_nulls_in_calls(message: Any) -> Any:
    if not isinstance(message, dict) or not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": without_nulls(message["tool_calls"])}


# Messages
# --------------------------------------------------------------------------------------------------


def messages_of(chat: Any, place: str, more_roles: Collection[str] = ()) -> list[Message]:
    """Return the messages of a chat in one form: role, content (text), tool_calls, train, and the
    keys that only a template reads.

    Raises `Refusal` for an unreadable message, and for a role that is neither in `ROLES` nor in
    `more_roles`.
    """
    if not isinstance(chat, list) or not chat:
        rule = f"a chat must be a list of messages, not {type(chat).__name__} {str(chat)[:40]!r}"
        raise refuse(place, rule, "name the column of the chats with --messages_field")
    try:
        messages = [_message(message) for message in chat]
    except _Unreadable as error:
        raise refuse(place, error.rule, f"{error.fix}, or {SKIP}") from error
    for message in messages:
        if message["role"] not in ROLES and message["role"] not in more_roles:
            raise UnknownRole(place, message["role"], {message["role"] for message in messages})
    return messages


class UnknownRole(Refusal):
    """The refusal of an unknown role; `met` are the roles in the chat."""

    def __init__(self, place: str, role: str, met: Iterable[str]):
        roles = (
            f"these rows use the roles {', '.join(sorted(met))}, and the known roles are"
            f" {', '.join(ROLES)}"
        )
        fix = f"rename the roles in the rows (an answer has the role assistant), or {SKIP}"
        super().__init__(refuse(place, f"a message has the role {role!r}: {roles}", fix).problems)
        self.place, self.role, self.met = place, role, set(met)


class _Unreadable(ValueError):
    """An unreadable message: the rule that it breaks, and the fix."""

    def __init__(self, rule: str, fix: str):
        super().__init__(rule)
        self.rule, self.fix = rule, fix


def _message(message: Any) -> Message:
    if isinstance(message, dict) and "role" not in message and isinstance(message.get("from"), str):
        message = _of_sharegpt(message)
    fix = "convert the rows to that form"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _Unreadable(
            "a message requires the strings 'role' and 'content', but this one is"
            f" {str(message)[:60]}",
            fix,
        )
    made = {
        key: value
        for key, value in message.items()
        if value is not None and key not in ("weight", "train", "training")
    }
    if not made.get("tool_calls"):
        made.pop("tool_calls", None)
    elif not isinstance(made["tool_calls"], list) or not all(
        _is_call(call) for call in made["tool_calls"]
    ):
        given = str(made["tool_calls"])[:60]
        rule = f"the tool_calls of a message must be a list of named functions, not {given}"
        raise _Unreadable(rule, fix)
    content = _text(made.get("content"))
    if content is None:
        speaks = "tool_calls" in made or any(isinstance(made.get(key), str) for key in THOUGHTS)
        if made.get("content") is not None or not speaks:
            rule = (
                "a message requires the strings 'role' and 'content', but this one is"
                f" {str(message)[:60]}"
            )
            raise _Unreadable(rule, f"{fix} (a list of text parts or tool_calls is also accepted)")
        content = ""
    made["content"] = content
    if (train := _trained(message)) is not None:
        made["train"] = train
    return made


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _text(content: Any) -> str | None:
    """Return the text of a message's content, which may be a list of text parts; None if it is
    neither.
    """
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else None


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and isinstance(part.get("text"), str)
        and part.get("type", "text") == "text"
    )


def _of_sharegpt(message: Message) -> Message:
    speaker, value = message["from"], message.get("value")
    made = {key: entry for key, entry in message.items() if key not in ("from", "value")}
    made |= {"role": SPEAKERS.get(speaker, speaker), "content": value}
    if speaker == "function_call" and isinstance(value, str):
        try:
            calls = json.loads(value)
        except ValueError as error:
            raise _Unreadable(
                f"a function_call is not JSON: {error}", "write a name and its arguments as JSON"
            ) from error
        calls = calls if isinstance(calls, list) else [calls]
        made |= {
            "content": None,
            "tool_calls": [{"type": "function", "function": call} for call in calls],
        }
    return made


def _trained(message: Message) -> bool | None:
    """Return True or False for `weight`, `train` or `training` of a message; None if the message
    has no such key.
    """
    found = {
        key: message[key] for key in ("weight", "train", "training") if message.get(key) is not None
    }
    for key, value in found.items():
        is_wrong_type = isinstance(value, bool) == (key == "weight")
        if is_wrong_type or value not in (0, 1):
            values = "0 or 1" if key == "weight" else "true or false"
            raise _Unreadable(
                f"the {key} of a message must be {values}, not {value!r}", f"write {values}"
            )
    if len({bool(value) for value in found.values()}) > 1:
        raise _Unreadable(
            f"a message cannot be both trained on and excluded: {found}",
            "keep only one of these keys",
        )
    return bool(next(iter(found.values()))) if found else None


def learned(message: Message) -> bool:
    """Return True unless the row excludes this message from training."""
    return bool(message.get("train", True))


def unknown_keys(messages: list[Message], is_named: Callable[[str], bool]) -> set[str]:
    """Find the keys of messages that neither training nor the template reads, such as `train` of a
    question.
    """
    keys = {key for message in messages for key in message} - UNDERSTOOD
    asked = {
        message["role"]
        for message in messages
        if message.get("train") and message["role"] != "assistant"
    }
    return {key for key in keys if not is_named(key)} | {
        f"train or weight of {role} messages" for role in asked
    }


def text_pieces(message: Message) -> list[str]:
    """Return the texts of an answer, which are looked up in the rendered chat.

    They are its content, its thoughts, and the names and arguments of its calls.
    """
    pieces = list(
        dict.fromkeys(
            [
                message["content"],
                *(message[key] for key in THOUGHTS if isinstance(message.get(key), str)),
            ]
        )
    )
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        arguments = function.get("arguments")
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        pieces += [function["name"], *_strings(arguments)]
    return pieces


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*map(str, value), *(text for entry in value.values() for text in _strings(entry))]
    if isinstance(value, list):
        return [text for entry in value for text in _strings(entry)]
    return [value] if isinstance(value, str) else []


def parts_of(content: str) -> list[Message]:
    """Return a text as a content that is a list of parts."""
    return [{"type": "text", "text": content}]


def with_arguments(message: Message, as_dictionary: bool, as_text: bool) -> Message:
    """Return a message whose tool calls have arguments of a type that the template takes: a
    dictionary or JSON text.

    Arguments of an accepted type stay as they are, and a call without arguments gets empty ones.
    Raises ValueError for text that is not JSON.
    """
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if arguments is None:
            arguments = {}
        if as_text and not as_dictionary and isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif as_dictionary and not as_text and isinstance(arguments, str):
            arguments = _parsed(arguments, function["name"])
        function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _parsed(arguments: str, name: str) -> Any:
    """Parse the arguments of a tool call. Raises ValueError that names the call."""
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except ValueError as error:
        raise ValueError(
            f"the arguments of the call of {name} are not JSON: {error}, in {arguments[:40]!r}"
        ) from error


def another_answer(message: Message, mark: str) -> Message:
    """Return an answer of the same kind, with `mark` instead of its text and calls."""
    if not message.get("tool_calls"):
        return {"role": "assistant", "content": mark}
    calls = []
    for call in message["tool_calls"]:
        function = {"name": mark, "arguments": {}}
        calls.append({**call, "function": function} if "function" in call else {**call, **function})
    content = mark if message.get("content") else message.get("content")
    return {**message, "content": content, "tool_calls": calls}
