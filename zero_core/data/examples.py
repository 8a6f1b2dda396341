"""What one line of a training file means: chat, a prompt with its completion, or raw text.

A line is read strictly, so that a misspelt key is an error and not an example trained in another way.
Keys whose value is null count as absent: exported API answers carry many.
"""

import difflib
from dataclasses import dataclass
from typing import Any, Literal

from zero_core.data.lines import LineProblem, shown

Format = Literal["chat", "completion", "text"]
Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_KEYS: dict[Format, frozenset[str]] = {
    "chat": frozenset({"messages", "tools", "parallel_tool_calls", "functions"}),
    "completion": frozenset({"prompt", "completion"}),
    "text": frozenset({"text"}),
}
_MESSAGE_KEYS = frozenset(
    {"role", "content", "name", "weight", "tool_calls", "tool_call_id", "function_call", "reasoning_content"}
)
_ASSISTANT_KEYS = ("weight", "tool_calls", "function_call", "reasoning_content")


@dataclass(frozen=True)
class ChatExample:
    line: int
    messages: tuple[Message, ...]
    """As in the file, but null keys are gone, and ``content`` is one string; null beside a call without."""

    trained: tuple[bool, ...]
    """For each message: an assistant's, with no weight of 0."""

    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class CompletionExample:
    line: int
    prompt: str
    completion: str


@dataclass(frozen=True)
class TextExample:
    line: int
    text: str


@dataclass(frozen=True)
class PreferenceExample:
    line: int
    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


Example = ChatExample | CompletionExample | TextExample


def format_of(value: Any) -> Format:
    """The format that a line's keys say; raises LineProblem."""
    if not isinstance(value, dict):
        raise LineProblem("not_an_object", f"is {_kind(value)} where a JSON object is expected")
    keys = {key for key, item in value.items() if item is not None}
    for name, known in _KEYS.items():
        if keys & known:
            _refuse_unknown(keys, known, "")
            return name
    raise LineProblem(
        "unknown_format",
        f"has the keys {shown(sorted(keys))}; expected messages (chat), prompt and completion, or text",
    )


def parse_example(line: int, value: dict[str, Any], format: Format) -> Example:
    """Check one line of ``format_of(value)`` in full; raises LineProblem."""
    if format == "chat":
        return _chat(line, value)
    if format == "completion":
        prompt = _string(value, "prompt", "prompt")
        return CompletionExample(line, prompt, _filled(value, "completion"))
    return TextExample(line, _filled(value, "text"))


def _chat(line: int, value: dict[str, Any]) -> ChatExample:
    given = _list(value.get("messages"), "messages")
    messages = tuple(_message(item, f"messages[{index}]") for index, item in enumerate(given))
    if not any(message["role"] == "assistant" for message in messages):
        raise LineProblem("no_assistant_message", "has no message with the role assistant to learn from")
    trained = tuple(m["role"] == "assistant" and m.get("weight", 1) == 1 for m in messages)
    if not any(trained):
        raise LineProblem("no_trained_message", "has weight 0 on every assistant message: nothing to learn")
    parallel = value.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise _wrong_type("parallel_tool_calls", parallel, "true or false")
    return ChatExample(line, messages, trained, _tools(value))


def _tools(value: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Definitions of tools; the older ``functions`` become tools."""
    tools = [] if value.get("tools") is None else _list(value["tools"], "tools")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = _object(_object(tool, where).get("function"), f"{where}.function")
        _string(function, "name", f"{where}.function.name")
    functions = [] if value.get("functions") is None else _list(value["functions"], "functions")
    for index, function in enumerate(functions):
        _string(_object(function, f"functions[{index}]"), "name", f"functions[{index}].name")
    return (*tools, *({"type": "function", "function": function} for function in functions))


def _message(value: Any, where: str) -> Message:
    message = {key: item for key, item in _object(value, where).items() if item is not None}
    _refuse_unknown(set(message), _MESSAGE_KEYS, f" in {where}")
    role = _string(message, "role", f"{where}.role")
    if role not in ROLES:
        raise LineProblem(
            "unknown_role", f"has {where}.role {shown(role)}; expected one of {', '.join(ROLES)}"
        )
    if role != "assistant":
        for key in _ASSISTANT_KEYS:
            if key in message:
                raise LineProblem("misplaced_key", f"has {where}.{key} on a message of the role {role}")
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in message:
            _string(message, key, f"{where}.{key}")
    _check_weight(message, where)
    _check_calls(message, where)
    return message | {"content": _content(message, where)}


def _check_weight(message: Message, where: str) -> None:
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise LineProblem("invalid_weight", f"has {where}.weight {shown(weight)}; expected 0 or 1")


def _check_calls(message: Message, where: str) -> None:
    if "tool_calls" in message:
        for index, call in enumerate(_list(message["tool_calls"], f"{where}.tool_calls")):
            at = f"{where}.tool_calls[{index}].function"
            _check_call(_object(call, at.removesuffix(".function")).get("function"), at)
    if "function_call" in message:
        _check_call(message["function_call"], f"{where}.function_call")


def _check_call(function: Any, where: str) -> None:
    function = _object(function, where)
    _string(function, "name", f"{where}.name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict):
        raise _wrong_type(f"{where}.arguments", arguments, "a string of JSON")


def _content(message: Message, where: str) -> str | None:
    content = message.get("content")
    if content is None:
        if "tool_calls" in message or "function_call" in message:
            return None
        raise LineProblem("missing_field", f"has no {where}.content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong_type(f"{where}.content", content, "a string or a list of text parts")
    return "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(_list(content, where)))


def _part(value: Any, where: str) -> str:
    part = _object(value, where)
    if part.get("type") != "text":
        raise LineProblem(
            "unsupported_content", f"has {where}.type {shown(part.get('type'))}; only text can be trained on"
        )
    return _string(part, "text", f"{where}.text")


def _string(holder: dict[str, Any], key: str, where: str) -> str:
    value = holder.get(key)
    if value is None:
        raise LineProblem("missing_field", f"has no {where}")
    if not isinstance(value, str):
        raise _wrong_type(where, value, "a string")
    return value


def _filled(holder: dict[str, Any], key: str) -> str:
    text = _string(holder, key, key)
    if not text:
        raise LineProblem("empty_text", f"has an empty {key}: nothing to learn")
    return text


def _object(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        raise LineProblem("missing_field", f"has no {where}")
    if not isinstance(value, dict):
        raise _wrong_type(where, value, "an object")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if value is None:
        raise LineProblem("missing_field", f"has no {where}")
    if not isinstance(value, list):
        raise _wrong_type(where, value, "a list")
    if not value:
        raise LineProblem("empty_list", f"has an empty list in {where}")
    return value


def _refuse_unknown(keys: set[str], known: frozenset[str], where: str) -> None:
    for key in sorted(keys - known):
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
        raise LineProblem("unknown_key", f"has the unknown key {shown(key)}{where}: {hint}")


def _wrong_type(where: str, value: object, expected: str) -> LineProblem:
    return LineProblem("wrong_type", f"has {_kind(value)} in {where} where {expected} is expected")


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object"
