"""Training files: JSON lines of one format, read as a stream.

chat        ``{"messages": [...], "tools"?, "parallel_tool_calls"?}``, OpenAI's
preference  ``{"input": {"messages": [...]}, "preferred_output": [...], "non_preferred_output": [...]}``,
            OpenAI's
completion  ``{"prompt": ..., "completion": ...}``
text        ``{"text": ...}``

A file has one format. Blank lines, CRLF and a byte order mark are accepted. No torch here: the API
checks files with it as well.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from zero_core.data.examples import (
    ChatExample,
    CompletionExample,
    Example,
    Format,
    PreferenceExample,
    TextExample,
    format_of,
    parse_example,
    warnings_of,
)
from zero_core.data.foreign import InForeignFormat
from zero_core.data.lines import LineProblem, read_lines
from zero_core.data.report import FileReport, LineError, ReportBuilder, too_few
from zero_core.data.sources import problem_of

__all__ = [
    "ChatExample",
    "CompletionExample",
    "Example",
    "FileReport",
    "Format",
    "InvalidFile",
    "LineError",
    "PreferenceExample",
    "TextExample",
    "read_examples",
    "too_few",
    "validate_file",
]

Param = Literal["training_file", "validation_file"]


class InvalidFile(ValueError):
    """A file that can't be trained on; ``code`` is the job's reason, ``param`` the field that named it."""

    def __init__(self, report: FileReport, param: Param = "training_file") -> None:
        super().__init__(f"{param}: {report.summary}")
        self.report = report
        self.param = param
        self.code = f"invalid_{param}"


def validate_file(path: Path, min_examples: int = 1) -> FileReport:
    """Read the whole file and say what is wrong with it. Raises OSError where it can't be read."""
    report = ReportBuilder()
    for item in _scan(path):
        if isinstance(item, LineError):
            report.refuse(item)
        else:
            report.accept(*item)
    return report.finish(min_examples)


def read_examples(path: Path, param: Param = "training_file") -> Iterator[Example]:
    """Every example in the file's order. Raises InvalidFile, naming all bad lines, if there is one."""
    report = ReportBuilder()
    for item in _scan(path):
        if isinstance(item, LineError):
            report.refuse(item)
            continue
        report.accept(*item)
        if not report.error_count:
            yield item[0]
    result = report.finish(min_examples=1)
    if result.error_count:
        raise InvalidFile(result, param)


def _scan(path: Path) -> Iterator[tuple[Example, list[str]] | LineError]:
    problem = problem_of(path)
    if problem is not None:
        yield LineError(None, problem.code, str(problem))
        return
    expected: Format | None = None
    for count, line in enumerate(read_lines(path)):
        try:
            if isinstance(line.content, LineProblem):
                raise line.content
            found = format_of(line.content)
            expected = expected or found
            require_format(found, expected)
            example = parse_example(line.number, line.content, found)
        except LineProblem as error:
            if count == 0 and isinstance(error, InForeignFormat):
                # So are the others: said once of the file.
                yield LineError(None, error.code, f"the file {error}")
                return
            yield LineError(line.number, error.code, str(error))
        else:
            yield example, warnings_of(line.content, example)


def require_format(found: Format, expected: Format) -> None:
    """A file has one format; raises LineProblem."""
    if found != expected:
        raise LineProblem("mixed_formats", f"is of the format {found} in a file of the format {expected}")
