"""The results file of a job for programs."""

import csv
import math

Row = dict[str, int | float | None]


def results_rows(text: str) -> list[Row]:
    """A row a step; what was not measured, or is no finite number, is None."""
    return [
        {name: _number(name, value) for name, value in row.items()}
        for row in csv.DictReader(text.splitlines())
    ]


def _number(name: str, value: str) -> int | float | None:
    if name == "step":
        return int(value)
    number = float(value) if value else math.nan
    return number if math.isfinite(number) else None
