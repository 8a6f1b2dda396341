"""Noticing a rank that makes no progress."""

import time

from worker.run_directory import RunDirectory


class HangWatch:
    """Compares heartbeat files with themselves only: clocks of file systems and hosts need not agree."""

    def __init__(self, run: RunDirectory, ranks: int, seconds: float) -> None:
        self._run = run
        self._seconds = seconds
        now = time.monotonic()
        self._seen: list[tuple[int | None, float]] = [(None, now)] * ranks

    def hung(self) -> bool:
        """True once a rank's heartbeat has not changed for the configured time, by this process's clock."""
        now = time.monotonic()
        for rank, (seen, _) in enumerate(self._seen):
            beat = self._run.heartbeat(rank)
            if beat != seen:
                self._seen[rank] = (beat, now)
        return any(now - since > self._seconds for _, since in self._seen)
