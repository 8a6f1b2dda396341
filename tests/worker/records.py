"""Rows that the worker's tests start from."""

from typing import Any

from sqlalchemy.orm import Session

from jobs import hosts
from jobs.tables import File, Job, Team

TEAM = "team-worker"
TRAINING_FILE = "file-worker"
HOST = "host-a"
BOOT = "boot-1"


def add_team(session: Session) -> None:
    session.add(Team(id=TEAM, name=TEAM))
    session.flush()
    session.add(
        File(
            id=TRAINING_FILE,
            team_id=TEAM,
            filename="train.jsonl",
            purpose="fine-tune",
            bytes=1,
            sha256="0" * 64,
        )
    )
    session.flush()


def add_host(session: Session, slots: int, host: str = HOST, boot_id: str = BOOT) -> None:
    hosts.register(session, host, boot_id, "cpu", slots)


def add_job(session: Session, job_id: str = "ftjob-1", *, gpus: int = 1, **columns: Any) -> Job:
    spec = {
        "model": "tiny",
        "model_path": "model",
        "training": {"max_steps": 10},
        "resources": {"gpus": gpus},
        "suffix": None,
        "training_file_path": "train.jsonl",
        "validation_file_path": None,
        "parameters": 1000,
    }
    values: dict[str, Any] = {
        "team_id": TEAM,
        "spec": spec,
        "request": {},
        "model": "tiny",
        "training_file": TRAINING_FILE,
        "gpus": gpus,
        "body_sha256": "0" * 64,
        "state": "queued",
    }
    job = Job(id=job_id, **values | columns)
    session.add(job)
    session.flush()
    return job
