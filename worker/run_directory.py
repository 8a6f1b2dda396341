"""The supervisor's side of docs/run-directory.md: what it writes for the ranks and reads from them."""

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

_LOG_TAIL_BYTES = 16 * 2**10


class Outcome(BaseModel):
    """``outcome.json``: what the ranks themselves say that the attempt came to."""

    status: Literal["succeeded", "failed", "paused", "cancelled"]
    reason: str | None = None
    message: str | None = None
    param: str | None = None
    step: int | None = None


class RunDirectory:
    """One attempt's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def export_dir(self) -> Path:
        # Inside the attempt's own directory: an attempt that has been fenced can't overwrite another's model.
        return self.path / "model"

    def write_run(self, run: dict[str, Any]) -> None:
        self._write("run.json", run)

    def ask(self, action: Literal["pause", "cancel"]) -> None:
        """Say what the SIGTERM that follows is meant for."""
        self._write("control.json", {"action": action})

    def outcome(self) -> Outcome | None:
        """None while there is none, or if it can't be read: then the exit codes decide."""
        try:
            return Outcome.model_validate_json((self.path / "outcome.json").read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def heartbeat(self, rank: int) -> int | None:
        """When the rank last showed progress, in the file system's nanoseconds; None before it did."""
        try:
            return (self.path / f"heartbeat-{rank}").stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def log_tail(self) -> str:
        try:
            with (self.path / "log.txt").open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _LOG_TAIL_BYTES))
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _write(self, name: str, content: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        aside = self.path / f".{name}"
        with aside.open("w") as file:
            json.dump(content, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self.path / name)
