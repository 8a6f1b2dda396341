"""What each line of a run becomes in the database. The caller holds the job (``jobs.attempts.hold``)."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import delete, func, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from jobs.attempts import alive, record_event, run
from jobs.ids import new_id
from jobs.models import publish_checkpoint
from jobs.run_lines import (
    CheckpointMade,
    Evaluation,
    EventLine,
    Exported,
    Message,
    Metrics,
    PhaseChange,
    Preparing,
    Pruned,
    RankLine,
    Sample,
    Start,
)
from jobs.state import State
from jobs.tables import Checkpoint, Job, Metric, Model, Telemetry

MOST_WARNINGS = 50
LONGEST_WARNING = 1_000
"""Characters. Events have all of a warning, and all warnings."""


def record_line(session: Session, job: Job, line: EventLine) -> None:
    """One line of ``events.jsonl``."""
    _RECORDERS[type(line)](session, job, line)
    job.version += 1


def record_telemetry(session: Session, job: Job, rank: int, lines: list[RankLine]) -> None:
    """Lines of ``rank-<rank>.jsonl``. A step that a later attempt repeats replaces its row."""
    rows = [
        {
            "job_id": job.id,
            "step": line.step,
            "rank": rank,
            "epoch": job.epoch,
            "created_at": datetime.fromtimestamp(line.time, UTC),
            "memory": line.memory,
            "resident": line.resident,
            "resident_peak": line.resident_peak,
        }
        for line in lines
    ]
    if rows:
        statement = insert(Telemetry)
        replaced = {key: statement.excluded[key] for key in rows[0] if key not in ("job_id", "step", "rank")}
        newer = statement.excluded.epoch >= Telemetry.epoch
        session.execute(
            statement.on_conflict_do_update(
                index_elements=["job_id", "step", "rank"], set_=replaced, where=newer
            ),
            rows,
        )
        job.version += 1


def _start(session: Session, job: Job, line: Start) -> None:
    run(job)
    job.step = line.step
    job.total_steps = line.total_steps
    measured = line.model_dump(
        include={"world_size", "examples", "parameters", "model_state_bytes", "device"}, mode="json"
    )
    job.plan = {**(job.plan or {}), **measured}
    if line.resumed_from is None:
        record_event(session, job, "Fine-tuning job started", at=line.time)
    else:
        alive(session, job).resumed_from_step = line.step
        record_event(session, job, f"Fine-tuning job resumed from step {line.step}", at=line.time)


def _phase(session: Session, job: Job, line: PhaseChange) -> None:
    run(job)
    job.prepared = None
    # While a stop is under way, that is what the user wants to read.
    if job.state == State.RUNNING:
        job.phase = line.phase


def _preparing(session: Session, job: Job, line: Preparing) -> None:
    job.prepared = {"param": line.param, "done": line.done, "total": line.total}


def _metrics(session: Session, job: Job, line: Metrics) -> None:
    job.step = line.step
    job.trained_tokens = line.trained_tokens
    job.tokens_per_second = line.tokens_per_second
    columns = (
        "train_loss",
        "train_accuracy",
        "learning_rate",
        "grad_norm",
        "tokens",
        "seconds",
        "elements_sent",
        "skipped",
    )
    _upsert_metric(session, job, line.step, {column: getattr(line, column) for column in columns})
    own = {
        "train_loss": line.train_loss,
        "train_mean_token_accuracy": line.train_accuracy,
        "learning_rate": line.learning_rate,
        "grad_norm": line.grad_norm,
        "tokens_per_second": line.tokens_per_second,
    }
    loss = "not finite" if line.train_loss is None else f"{line.train_loss:.4f}"
    _metrics_event(session, job, line, f"training loss={loss}", own)


def _evaluation(session: Session, job: Job, line: Evaluation) -> None:
    values = {"valid_loss": line.valid_loss, "valid_accuracy": line.valid_accuracy}
    _upsert_metric(session, job, line.step, values)
    own = {"valid_loss": line.valid_loss, "valid_mean_token_accuracy": line.valid_accuracy}
    loss = "not finite" if line.valid_loss is None else f"{line.valid_loss:.4f}"
    _metrics_event(session, job, line, f"validation loss={loss}", own)


def _upsert_metric(session: Session, job: Job, step: int, values: dict[str, Any]) -> None:
    values = {"epoch": job.epoch, **values}
    statement = insert(Metric).values(job_id=job.id, step=step, **values)
    newer = statement.excluded.epoch >= Metric.epoch
    session.execute(
        statement.on_conflict_do_update(index_elements=["job_id", "step"], set_=values, where=newer)
    )


def _metrics_event(
    session: Session, job: Job, line: Metrics | Evaluation, said: str, own: dict[str, Any]
) -> None:
    message = f"Step {line.step}/{job.total_steps}: {said}"
    data = {"step": line.step, **line.more, **own}
    record_event(session, job, message, kind="metrics", data=data, at=line.time)


def _sample(session: Session, job: Job, line: Sample) -> None:
    data = line.model_dump(include={"step", "prompt", "answer", "reference"})
    record_event(session, job, f"Step {line.step}/{job.total_steps}: sample", data=data, at=line.time)


def _checkpoint(session: Session, job: Job, line: CheckpointMade) -> None:
    measured = ("train_loss", "train_accuracy", "valid_loss", "valid_accuracy")
    row = {
        "job_id": job.id,
        "epoch": job.epoch,
        "step": line.step,
        "path": line.path,
        "manifest_sha256": line.manifest_sha256,
        "bytes": line.bytes,
        "metrics": {"step": line.step, **{key: getattr(line, key) for key in measured}},
    }
    made = session.scalar(
        insert(Checkpoint)
        .values(id=new_id("ftckpt_"), **row)
        .on_conflict_do_nothing(constraint="checkpoints_step")
        .returning(Checkpoint.id)
    )
    if made is None:
        return
    job.attempts_without_checkpoint = 0
    publish_checkpoint(session, job, line.step, Path(line.path))
    record_event(session, job, f"Checkpoint created at step {line.step}", at=line.time)


def _pruned(session: Session, job: Job, line: Pruned) -> None:
    gone = update(Checkpoint).where(
        Checkpoint.job_id == job.id, Checkpoint.path == line.path, Checkpoint.deleted_at.is_(None)
    )
    session.execute(gone.values(deleted_at=func.now()))
    # Nobody can start from it any more.
    session.execute(
        delete(Model).where(Model.job_id == job.id, Model.kind == "checkpoint", Model.path == line.path)
    )


def _message(session: Session, job: Job, line: Message) -> None:
    if line.level == "warn":
        _warn(job, line.message[:LONGEST_WARNING])
    record_event(session, job, line.message, line.level, at=line.time)


def _warn(job: Job, warning: str) -> None:
    """Once, however often attempts say it."""
    if warning not in job.warnings and len(job.warnings) < MOST_WARNINGS:
        job.warnings = [*job.warnings, warning]


def _exported(session: Session, job: Job, line: Exported) -> None:
    record_event(session, job, f"Model exported ({line.bytes} bytes)", at=line.time)


_RECORDERS: dict[type, Callable[[Session, Job, Any], None]] = {
    Start: _start,
    PhaseChange: _phase,
    Preparing: _preparing,
    Metrics: _metrics,
    Evaluation: _evaluation,
    Sample: _sample,
    CheckpointMade: _checkpoint,
    Pruned: _pruned,
    Message: _message,
    Exported: _exported,
}
