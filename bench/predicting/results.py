"""What was predicted and measured, as kept in ``memory.json``, and the table that is made of it."""

from dataclasses import dataclass
from statistics import median

from bench.machine import Machine
from bench.markdown import table
from bench.predicting.case import Case

MEDIAN, LARGEST, BELOW = 0.03, 0.10, 0.03
"""Most that predictions may be off: typically, ever, and below what was measured."""


@dataclass(frozen=True)
class Row:
    case: Case
    imports: int
    """Bytes of the interpreter and its libraries, measured in the same run; part of both sides."""

    predicted: int
    """Resident bytes of a rank."""

    measured: int
    """The same: the high-water mark (VmHWM) of the fullest rank's fullest step."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def error_beyond_imports(self) -> float:
        return (self.predicted - self.imports) / (self.measured - self.imports) - 1


@dataclass(frozen=True)
class Results:
    machine: Machine
    command: str
    rows: list[Row]
    failures: dict[str, str]
    """By the title of a case that gave no measurement, why."""


def render(results: Results) -> str:
    rows = [
        (
            row.case.title,
            *(f"{nbytes / 1e6:,.0f}" for nbytes in (row.imports, row.predicted, row.measured)),
            f"{row.error:+.1%}",
            f"{row.error_beyond_imports:+.1%}",
        )
        for row in results.rows
    ]
    parts = [
        "# Predicted and measured memory",
        "What `planner.step.resident_peak` says of a rank on the CPU, from a profile that was recorded on "
        "fake tensors (`zero_core.training.profiling`), and the most that the fullest rank held in any of "
        "its steps. The interpreter and its libraries were measured in the same run and are part of both; "
        "the last column leaves them out.",
        f"{results.machine.title}. Measured with `{results.command}`.",
        table(("case", "imports, MB", "predicted, MB", "measured, MB", "error", "beyond the imports"), rows),
        *(f"{title}: not measured, {reason}." for title, reason in results.failures.items()),
        verdict([row.error for row in results.rows]),
    ]
    return "\n\n".join(parts) + "\n"


def verdict(errors: list[float]) -> str:
    """Of the predictions as a whole, against what they have to reach."""
    found = (
        (f"median error {median(map(abs, errors)):.1%}", median(map(abs, errors)) <= MEDIAN, f"{MEDIAN:.0%}"),
        (f"largest {max(map(abs, errors)):.1%}", max(map(abs, errors)) <= LARGEST, f"{LARGEST:.0%}"),
        (f"most below the measured {max(0.0, -min(errors)):.1%}", -min(errors) <= BELOW, f"{BELOW:.0%}"),
    )
    said = "; ".join(
        f"{text} (at most {most}: {'met' if met else '**not met**'})" for text, met, most in found
    )
    return f"Of {len(errors)} configurations: {said}."
