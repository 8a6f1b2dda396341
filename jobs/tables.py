"""The record of every job. PostgreSQL only; the first migration creates exactly these."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Identity, Index, UniqueConstraint, func, text
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Json = dict[str, Any]


class Table(DeclarativeBase):
    type_annotation_map = {datetime: TIMESTAMP(timezone=True), Json: JSONB, list[Any]: JSONB}  # noqa: RUF012


def _now() -> Mapped[datetime]:
    return mapped_column(server_default=func.now())


class Team(Table):
    __tablename__ = "teams"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime] = _now()


class ApiKey(Table):
    """Shown once, kept as a prefix to recognise it by and a SHA-256 to check it with."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    team_id: Mapped[str] = mapped_column(ForeignKey("teams.id"))
    name: Mapped[str]
    role: Mapped[str]
    prefix: Mapped[str]
    sha256: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime] = _now()
    revoked_at: Mapped[datetime | None]


class File(Table):
    """An uploaded or produced file; its bytes lie under ``files/<id>`` in the data directory."""

    __tablename__ = "files"
    __table_args__ = (Index("files_newest", "team_id", "created_at", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    team_id: Mapped[str] = mapped_column(ForeignKey("teams.id"))
    filename: Mapped[str]
    purpose: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    status: Mapped[str] = mapped_column(server_default="processed")
    status_details: Mapped[str | None]
    examples: Mapped[int | None]
    """Good lines of a training file, counted at its upload."""
    format: Mapped[str | None]
    """Of a training file: chat, preference, completion or text."""
    warnings: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))
    """What of a training file is not used."""
    created_at: Mapped[datetime] = _now()
    expires_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]


class Model(Table):
    """A base model (no team), a fine-tuned one, an adapter, or a checkpoint."""

    __tablename__ = "models"
    __table_args__ = (Index("models_newest", "created_at", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    team_id: Mapped[str | None] = mapped_column(ForeignKey("teams.id"))
    kind: Mapped[str]
    """``base``, ``fine_tuned``, ``adapter`` or ``checkpoint``."""
    path: Mapped[str]
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    parameters: Mapped[int | None] = mapped_column(BigInteger)
    base_model: Mapped[str | None]
    """Id of the model that an adapter was trained beside; it may be forgotten by now."""
    created_at: Mapped[datetime] = _now()


class Job(Table):
    __tablename__ = "jobs"
    __table_args__ = (
        Index("jobs_newest", "team_id", "created_at", "id"),
        Index("jobs_metadata", "metadata", postgresql_using="gin"),
        Index(
            "jobs_waiting",
            text("priority DESC"),
            "created_at",
            postgresql_where=text("state IN ('queued', 'retry_wait')"),
        ),
        Index(
            "jobs_live",
            "lease_until",
            postgresql_where=text("state IN ('starting', 'running', 'pausing', 'cancelling')"),
        ),
        Index("jobs_repeat", "team_id", "body_sha256", "created_at"),
        UniqueConstraint("team_id", "idempotency_key", name="jobs_idempotency"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    team_id: Mapped[str] = mapped_column(ForeignKey("teams.id"))
    parent_job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))

    # What was asked for.
    spec: Mapped[Json]
    """The resolved ``JobSpec``: everything that an attempt needs, defaults filled in."""
    request: Mapped[Json]
    """What the client sent, echoed in OpenAI's fields."""
    model: Mapped[str]
    training_file: Mapped[str] = mapped_column(ForeignKey("files.id"))
    validation_file: Mapped[str | None] = mapped_column(ForeignKey("files.id"))
    metadata_: Mapped[Json] = mapped_column("metadata", server_default=text("'{}'"))
    warnings: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))
    gpus: Mapped[int]
    priority: Mapped[int] = mapped_column(server_default="0")
    body_sha256: Mapped[str]
    idempotency_key: Mapped[str | None]

    # Where it stands.
    state: Mapped[str]
    desired: Mapped[str] = mapped_column(server_default="run")
    phase: Mapped[str | None]
    reason: Mapped[str | None]
    error_message: Mapped[str | None]
    error_param: Mapped[str | None]
    version: Mapped[int] = mapped_column(BigInteger, server_default="1")
    """Grows with every change that a client could see: the ETag."""

    # Who holds it.
    epoch: Mapped[int] = mapped_column(server_default="0")
    worker: Mapped[str | None]
    lease_until: Mapped[datetime | None]
    heartbeat_seq: Mapped[int] = mapped_column(BigInteger, server_default="0")
    run_at: Mapped[datetime] = _now()
    attempts: Mapped[int] = mapped_column(server_default="0")
    attempts_without_checkpoint: Mapped[int] = mapped_column(server_default="0")

    training_plan: Mapped[Json | None]
    """Fields of ``TrainConfig`` by which the next attempt trains; None until it differs from the spec."""

    # How far it is, and what came of it.
    step: Mapped[int] = mapped_column(server_default="0")
    total_steps: Mapped[int | None]
    trained_tokens: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_second: Mapped[float | None]
    prepared: Mapped[Json | None]
    """While files are prepared: ``param``, and how many of its lines are ``done`` of ``total``."""
    plan: Mapped[Json | None]
    fine_tuned_model: Mapped[str | None]
    result_file: Mapped[str | None] = mapped_column(ForeignKey("files.id"))
    created_at: Mapped[datetime] = _now()
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class Attempt(Table):
    """One run of a job by one supervisor. The partial unique index is promise 3: at most one is alive."""

    __tablename__ = "attempts"
    __table_args__ = (
        UniqueConstraint("job_id", "epoch", name="attempts_epoch"),
        Index("attempts_alive", "job_id", unique=True, postgresql_where=text("ended_at IS NULL")),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    epoch: Mapped[int]
    host: Mapped[str]
    boot_id: Mapped[str]
    pid: Mapped[int | None]
    pid_start: Mapped[int | None] = mapped_column(BigInteger)
    """Clock ticks since boot at the supervisor's start: with the pid, an identity that is never reused."""
    plan: Mapped[Json | None]
    """Fields of ``TrainConfig`` by which it trains: those that change memory and speed alone."""
    resumed_from_step: Mapped[int | None]
    started_at: Mapped[datetime] = _now()
    ended_at: Mapped[datetime | None]
    reason: Mapped[str | None]
    exit_code: Mapped[int | None]


class Host(Table):
    __tablename__ = "hosts"

    host: Mapped[str] = mapped_column(primary_key=True)
    boot_id: Mapped[str]
    device: Mapped[str]
    """``cuda`` or ``cpu``."""
    slots: Mapped[int]
    seen_at: Mapped[datetime] = _now()


class Gpu(Table):
    """One device that a rank can have; on a host without GPUs, one slot on its CPU."""

    __tablename__ = "gpus"

    host: Mapped[str] = mapped_column(ForeignKey("hosts.host"), primary_key=True)
    idx: Mapped[int] = mapped_column(primary_key=True)
    attempt_id: Mapped[int | None] = mapped_column(ForeignKey("attempts.id"))


class ShippedFile(Table):
    """How far a run file has been copied into the database; moves in the same transaction as the rows."""

    __tablename__ = "shipped_files"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    epoch: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    offset: Mapped[int] = mapped_column(BigInteger)


class Event(Table):
    __tablename__ = "events"
    __table_args__ = (Index("events_newest", "job_id", "id"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    created_at: Mapped[datetime] = _now()
    level: Mapped[str] = mapped_column(server_default="info")
    type: Mapped[str] = mapped_column(server_default="message")
    message: Mapped[str]
    data: Mapped[Json] = mapped_column(server_default=text("'{}'"))


class Metric(Table):
    """One optimizer step. A later attempt that repeats a step replaces its row."""

    __tablename__ = "metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    epoch: Mapped[int]
    train_loss: Mapped[float | None]
    train_accuracy: Mapped[float | None]
    valid_loss: Mapped[float | None]
    valid_accuracy: Mapped[float | None]
    learning_rate: Mapped[float | None]
    grad_norm: Mapped[float | None]
    tokens: Mapped[int | None] = mapped_column(BigInteger)
    seconds: Mapped[float | None]
    elements_sent: Mapped[int | None] = mapped_column(BigInteger)
    skipped: Mapped[bool] = mapped_column(server_default=text("false"))


class Telemetry(Table):
    """Memory of one rank at one step, in bytes."""

    __tablename__ = "telemetry"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    epoch: Mapped[int]
    created_at: Mapped[datetime] = _now()
    memory: Mapped[Json]
    """``{category: {"current": {tier: bytes}, "peak": {tier: bytes}}}`` as ``engine.memory()`` gives it."""
    resident: Mapped[int | None] = mapped_column(BigInteger)
    resident_peak: Mapped[int | None] = mapped_column(BigInteger)


class Checkpoint(Table):
    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("job_id", "epoch", "step", name="checkpoints_step"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    epoch: Mapped[int]
    step: Mapped[int]
    path: Mapped[str]
    manifest_sha256: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    metrics: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    created_at: Mapped[datetime] = _now()
    deleted_at: Mapped[datetime | None]


class Outbox(Table):
    """Wake messages that commit with what they announce; a relay publishes and deletes them."""

    __tablename__ = "outbox"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    job_id: Mapped[str]
    created_at: Mapped[datetime] = _now()
