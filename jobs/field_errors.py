"""A field that can't be used, by its dotted path, with a way out."""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic_core import ErrorDetails

from jobs.errors import InvalidRequest, Unprocessable
from jobs.wording import allowed, shown

_WORDS = {
    "dict_type": "it must be an object",
    "string_type": "it must be a string",
    "too_long": "it must have at most {max_length} entries",
    "string_too_long": "it must have at most {max_length} characters",
    "string_too_short": "it must have at least {min_length} characters",
    "string_pattern_mismatch": "it must match the pattern {pattern}",
}
"""Of pydantic's errors that have to do with more than a type and its bounds."""


def refused(
    path: str, problem: ErrorDetails, annotation: Any, metadata: tuple[Any, ...] = ()
) -> InvalidRequest:
    """Of pydantic's ``problem`` with the field at ``path``: what the whole field takes, since pydantic speaks
    of one branch of a union after the other."""
    words = allowed(annotation, metadata)
    other = _WORDS.get(problem["type"], problem["msg"]).format(**problem.get("ctx", {}))
    reason = f"it must be {words}" if words else other
    given = problem["input"]
    told = shown(list(given) if isinstance(given, tuple) else given)
    return InvalidRequest(f"{path}: {told} can't be used: {reason}", param=path)


def unknown_field(path: str, name: str, known: Iterable[str]) -> Unprocessable:
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(sorted(known))}"
    return Unprocessable(f"{path}: there is no such field; {hint}", param=path, code="unknown_parameter")
