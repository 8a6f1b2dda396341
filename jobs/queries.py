"""Reading jobs and what belongs to them, always within one team."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from jobs.errors import InvalidRequest, NotFound
from jobs.pages import Page, page
from jobs.tables import Attempt, Checkpoint, Event, Job


def get_job(session: Session, team_id: str, job_id: str) -> Job:
    job = session.get(Job, job_id)
    if job is None or job.team_id != team_id:
        raise NotFound(f"Could not find fine tune: {job_id}", param="fine_tuning_job_id")
    return job


def list_jobs(
    session: Session,
    team_id: str,
    after: str | None = None,
    limit: int = 20,
    metadata: dict[str, str] | None = None,
) -> Page[Job]:
    query = select(Job).where(Job.team_id == team_id)
    if metadata:
        query = query.where(Job.metadata_.contains(metadata))
    return page(session, query, (Job.created_at, Job.id), after=after, limit=limit)


def list_events(
    session: Session, team_id: str, job_id: str, after: str | None = None, limit: int = 20
) -> Page[Event]:
    """``after`` is an event's public id, ``ftevent-<number>``."""
    job = get_job(session, team_id, job_id)
    query = select(Event).where(Event.job_id == job.id)
    return page(session, query, (Event.id,), after=_event_number(after), limit=limit)


def list_checkpoints(
    session: Session, team_id: str, job_id: str, after: str | None = None, limit: int = 10
) -> Page[Checkpoint]:
    """Those that still exist on disk."""
    job = get_job(session, team_id, job_id)
    query = select(Checkpoint).where(Checkpoint.job_id == job.id, Checkpoint.deleted_at.is_(None))
    keys: tuple[Any, ...] = (Checkpoint.step, Checkpoint.epoch, Checkpoint.id)
    return page(session, query, keys, after=after, limit=limit)


def list_attempts(session: Session, team_id: str, job_id: str) -> list[Attempt]:
    """Oldest first."""
    job = get_job(session, team_id, job_id)
    return list(session.scalars(select(Attempt).where(Attempt.job_id == job.id).order_by(Attempt.epoch)))


def _event_number(event_id: str | None) -> int | None:
    if event_id is None:
        return None
    number = event_id.removeprefix("ftevent-")
    if not number.isdecimal():
        raise InvalidRequest(f"after: nothing in this list has the id {event_id!r}", param="after")
    return int(number)
