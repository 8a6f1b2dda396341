"""What an attempt needs to run: the inputs of ``run.json`` and the devices that it holds."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from jobs.attempts import alive
from jobs.plans import planned
from jobs.settings import Settings
from jobs.tables import Checkpoint, Gpu, Host, Job


def inputs(session: Session, settings: Settings, job: Job) -> dict[str, Any]:
    """``run.json`` as docs/run-directory.md has it, but for ``export_dir``, which is the supervisor's."""
    spec = job.spec
    return {
        "job_id": job.id,
        "epoch": job.epoch,
        "model_path": spec["model_path"],
        "training_file": spec["training_file_path"],
        "validation_file": spec["validation_file_path"],
        "train": planned(spec["training"], alive(session, job).plan),
        "min_examples": settings.min_examples,
        "resume": checkpoint_paths(session, job),
        "cache_dir": str(settings.cache_dir.absolute()),
        "hang_seconds": settings.hang_seconds,
        "memory_limit": settings.rank_memory_bytes,
    }


def checkpoint_paths(session: Session, job: Job) -> list[str]:
    """Directories of the job's checkpoints that are still there, the newest first."""
    kept = select(Checkpoint.path).where(Checkpoint.job_id == job.id, Checkpoint.deleted_at.is_(None))
    return list(session.scalars(kept.order_by(Checkpoint.step.desc(), Checkpoint.epoch.desc())))


def devices(session: Session, job: Job) -> tuple[str, tuple[int, ...]]:
    """Kind of device and indices of those that the job's live attempt holds."""
    attempt = alive(session, job)
    device = session.scalars(select(Host.device).where(Host.host == attempt.host)).one()
    held = select(Gpu.idx).where(Gpu.attempt_id == attempt.id).order_by(Gpu.idx)
    return device, tuple(session.scalars(held))
