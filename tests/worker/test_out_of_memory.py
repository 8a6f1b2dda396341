"""Real ranks with less memory than their plan takes: the job ends well, by a cheaper one."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from jobs.settings import Settings
from jobs.tables import Attempt, Checkpoint, Event, Job, Metric
from tests.conftest import run_python
from tests.worker.records import add_job
from tests.worker.waiting import wait_until
from worker import sweep
from worker.host import this_host
from worker.sweeper import Sweeper

UNLIMITED, LIMITED = "ftjob-unlimited", "ftjob-limited"
LIMIT = 800 * 2**20
"""Bytes. A rank that has loaded everything has allocated 0.45 GB; a micro-batch with the long example takes
as much again, half of it half as much."""
TRAINING = {
    "max_steps": 3,
    "train_batch_size": 8,
    "per_device_train_batch_size": 4,
    "packing": False,
    "max_length": 2048,
    "save_steps": 1,
    "learning_rate": 1e-3,
    "precision": "fp32",
    "zero_stage": 3,
    "seed": 0,
}


def write_texts(path: Path) -> Path:
    """One long text among short ones: its step alone takes much memory."""
    draw = random.Random(0)
    lengths = [60] * 31 + [2000]
    lines = [
        json.dumps({"text": "".join(draw.choice("abcdefgh ") for _ in range(length))}) for length in lengths
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def sweeper(
    settings: Settings,
    sessions: sessionmaker[Session],
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Sweeper]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield Sweeper(settings, sessions, this_host(settings))
    with sessions.begin() as session:
        tags = [sweep.attempt_tag(a.job_id, a.epoch) for a in session.scalars(select(Attempt))]
    assert all(sweep.kill_all(tag, 10) for tag in tags)


def curve(
    sweeper: Sweeper, sessions: sessionmaker[Session], job_id: str, model: Path, texts: Path
) -> list[float | None]:
    """Training losses of the whole job."""
    with sessions.begin() as session:
        job = add_job(session, job_id, gpus=2)
        job.spec = job.spec | {
            "model_path": str(model),
            "training": TRAINING,
            "training_file_path": str(texts),
        }

    def ended() -> bool:
        sweeper.sweep()
        with sessions.begin() as session:
            return session.get_one(Job, job_id).state in ("succeeded", "failed")

    wait_until(ended, f"{job_id} has ended", 240)
    with sessions.begin() as session:
        job = session.get_one(Job, job_id)
        assert job.state == "succeeded", job.error_message
        losses = select(Metric.train_loss).where(Metric.job_id == job_id).order_by(Metric.step)
        return list(session.scalars(losses))


def test_a_job_with_too_little_memory_succeeds_by_a_cheaper_plan(
    sweeper: Sweeper,
    sessions: sessionmaker[Session],
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model, texts = tmp_path / "model", write_texts(tmp_path / "texts.jsonl")
    options = ("--hidden", "128", "--layers", "4")
    run_python("-m", "tests.tiny_model", str(model), *options, environment=environment)
    unlimited = curve(sweeper, sessions, UNLIMITED, model, texts)
    monkeypatch.setenv("SHARDYARD_RANK_MEMORY_BYTES", str(LIMIT))
    assert curve(sweeper, sessions, LIMITED, model, texts) == pytest.approx(unlimited, rel=1e-5)
    with sessions.begin() as session:
        first, *_, last = session.scalars(
            select(Attempt).where(Attempt.job_id == LIMITED).order_by(Attempt.epoch)
        )
        assert (first.reason, last.reason) == ("oom", None)
        assert first.plan is not None
        assert last.plan is not None
        assert (first.plan["per_device_train_batch_size"], last.resumed_from_step) == (4, 1)
        assert last.plan["per_device_train_batch_size"] < 4
        warned = select(Event.message).where(Event.job_id == LIMITED, Event.level == "warn")
        said = session.scalars(warned.order_by(Event.id)).first()
        made = select(Checkpoint.step).where(Checkpoint.job_id == LIMITED, Checkpoint.epoch == 1)
        assert list(session.scalars(made)) == [1]
    assert said is not None
    assert said.startswith("out of memory on rank ")
    assert said.endswith(" in step 2: micro-batch 4 -> 2")
