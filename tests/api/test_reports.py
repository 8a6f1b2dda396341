"""What a job reports, as the dashboard and the command line poll it."""

import math
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from jobs.tables import Attempt, Job, Metric, Telemetry
from tests.api.conftest import Server, error_of

JOBS = "/v1/fine_tuning/jobs"
MEMORY = {"parameters": {"current": {"device": 64}, "peak": {"device": 64}}}


@pytest.fixture
def job_id(http: httpx.Client, training_file: str) -> str:
    answer = http.post(JOBS, json={"model": "tiny", "training_file": training_file})
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["id"]
    return found


def get(http: httpx.Client, path: str, **params: Any) -> dict[str, Any]:
    answer = http.get(path, params=params)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def add_steps(server: Server, job_id: str, steps: range, ranks: int = 2) -> None:
    with server.sessions.begin() as session:
        session.get_one(Job, job_id).step = steps[-1]
        for step in steps:
            session.add(Metric(job_id=job_id, step=step, epoch=1, train_loss=1 / step))
            for rank in range(ranks):
                session.add(
                    Telemetry(job_id=job_id, step=step, rank=rank, epoch=1, memory=MEMORY, resident=100)
                )


def test_telemetry_has_each_rank_and_only_what_is_new(
    http: httpx.Client, server: Server, job_id: str
) -> None:
    path = f"{JOBS}/{job_id}/telemetry"
    assert get(http, path) == {"object": "telemetry", "memory": [], "metrics": []}
    add_steps(server, job_id, range(1, 6))
    body = get(http, path)
    assert [(row["step"], row["rank"]) for row in body["memory"]] == [
        (s, r) for s in range(1, 6) for r in (0, 1)
    ]
    assert body["memory"][0]["memory"] == MEMORY
    assert body["memory"][0]["resident"] == 100
    assert body["memory"][0]["resident_peak"] is None
    assert isinstance(body["memory"][0]["created_at"], int)
    assert [row["train_loss"] for row in body["metrics"]] == [1 / step for step in range(1, 6)]
    later = get(http, path, after_step=2, limit=2)
    assert [row["step"] for row in later["metrics"]] == [3, 4]
    assert {row["step"] for row in later["memory"]} == {3, 4}


def test_a_number_that_is_not_finite_is_null(http: httpx.Client, server: Server, job_id: str) -> None:
    with server.sessions.begin() as session:
        session.add(
            Metric(job_id=job_id, step=1, epoch=1, train_loss=math.nan, valid_loss=math.inf, grad_norm=1.5)
        )
        job = session.get_one(Job, job_id)
        job.step, job.tokens_per_second = 1, -math.inf
    (metric,) = get(http, f"{JOBS}/{job_id}/telemetry")["metrics"]
    assert (metric["train_loss"], metric["valid_loss"], metric["grad_norm"]) == (None, None, 1.5)
    assert get(http, f"{JOBS}/{job_id}")["progress"]["tokens_per_second"] is None
    assert get(http, JOBS)["data"][0]["progress"]["tokens_per_second"] is None


def test_progress_counts_the_lines_that_are_prepared(http: httpx.Client, server: Server, job_id: str) -> None:
    prepared = {"param": "training_file", "done": 120, "total": 400}
    for phase, shown in (("preparing", prepared), ("training", None)):
        with server.sessions.begin() as session:
            job = session.get_one(Job, job_id)
            job.state, job.phase, job.prepared = "running", phase, prepared
        body = get(http, f"{JOBS}/{job_id}")
        assert (body["status"], body["phase"], body["progress"]["prepared"]) == ("running", phase, shown)


def test_progress_tells_how_long_it_will_take(http: httpx.Client, server: Server, job_id: str) -> None:
    with server.sessions.begin() as session:
        job = session.get_one(Job, job_id)
        job.state, job.phase, job.epoch, job.attempts = "running", "training", 1, 1
        job.step, job.total_steps = 10, 30
        job.trained_tokens, job.tokens_per_second = 1_000, 20.0
    before = int(datetime.now(UTC).timestamp())
    body = get(http, f"{JOBS}/{job_id}")
    assert (body["status"], body["phase"], body["attempts"]) == ("running", "training", 1)
    assert body["progress"] == {
        "step": 10, "total_steps": 30, "epoch": 1.0, "tokens_per_second": 20.0, "eta": 100.0,
        "prepared": None,
    }  # fmt: skip
    assert before + 100 <= body["estimated_finish"] <= before + 130


def test_attempts_and_their_logs(http: httpx.Client, server: Server, job_id: str) -> None:
    path = f"{JOBS}/{job_id}"
    assert get(http, f"{path}/attempts") == {"object": "list", "data": [], "has_more": False}
    assert http.get(f"{path}/logs").text == ""
    with server.sessions.begin() as session:
        session.get_one(Job, job_id).epoch = 2
        for epoch in (1, 2):
            now = datetime.now(UTC)
            session.add(
                Attempt(job_id=job_id, epoch=epoch, host="a", boot_id="b", ended_at=now, reason="lost")
            )
    for epoch in (1, 2):
        directory = server.settings.attempt_dir(job_id, epoch)
        directory.mkdir(parents=True)
        (directory / "log.txt").write_text("".join(f"line {n} of {epoch}\n" for n in range(20_000)))
    found = get(http, f"{path}/attempts")["data"]
    assert [(row["attempt"], row["host"], row["reason"]) for row in found] == [
        (1, "a", "lost"),
        (2, "a", "lost"),
    ]
    newest = http.get(f"{path}/logs", params={"tail": 2})
    assert newest.headers["content-type"].startswith("text/plain")
    assert newest.text == "line 19998 of 2\nline 19999 of 2\n"
    assert http.get(f"{path}/logs", params={"attempt": 1, "tail": 100_000}).text.count("\n") == 20_000
    missing = http.get(f"{path}/logs", params={"attempt": 3})
    assert missing.status_code == 404
    assert error_of(missing)["param"] == "attempt"


def test_a_log_is_plain_text_whatever_it_says(http: httpx.Client, server: Server, job_id: str) -> None:
    directory = server.settings.attempt_dir(job_id, 0)
    directory.mkdir(parents=True)
    (directory / "log.txt").write_bytes(b"<img src=x onerror=alert(1)>\x1b[31m\xff\n")
    answer = http.get(f"{JOBS}/{job_id}/logs")
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.text == "<img src=x onerror=alert(1)>\x1b[31m�\n"
