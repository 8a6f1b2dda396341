"""The main job through HTTP, as a user of OpenAI's SDK sees it, undisturbed and with processes killed."""

import csv
import io
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from jobs.tables import Attempt, Job, Telemetry
from tests.e2e.conftest import Service, eventually
from tests.tiny_model import write_chat_file
from worker.sweep import attempt_tag, ranks

STEPS = 24
TRAINING = {
    "max_steps": STEPS,
    "save_steps": 4,
    "learning_rate": 1e-3,
    "zero_stage": 3,
    "train_batch_size": 4,
    "per_device_train_batch_size": 2,
}


def submit(service: Service, tmp_path: Path, **extra: Any) -> str:
    client = service.openai()
    training = client.files.create(file=write_chat_file(tmp_path / "train.jsonl", 24), purpose="fine-tune")
    validation = client.files.create(
        file=write_chat_file(tmp_path / "valid.jsonl", 6, seed=1), purpose="fine-tune"
    )
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=training.id,
        validation_file=validation.id,
        suffix="e2e",
        extra_body={"training": TRAINING, "resources": {"gpus": 2}, **extra},
    )
    return job.id


def telemetry(service: Service, job_id: str) -> dict[str, Any]:
    answer = httpx.get(
        f"{service.url}/v1/fine_tuning/jobs/{job_id}/telemetry",
        headers={"Authorization": f"Bearer {service.api_key}"},
        timeout=30,
    )
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def curve(service: Service, job_id: str) -> dict[int, tuple[float, float]]:
    metrics = telemetry(service, job_id)["metrics"]
    return {row["step"]: (row["train_loss"], row["valid_loss"]) for row in metrics}


def steps_done(service: Service, job_id: str) -> int:
    return max(curve(service, job_id), default=0)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[int, tuple[float, float]]]:
    """The loss curve of the first run, which the others must repeat."""
    return {}


def test_the_sdk_runs_a_job_from_upload_to_results(
    service: Service,
    database: sessionmaker[Session],
    tmp_path: Path,
    undisturbed: dict[str, dict[int, tuple[float, float]]],
) -> None:
    client = service.openai()
    job_id = submit(service, tmp_path, metadata={"purpose": "test"})
    job = service.ended(job_id)
    assert job.status == "succeeded", (job.error, service.log_of(job_id))
    assert job.fine_tuned_model == f"ft:tiny:acme:e2e:{job_id.removeprefix('ftjob-')[:8]}"
    assert job.trained_tokens > 0
    assert job.finished_at >= job.created_at
    assert job.error is None

    events = list(client.fine_tuning.jobs.list_events(job_id, limit=5))
    assert len({event.id for event in events}) == len(events)
    messages = [event.message for event in events]
    assert f"Created fine-tuning job: {job_id}" in messages[-1]
    reported = [e.data for e in reversed(events) if e.type == "metrics"]
    assert [data["step"] for data in reported if "train_loss" in data] == list(range(1, STEPS + 1))
    assert [data["step"] for data in reported if "valid_loss" in data] == list(range(0, STEPS + 1, 6))

    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job_id))
    assert [checkpoint.step_number for checkpoint in checkpoints] == [24, 20]
    assert checkpoints[0].metrics.train_loss is not None
    assert checkpoints[0].fine_tuned_model_checkpoint.endswith(":ckpt-step-24")

    (result_file,) = job.result_files
    rows = list(csv.DictReader(io.StringIO(client.files.content(result_file).text)))
    assert [int(row["step"]) for row in rows] == list(range(STEPS + 1))
    assert float(rows[-1]["train_loss"]) < float(rows[1]["train_loss"])
    assert float(rows[-1]["valid_loss"]) < float(rows[0]["valid_loss"])
    assert job.fine_tuned_model in [model.id for model in client.models.list()]
    undisturbed["curve"] = curve(service, job_id)
    check_memory(database, job_id)


def check_memory(database: sessionmaker[Session], job_id: str) -> None:
    """Every rank and step has the categories, and model state is the formula's: 16 bytes a parameter / 2."""
    with database.begin() as session:
        job = session.get_one(Job, job_id)
        rows = session.scalars(select(Telemetry).where(Telemetry.job_id == job_id)).all()
        assert job.plan is not None
        assert {(row.step, row.rank) for row in rows} == {
            (step, rank) for step in range(1, STEPS + 1) for rank in (0, 1)
        }
        parameters = job.spec["parameters"]
        for row in rows:
            held = {name: usage["current"]["device"] for name, usage in row.memory.items()}
            assert held.keys() == {
                "parameters", "gradients", "optimizer", "communication", "idle", "activations", "other"
            }  # fmt: skip
            # Between steps a gradient is nobody's: 4 of the 16 bytes are in the peak alone.
            assert row.memory["gradients"]["peak"]["device"] > 0.99 * parameters * 4 / 2
            state = held["parameters"] + held["optimizer"]
            assert state == pytest.approx(parameters * 12 / 2, rel=0.01)
            assert row.resident_peak is not None
            assert row.resident is not None
            assert row.resident_peak >= row.resident > state


def newest_attempt(database: sessionmaker[Session], job_id: str) -> Attempt:
    with database.begin() as session:
        return session.scalars(
            select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.epoch.desc())
        ).first()  # type: ignore[return-value]


def kill_a_rank(service: Service, database: sessionmaker[Session], job_id: str) -> None:
    attempt = newest_attempt(database, job_id)
    os.kill(ranks(attempt_tag(job_id, attempt.epoch))[0].pid, signal.SIGKILL)


def kill_the_supervisor(service: Service, database: sessionmaker[Session], job_id: str) -> None:
    pid = newest_attempt(database, job_id).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def kill_the_worker(service: Service, database: sessionmaker[Session], job_id: str) -> None:
    service.kill("worker")


@pytest.mark.parametrize(
    ("kill", "attempts"), [(kill_a_rank, 2), (kill_the_supervisor, 2), (kill_the_worker, 1)]
)
def test_a_job_outlives_what_is_killed_and_its_curve_is_the_same_step_for_step(
    service: Service,
    database: sessionmaker[Session],
    tmp_path: Path,
    undisturbed: dict[str, dict[int, tuple[float, float]]],
    kill: Any,
    attempts: int,
) -> None:
    if not undisturbed:
        whole = submit(service, tmp_path)
        assert service.ended(whole).status == "succeeded"
        undisturbed["curve"] = curve(service, whole)
    job_id = submit(service, tmp_path)
    eventually(lambda: steps_done(service, job_id) >= 6, "the job is in its middle")
    kill(service, database, job_id)
    assert steps_done(service, job_id) < STEPS
    job = service.ended(job_id)
    assert job.status == "succeeded", (job.error, service.log_of(job_id))
    with database.begin() as session:
        assert len(session.scalars(select(Attempt).where(Attempt.job_id == job_id)).all()) == attempts
    assert curve(service, job_id) == undisturbed["curve"]


def test_a_cancel_ends_a_running_job_and_leaves_no_process(
    service: Service, database: sessionmaker[Session], tmp_path: Path
) -> None:
    client = service.openai()
    job_id = submit(service, tmp_path)
    eventually(lambda: steps_done(service, job_id) >= 2, "the job runs")
    client.fine_tuning.jobs.cancel(job_id)
    job = service.ended(job_id)
    assert job.status == "cancelled"
    assert ranks(attempt_tag(job_id, 1)) == []
    assert steps_done(service, job_id) < STEPS


def test_the_api_process_has_no_torch(service: Service) -> None:
    maps = Path(f"/proc/{service.processes['api'].pid}/maps").read_text()
    assert "libpython" in maps or "python" in maps
    assert "libtorch" not in maps
