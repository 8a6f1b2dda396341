"""OpenAI's messages in the words of Hugging Face's templates.

Templates disagree on two points, and a conversation is offered in each form until the template takes
one: the arguments of a call as an object or as a string of JSON, and the content beside a call, where
there is none, as null, as no key at all or as an empty string.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal

from zero_core.data.examples import Message
from zero_core.data.lines import LineProblem, parse_json

NoContent = Literal["null", "absent", "empty"]


class TemplateRefusal(ValueError):
    """The template raised on a conversation, or cannot express a part of it."""


def messages_for(source: str, messages: tuple[Message, ...], tools: bool) -> list[Message]:
    """``messages`` for the template ``source``: arguments are objects, missing content is null."""
    if tools and "tools" not in source:
        raise TemplateRefusal("defines tools, and the model's chat template has no place for them")
    return [_message(message, source) for message in messages]


def forms(messages: list[Message]) -> Iterator[list[Message]]:
    """The forms in which ``messages`` can be offered, the likeliest first. Each has dicts of its own."""
    objects = any(isinstance(f["arguments"], dict) for m in messages for f in _functions(m))
    nulls = any(message["content"] is None for message in messages)
    for as_object in (True, False) if objects else (True,):
        for no_content in ("null", "absent", "empty") if nulls else ("null",):
            yield [_formed(message, as_object, no_content) for message in messages]


def prints_python(text: str, messages: list[Message]) -> bool:
    """Whether a template that expects the arguments of a call as text printed Python's view of the object."""
    return any(
        isinstance(function["arguments"], dict)
        and function["arguments"]
        and str(function["arguments"]) in text
        for message in messages
        for function in _functions(message)
    )


def call_names(message: Message) -> list[str]:
    return [function["name"] for function in _functions(message)]


def _functions(message: Message) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", ())]


def _message(message: Message, source: str) -> Message:
    given = {key: value for key, value in message.items() if key not in ("weight", "function_call")}
    given.setdefault("content", None)
    if message["role"] == "developer" and "developer" not in source:
        given["role"] = "system"
    if message["role"] == "function":
        given["role"] = "tool"
    if "reasoning_content" in message:
        given["thinking"] = message["reasoning_content"]  # as gpt-oss's templates call it
    calls = list(given.pop("tool_calls", ()))
    if "function_call" in message:
        calls.append({"type": "function", "function": message["function_call"]})
    if calls:
        if "tool_calls" not in source:
            raise TemplateRefusal("calls a tool, and the model's chat template has no place for tool calls")
        given["tool_calls"] = [_call(call) for call in calls]
    return given


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI writes a call's arguments as a string of JSON, and leaves out the type in places."""
    function = dict(call["function"])
    if isinstance(function["arguments"], str):
        try:
            arguments = parse_json(function["arguments"].encode())
        except LineProblem:
            arguments = None
        if isinstance(arguments, dict):
            # The string that a template may ask for is the one of the file, to the character.
            function = {**function, "arguments": arguments, _WRITTEN: function["arguments"]}
    return {"type": "function", **call, "function": function}


_WRITTEN = "arguments as written"


def _formed(message: Message, as_object: bool, no_content: NoContent) -> Message:
    formed = dict(message)
    if formed["content"] is None:
        if no_content == "absent":
            del formed["content"]
        elif no_content == "empty":
            formed["content"] = ""
    if "tool_calls" in formed:
        formed["tool_calls"] = [
            call | {"function": _function(call["function"], as_object)} for call in formed["tool_calls"]
        ]
    return formed


def _function(function: dict[str, Any], as_object: bool) -> dict[str, Any]:
    given = {key: value for key, value in function.items() if key != _WRITTEN}
    if not as_object and isinstance(given["arguments"], dict):
        given["arguments"] = function.get(_WRITTEN) or json.dumps(given["arguments"], ensure_ascii=False)
    return given
