"""What is said of a field that can't be used: its path, its value, and what it may hold instead.

The words come from the field's own type, so they name the whole range: pydantic's messages are about one
branch of a union each.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import StringConstraints
from pydantic.fields import FieldInfo

from jobs.errors import InvalidRequest, Unprocessable

LONGEST_VALUE = 80
"""Characters of a refused value that are repeated to its sender."""

_NOUNS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "booleans"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    NoneType: ("null", "nulls"),
}


def unusable(path: str, value: object, kind: Any) -> InvalidRequest:
    """``kind`` is the field's type annotation."""
    return InvalidRequest(f"{path}: {shown(value)} can't be used; it must be {described(kind)}", param=path)


def unknown(path: str, name: str, allowed: Sequence[str]) -> Unprocessable:
    close = difflib.get_close_matches(name, allowed, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(sorted(allowed))}"
    return Unprocessable(f"{path}: there is no such field; {hint}", param=path, code="unknown_parameter")


def shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def described(kind: Any) -> str:
    """A type annotation in words: ``"auto" or an integer from 1 to 50``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _constrained(arguments[0], _constraints(arguments[1:]))
    if origin in (Union, UnionType):
        return " or ".join(described(argument) for argument in arguments)
    if origin is Literal:
        values = [shown(argument) for argument in arguments]
        return f"one of {', '.join(values)}" if len(values) > 1 else values[0]
    if origin in (tuple, list):
        return f"a list of {_NOUNS[arguments[0]][1]}" if arguments[0] in _NOUNS else "a list"
    if kind in _NOUNS:
        return _NOUNS[kind][0]
    assert origin in (dict, Mapping) or is_dataclass(kind) or hasattr(kind, "model_fields"), kind
    return "an object"


def field_type(field: FieldInfo) -> Any:
    """The annotation of a pydantic field, with the constraints that pydantic took off it."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def _constraints(metadata: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for item in metadata:
        found += item.metadata if isinstance(item, FieldInfo) else [item]
    return found


def _constrained(kind: Any, constraints: list[Any]) -> str:
    parts = {type(constraint): constraint for constraint in constraints}
    words = described(kind)
    if Ge in parts and Le in parts:
        words += f" from {parts[Ge].ge} to {parts[Le].le}"
    elif Ge in parts:
        words += f" of at least {parts[Ge].ge}"
    elif Gt in parts:
        words += f" greater than {parts[Gt].gt}"
    if Le in parts and Ge not in parts:
        words += f" and at most {parts[Le].le}" if Gt in parts else f" of at most {parts[Le].le}"
    if Lt in parts:
        words += f" less than {parts[Lt].lt}"
    for text in constraints:
        if isinstance(text, StringConstraints) and text.pattern is not None:
            words += f" that matches {text.pattern}"
    return words
