"""Values and types in the words of JSON: what a message says was given, and what a field takes."""

import json
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

LONGEST = 60
"""Characters of a value that a message repeats."""

MOST_DIGITS = 20
_PLAIN = {str: "a string", bool: "true or false", type(None): "null"}
_PLURAL = {str: "strings", int: "whole numbers"}
_BOUNDS = (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most"))


def shown(value: Any) -> str:
    """As JSON writes it, cut where it is long."""
    if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
        return f"an integer of more than {MOST_DIGITS} digits"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list) and any(isinstance(item, dict | list | int) for item in value):
        return f"a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def allowed(annotation: Any, metadata: tuple[Any, ...] = ()) -> str | None:
    """What a field of this type takes; None where this has no words for it."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return allowed(inner, (*metadata, *more))
    if origin in (Union, types.UnionType):
        branches = [allowed(branch, metadata) for branch in get_args(annotation)]
        return None if None in branches else " or ".join(str(branch) for branch in branches)
    if origin is Literal:
        return " or ".join(json.dumps(choice) for choice in get_args(annotation))
    if annotation in (int, float):
        return _number("a whole number" if annotation is int else "a number", _bounds(metadata))
    if annotation in _PLAIN:
        return None if annotation is str and metadata else _PLAIN[annotation]
    if origin in (list, tuple):
        return None if metadata else f"a list of {_PLURAL.get(get_args(annotation)[0], 'values')}"
    if origin in (dict, Mapping) or _is_object(annotation):
        return None if metadata else "an object"
    return None


def _is_object(annotation: Any) -> bool:
    return isinstance(annotation, type) and (is_dataclass(annotation) or issubclass(annotation, BaseModel))


def _bounds(metadata: tuple[Any, ...]) -> dict[str, Any]:
    """From what stands beside a type: pydantic's ``Field``, or the single constraints that it comes to."""
    parts = [part for item in metadata for part in getattr(item, "metadata", [item])]
    return {name: getattr(part, name) for part in parts for name, _ in _BOUNDS if hasattr(part, name)}


def _number(kind: str, bounds: dict[str, Any]) -> str:
    if bounds.keys() == {"ge", "le"}:
        return f"{kind} from {bounds['ge']} to {bounds['le']}"
    words = [f"{word} {bounds[name]}" for name, word in _BOUNDS if name in bounds]
    return f"{kind} {' and '.join(words)}" if words else kind
