"""Taking a queued job: one transaction that bumps the epoch, takes lease and GPUs, inserts the attempt."""

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.orm import Session

from jobs.plans import plan_of
from jobs.settings import Settings
from jobs.state import Desired, Phase, State, check_transition
from jobs.tables import Attempt, Gpu, Host, Job


@dataclass(frozen=True)
class ClaimedJob:
    """What the host has to start a supervisor for."""

    job_id: str
    epoch: int
    gpus: tuple[int, ...]
    """Indices of the host's GPU rows that the attempt holds."""


def claim(
    session: Session, settings: Settings, host: str, boot_id: str, job_id: str | None = None
) -> ClaimedJob | None:
    """Claim the first job in the queue that fits on this host now, or the one named; None when there is none.

    Any number of hosts and threads may call it at once: SKIP LOCKED gives each job and each GPU to one.
    """
    job = _first_in_queue(session, host, job_id)
    if job is None:
        return None
    gpus = _take_gpus(session, host, job.gpus)
    if len(gpus) < job.gpus:
        # Another claim of this host got there first. Nothing is written; the next sweep tries again.
        return None
    attempt = _start_attempt(session, settings, job, host, boot_id)
    for gpu in gpus:
        gpu.attempt_id = attempt.id
    return ClaimedJob(job.id, job.epoch, tuple(gpu.idx for gpu in gpus))


def promote(session: Session) -> int:
    """Put jobs whose delay after a lost attempt has passed back into the queue; returns how many."""
    check_transition(State.RETRY_WAIT, State.QUEUED)
    promoted = session.execute(
        update(Job)
        .where(Job.state == State.RETRY_WAIT, Job.desired == Desired.RUN, Job.run_at <= func.now())
        .values(state=State.QUEUED, version=Job.version + 1)
        .returning(Job.id)
    )
    return len(promoted.all())


def _first_in_queue(session: Session, host: str, job_id: str | None) -> Job | None:
    free = select(func.count()).where(_free(host)).scalar_subquery()
    waiting = select(Job).where(
        Job.state == State.QUEUED,
        Job.desired == Desired.RUN,
        Job.run_at <= func.now(),
        Job.gpus <= free,
    )
    if job_id is not None:
        waiting = waiting.where(Job.id == job_id)
    first = waiting.order_by(Job.priority.desc(), Job.created_at, Job.id).limit(1)
    return session.scalars(
        first.with_for_update(skip_locked=True).execution_options(populate_existing=True)
    ).one_or_none()


def _take_gpus(session: Session, host: str, count: int) -> list[Gpu]:
    free = select(Gpu).where(_free(host)).order_by(Gpu.idx).limit(count)
    return list(
        session.scalars(free.with_for_update(skip_locked=True).execution_options(populate_existing=True))
    )


def _free(host: str) -> ColumnElement[bool]:
    # A host that came back with fewer devices keeps rows above its slots until their attempts end.
    slots = select(Host.slots).where(Host.host == host).scalar_subquery()
    return (Gpu.host == host) & Gpu.attempt_id.is_(None) & (Gpu.idx < slots)


def _start_attempt(session: Session, settings: Settings, job: Job, host: str, boot_id: str) -> Attempt:
    check_transition(State(job.state), State.STARTING)
    job.state = State.STARTING
    job.phase = Phase.RECOVERING if job.attempts else Phase.STARTING
    job.reason = None
    job.epoch += 1
    job.attempts += 1
    job.worker = host
    job.heartbeat_seq += 1
    job.lease_until = func.now() + timedelta(seconds=settings.lease_seconds)
    job.version += 1
    plan = job.training_plan or plan_of(job.spec["training"])
    attempt = Attempt(job_id=job.id, epoch=job.epoch, host=host, boot_id=boot_id, plan=plan)
    session.add(attempt)
    session.flush()
    return attempt
