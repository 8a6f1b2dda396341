"""What one run is told, and what it answers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Engine = Literal["shardyard", "plain", "deepspeed"]
Where = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class OffloadTask:
    engine: Engine
    shape: str
    """Of ``bench.models.SHAPES``."""
    optimizer: Where
    parameters: Where
    steps: int
    rows: int
    length: int
    """Tokens of a row."""
    limit: int | None
    """Bytes of data that the process may hold (RLIMIT_DATA), the libraries' included."""
    scratch: Path


@dataclass
class OffloadRun:
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of whole steps."""
    update_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    """Resident."""
