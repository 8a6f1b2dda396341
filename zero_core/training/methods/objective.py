"""What the training loop knows of a method."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from zero_core.data.batches import Batch
from zero_core.models.token_scores import TokenScores


@dataclass(frozen=True)
class Loss:
    """Of one micro-batch."""

    mean: Tensor
    """Differentiable; of a batch without samples 0."""

    weight: float
    """How much it counts in the mean of the global batch: its target tokens, or its pairs."""

    sums: tuple[float, ...]
    """What ``Objective.metrics`` is made of, to be added up over micro-batches and ranks."""


class Objective(Protocol):
    """One method on one dataset."""

    sums: tuple[str, ...]
    """Names of a loss's sums."""

    def loss(self, scores: TokenScores, batch: Batch) -> Loss: ...

    def metrics(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """``loss``, ``accuracy`` and what else the method tells, of sums over a total ``weight``."""
        ...
