"""The public shape of each record: OpenAI's fields, all of them always, with ours beside."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session

from jobs.models import checkpoint_name
from jobs.pages import Page
from jobs.state import PUBLIC, State
from jobs.tables import Attempt, Checkpoint, Event, File, Job, Metric, Model, Telemetry
from zero_core.config import TrainConfig

View = dict[str, Any]


def seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())


def listing(page: Page[Any], data: list[View]) -> View:
    return {"object": "list", "data": data, "has_more": page.has_more}


def file_view(file: File) -> View:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": seconds(file.created_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": file.status,
        "status_details": file.status_details,
        "expires_at": seconds(file.expires_at),
        "sha256": file.sha256,
    }


def model_view(model: Model) -> View:
    return {
        "id": model.id,
        "object": "model",
        "created": seconds(model.created_at),
        "owned_by": model.team_id or "shardyard",
        "kind": model.kind,
        "parameters": model.parameters,
        "path": model.path,
        "job_id": model.job_id,
    }


def job_view(job: Job) -> View:
    method = _method(job)
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": seconds(job.created_at),
        "finished_at": seconds(job.finished_at),
        "error": _error(job),
        "fine_tuned_model": job.fine_tuned_model,
        "hyperparameters": method["supervised"]["hyperparameters"],
        "model": job.model,
        "organization_id": job.team_id,
        "result_files": [job.result_file] if job.result_file else [],
        "status": PUBLIC[State(job.state)],
        "trained_tokens": job.trained_tokens,
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "seed": job.spec["training"]["seed"],
        "method": method,
        "integrations": job.request.get("integrations") or [],
        "metadata": job.metadata_,
        "estimated_finish": _estimated_finish(job),
        "phase": job.phase,
        "reason": job.reason,
        "progress": _progress(job),
        "plan": job.plan,
        "attempts": job.attempts,
        "resolved_config": job.spec,
        "resources": job.spec["resources"],
        "priority": job.priority,
        "warnings": job.warnings,
        "started_at": seconds(job.started_at),
    }


def _method(job: Job) -> View:
    """What was chosen, where the client left it to the server: no ``auto`` remains."""
    training = job.spec["training"]
    epochs = training["num_train_epochs"]
    chosen = {
        "n_epochs": int(epochs) if epochs == int(epochs) else epochs,
        "batch_size": training["train_batch_size"],
        "learning_rate_multiplier": training["learning_rate"] / TrainConfig.learning_rate,
    }
    return {"type": "supervised", "supervised": {"hyperparameters": chosen}}


def _error(job: Job) -> View | None:
    if job.state != State.FAILED:
        return None
    return {"code": job.reason, "message": job.error_message, "param": job.error_param}


def _remaining_seconds(job: Job) -> float | None:
    """By the pace of the steps done so far; None before the first and after the end."""
    if job.state != State.RUNNING or not job.step or not job.total_steps or job.started_at is None:
        return None
    elapsed = (datetime.now(UTC) - job.started_at).total_seconds()
    return elapsed / job.step * (job.total_steps - job.step)


def _estimated_finish(job: Job) -> int | None:
    remaining = _remaining_seconds(job)
    return None if remaining is None else int(datetime.now(UTC).timestamp() + remaining)


def _progress(job: Job) -> View:
    remaining = _remaining_seconds(job)
    share = job.step / job.total_steps if job.total_steps else 0.0
    return {
        "step": job.step,
        "total_steps": job.total_steps,
        "epoch": round(share * float(job.spec["training"]["num_train_epochs"]), 4),
        "tokens_per_second": job.tokens_per_second,
        "eta": None if remaining is None else round(remaining, 1),
    }


def event_view(event: Event) -> View:
    return {
        "id": f"ftevent-{event.id}",
        "object": "fine_tuning.job.event",
        "created_at": seconds(event.created_at),
        "level": event.level,
        "message": event.message,
        "type": event.type,
        "data": event.data,
    }


def checkpoint_view(session: Session, job: Job, checkpoint: Checkpoint) -> View:
    metrics = checkpoint.metrics
    return {
        "id": checkpoint.id,
        "object": "fine_tuning.job.checkpoint",
        "created_at": seconds(checkpoint.created_at),
        "fine_tuned_model_checkpoint": checkpoint_name(session, job, checkpoint.step),
        "fine_tuning_job_id": job.id,
        "step_number": checkpoint.step,
        "metrics": {
            "step": checkpoint.step,
            "train_loss": metrics.get("train_loss"),
            "train_mean_token_accuracy": metrics.get("train_accuracy"),
            "valid_loss": metrics.get("valid_loss"),
            "valid_mean_token_accuracy": metrics.get("valid_accuracy"),
            "full_valid_loss": metrics.get("valid_loss"),
            "full_valid_mean_token_accuracy": metrics.get("valid_accuracy"),
        },
        "path": checkpoint.path,
        "bytes": checkpoint.bytes,
        "attempt": checkpoint.epoch,
    }


def attempt_view(attempt: Attempt) -> View:
    return {
        "object": "fine_tuning.job.attempt",
        "attempt": attempt.epoch,
        "host": attempt.host,
        "started_at": seconds(attempt.started_at),
        "ended_at": seconds(attempt.ended_at),
        "reason": attempt.reason,
        "exit_code": attempt.exit_code,
        "resumed_from_step": attempt.resumed_from_step,
    }


def metric_view(metric: Metric) -> View:
    return {
        "step": metric.step,
        "attempt": metric.epoch,
        "train_loss": metric.train_loss,
        "train_mean_token_accuracy": metric.train_accuracy,
        "valid_loss": metric.valid_loss,
        "valid_mean_token_accuracy": metric.valid_accuracy,
        "learning_rate": metric.learning_rate,
        "grad_norm": metric.grad_norm,
        "tokens": metric.tokens,
        "seconds": metric.seconds,
        "elements_sent": metric.elements_sent,
        "skipped": metric.skipped,
    }


def memory_view(row: Telemetry) -> View:
    return {
        "step": row.step,
        "rank": row.rank,
        "attempt": row.epoch,
        "created_at": seconds(row.created_at),
        "memory": row.memory,
        "resident": row.resident,
        "resident_peak": row.resident_peak,
    }
