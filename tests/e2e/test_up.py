"""A job outlives the stack that it was posted to, killed and stopped."""

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import eventually, free_port
from tests.shardyard.up_process import Up
from tests.tiny_model import write_chat_file
from worker.sweep import attempt_tag, ranks

TRAINING = {
    # More than it gets to.
    "max_steps": 10_000,
    "save_steps": 5,
    "train_batch_size": 2,
    "per_device_train_batch_size": 2,
}


class Client:
    """The API of the stack that runs now: its address and key stay the same."""

    def __init__(self, data_dir: Path) -> None:
        known = json.loads((data_dir / "client.json").read_text())
        self._headers = {"Authorization": f"Bearer {known['api_key']}"}
        self._url = f"{known['url']}/v1"

    def get(self, path: str) -> Any:
        return self._body(httpx.get(self._url + path, headers=self._headers, timeout=30))

    def post(self, path: str, **content: Any) -> Any:
        return self._body(httpx.post(self._url + path, headers=self._headers, timeout=30, **content))

    def job(self, job_id: str) -> Any:
        return self.get(f"/fine_tuning/jobs/{job_id}")

    def step(self, job_id: str) -> int:
        step: int = self.job(job_id)["progress"]["step"]
        return step

    @staticmethod
    def _body(response: httpx.Response) -> Any:
        assert response.is_success, response.text
        return response.json()


@pytest.fixture
def data_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shardyard-up-") as directory:
        yield Path(directory) / "data"


def test_a_job_goes_on_after_a_kill_and_after_a_stop_of_the_stack(
    data_dir: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DATABASE_URL", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    # A lease that a test can wait for, and room for one rank on any machine.
    monkeypatch.setenv("SHARDYARD_LEASE_SECONDS", "12")
    monkeypatch.setenv("SHARDYARD_HEARTBEAT_SECONDS", "1")
    monkeypatch.setenv("SHARDYARD_MIN_FREE_BYTES", "0")
    port = free_port()
    up = Up(data_dir, port)
    try:
        up.wait_until_all_run()
        client = Client(data_dir)
        job_id = submit(client, tmp_path, tiny_model)
        eventually(lambda: client.step(job_id) >= 6, "the job runs")

        # Killed: attempt and database go on, and the next stack finds them.
        up.end(signal.SIGKILL)
        assert ranks(attempt_tag(job_id, 1))
        up = Up(data_dir, port)
        up.wait_until_all_run()
        seen = client.step(job_id)
        eventually(lambda: client.step(job_id) > seen, "the attempt's record goes on")
        assert client.job(job_id)["attempts"] == 1, logs(data_dir)

        # Stopped: the attempt writes a checkpoint, and the next stack goes on from there.
        assert up.end(signal.SIGTERM) == 0
        assert not ranks(attempt_tag(job_id, 1))
        up = Up(data_dir, port)
        up.wait_until_all_run()
        stopped_at = client.step(job_id)
        assert stopped_at > seen
        eventually(lambda: client.step(job_id) > stopped_at + 2, "the job goes on")
        assert start_of(data_dir, 2)["step"] == stopped_at, logs(data_dir)
        metrics = client.get(f"/fine_tuning/jobs/{job_id}/telemetry")["metrics"]
        assert [row["step"] for row in metrics] == list(range(1, len(metrics) + 1)), logs(data_dir)
        client.post(f"/fine_tuning/jobs/{job_id}/cancel")
        eventually(lambda: client.job(job_id)["status"] == "cancelled", "the job is cancelled")
    finally:
        if up.process.poll() is None:
            up.end(signal.SIGTERM)


def start_of(data_dir: Path, attempt: int) -> Any:
    """What the attempt said as it started: the step that it went on from."""
    (events,) = data_dir.glob(f"jobs/*/a{attempt}/events.jsonl")
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    return next(line for line in lines if line["kind"] == "start")


def logs(data_dir: Path) -> str:
    """The ends of all logs, for a failure's message."""
    found = sorted([*data_dir.glob("log/*.log"), *data_dir.glob("jobs/*/a*/*.txt")])
    return "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in found)


def submit(client: Client, tmp_path: Path, model: Path) -> str:
    client.post("/models", json={"id": "tiny", "path": str(model)})
    content = write_chat_file(tmp_path / "train.jsonl", 24).read_bytes()
    files = {"file": ("train.jsonl", content)}
    file = client.post("/files", files=files, data={"purpose": "fine-tune"})
    body = {"model": "tiny", "training_file": file["id"], "training": TRAINING}
    job_id: str = client.post("/fine_tuning/jobs", json=body)["id"]
    return job_id
