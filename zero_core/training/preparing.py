"""The run's files as datasets: one rank of a host prepares what its others read.

That may take long and all the others wait, so it is told as a phase with a count, and every rank goes on
beating meanwhile. What the preparing rank comes to is in a file of the run directory: the entries of the
cache, or why there are none, which then is every rank's error. All ranks wait for every host's, so they go
on, fail or stop together; no collective is waiting that could time out.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zero_core.checkpoints import durable
from zero_core.data.cache import Cache
from zero_core.data.dataset import Dataset
from zero_core.data.formats import FileReport, InvalidFile, LineError, Param
from zero_core.data.preparing import open_dataset, prepare
from zero_core.data.recipe import Recipe
from zero_core.errors import PeerFailed
from zero_core.models.model_files import InvalidModel
from zero_core.training.journal import Journal
from zero_core.training.run import Run, StopRequest
from zero_core.training.stopping import Stopped

_BEAT_SECONDS = 0.2
_EVENT_SECONDS = 1.0


@dataclass(frozen=True)
class Place:
    """A rank among those of its host; hosts have ranks that follow each other, and equally many."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def of(cls, rank: int, world_size: int) -> "Place":
        """As torchrun says; without it all ranks are on this host."""
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return cls(rank, world_size, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))

    @property
    def preparer(self) -> int:
        """The rank that prepares for this one."""
        return self.rank - self.local_rank

    @property
    def preparers(self) -> range:
        return range(0, self.world_size, self.local_world_size)


@dataclass(frozen=True)
class Datasets:
    training: Dataset
    validation: Dataset | None


class Preparation:
    def __init__(self, run: Run, max_length: int, journal: Journal, stop: StopRequest, place: Place) -> None:
        self._run = run
        self._recipe = Recipe.of(run.model_path, run.train, max_length)
        self._cache = Cache(run.cache_dir)
        self._journal = journal
        self._stop = stop
        self._place = place

    def datasets(self) -> Datasets:
        """Raises InvalidFile, InvalidModel or Stopped, on all ranks the same one; on the others PeerFailed
        where a rank fails otherwise."""
        self._journal.phase("preparing")
        if self._place.rank == self._place.preparer:
            self._prepare()
        verdicts = [self._wait_for(rank) for rank in self._place.preparers]
        for rank, verdict in zip(self._place.preparers, verdicts, strict=True):
            if "failure" in verdict:
                raise _error(rank, verdict["failure"])
        keys = verdicts[list(self._place.preparers).index(self._place.preparer)]["entries"]
        opened = {param: self._open(key, param) for param, key in keys.items()}
        training, validation = opened["training_file"], opened.get("validation_file")
        if validation is None and self._run.train.validation_split is not None:
            return self._split(training, self._run.train.validation_split)
        return Datasets(training, validation)

    def _prepare(self) -> None:
        files: list[tuple[Param, Path, int]] = [
            ("training_file", self._run.training_file, self._run.min_examples)
        ]
        if self._run.validation_file is not None:
            files.append(("validation_file", self._run.validation_file, 1))
        try:
            entries = {
                param: prepare(
                    path,
                    param,
                    self._recipe,
                    self._cache,
                    min_examples,
                    Pulse(self._journal, param, self._check),
                )
                for param, path, min_examples in files
            }
        except Exception as error:
            durable.write_json(self._verdict(self._place.rank), {"failure": _failure(error)})
            raise
        durable.write_json(self._verdict(self._place.rank), {"entries": entries})

    def _check(self) -> None:
        action = self._stop.action()
        if action is not None:
            raise Stopped(action)

    def _wait_for(self, rank: int) -> dict[str, Any]:
        while True:
            self._journal.beat()
            try:
                verdict: dict[str, Any] = json.loads(self._verdict(rank).read_bytes())
                return verdict
            except FileNotFoundError:
                time.sleep(_BEAT_SECONDS)

    def _verdict(self, rank: int) -> Path:
        return self._run.directory / f"prepared-{rank}.json"

    def _open(self, key: str, param: Param) -> Dataset:
        dataset = open_dataset(self._cache, key, param, self._recipe.max_length)
        for warning in dataset.warnings:
            self._journal.warn(warning)
        return dataset

    def _split(self, whole: Dataset, share: float) -> Datasets:
        try:
            return Datasets(*whole.split(share, self._run.train.seed))
        except ValueError as error:
            line = LineError(None, "too_few_examples", f"validation_split: {error}")
            raise InvalidFile(FileReport(None, len(whole), (line,), 1), "training_file") from error


class Pulse:
    """Progress as beats and events, each at a pace of its own however often it is made."""

    def __init__(
        self,
        journal: Journal,
        param: Param,
        check: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._param = param
        self._check = check
        self._clock = clock
        self._next_beat = self._next_event = float("-inf")

    def __call__(self, done: int, total: int | None) -> None:
        now = self._clock()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_SECONDS
            self._journal.beat()
            self._check()
        if now >= self._next_event or done == total:
            self._next_event = now + _EVENT_SECONDS
            self._journal.event("preparing", param=self._param, done=done, total=total)


def _failure(error: Exception) -> dict[str, Any]:
    match error:
        case InvalidFile():
            return {"kind": "invalid_file", "report": asdict(error.report), "param": error.param}
        case InvalidModel():
            return {"kind": "invalid_model", "message": str(error)}
        case Stopped():
            return {"kind": "stopped", "action": error.action}
    return {"kind": "other", "message": f"{type(error).__name__}: {error}"}


def _error(rank: int, failure: dict[str, Any]) -> Exception:
    match failure["kind"]:
        case "invalid_file":
            fields: dict[str, Any] = {
                key: tuple(v) if isinstance(v, list) else v for key, v in failure["report"].items()
            }
            errors = tuple(LineError(**line) for line in fields.pop("errors"))
            return InvalidFile(FileReport(**fields, errors=errors), failure["param"])
        case "invalid_model":
            return InvalidModel(failure["message"])
        case "stopped":
            return Stopped(failure["action"])
    return PeerFailed(f"rank {rank} failed first: {failure['message']}")
