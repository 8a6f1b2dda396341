"""Values out of the objects of a line, each checked for its type; every error names the place.

Raises ``LineProblem`` throughout. ``where`` is the place as people write it, ``messages[1].tool_calls``.
"""

import difflib
from functools import lru_cache
from typing import Any

from zero_core.data.lines import LineProblem, shown

_LONGEST_KEY = 64
"""Longer ones are no misspelling, and comparing them takes long."""


def string(holder: dict[str, Any], key: str, where: str) -> str:
    value = holder.get(key)
    if value is None:
        raise LineProblem("missing_field", f"has no {where}")
    if not isinstance(value, str):
        raise wrong_type(where, value, "a string")
    return value


def filled(holder: dict[str, Any], key: str) -> str:
    text = string(holder, key, key)
    if not text:
        raise LineProblem("empty_text", f"has an empty {key}: nothing to learn")
    return text


def obj(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        raise LineProblem("missing_field", f"has no {where}")
    if not isinstance(value, dict):
        raise wrong_type(where, value, "an object")
    return value


def items(value: Any, where: str) -> list[Any]:
    """A list that is not empty."""
    if value is None:
        raise LineProblem("missing_field", f"has no {where}")
    if not isinstance(value, list):
        raise wrong_type(where, value, "a list")
    if not value:
        raise LineProblem("empty_list", f"has an empty list in {where}")
    return value


def close_to(key: str, known: frozenset[str]) -> str | None:
    """The known key that ``key`` looks like a misspelling of."""
    return _closest(key, known) if len(key) <= _LONGEST_KEY else None


@lru_cache(maxsize=1024)
def _closest(key: str, known: frozenset[str]) -> str | None:
    """Cached: a column is on every line of a file."""
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.75)), None)


def unknown_key(key: str, known: frozenset[str], where: str = "") -> LineProblem:
    close = close_to(key, known)
    hint = f"did you mean {close}?" if close else f"known are {', '.join(sorted(known))}"
    place = f" in {where}" if where else ""
    return LineProblem("unknown_key", f"has the unknown key {shown(key)}{place}: {hint}")


def wrong_type(where: str, value: object, expected: str) -> LineProblem:
    return LineProblem("wrong_type", f"has {kind(value)} in {where} where {expected} is expected")


def kind(value: object) -> str:
    """What a JSON value is, for a message."""
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
