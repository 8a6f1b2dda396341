"""What was found in a file: how many good examples, which lines are wrong, and what is not used."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from zero_core.data.examples import Example, Format, format_name

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

    warnings: tuple[str, ...] = ()
    """What of the good lines is not used, each once with its count."""

    @property
    def summary(self) -> str:
        """The first errors in one sentence, with how many more there are; empty for a good file."""
        return self.told("line")

    def told(self, unit: str) -> str:
        """The summary, where an error's ``line`` is counted in ``unit``. The same reason is said once."""
        lines_of: dict[str, list[int | None]] = {}
        for error in self.errors:
            lines_of.setdefault(error.message, []).append(error.line)
        parts, told = [], 0
        for message, lines in list(lines_of.items())[:_SHOWN]:
            first, *others = lines[:_SHOWN]
            also = f" (also {unit}{'s' * (len(others) > 1)} {', '.join(map(str, others))})" if others else ""
            parts.append(f"{message}{also}" if first is None else f"{unit} {first} {message}{also}")
            told += 1 + len(others)
        more = self.error_count - told
        return "; ".join(parts) + (f"; and {more} more" if more else "")


class ReportBuilder:
    """A report in the making; bounded memory, whatever the number of lines."""

    def __init__(self) -> None:
        self.error_count = 0
        self._format: Format | None = None
        self._examples = 0
        self._errors: list[LineError] = []
        self._warned: Counter[str] = Counter()
        self._first_lines: dict[str, int] = {}
        self._more_warnings = 0

    def refuse(self, error: LineError) -> None:
        self.error_count += 1
        if len(self._errors) < _KEPT:
            self._errors.append(error)

    def accept(self, example: Example, warnings: Iterable[str]) -> None:
        self._examples += 1
        self._format = format_name(example)
        for warning in warnings:
            if warning in self._first_lines or len(self._first_lines) < _KEPT:
                self._first_lines.setdefault(warning, example.line)
                self._warned[warning] += 1
            else:
                self._more_warnings += 1

    def finish(self, min_examples: int, unit: str = "line") -> FileReport:
        if self.error_count == 0 and self._examples < min_examples:
            self.refuse(too_few(self._examples, min_examples))
        return FileReport(
            self._format, self._examples, tuple(self._errors), self.error_count, tuple(self._warnings(unit))
        )

    def _warnings(self, unit: str) -> Iterable[str]:
        for warning, line in self._first_lines.items():
            count = self._warned[warning]
            where = f"{unit} {line}" if count == 1 else f"{count:,} {unit}s, the first is {line}"
            yield f"{warning} ({where})"
        if self._more_warnings:
            yield f"{self._more_warnings:,} warnings more of other kinds"


def too_few(examples: int, min_examples: int) -> LineError:
    return LineError(
        None, "too_few_examples", f"the file has {examples} examples; at least {min_examples} are needed"
    )
