"""One attempt's directory as its ranks see it: what comes in, what is asked meanwhile, how it ends.

The contract with the supervisor is docs/run-directory.md.
"""

import json
import os
import signal
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from zero_core.checkpoints import durable
from zero_core.config.train import TrainConfig

Status = Literal["succeeded", "failed", "paused", "cancelled"]
Action = Literal["pause", "cancel"]


@dataclass(frozen=True)
class Run:
    directory: Path
    job_id: str
    epoch: int
    model_path: Path
    training_file: Path
    validation_file: Path | None
    train: TrainConfig
    min_examples: int
    resume: list[Path]
    export_dir: Path
    cache_dir: Path
    hang_seconds: float
    memory_limit: int | None = None
    """Bytes that a rank may allocate on the host (``RLIMIT_DATA``)."""

    @classmethod
    def read(cls, directory: Path) -> "Run":
        given: dict[str, Any] = json.loads((directory / "run.json").read_bytes())
        validation_file = given["validation_file"]
        return cls(
            directory=directory,
            job_id=given["job_id"],
            epoch=given["epoch"],
            model_path=Path(given["model_path"]),
            training_file=Path(given["training_file"]),
            validation_file=Path(validation_file) if validation_file else None,
            train=TypeAdapter(TrainConfig).validate_python(given["train"]),
            min_examples=given["min_examples"],
            resume=[Path(path) for path in given["resume"]],
            export_dir=Path(given["export_dir"]),
            cache_dir=Path(given.get("cache_dir") or directory / "cache"),
            hang_seconds=given["hang_seconds"],
            memory_limit=given.get("memory_limit"),
        )


@dataclass(frozen=True)
class Outcome:
    status: Status
    reason: str | None = None
    message: str | None = None
    param: str | None = None
    step: int = 0

    def write(self, directory: Path) -> None:
        """The first outcome stays: a rank that fails because another did must not hide the cause."""
        aside = directory / f".outcome-{os.getpid()}.json"
        durable.write_json(aside, asdict(self))
        try:
            os.link(aside, directory / "outcome.json")
        except FileExistsError:
            pass
        finally:
            aside.unlink()
        durable.sync(directory)


class StopRequest:
    """Notes SIGTERM; the loop asks at its boundaries. ``control.json`` says what for, else it is a pause."""

    def __init__(self, directory: Path) -> None:
        self._control = directory / "control.json"
        self._signalled = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self._signalled.set())

    def action(self) -> Action | None:
        try:
            action: Action = json.loads(self._control.read_bytes())["action"]
            return action
        except FileNotFoundError:
            return "pause" if self._signalled.is_set() else None
