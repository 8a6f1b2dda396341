"""The Python client: ``Shardyard().jobs.submit(model=..., training_file=...)``.

Its verbs are the command line's. Answers are the API's JSON objects; errors are ``shardyard.errors``.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from types import TracebackType
from typing import Any

from shardyard import address
from shardyard.errors import NoResults, UnreadableFile
from shardyard.transport import Transport

Json = dict[str, Any]
Rows = list[Json]

TERMINAL = frozenset({"succeeded", "failed", "cancelled"})
"""Statuses of a job that never change."""

TELEMETRY_STEPS = 1000
"""Steps in one answer of telemetry."""

EVENTS = 1000
"""Events in one page."""


class Shardyard:
    """Address and key come from the arguments, the environment, or the embedded stack's ``client.json``."""

    def __init__(
        self, url: str | None = None, api_key: str | None = None, data_dir: Path | None = None
    ) -> None:
        self._transport = Transport(address.find(url, api_key, data_dir))
        self.files = Files(self._transport)
        self.jobs = Jobs(self._transport)
        self.models = Models(self._transport)

    @property
    def url(self) -> str:
        return self._transport.url

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> "Shardyard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Files:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def upload(self, path: str | Path) -> Json:
        """Store a training file. One with wrong lines is kept too, with the status ``error``."""
        path = Path(path)
        with ExitStack() as opened:

            def body() -> Json:
                file = opened.enter_context(_open(path))
                return {"files": {"file": (path.name, file)}}

            return _object(self._transport, "POST", "/files", data={"purpose": "fine-tune"}, fresh=body)

    def list(self) -> Iterator[Json]:
        """Newest first."""
        return _pages(self._transport, "/files", limit=1000)

    def show(self, file_id: str) -> Json:
        return _object(self._transport, "GET", f"/files/{file_id}")

    def delete(self, file_id: str) -> Json:
        return _object(self._transport, "DELETE", f"/files/{file_id}")

    def content(self, file_id: str) -> bytes:
        return self._transport.send("GET", f"/files/{file_id}/content").content


class Models:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> Iterator[Json]:
        """Newest first."""
        yield from _object(self._transport, "GET", "/models")["data"]

    def add(self, name: str, path: str | Path) -> Json:
        """Register a directory, by its absolute path on the server, as a base model for every team."""
        return _object(self._transport, "POST", "/models", json={"id": name, "path": str(path)})


@dataclass(frozen=True)
class Update:
    """What is new about a job that is watched."""

    job: Json
    metrics: Rows
    """Steps that are new or have changed: a step's validation loss comes after its training loss."""
    memory: Rows
    """What each rank held in those steps."""
    events: Rows
    """New events, oldest first; the first update has the newest 1,000 of what was there."""


class Jobs:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def submit(self, model: str, training_file: str, **fields: Any) -> Json:
        """``POST /v1/fine_tuning/jobs`` with more of its ``fields``. A call that is retried makes one job."""
        return _object(
            self._transport,
            "POST",
            "/fine_tuning/jobs",
            json={"model": model, "training_file": training_file, **fields},
            headers={"Idempotency-Key": uuid.uuid4().hex},
        )

    def list(self, metadata: dict[str, str] | None = None) -> Iterator[Json]:
        """Newest first; with ``metadata``, those that have all these pairs."""
        wanted = {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
        return _pages(self._transport, "/fine_tuning/jobs", limit=100, **wanted)

    def show(self, job_id: str) -> Json:
        return _object(self._transport, "GET", f"/fine_tuning/jobs/{job_id}")

    def cancel(self, job_id: str) -> Json:
        return _object(self._transport, "POST", f"/fine_tuning/jobs/{job_id}/cancel")

    def events(self, job_id: str, limit: int | None = None) -> Iterator[Json]:
        """Newest first; at most ``limit``."""
        most = EVENTS if limit is None else min(limit, EVENTS)
        return islice(_pages(self._transport, f"/fine_tuning/jobs/{job_id}/events", limit=most), limit)

    def events_since(self, job_id: str, event_id: str | None) -> Rows:
        """Those after this one, oldest first; without one, the newest 1,000."""
        newest = self.events(job_id, EVENTS if event_id is None else None)
        return list(takewhile(lambda event: event["id"] != event_id, newest))[::-1]

    def checkpoints(self, job_id: str) -> Iterator[Json]:
        """Newest first."""
        return _pages(self._transport, f"/fine_tuning/jobs/{job_id}/checkpoints", limit=100)

    def telemetry(self, job_id: str, after_step: int = -1, limit: int = TELEMETRY_STEPS) -> Json:
        """``metrics`` and ``memory`` of the ``limit`` steps that follow ``after_step``."""
        wanted = {"after_step": after_step, "limit": limit}
        return _object(self._transport, "GET", f"/fine_tuning/jobs/{job_id}/telemetry", params=wanted)

    def follow_events(self, job_id: str, event_id: str | None = None, seconds: float = 1.0) -> Iterator[Json]:
        """Events after this one as they come, oldest first, until the job has ended."""
        while True:
            ended = self.show(job_id)["status"] in TERMINAL
            for event in self.events_since(job_id, event_id):
                event_id = event["id"]
                yield event
            if ended:
                return
            time.sleep(seconds)

    def results(self, job_id: str) -> bytes:
        """The results file of a job that succeeded: its metrics as CSV, a line a step."""
        job = self.show(job_id)
        if not job["result_files"]:
            raise NoResults(
                f"{job_id} has no results: it is {job['status']}, and a job that succeeded has them"
            )
        path = f"/files/{job['result_files'][0]}/content"
        return self._transport.send("GET", path).content

    def logs(self, job_id: str, tail: int = 1000, attempt: int | None = None) -> str:
        """The last lines that an attempt printed, the newest one where none is named."""
        wanted = {"tail": tail} | ({} if attempt is None else {"attempt": attempt})
        return self._transport.send("GET", f"/fine_tuning/jobs/{job_id}/logs", params=wanted).text

    def watch(self, job_id: str, seconds: float = 1.0) -> Iterator[Update]:
        """Look every so many seconds until the job has ended; the last update is the whole truth."""
        seen: dict[int, Json] = {}
        newest: str | None = None
        while True:
            # The job first: what it had told when it ended is in what is read afterwards.
            job = self.show(job_id)
            metrics, memory = self._news(job, seen)
            events = self.events_since(job_id, newest)
            newest = events[-1]["id"] if events else newest
            yield Update(job, metrics, memory, events)
            if job["status"] in TERMINAL:
                return
            time.sleep(seconds)

    def _news(self, job: Json, seen: dict[int, Json]) -> tuple[Rows, Rows]:
        """Metrics and memory, from the last step seen on, that one included, or from where an attempt went
        back to."""
        metrics: Rows = []
        memory: Rows = []
        after = min(job["progress"]["step"], max(seen, default=0)) - 1
        while True:
            page = self.telemetry(job["id"], after)
            metrics += [metric for metric in page["metrics"] if seen.get(metric["step"]) != metric]
            memory += page["memory"]
            seen.update((metric["step"], metric) for metric in page["metrics"])
            if len(page["metrics"]) < TELEMETRY_STEPS:
                return metrics, memory
            after = page["metrics"][-1]["step"]


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise UnreadableFile(f"{path} can't be read: {error.strerror}") from error


def _object(transport: Transport, method: str, path: str, **arguments: Any) -> Json:
    body: Json = transport.send(method, path, **arguments).json()
    return body


def _pages(transport: Transport, path: str, **parameters: Any) -> Iterator[Json]:
    """Every item of a list, page by page."""
    after: Json = {}
    while True:
        page = _object(transport, "GET", path, params={**parameters, **after})
        yield from page["data"]
        if not page["has_more"]:
            return
        after = {"after": page["data"][-1]["id"]}
