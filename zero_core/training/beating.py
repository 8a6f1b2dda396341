"""Signs of life while a rank reads or writes what may be large: a slow disk is no hang."""

from collections.abc import Iterable

import torch
from torch import Tensor

from zero_core.checkpoints.export import Results
from zero_core.sharding.flat_parameter import Weights
from zero_core.sharding.unit import Unit
from zero_core.training.journal import Journal


class BeatingWeights:
    """``Weights`` with a beat before each read."""

    def __init__(self, weights: Weights, journal: Journal) -> None:
        self._weights = weights
        self._journal = journal

    def read(self, name: str, start: int, length: int) -> Tensor:
        self._journal.beat()
        return self._weights.read(name, start, length)

    def stored_dtype(self, name: str) -> torch.dtype:
        return self._weights.stored_dtype(name)


class BeatingResults:
    """``Results`` of an export with a beat before each unit."""

    def __init__(self, results: Results, journal: Journal) -> None:
        self._results = results
        self._journal = journal

    def names(self, unit: Unit) -> Iterable[str]:
        return self._results.names(unit)

    def __call__(self, unit: Unit, keep: bool) -> Iterable[tuple[str, Tensor]]:
        self._journal.beat()
        return self._results(unit, keep)
