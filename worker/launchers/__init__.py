"""Engines that run an attempt's ranks. One file each; the supervisor knows only this contract."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Launch:
    """What an engine needs to start one attempt."""

    job_id: str
    epoch: int
    attempt_dir: Path
    """Holds ``run.json``; the ranks write everything here."""
    device: str
    """``cuda`` or ``cpu``."""
    gpus: tuple[int, ...]
    """The host's devices that the attempt holds, one a rank."""


class Launcher(Protocol):
    """Start, poll, stop. Each may be called again: stopping what is gone succeeds."""

    def start(self, launch: Launch) -> None:
        """Start the ranks and return. Raises OSError if that can't be done."""

    def poll(self) -> int | None:
        """Exit code of the whole attempt; None while it runs."""

    def request_stop(self) -> None:
        """Ask each rank once to stop at its next step boundary, as ``control.json`` says.

        Called until the ranks are gone, for they may not all have started when it is first called.
        """

    def stop(self, timeout: float) -> bool:
        """End everything of the attempt now; True once it is proved that nothing is left."""
