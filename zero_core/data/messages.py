"""The messages of a conversation, and the tools beside them, checked one by one.

What is empty counts as absent: answers of an API that are written to a file as they are carry
``"tool_calls": []``, ``"refusal": null`` and the like.
"""

from collections.abc import Iterable
from typing import Any

from zero_core.data.fields import items, obj, string, unknown_key, wrong_type
from zero_core.data.lines import LineProblem, shown

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_KEYS = frozenset(
    {"role", "content", "name", "weight", "tool_calls", "tool_call_id", "function_call", "reasoning_content"}
)
_ASSISTANT_KEYS = ("weight", "tool_calls", "function_call", "reasoning_content")
_NOT_LEARNT = {
    "refusal": "move its text to content to train on it, or leave the example out",
    "audio": "only text can be trained on",
}
"""Keys of an API's answer that change what the answer is; an error unless they are empty."""

_UNUSED = ("annotations",)
"""Keys of an API's answer that say something about the answer; not used."""

_EMPTY: tuple[Any, ...] = (None, [], {})
_EMPTY_STRING_TOO = ("reasoning_content", "reasoning", "thinking", "refusal", "audio", "name", "tool_call_id")


def parse_messages(value: Any, where: str, roles: tuple[str, ...] = ROLES) -> tuple[Message, ...]:
    """At least one message, each with ``content``: a string, or None where an assistant only calls tools."""
    given = items(value, where)
    return tuple(_message(item, f"{where}[{index}]", roles) for index, item in enumerate(given))


def unused_keys(value: Iterable[Any]) -> set[str]:
    """Keys of messages that were given, are not empty, and are not used."""
    return {key for message in value for key in _UNUSED if message.get(key) not in _EMPTY}


def parse_tools(holder: dict[str, Any], where: str = "") -> tuple[dict[str, Any], ...]:
    """Definitions of tools; the older ``functions`` become tools. ``where`` ends in a dot, or is empty."""
    tools = _items_or_none(holder, "tools", where)
    for index, tool in enumerate(tools):
        at = f"{where}tools[{index}]"
        string(obj(obj(tool, at).get("function"), f"{at}.function"), "name", f"{at}.function.name")
    functions = _items_or_none(holder, "functions", where)
    for index, function in enumerate(functions):
        at = f"{where}functions[{index}]"
        string(obj(function, at), "name", f"{at}.name")
    parallel = holder.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise wrong_type(f"{where}parallel_tool_calls", parallel, "true or false")
    return (*tools, *({"type": "function", "function": function} for function in functions))


def _items_or_none(holder: dict[str, Any], key: str, where: str) -> list[Any]:
    value = holder.get(key)
    return [] if value in _EMPTY else items(value, f"{where}{key}")


def _message(value: Any, where: str, roles: tuple[str, ...]) -> Message:
    message = {key: item for key, item in obj(value, where).items() if not _is_absent(key, item)}
    for key, advice in _NOT_LEARNT.items():
        if key in message:
            raise LineProblem("unsupported_content", f"has {where}.{key}: {advice}")
    _take_reasoning(message, where)
    for key in sorted(set(message) - _KEYS):
        raise unknown_key(key, _KEYS, where)
    role = string(message, "role", f"{where}.role")
    if role not in roles:
        raise LineProblem(
            "unknown_role", f"has {where}.role {shown(role)}; expected one of {', '.join(roles)}"
        )
    if role != "assistant":
        for key in _ASSISTANT_KEYS:
            if key in message:
                raise LineProblem("misplaced_key", f"has {where}.{key} on a message of the role {role}")
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in message:
            string(message, key, f"{where}.{key}")
    _check_weight(message, where)
    _check_calls(message, where)
    return message | {"content": _content(message, where)}


def _is_absent(key: str, value: Any) -> bool:
    if key in _UNUSED or value is None:
        return True
    if key == "content":
        return False
    return value in _EMPTY or (value == "" and key in _EMPTY_STRING_TOO)


def _take_reasoning(message: Message, where: str) -> None:
    """One name for what servers and data sets call by three; some write two of them."""
    for key in ("reasoning", "thinking"):
        if key in message:
            reasoning = message.pop(key)
            if message.setdefault("reasoning_content", reasoning) != reasoning:
                raise LineProblem(
                    "unknown_key",
                    f"has {where}.{key} beside another reasoning_content: leave one of them out",
                )


def _check_weight(message: Message, where: str) -> None:
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise LineProblem("invalid_weight", f"has {where}.weight {shown(weight)}; expected 0 or 1")


def _check_calls(message: Message, where: str) -> None:
    if "tool_calls" in message:
        for index, call in enumerate(items(message["tool_calls"], f"{where}.tool_calls")):
            at = f"{where}.tool_calls[{index}]"
            _check_call(obj(call, at).get("function"), f"{at}.function")
    if "function_call" in message:
        _check_call(message["function_call"], f"{where}.function_call")


def _check_call(function: Any, where: str) -> None:
    function = obj(function, where)
    string(function, "name", f"{where}.name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict):
        raise wrong_type(f"{where}.arguments", arguments, "a string of JSON")


def _content(message: Message, where: str) -> str | None:
    content = message.get("content")
    if content in _EMPTY and ("tool_calls" in message or "function_call" in message):
        return None
    if content is None:
        raise LineProblem("missing_field", f"has no {where}.content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(f"{where}.content", content, "a string or a list of text parts")
    at = f"{where}.content"
    return "".join(_part(part, f"{at}[{i}]") for i, part in enumerate(items(content, at)))


def _part(value: Any, where: str) -> str:
    part = obj(value, where)
    if part.get("type") == "refusal":
        raise LineProblem("unsupported_content", f"has a refusal in {where}: {_NOT_LEARNT['refusal']}")
    if part.get("type") != "text":
        raise LineProblem(
            "unsupported_content", f"has {where}.type {shown(part.get('type'))}; only text can be trained on"
        )
    return string(part, "text", f"{where}.text")
