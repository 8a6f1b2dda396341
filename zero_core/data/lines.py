"""JSON values from the lines of a file, in memory bounded by the longest line that is allowed."""

import codecs
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

MAX_LINE_BYTES = 16 * 2**20
MAX_DEPTH = 64
"""Deepest nesting of lists and objects: templates and JSON writers walk values by recursion."""

_LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SHOWN = 60
BLANK = " \t\r\n"
"""What JSON allows between values."""

_BLANKS = re.compile(f"[{BLANK}]*")


class LineProblem(ValueError):
    """Why one line can't be used: a stable code and a message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Line:
    number: int
    """Counted from 1, blank lines included."""

    content: Any
    """The parsed value, or the ``LineProblem``."""


def shown(value: object) -> str:
    """``value`` for a message: quoted, escaped and short."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read_lines(path: Path) -> Iterator[Line]:
    """Every line that is not blank. A byte order mark and either kind of line end are accepted."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                _skip_line(file)
                yield Line(number, LineProblem("line_too_long", f"is longer than {MAX_LINE_BYTES:,} bytes"))
            elif raw.strip():
                yield Line(number, _parsed(raw))


def _skip_line(file: BinaryIO) -> None:
    while (raw := file.readline(MAX_LINE_BYTES)) and not raw.endswith(b"\n"):
        pass


def _parsed(raw: bytes) -> Any:
    try:
        return parse_json(raw)
    except LineProblem as problem:
        return problem


def parse_json(raw: bytes) -> Any:
    """A value that is safe to walk, to render and to tokenize; raises LineProblem."""
    try:
        text = raw.decode("utf-8").rstrip(BLANK)
    except UnicodeDecodeError as error:
        raise LineProblem(
            "invalid_utf8", f"is not UTF-8 at byte {error.start + 1}: save the file as UTF-8"
        ) from None
    try:
        value, end = first_value(text)
    except json.JSONDecodeError as error:
        raise LineProblem("invalid_json", f"is not JSON at column {error.pos + 1}: {error.msg}") from None
    if end < len(text):
        more = len(text) - len(text[end:].lstrip(BLANK))
        raise LineProblem("invalid_json", f"is not JSON at column {more + 1}: Extra data")
    return value


def first_value(text: str, start: int = 0) -> tuple[Any, int]:
    """The value that ``text`` has at ``start``, and where it ends.

    Raises JSONDecodeError where there is none, perhaps because the text stops too early, and LineProblem
    for a value that is not safe.
    """
    start = cast(re.Match[str], _BLANKS.match(text, start)).end()
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise _too_deep() from None
    except (json.JSONDecodeError, LineProblem):
        raise
    except ValueError:
        raise LineProblem(
            "invalid_json", f"has an integer of more than {sys.get_int_max_str_digits():,} digits"
        ) from None
    if _is_deeper(value, MAX_DEPTH):
        raise _too_deep()
    if _LONE_SURROGATE.search(text, start, end) and not _is_unicode(value):
        raise LineProblem("invalid_unicode", "has a \\ud800-\\udfff escape without its other half")
    return value, end


def _refuse_constant(name: str) -> NoReturn:
    raise LineProblem("invalid_json", f"is not JSON: {name} is no JSON value")


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise LineProblem("invalid_json", f"has the number {shown(literal)}, which is out of range")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def _too_deep() -> LineProblem:
    return LineProblem("too_deep", f"nests lists and objects deeper than {MAX_DEPTH} levels")


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return False
    return True


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
