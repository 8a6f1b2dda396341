"""Checks of one field, which name it."""

import math

_SHOWN = 100
"""Characters of a value that a message repeats."""


LARGEST_COUNT = 2**31 - 1
"""Of steps, examples and tokens: what the record of a job can hold."""


class InvalidSetting(ValueError):
    """A setting that this model does not allow; the message begins with the field's name."""

    code = "invalid_parameter"


def require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise ValueError(f"{field}: {message}")


def one_of(field: str, value: object, allowed: tuple[object, ...]) -> None:
    require(value in allowed, field, f"{short(value)} is not one of {', '.join(map(repr, allowed))}")


def finite(
    field: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> None:
    require(math.isfinite(value), field, f"{value!r} is not a finite number")
    require(above is None or value > above, field, f"{value!r} must be greater than {above}")
    require(at_least is None or value >= at_least, field, f"{value!r} must be at least {at_least}")
    require(at_most is None or value <= at_most, field, f"{value!r} must be at most {at_most}")


def count(field: str, value: int, *, at_least: int, at_most: int = LARGEST_COUNT) -> None:
    require(value >= at_least, field, f"{value!r} must be at least {at_least}")
    require(value <= at_most, field, f"{short(value)} must be at most {at_most}")


def short(value: object) -> str:
    """The value as Python writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
