"""A job as clients see it: every key of OpenAI's, always, with ours beside."""

from datetime import UTC, datetime
from typing import Any, Literal

from api.schemas.lists import JsonObject, Seconds, Shape
from jobs.state import PUBLIC, Phase, State
from jobs.tables import Job
from zero_core.config.train import default_learning_rate

Status = Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]


class JobError(Shape):
    code: str
    message: str
    param: str | None


class UsedHyperparameters(Shape):
    """What is used: where the request says ``auto``, the server's choice."""

    n_epochs: int | float
    batch_size: int
    learning_rate_multiplier: float


class UsedSupervised(Shape):
    hyperparameters: UsedHyperparameters


class UsedDpoHyperparameters(UsedHyperparameters):
    beta: float


class UsedDpo(Shape):
    hyperparameters: UsedDpoHyperparameters


class SupervisedMethod(Shape):
    type: Literal["supervised"] = "supervised"
    supervised: UsedSupervised


class DpoMethod(Shape):
    type: Literal["dpo"] = "dpo"
    dpo: UsedDpo


UsedMethod = SupervisedMethod | DpoMethod


class Prepared(Shape):
    param: str
    """The field that named the file."""
    done: int
    """Lines."""
    total: int | None
    """None until they are counted."""


class Progress(Shape):
    step: int
    total_steps: int | None
    epoch: float | None
    """Passes over the training file so far; None where ``max_steps`` ends the run."""
    tokens_per_second: float | None
    eta: float | None
    """Seconds until the last step."""
    prepared: Prepared | None
    """Of the file that is being prepared now; None at any other time."""


class JobObject(Shape):
    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: Seconds
    finished_at: Seconds | None
    error: JobError | None
    fine_tuned_model: str | None
    hyperparameters: UsedHyperparameters
    model: str
    organization_id: str
    result_files: list[str]
    status: Status
    trained_tokens: int | None
    training_file: str
    validation_file: str | None
    seed: int
    method: UsedMethod
    integrations: list[Any]
    metadata: dict[str, str]
    estimated_finish: Seconds | None

    phase: str | None
    reason: str | None
    progress: Progress
    plan: JsonObject | None
    attempts: int
    resolved_config: JsonObject
    resources: JsonObject
    priority: int
    warnings: list[str]
    started_at: Seconds | None


def job_object(job: Job) -> JobObject:
    hyperparameters = _hyperparameters(job.spec["training"])
    remaining = _remaining_seconds(job)
    return JobObject(
        id=job.id,
        created_at=job.created_at,
        finished_at=job.finished_at,
        error=_error(job),
        fine_tuned_model=job.fine_tuned_model,
        hyperparameters=hyperparameters,
        model=job.model,
        organization_id=job.team_id,
        result_files=[job.result_file] if job.result_file else [],
        status=PUBLIC[State(job.state)],
        trained_tokens=job.trained_tokens,
        training_file=job.training_file,
        validation_file=job.validation_file,
        seed=job.spec["training"]["seed"],
        method=_method(job.spec["training"], hyperparameters),
        integrations=job.request.get("integrations") or [],
        metadata=job.metadata_,
        estimated_finish=None if remaining is None else int(datetime.now(UTC).timestamp() + remaining),
        phase=job.phase,
        reason=job.reason,
        progress=_progress(job, remaining),
        plan=job.plan,
        attempts=job.attempts,
        resolved_config=job.spec,
        resources=job.spec["resources"],
        priority=job.priority,
        warnings=job.warnings,
        started_at=job.started_at,
    )


def _method(training: JsonObject, hyperparameters: UsedHyperparameters) -> UsedMethod:
    # Jobs of before there was a choice are supervised, and their specs don't say so.
    if training.get("method") != "dpo":
        return SupervisedMethod(supervised=UsedSupervised(hyperparameters=hyperparameters))
    used = UsedDpoHyperparameters(**hyperparameters.model_dump(), beta=training["dpo"]["beta"])
    return DpoMethod(dpo=UsedDpo(hyperparameters=used))


def _hyperparameters(training: JsonObject) -> UsedHyperparameters:
    epochs = training["num_train_epochs"]
    default = default_learning_rate(
        training.get("method", "supervised"), adapters=training.get("lora") is not None
    )
    multiplier = training["learning_rate"] / default
    return UsedHyperparameters(
        n_epochs=int(epochs) if epochs == int(epochs) else epochs,
        batch_size=training["train_batch_size"],
        # The number that was sent, not what multiplying and dividing made of its last bit.
        learning_rate_multiplier=float(f"{multiplier:.12g}"),
    )


def _error(job: Job) -> JobError | None:
    if job.state != State.FAILED:
        return None
    return JobError(
        code=job.reason or "error", message=job.error_message or "The job failed.", param=job.error_param
    )


def _remaining_seconds(job: Job) -> float | None:
    """By tokens a step and the present pace, which pauses and lost attempts don't distort."""
    if job.state != State.RUNNING or not job.step or not job.total_steps:
        return None
    if not job.trained_tokens or not job.tokens_per_second:
        return None
    return job.trained_tokens / job.step * (job.total_steps - job.step) / job.tokens_per_second


def _progress(job: Job, remaining: float | None) -> Progress:
    return Progress(
        step=job.step,
        total_steps=job.total_steps,
        epoch=_epoch(job),
        tokens_per_second=job.tokens_per_second,
        eta=None if remaining is None else round(remaining, 1),
        # An attempt that ended while it prepared leaves its count.
        prepared=Prepared(**job.prepared) if job.prepared and job.phase == Phase.PREPARING else None,
    )


def _epoch(job: Job) -> float | None:
    training = job.spec["training"]
    if not job.total_steps or training["max_steps"] is not None:
        return None
    return round(job.step / job.total_steps * training["num_train_epochs"], 4)
