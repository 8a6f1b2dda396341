"""Bytes as polynomials of a micro-batch's shape, from traces of several shapes.

A program takes the same operations whatever its shapes are, so each growth of the live bytes is fitted by
itself, and the peak is the largest of them at the shape in question: exact also where attention is the
largest for long sequences and something else for short ones. Where a loop depends on the shape, the peak
itself is fitted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from zero_core.models.traces import Trace
from zero_core.planner.profile import BatchShape, Bytes, Moment, Timeline

_FEATURES = tuple(field.name for field in fields(BatchShape))
_NAMES = ("constant", *(field.name for field in fields(Bytes) if field.name != "constant"))
_GRID = [
    BatchShape(rows, rows * length, rows * length**2, length, length**2, targets, min(targets, at_once))
    for rows in (1, 8, 64)
    for length in (64, 512, 4096, 32768)
    for targets in (1, rows * length // 4, rows * length)
    for at_once in (256, 1 << 20)
]
"""Where a polynomial may matter."""

_NEGLIGIBLE = 1e-3
"""By how much of the largest one may fall short."""


class UnsteadyProgram(ValueError):
    """The model uses other units, or in another order, at one shape than at another."""


def fit_timeline(
    shapes: Sequence[BatchShape], traces: Sequence[Trace], *, packed: bool, checkpointed: bool
) -> Timeline:
    """One trace a shape. Figures of the shapes that don't vary, or vary as others do, stay at 0."""
    order = list(traces[0].moments)
    if any(list(trace.moments) != order for trace in traces):
        raise UnsteadyProgram("units are used in an order that depends on the shape")
    fit = _Fit(shapes)
    moments = []
    for key in order:
        grown = [values for times in _aligned([trace.moments[key] for trace in traces]) for values in times]
        moments.append(Moment(*key, live=_envelope(fit(np.array(grown, dtype=np.float64).T))))
    return Timeline(packed, checkpointed, tuple(moments))


def _aligned(traces: Sequence[list[list[int]]]) -> Iterator[list[tuple[int, ...]]]:
    """Of each time that a unit was at work, the growths: one value a trace.

    A loop's further rounds are left out, such as further pieces of the logits: they are as the first ones.
    """
    times = min(map(len, traces))
    for index in [*range(times - 1), -1]:
        grown = [trace[index] for trace in traces]
        if len({len(each) for each in grown}) > 1:
            grown = [[max(each)] for each in grown]
        yield list(zip(*grown, strict=True))


def fit_kept(shapes: Sequence[BatchShape], traces: Sequence[Trace]) -> dict[str, Bytes]:
    fit = _Fit(shapes)
    units = list(traces[0].kept)
    kept = fit(np.array([[trace.kept[unit] for unit in units] for trace in traces], dtype=np.float64))
    return {unit: _bytes(row) for unit, row in zip(units, kept, strict=True)}


class _Fit:
    """Least squares on the same shapes again and again; exact for as many shapes as figures vary."""

    def __init__(self, shapes: Sequence[BatchShape]) -> None:
        matrix = np.array([_figures(shape) for shape in shapes])
        self._scale = matrix.max(axis=0)
        matrix = matrix / self._scale
        self._columns: list[int] = []
        for column in range(matrix.shape[1]):
            wanted = [*self._columns, column]
            if np.linalg.matrix_rank(matrix[:, wanted], tol=1e-6) == len(wanted):
                self._columns = wanted
        self._inverse = np.linalg.pinv(matrix[:, self._columns])

    def __call__(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of (shapes, n) bytes the (n, 6) coefficients."""
        coefficients = np.zeros((len(self._scale), values.shape[1]))
        coefficients[self._columns] = self._inverse @ values
        return _every_piece_alike((coefficients / self._scale[:, None]).T)


def _every_piece_alike(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """While recording the logits are in two pieces. What hangs on the second one's size hangs on a piece's
    size: it is ``targets`` less ``targets_at_once`` only then."""
    targets, at_once = _NAMES.index("per_target"), _NAMES.index("per_target_at_once")
    rows[:, targets] += np.minimum(rows[:, at_once], 0)
    rows[:, at_once] = abs(rows[:, at_once])
    return rows


def _envelope(rows: NDArray[np.float64]) -> tuple[Bytes, ...]:
    """As few as have the largest value among them wherever it is looked at."""
    grid = np.array([_figures(shape) for shape in _GRID])
    values = grid @ rows.T
    largest = values.max(axis=1)
    chosen: list[int] = []
    missing = np.ones(len(grid), dtype=np.bool_)
    while missing.any():
        enough = values >= (largest - _NEGLIGIBLE * abs(largest))[:, None]
        chosen.append(int(enough[missing].sum(axis=0).argmax()))
        missing &= ~enough[:, chosen[-1]]
    return tuple(_bytes(rows[index]) for index in chosen)


def _figures(shape: BatchShape) -> list[float]:
    return [1.0, *(getattr(shape, name) for name in _FEATURES)]


def _bytes(row: NDArray[np.float64]) -> Bytes:
    return Bytes(**{name: round(float(value), 3) + 0.0 for name, value in zip(_NAMES, row, strict=True)})
