"""Comparisons with known figures."""

from bench.machine import Machine
from bench.results import Comparison, Run
from bench.task import Case, Measurement

MACHINE = Machine("a processor", 2, 16.0, {"torch": "2.13.0"})


def case(model: str = "base", precision: str = "fp32", ranks: int = 2) -> Case:
    return Case(model, precision, ranks, steps=4, sequence_length=64, rows=1)  # type: ignore[arg-type]


def measured(
    engine: str,
    *milliseconds: float,
    repetition: int = 1,
    growth: int = 0,
    losses: tuple[float, ...] = (3.0, 2.0),
    sent: int | None = None,
) -> Run:
    seconds = [each / 1000 for each in milliseconds]
    return Run(engine, repetition, Measurement(engine, seconds, list(losses), growth, sent))


def comparison(*runs: Run, of: Case | None = None) -> Comparison:
    return Comparison(of or case(), "python -m bench.zero --models base", MACHINE, list(runs))
