"""An attempt's writes to its job: each of them fenced.

``hold`` locks the job's row where the epoch is the attempt's own and the state is live, or raises
``Fenced``. Whatever is written while the row is held can therefore never come from an attempt that a newer
one has replaced.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import exists, func, select, update
from sqlalchemy.orm import Session

from jobs.errors import Fenced
from jobs.plans import NOTHING_CHEAPER, after_out_of_memory
from jobs.settings import Settings
from jobs.state import LIVE, RETRYABLE, TRANSITIONS, Desired, Phase, Reason, State, check_transition
from jobs.tables import Attempt, Checkpoint, Event, Gpu, Job

_LIVE = sorted(LIVE)

_ON_THE_WAY: dict[State, tuple[State, ...]] = {
    State.SUCCEEDED: (State.RUNNING,),
    State.PAUSED: (State.PAUSING, State.RETRY_WAIT),
    State.FAILED: (State.RETRY_WAIT,),
    State.CANCELLED: (State.CANCELLING,),
}
"""States that an ending may pass through inside one transaction where the table has no direct step."""


@dataclass(frozen=True)
class Ending:
    """How an attempt ended. ``state`` is what the job should become: SUCCEEDED, FAILED, PAUSED, CANCELLED,
    or RETRY_WAIT for an attempt that was lost and that another one may repeat."""

    state: State
    reason: Reason | None = None
    message: str | None = None
    param: str | None = None
    exit_code: int | None = None
    blame: bool = True
    """False where the attempt was stopped on purpose or the next one has a cheaper plan: it doesn't count
    towards ``max_attempts``."""


def hold(session: Session, job_id: str, epoch: int) -> Job:
    """The job, locked until the transaction ends. Raises Fenced unless ``epoch`` is its live attempt."""
    job = session.scalars(
        select(Job)
        .where(Job.id == job_id, Job.epoch == epoch, Job.state.in_(_LIVE))
        .with_for_update()
        .execution_options(populate_existing=True)
    ).one_or_none()
    if job is None:
        raise fenced(job_id, epoch)
    return job


def fenced(job_id: str, epoch: int) -> Fenced:
    return Fenced(f"Attempt {epoch} of {job_id} no longer owns the job; it must end its ranks and exit.")


def begin(session: Session, settings: Settings, job_id: str, epoch: int, pid: int, pid_start: int) -> Job:
    """The supervisor's first write: who it is, and a fresh lease."""
    heartbeat(session, settings, job_id, epoch)
    job = hold(session, job_id, epoch)
    attempt = alive(session, job)
    attempt.pid = pid
    attempt.pid_start = pid_start
    return job


def heartbeat(session: Session, settings: Settings, job_id: str, epoch: int) -> None:
    """Extend the lease by the database's clock."""
    renewed = session.execute(
        update(Job)
        .where(Job.id == job_id, Job.epoch == epoch, Job.state.in_(_LIVE))
        .values(
            heartbeat_seq=Job.heartbeat_seq + 1,
            lease_until=func.now() + timedelta(seconds=settings.lease_seconds),
        )
        .returning(Job.id)
    ).one_or_none()
    if renewed is None:
        raise fenced(job_id, epoch)


def heed(session: Session, job_id: str, epoch: int) -> Desired:
    """Read what the user wants and say in the job's state that it is being done."""
    job = hold(session, job_id, epoch)
    desired = Desired(job.desired)
    if desired is Desired.CANCEL and job.state != State.CANCELLING:
        _move(job, State.CANCELLING)
        job.phase = Phase.CANCELLING
        record_event(session, job, "Cancelling: the ranks are being stopped")
    # An attempt that has not started training has no PAUSING: it pauses once it runs, or at its end.
    elif desired is Desired.PAUSE and job.state == State.RUNNING:
        _move(job, State.PAUSING)
        job.phase = Phase.PAUSING
        record_event(session, job, "Pausing: the ranks are writing a checkpoint")
    return desired


def alive(session: Session, job: Job) -> Attempt:
    """The attempt of the job's own epoch."""
    return session.scalars(select(Attempt).where(Attempt.job_id == job.id, Attempt.epoch == job.epoch)).one()


def finish(
    session: Session, settings: Settings, job: Job, ending: Ending, *, free_gpus: bool = True
) -> State:
    """End the held job's attempt and move the job; returns the state that it is in now.

    ``free_gpus`` only when a sweep on the attempt's host has proved that no process of it is left; otherwise
    that host gives them back itself (``jobs.hosts.abandoned``).
    """
    attempt = alive(session, job)
    attempt.ended_at = func.now()
    attempt.reason = ending.reason
    attempt.exit_code = ending.exit_code
    if free_gpus:
        session.execute(update(Gpu).where(Gpu.attempt_id == attempt.id).values(attempt_id=None))
    ending = _decide(session, settings, job, ending)
    _end(job, ending.state)
    job.reason = ending.reason
    job.error_message = ending.message if ending.state is State.FAILED else None
    job.error_param = ending.param if ending.state is State.FAILED else None
    job.phase = Phase.RECOVERING if ending.state is State.RETRY_WAIT else None
    job.lease_until = None
    job.worker = None
    if ending.state is State.RETRY_WAIT:
        # Without a reason it was stopped on purpose.
        job.run_at = func.now() + timedelta(seconds=settings.retry_delay_seconds if ending.reason else 0)
    elif ending.state is not State.PAUSED:
        job.finished_at = func.now()
    _announce(session, job, ending)
    return ending.state


def _decide(session: Session, settings: Settings, job: Job, ending: Ending) -> Ending:
    """What the job becomes, given what the attempt came to, what the user wants and how often it failed."""
    if ending.state is State.FAILED and ending.reason is Reason.OOM:
        ending = _by_a_cheaper_plan(session, job, ending)
    elif ending.state is State.FAILED and ending.reason in RETRYABLE:
        ending = Ending(State.RETRY_WAIT, ending.reason, ending.message, exit_code=ending.exit_code)
    elif ending.state is State.PAUSED and job.desired != Desired.PAUSE:
        # Stopped by a signal from outside, or the user has changed their mind: go on where it stopped.
        ending = Ending(State.RETRY_WAIT, blame=False)
    cancelled = job.desired == Desired.CANCEL and ending.state is State.RETRY_WAIT
    if cancelled or job.state == State.CANCELLING:
        return Ending(State.CANCELLED, Reason.CANCELLED_BY_USER)
    if ending.state is not State.RETRY_WAIT:
        return ending
    if ending.blame and not _left_checkpoint(session, job):
        job.attempts_without_checkpoint += 1
        if job.attempts_without_checkpoint >= settings.max_attempts_without_checkpoint:
            return _given_up(job, ending)
    if job.desired == Desired.PAUSE:
        return Ending(State.PAUSED, Reason.PAUSED_BY_USER)
    return ending


def _by_a_cheaper_plan(session: Session, job: Job, ending: Ending) -> Ending:
    """Out of memory is no fault while a plan with less of it is left."""
    step = after_out_of_memory(job.spec["training"], alive(session, job).plan, job.gpus)
    if step is None:
        return replace(ending, message=f"{ending.message}. {NOTHING_CHEAPER}")
    job.training_plan = step.plan
    data = {"reason": ending.reason, "plan": step.plan}
    record_event(session, job, f"{ending.message}: {step.changes}", "warn", data=data)
    return Ending(State.RETRY_WAIT, Reason.OOM, exit_code=ending.exit_code, blame=False)


def _left_checkpoint(session: Session, job: Job) -> bool:
    found = select(exists().where(Checkpoint.job_id == job.id, Checkpoint.epoch == job.epoch))
    return bool(session.scalar(found))


def _given_up(job: Job, ending: Ending) -> Ending:
    cause = ending.message or f"The last one ended with the reason {ending.reason}."
    message = f"{job.attempts_without_checkpoint} attempts in a row left no new checkpoint. {cause}"
    return Ending(State.FAILED, Reason.MAX_ATTEMPTS, message)


def _end(job: Job, final: State) -> None:
    current = State(job.state)
    for via in _ON_THE_WAY.get(final, ()):
        if final in TRANSITIONS[current]:
            break
        if via in TRANSITIONS[current] and final in TRANSITIONS[via]:
            _move(job, via)
            break
    _move(job, final)


def _move(job: Job, following: State) -> None:
    check_transition(State(job.state), following)
    job.state = following
    job.version += 1


def run(job: Job) -> None:
    """The held job's ranks have started."""
    if job.state == State.STARTING:
        _move(job, State.RUNNING)
    if job.started_at is None:
        job.started_at = func.now()


def _announce(session: Session, job: Job, ending: Ending) -> None:
    cause = f" ({ending.reason})" if ending.reason else ""
    said = f": {ending.message}" if ending.message else ""
    match ending.state:
        case State.SUCCEEDED:
            record_event(session, job, "The job has successfully completed")
        case State.CANCELLED:
            record_event(session, job, "The job has been cancelled")
        case State.PAUSED:
            record_event(session, job, "The job is paused")
        case State.RETRY_WAIT:
            level = "warn" if ending.reason else "info"
            record_event(session, job, f"Attempt {job.epoch} ended{cause} and will be repeated{said}", level)
        case _:
            record_event(session, job, f"The job has failed{cause}{said}", "error")


def record_event(
    session: Session,
    job: Job,
    message: str,
    level: str = "info",
    kind: str = "message",
    data: dict[str, Any] | None = None,
    at: float | None = None,
) -> None:
    """One line of the job's history, and a new version of the job. ``at``: Unix seconds; now by default."""
    created_at = func.now() if at is None else datetime.fromtimestamp(at, UTC)
    session.add(
        Event(job_id=job.id, level=level, type=kind, message=message, data=data or {}, created_at=created_at)
    )
    job.version += 1
