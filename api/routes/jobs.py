"""Fine-tuning jobs: create, list, show, cancel, pause, resume."""

from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Depends, Header, Query

from api.access import Member, Reader
from api.bodies import MemberJson
from api.document import json_body
from api.parameters import After, metadata_filter
from api.schemas.jobs import JobObject, job_object
from api.schemas.lists import List
from jobs import intent, queries
from jobs.database import sessions
from jobs.settings import settings
from jobs.spec import JobRequest, parse_request
from jobs.submission import submit
from jobs.wake import wake

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning jobs"])


@router.post("", openapi_extra=json_body(JobRequest))
def create(
    caller: Member,
    body: MemberJson,
    after_answering: BackgroundTasks,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
    x_stainless_retry_count: Annotated[int, Header()] = 0,
) -> JobObject:
    """Accept a job: OpenAI's fields, and ``training``, ``resources`` and ``priority`` beside them."""
    request = parse_request(body)
    is_retry = x_stainless_retry_count > 0
    with sessions().begin() as session:
        submitted = submit(
            session, settings(), caller.team_id, request, idempotency_key=idempotency_key, is_retry=is_retry
        )
    if submitted.created:
        # A broker that is down must not make the client wait.
        after_answering.add_task(wake, submitted.job.id)
    return job_object(submitted.job)


@router.get("")
def list_jobs(
    caller: Reader,
    metadata: Annotated[dict[str, str], Depends(metadata_filter)],
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> List[JobObject]:
    with sessions().begin() as session:
        page = queries.list_jobs(session, caller.team_id, after, limit, metadata)
    return List(data=[job_object(job) for job in page.data], has_more=page.has_more)


@router.get("/{job_id}")
def show(caller: Reader, job_id: str) -> JobObject:
    with sessions().begin() as session:
        return job_object(queries.get_job(session, caller.team_id, job_id))


@router.post("/{job_id}/cancel")
def cancel(caller: Member, job_id: str) -> JobObject:
    """A waiting job is cancelled at once, a running one as soon as its ranks have stopped."""
    with sessions().begin() as session:
        return job_object(intent.cancel(session, caller.team_id, job_id))


@router.post("/{job_id}/pause")
def pause(caller: Member, job_id: str) -> JobObject:
    """A running job stops after its step, with a checkpoint, and gives its devices back."""
    with sessions().begin() as session:
        return job_object(intent.pause(session, caller.team_id, job_id))


@router.post("/{job_id}/resume")
def resume(caller: Member, job_id: str, after_answering: BackgroundTasks) -> JobObject:
    """A paused job waits for devices again and goes on from its newest checkpoint."""
    with sessions().begin() as session:
        job = intent.resume(session, caller.team_id, job_id)
    after_answering.add_task(wake, job.id)
    return job_object(job)
