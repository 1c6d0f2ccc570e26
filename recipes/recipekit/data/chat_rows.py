"""Chats in data sets: row formats, which are recognized by their columns, and chat messages."""

import contextlib
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from ..spec.errors import ConfigError, config_error
from .rows import is_empty

Message = dict[str, Any]
ChatRow = dict[str, Any]
Content = (
    list[Message] | ChatRow
)  # a chat's messages, or a dictionary with messages, tools and form

ROLES = ("assistant", "developer", "function", "ipython", "system", "tool", "user")
SHAREGPT_ROLES = {  # ShareGPT speakers; all others are roles already
    "human": "user", "gpt": "assistant", "chatgpt": "assistant",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
}  # fmt: skip
TOOLS_COLUMN = "tools"  # column that lists the tools available to a chat
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # equivalent keys of a message
# keys of a message
KNOWN_MESSAGE_KEYS = {
    "role",
    "content",
    "train",
    "tool_calls",
    "tool_call_id",
    "name",
    *REASONING_KEYS,
}
SKIP_ROW_FIX = "leave the row out (--bad_rows skip)"


# Forms of rows
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatForm:
    """A row format: required columns, optional columns, and a function that extracts messages."""

    name: str
    columns: tuple[str, ...]
    optional: tuple[str, ...]
    messages: Callable[[ChatRow, str], Any]

    def present(self, names: Collection[str]) -> list[str]:
        """List the columns of this form that are among `names`."""
        return [name for name in (*self.columns, *self.optional) if name in names]

    def content(self, row: ChatRow, place: str, padded: bool) -> Content | None:
        """Return the chat in a row, or None for an empty row.

        If `padded`, every object in the row has the keys of all rows, as in Parquet and Arrow
        tables. Raise `ConfigError` for an unreadable row.
        """
        messages = self.messages(row, place)
        if not messages:
            return None
        tools = parse_tools(row.get(TOOLS_COLUMN), place) if TOOLS_COLUMN in self.optional else None
        if padded:
            tools, messages = (
                without_nulls(tools),
                [_without_nulls_in_calls(message) for message in messages],
            )
        if self.name == OPENAI and not tools:
            return messages
        return {"messages": messages, "form": self.name} | ({TOOLS_COLUMN: tools} if tools else {})


OPENAI = "OpenAI messages"


def chat_forms(messages_field: str) -> tuple[ChatForm, ...]:
    """Return the supported formats, in the order in which they are tried.

    If `messages_field` differs from the default, only the format with that column is supported.
    """

    def named(row: ChatRow, place: str) -> list[Message]:
        return _message_list(row[messages_field], place)

    openai = ChatForm(OPENAI, (messages_field,), ("system", TOOLS_COLUMN), _with_system(named))
    if messages_field != "messages":
        return (openai,)
    optional = ("input", "system", "history")
    return (
        openai,
        ChatForm(
            "ShareGPT (conversations)",
            ("conversations",),
            ("system", TOOLS_COLUMN),
            _with_system(_sharegpt_messages),
        ),
        ChatForm(
            "Alpaca (instruction, input, output)",
            ("instruction", "output"),
            optional,
            _with_system(_alpaca_messages),
        ),
        ChatForm(
            "prompts and completions",
            ("prompt", "completion"),
            ("system", TOOLS_COLUMN),
            _with_system(_completion_messages),
        ),
    )


def match_chat_form(names: Collection[str], messages_field: str = "messages") -> ChatForm | None:
    """Return the format of rows with these columns, or None if no format matches."""
    return next(
        (
            form
            for form in chat_forms(messages_field)
            if all(name in names for name in form.columns)
        ),
        None,
    )


def _with_system(
    messages: Callable[[ChatRow, str], list[Message]],
) -> Callable[[ChatRow, str], list[Message]]:
    def made(row: ChatRow, place: str) -> list[Message]:
        found, system = messages(row, place), row.get("system")
        if system is not None and not isinstance(system, str):
            raise _wrong_type_error(place, "system", system, "text")
        if not system or not found or _is_system(found[0], system):
            return found
        return [{"role": "system", "content": system}, *found]

    return made


def _is_system(message: object, text: str) -> bool:
    """Return True if a message is a system message with this text."""
    if not isinstance(message, dict):
        return False
    return (
        message.get("role", message.get("from")) == "system"
        and message.get("content", message.get("value")) == text
    )


def is_json_chat(value: object) -> bool:
    """Return True if a string is the JSON of a chat.

    Without this check, a model would be trained on the brackets and keys of that JSON.
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


# description and fix of the mistake
JSON_CHAT = "a chat written as JSON text", "make it a list of messages (json.loads of the text)"


def _message_list(value: object, place: str) -> list[Message]:
    if is_json_chat(value):
        raise config_error(
            place,
            f"contains {JSON_CHAT[0]}, but --messages_field requires a list of messages",
            f"{JSON_CHAT[1]}, or {SKIP_ROW_FIX}",
        )
    if is_empty(value):
        return []
    if not isinstance(value, list):
        rule = (
            f"must be a list of messages (--messages_field), not {type(value).__name__}"
            f" {str(value)[:40]!r}"
        )
        raise config_error(
            place,
            rule,
            f"name another column with --messages_field, correct the row, or {SKIP_ROW_FIX}",
        )
    return value


def _sharegpt_messages(row: ChatRow, place: str) -> list[Message]:
    return _message_list(row["conversations"], place)


def _alpaca_messages(row: ChatRow, place: str) -> list[Message]:
    for name in ("instruction", "input", "output"):
        if row.get(name) is not None and not isinstance(row[name], str):
            raise _wrong_type_error(place, name, row[name], "text")
    question, history = (
        "\n".join(filter(None, (row["instruction"], row.get("input")))),
        row.get("history") or [],
    )
    if is_empty(row["output"]) and not history:
        return []
    if not _are_turns(history):
        raise _wrong_type_error(
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


def _are_turns(history: object) -> bool:
    """Return True for a list of string pairs, such as the earlier turns of an Alpaca row.

    Training includes the answers of these turns.
    """

    def is_turn(turn: object) -> bool:
        return (
            isinstance(turn, list)
            and len(turn) == 2
            and all(isinstance(text, str) for text in turn)
        )

    return isinstance(history, list) and all(map(is_turn, history))


def _completion_messages(row: ChatRow, place: str) -> list[Message]:
    """Return the chat made of a prompt and its completion.

    Both must be strings, or both must be lists of messages. Only the completion is trained on.
    """
    prompt, completion = row["prompt"], row["completion"]
    if is_empty(completion):
        return []
    if is_empty(prompt):
        prompt = "" if isinstance(row["completion"], str) else []
    for name, value in (("prompt", prompt), ("completion", completion)):
        if is_json_chat(value):
            raise config_error(
                place, f"its {name} contains {JSON_CHAT[0]}", f"{JSON_CHAT[1]}, or {SKIP_ROW_FIX}"
            )
    if isinstance(prompt, str) and isinstance(completion, str):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            raise _wrong_type_error(
                place, name, value, "a list of messages (or prompt and completion both text)"
            )
    return [*map(_exclude_from_training, prompt), *completion]


def _exclude_from_training(message: Any) -> Message:
    return {**message, "weight": None, "training": None, "train": False}


def _wrong_type_error(place: str, name: str, value: object, expected: str) -> ConfigError:
    rule = f"its {name} must be {expected}, not {type(value).__name__} {str(value)[:40]!r}"
    return config_error(
        place,
        rule,
        f"name the column of the chats with --messages_field, correct the row, or {SKIP_ROW_FIX}",
    )


def parse_tools(value: Any, place: str) -> list[Any]:
    """Parse a row's tools: a list of descriptions, or a JSON string of such a list.

    A description may also be a JSON string.
    """
    try:
        tools = json.loads(value.strip() or "[]") if isinstance(value, str) else value
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools or ()]
    except (ValueError, TypeError) as error:
        raise config_error(
            place,
            f"its tools cannot be read: {error}",
            f"write a JSON list of tools, or {SKIP_ROW_FIX}",
        ) from error
    if not all(isinstance(tool, dict) for tool in tools):
        rule = f"its tools must be a list of tool descriptions, not {str(tools)[:40]!r}"
        raise config_error(place, rule, f"write a JSON list of objects, or {SKIP_ROW_FIX}")
    return tools


def without_nulls(value: object) -> Any:
    """Return a value whose objects have no null entries.

    Parquet and Arrow add null entries because all rows of a column must have the same keys.
    """
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _without_nulls_in_calls(message: object) -> Any:
    if not isinstance(message, dict) or not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": without_nulls(message["tool_calls"])}


# Messages
# --------------------------------------------------------------------------------------------------


def parse_messages(chat: object, place: str, more_roles: Collection[str] = ()) -> list[Message]:
    """Return a chat's messages in one normalized form.

    The keys are role, content (a string), tool_calls, train, and any keys that only a template
    reads. Raise `ConfigError` for an unreadable message, and for a role that is neither in `ROLES`
    nor in `more_roles`.
    """
    if not isinstance(chat, list) or not chat:
        rule = f"a chat must be a list of messages, not {type(chat).__name__} {str(chat)[:40]!r}"
        raise config_error(place, rule, "name the column of the chats with --messages_field")
    try:
        messages = [_normalize_message(message) for message in chat]
    except _UnreadableMessage as error:
        raise config_error(place, error.rule, f"{error.fix}, or {SKIP_ROW_FIX}") from error
    for message in messages:
        if message["role"] not in ROLES and message["role"] not in more_roles:
            raise UnknownRole(place, message["role"], {message["role"] for message in messages})
    return messages


class UnknownRole(ConfigError):
    """The config error for an unknown role; `met` contains the chat's roles."""

    def __init__(self, place: str, role: str, met: Iterable[str]):
        roles = (
            f"these rows use the roles {', '.join(sorted(met))}, and the known roles are"
            f" {', '.join(ROLES)}"
        )
        fix = f"rename the roles in the rows (an answer has the role assistant), or {SKIP_ROW_FIX}"
        super().__init__(
            config_error(place, f"a message has the role {role!r}: {roles}", fix).problems
        )
        self.place, self.role, self.met = place, role, set(met)


class _UnreadableMessage(ValueError):
    """The error for an unreadable message, with the rule that the message breaks and the fix."""

    def __init__(self, rule: str, fix: str):
        super().__init__(rule)
        self.rule, self.fix = rule, fix


def _normalize_message(message: object) -> Message:
    if isinstance(message, dict) and "role" not in message and isinstance(message.get("from"), str):
        message = _from_sharegpt(message)
    fix = "convert the rows to that form"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _UnreadableMessage(
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
        raise _UnreadableMessage(rule, fix)
    content = _content_text(made.get("content"))
    if content is None:
        speaks = "tool_calls" in made or any(
            isinstance(made.get(key), str) for key in REASONING_KEYS
        )
        if made.get("content") is not None or not speaks:
            rule = (
                "a message requires the strings 'role' and 'content', but this one is"
                f" {str(message)[:60]}"
            )
            raise _UnreadableMessage(
                rule, f"{fix} (a list of text parts or tool_calls is also accepted)"
            )
        content = ""
    made["content"] = content
    if (train := _train_flag(message)) is not None:
        made["train"] = train
    return made


def _is_call(call: object) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _content_text(content: object) -> str | None:
    """Return the text of a message's content, or None if the content has an unsupported type.

    The content may be a string or a list of text parts.
    """
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else None


def _is_text_part(part: object) -> bool:
    return (
        isinstance(part, dict)
        and isinstance(part.get("text"), str)
        and part.get("type", "text") == "text"
    )


def _from_sharegpt(message: Message) -> Message:
    speaker, value = message["from"], message.get("value")
    made = {key: entry for key, entry in message.items() if key not in ("from", "value")}
    made |= {"role": SHAREGPT_ROLES.get(speaker, speaker), "content": value}
    if speaker == "function_call" and isinstance(value, str):
        try:
            calls = json.loads(value)
        except ValueError as error:
            raise _UnreadableMessage(
                f"a function_call is not JSON: {error}", "write a name and its arguments as JSON"
            ) from error
        calls = calls if isinstance(calls, list) else [calls]
        made |= {
            "content": None,
            "tool_calls": [{"type": "function", "function": call} for call in calls],
        }
    return made


def _train_flag(message: Message) -> bool | None:
    """Return a message's `weight`, `train` or `training` value as a bool; None if absent."""
    found = {
        key: message[key] for key in ("weight", "train", "training") if message.get(key) is not None
    }
    for key, value in found.items():
        is_wrong_type = isinstance(value, bool) == (key == "weight")
        if is_wrong_type or value not in (0, 1):
            values = "0 or 1" if key == "weight" else "true or false"
            raise _UnreadableMessage(
                f"the {key} of a message must be {values}, not {value!r}", f"write {values}"
            )
    if len({bool(value) for value in found.values()}) > 1:
        raise _UnreadableMessage(
            f"a message cannot be both trained on and excluded: {found}",
            "keep only one of these keys",
        )
    return bool(next(iter(found.values()))) if found else None


def is_trained_on(message: Message) -> bool:
    """Return True unless the row excludes this message from training."""
    return bool(message.get("train", True))


def unknown_keys(messages: list[Message], is_named: Callable[[str], bool]) -> set[str]:
    """Return the keys of messages that neither training nor the template reads.

    An example is the key `train` in a user message.
    """
    keys = {key for message in messages for key in message} - KNOWN_MESSAGE_KEYS
    asked = {
        message["role"]
        for message in messages
        if message.get("train") and message["role"] != "assistant"
    }
    return {key for key in keys if not is_named(key)} | {
        f"train or weight of {role} messages" for role in asked
    }


def answer_texts(message: Message) -> list[str]:
    """Return the strings in an answer that are searched for in the rendered chat.

    They are the answer's content, its reasoning, and the names and arguments of its tool calls.
    """
    pieces = list(
        dict.fromkeys(
            [
                message["content"],
                *(message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)),
            ]
        )
    )
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        arguments = function.get("arguments")
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        pieces += [function["name"], *_nested_strings(arguments)]
    return pieces


def _nested_strings(value: object) -> list[str]:
    if isinstance(value, dict):
        return [
            *map(str, value),
            *(text for entry in value.values() for text in _nested_strings(entry)),
        ]
    if isinstance(value, list):
        return [text for entry in value for text in _nested_strings(entry)]
    return [value] if isinstance(value, str) else []


def as_text_parts(content: str) -> list[Message]:
    """Return a string as a content list with one text part."""
    return [{"type": "text", "text": content}]


def with_arguments(message: Message, as_dictionary: bool, as_text: bool) -> Message:
    """Return a message whose tool-call arguments have a type that the template accepts.

    The type is a dictionary or a JSON string. Arguments of an accepted type do not change, and a
    call without arguments receives empty arguments. Raise ValueError for a string that is not JSON.
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
            arguments = _parse_arguments(arguments, function["name"])
        function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _parse_arguments(arguments: str, name: str) -> Any:
    """Parse a tool call's arguments; raise a ValueError that names the call."""
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except ValueError as error:
        raise ValueError(
            f"the arguments of the call of {name} are not JSON: {error}, in {arguments[:40]!r}"
        ) from error


def replace_answer(message: Message, mark: str) -> Message:
    """Return an answer with the same structure in which `mark` replaces the text and tool calls."""
    if not message.get("tool_calls"):
        return {"role": "assistant", "content": mark}
    calls = []
    for call in message["tool_calls"]:
        function = {"name": mark, "arguments": {}}
        calls.append({**call, "function": function} if "function" in call else {**call, **function})
    content = mark if message.get("content") else message.get("content")
    return {**message, "content": content, "tool_calls": calls}
