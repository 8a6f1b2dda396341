"""What a job reports: events, checkpoints, memory and metrics, attempts and their logs."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import PlainTextResponse

from api.access import Reader
from api.attempt_log import tail_of_log
from api.parameters import LARGEST_INTEGER, After
from api.schemas.lists import List
from api.schemas.reports import (
    AttemptObject,
    CheckpointList,
    EventObject,
    MemoryRow,
    MetricRow,
    TelemetryObject,
    checkpoint_object,
    event_object,
)
from jobs import queries
from jobs.database import sessions
from jobs.errors import NotFound
from jobs.models import checkpoint_name
from jobs.settings import settings
from jobs.telemetry import telemetry

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}", tags=["fine-tuning reports"])


@router.get("/events")
def events(
    caller: Reader, job_id: str, after: After = None, limit: Annotated[int, Query(ge=1, le=1000)] = 20
) -> List[EventObject]:
    with sessions().begin() as session:
        page = queries.list_events(session, caller.team_id, job_id, after, limit)
    return List(data=[event_object(event) for event in page.data], has_more=page.has_more)


@router.get("/checkpoints")
def checkpoints(
    caller: Reader, job_id: str, after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 10
) -> CheckpointList:
    with sessions().begin() as session:
        job = queries.get_job(session, caller.team_id, job_id)
        page = queries.list_checkpoints(session, caller.team_id, job_id, after, limit)
        data = [checkpoint_object(row, checkpoint_name(session, job, row.step)) for row in page.data]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return CheckpointList(data=data, has_more=page.has_more, first_id=first, last_id=last)


@router.get("/telemetry")
def job_telemetry(
    caller: Reader,
    job_id: str,
    after_step: Annotated[int, Query(ge=-1, le=LARGEST_INTEGER)] = -1,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Steps at most.")] = 1000,
) -> TelemetryObject:
    """Memory of each rank and metrics, of the steps after ``after_step``, oldest first."""
    with sessions().begin() as session:
        memory, metrics = telemetry(session, caller.team_id, job_id, after_step, limit)
    return TelemetryObject(
        memory=[MemoryRow.model_validate(row) for row in memory],
        metrics=[MetricRow.model_validate(row) for row in metrics],
    )


@router.get("/attempts")
def attempts(caller: Reader, job_id: str) -> List[AttemptObject]:
    """Oldest first."""
    with sessions().begin() as session:
        found = queries.list_attempts(session, caller.team_id, job_id)
    return List(data=[AttemptObject.model_validate(attempt) for attempt in found], has_more=False)


@router.get("/logs", response_class=PlainTextResponse)
def logs(
    caller: Reader,
    job_id: str,
    attempt: Annotated[int | None, Query(ge=1, le=LARGEST_INTEGER)] = None,
    tail: Annotated[int, Query(ge=1, le=100_000, description="Lines at most.")] = 1000,
) -> Response:
    """The last lines that an attempt printed, the newest attempt where none is named."""
    with sessions().begin() as session:
        job = queries.get_job(session, caller.team_id, job_id)
    if attempt is not None and attempt > job.epoch:
        raise NotFound(f"Job {job_id} has no attempt {attempt}; it has had {job.epoch}.", param="attempt")
    path = settings().attempt_dir(job.id, attempt or job.epoch) / "log.txt"
    return PlainTextResponse(tail_of_log(path, tail))
