"""The worker as users start it: woken by messages or not, over real training on two ranks."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from celery import Celery
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from jobs.settings import Settings
from jobs.tables import Attempt, Checkpoint, Gpu, Host, Job, Metric, Model, Outbox, Telemetry
from tests.conftest import run_python
from tests.worker.records import TEAM, add_job
from tests.worker.waiting import wait_until
from worker import sweep

Sessions = sessionmaker[Session]
JOB = "ftjob-main"
STEPS = 12
TRAINING = {
    "max_steps": STEPS,
    "train_batch_size": 4,
    "per_device_train_batch_size": 2,
    "max_length": 64,
    "save_steps": 4,
    "learning_rate": 1e-3,
    "zero_stage": 3,
}


class Worker:
    """``python -m worker``, started when the test wants it."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.environment = environment
        self.log = log

    def start(self) -> None:
        with self.log.open("ab") as output:
            command = [sys.executable, "-m", "worker"]
            self.process = subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)

    def start_consuming(self) -> None:
        self.start()
        wait_until(lambda: " ready." in self.log.read_text(), "the worker takes messages", 30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def worker(environment: dict[str, str], sessions: Sessions, tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(environment, tmp_path / "worker.log")
    yield worker
    worker.kill()
    assert sweep.kill_all(sweep.attempt_tag(JOB, 1), 10)


@pytest.fixture
def real_job(sessions: Sessions, tmp_path: Path, environment: dict[str, str]) -> None:
    chat = tmp_path / "chat.jsonl"
    model = tmp_path / "model"
    run_python("-m", "tests.tiny_model", str(model), "--chat-file", str(chat), environment=environment)
    with sessions.begin() as session:
        job = add_job(session, JOB, gpus=2)
        job.spec = job.spec | {
            "model_path": str(model),
            "training": TRAINING,
            "training_file_path": str(chat),
            "validation_file_path": str(chat),
        }
        session.add(Outbox(job_id=JOB))


def job(sessions: Sessions) -> Job:
    with sessions.begin() as session:
        return session.get_one(Job, JOB)


@pytest.mark.usefixtures("real_job")
def test_training_outlives_the_worker(sessions: Sessions, worker: Worker) -> None:
    worker.start()
    wait_until(lambda: job(sessions).step >= 1, "the first step is recorded", 120)
    before = sweep.processes(sweep.attempt_tag(JOB, 1))
    worker.kill()
    wait_until(lambda: job(sessions).state == "succeeded", "the job has succeeded without a worker", 120)
    wait_until(lambda: all(process.gone() for process in before), "nothing of the attempt is left", 10)
    with sessions.begin() as session:
        assert session.scalars(select(Attempt)).one().reason is None
        metrics = session.scalars(select(Metric.step).where(Metric.train_loss.is_not(None)))
        assert sorted(metrics) == list(range(1, STEPS + 1))
        ranks = session.execute(select(Telemetry.step, Telemetry.rank)).all()
        assert {tuple(row) for row in ranks} >= {(s, r) for s in range(1, STEPS + 1) for r in (0, 1)}
        made = session.scalars(select(Checkpoint.step).order_by(Checkpoint.step))
        assert list(made) == [4, 8, 12]
        model = session.get_one(Model, job(sessions).fine_tuned_model)
        assert model.team_id == TEAM
        assert Path(model.path, "config.json").exists()
        assert session.scalars(select(Gpu).where(Gpu.attempt_id.is_not(None))).all() == []
        assert session.scalars(select(Outbox)).all() == []


def attempt_exists(sessions: Sessions) -> bool:
    with sessions.begin() as session:
        return session.scalar(select(Attempt.id)) is not None


def test_a_message_starts_a_job_at_once(sessions: Sessions, settings: Settings, worker: Worker) -> None:
    # One pass at the start and then none for an hour: only the message can do it.
    worker.environment["SHARDYARD_SWEEP_SECONDS"] = "3600"
    worker.start_consuming()
    with sessions.begin() as session:
        wait_until(lambda: session.get(Host, settings.host), "the first pass has been made", 30)
        add_job(session, JOB)
    with Celery(broker=settings.redis_url, set_as_current=False) as sender:
        sender.send_task("worker.claim", args=[JOB], queue="shardyard.wake", ignore_result=True)
    wait_until(lambda: attempt_exists(sessions), "the job is claimed", 20)


def test_jobs_start_with_the_broker_down(sessions: Sessions, worker: Worker) -> None:
    worker.environment["REDIS_URL"] = "redis://127.0.0.1:1/0"
    worker.start()
    with sessions.begin() as session:
        add_job(session, JOB)
        session.add(Outbox(job_id=JOB))
    wait_until(lambda: attempt_exists(sessions), "the job is claimed", 30)
    with sessions.begin() as session:
        assert session.scalars(select(Outbox)).one().job_id == JOB


def test_a_worker_asked_to_end_ends(sessions: Sessions, settings: Settings, worker: Worker) -> None:
    worker.start_consuming()
    with sessions.begin() as session:
        host = session.get_one(Host, settings.host)
        assert (host.device, host.slots) == ("cpu", settings.slots)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(30) == 0


def test_beat_sends_ticks(settings: Settings, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "celery", "-A", "worker.celery_app", "beat"]
    beat = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    with redis.Redis.from_url(settings.redis_url) as broker:
        wait_until(lambda: broker.llen("shardyard.wake"), "a tick is in the queue", 30)
        message = broker.lindex("shardyard.wake", 0)
    beat.terminate()
    beat.wait(20)
    assert b'"worker.tick"' in message
    assert list(Path.cwd().glob("celerybeat*")) == []
