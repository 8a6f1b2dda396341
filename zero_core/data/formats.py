"""Training files: JSON lines of one format, read as a stream.

chat        ``{"messages": [...], "tools"?, "parallel_tool_calls"?}``, OpenAI's
completion  ``{"prompt": ..., "completion": ...}``
text        ``{"text": ...}``

A file has one format. Blank lines, CRLF and a byte order mark are accepted. No torch here: the API
checks files with it as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zero_core.data.examples import (
    ChatExample,
    CompletionExample,
    Example,
    Format,
    TextExample,
    format_of,
    parse_example,
)
from zero_core.data.lines import LineProblem, read_lines

__all__ = [
    "ChatExample",
    "CompletionExample",
    "Example",
    "FileReport",
    "Format",
    "InvalidFile",
    "LineError",
    "TextExample",
    "read_examples",
    "validate_file",
]

Param = Literal["training_file", "validation_file"]

_KEPT = 20
_SHOWN = 5


@dataclass(frozen=True)
class LineError:
    line: int | None
    """Counted from 1; None where the file as a whole is at fault."""

    code: str
    """Stable: clients branch on it."""

    message: str

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line} {self.message}"


@dataclass(frozen=True)
class FileReport:
    format: Format | None
    """None where no line could be read."""

    examples: int
    """Lines that are good."""

    errors: tuple[LineError, ...]
    """The first 20."""

    error_count: int

    @property
    def summary(self) -> str:
        """The first errors in one sentence, with how many more there are; empty for a good file."""
        more = self.error_count - min(len(self.errors), _SHOWN)
        return "; ".join(str(error) for error in self.errors[:_SHOWN]) + (
            f"; and {more} more" if more else ""
        )


class InvalidFile(ValueError):
    """A file that can't be trained on; ``code`` is the job's reason, ``param`` the field that named it."""

    def __init__(self, report: FileReport, param: Param = "training_file") -> None:
        super().__init__(f"{param}: {report.summary}")
        self.report = report
        self.param = param
        self.code = f"invalid_{param}"


def validate_file(path: Path, min_examples: int = 1) -> FileReport:
    """Read the whole file and say what is wrong with it. Raises OSError where it can't be read."""
    report = _Report()
    for item in _scan(path):
        report.add(item)
    return report.finish(min_examples)


def read_examples(path: Path, param: Param = "training_file") -> Iterator[Example]:
    """Every example in the file's order. Raises InvalidFile, naming all bad lines, if there is one."""
    report = _Report()
    for item in _scan(path):
        report.add(item)
        if not isinstance(item, LineError) and not report.error_count:
            yield item
    result = report.finish(min_examples=1)
    if result.error_count:
        raise InvalidFile(result, param)


class _Report:
    def __init__(self) -> None:
        self.error_count = 0
        self._format: Format | None = None
        self._examples = 0
        self._errors: list[LineError] = []

    def add(self, item: Example | LineError) -> None:
        if isinstance(item, LineError):
            self.error_count += 1
            if len(self._errors) < _KEPT:
                self._errors.append(item)
            return
        self._examples += 1
        self._format = _format_name(item)

    def finish(self, min_examples: int) -> FileReport:
        if self.error_count == 0 and self._examples < min_examples:
            self.add(too_few(self._examples, min_examples))
        return FileReport(self._format, self._examples, tuple(self._errors), self.error_count)


def too_few(examples: int, min_examples: int) -> LineError:
    return LineError(
        None, "too_few_examples", f"the file has {examples} examples; at least {min_examples} are needed"
    )


def _format_name(example: Example) -> Format:
    match example:
        case ChatExample():
            return "chat"
        case CompletionExample():
            return "completion"
        case TextExample():
            return "text"


def _scan(path: Path) -> Iterator[Example | LineError]:
    expected: Format | None = None
    for line in read_lines(path):
        try:
            if isinstance(line.content, LineProblem):
                raise line.content
            found = format_of(line.content)
            expected = expected or found
            if found != expected:
                raise LineProblem(
                    "mixed_formats", f"is of the format {found} in a file of the format {expected}"
                )
            example = parse_example(line.number, line.content, found)
        except LineProblem as problem:
            yield LineError(line.number, problem.code, str(problem))
        else:
            yield example
