"""What a job reports while it runs: events, checkpoints, attempts, memory and metrics."""

from typing import Literal

from pydantic import Field

from api.schemas.lists import JsonObject, List, Seconds, Shape
from jobs.tables import Checkpoint, Event


class EventObject(Shape):
    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: Seconds
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: JsonObject


class CheckpointMetrics(Shape):
    step: int
    train_loss: float | None = None
    train_mean_token_accuracy: float | None = None
    valid_loss: float | None = None
    valid_mean_token_accuracy: float | None = None
    full_valid_loss: float | None = None
    full_valid_mean_token_accuracy: float | None = None


class CheckpointObject(Shape):
    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: Seconds
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: CheckpointMetrics
    path: str
    bytes: int
    attempt: int


class CheckpointList(List[CheckpointObject]):
    first_id: str | None
    last_id: str | None


class AttemptObject(Shape):
    object: Literal["fine_tuning.job.attempt"] = "fine_tuning.job.attempt"
    attempt: int = Field(validation_alias="epoch")
    host: str
    started_at: Seconds
    ended_at: Seconds | None
    reason: str | None
    exit_code: int | None
    resumed_from_step: int | None
    plan: JsonObject | None
    """Fields of ``training`` by which it trained: those that change memory and speed alone."""


class MemoryRow(Shape):
    """Memory of one rank at one step, in bytes."""

    rank: int
    step: int
    attempt: int = Field(validation_alias="epoch")
    created_at: Seconds
    memory: JsonObject
    """``{category: {"current": {tier: bytes}, "peak": {tier: bytes}}}``"""
    resident: int | None
    resident_peak: int | None


class MetricRow(Shape):
    """One optimizer step."""

    step: int
    attempt: int = Field(validation_alias="epoch")
    train_loss: float | None
    train_mean_token_accuracy: float | None = Field(validation_alias="train_accuracy")
    valid_loss: float | None
    valid_mean_token_accuracy: float | None = Field(validation_alias="valid_accuracy")
    learning_rate: float | None
    grad_norm: float | None
    tokens: int | None
    seconds: float | None
    elements_sent: int | None
    skipped: bool


class TelemetryObject(Shape):
    object: Literal["telemetry"] = "telemetry"
    memory: list[MemoryRow]
    metrics: list[MetricRow]


def event_object(event: Event) -> EventObject:
    return EventObject(
        id=f"ftevent-{event.id}",
        created_at=event.created_at,
        level=event.level,
        message=event.message,
        type=event.type,
        data=event.data,
    )


def checkpoint_object(checkpoint: Checkpoint, model_name: str) -> CheckpointObject:
    measured = checkpoint.metrics
    return CheckpointObject(
        id=checkpoint.id,
        created_at=checkpoint.created_at,
        fine_tuned_model_checkpoint=model_name,
        fine_tuning_job_id=checkpoint.job_id,
        step_number=checkpoint.step,
        metrics=CheckpointMetrics(
            step=checkpoint.step,
            train_loss=measured.get("train_loss"),
            train_mean_token_accuracy=measured.get("train_accuracy"),
            valid_loss=measured.get("valid_loss"),
            valid_mean_token_accuracy=measured.get("valid_accuracy"),
            # Evaluation always takes the whole validation file.
            full_valid_loss=measured.get("valid_loss"),
            full_valid_mean_token_accuracy=measured.get("valid_accuracy"),
        ),
        path=checkpoint.path,
        bytes=checkpoint.bytes,
        attempt=checkpoint.epoch,
    )
