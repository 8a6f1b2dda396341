"""Fine-tuning jobs: create, list, show, cancel, and what they report."""

from typing import Annotated, Any

from fastapi import APIRouter, BackgroundTasks, Body, Depends, Header, Query, Response
from fastapi.responses import PlainTextResponse

from api.access import Member, Reader
from api.attempt_log import tail_of_log
from api.parameters import After, metadata_filter
from api.views import (
    View,
    attempt_view,
    checkpoint_view,
    event_view,
    job_view,
    listing,
    memory_view,
    metric_view,
)
from jobs import intent, queries
from jobs.database import sessions
from jobs.settings import settings
from jobs.spec import parse_request
from jobs.submission import submit
from jobs.telemetry import telemetry
from jobs.wake import wake

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning jobs"])


@router.post("")
def create(
    caller: Member,
    body: Annotated[dict[str, Any], Body()],
    background: BackgroundTasks,
    idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
    x_stainless_retry_count: Annotated[int, Header()] = 0,
) -> View:
    """Accept a job: OpenAI's fields, and ``training``, ``resources`` and ``priority`` beside them."""
    request = parse_request(body)
    with sessions().begin() as session:
        submitted = submit(
            session,
            settings(),
            caller.team_id,
            request,
            idempotency_key=idempotency_key,
            is_retry=x_stainless_retry_count > 0,
        )
        view = job_view(submitted.job)
    # After the answer: a broker that is down must not make the client wait.
    background.add_task(wake, submitted.job.id)
    return view


@router.get("")
def list_jobs(
    caller: Reader,
    metadata: Annotated[dict[str, str], Depends(metadata_filter)],
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> View:
    with sessions().begin() as session:
        page = queries.list_jobs(session, caller.team_id, after, limit, metadata)
        return listing(page, [job_view(job) for job in page.data])


@router.get("/{job_id}")
def show(caller: Reader, job_id: str) -> View:
    with sessions().begin() as session:
        return job_view(queries.get_job(session, caller.team_id, job_id))


@router.post("/{job_id}/cancel")
def cancel(caller: Member, job_id: str) -> View:
    """A waiting job is cancelled at once, a running one as soon as its ranks have stopped."""
    with sessions().begin() as session:
        return job_view(intent.cancel(session, caller.team_id, job_id))


@router.get("/{job_id}/events")
def events(
    caller: Reader, job_id: str, after: After = None, limit: Annotated[int, Query(ge=1, le=1000)] = 20
) -> View:
    with sessions().begin() as session:
        page = queries.list_events(session, caller.team_id, job_id, after, limit)
        return listing(page, [event_view(event) for event in page.data])


@router.get("/{job_id}/checkpoints")
def checkpoints(
    caller: Reader, job_id: str, after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 10
) -> View:
    with sessions().begin() as session:
        job = queries.get_job(session, caller.team_id, job_id)
        page = queries.list_checkpoints(session, caller.team_id, job_id, after, limit)
        data = [checkpoint_view(session, job, checkpoint) for checkpoint in page.data]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return listing(page, data) | {"first_id": first, "last_id": last}


@router.get("/{job_id}/telemetry")
def job_telemetry(
    caller: Reader,
    job_id: str,
    after_step: int = -1,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> View:
    """Memory of each rank and metrics, of the steps after ``after_step``."""
    with sessions().begin() as session:
        memory, metrics = telemetry(session, caller.team_id, job_id, after_step, limit)
        return {
            "object": "fine_tuning.job.telemetry",
            "memory": [memory_view(row) for row in memory],
            "metrics": [metric_view(metric) for metric in metrics],
        }


@router.get("/{job_id}/attempts")
def attempts(caller: Reader, job_id: str) -> View:
    with sessions().begin() as session:
        found = queries.list_attempts(session, caller.team_id, job_id)
        return {"object": "list", "data": [attempt_view(attempt) for attempt in found], "has_more": False}


@router.get("/{job_id}/logs", response_class=PlainTextResponse)
def logs(
    caller: Reader,
    job_id: str,
    attempt: Annotated[int | None, Query(ge=1)] = None,
    tail: Annotated[int, Query(ge=1, le=100_000)] = 1000,
) -> Response:
    """The last ``tail`` lines that an attempt printed, the newest attempt if none is named."""
    with sessions().begin() as session:
        job = queries.get_job(session, caller.team_id, job_id)
    path = settings().attempt_dir(job.id, attempt or job.epoch) / "log.txt"
    return PlainTextResponse(tail_of_log(path, tail))
