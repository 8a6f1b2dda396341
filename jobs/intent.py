"""What users want of a job that exists. The API writes ``desired``; who holds the job acts on it.

A job that nobody holds is moved here, in the same transaction: the guard on ``state`` and a claim's lock
on the row exclude each other, so an intent is never lost to a claim.
"""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from jobs.errors import Conflict
from jobs.queries import get_job
from jobs.state import LIVE, TERMINAL, Desired, Reason, State, check_transition
from jobs.tables import Event, Job, Outbox


def cancel(session: Session, team_id: str, job_id: str) -> Job:
    """The job will not run on. Cancelling a job that is being cancelled changes nothing."""
    job = _lock(session, team_id, job_id)
    if job.state in TERMINAL:
        raise Conflict(f"Job {job_id} has already {job.state}, which can't be changed.", code="job_has_ended")
    if job.desired == Desired.CANCEL:
        return job
    job.desired = Desired.CANCEL
    if job.state in LIVE:
        _say(session, job, "The job will be cancelled.")
    else:
        _move(job, State.CANCELLED, Reason.CANCELLED_BY_USER)
        job.finished_at = func.now()
        _say(session, job, "The job was cancelled.")
    return _changed(session, job)


def pause(session: Session, team_id: str, job_id: str) -> Job:
    """The job stops at the next step, with a checkpoint, and keeps its place until it is resumed."""
    job = _lock(session, team_id, job_id)
    if job.state in TERMINAL or job.desired == Desired.CANCEL:
        raise Conflict(f"Job {job_id} is {job.state}; there is nothing to pause.", code="job_has_ended")
    if job.desired == Desired.PAUSE:
        return job
    job.desired = Desired.PAUSE
    if job.state in LIVE:
        _say(session, job, "The job will be paused.")
    else:
        _move(job, State.PAUSED, Reason.PAUSED_BY_USER)
        _say(session, job, "The job was paused.")
    return _changed(session, job)


def resume(session: Session, team_id: str, job_id: str) -> Job:
    """A paused job goes back to the queue and on from its newest checkpoint."""
    job = _lock(session, team_id, job_id)
    if job.state != State.PAUSED:
        raise Conflict(f"Job {job_id} is {job.state}; only a paused job can be resumed.", code="not_paused")
    job.desired = Desired.RUN
    job.run_at = func.now()
    _move(job, State.QUEUED, None)
    session.add(Outbox(job_id=job.id))
    _say(session, job, "The job was resumed.")
    return _changed(session, job)


def _lock(session: Session, team_id: str, job_id: str) -> Job:
    """The job's row as it is once every transaction that holds it has ended."""
    get_job(session, team_id, job_id)
    query = select(Job).where(Job.id == job_id).with_for_update().execution_options(populate_existing=True)
    return session.scalars(query).one()


def _move(job: Job, state: State, reason: Reason | None) -> None:
    check_transition(State(job.state), state)
    job.state = state
    job.reason = reason


def _say(session: Session, job: Job, message: str) -> None:
    session.add(Event(job_id=job.id, message=message))


def _changed(session: Session, job: Job) -> Job:
    job.version += 1
    session.flush()
    session.refresh(job)
    return job
