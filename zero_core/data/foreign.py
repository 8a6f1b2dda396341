"""Records in the formats of other trainers: recognised, so that a message can name them, and converted.

Alpaca      ``{"instruction", "input"?, "output"}``
ShareGPT    ``{"conversations": [{"from", "value"}, ...]}``
TRL         ``{"prompt": [...], "completion": [...]}``, lists of messages
TRL         ``{"chosen", "rejected", "prompt"?}``, of two answers the better one
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zero_core.data.fields import items, obj, string, wrong_type
from zero_core.data.lines import LineProblem, parse_json, shown
from zero_core.data.sources import CONVERT

Record = dict[str, Any]

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's ``from`` as roles."""

_PREFERENCE = {"preferred_output", "preferred_completion", "non_preferred_output", "non_preferred_completion"}
_OURS = {"messages", "completion"} | _PREFERENCE
"""Keys beside which those of another format are columns."""

_QUESTIONS = ("prompt", "question", "instruction")


@dataclass(frozen=True)
class ForeignFormat:
    name: str
    """With its keys: ``ShareGPT (conversations of from and value)``."""

    keys: frozenset[str]
    """All that ``convert`` looks at; other columns are left out."""

    is_of: Callable[[Record], bool]
    convert: Callable[[Record], Record]
    """The record as chat or preference, not yet checked as such; raises LineProblem."""


class InForeignFormat(LineProblem):
    """A record of a training file that is in another trainer's format."""

    def __init__(self, format: ForeignFormat) -> None:
        super().__init__("foreign_format", f"is in the format of {format.name}; {CONVERT}")


def foreign_format(record: Record) -> ForeignFormat | None:
    """The format of a record that is not one of ours. ``record`` has no null values."""
    return next((format for format in _FORMATS if format.is_of(record)), None)


# Which is which. Data sets carry several forms of an example side by side: the one that says most wins.


def _is_preference(record: Record) -> bool:
    return "chosen" in record and "rejected" in record and not _PREFERENCE & set(record)


def _is_alpaca(record: Record) -> bool:
    answer = "output" in record or "response" in record
    return "instruction" in record and answer and not _OURS & set(record)


def _is_sharegpt(record: Record) -> bool:
    named = "conversations" in record or "conversation" in record
    return named and not _OURS & set(record)


def _is_prompt_completion(record: Record) -> bool:
    return "completion" in record and any(_is_messages(record.get(key)) for key in ("prompt", "completion"))


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


# Conversion.


def _from_alpaca(record: Record) -> Record:
    system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    past = []
    for index, pair in enumerate(record.get("history") or []):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise wrong_type(f"history[{index}]", pair, "a question and an answer")
        past += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    more = "input" if record.get("input") else "context"
    parts = [string(record, "instruction", "instruction"), record.get(more) or ""]
    if not isinstance(parts[1], str):
        raise wrong_type(more, parts[1], "a string")
    answer = "output" if "output" in record else "response"
    turn = [
        {"role": "user", "content": "\n\n".join(part for part in parts if part)},
        {"role": "assistant", "content": string(record, answer, answer)},
    ]
    return {"messages": [*system, *past, *turn]}


def _from_sharegpt(record: Record) -> Record:
    key = "conversations" if "conversations" in record else "conversation"
    return {"messages": _system(record) + _turns(record[key], key)} | _tools(record)


def _from_prompt_completion(record: Record) -> Record:
    prompt = _turns(record.get("prompt"), "prompt", "user")
    context = [turn | {"weight": 0} if turn.get("role") == "assistant" else turn for turn in prompt]
    return {"messages": context + _turns(record["completion"], "completion", "assistant")} | _tools(record)


def _from_preference(record: Record) -> Record:
    answers = [_turns(record[key], key, "assistant") for key in ("chosen", "rejected")]
    key = next((key for key in (*_QUESTIONS, "conversations") if record.get(key)), None)
    if all(turns[0].get("role") != "assistant" for turns in answers):
        # Both are whole conversations, and a prompt beside them is a copy of how they begin.
        shared = _shared(*answers)
        prompt, answers = answers[0][:shared], [turns[shared:] for turns in answers]
    elif key is not None:
        prompt = _turns(record[key], key, "user")
    else:
        prompt = []
    if not prompt:
        raise LineProblem("missing_field", "has no prompt: where in chosen the answer begins can't be told")
    if prompt[0].get("role") != "system":
        prompt = _system(record) + prompt
    asked: Record = {"messages": prompt} | _tools(record)
    return {"input": asked, "preferred_output": answers[0], "non_preferred_output": answers[1]}


def _shared(left: list[Record], right: list[Record]) -> int:
    """How many messages both begin with, each keeping an answer of its own."""
    longest = min(len(left), len(right)) - 1
    return next((i for i in range(longest) if left[i] != right[i]), longest)


def _system(record: Record) -> list[Record]:
    return [{"role": "system", "content": record["system"]}] if record.get("system") else []


def _turns(value: Any, where: str, role: str | None = None) -> list[Record]:
    """Messages of either kind; with ``role``, a string is one message of that role."""
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    given = items([value] if isinstance(value, dict) else value, where)
    turns: list[Record] = []
    calls: list[str] = []
    for index, item in enumerate(given):
        at = f"{where}[{index}]"
        turn = obj(item, at)
        turns.append(_turn(turn, at, calls) if "from" in turn else turn)
    return turns


def _turn(turn: Record, where: str, calls: list[str]) -> Record:
    """One of ShareGPT's. ``calls``: ids of calls that have no answer yet; ShareGPT has none, so they are
    made up."""
    speaker = string(turn, "from", f"{where}.from")
    if speaker not in _ROLES:
        raise LineProblem(
            "unknown_role", f"has {where}.from {shown(speaker)}; expected one of {', '.join(_ROLES)}"
        )
    role = _ROLES[speaker]
    content = string(turn, "value", f"{where}.value")
    if speaker == "function_call":
        return {"role": role, "content": None, "tool_calls": _calls(content, f"{where}.value", calls)}
    message: Record = {"role": role, "content": content}
    if role == "tool" and calls:
        message["tool_call_id"] = calls.pop(0)
    if role == "assistant" and turn.get("weight") is not None:
        message["weight"] = turn["weight"]
    return message


def _calls(text: str, where: str, ids: list[str]) -> list[Record]:
    made = []
    ids.clear()
    given = _parsed(text, where)
    for index, call in enumerate(given if isinstance(given, list) else [given]):
        function = obj(call, f"{where}[{index}]")
        arguments = function.get("arguments", {})
        # Nine letters and digits: some templates accept no other id.
        ids.append(f"call{index:05d}")
        name = string(function, "name", f"{where}[{index}].name")
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        made.append({"id": ids[-1], "type": "function", "function": {"name": name, "arguments": written}})
    return made


def _tools(record: Record) -> Record:
    tools = record.get("tools")
    if isinstance(tools, str):
        tools = _parsed(tools, "tools") if tools.strip() else None
    if not tools:
        return {}
    bare = [obj(tool, f"tools[{index}]") for index, tool in enumerate(items(tools, "tools"))]
    return {"tools": [t if "function" in t else {"type": "function", "function": t} for t in bare]}


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text.encode())
    except LineProblem as problem:
        raise LineProblem(problem.code, f"has {where}, which {problem}") from None


_FORMATS = (
    ForeignFormat(
        "TRL (chosen and rejected)",
        frozenset({"chosen", "rejected", *_QUESTIONS, "conversations", "system", "tools"}),
        _is_preference,
        _from_preference,
    ),
    ForeignFormat(
        "ShareGPT (conversations of from and value)",
        frozenset({"conversations", "conversation", "system", "tools"}),
        _is_sharegpt,
        _from_sharegpt,
    ),
    ForeignFormat(
        "TRL (prompt and completion as lists of messages)",
        frozenset({"prompt", "completion", "tools"}),
        _is_prompt_completion,
        _from_prompt_completion,
    ),
    ForeignFormat(
        "Alpaca (instruction, input and output)",
        frozenset({"instruction", "input", "context", "output", "response", "system", "history"}),
        _is_alpaca,
        _from_alpaca,
    ),
)
