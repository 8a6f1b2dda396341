"""The native ``training`` object of a request as a ``TrainConfig``; so are ``lora`` and ``dpo`` inside it."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from jobs.errors import InvalidRequest
from jobs.field_errors import refused, unknown_field
from jobs.wording import shown
from zero_core.config.train import TrainConfig

_LARGEST = 2**63
"""Integers are below it: what is larger no counter and no column can hold."""


def build_train_config(given: Mapping[str, Any]) -> TrainConfig:
    """Every error's ``param`` is the field's dotted path, from ``training`` on."""
    try:
        config: TrainConfig = _build(TrainConfig, given, "training")
    except ValueError as error:
        # The config's own checks, which begin with the field.
        field = str(error).split(":", 1)[0]
        raise InvalidRequest(f"training.{error}", param=f"training.{field}") from error
    return config


def _build(kind: Any, given: Mapping[str, Any], path: str) -> Any:
    known = {field.name: field.type for field in fields(kind)}
    values = {}
    for name, value in given.items():
        if name not in known:
            raise unknown_field(f"{path}.{name}", name, list(known))
        values[name] = _checked(known[name], value, f"{path}.{name}")
    return kind(**values)


def _checked(annotation: Any, value: Any, path: str) -> Any:
    """A dataclass takes anything, so types are checked here, as pydantic would."""
    nested = _dataclass_in(annotation)
    if nested is not None and isinstance(value, dict):
        return _build(nested, value, path)
    if nested is not None and isinstance(value, nested):
        return value
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise InvalidRequest(f"{path}: {shown(value)} can't be used: it is too large", param=path)
    if isinstance(value, list) and any(get_origin(branch) is tuple for branch in _branches(annotation)):
        value = tuple(value)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        raise refused(path, error.errors()[0], annotation) from error


def _branches(annotation: Any) -> tuple[Any, ...]:
    return (annotation, *get_args(annotation))


def _dataclass_in(annotation: Any) -> Any:
    found = (branch for branch in _branches(annotation) if isinstance(branch, type) and is_dataclass(branch))
    return next(found, None)
