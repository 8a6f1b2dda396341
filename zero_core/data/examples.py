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
    "PreferenceExample",
    "TextExample",
    "format_name",
    "format_of",
    "parse_example",
    "warnings_of",
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
_MOST_COLUMNS = 1000
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


def format_name(example: Example) -> Format:
    match example:
        case ChatExample():
            return "chat"
        case PreferenceExample():
            return "preference"
        case CompletionExample():
            return "completion"
        case TextExample():
            return "text"


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


def parse_example(line: int, value: dict[str, Any], format: Format) -> Example:
    """Check one line of ``format_of(value)`` in full; raises LineProblem."""
    _refuse_misspelt(value, _KEYS[format], "")
    match format:
        case "chat":
            return _chat(line, value)
        case "preference":
            return _preference(line, value)
        case "completion":
            return CompletionExample(line, string(value, "prompt", "prompt"), filled(value, "completion"))
        case "text":
            return TextExample(line, filled(value, "text"))


def warnings_of(value: dict[str, Any], example: Example) -> list[str]:
    """What of a line is not used in its example, or odd; the same words for the same thing on every line."""
    columns = _unused(value, _KEYS[format_name(example)], "")
    messages: list[dict[str, Any]] = []
    equal = False
    if isinstance(example, ChatExample):
        messages = value["messages"]
    if isinstance(example, PreferenceExample):
        columns += _unused(value["input"], _INPUT_KEYS, "input.")
        messages = [*value["input"]["messages"], *_output(value, _CHOSEN)[1], *_output(value, _REJECTED)[1]]
        equal = example.chosen == example.rejected
    return [
        *(f"the column {shown(column)} is not used" for column in columns),
        *(f"the key {shown(key)} of messages is not used" for key in sorted(unused_keys(messages))),
        *(["both outputs are the same, so nothing can be learnt"] if equal else []),
    ]


def _given(value: dict[str, Any]) -> dict[str, Any]:
    if len(value) > _MOST_COLUMNS:
        raise LineProblem("too_many_columns", f"has {len(value):,} keys; at most {_MOST_COLUMNS:,} are read")
    return {key: item for key, item in value.items() if item is not None}


def _refuse_misspelt(value: dict[str, Any], known: frozenset[str], where: str) -> None:
    """A column that looks like a key that the line lacks is no column."""
    given = _given(value).keys()
    missing = known.difference(given)
    for key in sorted(given - known):
        if close_to(key, missing):
            raise unknown_key(key, missing, where)


def _unused(value: dict[str, Any], known: frozenset[str], prefix: str) -> list[str]:
    return [f"{prefix}{key}" for key in sorted(value.keys() - known) if value[key] not in _EMPTY]


def _chat(line: int, value: dict[str, Any]) -> ChatExample:
    messages = parse_messages(value.get("messages"), "messages")
    if not any(message["role"] == "assistant" for message in messages):
        raise LineProblem("no_assistant_message", "has no message with the role assistant to learn from")
    trained = tuple(m["role"] == "assistant" and m.get("weight", 1) == 1 for m in messages)
    if not any(trained):
        raise LineProblem("no_trained_message", "has weight 0 on every assistant message: nothing to learn")
    return ChatExample(line, messages, trained, parse_tools(value))


def _preference(line: int, value: dict[str, Any]) -> PreferenceExample:
    asked = obj(value.get("input"), "input")
    _refuse_misspelt(asked, _INPUT_KEYS, "input")
    return PreferenceExample(
        line,
        prompt=parse_messages(asked.get("messages"), "input.messages"),
        chosen=_compared(value, _CHOSEN),
        rejected=_compared(value, _REJECTED),
        tools=parse_tools(asked, "input."),
    )


def _compared(value: dict[str, Any], names: tuple[str, str]) -> tuple[Message, ...]:
    name, output = _output(value, names)
    messages = parse_messages(output, name, _OUTPUT_ROLES)
    if messages[-1]["role"] != "assistant":
        raise LineProblem("no_assistant_message", f"has no assistant message at the end of {name}")
    for index, message in enumerate(messages):
        if message.get("weight") == 0:
            raise LineProblem(
                "misplaced_key", f"has {name}[{index}].weight 0, and outputs are compared as a whole"
            )
    return messages


def _output(value: dict[str, Any], names: tuple[str, str]) -> tuple[str, Any]:
    """Messages under the newer name or the older one; older exports give one message without a list."""
    given = [name for name in names if value.get(name) not in _EMPTY]
    if len(given) == 2:
        raise LineProblem("unknown_key", f"has both {names[0]} and {names[1]}: leave one of them out")
    name = given[0] if given else names[0]
    output = value.get(name)
    return name, [output] if isinstance(output, dict) and output else output
