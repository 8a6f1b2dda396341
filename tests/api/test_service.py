"""The process itself: how it starts, and what it answers when a part behind it is missing."""

import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import redis
from sqlalchemy import create_engine, text

from jobs.wake import CLAIM_TASK, WAKE_QUEUE
from tests.api.conftest import Server, error_of, running
from tests.tiny_model import write_chat_file

NOWHERE = "redis://127.0.0.1:1/0"
JOBS = "/v1/fine_tuning/jobs"


def test_the_api_answers_within_two_seconds_of_its_start(server: Server) -> None:
    """Seconds of processor time: what it takes on an idle machine, whatever else runs beside the test."""
    with running(server.settings) as other:
        used = psutil.Process(other.process.pid).cpu_times()
        assert used.user + used.system < 2


def test_the_api_loads_no_torch(environment: dict[str, str]) -> None:
    program = "import api.main, sys; print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[]"


def test_healthy(server: Server) -> None:
    health = httpx.get(f"{server.url}/healthz")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert health.headers["x-request-id"].startswith("req_")
    ready = httpx.get(f"{server.url}/readyz")
    assert (ready.status_code, ready.json()) == (200, {"status": "ok", "database": "ok", "broker": "ok"})


def test_a_job_is_accepted_and_announced_without_a_broker(
    server: Server, http: httpx.Client, training_file: str
) -> None:
    with running(server.settings.model_copy(update={"redis_url": NOWHERE})) as other:
        ready = httpx.get(f"{other.url}/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
        start = time.monotonic()
        answer = http.post(f"{other.url}{JOBS}", json={"model": "tiny", "training_file": training_file})
        assert answer.status_code == 200, answer.text
        assert time.monotonic() - start < 2
        assert answer.json()["status"] == "queued"


def test_a_created_job_wakes_the_workers(server: Server, http: httpx.Client, training_file: str) -> None:
    job_id = http.post(JOBS, json={"model": "tiny", "training_file": training_file}).json()["id"]
    with redis.Redis.from_url(server.settings.redis_url) as broker:
        deadline = time.monotonic() + 10
        while not any(job_id.encode() in message for message in waiting_messages(broker)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert any(CLAIM_TASK.encode() in message for message in waiting_messages(broker))


def waiting_messages(broker: redis.Redis) -> list[bytes]:
    messages: list[bytes] = broker.lrange(WAKE_QUEUE, 0, -1)  # type: ignore[assignment]
    return messages


def test_without_a_database_it_is_not_ready_and_says_so(server: Server, http: httpx.Client) -> None:
    nowhere = server.settings.model_copy(
        update={"database_url": "postgresql+psycopg://nobody@127.0.0.1:1/none"}
    )
    with running(nowhere) as other:
        assert httpx.get(f"{other.url}/healthz").status_code == 200
        ready = httpx.get(f"{other.url}/readyz")
        assert (ready.status_code, ready.json()["database"]) == (503, "unreachable")
        answer = http.get(f"{other.url}/v1/models")
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert error_of(answer)["type"] == "server_error"


def test_a_crash_has_the_error_shape_and_its_id_in_the_log(
    server: Server, http: httpx.Client, training_file: str
) -> None:
    (server.settings.files_dir / training_file).unlink()
    answer = http.get(f"/v1/files/{training_file}/content")
    assert answer.status_code == 500
    error = error_of(answer)
    assert error["code"] == "internal_error"
    request_id = answer.headers["x-request-id"]
    assert request_id in error["message"]
    assert request_id in server.log.read_text()
    assert "Traceback" not in answer.text


def test_an_upload_that_the_disk_has_no_room_for_is_507_and_leaves_nothing(
    server: Server, http: httpx.Client, tmp_path: Path
) -> None:
    full = server.settings.model_copy(update={"min_free_bytes": 2**60, "data_dir": tmp_path / "full"})
    path = write_chat_file(tmp_path / "train.jsonl", 12)
    with running(full) as other:
        answer = http.post(
            f"{other.url}/v1/files",
            files={"file": path.read_bytes()},
            data={"purpose": "fine-tune"},
        )
        assert answer.status_code == 507
        assert answer.headers["x-should-retry"] == "false"
        assert error_of(answer)["code"] == "disk_full"
        assert list(other.settings.files_dir.iterdir()) == []


def test_an_answer_is_committed_before_it_is_sent(
    server: Server, http: httpx.Client, training_file: str
) -> None:
    engine = create_engine(server.settings.database_url)
    with engine.connect() as connection:
        for _ in range(10):
            job = http.post(JOBS, json={"model": "tiny", "training_file": training_file}).json()
            found = connection.execute(text("SELECT 1 FROM jobs WHERE id = :id"), {"id": job["id"]}).scalar()
            connection.rollback()
            assert found == 1
    engine.dispose()
