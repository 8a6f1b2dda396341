"""The service as its own processes: the API and a worker, on the test's own servers."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from sqlalchemy.orm import Session, sessionmaker

from jobs.models import add_base_model
from jobs.settings import Settings
from tests.tiny_model import write_tiny_model

DEADLINE_SECONDS = 120.0

ENDED = ("succeeded", "failed", "cancelled")

POLL_SECONDS = 0.2
"""Often enough to act in the middle of a job, and seldom enough to leave it the processor."""


def eventually(condition: Callable[[], object], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Wait until ``condition`` holds; fail with ``what`` was awaited."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds:.0f} s: {what}"
        time.sleep(POLL_SECONDS)


@dataclass
class Service:
    settings: Settings
    environment: dict[str, str]
    api_key: str
    url: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _sdk: OpenAI | None = None

    def start_api(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._start("api", "-m", "uvicorn", "api.main:app", "--port", str(port))
        eventually(self._healthy, "the API answers")

    def start_worker(self) -> None:
        self._start("worker", "-m", "worker")

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def openai(self) -> OpenAI:
        """The unmodified SDK, pointed here."""
        if self._sdk is None:
            self._sdk = OpenAI(base_url=f"{self.url}/v1", api_key=self.api_key, timeout=30)
        return self._sdk

    def ended(self, job_id: str) -> Any:
        """The job, when it is over."""
        jobs = self.openai().fine_tuning.jobs
        eventually(lambda: jobs.retrieve(job_id).status in ENDED, "the job ends")
        return jobs.retrieve(job_id)

    def log_of(self, job_id: str) -> str:
        """The newest attempt's log, for a failure's message."""
        logs = sorted(self.settings.job_dir(job_id).glob("a*/log.txt"))
        return logs[-1].read_text()[-3000:] if logs else "no log"

    def stop(self) -> None:
        if self._sdk is not None:
            self._sdk.close()
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(timeout=30)

    def _start(self, name: str, *arguments: str) -> None:
        log = self.settings.data_dir / "log" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *arguments], env=self.environment, stdout=output, stderr=output
            )

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that a step takes a tenth of a second, so that a test can act in the middle of a job."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=256, layers=4, heads=4)


@pytest.fixture
def service(
    settings: Settings,
    environment: dict[str, str],
    database: sessionmaker[Session],
    admin_key: str,
    tiny_model: Path,
) -> Iterator[Service]:
    with database.begin() as session:
        add_base_model(session, "tiny", str(tiny_model))
    quick = {"SHARDYARD_SLOTS": "2", "SHARDYARD_SWEEP_SECONDS": "0.5", "SHARDYARD_HEARTBEAT_SECONDS": "1"}
    service = Service(settings, {**environment, **quick}, admin_key)
    service.start_api()
    service.start_worker()
    yield service
    service.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
