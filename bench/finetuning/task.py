"""What is fine-tuned, by whom, and what was measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Engine = Literal["shardyard", "trl-ddp", "trl-ddp-padding-free", "trl-fsdp2"]
ENGINES: tuple[Engine, ...] = ("shardyard", "trl-ddp", "trl-ddp-padding-free", "trl-fsdp2")

RANKS = 2
"""A thread each."""


@dataclass(frozen=True)
class Case:
    """One fine-tuning; every engine sees the same examples in the same order."""

    name: str
    lora: bool
    batch_size: int
    """Examples in a step, over all ranks."""
    max_length: int
    steps: int
    learning_rate: float
    long_texts: bool = False
    """Raw text of ``max_length`` tokens an example, in place of the demo's conversations."""


@dataclass(frozen=True)
class Task:
    """One run of one engine, as its ranks read it."""

    case: Case
    engine: Engine
    checkpointing: bool
    """Of activations: TRL's default."""
    model: Path
    examples: Path
    """Lines of ``input_ids`` and ``labels``, in the order of training."""
    output: Path


@dataclass(frozen=True)
class Measured:
    seconds: list[float]
    """Of each step after the warm-up."""
    tokens: list[int]
    """Of the examples of these steps, padding not counted."""
    peak_bytes: int
    """Resident, of the rank that took most."""
    imports_bytes: int
    """Resident when everything was imported and nothing loaded."""
    losses: list[float]
    """Of each step, for the record: that engines do the same."""
    valid_loss: float | None
    """Mean over the target tokens of the validation set, of the result as transformers and peft load it."""

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


WARM_UP = 2
"""Steps that are not counted."""
