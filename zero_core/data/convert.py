"""Files in other forms, made training files: ``sources`` reads them and ``foreign`` converts records.

The whole file is converted or nothing is written: a record that can't be is named by its number.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from zero_core.data.examples import Format, format_of, parse_example, warnings_of
from zero_core.data.foreign import foreign_format
from zero_core.data.formats import require_format
from zero_core.data.lines import Line, LineProblem, shown
from zero_core.data.report import LineError, ReportBuilder
from zero_core.data.sources import Unreadable, records, source_of

_ENDINGS = {".gz", ".bz2", ".xz", ".zip", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt"}


class Unconvertible(ValueError):
    """A file, or a record of it, of which no training file can be made."""


@dataclass(frozen=True)
class Conversion:
    """What came of a file."""

    format: Format
    records: int
    was: tuple[str, ...]
    """What the file was, from the outside in: ``("gzip", "a JSON array", "ShareGPT (...)")``."""

    warnings: tuple[str, ...]


def default_target(source: Path) -> Path:
    """``data.json.gz`` becomes ``data.jsonl`` beside it."""
    stem = source
    while stem.suffix.lower() in _ENDINGS:
        stem = stem.with_suffix("")
    target = stem.with_name(f"{stem.name}.jsonl")
    return target if target != source else stem.with_name(f"{stem.name}.converted.jsonl")


def convert(source: Path, target: Path, *, overwrite: bool = False) -> Conversion:
    """Write ``source`` as JSON lines that can be trained on.

    Raises Unconvertible, FileExistsError, and OSError where a file can't be read or written.
    """
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists already")
    try:
        form = source_of(source)
        with _aside(target) as file:
            converter = _Converter(file)
            for record in records(source, form):
                converter.add(record)
            return converter.finish(form.words)
    except Unreadable as problem:
        raise Unconvertible(f"{source.name}: {problem}") from problem
    except _Failed as failure:
        raise Unconvertible(f"{source.name}: {failure}") from None


class _Failed(Exception):
    pass


class _Converter:
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._report = ReportBuilder()
        self._expected: Format | None = None
        self._forms: dict[str, None] = {}

    def add(self, record: Line) -> None:
        try:
            if isinstance(record.content, LineProblem):
                raise record.content
            value, left_out = self._as_ours(record.content)
            found = format_of(value)
            self._expected = self._expected or found
            require_format(found, self._expected)
            example = parse_example(record.number, value, found)
        except LineProblem as problem:
            self._report.refuse(LineError(record.number, problem.code, str(problem)))
            return
        self._report.accept(example, (*left_out, *warnings_of(value, example)))
        if not self._report.error_count:
            self._file.write(json.dumps(value, ensure_ascii=False) + "\n")

    def finish(self, words: tuple[str, ...]) -> Conversion:
        report = self._report.finish(min_examples=1, unit="record")
        if report.error_count or report.format is None:
            raise _Failed(report.told("record"))
        return Conversion(report.format, report.examples, (*words, *self._forms), report.warnings)

    def _as_ours(self, value: Any) -> tuple[Any, list[str]]:
        """The record in a format of ours, and warnings of what is left out of it."""
        if not isinstance(value, dict):
            return value, []
        given = {key: item for key, item in value.items() if item is not None}
        foreign = foreign_format(given)
        if foreign is None:
            return given, []
        self._forms[foreign.name] = None
        left_out = sorted(given.keys() - foreign.keys)
        return foreign.convert(given), [f"the column {shown(column)} is left out" for column in left_out]


@contextmanager
def _aside(target: Path) -> Iterator[TextIO]:
    """A file that takes the place of ``target`` once it is whole, and is gone otherwise."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with aside.open("x", encoding="utf-8", newline="\n") as file:
            yield file
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
