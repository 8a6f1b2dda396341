"""What a run of ranks is asked to do and what it answers; both travel as JSON between processes."""

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "bf16"]

WARM_UP_STEPS = 2
"""Left out of the times: first use allocates, and engines record their order."""


@dataclass(frozen=True)
class Case:
    """One line-up: everything but the engine, so that what is compared differs in nothing else."""

    model: str
    precision: Precision
    ranks: int
    steps: int
    """Warm-up included."""

    sequence_length: int
    rows: int
    """Sequences in each rank's batch."""

    def __post_init__(self) -> None:
        if self.steps <= WARM_UP_STEPS:
            raise ValueError(
                f"steps: {self.steps} leaves none to measure; the first {WARM_UP_STEPS} are dropped"
            )
        for name in ("ranks", "sequence_length", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")

    @property
    def title(self) -> str:
        return f"{self.model}, {self.precision}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"


@dataclass(frozen=True)
class Task:
    """A case and the engine that one set of ranks trains."""

    case: Case
    engine: str
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True)
class Measurement:
    """What one engine did in one run."""

    engine: str
    step_seconds: list[float]
    """From barrier to barrier, without the warm-up steps."""

    losses: list[float]
    """Mean over the ranks, of every step."""

    peak_growth: int
    """Bytes: the highest that a rank's memory rose above what it held before the model was built."""

    elements_sent: int | None
    """In the last step, where the engine counts them."""
