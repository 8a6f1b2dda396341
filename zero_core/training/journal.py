"""What a rank tells the supervisor: lines of JSON, appended whole, and a heartbeat."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from zero_core.memory.ledger import Footprint, Usage


class Journal:
    """Rank 0 alone writes ``events.jsonl``; every rank its ``rank-<k>.jsonl`` and ``heartbeat-<k>``."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._events = directory / "events.jsonl" if rank == 0 else None
        self._telemetry = directory / f"rank-{rank}.jsonl"
        self._heartbeat = directory / f"heartbeat-{rank}"
        self.current_phase: str | None = None
        """What the ranks do; None before the first."""
        self.beat()

    def event(self, kind: str, **fields: Any) -> None:
        if self._events is not None:
            _append(self._events, {"kind": kind, "time": time.time(), **fields})

    def phase(self, phase: str) -> None:
        """What the ranks do from now on; said once, however often it is called."""
        if phase != self.current_phase:
            self.current_phase = phase
            self.event("phase", phase=phase)

    def warn(self, message: str) -> None:
        self.event("message", level="warn", message=message)

    def telemetry(self, step: int, memory: Usage, resident: Footprint) -> None:
        line = {
            "step": step,
            "time": time.time(),
            "memory": memory,
            "resident": resident.current,
            "resident_peak": resident.peak,
        }
        _append(self._telemetry, line)

    def beat(self) -> None:
        """Progress was made."""
        with self._heartbeat.open("ab"):
            os.utime(self._heartbeat)


def _append(path: Path, line: dict[str, Any]) -> None:
    finite = {key: _finite(value) for key, value in line.items()}
    encoded = (json.dumps(finite, allow_nan=False) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        while encoded:
            encoded = encoded[os.write(descriptor, encoded) :]
    finally:
        os.close(descriptor)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
