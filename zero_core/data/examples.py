"""What one line of a training file means: chat, a preference, a prompt with its completion, or raw text.

A line is read strictly, so that a misspelt key is an error and not an example trained in another way.
Keys whose value is null or an empty list count as absent: exported API answers carry many. Columns that
no format has are not used, and said.
"""

from dataclasses import dataclass
from typing import Any, Literal

from zero_core.data.fields import close_to, filled, kind, obj, string, unknown_key
from zero_core.data.foreign import InForeignFormat, foreign_format
from zero_core.data.lines import LineProblem, shown
from zero_core.data.messages import Message, parse_messages, parse_tools, unused_keys

__all__ = [
    "ChatExample",
    "CompletionExample",
    "Example",
    "Format",
    "Message",
    "ParsedLine",
    "PreferenceExample",
    "TextExample",
    "format_of",
    "parse_example",
]

Format = Literal["chat", "preference", "completion", "text"]

_TOOL_KEYS = ("tools", "parallel_tool_calls", "functions")
_CHOSEN = ("preferred_output", "preferred_completion")
_REJECTED = ("non_preferred_output", "non_preferred_completion")
_KEYS: dict[Format, frozenset[str]] = {
    "preference": frozenset({"input", *_CHOSEN, *_REJECTED}),
    "chat": frozenset({"messages", *_TOOL_KEYS}),
    "completion": frozenset({"prompt", "completion"}),
    "text": frozenset({"text"}),
}
_SIGNS: dict[Format, frozenset[str]] = {
    "preference": frozenset({*_CHOSEN, *_REJECTED}),
    "chat": frozenset({"messages"}),
    "completion": _KEYS["completion"],
    "text": _KEYS["text"],
}
"""Keys that tell a format. ``input`` and ``tools`` are columns of other data sets as well."""

_ANY_SIGN = frozenset(key for keys in _SIGNS.values() for key in keys)
_INPUT_KEYS = frozenset({"messages", *_TOOL_KEYS})
_OUTPUT_ROLES = ("assistant", "tool", "function")
_EMPTY: tuple[Any, ...] = (None, [], {})


@dataclass(frozen=True)
class ChatExample:
    line: int
    messages: tuple[Message, ...]
    """As in the file, but ``content`` is one string, or None where a message has only calls; empty keys are
    gone."""

    trained: tuple[bool, ...]
    """For each message: an assistant's, with no weight of 0."""

    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class PreferenceExample:
    """Of two answers to one prompt the better one. What the assistant says in both is compared."""

    line: int
    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    """Of the assistant, with results of tools in between."""

    rejected: tuple[Message, ...]
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


Example = ChatExample | PreferenceExample | CompletionExample | TextExample


@dataclass(frozen=True)
class ParsedLine:
    example: Example
    warnings: tuple[str, ...]
    """What of the line is not used, or odd; the same words for the same thing on every line."""


def format_of(value: Any) -> Format:
    """The format that a line's keys say; raises LineProblem."""
    if not isinstance(value, dict):
        raise LineProblem("not_an_object", f"is {kind(value)} where a JSON object is expected")
    given = _given(value)
    foreign = foreign_format(given)
    if foreign is not None:
        raise InForeignFormat(foreign)
    for name, signs in _SIGNS.items():
        if given.keys() & signs:
            return name
    if given.keys() & _KEYS["chat"]:
        return "chat"
    for key in sorted(given):
        if close := close_to(key, _ANY_SIGN):
            raise LineProblem("unknown_format", f"has the unknown key {shown(key)}: did you mean {close}?")
    raise LineProblem(
        "unknown_format",
        f"has the keys {shown(sorted(given))}; expected messages (chat), input with preferred_output and "
        "non_preferred_output (preference), prompt and completion, or text",
    )


def parse_example(line: int, value: dict[str, Any], format: Format) -> ParsedLine:
    """Check one line of ``format_of(value)`` in full; raises LineProblem."""
    given = _given(value)
    warnings = _unused_columns(given, _KEYS[format], "")
    match format:
        case "chat":
            example: Example = _chat(line, value, warnings)
        case "preference":
            example = _preference(line, value, warnings)
        case "completion":
            example = CompletionExample(line, string(value, "prompt", "prompt"), filled(value, "completion"))
        case "text":
            example = TextExample(line, filled(value, "text"))
    return ParsedLine(example, tuple(warnings))


def _given(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None}


def _unused_columns(given: dict[str, Any], known: frozenset[str], where: str) -> list[str]:
    """A warning for each column that the format does not have. One that looks like a key that the line
    lacks is an error."""
    unused = sorted(given.keys() - known)
    missing = known - given.keys()
    for key in unused:
        if close_to(key, missing):
            raise unknown_key(key, missing, where)
    places = [f"{where}.{key}" if where else key for key in unused if given[key] not in _EMPTY]
    return [f"the column {shown(place)} is not used" for place in places]


def _chat(line: int, value: dict[str, Any], warnings: list[str]) -> ChatExample:
    messages = parse_messages(value.get("messages"), "messages")
    if not any(message["role"] == "assistant" for message in messages):
        raise LineProblem("no_assistant_message", "has no message with the role assistant to learn from")
    trained = tuple(m["role"] == "assistant" and m.get("weight", 1) == 1 for m in messages)
    if not any(trained):
        raise LineProblem("no_trained_message", "has weight 0 on every assistant message: nothing to learn")
    warnings += _unused_in(value["messages"])
    return ChatExample(line, messages, trained, parse_tools(value))


def _preference(line: int, value: dict[str, Any], warnings: list[str]) -> PreferenceExample:
    asked = obj(value.get("input"), "input")
    warnings += _unused_columns(_given(asked), _INPUT_KEYS, "input")
    prompt = parse_messages(asked.get("messages"), "input.messages")
    chosen = _output(value, _CHOSEN, warnings)
    rejected = _output(value, _REJECTED, warnings)
    warnings += _unused_in(asked["messages"])
    if chosen == rejected:
        warnings.append("both outputs are the same, so nothing can be learnt")
    return PreferenceExample(line, prompt, chosen, rejected, parse_tools(asked, "input."))


def _output(value: dict[str, Any], names: tuple[str, str], warnings: list[str]) -> tuple[Message, ...]:
    """Messages under the newer name or the older one; older exports give one message without a list."""
    given = [name for name in names if value.get(name) not in _EMPTY]
    if len(given) == 2:
        raise LineProblem("unknown_key", f"has both {names[0]} and {names[1]}: leave one of them out")
    name = given[0] if given else names[0]
    output = value.get(name)
    if isinstance(output, dict):
        output = [output]
    messages = parse_messages(output, name, _OUTPUT_ROLES)
    if messages[-1]["role"] != "assistant":
        raise LineProblem("no_assistant_message", f"has no assistant message at the end of {name}")
    for index, message in enumerate(messages):
        if message.get("weight") == 0:
            raise LineProblem(
                "misplaced_key", f"has {name}[{index}].weight 0, and outputs are compared as a whole"
            )
    warnings += _unused_in(output)
    return messages


def _unused_in(messages: Any) -> list[str]:
    return [f"the key {shown(key)} of messages is not used" for key in sorted(unused_keys(messages))]
