"""The native ``training`` object of a request: from JSON to a ``TrainConfig``, strictly, at every level.

A dataclass takes anything, so names and types are checked here. JSON's lists stand for tuples, and its
integers for floats.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

from jobs.errors import InvalidRequest
from jobs.refusals import unknown, unusable

PATH = "training"

T = TypeVar("T")


class _Misfit:
    """A value that a type can't hold."""


_MISFIT: Final = _Misfit()


def read_fields(kind: type, given: Mapping[str, Any], path: str = PATH) -> dict[str, Any]:
    """The values that ``given`` has for fields of the config ``kind``, each in its field's type."""
    types = {field.name: field.type for field in fields(kind)}
    values = {}
    for name, value in given.items():
        place = f"{path}.{name}"
        if name not in types:
            raise unknown(place, name, list(types))
        converted = _convert(types[name], value, place)
        if converted is _MISFIT:
            raise unusable(place, value, types[name])
        values[name] = converted
    return values


def make_config(kind: type[T], values: Mapping[str, Any]) -> T:
    """A config's own checks name the field, with its path inside ``training``."""
    try:
        return kind(**values)
    except ValueError as error:
        field = str(error).split(":", 1)[0]
        raise InvalidRequest(f"{PATH}.{error}", param=f"{PATH}.{field}") from error


def _convert(kind: Any, value: Any, path: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        converted = (_convert(option, value, path) for option in arguments)
        return next((one for one in converted if one is not _MISFIT), _MISFIT)
    if is_dataclass(kind) and isinstance(kind, type):
        return make_config(kind, read_fields(kind, value, path)) if isinstance(value, dict) else _MISFIT
    if origin is tuple:
        return _convert_list(arguments[0], value, path)
    if origin is Literal:
        return value if any(type(value) is type(one) and value == one for one in arguments) else _MISFIT
    if kind is float and type(value) in (int, float):
        return _float(value)
    if origin is Mapping:
        return value if isinstance(value, dict) else _MISFIT
    return value if type(value) is kind else _MISFIT


def _convert_list(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, list):
        return _MISFIT
    converted = tuple(_convert(kind, item, path) for item in value)
    return _MISFIT if _MISFIT in converted else converted


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
