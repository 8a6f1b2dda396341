"""What was odd about the examples of a file: counted by kind, the first lines named, told in sentences."""

from dataclasses import dataclass, field
from typing import Any

from zero_core.data.fitting import Fate
from zero_core.data.formats import Param
from zero_core.data.notes import Note

_NAMED = 3

_SENTENCES: dict[str, tuple[str, str]] = {
    Fate.CUT: ("was cut at max_length {}", "were cut at max_length {}"),
    Fate.SPLIT: (
        "is longer than max_length {} and was split",
        "are longer than max_length {} and were split",
    ),
    Fate.TOO_LONG: (
        "is longer than max_length {} and was left out",
        "are longer than max_length {} and were left out",
    ),
    Fate.NO_TARGET: (
        "has no token to learn within max_length {} and was left out",
        "have no token to learn within max_length {} and were left out",
    ),
}
"""For one example, and for several."""


@dataclass
class Tally:
    count: int = 0
    lines: list[int] = field(default_factory=list)
    """The first of them."""

    def add(self, line: int) -> None:
        self.count += 1
        if len(self.lines) < _NAMED:
            self.lines.append(line)

    @property
    def named(self) -> str:
        more = self.count - len(self.lines)
        lines = ", ".join(map(str, self.lines))
        return f"line{'s' * (self.count > 1)} {lines}" + (f" and {more} more" if more else "")


@dataclass
class Findings:
    examples: int = 0
    """In the file, those that are left out included."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    """By ``Fate`` (but WHOLE) and ``Note``."""

    def add(self, kind: Fate | Note, line: int) -> None:
        self.tallies.setdefault(kind, Tally()).add(line)

    def count(self, kind: Fate | Note) -> int:
        return self.tallies.get(kind, Tally()).count

    def warnings(self, param: Param, max_length: int) -> tuple[str, ...]:
        """A complete sentence for each kind."""
        return tuple(self._sentence(kind, tally, param, max_length) for kind, tally in self.tallies.items())

    def _sentence(self, kind: str, tally: Tally, param: Param, max_length: int) -> str:
        of_the_file = f"{tally.count} of {self.examples} examples of {param}"
        if kind in _SENTENCES:
            said = _SENTENCES[kind][tally.count > 1].format(max_length)
            return f"{of_the_file} {said} ({tally.named})"
        return f"In {of_the_file} {Note(kind).sentence} ({tally.named})"

    def as_json(self) -> dict[str, Any]:
        kinds = {kind: {"count": tally.count, "lines": tally.lines} for kind, tally in self.tallies.items()}
        return {"examples": self.examples, "tallies": kinds}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Findings":
        kinds = {kind: Tally(given["count"], given["lines"]) for kind, given in value["tallies"].items()}
        return cls(value["examples"], kinds)
