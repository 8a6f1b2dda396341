"""The one door through which every job comes in, whoever posts it."""

import hashlib
import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from jobs.errors import Conflict, InvalidRequest, NotFound, Unprocessable
from jobs.files import UPLOADED, file_path, get_file
from jobs.ids import new_id
from jobs.models import get_model, require_startable
from jobs.settings import Settings
from jobs.spec import JobRequest, JobSpec, resolve
from jobs.state import Reason, State
from jobs.tables import Event, File, Host, Job, Outbox
from zero_core.config.zero import Precision
from zero_core.data.formats import too_few
from zero_core.planner.formulas import NOTHING_FROZEN, model_state_bytes

REPEAT_WINDOW = timedelta(seconds=60)
"""A client's own retry within this time, of the same body, means the job that the first try made."""


@dataclass(frozen=True)
class Submitted:
    job: Job
    created: bool
    """False: the same request came before, and this is its job."""


def submit(
    session: Session,
    settings: Settings,
    team_id: str,
    request: JobRequest,
    *,
    idempotency_key: str | None = None,
    is_retry: bool = False,
) -> Submitted:
    """Accept a job: its row, its first event and its wake message commit together, or nothing does."""
    sent = request.model_dump(mode="json", exclude_unset=True)
    digest = hashlib.sha256(json.dumps(sent, sort_keys=True).encode()).hexdigest()
    earlier = _earlier(session, team_id, digest, idempotency_key, is_retry)
    if earlier is not None:
        return Submitted(earlier, created=False)
    model = get_model(session, team_id, request.model)
    require_startable(model)
    training = _training_file(session, team_id, request.training_file, "training_file")
    validation = None
    if request.validation_file:
        validation = _training_file(session, team_id, request.validation_file, "validation_file")
    warnings = _check_size(session, request) + _file_warnings(training, validation)
    spec = resolve(
        request,
        model_path=model.path,
        parameters=model.parameters or 0,
        training_file_path=str(file_path(settings, training.id)),
        validation_file_path=str(file_path(settings, validation.id)) if validation else None,
    )
    job = _insert(session, team_id, request, spec, sent, digest, idempotency_key, warnings)
    bad = _bad_file(settings, spec.training["method"], training, validation)
    if bad is None:
        session.add(Event(job_id=job.id, message=f"Created fine-tuning job: {job.id}"))
        session.add(Outbox(job_id=job.id))
    else:
        _fail(session, job, *bad)
    session.flush()
    session.refresh(job)
    return Submitted(job, created=True)


def _earlier(
    session: Session, team_id: str, digest: str, idempotency_key: str | None, is_retry: bool
) -> Job | None:
    """The job that this very request made before. A team's requests come in one at a time, so that a retry
    also finds the job of a first try that has not committed yet."""
    session.execute(text("SELECT pg_advisory_xact_lock(hashtext(:team))"), {"team": f"submit {team_id}"})
    if idempotency_key is None and not is_retry:
        return None
    query = select(Job).where(Job.team_id == team_id)
    if idempotency_key is None:
        query = query.where(Job.body_sha256 == digest, Job.created_at > func.now() - REPEAT_WINDOW)
        return session.scalar(query.order_by(Job.created_at.desc()).limit(1))
    job = session.scalar(query.where(Job.idempotency_key == idempotency_key))
    if job is not None and job.body_sha256 != digest:
        raise Conflict(
            f"The Idempotency-Key {idempotency_key!r} was used for another request (job {job.id}); "
            "send each new request with a key of its own.",
            code="idempotency_key_reused",
        )
    return job


def _training_file(session: Session, team_id: str, file_id: str, param: str) -> File:
    # Held until the job is there: a deletion at this moment waits, and then finds the file in use.
    session.execute(select(File.id).where(File.id == file_id).with_for_update(read=True))
    try:
        file = get_file(session, team_id, file_id, param)
    except NotFound as error:
        raise NotFound(
            f"{param}: there is no file {file_id!r}; upload it first with POST /v1/files", param=param
        ) from error
    if file.purpose != UPLOADED:
        raise InvalidRequest(
            f"{param}: {file_id} has the purpose {file.purpose!r}; it must be {UPLOADED!r}", param=param
        )
    return file


def _check_size(session: Session, request: JobRequest) -> list[str]:
    """Refuse more ranks than any host has. Without a host nothing is known yet, so it is a warning."""
    gpus = request.resources.gpus
    largest = session.scalar(select(func.max(Host.slots)))
    if largest is None:
        return ["No worker host has registered yet; the job waits for one."]
    if gpus > largest:
        raise Unprocessable(
            f"resources.gpus: {gpus} are asked for, and the largest host has {largest}; ask for {largest} "
            "at most or add a larger host",
            param="resources.gpus",
            code="too_many_gpus",
        )
    return []


def _insert(
    session: Session,
    team_id: str,
    request: JobRequest,
    spec: JobSpec,
    sent: dict[str, Any],
    digest: str,
    idempotency_key: str | None,
    warnings: list[str],
) -> Job:
    job = Job(
        id=new_id("ftjob-"),
        team_id=team_id,
        spec=spec.model_dump(mode="json"),
        request=sent,
        model=request.model,
        training_file=request.training_file,
        validation_file=request.validation_file or None,
        metadata_=request.metadata or {},
        warnings=warnings,
        gpus=request.resources.gpus,
        priority=request.priority,
        body_sha256=digest,
        idempotency_key=idempotency_key,
        state=State.QUEUED,
        plan=_plan(spec),
    )
    session.add(job)
    session.flush()
    return job


def _plan(spec: JobSpec) -> dict[str, Any]:
    """What is known before the ranks have seen the model: ``counts`` says of what the bytes are.

    With LoRA that is the frozen base alone. Adapters take what the sizes of the layers decide, a small part
    of it; with a quantized base the tables that stay as they are stored come to it as well.
    """
    training, gpus = spec.training, spec.resources.gpus
    # Until a device decides: of both that ``auto`` may come to, the sums are the same.
    precision: Precision = "fp32" if training["precision"] == "auto" else training["precision"]
    trained, frozen = spec.parameters, NOTHING_FROZEN
    if training["lora"] is not None:
        # As it is stored, which nearly always is in two bytes an element.
        trained, frozen = 0, {training["lora"]["quantization"] or "bf16": spec.parameters}
    return {
        "bytes_per_rank": model_state_bytes(trained, gpus, training["zero_stage"], precision, frozen),
        "counts": "model" if training["lora"] is None else "frozen base",
        "world_size": gpus,
    }


def _file_warnings(training: File, validation: File | None) -> list[str]:
    """What of the files is not used, as their upload found."""
    files = (("training_file", training), ("validation_file", validation))
    return [f"{param}: {warning}" for param, file in files if file is not None for warning in file.warnings]


def _bad_file(
    settings: Settings, method: str, training: File, validation: File | None
) -> tuple[Reason, str, str] | None:
    """Reason, message and field of the first file that can't be trained on."""
    for file, param, reason, least in (
        (training, "training_file", Reason.INVALID_TRAINING_FILE, settings.min_examples),
        (validation, "validation_file", Reason.INVALID_VALIDATION_FILE, 1),
    ):
        if file is None:
            continue
        problem = file.status_details
        if problem is None and file.examples is not None and file.examples < least:
            problem = str(too_few(file.examples, least))
        if problem is None and file.format is not None:
            problem = _other_method(method, file.format)
        if problem is not None:
            return reason, f"{param} {file.id}: {problem}", param
    return None


def _other_method(method: str, format: str) -> str | None:
    """What is wrong where a file is of the kind that another method trains on."""
    if method == "dpo" and format != "preference":
        return f"the method dpo needs preference examples, and the format of the file is {format}"
    if method != "dpo" and format == "preference":
        return f"the file has preference examples, which the method {method} can't use; use dpo"
    return None


def _fail(session: Session, job: Job, reason: Reason, message: str, param: str) -> None:
    """OpenAI accepts a job on a bad file and fails it; so the client learns the reason from the job."""
    job.state = State.FAILED
    job.reason = reason
    job.error_message = message
    job.error_param = param
    job.finished_at = func.now()
    session.add(Event(job_id=job.id, message=f"Created fine-tuning job: {job.id}"))
    session.add(Event(job_id=job.id, level="error", message=f"The job failed: {message}"))
