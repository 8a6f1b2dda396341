"""What was measured, as kept in ``zero.json``: every run of every case, and how it came about."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from pydantic import TypeAdapter

from bench.machine import Machine
from bench.models import SHAPES
from bench.task import Case, Measurement, Precision


@dataclass(frozen=True)
class Run:
    """One engine in one repetition: a measurement, or why there is none."""

    engine: str
    repetition: int
    measurement: Measurement | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Engines that took turns on one case."""

    case: Case
    command: str
    machine: Machine
    runs: list[Run]


@dataclass(frozen=True)
class Results:
    comparisons: list[Comparison] = field(default_factory=list)
    overheads: list[Comparison] = field(default_factory=list)
    """Our engine on one rank, in turns with the plain model."""

    @classmethod
    def read(cls, path: Path) -> "Results":
        """Empty where there is no file yet. Raises pydantic's ValidationError on one of another form."""
        return TypeAdapter(cls).validate_json(path.read_bytes()) if path.exists() else cls()

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.tmp")
        aside.write_bytes(TypeAdapter(Results).dump_json(self, indent=1) + b"\n")
        aside.replace(path)

    def with_comparison(self, new: Comparison) -> "Results":
        """In place of what was measured of the same model, precision and ranks: never a mixture of both."""
        return replace(self, comparisons=_replaced(self.comparisons, new))

    def with_overhead(self, new: Comparison) -> "Results":
        return replace(self, overheads=_replaced(self.overheads, new))


def _replaced(kept: list[Comparison], new: Comparison) -> list[Comparison]:
    others = [each for each in kept if each.case.title != new.case.title]
    return sorted([*others, new], key=lambda each: _place_in_report(each.case))


def _place_in_report(case: Case) -> tuple[int, int, int]:
    return list(SHAPES).index(case.model), get_args(Precision).index(case.precision), case.ranks
